import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from dualmcmc.metrics.pixels import mse, psnr, ssim


@pytest.mark.parametrize(
    "shape", [(4, 3, 32, 32), (3, 1, 28, 28), (2, 3, 64, 64), (5, 1, 8, 8), (2, 3, 10, 10), (2, 1, 11, 11)]
)
def test_against_scikit_image(shape):
    x = torch.rand(shape) * 2 - 1
    y = (x + 0.4 * torch.randn(shape)).clamp(-1, 1)
    window = {"gaussian_weights": True, "sigma": 1.5} if shape[2] >= 11 else {"win_size": 7}
    for a, b, psnr_db, similarity in zip(x, y, psnr(x, y), ssim(x, y), strict=True):
        a, b = ((image.double().numpy() + 1) / 2 for image in (a, b))
        assert float(psnr_db) == pytest.approx(peak_signal_noise_ratio(a, b, data_range=1), rel=1e-9)
        expected = structural_similarity(a, b, channel_axis=0, data_range=1, use_sample_covariance=False, **window)
        assert float(similarity) == pytest.approx(expected, abs=1e-9)


def test_equal_images():
    x = torch.rand(2, 3, 16, 16) * 2 - 1
    assert mse(x, x).tolist() == [0, 0]
    assert ssim(x, x).tolist() == pytest.approx([1, 1])
    assert psnr(x, x).isinf().all()


def test_range_is_minus_one_to_one():
    black, white = -torch.ones(1, 1, 16, 16), torch.ones(1, 1, 16, 16)
    assert mse(black, white).item() == 4
    assert psnr(black, white).item() == pytest.approx(0)
    assert psnr(3 * black, 2 * white).item() == pytest.approx(0)  # clamped
