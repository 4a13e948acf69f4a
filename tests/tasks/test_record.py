import hashlib
import json
import subprocess

import pytest

import dualmcmc
from dualmcmc.tasks import record, results
from dualmcmc.utils.errors import UserError


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu", seed=4, overrides=["sampling.steps=70", "sampling.step_size=0.08"])


def test_result_contains_what_is_needed_to_repeat_it(run, finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mine.py", "a b"])
    result = record.entry(run, "evaluate", 1.23456, {"fid": 9.3}, samples=50, data={"checksum": "c"})
    path = record.save(result, tmp_path / "results")
    stored = json.loads(path.read_text())
    assert stored["numbers"] == {"fid": 9.3}
    assert (stored["task"], stored["seconds"]) == ("evaluate", 1.235)
    assert stored["command"] == "mine.py 'a b'"
    assert (stored["samples"], stored["seed"], stored["data"]) == (50, 4, {"checksum": "c"})
    assert stored["x_chain"]["steps"] == 70
    assert stored["x_chain"]["noise_std"] == pytest.approx((2 * 0.08 * 4e-6) ** 0.5)
    assert stored["z_chain"]["sigma"] == run.config.teaching.sigma
    assert stored["run"]["images"] == 128
    assert stored["run"]["file"] == str(finished_run / "snapshot.safetensors")
    weights = (finished_run / "snapshot.safetensors").read_bytes()
    assert stored["run"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert stored["time"].endswith("Z")
    assert stored["torch"]
    assert stored["device"].startswith("CPU")
    for name in ("/usr/bin/dualmcmc", "/lib/dualmcmc/__main__.py"):
        monkeypatch.setattr("sys.argv", [name, "evaluate", "r"])
        assert record.entry(run, "evaluate", 0, {})["command"] == "dualmcmc evaluate r"


def test_results_are_not_overwritten(run, tmp_path):
    for value in range(3):
        record.save({**record.entry(run, "evaluate", 0, {"fid": value}), "time": "2026-01-01T00:00:00Z"}, tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "half.json").write_text('{"task": "a", "time": "b", "numbers": 3}')
    assert sorted(entry["numbers"]["fid"] for entry in results.read_all(tmp_path)) == [0, 1, 2]
    assert results.read_all(tmp_path / "absent") == []


def test_names_of_earlier_versions(tmp_path):
    old = {
        "task": "long-run",
        "time": "2026-01-01T00:00:00Z",
        "numbers": {
            "completed": {"z_chain": {"psnr": 20.0, "psnr_hidden": 15.0, "mse_unit": 0.1}},
            "hidden": 0.3,  # of the pixels
            "generator": {"frechet_own_network": 3.0, "fid": 2.0},
            "outside_range_at": [0.0, 0.5],
            "moved_end": 0.8,
        },
        "left_out": {"psnr": "a reason"},
        "seconds_of": {"reference": 1.0},
    }
    (tmp_path / "long-run-1.json").write_text(json.dumps(old))
    detected = {"task": "outliers", "time": "2026-01-02", "numbers": {"hidden": {"energy": {"fpr95": 0.1}}}}
    (tmp_path / "outliers-1.json").write_text(json.dumps(detected))  # of a dataset called hidden
    first, second = results.read_all(tmp_path)
    assert first == {
        "task": "long-chains",
        "time": "2026-01-01T00:00:00Z",
        "numbers": {
            "completed": {"z_chain": {"psnr_db": 20.0, "psnr_hidden_db": 15.0, "mse_0_to_1": 0.1}},
            "hidden_fraction": 0.3,
            "generator": {"frechet_custom_network": 3.0, "fid": 2.0},
            "fraction_outside_range_at": [0.0, 0.5],
            "displacement_rms_end": 0.8,
        },
        "skipped": {"psnr": "a reason"},
        "seconds_by_part": {"reference": 1.0},
    }
    assert second["numbers"] == {"hidden": {"energy": {"fpr_at_95_tpr": 0.1}}}


def test_non_finite_numbers_become_text(run, tmp_path):
    path = record.save(record.entry(run, "inpaint", 0, {"psnr_db": float("inf"), "mse": [1.0, float("nan")]}), tmp_path)
    assert json.loads(path.read_text())["numbers"] == {"psnr_db": "inf", "mse": [1.0, "nan"]}


def test_commit_is_that_of_the_package(tmp_path, monkeypatch):
    def git(*args):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, check=True)

    package = tmp_path / "venv" / "dualmcmc" / "tasks"
    package.mkdir(parents=True)
    (package / "record.py").write_text("1")
    (tmp_path / ".gitignore").write_text("venv\n")
    monkeypatch.setattr(record, "__file__", str(package / "record.py"))
    monkeypatch.setattr(record, "_installed_commit", lambda: "installed")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "another project")
    assert record.commit() == "installed"
    git("add", "-f", "venv")
    git("commit", "-qm", "dualmcmc")
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()
    assert record.commit() == head
    (package / "record.py").write_text("2")
    assert record.commit() == head + "+"


def test_results_are_not_written_through_a_link(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="results': it is a link"):
        record.save(record.entry(run, "sample", 0, {}), tmp_path / "results")
    assert not list((tmp_path / "elsewhere").iterdir())
