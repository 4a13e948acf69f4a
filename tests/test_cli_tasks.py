"""Every task as a person calls it: a picture, numbers, a record, and one line where something is wrong."""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from tests.conftest import assert_refused
from tests.networks import Tiny, own_network

COMMANDS = {
    "sample": ["-n", 4],
    "reconstruct": [],
    "interpolate": [],
    "revise": ["-n", 4],
    "inpaint": ["-n", 4],
    "outliers": ["--against", "digits", "-n", 9],
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_picture_numbers_and_a_record(call, run_folder, command):
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
def test_what_is_wrong_is_one_line(call, run_folder, command):
    words = COMMANDS.get(command, [])
    assert_refused(call(command, run_folder / "absent", *words), "does not exist")
    assert_refused(call(command, run_folder, *words, "--device", "tpu"), "unknown device")
    assert_refused(call(command, run_folder, *words, "--seed", "-1"), "seed")
    if command != "evaluate":
        assert_refused(call(command, run_folder, *words, "--out", "a.jpg"), "--out", ".png")
    if command not in ("sample", "outliers", "evaluate"):
        assert_refused(call(command, run_folder, *words, "--images", "/absent"), "/absent")
        assert_refused(call(command, run_folder, *words, "--crop", "none"), "are for --images")
    assert not (run_folder / "results").exists()
    assert not (run_folder / f"{command}.png").exists()


def test_options_of_the_chains(call, run_folder):
    words = ("--steps", 7, "--step-size", 0.08, "--temperature", 0, "--batch", 3)
    answer = call("sample", run_folder, "-n", 5, *words, "--json").json
    assert (answer["x_chain"]["steps"], answer["x_chain"]["step_size"], answer["x_chain"]["temperature"]) == (
        7,
        0.08,
        0,
    )
    assert answer["batch"] == 3
    assert call("inpaint", run_folder, "-n", 2, "--z-steps", 4, "--json").json["z_chain"]["steps"] == 4
    assert call("reconstruct", run_folder, "-n", 3, "--json").json["images"] == 3
    for option, value, said in [
        ("--steps", -1, "sampling.steps"),
        ("--step-size", 0, "sampling.step_size"),
        ("--temperature", -1, "sampling.temperature"),
        ("--batch", 0, "sampling.batch"),
    ]:
        assert_refused(call("sample", run_folder, option, value), said)


def test_a_long_run(call, run_folder):
    assert call("sample", run_folder, "-n", 3, "--long-run", 50, "--json").json["x_chain"]["steps"] == 50
    answer = call("sample", run_folder, "-n", 3, "--long-run", 50)
    assert "3 chains of 50 steps: all finite" in answer.out
    assert (run_folder / "long-run.png").exists()
    assert_refused(call("sample", run_folder, "--long-run", 50, "--steps", 3), "choose one")
    assert_refused(call("sample", run_folder, "--long-run", 0), "at least one")


def test_samples_by_the_thousand_go_to_an_npz(call, run_folder, tmp_path):
    assert call("sample", run_folder, "-n", 1200, "--out", tmp_path / "a.npz").code == 0
    with np.load(tmp_path / "a.npz") as stored:
        assert stored["revised"].shape == (1200, 8, 8, 1)
    assert_refused(call("sample", run_folder, "-n", 20_000), "too many for a picture")


def test_ones_own_image_is_converted_with_a_note(call, run_folder, tmp_path):
    Image.new("RGB", (40, 30), (9, 99, 200)).save(tmp_path / "a.png")
    for command in ("reconstruct", "inpaint", "revise"):
        answer = call(command, run_folder, "--images", tmp_path / "a.png")
        assert answer.code == 0, answer.err
        assert "converted to 8x8 grey from 40x30 RGB" in answer.err
    answer = call("interpolate", run_folder, "--images", tmp_path / "a.png")
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith("error: a way between images needs two")


def test_outliers_from_several_places(call, run_folder, tmp_path):
    (tmp_path / "own").mkdir()
    for number in range(5):
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (9, 9), np.uint8)).save(
            tmp_path / "own" / f"{number}.png"
        )
    words = ("--against", f"digits,{tmp_path / 'own'}", "--scores", "energy,typicality,reconstruction")
    answer = call("outliers", run_folder, *words, "--json").json
    assert set(answer["numbers"]) == {"digits", "own"}
    assert set(answer["numbers"]["own"]) == {"energy", "typicality", "reconstruction"}
    assert set(answer["numbers"]["own"]["energy"]) == {"auroc", "aupr_outliers", "aupr_known", "fpr95"}
    assert answer["images"] == {"known": 359, "digits": 1797, "own": 5}
    assert answer["against"]["own"]["checksum"]
    shutil.copytree(tmp_path / "own", tmp_path / "more" / "own")
    shutil.copytree(tmp_path / "own", tmp_path / "known")
    places = f"{tmp_path / 'own'},{tmp_path / 'more' / 'own'},{tmp_path / 'known'}"
    answer = call("outliers", run_folder, "--against", places, "--json").json
    assert answer["images"] == {"known": 359, "own": 5, "own-2": 5, "known-2": 5}
    for against, said in [("nosuch", "no named set"), (",", "--against is empty"), ("svhn", "data fetch svhn")]:
        assert_refused(call("outliers", run_folder, "--against", against), said)
    assert_refused(call("outliers", run_folder, "--against", "digits", "--scores", "engery"), "Did you mean 'energy'")


