from dataclasses import replace

import pytest
import torch

import dualmcmc
from dualmcmc import published
from dualmcmc.config import Data
from dualmcmc.engine import checkpoint
from dualmcmc.errors import UserError
from dualmcmc.tasks.export import TYPES, export
from tests.conftest import assert_refused


@pytest.fixture
def weights(monkeypatch, tmp_path, finished_run):
    """Published weights of the test's own, called `tiny`; the current folder is empty."""
    file = tmp_path / "shelf" / "tiny.safetensors"
    file.parent.mkdir()
    export(dualmcmc.load(finished_run, device="cpu"), file)
    monkeypatch.setattr(published, "shelves", lambda: [tmp_path / "no such shelf", file.parent])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return file


@pytest.mark.parametrize("dtype", TYPES)
def test_an_exported_run_is_the_run_up_to_rounding(finished_run, tmp_path, dtype):
    run = dualmcmc.load(finished_run, device="cpu")
    numbers = export(run, tmp_path / "w.safetensors", dtype)
    again = dualmcmc.load(tmp_path / "w.safetensors", device="cpu")
    assert again.images == run.images
    assert all(p.dtype == torch.float32 for p in again.trio.parameters())
    precision = torch.finfo(TYPES[dtype]).eps / 2
    for name, value in run.trio.state_dict().items():
        rounded = again.trio.state_dict()[name]
        assert torch.allclose(rounded, value, rtol=precision, atol=1e-7), name
        assert torch.equal(rounded, value) == (dtype == "float32" or value.ndim < 2 or not value.any()), name
    assert (numbers["relative_change"] == 0) == (dtype == "float32")
    assert numbers["relative_change"] < precision
    stored, _ = checkpoint.load(tmp_path / "w.safetensors")
    assert {value.dtype for value in stored.values() if value.ndim > 1} == {TYPES[dtype]}


def test_it_does_not_say_where_the_images_lay(finished_run, tmp_path):
    run = dualmcmc.load(finished_run, device="cpu")
    mine = Data(**{**vars(run.config.data), "source": "folder", "path": "/home/me/secret", "test_path": "/home/me/test",
                   "holdout": 0.0})  # fmt: skip
    run.config = replace(run.config, data=mine)
    export(run, tmp_path / "w.safetensors")
    assert b"/home/me" not in (tmp_path / "w.safetensors").read_bytes()
    assert dualmcmc.load(tmp_path / "w.safetensors", device="cpu").sample(2).shape == (2, 1, 8, 8)


def test_numbers_that_do_not_fit_are_refused(finished_run, tmp_path):
    run = dualmcmc.load(finished_run, device="cpu")
    run.trio.generator.layers[-1].weight.data[0, 0, 0, 0] = 1e5
    with pytest.raises(UserError, match=r"generator.* has numbers that float16 cannot hold"):
        export(run, tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())
    export(run, tmp_path / "w.safetensors", "bfloat16")


def test_weights_by_their_name(weights):
    by_name, by_file = dualmcmc.load("tiny", device="cpu"), dualmcmc.load(weights, device="cpu")
    assert by_name.file == weights
    assert torch.equal(by_name.sample(3), by_file.sample(3))
    with pytest.raises(UserError, match="run 'tinny' does not exist, and the weights that come along are: tiny"):
        dualmcmc.load("tinny")
    with pytest.raises(UserError, match="averaged weights only"):
        dualmcmc.load("tiny", ema=False)


def test_what_a_user_has_comes_first(weights, run_folder, tmp_path):
    run_folder.rename(tmp_path / "here" / "tiny")
    assert str(dualmcmc.load("tiny", device="cpu").file) == "tiny/snapshot.safetensors"


def test_the_commands_leave_their_results_in_a_folder_of_its_own(call, weights, tmp_path):
    assert call("sample", "tiny", "-n", 4, "--device", "cpu").code == 0
    home = tmp_path / "here" / "published" / "tiny"
    assert (home / "sample.png").exists()
    assert len(list((home / "results").glob("sample-*.json"))) == 1
    assert [path.name for path in weights.parent.iterdir()] == ["tiny.safetensors"]
    assert call("sample", "tiny", "-n", 4, "--device", "cpu").code == 0  # that folder is not taken for a run


def test_the_command(call, finished_run, tmp_path):
    target = tmp_path / "w.safetensors"
    done = call("export", finished_run, "--out", target, "--dtype", "bfloat16")
    assert done.code == 0
    assert f"{target}, 0.0 MB, bfloat16" in done.out
    before = target.read_bytes()
    assert_refused(call("export", finished_run, "--out", target), "exists already")
    assert target.read_bytes() == before
    assert_refused(call("export", finished_run, "--out", tmp_path / "w.pt"), "must end in .safetensors")
    other = tmp_path / "v.safetensors"
    assert_refused(
        call("export", finished_run, "--out", other, "--dtype", "int8"), "none of float16, bfloat16, float32"
    )
    assert_refused(call("export", tmp_path / "none", "--out", other), "does not exist")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    assert call("export", finished_run, "--out", other, "--json").json["dtype"] == "float16"
