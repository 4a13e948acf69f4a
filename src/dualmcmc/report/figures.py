"""Pictures for the page: the curves of the log, and any picture as part of the page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from dualmcmc.pictures import encode_png
from dualmcmc.plots import ACCENT, INK, SECOND, dress, rendered
from dualmcmc.report.history import points

# title, axis, and the lines drawn: (name in the log, label)
CURVES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Energy", "mean energy", [("energy_data", "data"), ("energy_sample", "revised samples")]),
    ("Energy gap, samples minus data", "E(x~) - E(x)", [("energy_gap", "")]),
    ("Reconstruction error", "MSE per pixel", [("reconstruction_mse", "")]),
    ("Movement of the chains", "rms per number", [("x_moved", "x-chain"), ("z_moved", "z-chain")]),
    ("Inference loss", "-log q", [("inference_data_nll", "data"), ("inference_sample_nll", "samples")]),
    ("Gradient norms", "norm", [("grad_norm_energy", "E"), ("grad_norm_generator", "G"), ("grad_norm_inference", "I")]),
]
LOGARITHMIC = ("Reconstruction error", "Movement of the chains", "Gradient norms")


SIGNED = ("Energy gap, samples minus data",)  # logarithmic too, where healthy ranges are shown


def curves(log: Sequence[dict[str, Any]]) -> str:
    """All curves of a log in one picture, as part of the page."""
    return picture(draw(log))


def draw(log: Sequence[dict[str, Any]], bands: Mapping[str, tuple[float, float]] | None = None) -> Tensor:
    """All curves of a log in one picture, with the band that each should stay in, where it has one."""
    lines = [entry for entry in log if entry.get("kind") == "train"]
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, (title, label, names) in zip(figure.subplots(2, 3).flat, CURVES, strict=True):
        for (name, words), colour in zip(names, (ACCENT, SECOND, INK), strict=False):
            curve = points(lines, name)
            axes.plot(*zip(*curve, strict=True), color=colour, label=words, linewidth=1.4) if curve else None
            if bands and name in bands:
                axes.axhspan(*bands[name], color=colour, alpha=0.08, linewidth=0)
        dress(axes, title, "images", label, legend=len(names) > 1 and bool(axes.get_lines()))
        shown = [value for line in axes.get_lines() for value in line.get_ydata()]
        if title in LOGARITHMIC and shown and min(shown) > 0:
            axes.set_yscale("log")
        elif title in SIGNED and bands:
            axes.set_yscale("symlog", linthresh=0.01)
    return rendered(figure)


def picture(pixels: Tensor) -> str:
    """A (C, h, w) byte picture as a data address."""
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode()
