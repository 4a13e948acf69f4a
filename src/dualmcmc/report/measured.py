"""What `evaluate` and the tasks have measured, as tables of the page; each row with the command that gave it."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

SHOWN = 20  # measurements of one kind, the newest
TITLES = {
    "evaluate": "Evaluation",
    "reconstruct": "Reconstruction",
    "inpaint": "Inpainting",
    "outliers": "Outliers",
    "revise": "MCMC revision",
    "interpolate": "Interpolation",
    "sample": "Sampling",
    "long-run": "Long chains",
}


def measured(entries: list[dict[str, Any]]) -> str:
    """All measurements, by kind; an empty text where there are none."""
    sections = []
    for task, title in TITLES.items():
        rows = [_row(entry) for entry in entries if entry["task"] == task][-SHOWN:]
        if rows:
            head = "<tr><th>numbers</th><th>how</th></tr>"
            sections.append(f"<h3>{title}</h3><table>{head}{''.join(reversed(rows))}</table>")
    return f"<h2>Measured</h2>{''.join(sections)}" if sections else ""


def _row(entry: dict[str, Any]) -> str:
    values = "<br>".join(f"{html.escape(name)} <b>{html.escape(value)}</b>" for name, value in _flat(entry["numbers"]))
    left_out = entry.get("left_out")
    for name, reason in left_out.items() if isinstance(left_out, dict) else ():
        values += f"<br><small>{html.escape(str(name))} left out: {html.escape(str(reason))}</small>"
    how = [f"<code>{html.escape(str(entry.get('command')))}</code>", html.escape(str(entry["time"]))]
    if entry.get("samples"):
        how.append(f"{html.escape(str(entry['samples']))} samples")
    chain = entry.get("x_chain")
    if isinstance(chain, dict):
        how.append(html.escape(f"x-chain {chain.get('steps')} steps of {chain.get('step_size')}"))
    how += [f"{words} {html.escape(str(entry[key]))}" for key, words in _FACTS if entry.get(key) is not None]
    data = entry.get("data")
    if isinstance(data, dict):
        how.append(f"data {html.escape(str(data.get('source')))} {html.escape(str(data.get('checksum')))}")
    return f"<tr><td>{values}</td><td><small>{'<br>'.join(how)}</small></td></tr>"


_FACTS = (("seed", "seed"), ("commit", "commit"), ("device", "on"), ("torch", "torch"), ("seconds", "seconds"))


def _flat(numbers: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Nested numbers as (name, value); of a list its two ends."""
    for name, value in numbers.items():
        words = f"{prefix}{name}"
        if isinstance(value, dict) and depth < 8:  # no task nests deeper, and a file may hold anything
            yield from _flat(value, f"{words} ", depth + 1)
        elif isinstance(value, list):
            if value:
                yield words, f"{_short(value[0])} to {_short(value[-1])}"
        else:
            yield words, _short(value)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
