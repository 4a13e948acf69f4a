"""Our figures beside the paper's, as Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dualmcmc.paper.experiments import Experiment
from dualmcmc.utils.tree import Tree

Numbers = Mapping[str, float | None]


@dataclass(frozen=True)
class Table(Tree):
    """A measured experiment: one row per row of the paper's, and remarks."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    def markdown(self) -> str:
        """As a page with a table."""
        lines = [f"# {self.title}", "", _line(self.header), _line(["---"] * len(self.header))]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def csv(self) -> str:
        """As comma-separated values."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.header, *self.rows])
        return text.getvalue()

    def html(self) -> str:
        """As one self-contained page."""

        def cells(tag: str, values: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

        rows = "\n".join(cells("td", row) for row in self.rows)
        notes = "\n".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(self.title)}</title>'
            f"<style>{STYLE}</style><h1>{html.escape(self.title)}</h1>\n<table>\n<thead>{cells('th', self.header)}"
            f"</thead>\n<tbody>\n{rows}\n</tbody></table>\n<ul>\n{notes}\n</ul></html>\n"
        )

    def text(self) -> list[str]:
        """As aligned lines."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                 for row in (self.header, *self.rows)]  # fmt: skip
        return [self.title, *lines, *self.notes]


STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}th,td{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #8886}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#eee}}"
)


def make_table(
    experiment: Experiment, ours: Mapping[str, Numbers], facts: Mapping[str, str], notes: Sequence[str]
) -> Table:
    """The table of an experiment. `ours`: numbers by variant; `facts`: how long each was trained."""
    extra = [
        name
        for numbers in ours.values()
        for name, value in numbers.items()
        if name not in experiment.columns and value is not None
    ]
    columns = [*experiment.columns, *dict.fromkeys(extra)]
    header = ["", *(text for column in columns for text in _headings(column, experiment)), "trained"]
    rows = []
    for row in experiment.rows:
        measured = ours.get(row.variant or "", {})
        cells = [row.label]
        for column in columns:
            cells += [row.paper.get(column, "–")] if column in experiment.columns else []
            cells.append(_format(measured.get(row.ours.get(column, column))))
        rows.append((*cells, facts.get(row.variant or "", "quoted")))
    return Table(experiment.title, tuple(header), tuple(rows), (experiment.note, *notes))


def _headings(column: str, experiment: Experiment) -> list[str]:
    return [f"{column}, paper", f"{column}, here"] if column in experiment.columns else [f"{column}, here"]


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
