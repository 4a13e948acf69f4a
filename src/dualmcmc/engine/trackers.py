"""Experiment trackers: TensorBoard, Weights & Biases and MLflow, behind one interface.

They show what log.jsonl records. Each is used from one thread (`engine/tracking.py`), and may be slow or fail.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from dualmcmc import config_io
from dualmcmc.config import Config
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import cache_folder, make_folder

PROJECT = "dualmcmc"  # W&B's project, MLflow's experiment, unless their own environment variables name another
OPEN_TIMEOUT = 60.0  # seconds for a tracker to start
CLOSE_TIMEOUT = 20.0  # seconds to send the rest at the end; clusters kill a process 30 s after SIGTERM
MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # about the use of MLflow, to its developers
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",  # it draws from Python's global generator
}
MLFLOW_BATCH = 100  # parameters per request, MLflow's limit
Summary = Mapping[str, str | float]


class Tracker:
    """Shows a run; this one shows nothing. `id`: of its run, to continue it later. `location`: where to look."""

    id: str | None = None
    location = ""

    def stats(self, values: dict[str, float], images: int) -> None:
        """The statistics of a log interval; `images` is the x-axis."""

    def image(self, name: str, pixels: Tensor, images: int) -> None:
        """A (C, h, w) uint8 image."""

    def summary(self, values: Summary) -> None:
        """Facts about the whole run, such as why it stopped; later ones replace earlier ones of the same name."""

    def rewind(self, images: int) -> None:
        """What came after `images` is trained again."""

    def close(self, failed: bool) -> None:
        """The session has ended; `failed`: by an error."""


class TensorBoard(Tracker):
    """Event files in the run folder."""

    def __init__(self, folder: Path, images: int) -> None:
        self._folder, self._previous_hook = folder, threading.excepthook
        threading.excepthook = self._ignore_write_errors
        self._open(images)

    def _open(self, images: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(self._folder), purge_step=images + 1)

    def stats(self, values: dict[str, float], images: int) -> None:
        """One curve per statistic."""
        for name, value in values.items():
            if name not in ("images", "iteration"):
                self._writer.add_scalar(name, value, images)

    def image(self, name: str, pixels: Tensor, images: int) -> None:
        """Under the tab Images."""
        self._writer.add_image(name, pixels, images)

    def rewind(self, images: int) -> None:
        """Hide what came after `images`."""
        self._writer.close()
        self._open(images)

    def close(self, failed: bool) -> None:
        """Flush and close."""
        threading.excepthook = self._previous_hook
        self._writer.close()

    def _ignore_write_errors(self, failed: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread and raises its I/O errors again at the next call."""
        if not issubclass(failed.exc_type, OSError):
            self._previous_hook(failed)


class WandB(Tracker):
    """Weights & Biases, configured by its own environment variables and `wandb login`."""

    def __init__(self, config: Config, root: Path, run_id: str | None) -> None:
        import wandb

        chosen = wandb.setup().settings
        online = chosen.mode not in ("offline", "dryrun", "disabled")
        if online and not wandb.login(prompt=False):
            raise UserError(
                "Weights & Biases has no API key: run 'wandb login', set WANDB_API_KEY, or record offline with "
                "WANDB_MODE=offline."
            )
        self._image = wandb.Image
        self._run = wandb.init(
            project=chosen.project or PROJECT,
            name=chosen.run_name or root.absolute().name,
            id=chosen.run_id or run_id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or root,
            reinit="create_new",  # a run that the caller has open stays open
            settings=wandb.Settings(
                silent=True,
                console="off",  # otherwise it replaces the methods of sys.stdout
                symlink=False,  # a run folder contains no links
                disable_git=True,  # git would run in the run folder, whose .git may come from somebody else
                init_timeout=OPEN_TIMEOUT,
                finish_timeout=CLOSE_TIMEOUT,
            ),
        )
        self._run.config.update(_flat(config), allow_val_change=True)
        self._run.define_metric("images", hidden=True)
        self._run.define_metric("*", step_metric="images")
        if chosen.mode != "disabled":
            self.id = self._run.id
            self.location = str(self._run.url) if online else f"offline in '{self._run.settings.sync_dir}'"

    def stats(self, values: dict[str, float], images: int) -> None:
        """One point per statistic."""
        self._run.log({**values, "images": images})

    def image(self, name: str, pixels: Tensor, images: int) -> None:
        """Among the media."""
        self._run.log({name: self._image(pixels.permute(1, 2, 0).numpy()), "images": images})

    def summary(self, values: Summary) -> None:
        """In the summary of the run."""
        self._run.summary.update(dict(values))

    def close(self, failed: bool) -> None:
        """Send the rest; the run is finished or failed."""
        self._run.finish(exit_code=int(failed))


class MLflow(Tracker):
    """MLflow, configured by its own environment variables. By default its store is mlflow.db in the current folder."""

    def __init__(self, config: Config, root: Path, run_id: str | None) -> None:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)  # before the import, which reads some
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        self._metric = Metric
        with _one_at_a_time():
            self._client = client = MlflowClient()
            experiment_id = _experiment_id(client)
        run: Any = None
        if run_id is not None:
            try:
                run = client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        if run is None or run.info.lifecycle_stage != "active":
            run = client.create_run(experiment_id, run_name=root.absolute().name)
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        self.id = run.info.run_id
        experiment = client.get_experiment(run.info.experiment_id)
        self.location = f"run '{run.info.run_name}' of experiment '{experiment.name}'"
        known = run.data.params
        params = {name: "null" if value is None else str(value) for name, value in _flat(config).items()}
        new = [Param(name, value) for name, value in params.items() if name not in known]
        for start in range(0, len(new), MLFLOW_BATCH):
            client.log_batch(self.id, params=new[start : start + MLFLOW_BATCH])
        # a parameter cannot change: what a resumed run has changed becomes a tag
        self.summary({name: value for name, value in params.items() if known.get(name, value) != value})

    def stats(self, values: dict[str, float], images: int) -> None:
        """One metric per statistic."""
        now = int(1000 * time.time())
        metrics = [self._metric(name, value, now, images) for name, value in values.items() if name != "images"]
        self._client.log_batch(self.id, metrics=metrics)

    def image(self, name: str, pixels: Tensor, images: int) -> None:
        """An image with a step, among the artifacts."""
        self._client.log_image(self.id, pixels.permute(1, 2, 0).numpy(), key=name, step=images)

    def summary(self, values: Summary) -> None:
        """As tags."""
        for name, value in values.items():
            self._client.set_tag(self.id, name, value)

    def close(self, failed: bool) -> None:
        """The run is finished or failed."""
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """MLflow creates its local store on first use, which fails if several processes do it at the same time."""
    from filelock import FileLock

    with FileLock(make_folder(cache_folder()) / ".mlflow.lock", timeout=OPEN_TIMEOUT):
        yield


def _experiment_id(client: Any) -> str:
    if chosen := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return chosen
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name)
        except Exception:  # another run may have created it meanwhile
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return found.experiment_id


def _flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key, with lists in place of tuples."""
    settings = config_io.flatten(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
