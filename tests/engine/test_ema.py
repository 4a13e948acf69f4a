import pytest
import torch

from dualmcmc.config import Ema
from dualmcmc.engine.ema import MovingAverage
from dualmcmc.nets import build
from tests.conftest import tiny


def update(ema: MovingAverage, images: int, batch: int) -> None:
    ema.set_share(images, batch)
    ema.fold_in()


def test_an_old_weight_counts_half_after_the_half_life():
    trio = build(tiny())
    ema = MovingAverage(trio, Ema(half_life=80, rampup=1))
    old = [p.clone() for p in trio.generator.parameters()]
    with torch.no_grad():
        for parameter in trio.generator.parameters():
            parameter.add_(1)
    for images in range(8, 81, 8):
        update(ema, images, 8)
    for before, average in zip(old, ema.nets["generator"].parameters(), strict=True):
        assert torch.allclose(average, before + 0.5, atol=1e-5)


def test_the_batch_does_not_matter():
    trio = build(tiny())
    averages = []
    for batch in (5, 20):
        ema = MovingAverage(trio, Ema(half_life=100, rampup=1))
        live = trio.generator.layers[0].weight
        saved = live.detach().clone()
        with torch.no_grad():
            live.add_(1)
            for images in range(batch, 201, batch):
                update(ema, images, batch)
        averages.append(ema.nets["generator"].layers[0].weight.clone())
        live.data.copy_(saved)
    assert torch.allclose(*averages, atol=1e-5)


def test_ramp_up_forgets_the_first_weights():
    trio = build(tiny())
    ema = MovingAverage(trio, Ema(half_life=10**9, rampup=0.05))
    with torch.no_grad():
        trio.generator.layers[0].weight.add_(1)
    for images in range(10, 2001, 10):
        update(ema, images, 10)
    assert torch.allclose(ema.nets["generator"].layers[0].weight, trio.generator.layers[0].weight, atol=1e-4)


@pytest.mark.parametrize(
    ("cfg", "names"),
    [(Ema(), {"generator"}), (Ema(energy=True), {"generator", "energy"}), (Ema(half_life=0), set())],
)
def test_what_is_averaged_is_what_samples(cfg, names):
    trio = build(tiny())
    ema = MovingAverage(trio, cfg)
    assert set(ema.nets) == names
    sampling = ema.sampling_trio()
    for name, net in sampling.named_children():
        assert (net is not trio.get_submodule(name)) == (name in names)


def test_buffers_follow():
    trio = build(tiny("nets.kind=resnet"))
    ema = MovingAverage(trio, Ema())
    trio.train().generator(torch.randn(8, 4))
    update(ema, 16, 16)
    assert torch.equal(ema.nets["generator"].norm.running_mean, trio.generator.norm.running_mean)
