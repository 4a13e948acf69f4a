"""What only a GPU can show: that a captured iteration is the iteration, and that a stop in between leaves no trace."""

import gc
import subprocess
import sys
import time

import pytest
import torch

from dualmcmc import rng, settings
from dualmcmc.config import Config
from dualmcmc.data.feed import Feed
from dualmcmc.data.store import Memory
from dualmcmc.engine import checkpoint, graph
from dualmcmc.engine.accelerate import choose
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.graph import WARM_UP
from dualmcmc.engine.iteration import Iteration
from dualmcmc.engine.loop import train
from dualmcmc.engine.state import TrainState
from dualmcmc.engine.streams import SideBySide
from dualmcmc.methods.dual_mcmc import in_turn
from tests.conftest import TINY, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _kept_between_tests(monkeypatch, tmp_path_factory):
    """Compiled code may be shared: it is the same for all."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    yield
    gc.collect()
    torch.cuda.empty_cache()


def small(*changes: str, preset: str = "cifar10-simple") -> Config:
    widths = [f"nets.{name}_width=8" for name in ("energy", "generator", "inference")]
    steps = ["teaching.x_chain.steps=3", "teaching.z_chain.steps=2", "train.batch=16", "data.flip=true"]
    return settings.load_config(preset, [*widths, *steps, *changes])


def make(config: Config) -> Iteration:
    shape = (max(100, config.train.batch), config.data.channels, config.data.size, config.data.size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    feed = Feed(Memory(pixels), config.seed, config.train.batch, CUDA, config.data.place, config.data.flip)
    iteration = Iteration(config, TrainState(config, CUDA), feed, choose(config.engine, CUDA))
    iteration.prepare(note=pytest.fail)
    return iteration


def run(iteration: Iteration, count: int) -> dict[str, torch.Tensor]:
    for _ in range(count):
        iteration()
    return {name: value.clone() for name, value in iteration.state.trio.state_dict().items()} | {
        f"ema.{name}": value.clone() for name, value in iteration.state.ema.nets.state_dict().items()
    }


@pytest.mark.parametrize("changes", [(), ("teaching.energy_consistency=10",)])
def test_a_captured_iteration_is_the_iteration(monkeypatch, changes):
    """Weights, averages, noise and statistics: bit for bit, whether launched one by one or as a graph."""
    captured = make(small(*changes, preset="cifar10-resnet"))
    first = run(captured, WARM_UP + 5)
    assert captured._work._graph is not None
    monkeypatch.setattr(graph, "WARM_UP", 1000)
    launched = make(small(*changes, preset="cifar10-resnet"))
    second = run(launched, WARM_UP + 5)
    assert launched._work._graph is None
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert torch.equal(captured.state.rng.get_state(), launched.state.rng.get_state())
    count = WARM_UP + 5
    assert captured.window.read(count) == launched.window.read(count)


def test_one_process_of_a_launcher_is_the_plain_run(tmp_path):
    """Through DDP, NCCL and a graph that holds both: the same weights, bit for bit."""
    words = ["-m", "dualmcmc", "train", "digits", *TINY, "train.images=640", "engine.mode=compiled", "--out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    states = []
    for name, launcher in (("plain", [sys.executable]), ("launched", torchrun)):
        done = subprocess.run([*launcher, *words, str(tmp_path / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("1 process," in done.stderr) == (name == "launched")
        states.append(checkpoint.load(RunFolder(tmp_path / name).latest_state())[0])
    plain, launched = states
    for tensor, value in plain.items():
        assert torch.equal(launched[tensor], value), tensor


@pytest.mark.filterwarnings("error:The AccumulateGrad node's stream")
@pytest.mark.parametrize("changes", [[], ["teaching.second_x_chain=true"], ["engine.micro_batch=8"]])
def test_side_by_side_is_in_turn(changes):
    together, alone = (make(small(*changes, preset="cifar10-resnet")) for _ in range(2))
    alone._together = in_turn
    first, second = run(together, WARM_UP + 3), run(alone, WARM_UP + 3)
    assert all(torch.equal(second[name], value) for name, value in first.items())


def test_images_may_stream_while_it_is_captured(monkeypatch):
    """Threads wait for their copies at any time, also in the middle of a capture."""
    slow = Memory.read

    def read(self, indices, out):
        time.sleep(0.01)
        slow(self, indices, out)

    monkeypatch.setattr(Memory, "read", read)
    for _ in range(2):
        iteration = make(small("data.place=stream", "teaching.x_chain.steps=30"))
        run(iteration, WARM_UP + 5)
        iteration.feed.close()


def test_noise_goes_on_as_it_would_eagerly():
    compiled, eager = make(small()), make(small("engine.mode=eager"))
    run(compiled, WARM_UP + 4)
    run(eager, WARM_UP + 4)
    assert torch.equal(compiled.state.rng.get_state(), eager.state.rng.get_state())


def test_learning_rates_and_the_average_are_not_frozen_into_the_graph():
    iteration = make(small("optim.generator.lr_decay=0.5"))
    run(iteration, WARM_UP + 2)
    before = float(iteration.state.optimizers.generator.param_groups[0]["lr"])
    run(iteration, 20)  # batches of 16 of 100: several epochs
    assert float(iteration.state.optimizers.generator.param_groups[0]["lr"]) < before / 4
    frozen_weights = run(iteration, 0)
    iteration.state.set_learning_rates = lambda epoch: [
        group["lr"].fill_(0) for optimizer in iteration.state.optimizers for group in optimizer.param_groups
    ]
    after = run(iteration, 2)
    for name, _ in iteration.state.trio.named_parameters():
        assert torch.equal(after[name], frozen_weights[name]), name


def test_an_iteration_never_waits():
    iteration = make(small())
    run(iteration, WARM_UP + 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_count = 5
        for _ in range(run_count):
            iteration()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("place", ["device", "stream"])
def test_a_resumed_run_goes_on_exactly(tmp_path, place):
    changes = ["train.images=640", "train.save_every=320", "train.sample_every=640", f"data.place={place}"]
    config = tiny(*changes)
    whole = train(config, tmp_path / "whole", CUDA)
    assert whole.engine == "compiled, bfloat16"
    train(config, tmp_path / "halves", CUDA, max_images=320)
    train(config, tmp_path / "halves", CUDA, resume=True)
    states = [
        checkpoint.load(tmp_path / name / "states" / "000000000640.safetensors")[0] for name in ("whole", "halves")
    ]
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


def test_a_run_may_go_on_another_way(tmp_path):
    config = tiny("train.images=320", "train.save_every=160")
    train(config, tmp_path / "run", CUDA, max_images=160)
    outcome = train(tiny("train.images=320", "engine.mode=eager"), tmp_path / "run", CUDA, resume=True)
    assert outcome.engine == "eager, tf32"
    assert outcome.images == 320


def test_side_by_side_keeps_the_order_of_what_depends():
    together = SideBySide(CUDA)
    source = rng.generator(0, CUDA)
    for _ in range(20):
        x = torch.randn(500, 500, device=CUDA, generator=source)
        a, b, c = together(lambda x=x: x @ x, lambda x=x: x.sin(), lambda x=x: x.sum())
        assert torch.equal(a, x @ x)
        assert torch.equal(b, x.sin())
        assert torch.equal(c, x.sum())


def test_micro_batches_need_less_memory():
    peaks = []
    for changes in ([], ["engine.micro_batch=16"]):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        iteration = make(small("train.batch=128", "data.flip=false", *changes, preset="cifar10-resnet"))
        run(iteration, WARM_UP + 2)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del iteration
    assert peaks[1] < 0.6 * peaks[0]


def test_work_that_cannot_be_captured_is_refused_in_a_line():
    """In a process of its own: torch's random sources are of no use afterwards."""
    code = (
        "import torch; from dualmcmc.engine.graph import Graphed; x = torch.zeros((), device='cuda'); "
        "graphed = Graphed(lambda: x.item(), torch.device('cuda')); [graphed() for _ in range(9)]"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "UserError: an iteration cannot be captured as a CUDA graph here (" in answer.stderr.splitlines()[-1]
    assert answer.stderr.splitlines()[-1].endswith("add engine.mode=eager.")
