import copy

import pytest
import torch
from torch import nn

from dualmcmc import Trio, UserError
from dualmcmc.nets import build
from dualmcmc.nets.custom import as_trio, check_networks, describe_classes, has_gains
from tests.conftest import tiny
from tests.custom import LATENT_DIM, PlaneInference, image_networks, plane_networks, points


class Fixed(nn.Module):
    """Returns `output`, whatever the input."""

    def __init__(self, output):
        super().__init__()
        self.weight, self.output = nn.Parameter(torch.zeros(1)), output

    def forward(self, x):
        if isinstance(self.output, Exception):
            raise self.output
        return self.output


def test_as_trio():
    networks = plane_networks()
    assert as_trio(networks) is networks
    parts = list(networks.children())
    assert list(as_trio(parts).children()) == parts
    for wrong in (parts[:2], [*parts[:2], torch.sin], parts[0], 7):
        with pytest.raises(UserError, match="three torch modules"):
            as_trio(wrong)


def test_classes_are_named():
    assert describe_classes(plane_networks()).endswith("inference: tests.custom.PlaneInference")


def test_gains():
    assert not has_gains(plane_networks())
    assert has_gains(build(tiny("nets.energy_slope=1")))
    assert not has_gains(build(tiny("nets.energy_slope=null")))


def test_check_changes_nothing():
    networks = image_networks().train()
    before, x = copy.deepcopy(networks.state_dict()), torch.randn(2, 1, 8, 8)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    check_networks(networks, x, 4)  # dropout draws random numbers
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, before[name]) for name, value in networks.state_dict().items())
    assert all(parameter.requires_grad for parameter in networks.parameters())
    assert all(module.training for module in networks.modules())


@pytest.mark.parametrize(
    ("name", "network", "message"),
    [
        (
            "energy",
            Fixed(torch.zeros(2, 3)),
            "energy returned (2, 3) for inputs of shape (2, 2): expected (2,)",
        ),
        ("energy", Fixed(torch.zeros(())), "returned () for inputs"),
        ("energy", Fixed(None), "returned NoneType"),
        ("energy", Fixed(ValueError("no\nluck")), "failed on inputs of shape (2, 2): ValueError: no."),
        ("generator", Fixed(torch.zeros(2, 5)), "networks.generator returned (2, 5) for inputs of shape (2, 3)"),
        ("inference", Fixed(torch.zeros(2, 3)), "expected a mean and a log-variance, (2, 3) each"),
        ("inference", Fixed((torch.zeros(2, 3), torch.zeros(2, 4))), "returned 2 values ((2, 3), (2, 4))"),
        ("generator", nn.Identity(), "returned (2, 3) for inputs of shape (2, 3): expected (2, 2)"),
    ],
)
def test_wrong_networks(name, network, message):
    parts = dict(plane_networks().named_children()) | {name: network}
    with pytest.raises(UserError) as refused:
        check_networks(Trio(**parts), points(2), LATENT_DIM)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nothing_to_train():
    parts = dict(plane_networks().named_children())
    parts["energy"].requires_grad_(False)
    with pytest.raises(UserError, match=r"networks\.energy has no parameters to train"):
        check_networks(Trio(**parts), points(2), LATENT_DIM)


def test_state_that_is_not_a_tensor():
    class WithExtraState(PlaneInference):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    parts = dict(plane_networks().named_children()) | {"inference": WithExtraState()}
    with pytest.raises(UserError, match="is not a tensor"):
        check_networks(Trio(**parts), points(2), LATENT_DIM)
