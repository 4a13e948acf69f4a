import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from dualmcmc import settings
from dualmcmc.config import Config
from dualmcmc.nets import Trio, build
from dualmcmc.nets.evaluator import Evaluator, Purpose, uncompiled
from dualmcmc.nets.frozen import frozen, sampling_mode
from tests.conftest import TINY

SMALL = ["nets.energy_width=8", "nets.generator_width=8", "nets.inference_width=8"]  # more than an image has
KINDS = {"simple": ("digits", TINY), "resnet": ("cifar10-resnet", [*SMALL, "teaching.latent_dim=4"])}
NAMES = ("energy", "generator", "inference")


def config_of(kind: str) -> Config:
    return settings.load_config(KINDS[kind][0], KINDS[kind][1])


def evaluator(trio: Trio, config: Config, name: str, **options) -> Evaluator:
    bare = build(replace(config, nets=replace(config.nets, spectral_norm=False)))
    return Evaluator(trio.get_submodule(name), bare.get_submodule(name), **options)


def inputs(config: Config, name: str, count: int = 6) -> torch.Tensor:
    if name == "generator":
        return torch.randn(count, config.teaching.latent_dim)
    return torch.rand(count, config.data.channels, config.data.size, config.data.size) * 2 - 1


def flat(given) -> torch.Tensor:
    return given.flatten() if isinstance(given, torch.Tensor) else torch.cat([part.flatten() for part in given])


def counting(calls: list[int]):
    """A compiler that notes how many samples its layers are called with."""
    return lambda layers: lambda *given: (calls.append(len(given[2])), layers(*given))[1]


