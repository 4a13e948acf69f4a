import json
import os

import pytest

from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import atomic, cache_folder, check_output, make_folder, to_json, write_text

not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


def test_error_while_writing_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), atomic(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


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
