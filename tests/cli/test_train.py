"""train, presets, config and bench."""

import os
import shutil

import pytest
import torch

from dualmcmc import config_io
from dualmcmc.engine import checkpoint
from tests.conftest import TINY, assert_refused


def test_train_sample_reconstruct_report(call, tmp_path):
    out = tmp_path / "run"
    answer = call("train", "digits", *TINY, "--out", out, "--device", "cpu", "--seed", 3, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["images"] == 128
    assert answer.json["stop_reason"] == "finished"
    assert answer.json["parameters"]["energy"] > 0
    assert config_io.parse_yaml((out / "config.yaml").read_text(), "")["seed"] == 3
    assert "parameters: energy" in answer.err
    answer = call("sample", out, "sampling.steps=2", "-n", 4, "--json")
    assert answer.json["numbers"]["steps"] == 2
    assert (out / "sample.png").exists()
    assert call("sample", out, "--no-ema", "--out", tmp_path / "a.npz").code == 0
    answer = call("reconstruct", out, "--json")
    assert answer.json["images"] == 359
    assert (out / "reconstruct.png").exists()
    assert "MSE" in call("reconstruct", out).out
    answer = call("report", out, "--json")
    assert answer.json["fd_pixels_real"] > 0
    assert "report.html" in call("report", out).out
    assert (out / "report.html").exists()


def test_stop_and_resume(call, tmp_path):
    out = tmp_path / "run"
    answer = call("train", *TINY, "--out", out, "--max-images", 32)  # without TARGET: digits
    assert "stopped (max-images)" in answer.out
    assert f"dualmcmc train --resume --out {out}" in answer.out
    answer = call("train", "--resume", "--out", out)
    assert answer.code == 0, answer.err
    assert "finished: 128 images" in answer.out
    answer = call("train", "--resume", "--out", out)  # nothing left to do
    assert answer.code == 0
    assert "finished: 128 images" in answer.out


def test_init(call, tmp_path, finished_run):
    out = tmp_path / "run"
    answer = call("train", *TINY, "--init", finished_run, "--out", out, "--device", "cpu")
    assert answer.code == 0, answer.err
    assert f"starting from '{finished_run / 'snapshot.safetensors'}', trained on 128 images" in answer.err
    assert config_io.parse_yaml((out / "config.yaml").read_text(), "")["train"]["init"] == str(finished_run)
    assert call("report", out).code == 0
    assert "started from the weights" in (out / "report.html").read_text()
    answer = call("export", out, "--out", tmp_path / "exported.safetensors")
    assert answer.code == 0, answer.err
    stored = checkpoint.load_info(tmp_path / "exported.safetensors")["config"]["train"]["init"]
    assert stored == "another run"  # no path or name of this machine
    answer = call("train", *TINY, "--init", "absent", "--out", tmp_path / "other")
    assert_refused(answer, "absent' does not exist", "cifar10-simple")


def test_resume_of_another_preset_is_refused(call, finished_run):
    assert_refused(call("train", "mnist", "--resume", "--out", finished_run), "'digits'", "'mnist'")


def test_out_of_memory(call, monkeypatch, tmp_path):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr("dualmcmc.engine.step.step", full)
    answer = call("train", *TINY, "--out", tmp_path / "run")
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith("error: out of memory: lower train.batch or engine.micro_batch")
    assert "Traceback" not in answer.err


def test_presets_and_config(call, tmp_path):
    assert set(call("presets", "--json").json) == set(config_io.preset_names())
    printed = call("presets").out
    assert all(name in printed for name in config_io.preset_names())
    text = call("config", "cifar10-resnet").out
    (tmp_path / "mine.yaml").write_text(text)
    assert config_io.load_config(str(tmp_path / "mine.yaml")) == config_io.load_config("cifar10-resnet")
    assert call("config", "digits", "train.batch=3", "--json").json["train"]["batch"] == 3


def test_divergence_exits_with_3(call, tmp_path):
    answer = call("train", *TINY, "guard.max_energy_gap=1e-9", "--out", tmp_path / "run")
    assert answer.code == 3
    assert "error: diverged at image" in answer.err
    assert "--resume" in answer.err


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (["train", "digit"], ["unknown preset 'digit'", "'digits'"]),
        (["train", "train.bach=1"], ["unknown setting 'train.bach'", "'train.batch'"]),
        (["train", "digits", "train.batch=x"], ["train.batch", "an integer"]),
        (["train", "digits", "nonsense"], ["nonsense", "KEY=VALUE"]),
        (["train", "--device", "tpu"], ["tpu", "cuda"]),
        (["train", "--resume", "--out", "absent"], ["no run to resume", "absent"]),
        (["train", "--out", ""], ["--out ''"]),
        (["train", "--init", "null"], ["--init 'null' names no run"]),
        (["train", "--init", " "], ["--init ' '"]),
        (["train", "--out", "file/run"], ["file/run"]),
        (["train", "--out", "file"], ["is a file"]),
        (["train", "--max-images", "0"], ["--max-images"]),
        (["train", "--max-minutes", "-1"], ["--max-minutes"]),
        (["train", "--seed", "-1"], ["--seed -1: use an integer from 0"]),
        (["train", "--seed", "x"], ["--seed"]),
        (["train", "--max-minutes", "nan"], ["--max-minutes"]),
        (["train", "data.path=file"], ["data.source=digits"]),
        (["sample", "absent", "--seed", "-1"], ["--seed"]),
        (["train", "mnist"], ["MNIST is not in", "dualmcmc data fetch mnist"]),
        (["train", "mnist", "data.path=absent.zip"], ["absent.zip"]),
        (["train", "mine.yaml"], ["mine.yaml"]),
        (["sample", "absent"], ["absent", "does not exist"]),
        (["sample", "file"], ["file"]),
        (["reconstruct", "absent"], ["absent"]),
        (["report", "absent"], ["absent"]),
        (["config", "nothing"], ["unknown preset"]),
    ],
)
def test_bad_input(call, words, hints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file")
    assert_refused(call(*words), *hints)
    assert os.listdir(tmp_path) == ["file"]


def test_cuda_is_missing(call, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(call("train", *TINY, "--device", "cuda", "--out", tmp_path / "run"), "cuda")
    assert not (tmp_path / "run").exists()


def test_existing_run_is_not_overwritten(call, finished_run):
    assert_refused(call("train", *TINY, "--out", finished_run), "already contains a run", "--resume")


@pytest.mark.parametrize("command", ["sample", "reconstruct", "report"])
def test_damaged_snapshot(call, finished_run, tmp_path, command):
    broken = tmp_path / "run"
    shutil.copytree(finished_run, broken)
    (broken / "snapshot.safetensors").write_bytes(b"x" * 100)
    before = sorted(os.listdir(broken))
    assert_refused(call(command, broken), "snapshot.safetensors", "damaged")
    assert sorted(os.listdir(broken)) == before


def test_run_without_valid_state_is_not_resumed(call, run_folder):
    older, newest = sorted((run_folder / "states").iterdir())
    log = (run_folder / "log.jsonl").read_text()
    shutil.copy(run_folder / "snapshot.safetensors", newest)
    assert_refused(call("train", "--resume", "--out", run_folder), newest.name, "cannot be resumed")
    for path in (older, newest):
        path.write_bytes(path.read_bytes()[:-9])
    assert_refused(call("train", "--resume", "--out", run_folder), older.name, "damaged", "All saved states", "--out")
    assert (run_folder / "log.jsonl").read_text() == log


def test_bad_images_and_outputs(call, finished_run, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert_refused(
        call("reconstruct", finished_run, "--images", tmp_path / "bad.png", "--out", tmp_path / "o.png"), "bad.png"
    )
    assert_refused(call("reconstruct", finished_run, "--out", tmp_path / "o.gif"), "o.gif")
    assert_refused(call("sample", finished_run, "--out", tmp_path / "o.gif"), "o.gif")
    assert_refused(call("sample", finished_run, "-n", 10_001, "--out", tmp_path / "o.png"), "-n", ".npz")
    assert_refused(call("sample", finished_run, "-n", 0, "--out", tmp_path / "o.png"), "-n")
    assert_refused(call("sample", finished_run, "sampling.steps=-1", "--out", tmp_path / "o.png"), "steps")
    assert_refused(call("report", finished_run, "--out", tmp_path / "absent" / "o.html"), "o.html")
    assert os.listdir(tmp_path) == ["bad.png"]


def test_resume_by_config_file(call, tmp_path):
    (tmp_path / "mine.yaml").write_text(call("config", "digits", *TINY).out)
    out = tmp_path / "run"
    assert call("train", tmp_path / "mine.yaml", "--out", out, "--max-images", 32).code == 0
    answer = call("train", tmp_path / "mine.yaml", "--resume", "--out", out)
    assert answer.code == 0, answer.err
    assert "finished" in answer.out


def test_bench(call):
    words = ("bench", "digits", *TINY, "--device", "cpu", "--repeats", 1, "--no-reference")
    assert call(*words, "--json").json["engine"]["seconds"] > 0
    assert "x-chain" in call(*words).out
    assert_refused(call("bench", "digitz"), "'digits'")
