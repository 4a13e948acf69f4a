"""What the tests of several processes have each of them do: train, sample, evaluate. Also called by one alone."""

import json
import sys
from pathlib import Path

import torch

import dualmcmc
from dualmcmc import data
from dualmcmc.crew import Crew, launch
from dualmcmc.data.store import Memory
from dualmcmc.engine.loop import train
from dualmcmc.metrics.features import Features
from dualmcmc.tasks.evaluate import evaluate
from dualmcmc.tasks.sample import sample
from tests.conftest import tiny
from tests.networks import Tiny

SHORT = ("train.batch=16", "train.images=160", "train.log_every=1", "train.save_every=80", "data.flip=true")
RUNS = {
    "simple": ("ema.energy=true",),
    "second": ("teaching.second_x_chain=true", "teaching.start_noise=0.1", "engine.micro_batch=4"),
    "synced": ("nets.kind=resnet", "engine.sync_batchnorm=true"),
    "apart": ("nets.kind=resnet",),
    "own noise": ("engine.shared_noise=false",),
}


def work(out: Path, crew: Crew) -> None:
    for name, changes in RUNS.items():
        train(tiny(*SHORT, *changes), out / name, "cpu", crew=crew)
    run = dualmcmc.load(out / "simple", "cpu", overrides=["sampling.batch=7"], crew=crew)
    sample(run, 40, out / "samples.npz")
    own = data.load(run.config.data)
    images = data.Images(Memory(own.train.first(2100)), Memory(own.test.first(30)))
    features = Features(Tiny(), 48, "cpu", standard=False, checksum="tiny")
    result = evaluate(run, ["fid", "precision", "mse", "ssim"], 60, images, features)
    if crew.leads:
        (out / "numbers.json").write_text(json.dumps(result.numbers()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    crew = launch("cpu")
    work(Path(sys.argv[1]), crew)
    crew.close()