def test_inpainting_with_a_mask_of_ones_own(call, run_folder, tmp_path):
    pixels = np.zeros((20, 20), np.uint8)
    pixels[:10] = 255
    Image.fromarray(pixels).save(tmp_path / "top.png")
    answer = call("inpaint", run_folder, "--mask", tmp_path / "top.png", "-n", 3, "--json").json
    assert answer["numbers"]["hidden"] == 0.5
    assert answer["mask"] == str(tmp_path / "top.png")
    assert_refused(call("inpaint", run_folder, "--mask", "Q7"), "M20, M30")
    assert_refused(call("inpaint", run_folder, "-n", 0), "-n")


def test_a_snapshot_alone_has_its_results_beside_it(call, run_folder, tmp_path):
    place = tmp_path / "handed"
    place.mkdir()
    shutil.copy(run_folder / "snapshot.safetensors", place / "mine.safetensors")
    assert call("sample", place / "mine.safetensors", "-n", 2).code == 0
    assert (place / "sample.png").exists()
    assert len(list((place / "results").iterdir())) == 1


def test_a_folder_that_cannot_be_written_to_costs_the_record_only(call, run_folder, tmp_path):
    (run_folder / "results").write_text("in the way")
    answer = call("sample", run_folder, "-n", 2, "--out", tmp_path / "a.png")
    assert answer.code == 0
    assert "not recorded: " in answer.err
    assert (tmp_path / "a.png").exists()


# measuring


def test_without_inception_the_rest_is_measured(call, run_folder):
    answer = call("evaluate", run_folder)
    assert answer.code == 0, answer.err
    assert "reconstructions of 359 held-out images" in answer.out
    assert "left out, fid, is:" in answer.out
    assert "'dualmcmc data fetch inception' gets them" in answer.out
    stored = call("evaluate", run_folder, "--json").json
    assert set(stored["left_out"]) == {"fid", "is"}
    assert stored["samples"] == 0
    assert stored["data"]["test_checksum"]
    for metric in ("fid", "kid", "is,mse"):
        assert_refused(call("evaluate", run_folder, "--metrics", metric), "'dualmcmc data fetch inception' gets them")


