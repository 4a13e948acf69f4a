import math

import pytest
import torch
import torch._dynamo

from dualmcmc.data.loader import BatchLoader
from dualmcmc.data.store import MemoryStore
from dualmcmc.engine import plan
from dualmcmc.engine.plan import resolve_plan
from dualmcmc.engine.state import EMA, TrainState
from dualmcmc.engine.step import StatsWindow, TrainStep
from tests.conftest import compiled_only, tiny

CPU = torch.device("cpu")


def make_step(*overrides: str, notify=pytest.fail) -> TrainStep:
    config = tiny(*overrides)
    shape = (40, config.data.channels, config.data.size, config.data.size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    loader = BatchLoader(MemoryStore(pixels), config.seed, config.train.batch, CPU, flip=config.data.flip)
    step = TrainStep(config, TrainState(config, CPU), loader, resolve_plan(config.engine, CPU))
    step.prepare(notify=notify)
    return step


def assert_same_training(step: TrainStep, *overrides: str) -> None:
    """The same weights, averages and statistics as an eager step with `overrides` after as many iterations."""
    plain = make_step(*overrides)
    for _ in range(step.state.iteration):
        plain()
    ours, expected = step.window.read(step.state.iteration), plain.window.read(step.state.iteration)
    assert ours == pytest.approx(expected, rel=1e-4)
    for net, other in ((step.state.trio, plain.state.trio), (step.state.ema.nets, plain.state.ema.nets)):
        for name, value in other.state_dict().items():
            assert torch.allclose(net.state_dict()[name], value, atol=1e-5), name


def test_compiled_is_the_same_as_eager(quick_compiler):
    """And all is compiled before the first iteration, in the form with the most to compile."""
    overrides = ["teaching.second_x_chain=true", "teaching.start_noise=0.1", "data.flip=true"]
    step = make_step(*overrides, "engine.mode=compiled", "engine.micro_batch=8")
    assert count_graphs() == 6
    with compiled_only(step.executors):
        for _ in range(2):
            step()
    before = {name: value.clone() for name, value in step.state.trio.state_dict().items()}
    step.dry_run()
    assert count_graphs() == 6
    assert all(torch.equal(step.state.trio.state_dict()[name], value) for name, value in before.items())
    assert_same_training(step, *overrides)


def count_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("micro_batch", [5, 100])
def test_micro_batches_are_the_same_as_whole_batches(micro_batch):
    step = make_step(f"engine.micro_batch={micro_batch}")
    for _ in range(2):
        step()
    assert_same_training(step)


def test_augmentation_follows_the_images_seen():
    step = make_step("teaching.energy_augment=0.5", "teaching.energy_augment_ramp=320")  # 0.05 per two batches
    used = []
    for _ in range(5):
        step()
        used.append(step._teaching.energy_augment)
    assert used == pytest.approx([0, 0, 0.05, 0.05, 0.1])
    step.reconfigure(tiny("teaching.energy_augment=0.8"))
    assert step._teaching.energy_augment == 0.8


def test_ema_follows_the_images_seen():
    step = make_step()
    expected = EMA(step.state.trio, step.config.ema)
    for number in range(1, 4):
        step()
        expected.set_decay(16 * number, 16)
        expected.update()
    for ours, other in zip(step.state.ema.nets.parameters(), expected.nets.parameters(), strict=True):
        assert torch.allclose(ours, other, atol=1e-7)


@pytest.mark.parametrize("overrides", [[], ["engine.micro_batch=3"], ["nets.kind=resnet"]])
def test_dry_run_changes_nothing(overrides):
    step = make_step(*overrides)
    step()
    state = step.state
    before = {name: value.clone() for name, value in state.trio.state_dict().items()}
    noise = state.rng.get_state()
    stats = step.dry_run()
    assert math.isfinite(stats["energy_gap"])
    assert all(torch.equal(state.trio.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(state.rng.get_state(), noise)
    assert step.window.read(1)["energy_gap"] != stats["energy_gap"]  # the window has not changed either


def test_compile_failure_is_reported(monkeypatch):
    def broken(layers):
        def fail(*_):
            raise RuntimeError("no compiler")

        return fail

    monkeypatch.setattr(plan, "make_compiler", lambda *_: broken)
    notes = []
    step = make_step("engine.mode=compiled", notify=notes.append)
    assert notes == ["running eagerly: compilation failed (RuntimeError: no compiler)"]
    assert step.plan.summary == "eager, float32"
    step()
    assert step.window.read(1)["x_displacement_rms"] > 0


def test_reconfigure():
    step = make_step()
    step()
    step.reconfigure(tiny("teaching.x_chain.steps=0"))
    step()
    assert step.window.read(1)["x_displacement_rms"] == 0


def test_window_means_and_largest_gap():
    window = StatsWindow(3)
    for gap, loss in ((1.0, 2.0), (-5.0, 4.0)):
        window.add({"energy_gap": torch.tensor(gap), "loss": torch.tensor(loss)})
    assert window.read(2) == {"energy_gap": -2.0, "loss": 3.0, "energy_gap_max": 5.0}
    window.add({"energy_gap": torch.tensor(0.5), "loss": torch.tensor(1.0)})
    assert window.read(1) == {"energy_gap": 0.5, "loss": 1.0, "energy_gap_max": 0.5}
    for gap in (1.0, 2.0, 3.0):  # these replace the first ones
        window.add({"energy_gap": torch.tensor(gap), "loss": torch.tensor(gap)})
    assert window.read(3) == {"energy_gap": 2.0, "loss": 2.0, "energy_gap_max": 3.0}


@pytest.mark.parametrize("position", range(3))
def test_window_shows_a_single_nan(position):
    window = StatsWindow(3)
    for index in range(3):
        window.add({"energy_gap": torch.tensor(math.nan if index == position else 0.0)})
    stats = window.read(3)
    assert math.isnan(stats["energy_gap"])
    assert math.isnan(stats["energy_gap_max"])


def test_window_copies_its_input():
    window, value = StatsWindow(), torch.tensor(1.0)
    window.add({"energy_gap": value})
    window.add({"energy_gap": torch.tensor(2.0)})
    assert value == 1.0
