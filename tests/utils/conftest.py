from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: `clock[0] = seconds`."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook shows below a cell: the states of each display, in order."""
    displays = []

    def display(thing, display_id):
        assert display_id is True
        states = [thing._repr_html_()]
        displays.append(states)
        return SimpleNamespace(update=lambda thing: states.append(thing._repr_html_()))

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    return displays
