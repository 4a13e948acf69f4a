import json
import os

import pytest

from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import (
    atomic,
    cache_folder,
    check_output,
    make_folder,
    open_regular,
    read_text,
    to_json,
    write_text,
)

not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


def test_error_while_writing_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), atomic(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_temporary_names_cannot_be_guessed(tmp_path):
    names = set()
    for _ in range(3):
        with atomic(tmp_path / "file") as temporary:
            assert temporary.is_file()
            names.add(temporary.name)
            temporary.write_text("new")
    assert len(names) == 3
    assert os.listdir(tmp_path) == ["file"]


def test_link_is_replaced_not_followed(tmp_path):
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "file").symlink_to(tmp_path / "precious")
    write_text(tmp_path / "file", "new")
    assert (tmp_path / "precious").read_text() == "keep me"
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_umask_is_honoured(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_text(tmp_path / "text", "a")
        with atomic(tmp_path / "replaced") as temporary:  # as safetensors does
            temporary.unlink()
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    for name in ("text", "replaced"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_read(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(UserError, match=r"file' cannot be read: it is not a regular file|is a directory"):
        open_regular(path)


def test_reading_is_limited(tmp_path):
    (tmp_path / "file").write_bytes(b"abc\xff")
    assert read_text(tmp_path / "file", 4) == "abc\ufffd"
    with pytest.raises(UserError, match="larger than 3 bytes"):
        read_text(tmp_path / "file", 3)
    with pytest.raises(UserError, match="does not exist"):
        read_text(tmp_path / "absent", 3)


def test_unreadable_file_is_called_so(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match="file' cannot be read: permission denied"):
        open_regular(tmp_path / "file")


def test_errors(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_text(tmp_path / "file" / "inside", "text")
    with pytest.raises(UserError, match="cannot create the folder"):
        make_folder(tmp_path / "file" / "inside")
    with pytest.raises(UserError, match="is a file"):
        make_folder(tmp_path / "file")


@not_root
def test_read_only_folder(tmp_path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(UserError, match=r"permission denied\. Choose another --out"):
            make_folder(tmp_path)
        with pytest.raises(UserError, match=r"permission denied\. Choose another --sheet"):
            check_output(tmp_path / "a.png", ".png", option="--sheet")
    finally:
        tmp_path.chmod(0o755)


def test_json_without_nan_and_infinity():
    text = to_json({"a": float("inf"), "b": {"c": float("nan")}, "d": 1.5})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": "inf", "b": {"c": "nan"}, "d": 1.5}


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DUALMCMC_DATA", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("DUALMCMC_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dualmcmc"
