import pytest

from common import Parser, load_config
from tests.conftest import assert_refused

SCRIPTS = ["data.py", "growth.py", "evaluate.py"]


@pytest.mark.parametrize(
    ("words", "preset", "batch", "size"),
    [
        ([], "digits", 50, 16),
        (["train.batch=3"], "digits", 3, 16),
        (["digits"], "digits", 50, 8),
        (["mnist", "--device", "cpu", "train.batch=3"], "mnist", 3, 28),
        (["data.size=28", "train.batch=3"], "digits", 3, 28),
    ],
)
def test_target_and_settings(words, preset, batch, size):
    config = load_config(Parser("").parse_intermixed_args(words), defaults=["data.size=16"])
    assert (config.preset, config.train.batch, config.data.size) == (preset, batch, size)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cifar11"], "cifar11"),
        (["digits", "train.batch=0"], "train.batch"),
        (["--device", "gpu"], "'gpu'"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_input_is_one_line(run_script, script, words, expected):
    assert_refused(run_script(script, *words), expected)


@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        ("data.py", ["--images", "99"], "--images: must be at least 100, not 99"),
        ("data.py", ["--seconds", "nan"], "--seconds: must be at least 0.05, not nan"),
        ("growth.py", ["--repeats", "many"], "--repeats: 'many' is not a number"),
        ("growth.py", ["--out", "plot.pdf"], ".png"),
        ("evaluate.py", ["--samples", "1"], "--samples: must be at least 100"),
    ],
)
def test_bad_options(run_script, script, words, expected):
    assert_refused(run_script(script, *words), expected)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(run_script, script):
    answer = run_script(script, "--help")
    assert answer.code == 0
    assert f"python benchmarks/{script} [TARGET] [KEY=VALUE ...]" in answer.out
