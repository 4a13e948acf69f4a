"""Each problem gives its own finding and no other; a healthy log gives none."""

import pytest

from dualmcmc import config_io
from dualmcmc.health import examine, verdict
from dualmcmc.health.findings import HEALTHY_RANGES, healthy_ranges
from tests.health.logs import DIGITS, make_log, problems

X, Z = "x_displacement_rms", "z_displacement_rms"
LR, X_STEP, Z_STEP = "optim.energy.lr", "teaching.x_chain.step_size", "teaching.z_chain.step_size"
PROBLEMS = {  # name: (the curves that differ, level, check, parts of the advice)
    "gap too large": ({"energy_gap": lambda n: -8.0}, "warning", "energy_gap", [f"{LR}=0.0005", f"{X_STEP}=0.25"]),
    "gap far too large": ({"energy_gap": lambda n: 200.0}, "error", "energy_gap", [f"{LR}=0.0005"]),
    "gap alternates": ({"energy_gap": lambda n: 90.0 * (-1) ** n}, "error", "energy_gap", [f"{LR}=0.0005"]),
    "gap grows": ({"energy_gap": lambda n: 0.1 * 1.16**n}, "warning", "energy_gap", [f"{LR}=0.0005"]),
    "spike": ({"energy_gap_max": lambda n: 40.0 if n == 22 else 0.01}, "warning", "energy_gap_max", [f"{X_STEP}=0.25"]),
    "constant energy": ({"energy_gap": lambda n: 0.0}, "error", "flat_energy", [f"{LR}=0.0001"]),
    "no gradient of E": ({"grad_norm_energy": lambda n: 1e-7}, "error", "flat_energy", [f"{LR}=0.0001"]),
    "E is flat": (
        {"energy_slope": lambda n: 0.004},
        "warning", "energy_slope", ["teaching.energy_l2=1 in a new run"],
    ),
    "E is steep": ({"energy_slope": lambda n: 300.0}, "warning", "energy_slope", [f"{LR}=0.0005", f"{X_STEP}=0.25"]),
    "E is too steep": ({"energy_slope": lambda n: 3e4}, "error", "energy_slope", [f"{LR}=0.0005"]),
    "x-chain hardly moves": ({X: lambda n: 0.0005}, "warning", X, [f"{X_STEP}=2"]),
    "x-chain is noise": ({X: lambda n: 0.00549}, "warning", X, ["teaching.energy_l2=1 in a new run"]),
    "x-chain moves far": ({X: lambda n: 0.8}, "warning", X, [f"{X_STEP}=0.25"]),
    "x-chain moves too far": ({X: lambda n: 5.0}, "error", X, [f"{X_STEP}=0.25"]),
    "z-chain hardly moves": ({Z: lambda n: 0.004}, "warning", Z, [f"{Z_STEP}=0.0032"]),
    "z-chain moves far": ({Z: lambda n: 2.0}, "warning", Z, [f"{Z_STEP}=0.0002"]),
    "z-chain moves too far": ({Z: lambda n: 5.0}, "error", Z, [f"{Z_STEP}=0.0002"]),
    "gradient of E grows": (
        {"grad_norm_energy": lambda n: 0.1 * 1.3**n}, "warning", "grad_norm_energy", [f"{LR}=0.0005"],
    ),
    "gradient of G explodes": (
        {"grad_norm_generator": lambda n: 0.1 * 1.8**n}, "error", "grad_norm_generator", ["optim.generator.lr=0.001"],
    ),
    "gradient of G too large": (
        {"grad_norm_generator": lambda n: 1e6}, "warning", "grad_norm_generator", ["optim.generator.lr=0.001"],
    ),
    "gradient of I grows": (
        {"grad_norm_inference": lambda n: 2 * 1.3**n}, "warning", "grad_norm_inference", ["optim.inference.lr=0.0005"],
    ),
    "no gradient of G": (
        {"grad_norm_generator": lambda n: 0.0}, "warning", "grad_norm_generator", ["optim.generator.lr=0.0002"],
    ),
    "no gradient of I": (
        {"grad_norm_inference": lambda n: 0.0}, "warning", "grad_norm_inference", ["optim.inference.lr=0.0001"],
    ),
    "error does not fall": (
        {"reconstruction_mse": lambda n: 0.7 - 0.001 * n},
        "warning", "reconstruction_mse", ["optim.generator.lr=0.008"],
    ),
    "error rises from the start": (
        {"reconstruction_mse": lambda n: 0.5 + 0.05 * n}, "error", "reconstruction_mse", ["optim.generator.lr=0.0002"],
    ),
    "error rises again": (
        {"reconstruction_mse": lambda n: 0.4 if n < 4 else 0.04 if n < 16 else 0.09},
        "warning", "reconstruction_mse", ["optim.generator.lr=0.001"],
    ),
    "inference loss rises": (
        {"inference_data_nll": lambda n: -11 + n}, "warning", "inference_data_nll", ["optim.inference.lr=0.0005"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines", [6, 7, 12, 24, 300, 3000])
def test_healthy_log(lines):
    findings = examine(make_log(lines), DIGITS)
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert verdict(findings) == "healthy"
    assert all(finding.advice == "" for finding in findings)
    assert {*HEALTHY_RANGES, "reconstruction_mse", "inference_data_nll"} <= {finding.check for finding in findings}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problem_gives_its_finding_and_no_other(name):
    curves, level, check, advice = PROBLEMS[name]
    (finding,) = problems(make_log(**curves))
    assert (finding.level, finding.check) == (level, check), finding
    for part in advice:
        assert part in finding.advice
    assert verdict([finding]) == {"warning": "warning", "error": "unhealthy"}[level]


@pytest.mark.parametrize("name", PROBLEMS)
def test_advice_is_valid_settings(name):
    (finding,) = problems(make_log(**PROBLEMS[name][0]))
    overrides = [word.rstrip(",;") for word in finding.advice.split() if "=" in word]
    assert overrides
    assert config_io.load_config("digits", overrides) != DIGITS


def test_recent_problem_in_a_long_run():
    log = make_log(3000, z_displacement_rms=lambda n: 0.24 if n < 2980 else 6.0)
    assert [finding.check for finding in problems(log)] == ["z_displacement_rms"]


def test_erratic_start_is_healthy():
    curves = {
        "energy_gap": lambda n: 300 / n**4,
        "energy_gap_max": lambda n: 900 / n**4,
        "x_displacement_rms": lambda n: 2 / n,
    }
    assert problems(make_log(24, **curves)) == []


def test_consequences_of_settings_are_healthy():
    no_chains = config_io.load_config("digits", ["teaching.x_chain.steps=0", "teaching.z_chain.steps=0"])
    still = {"x_displacement_rms": lambda n: 0.0, "z_displacement_rms": lambda n: 0.0}
    assert problems(make_log(**still), no_chains) == []
    assert problems(make_log(**still)) != []
    weighted = config_io.load_config("digits", ["teaching.energy_weight=2.5e5"])
    assert problems(make_log(grad_norm_energy=lambda n: 5e4), weighted) == []
    assert problems(make_log(grad_norm_energy=lambda n: 5e4)) != []
    assert healthy_ranges(weighted)["grad_norm_energy"].high == 2.5e5 * HEALTHY_RANGES["grad_norm_energy"].high


def test_advice_for_a_network_without_loss():
    config = config_io.load_config("digits", ["teaching.generator_data_weight=0"])
    (finding,) = problems(make_log(grad_norm_generator=lambda n: 0.0), config)
    assert finding.advice == "teaching.generator_data_weight=1"


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (["nets.energy_slope=null"], "nets.energy_slope=1 teaching.energy_l2=1"),
        (["nets.energy_slope=null", "teaching.energy_l2=1"], "nets.energy_slope=1"),
        (["nets.energy_slope=1"], "teaching.energy_l2=1"),
        (
            ["nets.energy_slope=1", "teaching.energy_l2=1"],
            "teaching.x_chain.step_size=0.125 teaching.generator_sample_weight=40",
        ),
        (
            ["nets.energy_slope=1", "teaching.energy_l2=1", "teaching.generator_sample_weight=null"],
            "teaching.x_chain.step_size=0.125",
        ),
    ],
)
def test_advice_for_a_flat_energy(settings, advice):
    (finding,) = problems(make_log(energy_slope=lambda n: 0.001), config_io.load_config("digits", settings))
    assert finding.advice == f"if it persists, {advice} in a new run"


def test_logs_without_the_slope_of_the_energy():
    """As written before it was logged."""
    log = make_log()
    for entry in log:
        entry.pop("energy_slope", None)
    assert problems(log) == []


def test_advice_for_too_much_noise():
    hot = config_io.load_config("digits", ["teaching.x_chain.temperature=1"])
    (finding,) = problems(make_log(x_displacement_rms=lambda n: 5.5), hot)
    assert finding.level == "error"
    assert "teaching.x_chain.temperature=1e-06" in finding.advice


def test_methods_without_an_x_chain():
    """Their energy is not slowed down by a setting that they do not use."""
    config = config_io.load_config("digits", ["method=triangle"])
    for changes in ({"energy_gap": lambda n: -8.0}, {"energy_gap_max": lambda n: 40.0 if n == 22 else 0.01}):
        log = make_log(**changes)
        for entry in log:
            entry.pop(X, None)
            entry.pop("energy_slope", None)
        (finding,) = problems(log, config)
        assert finding.advice == f"{LR}=0.0005"
        assert "x-chain" not in finding.message


@pytest.mark.parametrize("setting", ["method=sr-abp", "teaching.z_start=prior"])
def test_z_chain_may_replace_prior_draws(setting):
    config = config_io.load_config("digits", [setting])
    found = [[f.check for f in problems(make_log(z_displacement_rms=lambda n, d=d: d), config)] for d in (1.5, 0.004)]
    assert found == [[], [Z]]


def test_reconstruction_without_an_inference_model():
    config = config_io.load_config("digits", ["method=sr-abp"])
    (finding,) = problems(make_log(reconstruction_mse=lambda n: 0.7 - 0.001 * n), config)
    assert finding.message.endswith("G does not learn the images.")


def test_short_log():
    findings = examine(make_log(3), DIGITS)
    assert verdict(findings) == "healthy"
    assert "it has 3 of the 6 lines" in next(finding.message for finding in findings if finding.check == "log")
    assert problems(make_log(3, reconstruction_mse=lambda n: 0.5 + n, x_displacement_rms=lambda n: 0.8)) == []
    far = problems(make_log(1, z_displacement_rms=lambda n: 5.0))  # never healthy, not even in the first line
    assert [finding.check for finding in far] == ["z_displacement_rms"]


def test_samples_that_are_not_images_have_no_scale():
    """A chain at temperature 1 replaces a point in the plane; the other ranges apply."""
    config = config_io.load_config("vectors", ["data.shape=[2]"])
    log = make_log(x_displacement_rms=lambda n: 0.8, z_displacement_rms=lambda n: 2.0)
    assert {finding.check for finding in problems(log)} == {X, Z}
    found = [finding.check for finding in examine(log, config) if finding.level != "ok"]
    assert found == [Z]
