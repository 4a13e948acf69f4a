"""A plain installation trains and samples; what it lacks is named in one line, before the work."""

import json
import subprocess
import sys

import pytest
import torch

from dualmcmc.utils.errors import UserError
from dualmcmc.utils.extras import is_installed, require
from tests.conftest import TINY, assert_refused

EXTRAS = {
    "data": ("lmdb", "pyarrow", "scipy"),
    "distributed": ("lightning", "lightning_fabric"),
    "metrics": ("torchmetrics",),
    "plots": ("matplotlib",),
    "trackers": ("tensorboard", "wandb", "mlflow", "sqlalchemy", "alembic"),
    "dev": ("sklearn", "skimage"),
}

SCRIPT = """
import json, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None  # makes its import fail
from dualmcmc import cli
for words in json.loads(sys.argv[2]):
    sys.argv = ["dualmcmc", *words]
    try:
        cli.main()
    except SystemExit as end:
        print(words[0], end.code, file=sys.stderr)
"""


def test_plain_installation_trains_and_samples(tmp_path):
    folder, missing = str(tmp_path / "run"), [name for names in EXTRAS.values() for name in names]
    commands = [["train", "digits", *TINY, "--device", "cpu", "--out", folder]]
    commands += [[word, folder] for word in ("sample", "reconstruct", "inpaint", "interpolate")]
    commands += [["evaluate", folder, "--metrics", "mse"]]
    commands += [[word, folder] for word in ("revise", "long-chains", "report")]
    words = [sys.executable, "-c", SCRIPT, json.dumps(missing), json.dumps(commands)]
    answer = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    codes = [line.split() for line in answer.stderr.splitlines() if line.split()[0] in [c[0] for c in commands]]
    expected = dict.fromkeys(["train", "sample", "reconstruct", "inpaint", "interpolate", "evaluate"], "0")
    assert dict(codes) == expected | dict.fromkeys(["revise", "long-chains", "report"], "2"), answer.stderr
    errors = [line for line in answer.stderr.splitlines() if line.startswith("error")]
    assert errors == 3 * ["error: drawing curves needs the package matplotlib: pip install 'dualmcmc[plots]'."]
    assert "pip install 'dualmcmc[trackers]'" in answer.stderr
    assert "tensorboard" not in answer.stdout
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_svhn_is_refused_before_its_download(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert_refused(call("data", "fetch", "svhn"), "needs the package scipy: pip install 'dualmcmc[data]'")


def test_present_module():
    assert require("torch", "data", "this") is torch
    with pytest.raises(UserError, match=r"this needs the package nowhere: pip install 'dualmcmc\[data\]'"):
        require("nowhere.inside", "data", "this")


def test_folder_is_not_a_package(tmp_path, monkeypatch):
    """W&B and TensorBoard create folders of their names, which Python would import from the current folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_tracker").mkdir()
    assert not is_installed("a_tracker")
    assert not is_installed("nowhere")
    assert is_installed("torch")
