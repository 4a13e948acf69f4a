import numpy as np
import pytest
import torch

import dualmcmc
import reference_statistics
from dualmcmc import data
from dualmcmc.config import Data
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.tasks import fid
from dualmcmc.tasks.evaluate import evaluate, needs_images
from dualmcmc.utils.errors import UserError
from tests.conftest import assert_refused
from tests.data import makers
from tests.data.makers import pixels
from tests.networks import Tiny

CIFAR10 = Data(source="cifar10", size=32, channels=3)


class Failing(Tiny):
    def forward(self, x):
        raise AssertionError("features were computed again")


def features(net=None, checksum="tiny", standard=True):
    return FeatureExtractor(net or Tiny(), 48, "cpu", standard, checksum)


@pytest.fixture
def included(cache, monkeypatch, tmp_path):
    """Statistics of 600 fake CIFAR-10 images, included in the package: what the script returned, and its features."""
    makers.cifar10(cache / "cifar10", pixels(600, 32, 3), pixels(60, 32, 3, seed=1))
    made = reference_statistics.make("cifar10", features(), tmp_path / "features", tmp_path / "included")
    monkeypatch.setattr(fid, "INCLUDED_FOLDER", tmp_path / "included")
    monkeypatch.setattr(fid, "INCLUDED", {made["file"]: made["sha256"]})
    return made, tmp_path / "features"


@pytest.fixture
def run(finished_run):
    run = dualmcmc.load(finished_run, device="cpu")
    run.trained_data = CIFAR10
    return run


def reference(net, **options):
    images = data.load(CIFAR10)
    return fid.reference_features(images.train, data.describe(CIFAR10, images), features(net, **options))


def test_features_are_kept_and_read(included, tmp_path):
    made, folder = included
    names = {path.name for path in folder.iterdir()}
    assert names == {"train-0.npy", "train-500.npy", "test-0.npy"}
    again = reference_statistics.make("cifar10", features(Failing()), folder, tmp_path / "again")
    assert again == made
    (folder / "train-500.npy").unlink()  # as if the call had been interrupted
    assert reference_statistics.make("cifar10", features(), folder, tmp_path / "again") == made
    np.save(folder / "train-0.npy", np.zeros((3, 48)))
    with pytest.raises(UserError, match=r"train-0.npy' has shape \(3, 48\), expected \(500, 48\)"):
        reference_statistics.make("cifar10", features(), folder, tmp_path / "again")


def test_rounding(included):
    made, folder = included
    assert made["images"] == 600
    assert made["bytes"] < 4 * 48 * 49 / 2 + 8 * 48 + 1500
    assert 0 < abs(made["train_test_rounded"] - made["train_test_exact"]) < 1e-5
    rows = torch.from_numpy(np.concatenate([np.load(folder / f"train-{first}.npy") for first in (0, 500)])).double()
    moments, origin = reference(Failing())[0].moments, reference(Failing())[1]
    assert origin == "package"
    assert torch.allclose(moments.mean, rows.mean(0), rtol=1e-12)
    assert torch.allclose(moments.covariance, rows.T.cov(), rtol=1e-6, atol=1e-9)


def test_both_files_of_the_network_find_them_and_others_do_not(included):
    assert reference(Failing(), checksum="the other file")[1] == "package"
    assert reference(Tiny(), standard=False)[1] == "computed"


def test_the_cache_comes_first(included, cache):
    made, _ = included
    fid.INCLUDED.clear()
    computed, origin = reference(Tiny())
    assert origin == "computed"
    fid.INCLUDED[made["file"]] = made["sha256"]
    cached, origin = reference(Failing())
    assert origin == "cache"
    assert torch.equal(cached.moments.covariance, computed.moments.covariance)
    (path,) = (cache / "statistics").iterdir()
    assert path.name == made["file"]  # the same key


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_damaged_file_is_not_used(included, damage):
    made, _ = included
    path = fid.INCLUDED_FOLDER / made["file"]
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "changed":
        content[-5] ^= 1
        path.write_bytes(content)
    assert fid.included_reference(CIFAR10, features()) is None
    assert reference(Tiny())[1] == "computed"


def test_fid_without_the_images(included, run, cache):
    with_images = evaluate(run, ["fid"], 40, features=features(), images=data.load(CIFAR10))
    (cache / "cifar10").rename(cache / "elsewhere")
    alone = evaluate(run, ["fid"], 40, features=features())
    assert alone.generator == with_images.generator
    assert alone.ebm == with_images.ebm
    assert alone.reference == with_images.reference == {"images": 600, "statistics": "package"}
    assert alone.data["checksum"] == with_images.data["checksum"]
    for metrics in (["fid", "mse"], ["kid"]):
        assert needs_images(run, metrics, features())
        with pytest.raises(UserError, match="CIFAR-10 is not in"):
            evaluate(run, metrics, 40, features=features())


@pytest.mark.parametrize("change", [{"path": "mine"}, {"holdout": 0.1}, {"split": "test"}, {"size": 16}])
def test_other_images_have_no_included_statistics(included, change):
    assert fid.included_reference(Data(**{**vars(CIFAR10), **change}), features()) is None


def test_command(included, run_script, monkeypatch, tmp_path):
    made, folder = included
    monkeypatch.setattr(fid, "load_features", lambda **_: features(Failing()))
    answer = run_script("reference_statistics.py", "cifar10", "--features", folder, "--device", "cpu")
    assert answer.code == 0, answer.err
    assert made["sha256"] in answer.out
    assert f"FID of the test images {made['train_test_rounded']:.7f}" in answer.out
    assert_refused(run_script("reference_statistics.py", "cifar11", "--features", folder), "Did you mean 'cifar10'")
    assert_refused(run_script("reference_statistics.py", "digits", "--features", folder), "no test split")
