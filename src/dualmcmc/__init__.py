"""dualmcmc: dual-MCMC teaching of an energy-based model, a generator and an inference model.

    run = dualmcmc.load("runs/digits")      # a trained run
    x = run.sample(64)                      # EBM samples; also revise_x, infer, revise_z,
                                            # reconstruct, generate, energy
    dualmcmc.evaluate(run)                  # FID, MSE, PSNR, SSIM; also inpaint, interpolate, outliers
    dualmcmc.train("digits", "runs/mine")   # what the command `dualmcmc train` calls
    dualmcmc.doctor("runs/mine")            # is it healthy; also write_report

    networks = dualmcmc.Trio(energy, generator, inference)  # your own modules, on your own data
    dualmcmc.train("vectors", "runs/own", networks=networks, data=points)

A training loop of your own: `Teaching`, `Chain`, `Optimizers` and `step`; the chains alone: `revise_x`, `revise_z`,
`Trace`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module; loaded on first use, so that `dualmcmc --help` does not wait for PyTorch
_MODULES = {
    "Chain": "dualmcmc.config",
    "Config": "dualmcmc.config",
    "Teaching": "dualmcmc.config",
    "Trace": "dualmcmc.langevin",
    "revise_x": "dualmcmc.langevin",
    "revise_z": "dualmcmc.langevin",
    "Losses": "dualmcmc.methods",
    "Optimizers": "dualmcmc.methods",
    "dual_mcmc": "dualmcmc.methods.dual_mcmc",
    "step": "dualmcmc.methods",
    "Gaussian": "dualmcmc.nets",
    "Trio": "dualmcmc.nets",
    "train": "dualmcmc.engine.trainer",
    "evaluate": "dualmcmc.tasks.evaluate",
    "inpaint": "dualmcmc.tasks.inpaint",
    "interpolate": "dualmcmc.tasks.interpolate",
    "outliers": "dualmcmc.tasks.outliers",
    "load_features": "dualmcmc.tasks.fid",
    "Run": "dualmcmc.tasks.run",
    "load": "dualmcmc.tasks.load",
    "doctor": "dualmcmc.report.doctor",
    "write_report": "dualmcmc.report.page",
    "load_config": "dualmcmc.config_io",
    "Diverged": "dualmcmc.utils.errors",
    "UserError": "dualmcmc.utils.errors",
}

if TYPE_CHECKING:
    from dualmcmc.config import Chain, Config, Teaching
    from dualmcmc.config_io import load_config
    from dualmcmc.engine.trainer import train
    from dualmcmc.langevin import Trace, revise_x, revise_z
    from dualmcmc.methods import Losses, Optimizers, step
    from dualmcmc.methods.dual_mcmc import dual_mcmc
    from dualmcmc.nets import Gaussian, Trio
    from dualmcmc.report.doctor import doctor
    from dualmcmc.report.page import write_report
    from dualmcmc.tasks.evaluate import evaluate
    from dualmcmc.tasks.fid import load_features
    from dualmcmc.tasks.inpaint import inpaint
    from dualmcmc.tasks.interpolate import interpolate
    from dualmcmc.tasks.load import load
    from dualmcmc.tasks.outliers import outliers
    from dualmcmc.tasks.run import Run
    from dualmcmc.utils.errors import Diverged, UserError

__all__ = [
    "Chain", "Config", "Diverged", "Gaussian", "Losses", "Optimizers", "Run", "Teaching", "Trace", "Trio",
    "UserError", "doctor", "dual_mcmc", "evaluate", "inpaint", "interpolate", "load", "load_config", "load_features",
    "outliers", "revise_x", "revise_z", "step", "train", "write_report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dualmcmc' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
