"""The paper's two Markov kernels: T_x on the energy (Eq. 3) and T_z on the generator's posterior (Eq. 6).

Pure functions: state in, state out, the random source an argument. Nothing is back-propagated through a chain, and
networks keep their training state.

Regime: with `chain.temperature` = 1 the noise is the paper's sqrt(2 s); below 1 the chain is tempered, as in the
authors' code on images. The chain is unadjusted, as in the paper, unless `chain.metropolis` adds an accept/reject step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualmcmc.config import Chain
from dualmcmc.metrics import chains
from dualmcmc.nets.frozen import frozen
from dualmcmc.rng import RandomSource, rand, randn_like
from dualmcmc.utils.errors import UserError, nearest

Network = Callable[[Tensor], Tensor]
Potential = Callable[[Tensor], Tensor]  # (B, ...) -> (B,)
Projection = Callable[[Tensor], Tensor]
QUANTITIES = ("potential", "grad_norm", "displacement", "squared_norm", "mse")  # of a trace, one value per chain


@dataclass
class Trace:
    """Diagnostics of a chain: pass one in, read it afterwards.

    Lists run over the states, the initial one included (`steps` + 1 entries; those per step have `steps`). Tracing
    costs one more evaluation, of the final state; with `gradients_only`, which fills the lists per step alone, none.
    """

    every: int = 1  # keep every n-th state, and the final one
    gradients_only: bool = False
    states: list[Tensor] = field(default_factory=list)
    kept_at: list[int] = field(default_factory=list)  # the step of each kept state
    potential: list[Tensor] = field(default_factory=list)  # (B,) each: E(x), or -log p(z, x)
    grad_norm: list[Tensor] = field(default_factory=list)  # (B,) each, per step, before clipping
    displacement: list[Tensor] = field(default_factory=list)  # (B,) each: rms distance from the initial state
    squared_norm: list[Tensor] = field(default_factory=list)  # (B,) each: |state|^2
    mse: list[Tensor] = field(default_factory=list)  # (B,) each, z-chains only: |x - g(z)|^2 per pixel
    accepted: list[Tensor] = field(default_factory=list)  # (B,) each, per step, with `chain.metropolis` only
    _start: Tensor | None = field(default=None, init=False, repr=False)

    def record(self, step: int, state: Tensor, potential: Tensor, final: bool = False) -> None:
        """Add one state; called by the kernel."""
        state = state.detach()
        if self._start is None:
            self._start = state
        if final or step % self.every == 0:
            self.states.append(state)
            self.kept_at.append(step)
        self.potential.append(potential.detach())
        self.displacement.append(rms_distance(state, self._start))
        self.squared_norm.append(squared_norm(state))

    @property
    def acceptance_rate(self) -> float | None:
        """Fraction of accepted proposals; None without an accept/reject step."""
        return float(torch.stack(self.accepted).double().mean()) if self.accepted else None

    def effective_sample_size(self, quantity: str = "potential", discard: int = 0) -> float:
        """See `metrics.chains`: of one of `QUANTITIES`, over all chains, without the first `discard` values."""
        return chains.effective_sample_size(self._values(quantity, discard))

    def r_hat(self, quantity: str = "potential", discard: int = 0) -> float:
        """See `metrics.chains`: of one of `QUANTITIES`, without the first `discard` values."""
        return chains.r_hat(self._values(quantity, discard))

    def _values(self, quantity: str, discard: int) -> Tensor:
        if quantity not in QUANTITIES:
            raise UserError(
                f"unknown quantity '{quantity}': use {', '.join(QUANTITIES)}.{nearest(quantity, QUANTITIES)}"
            )
        if discard < 0:
            raise UserError(f"discard must be at least 0, not {discard}.")
        values: list[Tensor] = getattr(self, quantity)
        if len(values) - discard < chains.MIN_DRAWS:
            raise UserError(
                f"{len(values)} values of '{quantity}' in this trace, {discard} discarded: at least {chains.MIN_DRAWS} "
                "must remain."
            )
        return torch.stack(values[discard:])


def run_chain(
    state: Tensor,
    potential: Potential,
    chain: Chain,
    rng: RandomSource = None,
    trace: Trace | None = None,
    project: Projection | None = None,
) -> Tensor:
    """The kernel that `chain` selects: `langevin`, or `mala` with `chain.metropolis`, which needs noise."""
    kernel = mala if chain.metropolis and chain.temperature > 0 else langevin
    return kernel(state, potential, chain, rng, trace, project)


def langevin(
    state: Tensor,
    potential: Potential,
    chain: Chain,
    rng: RandomSource = None,
    trace: Trace | None = None,
    project: Projection | None = None,
) -> Tensor:
    """`chain.steps` Langevin steps on exp(-potential) from `state` (B, ...), all samples in parallel.

    potential: (B, ...) -> (B,), one value per sample. (A network with batch statistics couples the samples, as in
    the authors' code.) `project` maps each new state onto a constraint set.
    """
    state, noise = state.detach(), chain.noise_std
    for step in range(chain.steps):
        values, gradient = _value_and_grad(potential, state)
        if trace is not None:
            trace.grad_norm.append(_norm(gradient).flatten())
            if not trace.gradients_only:
                trace.record(step, state, values)
        state = torch.sub(state, _clip(gradient, chain.grad_clip), alpha=chain.step_size)
        if noise > 0:
            state = torch.add(state, randn_like(state, rng), alpha=noise)
        if chain.clamp is not None:
            state = state.clamp(-chain.clamp, chain.clamp)
        if project is not None:
            state = project(state)
    if trace is not None and not trace.gradients_only:
        with torch.no_grad():
            trace.record(chain.steps, state, potential(state), final=True)
    return state


def mala(
    state: Tensor,
    potential: Potential,
    chain: Chain,
    rng: RandomSource = None,
    trace: Trace | None = None,
    project: Projection | None = None,
) -> Tensor:
    """`langevin` with an accept/reject step (MALA; Roberts and Tweedie, 1996): exp(-potential / T) is stationary.

    Samples must be independent: no batch statistics. `chain.clamp` restricts the target: proposals outside are
    rejected. `project` may only fix coordinates.
    """
    state, noise = state.detach(), chain.noise_std
    values, gradient = _value_and_grad(potential, state)
    for step in range(chain.steps):
        drift = -chain.step_size * _clip(gradient, chain.grad_clip)
        proposal = state + drift + noise * randn_like(state, rng)
        if project is not None:
            proposal = project(proposal)
        new_values, new_gradient = _value_and_grad(potential, proposal)
        new_drift = -chain.step_size * _clip(new_gradient, chain.grad_clip)
        forward = squared_error(proposal, state + drift)  # -log q(proposal | state) = forward / (2 noise^2) + constant
        backward = squared_error(state, proposal + new_drift)
        log_ratio = (values - new_values) / chain.temperature + (forward - backward) / (2 * noise**2)
        accepted = rand((len(state),), values, rng).log() < log_ratio  # false for NaN
        if chain.clamp is not None:
            accepted &= proposal.flatten(1).abs().amax(1) <= chain.clamp
        if trace is not None:
            trace.grad_norm.append(_norm(gradient).flatten())
            trace.accepted.append(accepted)
            if not trace.gradients_only:
                trace.record(step, state, values)
        state, gradient = (
            torch.where(_per_sample(accepted, new), new, old)
            for new, old in ((proposal, state), (new_gradient, gradient))
        )
        values = torch.where(accepted, new_values, values)
    if trace is not None and not trace.gradients_only:
        trace.record(chain.steps, state, values, final=True)
    return state


def revise_x(
    energy: Network,
    x: Tensor,
    chain: Chain,
    rng: RandomSource = None,
    trace: Trace | None = None,
    observed: Tensor | None = None,
) -> Tensor:
    """T_x (Eq. 3): Langevin steps on pi(x) ~ exp(-energy(x)) from images x (B, C, H, W).

    `observed` is a boolean mask of known pixels. They keep their value: the chain samples pi(hidden | observed).
    """
    with frozen(energy) as net:
        if observed is None:
            return run_chain(x, lambda state: energies(net, state), chain, rng, trace)

        known = x.detach()

        def keep_observed(state: Tensor) -> Tensor:
            return torch.where(observed, known, state)

        return run_chain(x, lambda state: energies(net, keep_observed(state)), chain, rng, trace, keep_observed)


def revise_z(
    generator: Network,
    z: Tensor,
    x: Tensor,
    sigma: float,
    chain: Chain,
    rng: RandomSource = None,
    trace: Trace | None = None,
    observed: Tensor | None = None,
) -> Tensor:
    """T_z (Eq. 6): Langevin steps on p(z|x) from latents z (B, d) of images x.

    -log p(z|x) = |x - g(z)|^2 / (2 sigma^2) + |z|^2 / 2 + constant. With `observed`, a boolean mask of known pixels,
    the squared error is taken over these alone: the chain samples p(z | observed).
    """
    mask = None if observed is None else observed.expand(x.shape).to(x)
    known = x if observed is None else torch.where(observed, x, 0)
    with frozen(generator) as net:

        def negative_log_joint(state: Tensor) -> Tensor:
            generated = net(state) if mask is None else net(state) * mask
            return squared_error(known, generated) / (2 * sigma**2) + 0.5 * squared_norm(state)

        z_rev = run_chain(z, negative_log_joint, chain, rng, trace)
    if trace is not None:
        pixels = x[0].numel() if mask is None else mask.flatten(1).sum(1).clamp(min=1)
        for values, norm in zip(trace.potential, trace.squared_norm, strict=True):
            trace.mse.append((values - 0.5 * norm) * (2 * sigma**2) / pixels)
    return z_rev


def energies(energy: Network, x: Tensor) -> Tensor:
    """E(x), (B,), from a network that returns (B,) or (B, 1)."""
    values = energy(x).flatten()
    if len(values) != len(x):
        raise ValueError(f"the energy network returned {len(values)} values for {len(x)} samples: expected one each")
    return values


def squared_error(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|^2 of each sample, (B,)."""
    return (a - b).square().flatten(1).sum(1)


def squared_norm(a: Tensor) -> Tensor:
    """|a|^2 of each sample, (B,)."""
    return a.square().flatten(1).sum(1)


def rms_distance(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square of a - b of each sample, (B,); detached."""
    return (a - b).detach().square().flatten(1).mean(1).sqrt()


def _value_and_grad(potential: Potential, state: Tensor) -> tuple[Tensor, Tensor]:
    if torch._C._functorch.peek_interpreter_stack() is not None:  # inside torch.func.vmap, which forbids requires_grad_

        def total(state: Tensor) -> tuple[Tensor, Tensor]:
            values = potential(state)
            return values.sum(), values

        gradient, values = torch.func.grad(total, has_aux=True)(state)
        return values.detach(), gradient
    leaf = state.detach().requires_grad_()
    with torch.enable_grad():
        values = potential(leaf)
        (gradient,) = torch.autograd.grad(values, leaf, torch.ones_like(values))
    return values.detach(), gradient


def _clip(gradient: Tensor, limit: float | None) -> Tensor:
    return gradient if limit is None else gradient * (limit / _norm(gradient).clamp(min=limit))


def _norm(gradient: Tensor) -> Tensor:
    """The norm of each sample's gradient, shaped for broadcasting."""
    return _per_sample(gradient.flatten(1).norm(dim=1), gradient)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """(B,) values, shaped for broadcasting with (B, ...)."""
    return values.reshape(-1, *[1] * (like.dim() - 1))
