import pytest
import torch

from dualmcmc.config import Ema
from dualmcmc.data.store import MemoryStore
from dualmcmc.engine import checkpoint
from dualmcmc.engine.distributed import World
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.state import EMA, TrainState, latest_valid_state, load_state_without_ema, read_config
from dualmcmc.nets import build
from dualmcmc.nets.signal import mean_slope
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import from_uint8
from tests.conftest import tiny

CPU = torch.device("cpu")


def test_each_network_has_its_own_adam():
    names = ("energy", "generator", "inference")
    overrides = [
        f"optim.{name}.{key}={value}"
        for index, name in enumerate(names)
        for key, value in (
            ("lr", 0.1 + index), ("betas", f"[0.{index}, 0.5]"), ("eps", 1e-6 * (1 + index)),
            ("weight_decay", 0.01 * index), ("lr_decay", 0.5 - 0.1 * index),
        )
    ]  # fmt: skip
    state = TrainState(tiny(*overrides), CPU)
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
        lr = getattr(state.optimizers, name).param_groups[0]["lr"]
        assert lr == state.learning_rates[name] == pytest.approx((0.1 + index) * (0.5 - 0.1 * index) ** 2)


def test_warmup_and_cooldown():
    schedule = ("train.images=1000", "train.batch=10", "optim.warmup=100", "optim.cooldown=0.4")
    state = TrainState(tiny(*schedule, "optim.energy.lr=0.5", "optim.energy.lr_decay=0.9"), CPU)
    found = {}
    for images in (0, 40, 90, 100, 590, 600, 800, 990):
        state.images = images
        state.set_learning_rates(epoch=3)
        found[images] = state.optimizers.energy.param_groups[0]["lr"] / (0.5 * 0.9**3)
    expected = {0: 0.1, 40: 0.5, 90: 1, 100: 1, 590: 1, 600: 1, 800: 0.5, 990: 0.025}
    assert found == pytest.approx(expected)


def test_warmup_and_cooldown_may_overlap():
    optim = tiny("optim.warmup=100", "optim.cooldown=1").optim
    factors = [optim.lr_factor(images, 10, 100) for images in range(0, 100, 10)]
    assert factors == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize("average", [False, True])
def test_gains_of_the_energy_are_set_once_and_saved(tmp_path, average):
    images = MemoryStore(torch.randint(0, 256, (90, 1, 8, 8), dtype=torch.uint8))
    config = tiny("nets.energy_slope=0.7", f"ema.energy={average}")
    state = TrainState(config, CPU)
    state.normalize_energy(images)
    energy = state.ema.sampling_trio().energy
    slope = mean_slope(energy.eval(), from_uint8(images.tensor()))
    assert slope == pytest.approx(0.7, rel=0.1)  # of all images; the gains come from 64 of them
    state.save(tmp_path / "state.safetensors")
    other = TrainState(config, CPU)
    other.load(tmp_path / "state.safetensors")
    assert mean_slope(other.ema.sampling_trio().energy.eval(), from_uint8(images.tensor())) == slope
    plain = TrainState(tiny("nets.energy_slope=null"), CPU)
    before = {name: value.clone() for name, value in plain.trio.state_dict().items()}
    plain.normalize_energy(images)
    assert all(torch.equal(value, before[name]) for name, value in plain.trio.state_dict().items())


def test_states_that_cannot_be_resumed(tmp_path):
    state = TrainState(tiny(), CPU, data="abc")
    state.save_snapshot(tmp_path / "snapshot.safetensors")
    with pytest.raises(UserError, match="a snapshot cannot be resumed"):
        state.load(tmp_path / "snapshot.safetensors")
    state.save(tmp_path / "state.safetensors")
    assert state.load(tmp_path / "state.safetensors")
    with pytest.raises(UserError, match="other data"):
        TrainState(tiny(), CPU, data="xyz").load(tmp_path / "state.safetensors")
    with pytest.raises(UserError, match="does not match its networks"):
        TrainState(tiny("nets.energy_width=8"), CPU, data="abc").load(tmp_path / "state.safetensors")


