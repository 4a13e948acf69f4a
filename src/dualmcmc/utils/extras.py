"""Optional dependencies: imported where they are used, with a one-line error if missing."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from dualmcmc.utils.errors import UserError


def is_installed(package: str) -> bool:
    """Whether a package can be imported. Does not import it."""
    try:
        spec = find_spec(package)
    except ValueError:  # a module that was loaded without a spec
        return False
    return spec is not None and spec.origin is not None  # without origin: a folder of that name, as trackers create


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """The module, or a `UserError` that says which extra of this package installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{purpose} needs the package {package}: pip install 'dualmcmc[{extra}]'.") from None
