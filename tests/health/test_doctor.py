"""The command `doctor`, and logs that were written by older versions, by mistake or by an attacker."""

import pytest

from dualmcmc.engine.log import read_log
from dualmcmc.health import examine
from dualmcmc.utils.files import to_json
from tests.conftest import assert_refused
from tests.health.logs import DIGITS, event, line, make_log

MALFORMED = [
    [],
    [{"images": 1}],
    [{"kind": None, "images": -1}] * 9,
    [line(n, images=0) for n in range(9)],
    [line(10 - n) for n in range(9)],
    [{"kind": "train", "images": n} for n in range(9)],
    [dict.fromkeys(line(n)) | {"kind": "train", "images": n} for n in range(9)],
    *([line(n, **dict.fromkeys(("energy_gap", "x_displacement_rms", "seconds"), v)) for n in range(1, 30)] for v in (
        "", "1e5", [], {}, True, 0, -1, 1e308, -1e308, 1e-320, 10**400,
    )),
    [line(n, images=10**400 + n) for n in range(9)],
    [*make_log(), event("rollback", 24, reason=None, reduced=[1], number="x"), event("save", seconds="x")],
    [*make_log(), event("rollback", 24, reduced={"a\x1b[2Jb": float("inf")}), event("diverged", reason="\x1b[31m\n")],
]  # fmt: skip


def write_log(run, log):
    (run / "log.jsonl").write_text("".join(to_json(entry) + "\n" for entry in log))


@pytest.mark.parametrize("log", MALFORMED)
def test_malformed_log(log):
    for finding in examine(log, DIGITS):
        assert (finding.message + finding.advice).isprintable()
        assert finding.level in ("ok", "warning", "error")


def test_log_with_old_names(tmp_path):
    old = {"x_displacement_rms": "x_moved", "z_displacement_rms": "z_moved", "reduced": "lowered", "reason": "why"}
    log = [
        *make_log(z_displacement_rms=lambda n: 5.0, x_displacement_rms=lambda n: 0.8),
        event("rollback", 24, reason="NaN.", reduced={"optim.energy.lr": 5e-4}, number=1),
    ]
    write_log(tmp_path, [{old.get(name, name): value for name, value in entry.items()} for entry in log])
    findings = examine(read_log(tmp_path / "log.jsonl"), DIGITS)
    assert findings == examine(log, DIGITS)
    assert {"x_displacement_rms", "z_displacement_rms", "rollback"} <= {finding.check for finding in findings}


def test_malformed_log_is_plotted(run_folder, call):
    values = ["", "nan", [], True, None, -1, 1e-320, 10**400, 1e30]
    names = ("energy_gap", "x_displacement_rms", "energy_data")
    write_log(run_folder, [line(n, **dict.fromkeys(names, value)) for n, value in enumerate(values, 1)])
    with open(run_folder / "log.jsonl", "a") as log:
        log.write('{"kind": "tr')  # truncated
    assert call("doctor", run_folder, "--out", run_folder / "health.png").code == 1
    assert (run_folder / "health.png").read_bytes().startswith(b"\x89PNG")


def test_doctor_on_a_real_run(finished_run, call):
    answer = call("doctor", finished_run)
    assert answer.code == 0
    assert answer.out.startswith("healthy (128 images, ")
    assert "too short for the other checks" in answer.out
    printed = call("doctor", finished_run, "--json").json
    assert (printed["verdict"], printed["images"], printed["file"]) == ("healthy", 128, None)
    assert printed["lines"] == sum(entry["kind"] == "train" for entry in read_log(finished_run / "log.jsonl"))
    assert set(printed["findings"][0]) == {"level", "check", "message", "advice"}


def test_doctor_on_an_unhealthy_run(run_folder, call):
    write_log(run_folder, make_log(z_displacement_rms=lambda n: 5.0, x_displacement_rms=lambda n: 0.8))
    answer = call("doctor", run_folder)
    assert answer.code == 1
    verdict, *found, passed = answer.out.splitlines()
    assert verdict == "unhealthy (60,000 images, 24 log lines)"
    assert found[0].startswith("error   z_displacement_rms: ")
    assert found[1].startswith("advice  teaching.z_chain.step_size=")
    assert found[2].startswith("warning x_displacement_rms: ")
    assert passed.startswith("ok      finite, energy_gap, ")
    assert "x_displacement_rms" not in passed


def test_doctor_refuses_bad_input(run_folder, tmp_path, call):
    assert_refused(call("doctor", tmp_path / "nowhere"), "does not exist")
    assert_refused(call("doctor", tmp_path), "not a run folder")
    assert_refused(call("doctor", run_folder, "--out", tmp_path / "health.jpg"), "must end in .png")
    (run_folder / "log.jsonl").unlink()
    assert_refused(call("doctor", run_folder), "log.jsonl")
