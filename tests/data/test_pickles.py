"""CIFAR's pickles are read; nothing in a pickle is ever run."""

import os
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest

from dualmcmc.data import pickles
from dualmcmc.data.cifar import read_cifar10, read_cifar100
from dualmcmc.errors import UserError
from tests.data.makers import cifar_batch, pixels


@pytest.mark.parametrize("protocol", range(0, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_comes_through(protocol):
    value = {"data": np.arange(12, dtype=np.uint8).reshape(3, 4), "labels": [1, 2.5, None, True], b"name": ("a", b"b")}
    if protocol == 5:
        with pytest.raises(UserError):  # protocol 5 hands buffers to NumPy's own code
            pickles.read(pickle.dumps(value, protocol), "it")
        return
    got = pickles.read(pickle.dumps(value, protocol), "it")
    assert np.array_equal(got.pop("data"), value.pop("data"))
    assert got == value


def test_other_types_and_orders_of_arrays():
    for array in (
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
    ):
        assert np.array_equal(pickles.read(pickle.dumps(array, 2), "it"), array)


def test_pickles_of_python_2():
    # {'data': array([[1, 2]], dtype=uint8)} as Python 2 and its NumPy wrote it
    content = (
        b"\x80\x02}q\x01U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x01K\x02\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89U\x02\x01\x02tbs."
    )
    assert pickles.read(content, "it")[b"data"].tolist() == [[1, 2]]


class Hostile:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    "value",
    [
        Hostile(os.system, "touch {marker}"),
        Hostile(exec, "open('{marker}', 'w')"),
        Hostile(eval, "open('{marker}', 'w')"),
        Hostile(subprocess.call, ["touch", "{marker}"]),
        Hostile(np.load, "{marker}"),
        {"data": [Hostile(os.system, "touch {marker}")]},
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_file_is_refused_and_runs_nothing(tmp_path, value, protocol):
    marker = tmp_path / "it-ran"
    content = pickle.dumps(value, protocol).replace(
        b"{marker}", b"m" * 8
    )  # the same length: lengths are part of a pickle
    with pytest.raises(UserError, match="refused") as error:
        pickles.read(content, "batch")
    assert "\n" not in str(error.value)
    assert not marker.exists()
    assert not os.path.exists("m" * 8)


def test_the_hostile_file_would_have_run_elsewhere(tmp_path):
    marker = tmp_path / "it-ran"
    content = pickle.dumps(Hostile(os.system, f"touch {marker}"), 2)
    subprocess.run([sys.executable, "-c", f"import pickle; pickle.loads({content!r})"], check=True)
    assert marker.exists()  # or the test above could not fail


REDUCE = b"cnumpy.core.multiarray\n_reconstruct\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"nonsense",
        b"\x80\x02}q\x01",
        pickle.dumps({"data": np.zeros(3)}, 2),  # floats
        pickle.dumps(np.array([object()], object), 2),  # objects inside an array
        pickle.dumps(np.zeros(2, "V8"), 2),
        pickle.dumps(np.datetime64("2020"), 2),
        pickle.dumps({1, 2}, 4),  # a set
        pickle.dumps(range(3), 2),
        b"cos\nsystem\n.",
        b"cbuiltins\n__import__\n.",
        REDUCE + b".",  # the reader's own function is not data
        b"cnumpy\nndarray\n.",
        REDUCE + b"}(S'__code__'\nI1\ndb.",  # an attempt to change it
        b"\x80\x02cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",  # a string of nine quintillion bytes
        b"(" * 5000 + b".",
    ],
)
def test_damage_and_tricks_are_refused_in_one_line(content):
    with pytest.raises(UserError) as error:
        pickles.read(content, "batch")
    assert "batch" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_memo_number_costs_no_memory():
    assert pickles.read(b"\x80\x02I1\nr\xff\xff\xff\x7f.", "batch") == 1  # memo number two billion


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x05\x96" + (1 << 34).to_bytes(8, "little"),  # a byte array of 16 GB
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little"),  # a string of a terabyte
        b"\x80\x02" + b"]q\x00" + b"h\x00" * 40 + b"a" * 40 + b".",  # a list in itself
    ],
)
def test_claims_of_size_take_no_memory(content):
    begun = time.monotonic()
    with pytest.raises(UserError):
        pickles.read(content, "batch")
    assert time.monotonic() - begun < 1


def test_what_is_shared_is_looked_at_once():
    value = [1]
    for _ in range(7):
        value = [value] * 50
    begun = time.monotonic()
    got = pickles.read(pickle.dumps(value, 2), "batch")
    assert time.monotonic() - begun < 1
    assert got[3][4] == value[0][0]


def test_only_arrays_can_be_built():
    with pytest.raises(UserError, match="not an array"):
        pickles.read(b"c_codecs\nencode\n(N}S'__defaults__'\n(I1\ntstb.", "batch")
    with pytest.raises(UserError, match="of type 'O8'"):
        pickles.read(b"cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR.", "batch")
    with pytest.raises(UserError, match="not an array"):
        pickles.read(REDUCE + b"(cnumpy\ndtype\n(I0\ntS'b'\ntR.", "batch")
    for code in (b"\x81", b"\x92", b"i__main__\nx\n", b"o", b"Pid\n", b"Q", b"\x82\x01", b"\x97", b"\x98", b"\x8f"):
        with pytest.raises(UserError, match="instruction"):
            pickles.read(b"\x80\x02(" + code + b".", "batch")


def test_an_array_whose_bytes_do_not_fit_its_shape():
    content = pickle.dumps(np.arange(4, dtype=np.uint8).reshape(2, 2), 2)
    assert content.count(b"K\x02K\x02\x86") == 1
    with pytest.raises(UserError, match="does not fit"):
        pickles.read(content.replace(b"K\x02K\x02\x86", b"K\x02K\x03\x86"), "batch")


def test_deep_nesting_is_refused():
    value = []
    for _ in range(50):
        value = [value]
    with pytest.raises(UserError, match="nested"):
        pickles.read(pickle.dumps(value, 2), "batch")


def test_a_batch_that_is_none(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for value in ([1, 2], {"data": 3}, {"data": np.zeros((2, 5), np.uint8)}):
        (folder / "test").write_bytes(pickle.dumps(value, 2))
        with pytest.raises(UserError, match="not a CIFAR batch"):
            next(read_cifar100(tmp_path)["test"].items(None))


def test_a_hostile_cifar_folder(tmp_path):
    images = pixels(5)
    for number in range(1, 5):
        (tmp_path / f"data_batch_{number}").write_bytes(cifar_batch(images))
    (tmp_path / "data_batch_5").write_bytes(pickle.dumps(Hostile(os.system, f"touch {tmp_path / 'ran'}"), 2))
    with pytest.raises(UserError, match="refused"):
        next(read_cifar10(tmp_path)["train"].items(None))
    assert not (tmp_path / "ran").exists()
