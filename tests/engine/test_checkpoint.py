import hashlib
import os
import pickle

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dualmcmc.engine import checkpoint
from dualmcmc.utils.errors import Damaged, UserError


def test_round_trip(tmp_path):
    path = tmp_path / "file.safetensors"
    tensors = {"a": torch.randn(3, 2).T, "b": torch.tensor(4, dtype=torch.int64)}  # a is not contiguous
    checkpoint.save(path, tensors, {"images": 7, "words": ["x"]})
    loaded, info, _ = checkpoint.load(path)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert info == checkpoint.load_info(path) == {"images": 7, "words": ["x"]}
    assert [item.name for item in tmp_path.iterdir()] == ["file.safetensors"]


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("code from a file was run",))


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 7, b"\xff" * 400, b"not a checkpoint at all" * 40, pickle.dumps(Evil())]
)
def test_other_files_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        checkpoint.load(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.99])
def test_truncated_file(tmp_path, keep):
    path = tmp_path / "file.safetensors"
    checkpoint.save(path, {"a": torch.randn(100)}, {})
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load(path)


def test_every_flipped_bit_is_detected(tmp_path):
    """In header and tensors of a small file."""
    path = tmp_path / "file.safetensors"
    checkpoint.save(path, {"a": torch.randn(3)}, {"images": 7})
    intact = path.read_bytes()
    for place in range(len(intact)):
        for bit in range(8):
            content = bytearray(intact)
            content[place] ^= 1 << bit
            path.write_bytes(content)
            with pytest.raises(Damaged):  # so that a run resumes from the state before it
                checkpoint.verify(path)
            with pytest.raises(Damaged):
                checkpoint.load(path)
    path.write_bytes(intact)
    checkpoint.verify(path)
    path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    with pytest.raises(Damaged, match="checksum"):
        checkpoint.verify(path)


def test_full_disk(tmp_path, monkeypatch):
    def fail(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(UserError, match=r"^cannot write '.*file.safetensors': No space left on device"):
        checkpoint.save(tmp_path / "file.safetensors", {"a": torch.ones(1)}, {"images": 0})
    assert list(tmp_path.iterdir()) == []


def test_other_programs_and_versions(tmp_path):
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
    with pytest.raises(UserError, match="does not exist"):
        checkpoint.load(tmp_path / "absent.safetensors")


def test_weights_of_another_network(tmp_path):
    with pytest.raises(UserError, match="does not match its networks"):
        checkpoint.load_into(torch.nn.Linear(2, 2), torch.nn.Linear(3, 2).state_dict(), tmp_path)


@pytest.mark.parametrize("beta1", [0.0, 0.5])
def test_optimizer_round_trip(beta1):
    def make():
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        return net, torch.optim.Adam(net.parameters(), lr=0.1, betas=(beta1, 0.9))

    def advance(net, optimizer):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    net, optimizer = make()
    advance(net, optimizer)
    other, restored = make()
    other.load_state_dict(net.state_dict())
    saved = checkpoint.optimizer_tensors(optimizer)
    assert ("0.exp_avg" in saved) == (beta1 > 0)  # with 0 it has no memory, and takes a quarter of a state
    checkpoint.load_optimizer(restored, saved)
    advance(net, optimizer)
    advance(other, restored)
    assert torch.equal(net.weight, other.weight)


def test_umask_is_honoured(tmp_path):
    before = os.umask(0o027)
    try:
        checkpoint.save(tmp_path / "file.safetensors", {"a": torch.ones(1)}, {"images": 0})
    finally:
        os.umask(before)
    assert (tmp_path / "file.safetensors").stat().st_mode & 0o777 == 0o640


def test_file_replaced_while_it_is_read(tmp_path, monkeypatch):
    """Tensors, values and SHA-256 are those of one file."""
    path = tmp_path / "file.safetensors"
    checkpoint.save(path, {"a": torch.ones(1)}, {"images": 1})
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    open_regular = checkpoint.open_regular

    def open_then_replace(where):
        file = open_regular(where)
        checkpoint.save(path, {"a": torch.zeros(1)}, {"images": 2})
        return file

    monkeypatch.setattr(checkpoint, "open_regular", open_then_replace)
    tensors, info, sha256 = checkpoint.load(path)
    assert (tensors["a"].item(), info["images"], sha256) == (1, 1, expected)
    assert hashlib.sha256(path.read_bytes()).hexdigest() != expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int64), "weight is int64 instead of float32"),
        (torch.ones(2, 3, dtype=torch.complex64), "weight is complex64 instead of float32"),
        (torch.full((2, 3), torch.nan), "weight has values that are not finite"),
        (torch.full((2, 3), torch.inf, dtype=torch.float16), "weight has values that are not finite"),
        (torch.full((2, 3), 1e300, dtype=torch.float64), "weight has values that are not finite"),
        (torch.full((2, 3), torch.nan).to(torch.float8_e4m3fn), "weight has values that are not finite"),
        (torch.ones(3, 2), "size mismatch"),
    ],
)
def test_unusable_weights(tmp_path, value, message):
    net = torch.nn.Linear(3, 2, bias=False)
    with pytest.raises(UserError, match=message):
        checkpoint.load_into(net, {"weight": value}, tmp_path / "file")
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        checkpoint.load_into(net, {"weight": torch.full((2, 3), 2.0, dtype=dtype)}, tmp_path / "file")
        assert net.weight.dtype == torch.float32
        assert (net.weight == 2).all()
