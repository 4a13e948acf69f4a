"""Each illness gives its finding and no other; health gives none."""

import json
import math
import random

import pytest
import typer
from typer.testing import CliRunner

from dualmcmc import cli_doctor, settings
from dualmcmc.engine import journal
from dualmcmc.errors import UserError
from dualmcmc.files import to_json
from dualmcmc.report.doctor import examine
from dualmcmc.report.findings import verdict
from dualmcmc.report.ranges import HEALTHY, healthy

DIGITS = settings.load_config("digits")


def line(number, **changes):
    """What `digits` logs, at its `number`-th line."""
    wobble = random.Random(number).uniform(0.9, 1.1)
    fading = math.exp(-number / 3)
    return {
        "kind": "train",
        "iteration": 50 * number,
        "images": 2500 * number,
        "seconds": 5.0 * number,
        "iterations_per_second": 10 * wobble,
        "energy_data": -0.03,
        "energy_sample": -0.03,
        "energy_gap": 0.0007 * wobble - 0.05 * fading,
        "energy_gap_max": 0.006 * wobble + 0.8 * fading,
        "reconstruction_mse": 0.03 * wobble + 0.4 * fading,
        "x_moved": 0.045 * wobble + 0.3 * fading,
        "z_moved": 0.24 * wobble + 0.1 * fading,
        "inference_data_nll": -11.5 * wobble + 15 * fading,
        "inference_sample_nll": 12 * wobble,
        "grad_norm_energy": 0.2 * wobble + 2 * fading,
        "grad_norm_generator": 11 * wobble + 200 * fading,
        "grad_norm_inference": 20 * wobble - 15 * fading,
    } | changes


def event(kind, at=0, **facts):
    return {"kind": kind, "images": 2500 * at, "time": 1e9, **facts}


def a_log(lines=24, **curves):
    """A healthy log, but for the curves given as functions of the line's number."""
    entries = [line(n, **{name: f(n) for name, f in curves.items()}) for n in range(1, lines + 1)]
    return [event("start"), event("save", seconds=0.1), *entries]


def illnesses(log, config=DIGITS):
    return [finding for finding in examine(log, config) if finding.level != "ok"]


@pytest.mark.parametrize("lines", [6, 7, 12, 24, 300, 3000])
def test_health_is_found_at_any_length(lines):
    findings = examine(a_log(lines), DIGITS)
    assert [f for f in findings if f.level != "ok"] == []
    assert verdict(findings) == "healthy"
    assert all(f.advice == "" for f in findings)
    assert {*HEALTHY, "reconstruction_mse", "inference_data_nll"} <= {f.what for f in findings}


