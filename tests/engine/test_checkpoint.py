import pickle

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dualmcmc.engine import checkpoint
from dualmcmc.errors import Damaged, UserError


def test_round_trip(tmp_path):
    path = tmp_path / "file.safetensors"
    tensors = {"a": torch.randn(3, 2).T, "b": torch.tensor(4, dtype=torch.int64)}  # a is not contiguous
    checkpoint.save(path, tensors, {"images": 7, "words": ["x"]})
    loaded, info = checkpoint.load(path)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert info == {"images": 7, "words": ["x"]}
    assert [item.name for item in tmp_path.iterdir()] == ["file.safetensors"]


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("code from a file was run",))


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 7, b"\xff" * 400, b"not a checkpoint at all" * 40, pickle.dumps(Evil())]
)
def test_anything_else_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        checkpoint.load(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "file.safetensors"
    checkpoint.save(path, {"a": torch.randn(100)}, {})
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(UserError, match="broken"):
        checkpoint.load(path)


def test_no_bit_can_change_unseen(tmp_path):
    """Every bit of a small file, header and tensors: `load` refuses, `verify` says damaged."""
    path = tmp_path / "file.safetensors"
    checkpoint.save(path, {"a": torch.randn(3)}, {"images": 7})
    sound = path.read_bytes()
    for place in range(len(sound)):
        for bit in range(8):
            content = bytearray(sound)
            content[place] ^= 1 << bit
            path.write_bytes(content)
            with pytest.raises(Damaged):  # and nothing else: a run then goes on from the state before it
                checkpoint.verify(path)
            with pytest.raises(Damaged):
                checkpoint.load(path)
    path.write_bytes(sound)
    checkpoint.verify(path)
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(Damaged, match="checksum"):
        checkpoint.verify(path)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*given):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UserError, match=r"^cannot write '.*file.safetensors': No space left on device"):
        checkpoint.save(tmp_path / "file.safetensors", {"a": torch.ones(1)}, {"images": 0})
    assert list(tmp_path.iterdir()) == []


def test_other_files_and_other_versions(tmp_path):
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(UserError, match="not written by dualmcmc"):
        checkpoint.load(path)
    save_file({"a": torch.ones(1)}, path, {"format": "dualmcmc", "version": "99", "info": "{}"})
    with pytest.raises(UserError, match="format 99"):
        checkpoint.load(path)
    save_file({"a": torch.ones(1)}, path, {"format": "dualmcmc", "version": "2", "info": "[["})
    with pytest.raises(UserError, match="header"):
        checkpoint.load(path)
    with pytest.raises(UserError, match="no file"):
        checkpoint.load(tmp_path / "absent.safetensors")


def test_weights_of_another_network_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not fit these networks"):
        checkpoint.fill(torch.nn.Linear(2, 2), torch.nn.Linear(3, 2).state_dict(), tmp_path)


def test_optimizer_round_trip():
    def make():
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        return net, torch.optim.Adam(net.parameters(), lr=0.1)

    def advance(net, optimizer):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    net, optimizer = make()
    advance(net, optimizer)
    other, restored = make()
    other.load_state_dict(net.state_dict())
    checkpoint.fill_optimizer(restored, checkpoint.optimizer_tensors(optimizer))
    advance(net, optimizer)
    advance(other, restored)
    assert torch.equal(net.weight, other.weight)
