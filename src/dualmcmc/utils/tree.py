"""Settings and results as an indented tree, for reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from dualmcmc.utils.errors import sanitize

MAX_ITEMS, MAX_TEXT = 8, 500  # shown of a list, and of a text, which may be from a file


class Tree:
    """A dataclass whose `str` is a tree; IPython and Jupyter show it instead of the repr."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # IPython prefers a class's own __repr__, which dataclass adds, to an inherited _repr_pretty_.
        cls._repr_pretty_ = _show_tree  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return "\n".join(_lines(self, ""))


def _show_tree(tree: Tree, printer: Any, cycle: bool) -> None:
    printer.text(str(tree))


def _lines(value: Any, indent: str) -> Iterator[str]:
    for key, item in _items(value):
        name = sanitize(str(key), MAX_TEXT)
        if _is_group(item):
            yield f"{indent}{name}:"
            yield from _lines(item, indent + "  ")
        else:
            yield f"{indent}{name}: {_leaf(item)}"


def _is_group(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or (isinstance(value, Mapping) and len(value) > 0)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return [(entry.name, getattr(value, entry.name)) for entry in dataclasses.fields(value)]


def _leaf(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (list, tuple)):
        more = f", ... ({len(value):,} in all)" if len(value) > MAX_ITEMS else ""
        return f"[{', '.join(map(_leaf, value[:MAX_ITEMS]))}{more}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return sanitize(str(value), MAX_TEXT)
