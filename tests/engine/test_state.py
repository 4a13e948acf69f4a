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
