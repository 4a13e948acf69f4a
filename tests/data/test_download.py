from contextlib import contextmanager

import pytest

from dualmcmc.data.download import Unreachable, download
from tests.data.server import files_in


def test_part_longer_than_the_file_is_discarded(server, tmp_path):
    server.files["a"] = b"x" * 100
    (tmp_path / "a.part").write_bytes(b"y" * 200)
    download(server.url + "a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"x" * 100


def test_complete_part_is_used(server, tmp_path):
    server.files["a"] = b"x" * 100
    (tmp_path / "a.part").write_bytes(b"x" * 100)
    download(server.url + "a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"x" * 100
    assert len(server.requests) == 1


def test_wrong_range_is_not_appended(server, tmp_path):
    server.files["a"] = bytes(range(200))
    (tmp_path / "a.part").write_bytes(bytes(range(100)))
    server.shift = 7
    download(server.url + "a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == bytes(range(200))


def test_busy_server_is_retried(server, tmp_path):
    server.files["a"] = b"x" * 100
    server.errors = [503, 503]
    download(server.url + "a", tmp_path / "a")
    assert len(server.requests) == 3
    server.errors = [500] * 9
    with pytest.raises(Unreachable, match="500"):
        download(server.url + "a", tmp_path / "b", attempts=3)
    assert len(server.requests) == 6
    server.errors = []
    with pytest.raises(Unreachable, match="404"):
        download(server.url + "absent", tmp_path / "b")
    assert len(server.requests) == 7  # not retried
    with pytest.raises(Unreachable, match="not an HTTP URL"):
        download("file:///etc/hostname", tmp_path / "b")
    assert files_in(tmp_path) == ["a"]


def test_progress_includes_the_resumed_part(server, tmp_path):
    server.files["a"] = bytes(1000)
    (tmp_path / "a.part").write_bytes(bytes(400))
    seen = []

    @contextmanager
    def progress(task, total, unit):
        seen.append((task, total, unit))
        yield seen.append

    download(server.url + "a", tmp_path / "a", progress)
    assert seen == [("downloading a", 1000, "bytes"), 400, 600]
