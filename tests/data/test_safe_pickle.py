"""Plain pickles are read; nothing in a pickle is executed."""

import os
import pickle
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from dualmcmc.data import safe_pickle
from dualmcmc.utils.errors import UserError


@pytest.mark.parametrize("protocol", range(0, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data(protocol):
    value = {"data": np.arange(12, dtype=np.uint8).reshape(3, 4), "labels": [1, 2.5, None, True], b"name": ("a", b"b")}
    if protocol == 5:
        with pytest.raises(UserError):  # protocol 5 passes buffers to NumPy
            safe_pickle.read(pickle.dumps(value, protocol), "batch")
        return
    got = safe_pickle.read(pickle.dumps(value, protocol), "batch")
    assert np.array_equal(got.pop("data"), value.pop("data"))
    assert got == value


def test_other_array_types_and_orders():
    for array in (
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
    ):
        assert np.array_equal(safe_pickle.read(pickle.dumps(array, 2), "batch"), array)


def test_python_2_pickle():
    # {'data': array([[1, 2]], dtype=uint8)} as Python 2 and its NumPy wrote it
    content = (
        b"\x80\x02}q\x01U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x01K\x02\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89U\x02\x01\x02tbs."
    )
    assert safe_pickle.read(content, "batch")[b"data"].tolist() == [[1, 2]]


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
def test_hostile_pickle_is_not_executed(tmp_path, monkeypatch, value, protocol):
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps(value, protocol).replace(b"{marker}", b"m" * 8)  # of the same length
    with pytest.raises(UserError, match="refused") as error:
        safe_pickle.read(content, "batch")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_pickle_would_execute_it(tmp_path):
    marker = tmp_path / "it-ran"
    content = pickle.dumps(Hostile(os.system, f"touch {marker}"), 2)
    subprocess.run([sys.executable, "-c", f"import pickle; pickle.loads({content!r})"], check=True)
    assert marker.exists()  # so the test above can fail


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
        REDUCE + b".",  # a function of the reader is not data
        b"cnumpy\nndarray\n.",
        REDUCE + b"}(S'__code__'\nI1\ndb.",  # an attempt to modify it
        b"\x80\x02cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",  # a string of 9 exabytes
        b"(" * 5000 + b".",
    ],
)
def test_invalid_pickles_are_refused(content):
    with pytest.raises(UserError) as error:
        safe_pickle.read(content, "batch")
    assert "batch" in str(error.value)
    assert "\n" not in str(error.value)


def test_memo_index_allocates_no_memory():
    assert safe_pickle.read(b"\x80\x02I1\nr\xff\xff\xff\x7f.", "batch") == 1  # memo index two billion


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x05\x96" + (1 << 34).to_bytes(8, "little"),  # a byte array of 16 GiB
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little"),  # a string of 1 TiB
        b"\x80\x02" + b"]q\x00" + b"h\x00" * 40 + b"a" * 40 + b".",  # a list that contains itself
    ],
)
def test_claimed_sizes_allocate_no_memory(content):
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            safe_pickle.read(content, "batch")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_shared_objects_are_visited_once():
    value = [1]
    for _ in range(7):
        value = [value] * 50  # 50^7 paths to [1]: visiting each would take days
    result = safe_pickle.read(pickle.dumps(value, 2), "batch")
    assert result[3][4][5][6][7][8][9] == [1]
    assert result[0] is result[49]


def test_only_arrays_can_be_built():
    with pytest.raises(UserError, match="not an array"):
        safe_pickle.read(b"c_codecs\nencode\n(N}S'__defaults__'\n(I1\ntstb.", "batch")
    with pytest.raises(UserError, match="of type 'O8'"):
        safe_pickle.read(b"cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR.", "batch")
    with pytest.raises(UserError, match="not an array"):
        safe_pickle.read(REDUCE + b"(cnumpy\ndtype\n(I0\ntS'b'\ntR.", "batch")
    for code in (b"\x81", b"\x92", b"i__main__\nx\n", b"o", b"Pid\n", b"Q", b"\x82\x01", b"\x97", b"\x98", b"\x8f"):
        with pytest.raises(UserError, match="opcode"):
            safe_pickle.read(b"\x80\x02(" + code + b".", "batch")


def test_array_must_match_its_shape():
    content = pickle.dumps(np.arange(4, dtype=np.uint8).reshape(2, 2), 2)
    assert content.count(b"K\x02K\x02\x86") == 1
    with pytest.raises(UserError, match="does not match its shape"):
        safe_pickle.read(content.replace(b"K\x02K\x02\x86", b"K\x02K\x03\x86"), "batch")


def test_deep_nesting_is_refused():
    value = []
    for _ in range(50):
        value = [value]
    with pytest.raises(UserError, match="nested"):
        safe_pickle.read(pickle.dumps(value, 2), "batch")
