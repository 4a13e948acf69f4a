"""Matplotlib figures as image tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dualmcmc.utils.extras import require
from dualmcmc.utils.progress import format_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, COLOURS = "#374151", ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#6b7280")
ACCENT, SECOND = COLOURS[:2]
LARGE_NUMBERS = ("images", "samples")  # axes whose labels are shortened: 100k, 1.5M


def _matplotlib(module: str) -> Any:
    return require(f"matplotlib.{module}", "plots", "drawing curves")


def check_plots() -> None:
    """Raise `UserError` if curves cannot be drawn, before the work whose results they would show."""
    _matplotlib("figure")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    figure: Figure = _matplotlib("figure").Figure(figsize=(width, height), layout="constrained")
    return figure


def profile(values: Tensor, title: str, label: str) -> Tensor:
    """Mean and interquartile range of a chain's (steps + 1, B) values at each step."""
    table = values.float().cpu()
    steps = range(len(table))
    low, high = (table.quantile(q, dim=1) for q in (0.25, 0.75))
    figure = new_figure(6, 2.6)
    axes = figure.subplots()
    axes.fill_between(steps, low, high, color=ACCENT, alpha=0.15, label="interquartile range", linewidth=0)
    axes.plot(steps, table.mean(1), color=ACCENT, label=f"mean of {table.shape[1]}")
    axes.locator_params(axis="x", integer=True)
    style(axes, title, "step", label, legend=True)
    return render(figure)


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, x_label: str, y_label: str
) -> Tensor:
    """One line per curve, each (x, y)."""
    figure = new_figure(6, 2.6)
    axes = figure.subplots()
    for number, (name, (x, y)) in enumerate(curves.items()):
        axes.plot(x, y, color=COLOURS[number % len(COLOURS)], label=name, marker="." if len(x) < 20 else None)
    style(axes, title, x_label, y_label, legend=True)
    return render(figure)


def histograms(sets: Mapping[str, Tensor], title: str, label: str, bins: int = 60) -> Tensor:
    """Densities of several sets of values on one axis; the outermost 0.1 % are in the end bins."""
    values = {name: numbers.detach().double().cpu().numpy() for name, numbers in sets.items()}
    finite = np.concatenate([v[np.isfinite(v)] for v in values.values()])
    low, high = np.quantile(finite, [0.001, 0.999])
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    figure = new_figure(8, 3.2)
    axes = figure.subplots()
    for number, (name, v) in enumerate(values.items()):
        colour = COLOURS[number % len(COLOURS)]
        heights = np.histogram(v.clip(edges[0], edges[-1]), edges)[0] / (max(len(v), 1) * (edges[1] - edges[0]))
        axes.stairs(heights, edges, color=colour, alpha=0.25, fill=True)
        axes.stairs(heights, edges, color=colour, label=name)
    style(axes, title, label, "density", legend=True)
    return render(figure)


def style(axes: Any, title: str, x_label: str, y_label: str, legend: bool) -> None:
    """Apply the common style."""
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.tick_params(labelsize=8, colors=INK)
    if x_label in LARGE_NUMBERS:
        axes.xaxis.set_major_formatter(_matplotlib("ticker").FuncFormatter(lambda value, _: format_count(value)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def render(figure: Figure, dpi: int = 110) -> Tensor:
    """A figure as a (3, h, w) uint8 picture."""
    figure.set_dpi(dpi)
    canvas = _matplotlib("backends.backend_agg").FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.asarray(canvas.buffer_rgba())[..., :3].copy()).permute(2, 0, 1)
