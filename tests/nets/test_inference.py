import pytest
import torch

from dualmcmc.nets import Gaussian


def test_gaussian():
    q = Gaussian(torch.randn(4, 3), torch.randn(4, 3))
    z = torch.randn(4, 3)
    reference = torch.distributions.Normal(q.mean, (0.5 * q.log_var).exp()).log_prob(z).sum(1)
    constant = 1.5 * torch.log(torch.tensor(2 * torch.pi))
    assert torch.allclose(q.nll(z) + constant, -reference, atol=1e-5)
    wide = Gaussian(torch.full((100_000, 1), 2.0), torch.full((100_000, 1), 1.0))
    draws = wide.sample(torch.Generator().manual_seed(0))
    assert draws.mean().item() == pytest.approx(2, abs=0.03)
    assert draws.var().item() == pytest.approx(2.71828, rel=0.03)
