import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from dualmcmc import Trio, UserError, load_config
from dualmcmc.nets import build
from dualmcmc.nets.custom import as_trio, check_networks, describe_classes, has_gains, require_trainable
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


class Changed(nn.Module):
    """A parameter, and any function of the input."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x):
        return self.function(self.weight * x if self.function is not in_place else x)


def in_place(x):
    with torch.no_grad():
        x.mul_(2)
    return x[:, [0, 0, 0]], x[:, [0, 0, 0]]


def nan(layer):
    nn.init.constant_(layer.weight, float("nan"))
    return layer


VECTORS = load_config("vectors")


def test_networks_that_the_method_does_not_train():
    energy, generator, inference = plane_networks().children()
    config = replace(VECTORS, method="vae")
    trio = as_trio(Trio(generator=generator, inference=inference), config)
    assert [name for name, _ in trio.named_children()] == ["generator", "inference"]
    assert list(as_trio((None, generator, inference), config).children()) == [generator, inference]
    with pytest.raises(UserError, match=r"does not train networks\.energy: pass None"):
        as_trio((energy, generator, inference), config)
    with pytest.raises(UserError, match=r"method=vae trains networks\.inference, which is None"):
        as_trio(Trio(generator=generator), config)
    check_networks(trio, torch.randn(3, 2), LATENT_DIM)
    assert not has_gains(trio)


def test_as_trio():
    networks = plane_networks()
    assert as_trio(networks, VECTORS) is networks
    parts = list(networks.children())
    assert list(as_trio(parts, VECTORS).children()) == parts
    for wrong in (parts[:2], [*parts[:2], torch.sin], parts[0], 7, lambda: parts[:2]):
        with pytest.raises(UserError, match="three torch modules"):
            as_trio(wrong, VECTORS)
    with pytest.raises(UserError, match="TorchScript"):
        as_trio([torch.jit.script(parts[0]), *parts[1:]], VECTORS)


def test_functions_are_seeded():
    before = torch.get_rng_state()
    first, same, other = (as_trio(plane_networks, replace(VECTORS, seed=seed)).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, same[name]) for name, value in first.items())
    assert not torch.equal(first["energy.0.weight"], other["energy.0.weight"])


def test_subclass_with_another_part():
    class Four(Trio):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.extra = nn.Linear(1, 1)

    parts = list(plane_networks().children())
    assert list(as_trio(Four(*parts), VECTORS).children()) == parts


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
        ("generator", nn.Linear(3, 3), "returned (2, 3) for inputs of shape (2, 3): expected (2, 2)"),
        ("generator", nn.Identity(), "networks.generator has no parameters to train"),
        ("generator", Changed(lambda x: x[:, :2].double()), "returned float64 for float32"),
        ("generator", Changed(lambda x: x[:, :2] / 0), "values that are not finite"),
        ("generator", Changed(lambda x: x[:, :2].detach()), "g(z) does not depend on z"),
        ("energy", Changed(lambda x: x.detach().sum(1)), "E does not depend on x"),
        ("energy", Changed(lambda x: torch.sqrt(x.sum(1) * 0)), "gradient with respect to its input that is not fin"),
        ("inference", Changed(in_place), "changes its input in place"),
        ("energy", nn.Linear(2, 1).double(), "parameters that are not float32"),
        ("energy", nn.Linear(2, 1, device="meta"), "parameters without values"),
        ("energy", nan(nn.Linear(2, 1)), "weights that are not finite"),
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
    check_networks(Trio(**parts), points(2), LATENT_DIM)  # as those of a trained run may be
    with pytest.raises(UserError, match=r"networks\.energy has no parameters to train: all are frozen"):
        require_trainable(Trio(**parts))


def test_shared_parameters():
    parts = dict(image_networks().named_children())
    parts["inference"].encoder = parts["energy"].first
    with pytest.raises(UserError, match=r"networks\.energy and networks\.inference share parameters"):
        check_networks(Trio(**parts), torch.randn(2, 1, 8, 8), 4)


def test_state_that_is_not_a_tensor():
    class WithExtraState(PlaneInference):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    parts = dict(plane_networks().named_children()) | {"inference": WithExtraState()}
    with pytest.raises(UserError, match="is not a tensor"):
        check_networks(Trio(**parts), points(2), LATENT_DIM)
