"""The two Markov kernels of the paper: T_x on the energy, T_z on the generator's posterior.

Pure functions: state in, state out, the random numbers an argument. Nothing is back-propagated
through a chain, and the networks are left as they were.

Regime: `chain.temperature` = 1 is the paper's Langevin dynamics with noise sqrt(2s) (eq:ebm_langevin,
eq:gen_langevin); below 1 the chain is tempered, as the authors run it on images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualmcmc.config import Chain
from dualmcmc.nets.frozen import frozen
from dualmcmc.rng import Source, gaussian_like

Network = Callable[[Tensor], Tensor]
Potential = Callable[..., Tensor]


@dataclass
class Trace:
    """What a chain did, for those who ask: hand one in and read it afterwards.

    Lists run over the steps and include the start and the end (`steps` + 1 entries; `grad_norm` has
    `steps`). Asking costs one more evaluation, of the last state.
    """

    every: int = 1  # keep each `every`-th state, and the last
    states: list[Tensor] = field(default_factory=list)  # each like the chain's state
    kept_at: list[int] = field(default_factory=list)  # the step of each kept state
    potential: list[Tensor] = field(default_factory=list)  # (B,) each: E(x), or -log p(z, x)
    grad_norm: list[Tensor] = field(default_factory=list)  # (B,) each, before any clip
    moved: list[Tensor] = field(default_factory=list)  # (B,) each: rms distance from the start
    mse: list[Tensor] = field(default_factory=list)  # (B,) each, z-chains only: |x - g(z)|^2 / D
    _start: Tensor | None = field(default=None, init=False, repr=False)

    def record(self, step: int, last: bool, state: Tensor, potential: Tensor, mse: Tensor | None) -> None:
        """Note one state (called by the chain)."""
        state = state.detach()
        if self._start is None:
            self._start = state
        if last or step % self.every == 0:
            self.states.append(state)
            self.kept_at.append(step)
        self.potential.append(potential.detach())
        self.moved.append((state - self._start).flatten(1).square().mean(1).sqrt())
        if mse is not None:
            self.mse.append(mse.detach())


def langevin(
    state: Tensor,
    potential: Potential,
    chain: Chain,
    rng: Source,
    trace: Trace | None = None,
    mse: Callable[[Tensor, Tensor], Tensor] | None = None,
    held: Tensor | None = None,
    given: tuple[Tensor, ...] = (),
    at_once: int | None = None,
) -> Tensor:
    """`chain.steps` Langevin steps on exp(-potential), all samples of the batch side by side.

    state: (B, ...); potential: (B, ...) -> (B,), each entry the potential of its own sample (a network
    that uses batch statistics couples the samples, as it does in the authors' code). It is called with the
    tensors of `given` besides, (B, ...) each, and with at most `at_once` samples where that is set: which
    bounds the memory of a step and changes nothing else.
    `mse` turns (state, potential) into the trace's squared error; chains on z have one.
    `held`: true for the numbers of the state that keep their value, so that the chain is on the others
    given these; it must broadcast to the state.
    """
    noise, state = chain.noise_std, state.detach()
    start = state
    for step in range(chain.steps):
        values, gradient = _slope(potential, state, given, at_once)
        if held is not None:
            gradient = gradient.masked_fill(held, 0)
        if trace is not None:
            trace.record(step, False, state, values, mse(state, values) if mse else None)
            trace.grad_norm.append(_norm(gradient).flatten())
        if chain.grad_clip is not None:
            gradient = gradient * (chain.grad_clip / _norm(gradient).clamp(min=chain.grad_clip))
        state = torch.sub(state, gradient, alpha=chain.step_size)
        if noise > 0:
            state = torch.add(state, gaussian_like(state, rng), alpha=noise)
        if chain.clamp is not None:
            state = state.clamp(-chain.clamp, chain.clamp)
        if held is not None:
            state = torch.where(held, start, state)
    if trace is not None:
        with torch.no_grad():
            values = potential(state, *given)
        trace.record(chain.steps, True, state, values, mse(state, values) if mse else None)
    return state


def revise_x(
    energy: Network,
    x: Tensor,
    chain: Chain,
    rng: Source = None,
    trace: Trace | None = None,
    observed: Tensor | None = None,
) -> Tensor:
    """T_x: images x (B, C, H, W), Langevin steps on pi(x) ~ exp(-energy(x)) (eq:ebm_langevin).

    `observed`, where given, is true for the pixels that are known and stay: the chain is on the rest, on
    pi(hidden | observed).
    """
    with frozen(energy) as still:
        at_once = getattr(still, "at_once", None)
        return langevin(x, lambda state: energies(still, state), chain, rng, trace, held=observed, at_once=at_once)


def revise_z(
    generator: Network,
    z: Tensor,
    x: Tensor,
    sigma: float,
    chain: Chain,
    rng: Source = None,
    trace: Trace | None = None,
    observed: Tensor | None = None,
) -> Tensor:
    """T_z: latents z (B, d), Langevin steps on p(z|x) of images x (eq:gen_langevin).

    -log p(z|x) = |x - g(z)|^2 / (2 sigma^2) + |z|^2 / 2 + constant. `observed`, where given, is true for
    the pixels that are known: the squared error is over these alone, so the chain is on p(z | observed).
    """
    given: tuple[Tensor, ...] = (x,)
    numbers: int | Tensor = x[0].numel()  # that the squared error is over
    if observed is not None:
        seen = observed.expand(x.shape).to(x)
        given, numbers = (torch.where(observed, x, 0), seen), seen.flatten(1).sum(1).clamp(min=1)

    def mse(state: Tensor, values: Tensor) -> Tensor:
        return (values - half_square(state)) * (2 * sigma**2) / numbers

    with frozen(generator) as still:

        def negative_log_joint(state: Tensor, known: Tensor, seen: Tensor | None = None) -> Tensor:
            made = still(state) if seen is None else still(state) * seen
            return squared_error(known, made) / (2 * sigma**2) + half_square(state)

        at_once = getattr(still, "at_once", None)
        return langevin(z, negative_log_joint, chain, rng, trace, mse, given=given, at_once=at_once)


def energies(energy: Network, x: Tensor) -> Tensor:
    """E(x), (B,), of a network that gives (B,) or (B, 1)."""
    values = energy(x).flatten()
    if len(values) != len(x):
        raise ValueError(f"the energy network gave {len(values)} numbers for {len(x)} samples, needed is one each")
    return values


def squared_error(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|^2 of each sample: summed over everything but the batch, (B,)."""
    return (a - b).square().flatten(1).sum(1)


def half_square(z: Tensor) -> Tensor:
    """-log N(z; 0, I) up to its constant, (B,)."""
    return 0.5 * z.square().flatten(1).sum(1)


def _slope(
    potential: Potential, state: Tensor, given: tuple[Tensor, ...], at_once: int | None
) -> tuple[Tensor, Tensor]:
    """The potential of each sample, and its gradient."""
    parts = zip(*(tensor.split(at_once or len(tensor)) for tensor in (state, *given)), strict=True)
    values, gradients = [], []
    for part, *others in parts:
        leaf = part.detach().requires_grad_()
        with torch.enable_grad():
            energy = potential(leaf, *others)
            gradients += torch.autograd.grad(energy, leaf, torch.ones_like(energy))
        values.append(energy.detach())
    return (torch.cat(values), torch.cat(gradients)) if len(values) > 1 else (values[0], gradients[0])


def _norm(gradient: Tensor) -> Tensor:
    """The norm of each sample's gradient, shaped to multiply it."""
    return gradient.flatten(1).norm(dim=1).reshape(-1, *[1] * (gradient.dim() - 1))
