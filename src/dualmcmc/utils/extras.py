"""Optional dependencies: imported where they are used, with a one-line error if missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from dualmcmc.utils.errors import UserError


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """The module, or a `UserError` that says which extra of this package installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{purpose} needs the package {package}: pip install 'dualmcmc[{extra}]'.") from None
