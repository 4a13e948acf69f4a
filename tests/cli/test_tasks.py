"""Commands on a trained run: picture, numbers and saved result, and one line for bad input."""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from dualmcmc.tasks import work
from tests.conftest import assert_refused
from tests.networks import own_network

COMMANDS = {
    "sample": ["-n", 4],
    "long-chains": ["sampling.steps=20", "-n", 3],
    "reconstruct": [],
    "interpolate": [],
    "revise": ["-n", 4],
    "inpaint": ["-n", 4],
    "outliers": ["--against", "digits", "-n", 9],
}


@pytest.fixture(autouse=True)
def _cpu_only(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("command", COMMANDS)
def test_picture_numbers_and_result(call, run_folder, command):
    answer = call(command, run_folder, *COMMANDS[command], "--seed", 5)
    assert answer.code == 0, answer.err
    assert (run_folder / f"{command}.png").exists()
    assert f"picture: {run_folder / f'{command}.png'}" in answer.out
    (path,) = (run_folder / "results").iterdir()
    stored = json.loads(path.read_text())
    words = [command, str(run_folder), *map(str, COMMANDS[command]), "--seed", "5"]
    assert stored["command"] == " ".join(["dualmcmc", *words])
    assert (stored["task"], stored["seed"]) == (command, 5)
    assert stored["numbers"]
    assert stored["seconds"] > 0
    answer = call(command, run_folder, *COMMANDS[command], "--json", "--out", run_folder / "x.png")
    assert answer.json["file"] == str(run_folder / "x.png")
    assert answer.json["numbers"].keys() == stored["numbers"].keys()
    assert len(list((run_folder / "results").iterdir())) == 2


@pytest.mark.parametrize("command", [*COMMANDS, "evaluate"])
def test_bad_input(call, run_folder, command):
    words = COMMANDS.get(command, [])
    assert_refused(call(command, run_folder / "absent", *words), "does not exist")
    assert_refused(call(command, run_folder, *words, "--device", "tpu"), "unknown device")
    assert_refused(call(command, run_folder, *words, "--seed", "-1"), "seed")
    if command != "evaluate":
        assert_refused(call(command, run_folder, *words, "--out", "a.jpg"), "--out", ".png")
    if command in ("reconstruct", "interpolate", "revise", "inpaint"):
        assert_refused(call(command, run_folder, *words, "--images", "/absent"), "/absent")
        assert_refused(call(command, run_folder, *words, "data.crop=none"), "data.crop", "--images")
    assert not (run_folder / "results").exists()
    assert not (run_folder / f"{command}.png").exists()


def test_chain_settings(call, run_folder):
    words = ("sampling.steps=7", "sampling.step_size=0.08", "sampling.temperature=0", "-n", 5, "--batch", 3)
    answer = call("sample", run_folder, *words, "--json").json
    assert [answer["x_chain"][name] for name in ("steps", "step_size", "temperature")] == [7, 0.08, 0]
    assert answer["batch"] == 3
    assert call("inpaint", run_folder, "teaching.z_chain.steps=4", "-n", 2, "--json").json["z_chain"]["steps"] == 4
    for command in ("reconstruct", "inpaint"):
        by_default = call(command, run_folder, "-n", 4, "--json").json
        cold, warm = (
            call(command, run_folder, f"teaching.z_chain.temperature={t}", "-n", 4, "--json").json for t in (0, 1)
        )
        assert by_default["z_chain"]["temperature"] == 0
        assert by_default["numbers"] == cold["numbers"] != warm["numbers"]
        assert "+ z-chain (2 noise-free steps)" in call(command, run_folder, "-n", 4).out
        assert "+ z-chain (2 steps)" in call(command, run_folder, "teaching.z_chain.temperature=1", "-n", 4).out
    assert call("reconstruct", run_folder, "-n", 3, "--json").json["images"] == 3
    for override in ("sampling.steps=-1", "sampling.step_size=0", "sampling.temperature=-1"):
        assert_refused(call("sample", run_folder, override), override.partition("=")[0])
    assert_refused(call("sample", run_folder, "--batch", 0), "sampling.batch")
    assert_refused(call("sample", run_folder, "train.batch=3"), "train.batch")
    assert_refused(call("sample", run_folder, "sampling.stpes=3"), "'sampling.steps'")


def test_long_chains(call, run_folder):
    answer = call("long-chains", run_folder, "sampling.steps=50", "-n", 3)
    assert "3 chains of 50 steps: all finite" in answer.out
    assert "R-hat of the energy" in answer.out
    assert "accepted" not in answer.out  # no accept/reject step
    answer = call("long-chains", run_folder, "sampling.steps=50", "sampling.metropolis=true", "-n", 3)
    assert "% of the proposals accepted" in answer.out
    stuck = ["sampling.steps=50", "sampling.metropolis=true", "sampling.temperature=1", "sampling.step_size=1e6"]
    answer = call("long-chains", run_folder, *stuck, "-n", 3, "--json")
    assert answer.code == 0, answer.err
    assert (answer.json["numbers"]["acceptance_rate"], answer.json["numbers"]["r_hat"]) == (0, None)
    assert_refused(call("long-chains", run_folder, "sampling.steps=0"), "at least one")


def test_npz(call, run_folder, tmp_path):
    assert call("sample", run_folder, "-n", 1200, "--out", tmp_path / "a.npz").code == 0
    with np.load(tmp_path / "a.npz") as stored:
        assert stored["revised"].shape == (1200, 8, 8, 1)
    assert_refused(call("sample", run_folder, "-n", 20_000), "too many for a picture")


def test_images_are_converted_with_a_note(call, run_folder, tmp_path):
    Image.new("RGB", (40, 30), (9, 99, 200)).save(tmp_path / "a.png")
    for command in ("reconstruct", "inpaint", "revise"):
        answer = call(command, run_folder, "--images", tmp_path / "a.png")
        assert answer.code == 0, answer.err
        assert "converted to 8x8 greyscale from 40x30 RGB" in answer.err
    answer = call("interpolate", run_folder, "--images", tmp_path / "a.png")
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith("error: interpolation needs at least two images")


def test_outliers(call, run_folder, tmp_path):
    (tmp_path / "own").mkdir()
    for number in range(5):
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (9, 9), np.uint8)).save(
            tmp_path / "own" / f"{number}.png"
        )
    words = ("--against", f"digits,{tmp_path / 'own'}", "--scores", "energy,typicality,reconstruction")
    answer = call("outliers", run_folder, *words, "--json").json
    assert set(answer["numbers"]) == {"digits", "own"}
    assert set(answer["numbers"]["own"]) == {"energy", "typicality", "reconstruction"}
    assert set(answer["numbers"]["own"]["energy"]) == {
        "auroc",
        "aupr_outliers",
        "aupr_in_distribution",
        "fpr_at_95_tpr",
    }
    assert answer["images"] == {"in_distribution": 359, "digits": 1797, "own": 5}
    assert answer["against"]["own"]["checksum"]
    table = call("outliers", run_folder, *words).out.splitlines()
    for score, numbers in answer["numbers"]["own"].items():
        (line,) = [line for line in table if line.startswith("own ") and f" {score} " in line]
        assert line.endswith("worse than chance") == (numbers["auroc"] < 0.5)
    shutil.copytree(tmp_path / "own", tmp_path / "more" / "own")
    shutil.copytree(tmp_path / "own", tmp_path / "in_distribution")
    places = f"{tmp_path / 'own'},{tmp_path / 'more' / 'own'},{tmp_path / 'in_distribution'}"
    answer = call("outliers", run_folder, "--against", places, "--json").json
    assert answer["images"] == {"in_distribution": 359, "own": 5, "own-2": 5, "in_distribution-2": 5}
    for against, said in [
        ("nosuch", "neither a named dataset"),
        (",", "--against is empty"),
        ("svhn", "data fetch svhn"),
    ]:
        assert_refused(call("outliers", run_folder, "--against", against), said)
    assert_refused(call("outliers", run_folder, "--against", "digits", "--scores", "engery"), "Did you mean 'energy'")


