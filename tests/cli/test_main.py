"""The command as a whole: help, completion, usage errors, signals, pipes."""

import gc
import importlib.abc
import os
import signal
import subprocess
import sys
import zipfile

import pytest

import dualmcmc
from dualmcmc import config_io
from dualmcmc.__main__ import run as entry_point
from dualmcmc.cli import app
from dualmcmc.engine.run_folder import RunFolder
from tests.conftest import TINY, assert_refused

COMMANDS = [command.name for command in app.registered_commands]
DATA_COMMANDS = [("data", name) for name in ("list", "fetch", "check", "pack")]
SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


def run_python(code, *words, **environment):
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)


def test_start_up_imports_neither_torch_nor_numpy():
    assert (
        run_python("import sys, dualmcmc.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)").returncode
        == 0
    )


def test_shell_completion():
    script = "import sys; sys.argv[0] = 'dualmcmc'; from dualmcmc.cli import main; main()"
    words = {"COMP_WORDS": "dualmcmc train cif", "COMP_CWORD": "2", "_DUALMCMC_COMPLETE": "complete_bash"}
    answer = run_python(script, **words)
    assert set(answer.stdout.split()) == {name for name in config_io.preset_names() if name.startswith("cif")}


@pytest.mark.parametrize("words", [*((name,) for name in COMMANDS), *DATA_COMMANDS], ids=" ".join)
def test_every_command_has_help_and_json(call, words):
    answer = call(*words, "--help")
    assert answer.code == 0
    assert "--json" in answer.out


def test_help_lines_fit(call):
    lines = call("--help").out.partition("Commands:")[2].splitlines()
    assert all(any(line.strip().startswith(name) for line in lines) for name in [*COMMANDS, "data"])
    assert not [line for line in lines if line.endswith("...")]


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"fid", "presets"}))
def test_one_grammar(call, name):
    """COMMAND TARGET [KEY=VALUE]; the common options are spelled alike, and no command has twenty parameters."""
    usage, _, text = call(name, "--help").out.partition("\n")
    assert "TARGET" in usage
    options = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  -")]
    assert len(options) <= 14
    assert not {"--samples", "--steps", "--step-size", "--temperature", "--z-steps", "--crop"} & set(options)
    if "KEY=VALUE" not in usage:
        assert name in ("doctor", "report", "export", "push")


def test_version_and_no_arguments(call):
    assert call("--version").out.strip() == dualmcmc.__version__
    assert "Usage" in call().out
    assert call("data").out == call("data", "--help").out


def test_usage_errors(call):
    assert_refused(call("trian"), "trian", "'train'")
    assert_refused(call("train", "--bogus"), "--bogus")
    assert_refused(call("sample"), "TARGET")
    assert_refused(call("data", "fetsch"), "fetsch", "dualmcmc data --help")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "x", "-n", "abc"], "-n abc: use an integer from 1 to 1,000,000,000,000."),
        (["sample", "x", "--seed", "1.5"], "--seed 1.5: use an integer from 0 to"),
        (["sample", "x", "-n", "9" * 5000], "use an integer from 1"),
        (["revise", "x", "--rows", "101"], "--rows 101: use an integer from 1 to 100."),
        (["train", "--max-minutes", "soon"], "--max-minutes soon: use a number"),
        (
            ["sample"],
            "TARGET is missing: run folder, snapshot file, name of pretrained weights, or hf://USER/NAME[@REVISION]. "
            "See dualmcmc",
        ),
        (["outliers", "x"], "--against is missing: datasets to detect"),
        (["sample", "x", "--sed", "1"], "unknown option --sed. Did you mean '--seed'?"),
        (["sample", "x", "-n"], "-n needs a value."),
        (["sample", "x", "--json=1"], "--json takes no value."),
        (["presets", "more"], "unexpected argument 'more'. See dualmcmc presets --help."),
        (["smple"], "unknown command 'smple'. Did you mean 'sample'? See dualmcmc --help."),
        (["train", "digits", "train.images="], "train.images= has no value: write train.images=VALUE"),
    ],
)
def test_usage_errors_are_in_our_words(call, words, message):
    answer = call(*words)
    assert_refused(answer, message)
    assert not any(word in answer.err for word in ("Input should", "Invalid value", "Missing", "Got unexpected"))


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- 2>&-"])
def test_closed_streams(closed):
    done = subprocess.run(["sh", "-c", f'"$0" -m dualmcmc presets {closed}', sys.executable], capture_output=True)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


def test_characters_outside_the_encoding_are_replaced():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "dualmcmc", "train", "--out", "\u00e9/\u6f22", "train.batch=0"]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    command = [sys.executable, "-m", "dualmcmc", "config", "\u6f22"]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.stderr.startswith(b"error: unknown preset '\\u6f22'")


def test_interrupt_during_the_import(monkeypatch):
    class Interrupt(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "dualmcmc.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "dualmcmc.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        entry_point()
    assert stopped.value.code == 130


@pytest.mark.parametrize("command", ["config", "presets"])  # fails while printing, or in the end
def test_closed_pipe_gives_no_traceback(command):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dualmcmc", command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    process.stdout.close()  # the reader exits before anything is written
    printed = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert printed == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_removes_half_written_files(call, run_folder, tmp_path, monkeypatch, number):
    """Also between opening an archive member and keeping a reference to it, when the archive cannot be closed."""
    open_member = zipfile.ZipFile.open

    def interrupted(*args, **options):
        member = open_member(*args, **options)
        signal.raise_signal(number)
        return member

    monkeypatch.setattr(zipfile.ZipFile, "open", interrupted)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # main() replaces it
    before = signal.getsignal(number)
    answer = call("sample", run_folder, "-n", 4, "--out", tmp_path / "a.npz", "--device", "cpu")
    assert (answer.code, answer.err) == (128 + number, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert signal.getsignal(number) == before
    gc.collect()  # the archive's finalizer raises; during another test's ast.parse that would be fatal (CPython 106905)


@pytest.mark.parametrize("lost", ["stdout", "stderr"])
def test_lost_reader_does_not_stop_training(tmp_path, lost):
    """As in `dualmcmc train 2>&1 | tee log`, when the signal that stops the run ends tee too."""
    out = tmp_path / "run"
    settings = [*TINY, "train.images=100000", "train.save_every=100000", "train.log_every=1"]
    code = "from dualmcmc.utils import progress; progress.LINE_INTERVAL = 0; from dualmcmc.__main__ import run; run()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", "digits", *settings, "--device", "cpu", "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while "it/s" not in process.stderr.readline():
        pass
    getattr(process, lost).close()
    process.send_signal(signal.SIGINT)
    if lost == "stdout":
        process.stderr.read()
    assert process.wait(60) == 130
    assert int(RunFolder(out).latest_state().stem) > 0
