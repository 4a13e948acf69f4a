"""Every learning rule: its losses fit its networks, and it learns a mixture of Gaussians in the plane."""

import itertools
from dataclasses import replace

import pytest
import torch

from dualmcmc.config import NETWORKS, Chain
from dualmcmc.methods import Losses, Method, Optimizers, load_method, step
from dualmcmc.methods.memory import Memory
from dualmcmc.nets import Prior, Trio
from dualmcmc.nets.frozen import Watched
from examples import mixture
from tests.methods.plain import PAPER, dependencies, make_batch, make_memory, make_trio, seeded

ITERATIONS, BATCH, POINTS = 300, 128, 512
LEARNING_RATES = {"energy": 1.5e-3, "generator": 4e-3, "inference": 4e-3}  # samplers that keep up with the energy
TEACHING = replace(
    mixture.TEACHING,
    sigma=0.3,
    start_noise=0.3,
    x_chain=Chain(steps=15, step_size=0.05),
    z_chain=Chain(steps=5, step_size=0.016),
    entropy_spread=0.3,
    buffer_size=1000,
)
every_method = pytest.mark.parametrize("name", NETWORKS)


def trained(losses):
    """The networks that a method's losses train."""
    own = {name for name in ("energy", "generator", "inference") if getattr(losses, name) is not None}
    return own | ({"generator", "inference"} if losses.autoencoder is not None else set())


@every_method
def test_losses_are_for_the_networks_of_the_method(name):
    method, trio, (x, z) = load_method(name), make_trio(*NETWORKS[name]), make_batch()
    losses = method.evaluate(trio, x, z, seeded(0), PAPER, memory=make_memory(method))
    assert isinstance(method, Method)
    assert isinstance(losses, Losses)
    assert trained(losses) == set(NETWORKS[name])
    for part in ("energy", "generator", "inference"):
        if (loss := getattr(losses, part)) is not None:
            assert dependencies(loss, trio) == {part}
    if losses.autoencoder is not None:
        assert dependencies(losses.autoencoder, trio) == {"generator", "inference"}
    for loss in (losses.energy, losses.generator, losses.inference, losses.autoencoder):
        assert loss is None or loss.shape == ()
    for value in losses.stats.values():
        assert value.shape == ()
        assert value.isfinite()
        assert not value.requires_grad


@every_method
def test_a_step_changes_every_network_of_the_method(name):
    trio, (x, _) = make_trio(*NETWORKS[name]), make_batch()
    before = {part: [p.detach().clone() for p in net.parameters()] for part, net in trio.named_children()}
    optimizers = Optimizers(**{part: torch.optim.SGD(net.parameters(), lr=0.1) for part, net in trio.named_children()})
    stats = step(trio, optimizers, x, seeded(0), PAPER, method=name, memory=make_memory(load_method(name)))
    for part, net in trio.named_children():
        assert any(not torch.equal(old, new) for old, new in zip(before[part], net.parameters(), strict=True))
        assert stats[f"grad_norm_{part}"] > 0


@every_method
def test_losses_repeat_with_the_seed(name):
    trio, (x, z) = make_trio(*NETWORKS[name]), make_batch()
    method = load_method(name)
    first, second = (method.evaluate(trio, x, z, seeded(5), PAPER, memory=make_memory(method)).stats for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@every_method
def test_every_parameter_has_a_gradient(name):
    """Otherwise several processes cannot average them."""
    trio, (x, z) = make_trio(*NETWORKS[name]), make_batch()
    losses = load_method(name).evaluate(trio, x, z, seeded(0), PAPER, memory=make_memory(load_method(name)))
    for loss in (losses.energy, losses.generator, losses.inference, losses.autoencoder):
        if loss is not None:
            loss.backward()
    assert all(parameter.grad is not None for parameter in trio.parameters())


@every_method
def test_an_abandoned_iteration_leaves_the_memory_alone(name):
    """It may end before any evaluation of a frozen network."""
    method, trio, (x, z) = load_method(name), make_trio(*NETWORKS[name]), make_batch()
    if method.memory is None:
        pytest.skip("remembers nothing")
    for number in itertools.count(1):
        memory, calls = make_memory(method), itertools.count(1)
        before = {key: value.clone() for key, value in memory.tensors.items()}

        def give_up(_, calls=calls, number=number):
            if next(calls) == number:
                raise InterruptedError

        watched = Trio(**{part: Watched(net, give_up) for part, net in trio.named_children()})
        try:
            method.evaluate(watched, x, z, seeded(0), PAPER, memory=memory)
        except InterruptedError:
            assert all(torch.equal(memory[key], value) for key, value in before.items()), number
        else:
            break


def mean_distance(a, b):
    return torch.cdist(a, b).sum() / (len(a) * (len(b) - (a is b)))


@torch.no_grad()
def measure(trio, prior=None):
    """What should fall: KL(data || EBM), the energy distance of samples from the data, the reconstruction error."""
    rng, found = seeded(99), {}
    x = mixture.sample_data(1000, rng)
    if trio.energy is not None:
        found["divergence"] = mixture.kl_to_data(trio.energy)
    if trio.generator is not None:
        z = torch.randn(1000, 2, generator=rng)
        x_hat = trio.generator(z if prior is None else prior.transform(z))
        x_hat = x_hat + TEACHING.sigma * torch.randn(x_hat.shape, generator=rng)
        found["distance"] = float(2 * mean_distance(x, x_hat) - mean_distance(x, x) - mean_distance(x_hat, x_hat))
    if trio.inference is not None:
        found["error"] = float((x - trio.generator(trio.inference(x)[0])).square().sum(1).mean())
    return found


@every_method
def test_learns_a_mixture(name, monkeypatch):
    """With the same settings for all, and wide limits, since there are few iterations."""
    monkeypatch.setattr(mixture, "CELLS", 100)
    nets, rng = mixture.build(0), seeded(0)
    trio = Trio(**{part: nets.get_submodule(part) for part in NETWORKS[name]})
    optimizers = Optimizers(
        **{
            part: torch.optim.Adam(net.parameters(), lr=LEARNING_RATES[part], betas=(0.5, 0.9))
            for part, net in trio.named_children()
        }
    )
    data, before = mixture.sample_data(POINTS, rng), measure(trio)
    memory = make_memory(load_method(name), TEACHING, (2,), POINTS)
    tensors = {} if memory is None else {key: value.float() for key, value in memory.tensors.items()}
    for iteration in range(ITERATIONS):
        for part in NETWORKS[name]:
            decay = min(1.0, 2 * (1 - iteration / ITERATIONS))
            getattr(optimizers, part).param_groups[0]["lr"] = LEARNING_RATES[part] * decay
        indices = torch.randperm(POINTS, generator=rng)[:BATCH]
        step(trio, optimizers, data[indices], rng, TEACHING, method=name, memory=Memory(tensors, indices))
    fitted = load_method(name).prior
    after = measure(trio, None if fitted is None else Prior(*fitted(tensors)))
    limits = {"divergence": 0.75, "distance": 0.25, "error": 0.1}
    for key, value in after.items():
        assert value < limits[key] * before[key], key
