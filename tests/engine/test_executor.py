import copy
from functools import partial

import pytest
import torch
from torch import nn

from dualmcmc import config_io
from dualmcmc.config import Chain, Config
from dualmcmc.engine.executor import Executor, Mode, uncompiled
from dualmcmc.langevin import revise_x
from dualmcmc.nets import build
from dualmcmc.nets.frozen import eval_mode, frozen
from tests.conftest import TINY, tiny

SMALL = ["nets.energy_width=8", "nets.generator_width=8", "nets.inference_width=8"]  # more channels than an image
KINDS = {
    "simple": ("digits", TINY),
    "resnet": ("cifar10-resnet", [*SMALL, "teaching.latent_dim=4"]),
    "style": ("digits", [*TINY, *SMALL, "nets.kind=style"]),
}
NAMES = ("energy", "generator", "inference")


def config_of(kind: str) -> Config:
    return config_io.load_config(KINDS[kind][0], KINDS[kind][1])


def network(kind: str, name: str) -> nn.Module:
    return build(config_of(kind)).train().get_submodule(name)


def inputs(kind: str, name: str, count: int = 6) -> torch.Tensor:
    config = config_of(kind)
    if name == "generator":
        return torch.randn(count, config.teaching.latent_dim)
    return torch.rand(count, config.data.channels, config.data.size, config.data.size) * 2 - 1


def flat(output) -> torch.Tensor:
    return output.flatten() if isinstance(output, torch.Tensor) else torch.cat([part.flatten() for part in output])


def counting(calls: list[int]):
    """A compiler that records the batch size of every call of its layers."""
    return lambda layers: lambda *arguments: (calls.append(len(arguments[2])), layers(*arguments))[1]


def evaluate(executor: nn.Module, net: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and the gradients of net's parameters."""
    output = flat(executor(x))
    weights = torch.linspace(0.5, 1.5, len(output))
    return output.detach(), list(torch.autograd.grad((output * weights).sum(), list(net.parameters())))


def assert_close(a: list[torch.Tensor], b: list[torch.Tensor], rtol: float = 1e-4) -> None:
    scale = max(float(tensor.abs().max()) for tensor in b)
    assert all(torch.allclose(x, y, rtol=rtol, atol=rtol * scale) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_same_function_as_the_network(kind, name):
    """Values, gradients, running statistics and power iterations."""
    net, x = network(kind, name), inputs(kind, name)
    twin = copy.deepcopy(net)
    executor = Executor(twin)
    for _ in range(2):
        plain, ours = evaluate(net, net, x), evaluate(executor, twin, x)
        assert torch.allclose(ours[0], plain[0], atol=1e-5)
        assert_close(ours[1], plain[1])
    for key, value in net.state_dict().items():
        assert torch.allclose(twin.state_dict()[key].float(), value.float(), atol=1e-5), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["energy", "generator"])
def test_frozen_changes_nothing_and_computes_no_weight_gradients(kind, name):
    net = network(kind, name)
    executor, x = Executor(net), inputs(kind, name).requires_grad_()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with frozen(net):
        plain = flat(net(x))
        expected = torch.autograd.grad(plain.sum(), x)[0]
    with frozen(executor) as callable_net:
        output = flat(callable_net(x))
        assert torch.allclose(output, plain, atol=1e-5)
        assert torch.allclose(torch.autograd.grad(output.sum(), x, retain_graph=True)[0], expected, atol=1e-5)
        assert torch.autograd.grad(output.sum(), list(net.parameters()), allow_unused=True)[0] is None
    assert all(torch.allclose(net.state_dict()[key], value, atol=1e-6) for key, value in before.items())
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_frozen_weights_are_computed_once(monkeypatch):
    executor, calls = Executor(network("simple", "energy")), []
    weights = executor._weights
    monkeypatch.setattr(executor, "_weights", lambda: calls.append(1) or weights())
    with frozen(executor), frozen(executor) as callable_net:  # may be nested
        for _ in range(3):
            callable_net(inputs("simple", "energy"))
    assert len(calls) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("micro_batch", [4, 6])
def test_micro_batches_give_the_same(name, micro_batch):
    net, x = network("simple", name), inputs("simple", name)
    state = copy.deepcopy(net.state_dict())
    plain = evaluate(net, net, x)
    net.load_state_dict(state)
    ours = evaluate(Executor(net, micro_batch=micro_batch), net, x)
    assert torch.allclose(ours[0], plain[0], atol=1e-5)
    assert_close(ours[1], plain[1])


def test_micro_batches_give_gradients_of_gradients():
    net, x = network("simple", "energy"), inputs("simple", "energy").requires_grad_()
    found = []
    for energy in (net.eval(), Executor(net, micro_batch=4)):
        (slope,) = torch.autograd.grad(flat(energy(x)).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), list(net.parameters()), allow_unused=True))
    used = [pair for pair in zip(*found, strict=True) if pair[0] is not None]
    assert len(used) > 1
    assert_close([ours for _, ours in used], [plain for plain, _ in used])


