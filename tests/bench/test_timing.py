import pytest
import torch
from torch import nn

from dualmcmc.bench import timing
from tests.conftest import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize(("commit", "end"), [("0123456789abcdef+", ", commit 0123456+"), (None, "")])
def test_description(monkeypatch, commit, end):
    monkeypatch.setattr("dualmcmc.tasks.record.commit", lambda: commit)
    monkeypatch.setattr("sys.argv", ["/usr/bin/dualmcmc", "bench"])
    result = timing.describe(tiny(), CPU)
    assert (result["preset"], result["command"], result["commit"]) == ("digits", "dualmcmc bench", commit)
    assert timing.format_environment(result) == f"{result['device']}, torch {torch.__version__}{end}"


def test_flops_forward_and_backward():
    layer, x = nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 8, 8, requires_grad=True)
    forward = 2 * 2 * 8 * 8 * 5 * 3 * 9
    assert timing.count_flops(lambda: layer(x)) == forward
    assert timing.count_flops(lambda: torch.autograd.grad(layer(x).sum(), x)) == 2 * forward
    assert timing.count_flops(lambda: layer(x).sum().backward()) == 3 * forward
    assert timing.count_flops(lambda: torch.randn(4, 6) @ torch.randn(6, 8)) == 2 * 4 * 6 * 8

    def parts(lap):
        layer(x)
        lap("a")
        layer(x)
        layer(x)
        lap("b")
        layer(x)
        lap("a")

    assert timing.count_flops_by_part(parts) == {"a": 2 * forward, "b": 2 * forward}


def test_laps_add_up(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    timer = timing.LapTimer(CPU)
    timer("a")
    timer("b")
    timer.start()
    timer("a")
    assert timer.seconds == {"a": 5.0, "b": 2.0}


def test_median(monkeypatch):
    clock = iter([0.0, 1.0, 0.0, 9.0, 0.0, 2.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    runs = []
    assert timing.median_seconds(lambda: runs.append(1), CPU, 3, warmup=4) == 2.0
    assert len(runs) == 7


def test_peak_rates(monkeypatch):
    monkeypatch.setattr(timing, "median_seconds", lambda function, *_: (function(), 0.5)[1])
    rates = timing.measure_peak_rates(CPU, "float32")
    assert rates == {"matmul_flops_per_second": 2 * 1024**3 / 0.5, "copy_bytes_per_second": 2 * 2**27 / 0.5}
