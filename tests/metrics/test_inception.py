import pytest
import torch
from torch.nn import functional as F

from dualmcmc.metrics.inception import FeatureExtractor, PooledConvReLU, from_tensors, layer_names, resize_as_tensorflow
from tests.networks import Tiny, random_layers


def random_images(n, size=8, channels=3):
    return torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8)


@pytest.mark.parametrize("size", [8, 32, 299, 400])
def test_resize_is_that_of_tensorflow_1(size):
    x = torch.rand(1, 2, size, size, dtype=torch.float64)
    resized = resize_as_tensorflow(x, 299)
    scale = size / 299
    for i, j in [(0, 0), (1, 2), (150, 37), (298, 298), (297, 5), (12, 298)]:
        y, x0 = i * scale, j * scale
        top, left = int(y), int(x0)
        bottom, right = min(top + 1, size - 1), min(left + 1, size - 1)
        dy, dx = y - top, x0 - left
        above = x[0, :, top, left] * (1 - dx) + x[0, :, top, right] * dx
        below = x[0, :, bottom, left] * (1 - dx) + x[0, :, bottom, right] * dx
        assert torch.allclose(resized[0, :, i, j], above * (1 - dy) + below * dy, rtol=1e-12)
    if size == 299:
        assert torch.equal(resized, x)


class Spy(torch.nn.Module):
    """Records its inputs and the tf32 flags."""

    def __init__(self):
        super().__init__()
        self.inputs, self.tf32 = [], []

    def forward(self, x):
        self.inputs.append(x)
        self.tf32.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return x.flatten(1)[:, :2]


def test_network_input():
    spy = Spy()
    features = FeatureExtractor(spy, 2, "cpu", standard=False, checksum="")
    features(torch.tensor([0, 128, 255], dtype=torch.uint8).reshape(3, 1, 1, 1).expand(3, 1, 8, 8))  # greyscale
    (x,) = spy.inputs
    assert x.shape == (3, 3, 299, 299)
    assert x.dtype == torch.float32
    for image, value in zip(x, (-1, 0, 127 / 128), strict=True):
        assert torch.allclose(image, torch.tensor(value, dtype=torch.float32), atol=1e-6)
    with pytest.raises(TypeError, match="uint8"):
        features(torch.rand(1, 3, 8, 8))


def test_full_precision_while_features_are_computed():
    spy, before = Spy(), torch.backends.cudnn.allow_tf32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        FeatureExtractor(spy, 2, "cpu", standard=False, checksum="")(random_images(1))
    assert spy.tf32 == [(False, False)]
    assert spy.inputs[0].dtype == torch.float32
    assert torch.backends.cudnn.allow_tf32 == before


def test_features_do_not_depend_on_batch():
    features, images = FeatureExtractor(Tiny(), 48, "cpu", standard=False, checksum=""), random_images(40)
    assert torch.equal(features(images), torch.cat([features(part) for part in images.split(17)]))  # it splits at 32


@pytest.fixture(scope="module")
def layers():
    return random_layers()


@pytest.fixture(scope="module")
def net(layers):
    names = [f"{i}.{part}" for i in range(94) for part in ("weight", "beta", "mean", "var")]
    return from_tensors(dict(zip(names, (tensor for layer in layers for tensor in layer), strict=True)))


def test_batchnorm_is_folded_into_convolutions(net, layers):
    for conv, (weight, beta, mean, variance) in zip(net.convolutions(), layers, strict=True):
        x = torch.randn(1, weight.shape[1], 9, 9)
        pooled = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) if isinstance(conv, PooledConvReLU) else x
        convolved = F.conv2d(pooled, weight, None, conv.stride, conv.padding)
        expected = F.relu(F.batch_norm(convolved, mean, variance, None, beta, eps=0.001))
        assert torch.allclose(conv(x), expected, atol=1e-4)


def test_architecture_is_the_published_one(net):
    """Against the features of the published TorchScript module, its weights replaced by the same random ones."""
    x = torch.sin((torch.arange(3 * 299 * 299).reshape(1, 3, 299, 299) % 255).float() * 0.37)
    features = net(x)[0]
    expected = [1.1274, 0.0, 0.0, 0.1504, 0.9638, 0.4194, 0.3184, 0.8103, 2.8507]
    assert features[[0, 319, 320, 700, 1088, 1500, 1855, 1856, 2047]].tolist() == pytest.approx(expected, abs=2e-3)
    assert float(features.mean()) == pytest.approx(1.82113, abs=1e-3)
    assert float(features.std()) == pytest.approx(2.42967, abs=1e-3)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
@pytest.mark.parametrize(("precision", "error"), [("float32", 1e-5), ("tf32", 2e-3), ("float16", 2e-3)])
def test_precisions(layers, device, precision, error):
    names = [f"{i}.{part}" for i in range(94) for part in ("weight", "beta", "mean", "var")]
    tensors = dict(zip(names, (tensor for layer in layers for tensor in layer), strict=True))
    images = random_images(2, 32)
    exact = from_tensors(tensors)((resize_as_tensorflow(images.float(), 299) - 128) / 128)
    ours = FeatureExtractor(from_tensors(tensors), 2048, device, False, "", precision)(images).cpu()
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() < error * exact.norm()
    if precision == "float16":
        assert not torch.allclose(ours, exact, rtol=1e-5)


def test_layer_names_are_those_of_torchvision():
    names = list(layer_names())
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
