"""evaluate, fid and report."""

import pytest

from dualmcmc.tasks import work
from tests.conftest import assert_refused
from tests.networks import own_network


@pytest.fixture(autouse=True)
def _cpu_only(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_without_inception(call, run_folder):
    answer = call("evaluate", run_folder)
    assert answer.code == 0, answer.err
    assert "reconstructions of 359 held-out images" in answer.out
    assert "skipped fid, is:" in answer.out
    assert "dualmcmc data fetch inception" in answer.out
    stored = call("evaluate", run_folder, "--json").json
    assert set(stored["skipped"]) == {"fid", "is"}
    assert stored["samples"] == 0
    assert stored["data"]["test_checksum"]
    for metric in ("fid", "kid", "is,mse"):
        assert_refused(call("evaluate", run_folder, "--metrics", metric), "dualmcmc data fetch inception")


def test_custom_network_is_not_called_fid(call, run_folder, tmp_path):
    path = own_network(tmp_path / "mine.pt")
    words = ("evaluate", run_folder, "-n", 60, "--inception", path)
    assert_refused(call(*words), "not a published Inception file", "--trust-inception")
    stored = call(*words, "--trust-inception", "--metrics", "fid,kid,precision", "--json").json
    assert stored["inception"]["standard"] is False
    assert stored["samples"] == 60
    assert stored["reference"] == {"images": 1438, "statistics": "computed"}  # KID needs all features
    assert stored["numbers"]["ebm"].keys() == {"frechet_custom_network", "kid", "kid_std", "precision"}
    answer = call(*words, "--trust-inception", "--metrics", "fid")
    assert answer.code == 0, answer.err
    assert "60 samples of each kind against 1,438 training images" in answer.out
    assert "FID from only 60 images is strongly biased" in answer.err
    value = stored["numbers"]["ebm"]["frechet_custom_network"]
    (row,) = [line for line in answer.out.splitlines() if line.startswith("Fréchet (custom network)")]
    assert row.split()[-1] == f"{value:.4g}"  # the same from cached statistics
    assert "FID" not in answer.out


def test_trust_applies_to_the_named_file_only(call, run_folder, cache, tmp_path):
    (cache / "inception").mkdir()
    own_network(cache / "inception" / "inception-2015-12-05.pth")  # not what was fetched there
    words = ("evaluate", run_folder, "--metrics", "fid", "-n", 9, "--trust-inception")
    assert_refused(call(*words), "not a published Inception file")


def test_bad_input(call, run_folder):
    assert_refused(call("evaluate", run_folder, "--metrics", "fdi"), "Did you mean 'fid'")
    assert_refused(call("evaluate", run_folder, "--metrics", ","), "--metrics is empty")
    assert_refused(call("evaluate", run_folder, "-n", 1), "-n")
    assert_refused(call("evaluate", run_folder, "--inception", "/absent.pt"), "'/absent.pt' does not exist")
    assert_refused(call("fid", "digits", "digits"), "dualmcmc data fetch inception")


def test_fid_between_two_sets(call, tmp_path):
    path = own_network(tmp_path / "mine.pt")
    answer = call("fid", "digits", "digits:train", "--inception", path, "--trust-inception")
    assert answer.out.splitlines()[-1] == "Fréchet (custom network) 0.0000"
    answer = call("fid", "digits", "digits", "--inception", path, "--trust-inception", "--json").json
    assert answer["frechet_custom_network"] == pytest.approx(0, abs=1e-6)
    assert answer["sets"][0]["images"] == 1797
    assert answer["command"].startswith("dualmcmc fid digits digits")
    assert answer["seconds"] > 0


def test_report_shows_results(call, run_folder):
    call("evaluate", run_folder, "--metrics", "mse", "--seed", 7)
    call("inpaint", run_folder, "-n", 2, "--mask", "R40")
    assert call("report", run_folder).code == 0
    page = (run_folder / "report.html").read_text()
    assert "<h2>Recorded results</h2>" in page
    assert f"dualmcmc evaluate {run_folder} --metrics mse --seed 7" in page
    assert "inference+2 mse" in page
    assert "<h3>Inpainting</h3>" in page


def test_default_on_a_cpu(call, run_folder, tmp_path, monkeypatch):
    words = ("evaluate", run_folder, "--inception", own_network(tmp_path / "mine.pt"), "--trust-inception", "--json")
    monkeypatch.setattr(work, "CPU_WORK", 2 * 10 * 64 * (3 + 1 + 2 * 160))  # ten samples
    answer = call(*words, "--metrics", "fid,mse")
    samples, images = 10, 3240 // (2 * 2 + 30 + 1 + 2 * 2 + 1)
    assert (
        f"using {samples} of 50,000 samples, {images} of 359 held-out images on this CPU; -n 50000 uses all"
        in answer.err
    )
    assert answer.json["samples"] == samples
    assert answer.json["reconstructed"] == {"held-out images": images, "training images": images}
    answer = call(*words, "--metrics", "fid,mse", "-n", 12)
    assert " on a CPU" not in answer.err
    assert answer.json["samples"] == 12
    assert answer.json["reconstructed"] == {"held-out images": 12, "training images": 12}