def test_custom_mask(call, run_folder, tmp_path):
    pixels = np.zeros((20, 20), np.uint8)
    pixels[:10] = 255
    Image.fromarray(pixels).save(tmp_path / "top.png")
    answer = call("inpaint", run_folder, "--mask", tmp_path / "top.png", "-n", 3, "--json").json
    assert answer["numbers"]["hidden_fraction"] == 0.5
    assert answer["mask"] == str(tmp_path / "top.png")
    assert_refused(call("inpaint", run_folder, "--mask", "Q7"), "M20, M30")
    assert_refused(call("inpaint", run_folder, "-n", 0), "-n")


def test_results_of_a_snapshot_are_beside_it(call, run_folder, tmp_path):
    place = tmp_path / "handed"
    place.mkdir()
    shutil.copy(run_folder / "snapshot.safetensors", place / "mine.safetensors")
    assert call("sample", place / "mine.safetensors", "-n", 2).code == 0
    assert (place / "sample.png").exists()
    assert len(list((place / "results").iterdir())) == 1


def test_result_that_cannot_be_saved(call, run_folder, tmp_path):
    (run_folder / "results").write_text("in the way")
    answer = call("sample", run_folder, "-n", 2, "--out", tmp_path / "a.png")
    assert answer.code == 0
    assert "result not saved: " in answer.err
    assert (tmp_path / "a.png").exists()


