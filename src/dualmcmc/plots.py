"""Curves and histograms as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

INK, COLOURS = "#374151", ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#6b7280")
ACCENT, SECOND = COLOURS[:2]


def profile(values: Tensor, title: str, label: str) -> Tensor:
    """(steps + 1, B) values of a chain: their mean at each step, and the middle half of them."""
    table = values.float().cpu()
    steps = range(len(table))
    low, high = (table.quantile(q, dim=1) for q in (0.25, 0.75))
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(steps, low, high, color=ACCENT, alpha=0.15, label="middle half", linewidth=0)
    axes.plot(steps, table.mean(1), color=ACCENT, label="mean")
    dress(axes, title, "step", label, legend=True)
    return rendered(figure)


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, x_label: str, y_label: str
) -> Tensor:
    """One line a curve, each (x, y)."""
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.subplots()
    for number, (name, (x, y)) in enumerate(curves.items()):
        axes.plot(x, y, color=COLOURS[number % len(COLOURS)], label=name, marker="." if len(x) < 20 else None)
    dress(axes, title, x_label, y_label, legend=True)
    return rendered(figure)


def fits(panels: Sequence[tuple[str, Sequence[float], Sequence[float], Sequence[float]]], y_label: str) -> Tensor:
    """Side by side, each (x label, x, y, what a straight line has there): points, and the line."""
    figure = Figure(figsize=(2.6 * len(panels), 2.4), layout="constrained")
    for axes, (label, x, y, line) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        axes.plot(x, line, color=SECOND, linewidth=1)
        axes.plot(x, y, "o", color=ACCENT, markersize=4)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        dress(axes, "", label, y_label, legend=False)
    return rendered(figure)


def histograms(sets: Mapping[str, Tensor], title: str, label: str, bins: int = 60) -> Tensor:
    """Several sets of numbers on one axis, each as a density. The outermost thousandths are in the end bins."""
    values = {name: numbers.detach().double().cpu().numpy() for name, numbers in sets.items()}
    finite = np.concatenate([v[np.isfinite(v)] for v in values.values()])
    low, high = np.quantile(finite, [0.001, 0.999])
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    for number, (name, v) in enumerate(values.items()):
        colour = COLOURS[number % len(COLOURS)]
        heights = np.histogram(v.clip(edges[0], edges[-1]), edges)[0] / (max(len(v), 1) * (edges[1] - edges[0]))
        axes.stairs(heights, edges, color=colour, alpha=0.25, fill=True)
        axes.stairs(heights, edges, color=colour, label=name)
    dress(axes, title, label, "density", legend=True)
    return rendered(figure)


def dress(axes: Any, title: str, x_label: str, y_label: str, legend: bool) -> None:
    """The look they share."""
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def rendered(figure: Figure, dpi: int = 110) -> Tensor:
    """A figure as a (3, h, w) byte picture."""
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return torch.from_numpy(np.asarray(canvas.buffer_rgba())[..., :3].copy()).permute(2, 0, 1)  # type: ignore[no-untyped-call]