def learn(net: nn.Module, owner: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    out = flat(net(x))
    weights = torch.linspace(0.5, 1.5, len(out))
    return out.detach(), list(torch.autograd.grad((out * weights).sum(), list(owner.parameters())))


def same(a: list[torch.Tensor], b: list[torch.Tensor], rtol: float = 1e-4) -> bool:
    scale = max(float(tensor.abs().max()) for tensor in b)
    return all(torch.allclose(x, y, rtol=rtol, atol=rtol * scale) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_network_itself(kind, name):
    """Values, gradients, running statistics and power iterations: all as if the network had been called."""
    config = config_of(kind)
    one, two = build(config).train(), build(config).train()
    x = inputs(config, name)
    fast = evaluator(two, config, name)
    for _ in range(2):
        plain = learn(one.get_submodule(name), one.get_submodule(name), x)
        ours = learn(fast, two.get_submodule(name), x)
        assert torch.allclose(ours[0], plain[0], atol=1e-5)
        assert same(ours[1], plain[1])
    for key, value in one.get_submodule(name).state_dict().items():
        assert torch.allclose(two.get_submodule(name).state_dict()[key].float(), value.float(), atol=1e-5), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["energy", "generator"])
def test_held_still_it_moves_nothing_and_asks_for_no_weight_gradients(kind, name):
    config = config_of(kind)
    trio = build(config).train()
    net = trio.get_submodule(name)
    fast, x = evaluator(trio, config, name), inputs(config, name).requires_grad_()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with frozen(net):
        plain = flat(net(x))
        expected = torch.autograd.grad(plain.sum(), x)[0]
    with frozen(fast) as still:
        out = flat(still(x))
        assert torch.allclose(out, plain, atol=1e-5)
        assert torch.allclose(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], expected, atol=1e-5)
        assert torch.autograd.grad(out.sum(), list(net.parameters()), allow_unused=True)[0] is None
    assert all(torch.allclose(net.state_dict()[key], value, atol=1e-6) for key, value in before.items())
    assert all(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at_once", [2, 4, 6, 7])
def test_in_parts_it_gives_the_same(name, at_once):
    config = config_of("simple")
    trio = build(config).train()
    net, x = trio.get_submodule(name), inputs(config, name)
    start = copy.deepcopy(net.state_dict())
    plain = learn(net, net, x)
    net.load_state_dict(start)
    ours = learn(evaluator(trio, config, name, at_once=at_once), net, x)
    assert torch.allclose(ours[0], plain[0], atol=1e-5)
    assert same(ours[1], plain[1])


def test_in_parts_few_activations_are_kept():
    """Between the two passes nothing of a part's inside is alive: each part is evaluated again for its gradient."""
    config = config_of("simple")
    calls: list[int] = []
    fast = evaluator(build(config).train(), config, "energy", at_once=2, compiler=counting(calls))
    fast.compile_ahead(Purpose.LEARNING, inputs(config, "energy"))
    calls.clear()
    out = fast(inputs(config, "energy"))
    assert calls == [2, 2, 2]
    out.sum().backward()
    assert calls == [2] * 6


def test_only_what_was_asked_for_ahead_is_compiled():
    config = config_of("resnet")
    calls: list[int] = []
    fast = evaluator(build(config).train(), config, "generator", at_once=4, compiler=counting(calls))
    z = inputs(config, "generator", 9).requires_grad_()

    def use(count: int) -> list[int]:
        calls.clear()
        with frozen(fast) as still:
            assert len(still(z[:count])) == count
            with torch.no_grad():
                assert len(still(z[:count])) == count
        fast(z[:count])
        return list(calls)

    assert use(9) == []
    fast.compile_ahead(Purpose.CHAIN, z)
    assert calls == [4, 1]  # one of each length
    assert use(9) == [4, 4, 1]
    assert use(2) == []
    assert use(6) == [4]
    fast.compile_ahead(Purpose.STILL, z)
    assert use(9) == [4, 4, 1] * 2
    fast.compile_ahead(Purpose.LEARNING, z)
    assert use(9) == [4, 4, 1] * 3
    calls.clear()
    fast.compile_ahead(Purpose.CHAIN, z)
    fast.compile_ahead(Purpose.STILL, z)
    fast.compile_ahead(Purpose.LEARNING, z)
    assert calls == []  # once is enough
    with torch.no_grad():
        fast(z)
    assert calls == []


def test_statistics_count_every_part_once():
    config = config_of("resnet")
    trio = build(config).train()
    fast = evaluator(trio, config, "generator", at_once=2)
    fast(inputs(config, "generator")).sum().backward()  # which evaluates every part again
    assert trio.generator.norm.num_batches_tracked == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_inside_float32_outside(kind, name):
    config = config_of(kind)
    trio = build(config).train()
    net, x = trio.get_submodule(name), inputs(config, name, 16)
    start = copy.deepcopy(net.state_dict())
    plain = learn(net, net, x)
    net.load_state_dict(start)
    ours = learn(evaluator(trio, config, name, dtype=torch.bfloat16), net, x)
    assert ours[0].dtype == torch.float32
    assert (ours[0] - plain[0]).norm() < 0.02 * plain[0].norm()
    assert not torch.equal(ours[0], plain[0])
    for mine, other in zip(ours[1], plain[1], strict=True):
        assert mine.dtype == torch.float32
        assert (mine - other).norm() <= 0.2 * other.norm() + 1e-3 * max(float(g.norm()) for g in plain[1])


def test_weights_of_the_caller_stay_float32():
    config = config_of("resnet")
    trio = build(config).train()
    for name in NAMES:
        evaluator(trio, config, name, dtype=torch.bfloat16)(inputs(config, name))
    assert all(parameter.dtype == torch.float32 for parameter in trio.parameters())
    assert not list(evaluator(trio, config, "energy").parameters())


@pytest.mark.parametrize("batchnorm", ["running", "batch"])
def test_a_trained_network_in_either_way_of_sampling(batchnorm):
    config = config_of("resnet")
    trio = build(config).train()
    trio.generator(inputs(config, "generator", 30))  # running statistics worth their name
    trio.eval().requires_grad_(False)
    z = inputs(config, "generator")
    with sampling_mode(trio, batchnorm), torch.no_grad():
        fast = evaluator(trio, config, "generator")
        plain = trio.generator(z)
        assert torch.allclose(fast(z), plain, atol=1e-5)
        with frozen(fast) as still:
            assert torch.allclose(still(z), plain, atol=1e-5)
    assert trio.generator.norm.num_batches_tracked == 1


@pytest.mark.parametrize("kind", KINDS)
def test_compiling_ahead_changes_nothing(kind):
    config = config_of(kind)
    trio = build(config).train()
    before = {key: value.clone() for key, value in trio.state_dict().items()}
    source = torch.random.get_rng_state()
    for name in NAMES:
        fast = evaluator(trio, config, name)
        fast.compile_ahead(Purpose.LEARNING, inputs(config, name) * 0)
        fast.compile_ahead(Purpose.CHAIN, inputs(config, name) * 0)
    assert all(torch.equal(trio.state_dict()[key], value) for key, value in before.items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in trio.parameters())
    assert not torch.equal(source, torch.random.get_rng_state())  # the inputs drew from it; nothing else does
    assert trio.training


def test_compiled_layers_can_be_left_for_a_while_and_for_good():
    config = config_of("simple")
    calls: list[int] = []
    fast = evaluator(build(config).train(), config, "energy", compiler=counting(calls))
    holder, x = nn.ModuleList([fast]), inputs(config, "energy")
    fast.compile_ahead(Purpose.LEARNING, x)
    fast.compile_ahead(Purpose.CHAIN, x)

    def use() -> int:
        calls.clear()
        fast(x)
        with frozen(fast) as still:
            still(x.clone().requires_grad_())
        return len(calls)

    assert use() == 2
    with uncompiled(holder):
        assert use() == 0
    assert use() == 2
    fast.give_up_compiling()
    assert use() == 0