def test_diverged_chain_is_not_measured(call, run_folder, tmp_path):
    wild = ("sampling.step_size=1e38", "sampling.temperature=1e38")
    for words in (["sample", "-n", 3], ["inpaint", "-n", 3], ["sample", "-n", 3, "--out", tmp_path / "a.npz"]):
        answer = call(words[0], run_folder, *wild, *words[1:])
        assert_refused(answer, "non-finite", "sampling.step_size")
    network = ("--inception", own_network(tmp_path / "mine.pt"), "--trust-inception")
    answer = call("evaluate", run_folder, *wild, "--metrics", "fid", "-n", 9, *network)
    assert answer.code == 2
    assert "non-finite" in answer.err
    assert not (run_folder / "results").exists()
    assert not (tmp_path / "a.npz").exists()
    answer = call("long-chains", run_folder, *wild, "sampling.steps=5", "-n", 3)
    assert answer.code == 2
    assert "long-chains.png' shows it; nothing was recorded" in answer.err
    assert not (run_folder / "results").exists()
    assert "NOT FINITE" in answer.out
    assert "100.00 % outside" in answer.out


def test_picture_among_the_images_is_refused(call, run_folder, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    for out in (tmp_path / "a.png", tmp_path / "b.png"):
        answer = call("reconstruct", run_folder, "--images", tmp_path, "--out", out)
        assert_refused(answer, "among the images", "--out")
    assert_refused(
        call("reconstruct", run_folder, "--images", tmp_path / "a.png", "--out", tmp_path / "a.png"), "among"
    )


def test_diverged_chain_is_shown_but_not_recorded(call, run_folder):
    answer = call("revise", run_folder, "sampling.step_size=1e38", "sampling.temperature=1e38", "-n", 2, "--json")
    assert_refused(answer, "non-finite", "revise.png", "sampling.step_size")
    assert (run_folder / "revise.png").exists()
    assert not (run_folder / "results").exists()


@pytest.mark.parametrize("command", ["sample", "reconstruct", "report", "doctor", "export"])
def test_empty_target_is_not_the_current_folder(call, run_folder, monkeypatch, command):
    monkeypatch.chdir(run_folder)
    assert_refused(call(command, "", *(["--out", "a.safetensors"] if command == "export" else [])), "TARGET is empty")


@pytest.mark.parametrize("words", [["sampling.stpes=3"], ["--images", "absent"]])
def test_failed_command_on_pretrained_weights_leaves_no_folder(call, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert call("reconstruct", "cifar10-simple", *words, "--device", "cpu").code == 2
    assert list(tmp_path.iterdir()) == []


def test_more_images_than_there_are(call, run_folder):
    answer = call("reconstruct", run_folder, "-n", 10**6, "--json")
    assert "-n 1000000 exceeds the" in answer.err
    assert answer.json["images"] < 10**6


def test_samples_that_cannot_fit_on_the_disk_are_refused(call, run_folder, tmp_path):
    answer = call("sample", run_folder, "-n", 10**12, "--out", tmp_path / "a.npz")
    assert_refused(answer, "GB of disk", "lower -n")
    assert not (tmp_path / "a.npz").exists()


def test_frames_of_revise(call, run_folder):
    answer = call("revise", run_folder, "sampling.steps=7", "-n", 2, "--json").json
    assert answer["numbers"]["frames_x"] == [0, 3, 6, 7]
    assert_refused(call("revise", run_folder, "--every", 0), "--every")


def test_crop_of_other_images(call, run_folder, tmp_path):
    Image.new("L", (16, 8)).save(tmp_path / "a.png")
    words = ("reconstruct", run_folder, "--images", tmp_path / "a.png", "--out", tmp_path / "r" / "r.png")
    (tmp_path / "r").mkdir()
    assert call(*words, "data.crop=none", "--json").json["data"]["crop"] == "none"
    assert_refused(call(*words, "data.crop=nine"), "data.crop")


def test_signal_removes_half_written_samples(run_folder, tmp_path):
    words = ["sample", str(run_folder), "-n", "2000000", "--out", str(tmp_path / "a.npz"), "--device", "cpu"]
    process = subprocess.Popen([sys.executable, "-m", "dualmcmc", *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".a.npz.*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None, "it should be writing"
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, printed
    assert "Traceback" not in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(("command", "steps"), [("reconstruct", 3), ("inpaint", 9), ("outliers", 1)])
def test_default_on_a_cpu(call, run_folder, monkeypatch, command, steps):
    words = (command, run_folder, *(["--against", "digits"] if command == "outliers" else []), "--json")
    answer = call(*words)
    assert " on a CPU" not in answer.err  # digits are few and small
    monkeypatch.setattr(work, "CPU_WORK", 10 * 64 * steps)
    answer = call(*words)
    assert "using 10 of 359 held-out images on this CPU; -n 359 uses all" in answer.err
    used = answer.json["images"]
    assert used == ({"in_distribution": 10, "digits": 10} if command == "outliers" else 10)
    assert answer.json["data"]["used"] == "10 of 359"
    explicit = call(*words, "-n", 20)
    assert " on a CPU" not in explicit.err
    assert explicit.json["images"] == ({"in_distribution": 20, "digits": 20} if command == "outliers" else 20)
