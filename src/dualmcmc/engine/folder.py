"""What lies where in a run folder."""

from __future__ import annotations

from pathlib import Path

from dualmcmc import settings
from dualmcmc.config import Config
from dualmcmc.errors import UserError
from dualmcmc.files import TEMPORARY, write_text


class RunFolder:
    """Names inside a run folder; makes nothing by itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.log = root / "log.jsonl"
        self.tensorboard = root / "tensorboard"
        self.samples = root / "samples"
        self.states = root / "states"
        self.snapshot = root / "snapshot.safetensors"
        self.report = root / "report.html"
        self.lock = root / ".lock"

    def holds_a_run(self) -> bool:
        """Whether there is a state to go on from; the first is saved before the first iteration."""
        return bool(self.saved_states())

    def require_run(self) -> None:
        """One clear line where there is no run."""
        if not self.root.exists():
            raise UserError(f"there is no run at '{self.root}': the folder does not exist.")
        if not self.config.exists():
            raise UserError(f"'{self.root}' is not a run folder: it holds no config.yaml.")

    def write_config(self, config: Config) -> None:
        """Store the whole tree, with its comments."""
        write_text(self.config, settings.render(config))

    def state_path(self, images: int) -> Path:
        """The full state after `images` images."""
        return self.states / f"{images:012d}.safetensors"

    def saved_states(self) -> list[Path]:
        """Full states on disk, oldest first."""
        return sorted(path for path in self.states.glob("*.safetensors") if path.stem.isdecimal())

    def latest_state(self) -> Path:
        """The newest full state."""
        found = self.saved_states()
        if not found:
            raise UserError(f"'{self.root}' holds no saved state to go on from.")
        return found[-1]

    def remove_leftovers(self) -> None:
        """Delete what a kill in the middle of a write left behind."""
        for part in (self.root, self.states, self.samples):
            for path in part.glob(f".*{TEMPORARY}"):
                path.unlink(missing_ok=True)

    def set_aside(self, state: Path) -> None:
        """A damaged state, out of the way of the sound ones; a person may want to look at it."""
        state.replace(state.with_suffix(".damaged"))

    def prune_states(self, keep: int) -> None:
        """Delete all but the newest `keep` states."""
        for path in self.saved_states()[:-keep]:
            path.unlink(missing_ok=True)
