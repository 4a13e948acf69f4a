import os
import subprocess
import sys

import pytest
import torch

from dualmcmc.engine import compiler

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_compiled_code_is_cached(monkeypatch, cache):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, "/initial")  # restored afterwards
    monkeypatch.setattr(compiler, "CACHE_IS_OURS", True)
    compiler.make_compiler(CPU, True)
    assert os.environ[compiler.CACHE_VARIABLE] == str(cache / "compiled")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, "/chosen")
    monkeypatch.setattr(compiler, "CACHE_IS_OURS", False)
    compiler.make_compiler(CPU, True)
    assert os.environ[compiler.CACHE_VARIABLE] == "/chosen"


def test_torch_sets_no_cache_folder_before_us():
    """In a fresh process: importing torch's compiler sets the variable."""
    code = "from dualmcmc.engine import compiler, trainer; assert compiler.CACHE_IS_OURS"
    environment = {name: value for name, value in os.environ.items() if name != compiler.CACHE_VARIABLE}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize(
    ("device", "deterministic", "expected"),
    [
        (CUDA, True, {"layout_optimization": False, "deterministic": True}),
        (CUDA, False, {"layout_optimization": False}),
        (CPU, True, None),
    ],
)
def test_deterministic_runs_are_compiled_without_autotuning(device, deterministic, expected, monkeypatch):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, "/initial")  # restored afterwards
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda layers, **arguments: found.append(arguments["options"]))
        compiler.make_compiler(device, deterministic)(torch.sin)
    assert found == [expected]
    torch.compile(torch.sin, options=expected)  # this PyTorch has options of these names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("backend='inductor' raised:\nLoweringException: no module\n  more", "LoweringException: no module"),
        ("too old", "RuntimeError: too old"),
        ("", "RuntimeError"),
        ("first:\n\n second:\nno colon", "RuntimeError: no colon"),
    ],
)
def test_compile_error_names_the_cause(text, expected):
    assert compiler.compile_error(RuntimeError(text)) == expected
