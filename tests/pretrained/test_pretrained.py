import hashlib
import os

import pytest
import torch

import dualmcmc
from dualmcmc import pretrained
from dualmcmc.pretrained import Pretrained
from dualmcmc.utils.errors import Damaged, UserError
from tests.conftest import assert_refused
from tests.data.server import Server

PATH = "user/tiny/resolve/v1/model.safetensors"


@pytest.fixture
def weights(monkeypatch, tmp_path, finished_run):
    """Pretrained weights called `tiny` in a checkout; the working directory is empty."""
    file = tmp_path / "checkout" / "weights" / "tiny.safetensors"
    file.parent.mkdir(parents=True)
    (tmp_path / "checkout" / "pyproject.toml").touch()
    dualmcmc.load(finished_run, device="cpu").export(file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(pretrained, "CHECKOUT", tmp_path / "checkout")
    monkeypatch.setitem(pretrained.PRETRAINED, "tiny", Pretrained("user/tiny", sha256, file.stat().st_size))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return file


@pytest.fixture
def content(weights, monkeypatch):
    """The content of the weights; the package runs outside its checkout."""
    monkeypatch.setattr(pretrained, "CHECKOUT", weights.parent)
    return weights.read_bytes()


@pytest.fixture
def server(content, monkeypatch):
    """A file server in place of the Hub, with the weights."""
    server = Server()
    server.files[PATH] = content
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


def test_load_by_name(weights):
    by_name, by_file = dualmcmc.load("tiny", device="cpu"), dualmcmc.load(weights, device="cpu")
    assert by_name.file == weights
    assert by_name.source == str(weights)
    assert torch.equal(by_name.sample(3), by_file.sample(3))
    with pytest.raises(UserError, match=r"run 'tinny' does not exist\. Pretrained weights: .*tiny"):
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


def test_other_weights_in_the_checkout_are_refused(weights, finished_run):
    weights.unlink()
    dualmcmc.load(finished_run, device="cpu").export(weights, "float32")
    with pytest.raises(Damaged, match="is not the published file"):
        dualmcmc.load("tiny", device="cpu")


def test_fetched_once(server, cache):
    run = dualmcmc.load("tiny", device="cpu")
    assert run.file == cache / "pretrained" / "tiny.safetensors"
    assert server.requests == [(PATH, None)]
    server.errors = [404]
    assert torch.equal(dualmcmc.load("tiny", device="cpu").sample(2), run.sample(2))
    assert len(server.requests) == 1


def test_cached_file_needs_no_network(content, cache):
    (cache / "pretrained").mkdir()
    (cache / "pretrained" / "tiny.safetensors").write_bytes(content)
    assert dualmcmc.load("tiny", device="cpu").images


def test_damaged_file_in_the_cache_is_fetched_again(server, cache, content, capsys):
    file = cache / "pretrained" / "tiny.safetensors"
    file.parent.mkdir()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert dualmcmc.load("tiny", device="cpu").file == file
    assert file.read_bytes() == content
    assert "is damaged: fetching it again" in capsys.readouterr().err


def test_interrupted_download_continues(server, cache, content, monkeypatch):
    monkeypatch.setattr("dualmcmc.data.download.time.sleep", lambda seconds: None)
    server.break_after = 5000
    assert dualmcmc.load("tiny", device="cpu").images
    assert [wanted for _, wanted in server.requests] == [None, "bytes=5000-"]
    assert (cache / "pretrained" / "tiny.safetensors").read_bytes() == content


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is not the published one"),
        (lambda data: data + b"more", "instead of"),
    ],
)
def test_wrong_download_is_removed(call, server, cache, content, change, words):
    server.files[PATH] = change(content)
    assert_refused(call("sample", "tiny", "--device", "cpu"), "cannot fetch tiny", words)
    assert [path.name for path in (cache / "pretrained").iterdir() if path.suffix != ".lock"] == []


def test_unreachable(call, server, cache, monkeypatch):
    file = cache / "pretrained" / "tiny.safetensors"
    place = f"save {server.url}{PATH} as '{file}'"
    server.errors = [404]
    assert_refused(call("sample", "tiny"), "cannot fetch tiny", "returned 404", place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_refused(call("sample", "tiny"), "cannot fetch tiny (HF_HUB_OFFLINE is set)", place)
    assert len(server.requests) == 1
    monkeypatch.delenv("HF_HUB_OFFLINE")
    server.close()
    assert_refused(call("sample", "tiny"), "cannot fetch tiny", "Connection refused", place)
    assert not file.exists()
    assert not os.path.exists("pretrained")


def test_fetch_command(call, server, cache, content):
    answer = call("data", "fetch", "tiny", "--json")
    assert answer.json["file"] == str(cache / "pretrained" / "tiny.safetensors")
    assert answer.json["sha256"] == hashlib.sha256(content).hexdigest()
    assert_refused(call("data", "fetch", "tiny", "--source", "npm"), "available from official")


def test_listed_presets(call):
    presets = call("presets", "--json").json
    assert [name for name, facts in presets.items() if facts["pretrained"]] == ["cifar10-simple"]
