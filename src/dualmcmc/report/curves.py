"""Plots of a run's log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from dualmcmc.health.history import curve
from dualmcmc.utils.plots import ACCENT, INK, SECOND, new_figure, render, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Panel(NamedTuple):
    """One plot of the figure."""

    title: str
    y_label: str
    curves: dict[str, str]  # the logged statistics, and their labels in the legend
    scale: Literal["linear", "log", "symlog"] = "linear"


PANELS = (
    Panel("Energy", "mean energy", {"energy_data": "data", "energy_sample": "revised samples"}),
    Panel("Energy gap, samples minus data", "E(x~) - E(x)", {"energy_gap": ""}, "symlog"),
    Panel("Slope of E along the x-chain", "mean |dE/dx|", {"energy_slope": ""}, "log"),
    Panel("Reconstruction error", "MSE", {"reconstruction_mse": ""}, "log"),
    Panel(
        "Chain displacement",
        "rms per dimension",
        {"x_displacement_rms": "x-chain", "z_displacement_rms": "z-chain"},
        "log",
    ),
    Panel("Inference loss", "-log q", {"inference_data_nll": "data", "inference_sample_nll": "samples"}),
    Panel(
        "Gradient norms",
        "norm",
        {"grad_norm_energy": "E", "grad_norm_generator": "G", "grad_norm_inference": "I"},
        "log",
    ),
    Panel("Speed", "iterations per second", {"iterations_per_second": ""}),
)


def plot_log(log: Sequence[dict[str, Any]], bands: Mapping[str, tuple[float, float]] | None = None) -> Tensor:
    """All curves of a log as one (3, h, w) uint8 picture; `bands` are shaded, such as healthy ranges."""
    return render(make_figure(log, bands or {}))


def make_figure(log: Sequence[dict[str, Any]], bands: Mapping[str, tuple[float, float]]) -> Figure:
    """The figure of `plot_log`."""
    lines = [entry for entry in log if entry.get("kind") == "train"]
    figure = new_figure(15, 6)
    for axes, panel in zip(figure.subplots(2, 4).flat, PANELS, strict=True):
        shown: list[float] = []
        for (name, label), colour in zip(panel.curves.items(), (ACCENT, SECOND, INK), strict=False):
            if points := curve(lines, name):
                x, y = zip(*points, strict=True)
                axes.plot(x, y, color=colour, label=label, linewidth=1.4)
                shown += y
            if name in bands and math.isfinite(bands[name][1]):
                axes.axhspan(*bands[name], color=colour, alpha=0.08, linewidth=0)
        style(axes, panel.title, "images", panel.y_label, legend=len(panel.curves) > 1 and bool(shown))
        if panel.scale == "log" and shown and min(shown) > 0:
            axes.set_yscale("log")
        elif panel.scale == "symlog" and bands:  # a band is much wider than the curve
            axes.set_yscale("symlog", linthresh=0.01)
    return figure
