import custom_networks
from tests.conftest import TINY


def test_measures_both(run_script):
    answer = run_script(
        "custom_networks.py", "digits", *TINY, "--iterations", 20, "--rounds", 1, "--device", "cpu", "--json"
    )
    assert answer.code == 0, answer.err
    result = answer.json
    assert result["engines"] == {"settings": "eager, float32", "passed": "eager, float32"}
    assert result["ratio"] == result["rates"]["passed"] / result["rates"]["settings"]
    assert custom_networks.format_result(result).splitlines()[-1] == f"passed / settings: {result['ratio']:.3f}"


def test_bad_input(run_script):
    answer = run_script("custom_networks.py", "digits", "--iterations", 1)
    assert (answer.code, answer.out) == (2, "")
    assert "must be at least 20" in answer.err
