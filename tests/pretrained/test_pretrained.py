import pytest
import torch

import dualmcmc
from dualmcmc import pretrained
from dualmcmc.utils.errors import UserError


@pytest.fixture
def weights(monkeypatch, tmp_path, finished_run):
    """Pretrained weights called `tiny`; the working directory is empty."""
    file = tmp_path / "weights" / "tiny.safetensors"
    file.parent.mkdir()
    dualmcmc.load(finished_run, device="cpu").export(file)
    monkeypatch.setattr(pretrained, "weight_folders", lambda: [tmp_path / "absent", file.parent])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return file


def test_load_by_name(weights):
    by_name, by_file = dualmcmc.load("tiny", device="cpu"), dualmcmc.load(weights, device="cpu")
    assert by_name.file == weights
    assert torch.equal(by_name.sample(3), by_file.sample(3))
    with pytest.raises(UserError, match=r"run 'tinny' does not exist\. Pretrained weights: tiny"):
        dualmcmc.load("tinny")
    with pytest.raises(UserError, match="averaged weights only"):
        dualmcmc.load("tiny", ema=False)


def test_users_folder_takes_precedence(weights, run_folder, tmp_path):
    run_folder.rename(tmp_path / "here" / "tiny")
    assert str(dualmcmc.load("tiny", device="cpu").file) == "tiny/snapshot.safetensors"


def test_commands_write_to_a_separate_folder(call, weights, tmp_path):
    assert call("sample", "tiny", "-n", 4, "--device", "cpu").code == 0
    folder = tmp_path / "here" / "pretrained" / "tiny"
    assert (folder / "sample.png").exists()
    assert len(list((folder / "results").glob("sample-*.json"))) == 1
    assert [path.name for path in weights.parent.iterdir()] == ["tiny.safetensors"]
    assert call("sample", "tiny", "-n", 4, "--device", "cpu").code == 0  # that folder is not mistaken for a run
