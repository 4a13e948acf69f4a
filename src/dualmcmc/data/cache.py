"""The cache folder: where named sets lie unless data.path says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "DUALMCMC_DATA"


def cache_folder() -> Path:
    """$DUALMCMC_DATA, or dualmcmc in the user's cache folder (~/.cache, or $XDG_CACHE_HOME)."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dualmcmc"