def test_a_network_of_ones_own_is_not_called_fid(call, run_folder, tmp_path):
    path = own_network(tmp_path / "mine.pt")
    words = ("evaluate", run_folder, "--samples", 60, "--inception", path)
    assert_refused(call(*words), "none of the published", "--trust-inception")
    answer = call(*words, "--trust-inception")
    assert answer.code == 0, answer.err
    assert "60 samples of each kind against 1,438 training images" in answer.out
    assert "from as few as 60 images the distance is much too high" in answer.err
    assert "Fréchet (own network)" in answer.out
    assert "FID" not in answer.out
    stored = call(*words, "--trust-inception", "--metrics", "fid,kid,precision,recall", "--json").json
    assert stored["inception"]["standard"] is False
    assert stored["samples"] == 60
    assert stored["reference"] == {"images": 1438, "from_cache": False}  # KID needs all features
    assert stored["numbers"]["ebm"].keys() == {"frechet_own_network", "kid", "kid_std", "precision", "recall"}
    again = call(*words, "--trust-inception", "--metrics", "fid", "--json").json
    assert again["reference"]["from_cache"]
    assert again["numbers"]["ebm"]["frechet_own_network"] == pytest.approx(
        stored["numbers"]["ebm"]["frechet_own_network"], rel=1e-6
    )


def test_trust_is_for_the_file_that_was_named(call, run_folder, cache, tmp_path):
    (cache / "inception").mkdir()
    own_network(cache / "inception" / "inception-2015-12-05.pth")  # not what was fetched there
    words = ("evaluate", run_folder, "--metrics", "fid", "--samples", 9, "--trust-inception")
    assert_refused(call(*words), "none of the published")


def test_bad_measurements(call, run_folder):
    assert_refused(call("evaluate", run_folder, "--metrics", "fdi"), "Did you mean 'fid'")
    assert_refused(call("evaluate", run_folder, "--metrics", ","), "--metrics is empty")
    assert_refused(call("evaluate", run_folder, "--samples", 1), "--samples")
    assert_refused(call("evaluate", run_folder, "--inception", "/absent.pt"), "no file '/absent.pt'")
    assert_refused(call("fid", "digits", "digits"), "'dualmcmc data fetch inception' gets them")


def test_revision_with_the_distance_before_and_after(call, run_folder, tmp_path):
    path = own_network(tmp_path / "mine.pt")
    words = ("--fid", "--samples", 50, "--inception", path, "--trust-inception")
    answer = call("revise", run_folder, "-n", 4, *words, "--json").json
    assert answer["numbers"]["frechet_own_network_before"] > 0
    assert answer["numbers"]["frechet_own_network_after"] > 0
    measured = call("evaluate", run_folder, "--metrics", "fid", *words[1:], "--json").json["numbers"]
    for kind, when in (("generator", "before"), ("ebm", "after")):
        assert measured[kind]["frechet_own_network"] == answer["numbers"][f"frechet_own_network_{when}"]
    assert answer["reference"]["images"] == 1438
    assert "Fréchet (own network)" in call("revise", run_folder, "-n", 4, *words).out
    assert_refused(call("revise", run_folder, "--fid"), "'dualmcmc data fetch inception' gets them")
    assert_refused(call("revise", run_folder, "--every", 0), "--every")
    assert call("revise", run_folder, "-n", 2, "--steps", 7, "--json").json["numbers"]["frames_x"] == [0, 3, 6, 7]


def test_what_a_chain_has_blown_up_is_not_measured(call, run_folder, tmp_path):
    wild = ("--step-size", 1e38, "--temperature", 1e38)
    for words in (["sample", "-n", 3], ["inpaint", "-n", 3], ["sample", "-n", 3, "--out", tmp_path / "a.npz"]):
        answer = call(words[0], run_folder, *words[1:], *wild)
        assert_refused(answer, "left the finite numbers", "--step-size")
    network = ("--inception", own_network(tmp_path / "mine.pt"), "--trust-inception")
    answer = call("evaluate", run_folder, "--metrics", "fid", "--samples", 9, *network, *wild)
    assert answer.code == 2
    assert "left the finite numbers" in answer.err
    assert not (run_folder / "results").exists()
    assert not (tmp_path / "a.npz").exists()
    answer = call("sample", run_folder, "-n", 3, "--long-run", 5, *wild)
    assert "NOT FINITE" in answer.out
    assert "100.00 % outside" in answer.out


