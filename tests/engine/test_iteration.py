import pytest
import torch
import torch._dynamo

from dualmcmc import settings
from dualmcmc.config import Config
from dualmcmc.data.feed import Feed
from dualmcmc.data.store import Memory
from dualmcmc.engine.accelerate import choose
from dualmcmc.engine.ema import MovingAverage
from dualmcmc.engine.iteration import Iteration
from dualmcmc.engine.state import TrainState
from tests.conftest import nothing_plain, tiny

CPU = torch.device("cpu")


def make(config: Config, note=lambda text: None) -> Iteration:
    shape = (40, config.data.channels, config.data.size, config.data.size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    feed = Feed(Memory(pixels), config.seed, config.train.batch, CPU, flip=config.data.flip)
    iteration = Iteration(config, TrainState(config, CPU), feed, choose(config.engine, CPU))
    iteration.prepare(note=note)
    return iteration


def weights_after(config: Config, count: int = 3) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    iteration = make(config)
    for _ in range(count):
        iteration()
    averages = {f"ema.{name}": value for name, value in iteration.state.ema.nets.state_dict().items()}
    return iteration.state.trio.state_dict() | averages, iteration.window.read(count)


def assert_same(ours, plain, atol):
    assert ours[1] == pytest.approx(plain[1], rel=1e-4)
    for name, value in plain[0].items():
        assert torch.allclose(ours[0][name].float(), value.float(), atol=atol), name


@pytest.mark.parametrize("flip", ["false", "true"])
def test_compiled_and_eager_learn_the_same(quick_compiler, flip):
    plain = weights_after(tiny(f"data.flip={flip}"))
    assert_same(weights_after(tiny("engine.mode=compiled", f"data.flip={flip}")), plain, 1e-5)


@pytest.mark.parametrize("size", [1, 5, 8, 100])
def test_a_split_batch_learns_the_same(size):
    assert_same(weights_after(tiny(f"engine.micro_batch={size}")), weights_after(tiny()), 1e-5)


def test_a_split_batch_learns_the_same_in_the_authors_form(quick_compiler):
    changes = ["teaching.second_x_chain=true", "teaching.start_noise=0.1"]
    plain = weights_after(tiny(*changes))
    assert_same(weights_after(tiny("engine.micro_batch=4", "engine.mode=compiled", *changes)), plain, 1e-5)


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("cifar10-resnet", []),
        ("digits", ["teaching.second_x_chain=true"]),
        ("digits", ["engine.micro_batch=3"]),  # parts of 3, 2 and 1
    ],
)
def test_all_is_compiled_before_training_begins(quick_compiler, preset, changes):
    widths = [f"nets.{name}_width=2" for name in ("energy", "generator", "inference")]
    steps = ["teaching.x_chain.steps=2", "teaching.z_chain.steps=2", "train.batch=4", "engine.mode=compiled"]
    iteration = make(settings.load_config(preset, [*widths, *steps, *changes]))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before >= 5
    with nothing_plain(iteration.networks):
        for _ in range(2):
            iteration()
    iteration.try_out()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_the_average_is_of_the_images_seen():
    iteration = make(tiny())
    expected = MovingAverage(iteration.state.trio, iteration.config.ema)
    for number in range(1, 4):
        iteration()
        expected.set_share(16 * number, 16)
        expected.fold_in()
    for mine, other in zip(iteration.state.ema.nets.parameters(), expected.nets.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-7)


@pytest.mark.parametrize("engine", ["engine.mode=eager", "engine.mode=compiled", "engine.micro_batch=3"])
def test_trying_out_changes_nothing(quick_compiler, engine):
    iteration = make(tiny(engine))
    iteration()
    state = iteration.state
    before = {name: value.clone() for name, value in state.trio.state_dict().items()}
    noise = state.rng.get_state()
    numbers = iteration.try_out()
    assert numbers["energy_gap"] == numbers["energy_gap"]
    assert all(torch.equal(state.trio.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(state.rng.get_state(), noise)
    assert iteration.window.read(1)["energy_gap"] != numbers["energy_gap"]  # it has a window of its own


def test_a_compiler_that_fails_is_said_and_done_without(monkeypatch):
    def broken(layers):
        def fail(*given):
            raise RuntimeError("no compiler")

        return fail

    monkeypatch.setattr("dualmcmc.engine.accelerate._compiler", lambda *_: broken)
    notes = []
    iteration = make(tiny("engine.mode=compiled"), notes.append)
    assert notes == ["not compiled (RuntimeError: no compiler): going on eagerly"]
    assert iteration.means.in_words == "eager, float32"
    iteration()
    assert iteration.window.read(1)["x_moved"] > 0


def test_other_settings_for_the_same_networks():
    iteration = make(tiny())
    iteration()
    iteration.window.read(1)
    iteration.go_on_with(tiny("teaching.x_chain.steps=0"))
    iteration()
    assert iteration.window.read(1)["x_moved"] == 0