def test_micro_batches_in_a_chain():
    net, x, calls = network("simple", "energy"), inputs("simple", "energy", 5), []
    executor = Executor(net, micro_batch=2, compiler=counting(calls))
    executor.compile_ahead(Mode.CHAIN, x)
    calls.clear()
    chain = Chain(steps=3, step_size=0.1)
    plain, ours = (revise_x(energy, x, chain, torch.Generator().manual_seed(0)) for energy in (net, executor))
    assert torch.allclose(ours, plain, atol=1e-6)
    assert calls == [2, 2, 1, 1, 2, 2] * 3  # each part forward, then each again for its gradient


def test_micro_batches_are_evaluated_again_for_the_gradient():
    """So that the activations of one part at a time are in memory."""
    calls: list[int] = []
    executor = Executor(network("simple", "energy"), micro_batch=2, compiler=counting(calls))
    x = inputs("simple", "energy")
    executor.compile_ahead(Mode.TRAIN, x)
    calls.clear()
    output = executor(x)
    assert calls == [2, 2, 2]
    output.sum().backward()
    assert calls == [2] * 6


def test_batchnorm_counts_every_micro_batch_once():
    net = network("resnet", "generator")
    Executor(net, micro_batch=2)(inputs("resnet", "generator")).sum().backward()  # evaluates every part twice
    assert net.norm.num_batches_tracked == 3


def test_only_what_was_compiled_ahead_runs_compiled():
    calls: list[int] = []
    executor = Executor(network("resnet", "generator"), micro_batch=4, compiler=counting(calls))
    z = inputs("resnet", "generator", 9).requires_grad_()

    def use(count: int) -> list[int]:
        """The compiled calls of a chain's step, a frozen pass and a training pass."""
        calls.clear()
        with frozen(executor) as callable_net:
            assert len(callable_net(z[:count])) == count
            with torch.no_grad():
                assert len(callable_net(z[:count])) == count
        executor(z[:count])
        return list(calls)

    assert use(9) == []
    executor.compile_ahead(Mode.CHAIN, z)
    assert calls == [4, 1]  # one of each size
    assert use(9) == [4, 4, 1]
    assert use(2) == []
    assert use(6) == [4]
    executor.compile_ahead(Mode.FROZEN, z)
    assert use(9) == [4, 4, 1] * 2
    executor.compile_ahead(Mode.TRAIN, z)
    assert use(9) == [4, 4, 1] * 3
    calls.clear()
    for mode in Mode:
        assert executor.is_compiled(mode, z)
        executor.compile_ahead(mode, z)
    with torch.no_grad():
        executor(z)
    assert calls == []  # compiled once; a training pass without gradients is not


