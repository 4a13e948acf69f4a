import copyreg
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.compiler.config

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


def named() -> bool:
    """Whether memory formats are pickled by name."""
    return b"_memory_format" in pickle.dumps(copyreg.dispatch_table.get(torch.memory_format))


def test_keys_of_the_cache_do_not_depend_on_imports():
    """`pickle` names a memory format after the first module with an attribute `torch`."""
    with compiler.caching():
        data = pickle.dumps(torch.channels_last)
        assert b"dualmcmc" in data
        assert pickle.loads(data) is torch.channels_last
        assert torch._functorch.config.autograd_cache_allow_custom_autograd_functions is True
    assert torch.memory_format not in copyreg.dispatch_table
    assert torch._functorch.config.autograd_cache_allow_custom_autograd_functions is False


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (torch._inductor.config, "fx_graph_cache", False),
        (torch._functorch.config, "enable_autograd_cache", False),
        (torch.compiler.config, "force_disable_caches", True),
    ],
)
def test_caches_compiled_code(config, name, value):
    if not hasattr(config, name):
        pytest.skip("this PyTorch has it elsewhere")
    assert compiler.caches_compiled_code()
    with config.patch(name, value):
        assert not compiler.caches_compiled_code()
    assert compiler.caches_compiled_code()


def test_caching_restores_what_it_changes(monkeypatch):
    """In whatever order blocks end, and with another entry."""
    monkeypatch.setitem(copyreg.dispatch_table, torch.memory_format, str)
    first, second = compiler.caching(), compiler.caching()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert named()
    second.__exit__(None, None, None)
    assert copyreg.dispatch_table[torch.memory_format] is str
    with pytest.raises(ZeroDivisionError), compiler.caching(), compiler.caching():
        1 / 0  # noqa: B018
    assert copyreg.dispatch_table[torch.memory_format] is str


def test_caching_in_threads():
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with compiler.caching():
            entered.set()
            leave.wait(60)
            found.append(named())

    found: list[bool] = []
    thread = threading.Thread(target=hold)
    with compiler.caching():
        thread.start()
        assert entered.wait(60)
    leave.set()
    thread.join()
    assert found == [True]
    assert torch.memory_format not in copyreg.dispatch_table
