import pytest

from scaling import JOBS, Network, all_reduce_seconds, shared_noise_seconds

JOB = JOBS[0]


def test_one_gpu_costs_nothing_extra():
    assert all_reduce_seconds(JOB, 1, Network("slow", 1e9, 1e-3)) == 0
    assert shared_noise_seconds(JOB, 1) == 0


def test_ring_all_reduce():
    network = Network("no latency", 1e9, 0.0)
    assert all_reduce_seconds(JOB, 2, network) == pytest.approx(4 * JOB.parameters / 1e9)
    assert all_reduce_seconds(JOB, 4, network) == pytest.approx(1.5 * 4 * JOB.parameters / 1e9)
    assert all_reduce_seconds(JOB, 4, Network("", 1e9, 1e-3)) == pytest.approx(
        all_reduce_seconds(JOB, 4, network) + 5 * 2 * 1e-3  # 59 MB: 3 buckets and 2 more; two doublings
    )


def test_tables(run_script):
    answer = run_script("scaling.py")
    assert answer.code == 0
    assert answer.out.count("\n| 1,024 |") == 2 * len(JOBS)
    assert "**celebahq256**, slow network (10 GB/s):" in answer.out
