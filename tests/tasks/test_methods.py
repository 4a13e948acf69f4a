"""Tasks of runs whose method does not train all three networks: they work, or refuse with one line."""

import pytest
import torch

import dualmcmc
from dualmcmc.engine.trainer import train
from dualmcmc.tasks.evaluate import needs_images
from dualmcmc.utils.images import save_png
from tests.conftest import assert_refused, tiny

TASKS = {  # and the networks they need
    "sample": (),
    "evaluate": ("generator",),  # for reconstructions
    "long-chains": ("energy",),
    "revise": ("energy", "generator"),
    "reconstruct": ("generator",),
    "interpolate": ("generator",),
    "inpaint": ("generator",),
    "outliers": ("energy",),
    "report": (),
}


def test_the_same_reason_is_given_once(tmp_path, call):
    train(tiny("train.images=32", "method=short-run"), tmp_path / "run", "cpu")
    answer = call("evaluate", tmp_path / "run", "--metrics", "mse,psnr,ssim", "-n", 2, "--device", "cpu")
    assert answer.code == 2
    assert answer.err.count("nothing to measure: reconstruction needs a generator, which") == 1
    assert answer.err.count("needs a generator") == 1


@pytest.mark.parametrize("method", ["short-run", "sr-abp", "vae", "cooperative"])
def test_tasks(tmp_path, call, method):
    config = tiny("train.images=32", f"method={method}")
    train(config, tmp_path / "run", "cpu")
    (tmp_path / "others").mkdir()
    for number in range(2):
        save_png(torch.randint(0, 256, (1, 8, 8), dtype=torch.uint8), tmp_path / "others" / f"{number}.png")
    words = {
        "outliers": ["--against", tmp_path / "others"],
        "long-chains": ["sampling.steps=4"],
        "evaluate": ["--metrics", "mse"],
        "report": [],
    }
    for task, networks in TASKS.items():
        few = [] if task == "report" else ["-n", 2]
        answer = call(task, tmp_path / "run", *words.get(task, []), *few, "--device", "cpu")
        missing = [name for name in networks if name not in config.networks]
        if missing:
            assert_refused(answer, missing[0], f"method={method} does not train")
        else:
            assert answer.code == 0, (task, answer)


def test_no_images_are_read_for_reconstructions_that_a_method_cannot_make(tmp_path):
    train(tiny("train.images=32", "method=short-run"), tmp_path / "run", "cpu")
    run = dualmcmc.load(tmp_path / "run", "cpu")
    assert not needs_images(run, ["mse", "ssim"], None)
    assert needs_images(run, ["mse", "kid"], None)
