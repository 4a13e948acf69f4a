import numpy as np
import torch
from PIL import Image

from dualmcmc import rng
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.preview import write_preview
from dualmcmc.engine.state import TrainState
from dualmcmc.pictures import grid, to_uint8
from tests.conftest import tiny


def test_the_picture_shows_the_averaged_generator_and_changes_nothing(tmp_path):
    config = tiny("nets.kind=resnet")
    state = TrainState(config, torch.device("cpu"))
    with torch.no_grad():
        for parameter in state.trio.generator.parameters():
            parameter.add_(0.1)  # the live generator is elsewhere by now
    folder = RunFolder(tmp_path)
    folder.samples.mkdir()
    before = {name: value.clone() for name, value in state.trio.state_dict().items()}
    stream = state.rng.get_state()
    first = write_preview(state, folder)
    assert torch.equal(first, write_preview(state, folder))  # the same latents each time
    assert torch.equal(state.rng.get_state(), stream)
    assert all(torch.equal(before[name], value) for name, value in state.trio.state_dict().items())
    assert state.trio.training
    source = rng.generator(rng.derive(config.seed, rng.Stream.PREVIEW))
    z = torch.randn(64, 4, generator=source)
    with torch.no_grad():
        expected = grid(to_uint8(state.ema.nets["generator"](z)), 8)
        live = grid(to_uint8(state.trio.eval().generator(z)), 8)
    assert torch.equal(first[:, :, : expected.shape[2]], expected)
    assert not torch.equal(first[:, :, : expected.shape[2]], live)
    stored = np.asarray(Image.open(folder.samples / "000000000000.png"))
    assert np.array_equal(stored, first[0].numpy())
