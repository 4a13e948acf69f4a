import math

import pytest
import torch

from dualmcmc.bench import step as bench
from dualmcmc.bench.step import PARTS, build_step, check, format_result, measure, without_chains
from dualmcmc.engine.plan import resolve_plan
from dualmcmc.utils.errors import UserError
from tests.conftest import tiny

CPU = torch.device("cpu")
PEAK = {"matmul_flops_per_second": 1e10, "copy_bytes_per_second": 1e9}


@pytest.fixture(autouse=True)
def _peak_rates(monkeypatch):
    monkeypatch.setattr(bench.timing, "measure_peak_rates", lambda device, precision: PEAK)


def new_step(*changes):
    config = tiny(*changes)
    return build_step(config, resolve_plan(config.engine, CPU))


@pytest.mark.parametrize("second_x_chain", [False, True])
def test_result(second_x_chain):
    messages = []
    config = tiny(f"teaching.second_x_chain={second_x_chain}".lower())
    result = measure(config, "cpu", repeats=2, notify=messages.append)
    assert {"command", "time", "commit", "dualmcmc", "python", "torch", "device"} <= result.keys()
    assert (result["preset"], result["batch"]) == ("digits", 16)
    assert (result["x_chain_steps"], result["z_chain_steps"]) == (2, 2)
    assert result["check"]["float32"]["max_difference"] <= bench.FLOAT32_TOLERANCE
    assert result["speedup"] == pytest.approx(result["reference"]["seconds"] / result["engine"]["seconds"])
    for side in (result["reference"], result["engine"]):
        assert list(side["parts"]) == list(PARTS)
        assert all(part["seconds"] > 0 and part["flops"] > 0 for part in side["parts"].values())
        assert side["flops"] == sum(part["flops"] for part in side["parts"].values())
        assert side["images_per_second"] == pytest.approx(16 / side["seconds"])
        assert side["fraction_outside_chains"] == pytest.approx(side["seconds_without_chains"] / side["seconds"])
    for name in PARTS:  # the engine has no cheaper form of the simple networks
        assert result["engine"]["parts"][name]["flops"] == result["reference"]["parts"][name]["flops"], name
    assert result["engine"]["compile_seconds"] is None
    assert messages == ["checking against the reference in float32", "timing the reference", "timing the engine"]

    table = format_result(result)
    assert ("k_x 2 twice" in table) == second_x_chain
    for text in ("agrees with the reference in float32", "\niteration ", *PARTS.values(), "images/s", "effective"):
        assert text in table


def test_augmentation_is_timed_as_it_is_after_the_ramp():
    config = tiny("teaching.energy_augment=0.5", "teaching.energy_augment_ramp=1000")
    result = measure(config, "cpu", repeats=1)
    assert result["check"]["float32"]["max_difference"] <= bench.FLOAT32_TOLERANCE
    plain = measure(tiny(), "cpu", repeats=1)
    for name in ("x-chain", "energy"):  # the transformations are products
        assert result["engine"]["parts"][name]["flops"] > plain["engine"]["parts"][name]["flops"]


def test_without_reference():
    result = measure(tiny(), "cpu", repeats=1, with_reference=False)
    assert not {"check", "reference", "speedup"} & result.keys()
    table = format_result(result)
    assert "effective" not in table
    assert "reference:" not in table


def test_compiled(quick_compiler):
    result = measure(tiny("engine.mode=compiled"), "cpu", repeats=1, with_reference=False)
    assert result["engine"]["mode"] == "compiled"
    assert result["engine"]["compile_seconds"] > 0
    assert "compiled in" in format_result(result)


def test_micro_batches_with_batchnorm_are_not_checked():
    changes = ["nets.kind=resnet", "train.batch=4", "engine.micro_batch=2"]
    changes += ["teaching.x_chain.steps=1", "teaching.z_chain.steps=1"]
    messages = []
    result = measure(tiny(*changes), "cpu", repeats=1, notify=messages.append)
    assert "BatchNorm" in messages[0]
    assert "check" not in result
    assert result["speedup"] > 0


@pytest.mark.parametrize("setting", ["x_chain.grad_clip=1", "z_chain.grad_clip=1", "z_chain.metropolis=true"])
def test_unsupported_by_the_reference(setting):
    config = tiny(f"teaching.{setting}")
    with pytest.raises(UserError, match=rf"teaching\.{setting.partition('=')[0]}: set it to .*--no-reference"):
        measure(config, "cpu")


def test_bfloat16_has_its_own_tolerance():
    result = check(new_step("engine.precision=bfloat16"), "bfloat16")
    assert bench.FLOAT32_TOLERANCE < result["max_difference"] <= result["tolerance"] == bench.REDUCED_TOLERANCE
    with pytest.raises(UserError, match=r"eager, bfloat16.* disagree"):
        check(new_step("engine.precision=bfloat16"), "float32")


@pytest.mark.parametrize(
    "fault",
    [
        lambda state: state.trio.energy.features[0].bias.data.add_(1e-3),
        lambda state: state.trio.generator.layers[0].bias.data.add_(1e-3),
        lambda state: state.trio.inference.mean.bias.data.add_(1e-3),
        lambda state: state.rng.manual_seed(5),
    ],
    ids=["energy", "generator", "inference", "noise"],
)
def test_check_finds_a_fault(fault):
    step = new_step()
    fault(step.state)
    with pytest.raises(UserError, match="disagree"):
        check(step, "float32")


def test_nan_fails_the_check(monkeypatch):
    rows = bench._reference_stats(tiny(), CPU, 2)
    for name in rows[0]:
        differences = bench._relative_differences(rows[0] | {name: math.nan}, rows[0])
        assert {key for key, value in differences.items() if value == math.inf} == {name}
    monkeypatch.setattr(bench, "_engine_stats", lambda step: [rows[0], rows[1] | {"energy_gap": math.nan}])
    with pytest.raises(UserError, match="energy_gap differs by inf"):
        check(new_step(), "float32")


def test_without_chains():
    config = without_chains(tiny())
    assert (config.teaching.x_chain.steps, config.teaching.z_chain.steps) == (0, 0)
