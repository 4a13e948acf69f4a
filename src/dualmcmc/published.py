"""Trained weights that come with the package, by name: `dualmcmc sample cifar10-simple`."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = "weights"
HOME = Path("published")  # where the commands leave what they make of them


def shelves() -> list[Path]:
    """Folders they lie in: inside an installed package, or in the checkout it runs from."""
    here = Path(__file__).resolve().parent
    root = here.parents[1]
    return [here / WEIGHTS, *([root / WEIGHTS] if (root / "pyproject.toml").is_file() else [])]


def published() -> dict[str, Path]:
    """Name and file of each."""
    return {path.stem: path for shelf in shelves() for path in sorted(shelf.glob("*.safetensors"))}


def file_of(run: Path) -> Path | None:
    """The published weights of that name; None where there are none, or something of the user's is called so."""
    return None if run.exists() else published().get(str(run))


def home_of(run: Path) -> Path:
    """Where pictures and results of a run go: its folder, that of a snapshot, or `published/NAME`."""
    if file_of(run) is not None:
        return HOME / run
    return run.parent if run.suffix == ".safetensors" else run
