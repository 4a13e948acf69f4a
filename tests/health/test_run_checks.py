import pytest

from dualmcmc import config_io
from dualmcmc.health import examine
from tests.health.logs import DIGITS, event, line, make_log, problems


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", float("nan"), 10**400])
def test_non_finite_statistic(value):
    log = [*make_log(), line(25, grad_norm_inference=value)]
    (finding,) = problems(log)
    assert (finding.level, finding.check) == ("error", "finite")
    assert "grad_norm_inference at image 62,500" in finding.message


def test_divergence():
    reason = "grad_norm_inference is inf. Try a smaller optim.energy.lr"
    last = line(2, x_displacement_rms=52.0, grad_norm_inference="inf")
    log = [event("start"), line(1), last, event("diverged", 2, reason=reason, last_valid_state="0.safetensors")]
    (finding,) = problems(log)
    assert (finding.level, finding.check) == ("error", "diverged")
    assert finding.message == "The run diverged at image 5,000: grad_norm_inference is inf."
    assert finding.advice == "teaching.x_chain.step_size=0.05"  # the chain that diverged
    log[2] = line(2, z_displacement_rms="inf")
    assert problems(log)[0].advice == "teaching.z_chain.step_size=8e-05"
    log[2] = line(2, x_displacement_rms="nan", z_displacement_rms="nan")  # unclear which: all
    for key in ("optim.energy.lr", "teaching.x_chain.step_size", "teaching.z_chain.step_size"):
        assert key in problems(log)[0].advice


def test_divergence_of_methods_with_fewer_networks_and_chains():
    for method, missing, advice in (
        ("vae", ("energy_gap", "x_displacement_rms", "z_displacement_rms"), "optim.generator.lr=0.001"),
        ("sr-abp", ("energy_gap", "x_displacement_rms"), "optim.generator.lr=0.001 teaching.z_chain.step_size=0.0004"),
        ("triangle", ("x_displacement_rms", "z_displacement_rms"), "optim.energy.lr=0.0005"),
    ):
        last = {name: value for name, value in line(2, reconstruction_mse="nan").items() if name not in missing}
        log = [event("start"), last, event("diverged", 2, reason="reconstruction_mse is nan.")]
        (finding,) = problems(log, config_io.load_config("digits", [f"method={method}"]))
        assert finding.advice == advice


def test_divergence_before_a_resume_does_not_count():
    log = make_log()
    log[5:5] = [event("diverged", 3, reason="x"), event("resume", 3)]
    assert problems(log) == []


def test_rollback_is_a_warning_and_undone_lines_do_not_count():
    reason = "x_displacement_rms is inf. Try"
    reduced = {"optim.energy.lr": 5e-4, "teaching.x_chain.step_size": 0.25}
    rollback = event("rollback", 3, reason=reason, reduced=reduced, number=2, diverged_at=12_500)
    before = [line(n) for n in (1, 2, 3)]
    undone = [
        line(4, x_displacement_rms=80.0),
        line(5, x_displacement_rms="inf"),
        event("diverged", 5, reason=reason),
    ]
    after = [line(n) for n in range(4, 25)]
    (finding,) = problems([event("start"), *before, *undone, rollback, *after])
    assert (finding.level, finding.check) == ("warning", "rollback")
    assert finding.message == (
        "The run diverged and was rolled back 2 times, last to image 7,500: x_displacement_rms is inf."
    )
    assert finding.advice == "start the next run with optim.energy.lr=0.0005 teaching.x_chain.step_size=0.25"
    (only,) = problems([event("start"), *before, *undone, rollback])  # killed right after the rollback
    assert only.check == "rollback"
    again = [event("start"), *before, *undone, rollback, *after[:2], event("diverged", 5, reason=reason)]
    assert [finding.check for finding in problems(again)] == ["diverged", "rollback"]


def test_advice_never_repeats_text_of_the_log():
    """Only known settings with positive numbers are offered to paste."""
    reduced = {"optim.energy.lr": 5e-4, "x; rm -rf ~": 1.0, "data.path": "/etc", "optim.generator.lr": "1; reboot"}
    (finding,) = problems([event("start"), *make_log(), event("rollback", 24, reason="x", reduced=reduced, number=1)])
    assert finding.advice == "start the next run with optim.energy.lr=0.0005"


def test_slow_saves():
    (finding,) = problems([*make_log(), *(event("save", n, seconds=20.0) for n in range(1, 25))])
    assert (finding.check, finding.advice) == ("saves", "train.save_every=40000")


def test_frequent_resumes():
    log = [event("start")]
    for n in range(1, 25):
        log += [line(n), event("resume", n)] if n % 3 == 0 else [line(n)]
    assert [finding.check for finding in problems(log)] == ["resumes"]


def test_slowdown():
    (finding,) = problems(make_log(iterations_per_second=lambda n: 10 if n < 12 else 2))
    assert (finding.level, finding.check) == ("warning", "speed")


def test_speed_is_compared_within_a_session():
    log = [*make_log(12, iterations_per_second=lambda n: 100.0), event("resume", 12)]
    log += [line(n) for n in range(13, 37)]  # on another machine, ten times slower
    assert problems(log) == []


def test_log_without_statistics():
    (finding,) = examine([event("start")], DIGITS)
    assert (finding.level, finding.check) == ("warning", "log")
    findings = examine([event("diverged", reason="x")], DIGITS)
    assert [finding.check for finding in findings] == ["diverged", "log"]
