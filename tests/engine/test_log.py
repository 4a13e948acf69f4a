import errno
import json

import numpy as np
import pytest
import torch
from PIL import Image

from dualmcmc import rng
from dualmcmc.engine.log import NullLog, RunLog, read_log, write_preview
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.state import TrainState
from dualmcmc.utils.errors import CannotWrite
from dualmcmc.utils.images import grid, to_uint8
from tests.conftest import tiny


def images_of(folder):
    return [entry["images"] for entry in read_log(folder.log)]


def test_lines_after_the_resumed_state_are_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    log = RunLog(folder, 0)
    log.event("start", 0, device="cpu")
    for images in (10, 20, 30):
        log.stats({"images": images, "loss": float("nan") if images == 30 else 1.0})
    log.close()
    with open(folder.log, "a") as file:
        file.write('{"kind": "tra')
    assert images_of(folder) == [0, 10, 20, 30]
    assert read_log(folder.log)[-1]["loss"] == "nan"
    log = RunLog(folder, 20)
    log.stats({"images": 25, "loss": 1.0})
    assert images_of(folder) == [0, 10, 20, 25]
    log.rewind(10)
    log.event("rollback", 10)
    log.close()
    assert images_of(folder) == [0, 10, 10]


def test_malformed_lines_are_skipped(tmp_path):
    lines = ['{"images": 1}', '{"images": null}', '{"images": "x"}', "[" * 100_000, "7", "{", '{"images": 2}']
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    assert [entry["images"] for entry in read_log(tmp_path / "log.jsonl")] == [1, 2]
    assert read_log(tmp_path / "absent.jsonl") == []


def test_names_of_earlier_versions(tmp_path):
    old = [
        {"kind": "train", "images": 1, "x_moved": 0.1, "z_moved": 0.2},
        {"kind": "rollback", "images": 1, "lowered": {}, "why": "too large"},
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, old)))
    assert read_log(tmp_path / "log.jsonl") == [
        {"kind": "train", "images": 1, "x_displacement_rms": 0.1, "z_displacement_rms": 0.2},
        {"kind": "rollback", "images": 1, "reduced": {}, "reason": "too large"},
    ]


def test_write_errors_are_one_line(tmp_path, monkeypatch):
    log = RunLog(RunFolder(tmp_path), 0)

    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    log._file.close()
    monkeypatch.setattr(log, "_file", Full())
    with pytest.raises(CannotWrite, match=r"cannot write '.*log\.jsonl': No space left on device\."):
        log.event("start", 0)
    log.close()


def test_null_log_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = NullLog()
    log.event("start", 0)
    log.stats({"images": 1})
    log.image("samples", None, 1)
    log.close()
    assert not list(tmp_path.iterdir())


def test_preview_shows_the_averaged_generator_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("dualmcmc.engine.log.PREVIEW_COUNT", 64)
    config = tiny("nets.kind=resnet")
    state = TrainState(config, torch.device("cpu"))
    with torch.no_grad():
        for parameter in state.trio.generator.parameters():
            parameter.add_(0.1)  # now the average differs
    folder = RunFolder(tmp_path)
    folder.samples.mkdir()
    before = {name: value.clone() for name, value in state.trio.state_dict().items()}
    noise = state.rng.get_state()
    preview = write_preview(state, folder)
    assert torch.equal(preview, write_preview(state, folder))  # the same latents every time
    assert torch.equal(state.rng.get_state(), noise)
    assert all(torch.equal(before[name], value) for name, value in state.trio.state_dict().items())
    assert state.trio.training
    z = torch.randn(64, 4, generator=rng.make_generator(rng.derive_seed(config.seed, rng.Stream.PREVIEW)))
    with torch.no_grad():
        averaged = grid(to_uint8(state.ema.nets["generator"](z)), 8)
        current = grid(to_uint8(state.trio.eval().generator(z)), 8)
    below_caption = preview[:, -averaged.shape[1] :, : averaged.shape[2]]
    assert preview.shape[1] > averaged.shape[1]
    assert torch.equal(below_caption, averaged)
    assert not torch.equal(below_caption, current)
    stored = np.asarray(Image.open(folder.samples / "000000000000.png"))
    assert np.array_equal(stored, preview[0].numpy())
