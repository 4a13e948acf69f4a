"""What only a GPU can show: a captured iteration is the same iteration, and stopping in between changes nothing."""

import gc
import subprocess
import sys
import time

import pytest
import torch
from torch._dynamo.utils import counters

from dualmcmc import config_io, rng
from dualmcmc.config import Config
from dualmcmc.data.loader import BatchLoader
from dualmcmc.data.store import MemoryStore
from dualmcmc.engine import checkpoint, compile_worker, compiler, cuda
from dualmcmc.engine.cuda import WARMUP_RUNS, StreamLanes
from dualmcmc.engine.plan import resolve_plan
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.state import TrainState
from dualmcmc.engine.step import TrainStep
from dualmcmc.engine.trainer import train
from dualmcmc.methods import sequential
from tests.conftest import TINY, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _shared_compiler_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path_factory.getbasetemp() / "compiled"))
    monkeypatch.setattr(compiler, "CACHE_IS_OURS", False)
    yield
    gc.collect()
    torch.cuda.empty_cache()


def small_config(*overrides: str, preset: str = "cifar10-simple") -> Config:
    widths = [f"nets.{name}_width=8" for name in ("energy", "generator", "inference")]
    short = ["teaching.x_chain.steps=3", "teaching.z_chain.steps=2", "train.batch=16", "data.flip=true"]
    return config_io.load_config(preset, [*widths, *short, *overrides])


def make_step(config: Config) -> TrainStep:
    shape = (max(100, config.train.batch), config.data.channels, config.data.size, config.data.size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    store = MemoryStore(pixels)
    loader = BatchLoader(store, config.seed, config.train.batch, CUDA, config.data.place, config.data.flip)
    step = TrainStep(config, TrainState(config, CUDA, images=len(store)), loader, resolve_plan(config.engine, CUDA))
    step.prepare(notify=pytest.fail)
    return step


def run(step: TrainStep, count: int) -> dict[str, torch.Tensor]:
    """Weights and averages after `count` more iterations."""
    for _ in range(count):
        step()
    weights, averages = step.state.trio.state_dict(), step.state.ema.nets.state_dict(prefix="ema.")
    return {name: value.clone() for name, value in (weights | averages).items()}


def assert_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("precision", ["bfloat16", "tf32"])
def test_takes_from_the_cache_what_other_processes_have_compiled(monkeypatch, tmp_path, precision):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(compile_worker.WORKER_VARIABLE)
    monkeypatch.setattr(compile_worker, "cpu_count", lambda: 4)
    torch._dynamo.reset()
    counters.clear()
    make_step(small_config(f"engine.precision={precision}", preset="cifar10-resnet-128"))
    assert counters["aot_autograd"]["autograd_cache_hit"] == counters["aot_autograd"]["total"] == 5
    assert counters["inductor"]["fxgraph_cache_miss"] == 0


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("teaching.energy_consistency=10",),
        ("teaching.energy_augment=0.5",),
    ],
)
def test_captured_iteration_is_the_same_iteration(monkeypatch, overrides):
    """Weights, averages, noise and statistics, bit for bit."""
    count = WARMUP_RUNS + 5
    captured = make_step(small_config(*overrides, preset="cifar10-resnet"))
    expected = run(captured, count)
    assert captured._run._graph is not None
    monkeypatch.setattr(cuda, "WARMUP_RUNS", 1000)
    launched = make_step(small_config(*overrides, preset="cifar10-resnet"))
    assert_equal(run(launched, count), expected)
    assert launched._run._graph is None
    assert torch.equal(captured.state.rng.get_state(), launched.state.rng.get_state())
    assert captured.window.read(count) == launched.window.read(count)


@pytest.mark.parametrize("method", ["triangle", "no-mcmc", "persistent", "abp", "rae"])
def test_captured_iteration_of_other_methods(monkeypatch, method):
    """The same as launched from Python, with what they remember."""
    count, settings = WARMUP_RUNS + 4, (f"method={method}", "data.flip=false", "teaching.buffer_size=50")
    captured = make_step(small_config(*settings))
    expected = run(captured, count)
    assert captured._run._graph is not None
    monkeypatch.setattr(cuda, "WARMUP_RUNS", 1000)
    launched = make_step(small_config(*settings))
    assert_equal(run(launched, count), expected)
    for name, value in captured.state.memory.items():
        assert torch.equal(launched.state.memory[name], value), name
    assert bool(captured.state.memory) == (method in ("persistent", "abp", "rae"))


def test_ramp_recaptures_the_iteration(monkeypatch):
    """The settings that a captured iteration contains change after 6 and 12 iterations."""
    ramp = ("teaching.energy_augment=0.5", "teaching.energy_augment_ramp=960")
    captured = make_step(small_config(*ramp))
    before = run(captured, 6)
    first = captured._run
    assert first._graph is not None
    expected = run(captured, 5)
    assert captured._run is not first
    assert captured._run._graph is not None
    monkeypatch.setattr(cuda, "WARMUP_RUNS", 1000)
    launched = make_step(small_config(*ramp))
    assert_equal(run(launched, 6), before)
    assert_equal(run(launched, 5), expected)


