"""Pretrained weights included in the package, by name: `dualmcmc sample cifar10-simple`."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = "weights"
OUTPUT = Path("pretrained")  # commands write their output for pretrained weights to OUTPUT/NAME


def weight_folders() -> list[Path]:
    """Where the weights are: in the installed package, or in the checkout it runs from."""
    package = Path(__file__).resolve().parent
    root = package.parents[1]
    return [package / WEIGHTS, *([root / WEIGHTS] if (root / "pyproject.toml").is_file() else [])]


def pretrained_files() -> dict[str, Path]:
    """The file of each name."""
    return {path.stem: path for folder in weight_folders() for path in sorted(folder.glob("*.safetensors"))}


def pretrained_file(run: Path) -> Path | None:
    """The pretrained weights called `run`; None if there are none, or if the user has a file of that name."""
    return None if run.exists() else pretrained_files().get(str(run))


def output_folder(run: Path) -> Path:
    """Where pictures and results of a run go: its folder, that of a snapshot, or pretrained/NAME."""
    if pretrained_file(run) is not None:
        return OUTPUT / run
    return run.parent if run.suffix == ".safetensors" else run