STEP, LR = "teaching.x_chain.step_size", "optim.energy.lr"
ILL = {  # curves, as functions of the line's number; then level, what, and words of the advice
    "gap too large": ({"energy_gap": lambda n: -8.0}, "watch", "energy_gap", [f"{LR}=0.0005", f"{STEP}=0.25"]),
    "gap far too large": ({"energy_gap": lambda n: 200.0}, "bad", "energy_gap", [f"{LR}=0.0005"]),
    "gap swings": ({"energy_gap": lambda n: 90.0 * (-1) ** n}, "bad", "energy_gap", [f"{LR}=0.0005"]),
    "gap grows": ({"energy_gap": lambda n: 0.1 * 1.16**n}, "watch", "energy_gap", [f"{LR}=0.0005"]),
    "spikes": ({"energy_gap_max": lambda n: 40.0 if n == 22 else 0.01}, "watch", "energy_gap_max", [f"{STEP}=0.25"]),
    "energy is flat": ({"energy_gap": lambda n: 0.0}, "bad", "flat energy", [f"{LR}=0.0001"]),
    "energy learns nothing": ({"grad_norm_energy": lambda n: 1e-7}, "bad", "flat energy", [f"{LR}=0.0001"]),
    "x-chain stands still": ({"x_moved": lambda n: 0.001}, "watch", "x_moved", [f"{STEP}=2"]),
    "x-chain is noise": ({"x_moved": lambda n: 0.00549}, "watch", "x_moved", ["teaching.energy_l2=1 in a new run"]),
    "x-chain goes far": ({"x_moved": lambda n: 0.8}, "watch", "x_moved", [f"{STEP}=0.25"]),
    "x-chain leaves": ({"x_moved": lambda n: 5.0}, "bad", "x_moved", [f"{STEP}=0.25"]),
    "z-chain stands still": ({"z_moved": lambda n: 0.004}, "watch", "z_moved", ["teaching.z_chain.step_size=0.0032"]),
    "z-chain goes far": ({"z_moved": lambda n: 2.0}, "watch", "z_moved", ["teaching.z_chain.step_size=0.0002"]),
    "z-chain leaves": ({"z_moved": lambda n: 5.0}, "bad", "z_moved", ["teaching.z_chain.step_size=0.0002"]),
    "E explodes": ({"grad_norm_energy": lambda n: 0.1 * 1.3**n}, "watch", "grad_norm_energy", [f"{LR}=0.0005"]),
    "G explodes": (
        {"grad_norm_generator": lambda n: 0.1 * 1.8**n}, "bad", "grad_norm_generator", ["optim.generator.lr=0.001"],
    ),
    "G is past its range": (
        {"grad_norm_generator": lambda n: 1e6}, "watch", "grad_norm_generator", ["optim.generator.lr=0.001"],
    ),
    "I explodes": (
        {"grad_norm_inference": lambda n: 2 * 1.3**n}, "watch", "grad_norm_inference", ["optim.inference.lr=0.0005"],
    ),
    "G vanishes": (
        {"grad_norm_generator": lambda n: 0.0}, "watch", "grad_norm_generator", ["optim.generator.lr=0.0002"],
    ),
    "I vanishes": (
        {"grad_norm_inference": lambda n: 0.0}, "watch", "grad_norm_inference", ["optim.inference.lr=0.0001"],
    ),
    "nothing is learned": (
        {"reconstruction_mse": lambda n: 0.7 - 0.001 * n}, "watch", "reconstruction_mse", ["optim.generator.lr=0.008"],
    ),
    "less than nothing is learned": (
        {"reconstruction_mse": lambda n: 0.5 + 0.05 * n}, "bad", "reconstruction_mse", ["optim.generator.lr=0.0002"],
    ),
    "error rises again": (
        {"reconstruction_mse": lambda n: 0.4 if n < 4 else 0.04 if n < 16 else 0.09},
        "watch", "reconstruction_mse", ["optim.generator.lr=0.001"],
    ),
    "inference loss rises": (
        {"inference_data_nll": lambda n: -11 + n}, "watch", "inference_data_nll", ["optim.inference.lr=0.0005"],
    ),
    "training slows": (
        {"iterations_per_second": lambda n: 10 if n < 12 else 2}, "watch", "speed", ["what else uses the machine"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ILL)
def test_an_illness_is_found_and_no_other(name):
    curves, level, what, advice = ILL[name]
    (found,) = illnesses(a_log(**curves))
    assert (found.level, found.what) == (level, what), found
    for words in advice:
        assert words in found.advice
    assert verdict([found]) == {"watch": "worth a look", "bad": "unhealthy"}[level]


@pytest.mark.parametrize("name", [name for name in ILL if "machine" not in ILL[name][3][0]])
def test_advice_can_be_followed(name):
    (found,) = illnesses(a_log(**ILL[name][0]))
    changes = [word.rstrip(",;") for word in found.advice.split() if "=" in word]
    assert changes
    assert settings.load_config("digits", changes) != DIGITS  # every key and value is one that training takes


def test_an_illness_of_the_last_hour_shows_in_a_long_run():
    log = a_log(3000, z_moved=lambda n: 0.24 if n < 2980 else 6.0)
    assert [f.what for f in illnesses(log)] == ["z_moved"]


def test_early_wildness_is_no_illness():
    wild = {"energy_gap": lambda n: 300 / n**4, "energy_gap_max": lambda n: 900 / n**4, "x_moved": lambda n: 2 / n}
    assert illnesses(a_log(24, **wild)) == []


def test_what_the_settings_ask_for_is_no_illness():
    still = settings.load_config("digits", ["teaching.x_chain.steps=0", "teaching.z_chain.steps=0"])
    assert illnesses(a_log(x_moved=lambda n: 0.0, z_moved=lambda n: 0.0), still) == []
    weighed = settings.load_config("digits", ["teaching.energy_weight=2.5e5"])
    assert illnesses(a_log(grad_norm_energy=lambda n: 5e4), weighed) == []
    assert illnesses(a_log(grad_norm_energy=lambda n: 5e4)) != []
    assert healthy(weighed)["grad_norm_energy"].high == 2.5e5 * HEALTHY["grad_norm_energy"].high


def test_a_network_that_is_not_asked_to_learn():
    unheard = settings.load_config("digits", ["teaching.generator_data_weight=0"])
    (found,) = illnesses(a_log(grad_norm_generator=lambda n: 0.0), unheard)
    assert found.advice == "teaching.generator_data_weight=1"


def test_an_energy_that_is_bounded_and_flat_is_bounded_less():
    bounded = settings.load_config("digits", ["teaching.energy_l2=1"])
    (found,) = illnesses(a_log(x_moved=lambda n: 0.00549), bounded)
    assert found.advice == "if it lasts, teaching.energy_l2=0.25 in a new run"


def test_noise_that_drowns_images_is_named():
    hot = settings.load_config("digits", ["teaching.x_chain.temperature=1"])
    (found,) = illnesses(a_log(x_moved=lambda n: 5.5), hot)
    assert found.level == "bad"
    assert "teaching.x_chain.temperature=1e-06" in found.advice


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", float("nan"), 10**400])
def test_a_number_that_is_none(value):
    log = [*a_log(), line(25, grad_norm_inference=value)]
    (found,) = illnesses(log)
    assert (found.level, found.what) == ("bad", "finite numbers")
    assert "grad_norm_inference at image 62,500" in found.words


def test_divergence_is_the_end():
    reason = "grad_norm_inference is inf. Try a smaller optim.energy.lr"
    last = line(2, x_moved=52.0, grad_norm_inference="inf")
    log = [event("start"), line(1), last, event("diverged", 2, reason=reason, last_good_state="0.safetensors")]
    (found,) = illnesses(log)
    assert (found.level, found.what) == ("bad", "diverged")
    assert found.words == "The run diverged at image 5,000: grad_norm_inference is inf."
    assert found.advice == "teaching.x_chain.step_size=0.05"  # the chain that ran away
    log[2] = line(2, z_moved="inf")
    assert illnesses(log)[0].advice == "teaching.z_chain.step_size=8e-05"
    log[2] = line(2, x_moved="nan", z_moved="nan")  # nobody knows which: all of them
    for key in ("optim.energy.lr", "teaching.x_chain.step_size", "teaching.z_chain.step_size"):
        assert key in illnesses(log)[0].advice


def test_a_run_that_went_on_after_divergence_is_judged_by_what_came_after():
    log = a_log()
    log[5:5] = [event("diverged", 3, reason="x"), event("resume", 3)]
    assert illnesses(log) == []


def test_a_rollback_is_worth_a_look_and_what_it_undid_does_not_count():
    lowered = {"optim.energy.lr": 5e-4, "teaching.x_chain.step_size": 0.25}
    rollback = event("rollback", 3, reason="x_moved is inf. Try", lowered=lowered, number=2, diverged_at=12_500)
    before = [line(n) for n in (1, 2, 3)]
    undone = [line(4, x_moved=80.0), line(5, x_moved="inf"), event("diverged", 5, reason="x_moved is inf. Try")]
    after = [line(n) for n in range(4, 25)]
    (found,) = illnesses([event("start"), *before, *undone, rollback, *after])
    assert (found.level, found.what) == ("watch", "rollback")
    assert found.words == "The run diverged and was set back 2 times, last to image 7,500: x_moved is inf."
    assert found.advice == "begin the next run with optim.energy.lr=0.0005 teaching.x_chain.step_size=0.25"
    (alone,) = illnesses([event("start"), *before, *undone, rollback])  # killed before it trained on
    assert alone.what == "rollback"
    again = event("diverged", 5, reason="x_moved is inf")
    assert [f.what for f in illnesses([event("start"), *before, *undone, rollback, *after[:2], again])] == [
        "diverged",
        "rollback",
    ]


def test_saves_that_take_long_and_stops_without_end():
    slow = [*a_log(), *(event("save", n, seconds=20.0) for n in range(1, 25))]
    (found,) = illnesses(slow)
    assert (found.what, found.advice) == ("saves", "train.save_every=40000")
    stopped = [
        *a_log()[:2],
        *(entry for n in range(1, 25) for entry in (line(n), *([event("resume", n)] * (n % 3 == 0)))),
    ]
    assert [f.what for f in illnesses(stopped)] == ["resumes"]


def test_speed_is_compared_within_a_sitting():
    log = [*a_log(12, iterations_per_second=lambda n: 100.0), event("resume", 12)]
    log += [line(n) for n in range(13, 37)]  # another machine, ten times slower
    assert illnesses(log) == []


def test_a_short_log_says_that_it_is_short():
    findings = examine(a_log(3), DIGITS)
    assert verdict(findings) == "healthy"
    assert next(f.words for f in findings if f.what == "log").endswith("it has 3.")
    assert illnesses(a_log(3, reconstruction_mse=lambda n: 0.5 + n, x_moved=lambda n: 0.8)) == []
    assert [f.what for f in illnesses(a_log(1, z_moved=lambda n: 5.0))] == ["z_moved"]  # that is never a beginning
    (nothing,) = examine([event("start")], DIGITS)
    assert (nothing.level, nothing.what) == ("watch", "log")
    assert [f.what for f in examine([event("diverged", reason="x")], DIGITS)] == ["diverged", "log"]


HOSTILE = [
    [],
    [{"images": 1}],
    [{"kind": None, "images": -1}] * 9,
    [line(n, images=0) for n in range(9)],
    [line(10 - n) for n in range(9)],
    [{"kind": "train", "images": n} for n in range(9)],
    [dict.fromkeys(line(n), value) | {"kind": "train", "images": n} for n in range(9) for value in [None]],
    *([line(n, **dict.fromkeys(("energy_gap", "x_moved", "seconds"), v)) for n in range(1, 30)] for v in (
        "", "1e5", [], {}, True, 0, -1, 1e308, -1e308, 1e-320, 10**400,
    )),
    [line(n, images=10**400 + n) for n in range(9)],
    [*a_log(), event("rollback", 24, reason=None, lowered=[1], number="x", state=[]), event("save", seconds="x")],
    [*a_log(), event("rollback", 24, lowered={"a\x1b[2Jb": float("inf")}), event("diverged", reason="\x1b[31m\nred")],
]  # fmt: skip


@pytest.mark.parametrize("log", HOSTILE)
def test_a_hostile_log_is_read_in_peace(log):
    for finding in examine(log, DIGITS):
        assert (finding.words + finding.advice).isprintable()
        assert finding.level in ("ok", "watch", "bad")


def test_a_hostile_log_is_drawn_in_peace(run_folder):
    values = ["", "nan", [], True, None, -1, 1e-320, 10**400, 1e30]
    log = [line(n, energy_gap=value, x_moved=value, energy_data=value) for n, value in enumerate(values, 1)]
    cut = '{"kind": "tr'
    (run_folder / "log.jsonl").write_text("".join(to_json(entry) + "\n" for entry in log) + cut)
    result = doctor(run_folder, "--out", run_folder / "health.png")
    assert result.exit_code == 1
    assert (run_folder / "health.png").read_bytes().startswith(b"\x89PNG")


def doctor(*words):
    app = typer.Typer()
    app.command()(cli_doctor.doctor)
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_on_a_real_run(finished_run):
    result = doctor(finished_run)
    assert result.exit_code == 0
    assert result.output.startswith("healthy (images: 128, ")
    assert "too short to judge" in result.output
    told = json.loads(doctor(finished_run, "--json").output)
    assert (told["verdict"], told["images"], told["file"]) == ("healthy", 128, None)
    assert told["lines"] == sum(entry["kind"] == "train" for entry in journal.read(finished_run / "log.jsonl"))


def test_the_command_on_an_ill_run(run_folder):
    log = a_log(z_moved=lambda n: 5.0, x_moved=lambda n: 0.8)
    (run_folder / "log.jsonl").write_text("".join(to_json(entry) + "\n" for entry in log))
    result = doctor(run_folder)
    assert result.exit_code == 1
    verdict_line, *found, fine = result.output.splitlines()
    assert verdict_line == "unhealthy (images: 60,000, lines of the log: 24)"
    assert found[0].startswith("bad    z_moved: ")  # the worst first
    assert found[1].startswith("advice teaching.z_chain.step_size=")
    assert found[2].startswith("watch  x_moved: ")
    assert fine.startswith("fine   ")
    assert "grad_norm_energy" in fine
    assert "x_moved" not in fine


def test_what_is_no_run_is_refused(run_folder, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        doctor(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not a run folder"):
        doctor(tmp_path)
    with pytest.raises(UserError, match=r"must end in \.png"):
        doctor(run_folder, "--out", tmp_path / "health.jpg")
    (run_folder / "log.jsonl").unlink()
    with pytest.raises(UserError, match=r"holds no log\.jsonl"):
        doctor(run_folder)
