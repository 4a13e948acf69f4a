"""Synthetic logs of the `digits` preset."""

import math
import random

from dualmcmc import config_io
from dualmcmc.health import examine

DIGITS = config_io.load_config("digits")


def line(number, **changes):
    """The `number`-th line of a healthy log, with changes."""
    wobble = random.Random(number).uniform(0.9, 1.1)
    decay = math.exp(-number / 3)
    return {
        "kind": "train",
        "iteration": 50 * number,
        "images": 2500 * number,
        "seconds": 5.0 * number,
        "iterations_per_second": 10 * wobble,
        "energy_data": -0.03,
        "energy_sample": -0.03,
        "energy_gap": 0.0007 * wobble - 0.05 * decay,
        "energy_gap_max": 0.006 * wobble + 0.8 * decay,
        "energy_slope": 0.03 * wobble + 0.2 * decay,
        "reconstruction_mse": 0.03 * wobble + 0.4 * decay,
        "x_displacement_rms": 0.045 * wobble + 0.3 * decay,
        "z_displacement_rms": 0.24 * wobble + 0.1 * decay,
        "inference_data_nll": -11.5 * wobble + 15 * decay,
        "inference_sample_nll": 12 * wobble,
        "grad_norm_energy": 0.2 * wobble + 2 * decay,
        "grad_norm_generator": 11 * wobble + 200 * decay,
        "grad_norm_inference": 20 * wobble - 15 * decay,
    } | changes


def event(kind, at=0, **facts):
    return {"kind": kind, "images": 2500 * at, "time": 1e9, **facts}


def make_log(lines=24, **curves):
    """A healthy log, except for the given curves, which are functions of the line number."""
    entries = [line(n, **{name: curve(n) for name, curve in curves.items()}) for n in range(1, lines + 1)]
    return [event("start"), event("save", seconds=0.1), *entries]


def problems(log, config=DIGITS):
    """The findings that are not ok."""
    return [finding for finding in examine(log, config) if finding.level != "ok"]