def test_the_picture_does_not_go_among_the_images(call, run_folder, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    for out in (tmp_path / "a.png", tmp_path / "b.png"):
        answer = call("reconstruct", run_folder, "--images", tmp_path, "--out", out)
        assert_refused(answer, "among the images", "--out")
    assert_refused(
        call("reconstruct", run_folder, "--images", tmp_path / "a.png", "--out", tmp_path / "a.png"), "among"
    )


def test_a_chain_that_goes_astray_is_recorded_as_it_was(call, run_folder):
    answer = call("revise", run_folder, "-n", 2, "--step-size", 1e38, "--temperature", 1e38, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["numbers"]["energy"][-1] in ("nan", "inf", "-inf")
    assert call("report", run_folder).code == 0


def test_the_distance_between_two_sets(call, tmp_path):
    path = own_network(tmp_path / "mine.pt")
    answer = call("fid", "digits", "digits:train", "--inception", path, "--trust-inception")
    assert answer.out.splitlines()[-1] == "Fréchet (own network) 0.0000"
    answer = call("fid", "digits", "digits", "--inception", path, "--trust-inception", "--json").json
    assert answer["frechet_own_network"] == pytest.approx(0, abs=1e-6)
    assert answer["sets"][0]["images"] == 1797
    assert answer["command"].startswith("dualmcmc fid digits digits")
    assert answer["seconds"] > 0


def test_the_report_shows_what_was_measured(call, run_folder):
    call("evaluate", run_folder, "--metrics", "mse", "--seed", 7)
    call("inpaint", run_folder, "-n", 2, "--mask", "R40")
    assert call("report", run_folder).code == 0
    page = (run_folder / "report.html").read_text()
    assert "<h2>Measured</h2>" in page
    assert f"dualmcmc evaluate {run_folder} --metrics mse --seed 7" in page
    assert "inference+2 mse" in page
    assert "<h3>Inpainting</h3>" in page


def test_the_benchmark_of_evaluation(call, monkeypatch):
    monkeypatch.setattr("dualmcmc.bench.evaluate.FEATURES", 48)
    monkeypatch.setattr("dualmcmc.bench.evaluate.Inception", Tiny)
    result = call("bench", "evaluate", "digits", "nets.energy_width=4", "--samples", 100, "--json").json
    assert result["samples"] == 100
    assert set(result["seconds_of"]) == {"drawing", "features", "distance"}
    assert result["features_per_second"] == pytest.approx(200 / result["seconds_of"]["features"])
    assert "samples/s" in call("bench", "evaluate", "digits", "nets.energy_width=4", "--samples", 100).out


SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_leaves_nothing_half_written(run_folder, tmp_path, number):
    words = ["sample", str(run_folder), "-n", "2000000", "--out", str(tmp_path / "a.npz"), "--device", "cpu"]
    process = subprocess.Popen([sys.executable, "-m", "dualmcmc", *words], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(tmp_path.glob(".a.npz.*")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert process.poll() is None, "it should be writing"
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


AT_A_BAD_MOMENT = """
import signal, sys, zipfile
from dualmcmc.cli import main

begin = zipfile.ZipFile.open

def interrupted(*given, **options):
    member = begin(*given, **options)
    signal.raise_signal(int(number))
    return member

zipfile.ZipFile.open = interrupted
number = sys.argv.pop(1)
main()
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_at_a_bad_moment_is_still_a_signal(run_folder, tmp_path, number):
    """Between the opening of an archive's member and the keeping of it, the archive cannot be closed."""
    words = ["sample", run_folder, "-n", "4", "--out", tmp_path / "a.npz", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", AT_A_BAD_MOMENT, str(int(number)), *words], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (128 + number, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
