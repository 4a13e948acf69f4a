"""Pictures for the page: curves of the log, film strips and profiles of the two chains."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from dualmcmc.langevin import Trace
from dualmcmc.pictures import encode_png, from_uint8, grid, to_uint8
from dualmcmc.tasks.run import Run

INK, ACCENT, SECOND = "#374151", "#2563eb", "#d97706"
ROWS = 6  # samples in a film strip
FRAMES = 11  # states shown of each

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


def curves(log: Sequence[dict[str, Any]]) -> str:
    """All curves of a log in one picture."""
    lines = [entry for entry in log if entry.get("kind") == "train"]
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, (title, label, names) in zip(figure.subplots(2, 3).flat, CURVES, strict=True):
        for (name, words), colour in zip(names, (ACCENT, SECOND, INK), strict=False):
            points = [(line["images"], line[name]) for line in lines if isinstance(line.get(name), (int, float))]
            axes.plot(*zip(*points, strict=True), color=colour, label=words, linewidth=1.4) if points else None
        _dress(axes, title, "images", label, legend=len(names) > 1 and bool(lines))
        shown = [value for line in axes.get_lines() for value in line.get_ydata()]
        if title in LOGARITHMIC and shown and min(shown) > 0:
            axes.set_yscale("log")
    return _figure(figure)


def x_chain(run: Run) -> tuple[str, str, dict[str, float]]:
    """Film strip of the x-chain from generator samples, its energy profile, and its ends."""
    steps = run.config.sampling_chain.steps
    trace = Trace(every=max(1, -(-steps // (FRAMES - 1))))
    run.revise_x(run.sample(64, steps=0), trace=trace)
    strip = _strip([to_uint8(state).cpu() for state in trace.states])
    figure = _profile(trace.potential, "Energy over the x-chain", "energy")
    return strip, figure, {"start": float(trace.potential[0].mean()), "end": float(trace.potential[-1].mean())}


def z_chain(run: Run, images: Tensor) -> tuple[str, str, dict[str, float]]:
    """Film strip of the z-chain on byte images, the originals last; its MSE profile, and its ends."""
    x = from_uint8(images[:64]).to(run.device)
    steps = run.config.teaching.z_chain.steps
    trace = Trace(every=max(1, -(-steps // (FRAMES - 1))))
    run.revise_z(run.infer(x).mean, x, trace=trace)
    frames = [to_uint8(run.generate(state)).cpu() for state in trace.states]
    strip = _strip([*frames, images[:64].cpu()])
    figure = _profile(trace.mse, "MSE over the z-chain", "MSE per pixel")
    return strip, figure, {"start": float(trace.mse[0].mean()), "end": float(trace.mse[-1].mean())}


def picture(pixels: Tensor) -> str:
    """A (C, h, w) byte picture as a data address."""
    return _address(encode_png(pixels))


def _strip(frames: list[Tensor]) -> str:
    """Frames of (N, C, H, W): one row a sample, one column a frame."""
    stacked = torch.stack([frame[:ROWS] for frame in frames], dim=1)  # (rows, frames, C, H, W)
    return picture(grid(stacked.flatten(0, 1), columns=len(frames)))


def _profile(values: Sequence[Tensor], title: str, label: str) -> str:
    """Mean over the samples at each step, and the middle half of them."""
    table = torch.stack(list(values)).float().cpu()  # (steps + 1, B)
    steps = range(len(table))
    low, high = (table.quantile(q, dim=1) for q in (0.25, 0.75))
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(steps, low, high, color=ACCENT, alpha=0.15, label="middle half", linewidth=0)
    axes.plot(steps, table.mean(1), color=ACCENT, label="mean")
    _dress(axes, title, "step", label, legend=True)
    return _figure(figure)


def _dress(axes: Any, title: str, x_label: str, y_label: str, legend: bool) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def _figure(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return _address(buffer.getvalue())


def _address(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
