import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import TINY


def test_the_benchmark_runs():
    script = Path(__file__).parents[2] / "benchmarks" / "iteration.py"
    words = ["digits", "--device", "cpu", "--iterations", "2", "--set", *TINY]
    answer = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=True)
    machine, measured = map(json.loads, answer.stdout.splitlines())
    assert machine["torch"]
    assert measured["preset"] == "digits"
    assert measured["ms_per_iteration"] > 0
