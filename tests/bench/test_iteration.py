import pytest
import torch
from torch import nn

from dualmcmc.bench import check as checking
from dualmcmc.bench import timing
from dualmcmc.bench.check import build_iteration, check
from dualmcmc.bench.iteration import PARTS, in_words, without_chains
from dualmcmc.engine.accelerate import choose
from dualmcmc.errors import UserError
from tests.conftest import TINY, assert_refused, tiny

CPU = torch.device("cpu")
SET = [word for change in TINY for word in ("--set", change)]


def test_the_benchmark_tells_it_all(call):
    answer = call("bench", *SET, "--repeats", 2, "--json", "--device", "cpu")
    assert answer.code == 0, answer.err
    found = answer.json
    assert found["preset"] == "digits"
    assert {"command", "time", "commit", "dualmcmc", "python", "torch", "device"} <= found.keys()
    assert found["steps"] == [2, 2]
    assert found["check"]["float32"]["largest"] <= 1e-4
    assert found["ratio"] == pytest.approx(found["reference"]["seconds"] / found["ours"]["seconds"])
    for side in (found["reference"], found["ours"]):
        assert list(side["parts"]) == list(PARTS)
        assert all(part["seconds"] > 0 and part["flops"] > 0 for part in side["parts"].values())
        assert side["flops"] == sum(part["flops"] for part in side["parts"].values())
        assert side["images_per_second"] == pytest.approx(16 / side["seconds"])
        assert side["share_not_chain"] == pytest.approx(side["seconds_without_chains"] / side["seconds"])
    assert found["reference"]["flops"] == found["ours"]["flops"]  # the simple networks have nothing to save
    assert found["ours"]["seconds_to_compile"] is None
    assert found["ceilings"]["matmul_flops"] > found["ours"]["flops"] / found["ours"]["seconds"] > 0
    assert found["ceilings"]["copy_bytes"] > 1e8


@pytest.mark.parametrize(("commit", "end"), [("0123456789abcdef+", ", commit 0123456+"), (None, "")])
def test_every_result_says_what_it_needs_to_be_repeated(monkeypatch, commit, end):
    monkeypatch.setattr("dualmcmc.tasks.record.commit", lambda: commit)
    monkeypatch.setattr("sys.argv", ["/usr/bin/dualmcmc", "bench"])
    found = timing.described(tiny(), CPU)
    assert (found["preset"], found["command"], found["commit"]) == ("digits", "dualmcmc bench", commit)
    assert timing.where(found) == f"{found['device']}, torch {torch.__version__}{end}"


def test_the_table_is_for_people(call):
    answer = call("bench", *SET, "--repeats", 1, "--device", "cpu", "--second-x-chain")
    assert answer.code == 0, answer.err
    assert "k_x 2 twice" in answer.out
    assert "same losses as the reference in float32: within" in answer.out
    for words in ("whole iteration", *PARTS.values(), "images/s", "not in a chain"):
        assert words in answer.out
    alone = call("bench", *SET, "--repeats", 1, "--device", "cpu", "--no-reference")
    assert alone.code == 0
    assert "reference's" not in alone.out
    assert len(alone.out.splitlines()) == len(answer.out.splitlines()) - 2


