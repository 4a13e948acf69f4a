"""dualmcmc.doctor says what the command prints."""

import pytest

import dualmcmc
from dualmcmc import UserError
from tests.health.logs import make_log
from tests.health.test_doctor import write_log


def test_same_as_the_command(run_folder, call):
    write_log(run_folder, make_log(z_displacement_rms=lambda n: 5.0))
    diagnosis = dualmcmc.doctor(run_folder)
    assert diagnosis.verdict == "unhealthy"
    assert {finding.check for finding in diagnosis.findings} >= {"z_displacement_rms", "energy_gap"}
    assert call("doctor", run_folder).out == f"{diagnosis}\n"
    assert str(diagnosis).startswith("unhealthy (")


def test_curves(finished_run, call, tmp_path):
    curves = dualmcmc.doctor(finished_run).curves()
    assert call("doctor", finished_run, "--out", tmp_path / "a.png").code == 0
    assert curves._repr_png_() == (tmp_path / "a.png").read_bytes()


def test_without_a_log(run_folder):
    (run_folder / "log.jsonl").unlink()
    with pytest.raises(UserError, match=r"has no log\.jsonl"):
        dualmcmc.doctor(run_folder)