def test_one_launched_process_is_the_plain_run(tmp_path):
    """With DDP and NCCL inside the graph: the same weights, bit for bit."""
    words = ["-m", "dualmcmc", "train", "digits", *TINY, "train.images=640", "engine.mode=compiled", "--out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    states = []
    for name, launcher in (("plain", [sys.executable]), ("launched", torchrun)):
        done = subprocess.run([*launcher, *words, str(tmp_path / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("1 process," in done.stderr) == (name == "launched")
        states.append(checkpoint.load(RunFolder(tmp_path / name).latest_state())[0])
    assert_equal(*states)


@pytest.mark.filterwarnings("error:The AccumulateGrad node's stream")
@pytest.mark.parametrize("overrides", [[], ["teaching.second_x_chain=true"], ["engine.micro_batch=8"]])
def test_stream_lanes_are_the_same_as_sequential(overrides):
    lanes, plain = (make_step(small_config(*overrides, preset="cifar10-resnet")) for _ in range(2))
    assert isinstance(lanes._lanes, StreamLanes)
    plain._lanes = sequential
    assert_equal(run(lanes, WARMUP_RUNS + 3), run(plain, WARMUP_RUNS + 3))


def test_stream_lanes_wait_for_each_other():
    lanes, generator = StreamLanes(CUDA), rng.make_generator(0, CUDA)
    for _ in range(20):
        x = torch.randn(500, 500, device=CUDA, generator=generator)
        with lanes() as lane:
            with lane():
                product = x @ x
            with lane():
                sine = x.sin()
            with lane():
                total = x.sum()
        assert torch.equal(product, x @ x)
        assert torch.equal(sine, x.sin())
        assert torch.equal(total, x.sum())


def test_images_may_stream_during_capture(monkeypatch):
    """Reader threads wait for their copies at any time."""
    read = MemoryStore.read

    def slow_read(self, indices, out):
        time.sleep(0.01)
        read(self, indices, out)

    monkeypatch.setattr(MemoryStore, "read", slow_read)
    for _ in range(2):
        step = make_step(small_config("data.place=stream", "teaching.x_chain.steps=30"))
        run(step, WARMUP_RUNS + 5)
        step.loader.close()


def test_noise_advances_as_in_eager_mode():
    compiled, eager = make_step(small_config()), make_step(small_config("engine.mode=eager"))
    run(compiled, WARMUP_RUNS + 4)
    run(eager, WARMUP_RUNS + 4)
    assert torch.equal(compiled.state.rng.get_state(), eager.state.rng.get_state())


def test_learning_rates_are_not_constants_of_the_graph():
    step = make_step(small_config("optim.generator.lr_decay=0.5"))
    optimizers = step.state.optimizers
    run(step, WARMUP_RUNS + 2)
    before = float(optimizers.generator.param_groups[0]["lr"])
    run(step, 20)  # several epochs: batches of 16 from 100 images
    assert float(optimizers.generator.param_groups[0]["lr"]) < before / 4
    weights = run(step, 0)
    step.state.set_learning_rates = lambda epoch: [
        group["lr"].fill_(0) for optimizer in optimizers for group in optimizer.param_groups
    ]
    after = run(step, 2)
    for name, _ in step.state.trio.named_parameters():
        assert torch.equal(after[name], weights[name]), name


def test_iteration_does_not_synchronize():
    step = make_step(small_config())
    run(step, WARMUP_RUNS + 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("place", ["device", "stream"])
def test_resume_is_exact(tmp_path, place):
    config = tiny("train.images=640", "train.save_every=320", "train.sample_every=640", f"data.place={place}")
    assert train(config, tmp_path / "whole", CUDA).engine == "compiled, bfloat16"
    train(config, tmp_path / "parts", CUDA, max_images=320)
    train(config, tmp_path / "parts", CUDA, resume=True)
    assert_equal(*(checkpoint.load(RunFolder(tmp_path / name).state_path(640))[0] for name in ("parts", "whole")))


def test_run_may_resume_in_another_mode(tmp_path):
    train(tiny("train.images=320", "train.save_every=160"), tmp_path / "run", CUDA, max_images=160)
    result = train(tiny("train.images=320", "engine.mode=eager"), tmp_path / "run", CUDA, resume=True)
    assert (result.engine, result.images) == ("eager, tf32", 320)


def test_micro_batches_need_less_memory():
    peaks = []
    for overrides in ([], ["engine.micro_batch=16"]):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step = make_step(small_config("train.batch=128", "data.flip=false", *overrides, preset="cifar10-resnet"))
        run(step, WARMUP_RUNS + 2)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del step
    assert peaks[1] < 0.6 * peaks[0]


def test_capture_failure_is_one_line():
    """In its own process: torch's generators are unusable afterwards."""
    code = (
        "import torch; from dualmcmc.engine.cuda import CudaGraph; x = torch.zeros((), device='cuda'); "
        "graph = CudaGraph(lambda: x.item(), torch.device('cuda')); [graph() for _ in range(9)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "UserError: cannot capture an iteration as a CUDA graph (" in last
    assert last.endswith("add engine.mode=eager.")
