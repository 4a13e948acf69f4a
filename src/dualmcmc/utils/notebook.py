"""A progress bar in Jupyter: one line below the cell that is updated in place, without ipywidgets."""

from __future__ import annotations

import sys
from html import escape
from typing import Any


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code, rather than IPython on a terminal or plain Python."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookBar:
    """A bar and a text. It appears with the first update; a saved notebook keeps the last one."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._fraction: float | None = None
        self._text = ""

    def update(self, fraction: float | None, text: str) -> None:
        """Show that this fraction of the work is done; None if it is unknown."""
        from IPython.display import display

        self._fraction, self._text = fraction, text
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    @property
    def shown(self) -> bool:
        """Whether there was an update."""
        return self._handle is not None

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        value = "" if self._fraction is None else f' value="{min(self._fraction, 1):.3f}"'
        return f"<progress{value}></progress> <code>{escape(self._text)}</code>"