@pytest.mark.parametrize("channels", [1, 3])
def test_layers_receive_one_layout(channels):
    """Greyscale images are contiguous whatever the stride of their one channel; the compiler distinguishes it."""
    strides: list[tuple[int, ...]] = []

    def compiler(layers):
        return lambda *arguments: (strides.append(arguments[2].stride()), layers(*arguments))[1]

    executor, x = Executor(nn.Conv2d(channels, 2, 3), compiler=compiler), torch.zeros(5, channels, 4, 4)
    executor.compile_ahead(Mode.TRAIN, x)
    executor(torch.zeros(5, 4, 4, channels).permute(0, 3, 1, 2))
    assert strides == [x.stride()] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_inside_float32_outside(kind, name):
    net, x = network(kind, name), inputs(kind, name, 16)
    state = copy.deepcopy(net.state_dict())
    plain = evaluate(net, net, x)
    net.load_state_dict(state)
    ours = evaluate(Executor(net, torch.bfloat16), net, x)
    assert ours[0].dtype == torch.float32
    assert (ours[0] - plain[0]).norm() < 0.02 * plain[0].norm()
    assert not torch.equal(ours[0], plain[0])
    for gradient, expected in zip(ours[1], plain[1], strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - expected).norm() <= 0.2 * expected.norm() + 1e-3 * max(float(g.norm()) for g in plain[1])
    assert all(parameter.dtype == torch.float32 for parameter in net.parameters())


def test_executor_has_no_parameters_of_its_own():
    assert not list(Executor(network("simple", "energy")).parameters())


@pytest.mark.parametrize("batchnorm", ["running", "batch"])
def test_trained_network_with_either_batchnorm_statistics(batchnorm):
    generator = network("resnet", "generator")
    generator(inputs("resnet", "generator", 30))  # non-trivial running statistics
    generator.eval().requires_grad_(False)
    z = inputs("resnet", "generator")
    with eval_mode(generator, batchnorm), torch.no_grad():
        executor, plain = Executor(generator), generator(z)
        assert torch.allclose(executor(z), plain, atol=1e-5)
        with frozen(executor) as callable_net:
            assert torch.allclose(callable_net(z), plain, atol=1e-5)
    assert generator.norm.num_batches_tracked == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_compiling_ahead_changes_nothing(kind, name):
    net, x = network(kind, name), inputs(kind, name)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    rng_state = torch.random.get_rng_state()
    executor = Executor(net)
    executor.compile_ahead(Mode.TRAIN, x)
    if name != "inference":
        executor.compile_ahead(Mode.CHAIN, x)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    assert torch.equal(rng_state, torch.random.get_rng_state())
    assert net.training


@pytest.mark.parametrize(("name", "backend"), [("energy", "eager"), ("generator", "aot_eager")])
def test_resnets_can_be_compiled(name, backend):
    """The generator with its backward pass: upsampling has a hand-written one, and BatchNorm updates statistics."""
    net = build(tiny("nets.kind=resnet")).train().get_submodule(name)
    twin = copy.deepcopy(net)
    x = torch.randn(6, 4) if name == "generator" else torch.rand(6, 1, 8, 8)
    executor = Executor(twin, compiler=partial(torch.compile, dynamic=False, fullgraph=True, backend=backend))
    executor.compile_ahead(Mode.TRAIN, x)
    plain, ours = evaluate(net, net, x), evaluate(executor, twin, x)
    assert torch.allclose(ours[0], plain[0], atol=1e-5)
    assert_close(ours[1], plain[1])
    for key, value in net.state_dict().items():
        assert torch.allclose(twin.state_dict()[key].float(), value.float(), atol=1e-5), key


def test_compiled_layers_can_be_disabled():
    calls: list[int] = []
    executor = Executor(network("simple", "energy"), compiler=counting(calls))
    holder, x = nn.ModuleList([executor]), inputs("simple", "energy")
    executor.compile_ahead(Mode.TRAIN, x)
    executor.compile_ahead(Mode.CHAIN, x)

    def count_compiled() -> int:
        calls.clear()
        executor(x)
        with frozen(executor) as callable_net:
            callable_net(x.clone().requires_grad_())
        return len(calls)

    assert count_compiled() == 2
    with uncompiled(holder):
        assert count_compiled() == 0
    assert count_compiled() == 2
    executor.disable_compilation()
    assert count_compiled() == 0
