import json
import os

import pytest

from dualmcmc.errors import UserError
from dualmcmc.files import atomic, check_target, make_folder, to_json, write_text

not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


def test_an_error_while_writing_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), atomic(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_text(tmp_path / "file" / "inside", "text")
    with pytest.raises(UserError, match="cannot make the folder"):
        make_folder(tmp_path / "file" / "inside")
    with pytest.raises(UserError, match="is a file"):
        make_folder(tmp_path / "file")


@not_root
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(UserError, match=r"read-only for you\. Choose another --out"):
            make_folder(tmp_path)
        with pytest.raises(UserError, match=r"read-only for you\. Choose another --sheet"):
            check_target(tmp_path / "a.png", ".png", option="--sheet")
    finally:
        tmp_path.chmod(0o755)


def test_json_has_no_infinity():
    text = to_json({"a": float("inf"), "b": {"c": float("nan")}, "d": 1.5})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": "inf", "b": {"c": "nan"}, "d": 1.5}
