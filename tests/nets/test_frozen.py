import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from dualmcmc.nets.frozen import eval_mode, frozen


def make_net():
    return nn.Sequential(spectral_norm(nn.Conv2d(1, 4, 3, padding=1)), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1)).train()


def test_state_is_unchanged_inside_and_restored_after():
    net, x = make_net(), torch.randn(5, 1, 6, 6)
    net[2].bias.requires_grad_(False)  # must stay so
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with frozen(net):
        for _ in range(3):
            net(x.requires_grad_()).sum().backward()
    after = net.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert [p.requires_grad for p in net.parameters()] == [True, True, True, True, True, False]
    net(x.detach())
    assert not torch.equal(before["1.running_mean"], net.state_dict()["1.running_mean"])
    assert not torch.equal(before["0.parametrizations.weight.0._u"], net.state_dict()["0.parametrizations.weight.0._u"])


def test_spectral_norm_is_computed_once():
    net = make_net()
    parametrization, calls = net[0].parametrizations.weight[0], 0
    original = parametrization.forward

    def counted(weight):
        nonlocal calls
        calls += 1
        return original(weight)

    parametrization.forward = counted
    with frozen(net):
        for _ in range(5):
            net(torch.randn(2, 1, 6, 6))
    assert calls == 1


def test_restored_after_an_error():
    net = make_net()
    with pytest.raises(ZeroDivisionError), frozen(net):
        raise ZeroDivisionError
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert net[1].track_running_stats


def test_plain_function():
    with frozen(abs) as net:
        assert net is abs


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_eval_mode(statistics):
    net, x = make_net(), 5 + torch.randn(5, 1, 6, 6)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad(), eval_mode(net, statistics):
        single, in_batch = net(x[:1]), net(x)[:1]
    assert torch.allclose(single, in_batch) == (statistics == "running")
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())
    assert net[1].track_running_stats
