"""What is built for the package index: its contents, and that it works outside the checkout."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dualmcmc
from dualmcmc import config_io
from dualmcmc.pretrained import checkout_file
from dualmcmc.tasks.fid import INCLUDED
from tests.conftest import TINY

ROOT = Path(__file__).parents[1]
MAX_BYTES = 12_000_000  # of a wheel or an sdist
NAME = f"dualmcmc-{dualmcmc.__version__}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    words = ["-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def site(dist, tmp_path_factory):
    """The wheel, unpacked as pip would install it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as wheel:
        wheel.extractall(folder)
    return folder


@pytest.fixture
def python(site, tmp_path):
    """Run Python on the unpacked wheel, outside the checkout."""
    variables = {"PYTHONPATH": str(site), "DUALMCMC_DATA": str(tmp_path / "cache")}

    def run(*words):
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)

    return run


def test_wheel(dist, site):
    assert {path.name for path in site.iterdir()} == {"dualmcmc", f"{NAME}.dist-info"}
    files = {str(path.relative_to(site / "dualmcmc")) for path in site.glob("dualmcmc/**/*") if path.is_file()}
    source = {str(path.relative_to(ROOT / "src" / "dualmcmc")) for path in ROOT.glob("src/dualmcmc/**/*.py")}
    assert source <= files
    assert {"py.typed", "data/digits.npz"} <= files
    assert {f"presets/{name}.yaml" for name in config_io.preset_names()} <= files
    assert {f"statistics/{name}" for name in INCLUDED} <= files
    assert not [name for name in files if "weights/" in name or name.endswith(".pyc")]
    entry = (site / f"{NAME}.dist-info" / "entry_points.txt").read_text()
    assert re.search(r"^dualmcmc = dualmcmc\.__main__:run$", entry, re.M)
    assert (dist / f"{NAME}-py3-none-any.whl").stat().st_size < MAX_BYTES


def test_extras(site):
    metadata = (site / f"{NAME}.dist-info" / "METADATA").read_text()
    extras = set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.M))
    assert extras == {"all", "data", "dev", "distributed", "hub", "metrics", "plots", "trackers"}


def test_sdist(dist):
    path = dist / f"{NAME}.tar.gz"
    with tarfile.open(path) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("src", "tests", "docs", "examples", "benchmarks"):
        here = {str(file.relative_to(ROOT)) for file in (ROOT / folder).rglob("*.*") if "__pycache__" not in file.parts}
        assert {name for name in here if name.endswith((".py", ".md", ".yaml", ".npz"))} <= files
    assert {"pyproject.toml", "constraints.txt", "Makefile", "LICENSE", "weights/README.md"} <= files
    assert not [name for name in files if name.startswith("weights/") and name.endswith(".safetensors")]
    assert path.stat().st_size < MAX_BYTES


def test_wheel_trains(python, tmp_path):
    done = python("-m", "dualmcmc", "train", "digits", *TINY, "train.images=32", "--device", "cpu", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "snapshot.safetensors").exists()


def test_pretrained_weights_outside_the_checkout(python, site, tmp_path):
    weights = checkout_file("cifar10-simple")
    program = f"""if True:
        import dualmcmc
        from pathlib import Path
        print(dualmcmc.__file__)
        try:
            dualmcmc.load("cifar10-simple", "cpu")
        except dualmcmc.UserError as error:
            print(error)
        file = Path("cache/pretrained/cifar10-simple.safetensors")
        if {weights is not None}:
            file.symlink_to({str(weights)!r})
            print(dualmcmc.load("cifar10-simple", "cpu").images)
    """
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    module, error, *images = done.stdout.splitlines()
    assert Path(module).is_relative_to(site)
    place = tmp_path / "cache" / "pretrained" / "cifar10-simple.safetensors"
    assert error.startswith("cannot fetch cifar10-simple (127.0.0.1:9: Connection refused): try again later, or save ")
    assert error.endswith(f"/dualmcmc/cifar10-simple/resolve/v1/model.safetensors as '{place}'.")
    assert images == (["4600000"] if weights else [])
