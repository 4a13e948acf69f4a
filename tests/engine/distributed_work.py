"""What every rank does in the tests of several processes, and a single process for comparison."""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import dualmcmc
from dualmcmc import data
from dualmcmc.data.store import MemoryStore
from dualmcmc.engine import watchdog
from dualmcmc.engine.ddp import init_distributed
from dualmcmc.engine.distributed import World
from dualmcmc.engine.resume import resumed_config
from dualmcmc.engine.trainer import train
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.tasks.evaluate import evaluate
from dualmcmc.tasks.sample import sample
from dualmcmc.utils.errors import UserError
from tests.conftest import tiny
from tests.custom import plane_config, plane_networks, points
from tests.networks import Tiny
from tests.processes import command

SHORT = ("train.images=48", "train.log_every=1", "train.sample_every=48", "data.flip=true")
RUNS = {
    "simple": ("ema.energy=true",),
    "second": ("teaching.second_x_chain=true", "teaching.start_noise=0.1", "engine.micro_batch=4"),
    "synced": ("nets.kind=resnet", "engine.sync_batchnorm=true"),
    "triangle": ("method=triangle",),
    "no-mcmc": ("method=no-mcmc", "teaching.entropy_samples=2"),
    "persistent": ("method=persistent", "teaching.buffer_size=40", "teaching.restart_probability=0.5"),
    "improved-cd": ("method=improved-cd", "teaching.buffer_size=40"),
    "rae": ("method=rae",),
    "abp": ("method=abp", "data.flip=false"),
    "local batchnorm": ("nets.kind=resnet", "train.images=16"),
    "own noise": ("engine.shared_noise=false", "train.images=16"),
}


def work(out: Path, world: World) -> None:
    """Train every kind of run; sample from one, and evaluate it."""
    for name, overrides in RUNS.items():
        train(tiny(*SHORT, *overrides), out / name, "cpu", world=world)
    torch.manual_seed(world.rank)  # rank 0's weights are used
    networks = plane_networks()
    config = plane_config(*SHORT, "data.flip=false")
    train(config, out / "custom", "cpu", networks=networks, data=points(40), world=world)
    run = dualmcmc.load(out / "simple", "cpu", overrides=["sampling.batch=7"], world=world)
    sample(run, 40, out / "samples.npz")
    own = data.load(run.config.data)
    images = data.DataSplits(MemoryStore(own.train.first(100)), MemoryStore(own.test.first(20)))
    exact = FeatureExtractor(Tiny(), 48, "cpu", standard=False, checksum="tiny")
    features = FeatureExtractor(Tiny(), 48, "cpu", standard=False, checksum="tiny", exact=exact)
    result = evaluate(run, ["fid", "precision", "mse", "ssim"], 60, images, features)
    if world.is_main:
        (out / "numbers.json").write_text(json.dumps(result.numbers()))


def rank_work(out: Path) -> None:
    """The same, and what only several processes can show."""
    world = init_distributed("cpu")
    work(out, world)
    found = {"rank": world.rank, "size": world.size, "error": None, "exit": None}
    config, parts = tiny(*SHORT, *RUNS["simple"]), out / "parts"
    train(config, parts, "cpu", max_images=32, world=world)
    if world.is_main:
        shutil.copytree(parts, out / "stopped")
    train(world.on_main(lambda: resumed_config(parts, [])), parts, "cpu", resume=True, world=world)
    try:
        train(replace(config, train=replace(config.train, batch=15)), out / "invalid", "cpu", world=world)
    except UserError as error:
        found["error"] = str(error)
    except SystemExit as stopped:
        found["exit"] = stopped.code
    found["threads"] = count_gloo_threads()
    world.close()
    found["threads_after_closing"] = count_gloo_threads()
    (out / f"rank{found['rank']}.json").write_text(json.dumps(found))


def hasten_watchdog() -> None:
    watchdog.NOTICE = watchdog.SLOW_NOTICE = 0.5
    watchdog.SILENT, watchdog.BEAT = 2.0, 0.1


def impatient_command(*words: object) -> None:
    """The command `dualmcmc`, with a watchdog that speaks soon."""
    hasten_watchdog()
    command(*words)


def slow_work(done: Path | str) -> None:
    """Rank 0 works until the file `done` exists; the other waits for it. SIGTERM exits, as in the command."""
    hasten_watchdog()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    world = init_distributed("cpu")

    def function() -> None:
        while not Path(done).exists():
            time.sleep(0.05)

    world.on_main(function)
    world.close()


def count_gloo_threads() -> int:
    tasks = Path("/proc/self/task")
    names = [(tasks / task / "comm").read_text() for task in os.listdir(tasks)] if tasks.exists() else []
    return sum(name.startswith("pt_gloo") for name in names)