def test_load_state_without_ema(tmp_path):
    state = TrainState(tiny(), CPU)
    with torch.no_grad():
        state.trio.generator.layers[0].weight.add_(1)  # the average differs
    state.save(tmp_path / "state.safetensors")
    tensors = load_state_without_ema(tmp_path / "state.safetensors").tensors
    assert tensors.keys() == state.trio.state_dict().keys()
    assert all(torch.equal(tensors[name], value) for name, value in state.trio.state_dict().items())


def test_config_of_an_earlier_version(tmp_path):
    """Guard settings have been renamed since."""
    state = TrainState(tiny("guard.max_rollbacks=7"), CPU)
    info = state._info()
    info["config"]["guard"] = {"rollbacks": 7, "x_moved": 2.5}
    checkpoint.save(tmp_path / "state.safetensors", state.trio.state_dict(), info)
    guard = read_config(tmp_path / "state.safetensors").guard
    assert (guard.max_rollbacks, guard.max_x_displacement) == (7, 2.5)


def test_latest_valid_state(tmp_path):
    folder = RunFolder(tmp_path)
    folder.states.mkdir()
    with pytest.raises(UserError, match="no saved state"):
        latest_valid_state(folder)
    paths = [folder.state_path(images) for images in (1, 2, 3)]
    for path in paths:
        checkpoint.save(path, {"a": torch.ones(1)}, {"images": int(path.stem)})
    assert latest_valid_state(folder) == (paths[2], [])
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    assert latest_valid_state(folder) == (paths[1], [paths[2]])
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(UserError, match="All saved states of the run are damaged"):
        latest_valid_state(folder)


def test_ranks_that_differ_save_nothing():
    class Other(World):
        size = 2

        def all_gather(self, value):
            return [value, [number + (index == 5) * 1e-6 for index, number in enumerate(value)]]

    state = TrainState(tiny(), CPU, world=Other())
    name = list(state.trio.state_dict())[5]
    with pytest.raises(UserError, match=f"ranks 0 and 1 have different values of {name}: nothing was saved"):
        state.synchronize()


def update(ema: EMA, images: int, batch: int) -> None:
    ema.set_decay(images, batch)
    ema.update()


def test_ema_half_life():
    trio = build(tiny())
    ema = EMA(trio, Ema(half_life=80, rampup=1))
    old = [p.clone() for p in trio.generator.parameters()]
    with torch.no_grad():
        for parameter in trio.generator.parameters():
            parameter.add_(1)
    for images in range(8, 81, 8):
        update(ema, images, 8)
    for before, average in zip(old, ema.nets["generator"].parameters(), strict=True):
        assert torch.allclose(average, before + 0.5, atol=1e-5)


def test_ema_does_not_depend_on_the_batch_size():
    trio = build(tiny())
    weight = trio.generator.layers[0].weight
    initial, averages = weight.detach().clone(), []
    for batch in (5, 20):
        ema = EMA(trio, Ema(half_life=100, rampup=1))
        weight.data.add_(1)
        for images in range(batch, 201, batch):
            update(ema, images, batch)
        averages.append(ema.nets["generator"].layers[0].weight.clone())
        weight.data.copy_(initial)
    assert torch.allclose(*averages, atol=1e-5)


def test_ema_rampup_forgets_the_initial_weights():
    trio = build(tiny())
    ema = EMA(trio, Ema(half_life=10**9, rampup=0.05))
    trio.generator.layers[0].weight.data.add_(1)
    for images in range(10, 2001, 10):
        update(ema, images, 10)
    assert torch.allclose(ema.nets["generator"].layers[0].weight, trio.generator.layers[0].weight, atol=1e-4)


@pytest.mark.parametrize(
    ("cfg", "names"),
    [(Ema(), {"generator"}), (Ema(energy=True), {"generator", "energy"}), (Ema(half_life=0), set())],
)
def test_sampling_uses_the_averages(cfg, names):
    trio = build(tiny())
    ema = EMA(trio, cfg)
    assert set(ema.nets) == names
    for name, net in ema.sampling_trio().named_children():
        assert (net is not trio.get_submodule(name)) == (name in names)


def test_ema_copies_buffers():
    trio = build(tiny("nets.kind=resnet"))
    ema = EMA(trio, Ema())
    trio.train().generator(torch.randn(8, 4))
    update(ema, 16, 16)
    assert torch.equal(ema.nets["generator"].norm.running_mean, trio.generator.norm.running_mean)