def test_compiled(call, quick_compiler):
    answer = call("bench", *SET, "--set", "engine.mode=compiled", "--repeats", 1, "--device", "cpu", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["ours"]["mode"] == "compiled"
    assert answer.json["ours"]["seconds_to_compile"] > 0
    assert "compiling took" in in_words(answer.json)


def test_coarse_numbers_have_a_bound_of_their_own():
    config = tiny("engine.precision=bfloat16")
    found = check(build_iteration(config, choose(config.engine, CPU)), "bfloat16")
    assert 1e-4 < found["largest"] <= found["bound"] == checking.COARSE_BOUND
    with pytest.raises(UserError, match=r"eager, bfloat16.* disagree"):
        check(build_iteration(config, choose(config.engine, CPU)), "float32")


def test_the_other_benchmarks_are_still_commands(call):
    assert "--second-x-chain" in call("bench", "--help").out
    assert "first checked against the reference" in " ".join(call("bench", "--help").out.split())
    assert "evaluate" in call("bench", "--help").out
    assert_refused(call("bench", "--preset", "cifar11"), "cifar11")
    assert_refused(call("bench", "--set", "train.batch=0"), "train.batch")
    assert_refused(call("bench", "digits"), "--preset")
    assert_refused(call("bench", "--preset", "mnist", "growth"), "options go after", "growth")
    assert_refused(
        call("bench", "--set", "teaching.x_chain.grad_clip=1"), "teaching.x_chain.grad_clip", "--no-reference"
    )


def test_micro_batches_with_batchnorm_are_timed_unchecked(call):
    changes = [f"nets.{name}_width=2" for name in ("energy", "generator", "inference")]
    changes += ["train.batch=4", "engine.micro_batch=2", "teaching.x_chain.steps=1", "teaching.z_chain.steps=1"]
    words = [word for change in changes for word in ("--set", change)]
    answer = call("bench", "--preset", "cifar10-resnet", *words, "--repeats", 1, "--device", "cpu", "--json")
    assert answer.code == 0, answer.err
    assert "BatchNorm" in answer.err
    assert "check" not in answer.json


def test_the_second_chain_counts_the_same_on_both_sides(call):
    answer = call("bench", *SET, "--repeats", 1, "--device", "cpu", "--second-x-chain", "--json")
    for name in PARTS:
        ours, theirs = (answer.json[side]["parts"][name]["flops"] for side in ("ours", "reference"))
        assert ours == theirs, name


def test_what_is_not_chain_is_measured_without_chains():
    config = without_chains(tiny())
    assert (config.teaching.x_chain.steps, config.teaching.z_chain.steps) == (0, 0)


@pytest.mark.parametrize(
    "fault",
    [
        lambda nets: nets.energy.features[0].bias.data.add_(1e-3),
        lambda nets: nets.generator.layers[0].bias.data.add_(1e-3),
        lambda nets: nets.inference.mean.bias.data.add_(1e-3),
    ],
)
def test_an_engine_that_computes_something_else_is_found_out(fault):
    config = tiny()
    iteration = build_iteration(config, choose(config.engine, CPU))
    iteration.prepare()
    check(iteration, "float32")
    iteration = build_iteration(config, choose(config.engine, CPU))
    fault(iteration.state.trio)
    with pytest.raises(UserError, match="disagree"):
        check(iteration, "float32")


def test_noise_of_another_kind_is_found_out(monkeypatch):
    config = tiny()
    iteration = build_iteration(config, choose(config.engine, CPU))
    iteration.state.rng.manual_seed(5)
    with pytest.raises(UserError, match="disagree"):
        check(iteration, "float32")


@pytest.mark.parametrize("position", range(11))
def test_not_a_number_is_no_agreement(monkeypatch, position):
    real = checking._stats_of_ours

    def one_bad(iteration):
        rows = real(iteration)
        rows[0][list(rows[0])[position]] = float("nan")
        return rows

    monkeypatch.setattr(checking, "_stats_of_ours", one_bad)
    config = tiny()
    with pytest.raises(UserError, match="disagree"):
        check(build_iteration(config, choose(config.engine, CPU)), "float32")


def test_operations_are_counted_forth_and_back():
    layer, x = nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 8, 8, requires_grad=True)
    once = 2 * 2 * 8 * 8 * 5 * 3 * 9
    assert timing.count_flops(lambda: layer(x)) == once
    assert timing.count_flops(lambda: torch.autograd.grad(layer(x).sum(), x)) == 2 * once
    assert timing.count_flops(lambda: layer(x).sum().backward()) == 3 * once
    assert timing.count_flops(lambda: torch.randn(4, 6) @ torch.randn(6, 8)) == 2 * 4 * 6 * 8

    def work(lap):
        layer(x)
        lap("a")
        layer(x)
        layer(x)
        lap("b")
        layer(x)
        lap("a")

    assert timing.flops_by_part(work) == {"a": 2 * once, "b": 2 * once}


def test_laps_add_up(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    laps = timing.Laps(CPU)
    laps("a")
    laps("b")
    laps.begin()
    laps("a")
    assert laps.parts == {"a": 5.0, "b": 2.0}


def test_seconds_are_a_median(monkeypatch):
    clock = iter([0.0, 1.0, 0.0, 9.0, 0.0, 2.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    runs = []
    assert timing.seconds(lambda: runs.append(1), CPU, 3, warm_up=4) == 2.0
    assert len(runs) == 7
