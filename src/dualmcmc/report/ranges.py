"""Where the numbers of a healthy run lie: one table for the doctor, its picture and docs/health.md.

Measured on runs that learned and on runs driven out of health on purpose (docs/health.md has both). Images live
in [-1, 1] and latents are about N(0, 1), whatever their size, so one table serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dualmcmc.config import Config


@dataclass(frozen=True)
class Range:
    """Healthy from `low` to `high`; past `limit` the run is ill. What lies between is worth a look."""

    words: str  # what the number is
    low: float
    high: float
    limit: float
    why: str


SWALLOWED = 1e-5  # over a million parameters, a gradient norm below it drowns in Adam's eps of 1e-8

HEALTHY = {
    "energy_gap": Range(
        "energy gap, E(x~) - E(x)",
        -5,
        5,
        50,
        "healthy runs settle below 1; the first thousand iterations on CIFAR-10 swing by 3",
    ),
    "x_moved": Range(
        "movement of the x-chain, rms per pixel",
        0.004,
        0.5,
        1,
        "half a grey level is 0.004; a chain that moves by 1 replaces the image",
    ),
    "z_moved": Range(
        "movement of the z-chain, rms per latent",
        0.01,
        1.2,
        3,
        "latents have a spread of 1; a chain that moves by more forgets what was inferred",
    ),
    "grad_norm_energy": Range(
        "gradient norm of E, over `teaching.energy_weight`",
        SWALLOWED,
        1e3,
        1e5,
        "0.1 to 4 on digits, 0.2 to 200 on CIFAR-10",
    ),
    "grad_norm_generator": Range(
        "gradient norm of G",
        SWALLOWED,
        1e5,
        1e7,
        "a sum over pixels: 9 to 500 on digits, 90 to 20,000 on CIFAR-10",
    ),
    "grad_norm_inference": Range(
        "gradient norm of I",
        SWALLOWED,
        1e4,
        1e6,
        "4 to 35 on digits, 50 to 300 on CIFAR-10",
    ),
}


def healthy(config: Config) -> dict[str, Range]:
    """The table for a run: the gradient of E grows with the factor of its loss."""
    norm, weight = HEALTHY["grad_norm_energy"], config.teaching.energy_weight
    scaled = replace(norm, low=norm.low * weight, high=norm.high * weight, limit=norm.limit * weight)
    return HEALTHY | {"grad_norm_energy": scaled}


def table() -> str:
    """The ranges as the Markdown table of docs/health.md."""
    lines = ["| in the log | what it is | healthy | ill | why |", "| --- | --- | --- | --- | --- |"]
    for name, r in HEALTHY.items():
        past = f"beyond ±{r.limit:g}" if r.low < 0 else f"above {r.limit:g}"
        lines.append(f"| `{name}` | {r.words} | {r.low:g} to {r.high:g} | {past} | {r.why} |")
    return "\n".join(lines)
