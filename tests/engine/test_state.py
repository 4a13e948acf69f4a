import pytest
import torch

from dualmcmc.engine.state import TrainState, load_live_trio
from dualmcmc.errors import UserError
from tests.conftest import tiny

CPU = torch.device("cpu")


def test_each_network_has_its_own_adam():
    names = ("energy", "generator", "inference")
    words = [
        f"optim.{name}.{key}={value}"
        for index, name in enumerate(names)
        for key, value in (
            ("lr", 0.1 + index), ("betas", f"[0.{index}, 0.5]"), ("eps", 1e-6 * (1 + index)),
            ("weight_decay", 0.01 * index), ("lr_decay", 0.5 - 0.1 * index),
        )
    ]  # fmt: skip
    state = TrainState(tiny(*words), CPU)
    for index, name in enumerate(names):
        optimizer = getattr(state.optimizers, name)
        (group,) = optimizer.param_groups
        assert group["lr"] == pytest.approx(0.1 + index)
        assert group["betas"] == (pytest.approx(0.1 * index), 0.5)
        assert group["eps"] == pytest.approx(1e-6 * (1 + index))
        assert group["weight_decay"] == pytest.approx(0.01 * index)
        assert group["params"] == list(getattr(state.trio, name).parameters())
    state.set_learning_rates(epoch=2)
    for index, name in enumerate(names):
        rate = getattr(state.optimizers, name).param_groups[0]["lr"]
        assert rate == pytest.approx((0.1 + index) * (0.5 - 0.1 * index) ** 2)


def test_learning_rates_rise_and_fall():
    words = ("train.images=1000", "train.batch=10", "optim.warmup=100", "optim.cooldown=0.4", "optim.energy.lr=0.5")
    state = TrainState(tiny(*words, "optim.energy.lr_decay=0.9"), CPU)
    seen = {}
    for images in (0, 40, 90, 100, 590, 600, 800, 990):
        state.images = images
        state.set_learning_rates(epoch=3)
        seen[images] = state.optimizers.energy.param_groups[0]["lr"] / (0.5 * 0.9**3)
    expected = {0: 0.1, 40: 0.5, 90: 1, 100: 1, 590: 1, 600: 1, 800: 0.5, 990: 0.025}
    assert seen == pytest.approx(expected)


def test_a_run_may_rise_and_fall_all_the_way():
    optim = tiny("optim.warmup=100", "optim.cooldown=1").optim
    rates = [optim.rate(images, 10, 100) for images in range(0, 100, 10)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_what_is_no_full_state(tmp_path):
    state = TrainState(tiny(), CPU, data="abc")
    state.save_snapshot(tmp_path / "snapshot.safetensors")
    with pytest.raises(UserError, match="a snapshot cannot be resumed"):
        state.load(tmp_path / "snapshot.safetensors")
    state.save(tmp_path / "state.safetensors")
    assert state.load(tmp_path / "state.safetensors")
    with pytest.raises(UserError, match="other images"):
        TrainState(tiny(), CPU, data="xyz").load(tmp_path / "state.safetensors")
    with pytest.raises(UserError, match="does not fit these networks"):
        TrainState(tiny("nets.energy_width=8"), CPU, data="abc").load(tmp_path / "state.safetensors")


def test_the_weights_as_trained(tmp_path):
    state = TrainState(tiny(), CPU)
    state.save(tmp_path / "state.safetensors")
    config, trio = load_live_trio(tmp_path / "state.safetensors")
    assert config == tiny()
    assert all(torch.equal(a, b) for a, b in zip(trio.parameters(), state.trio.parameters(), strict=True))
