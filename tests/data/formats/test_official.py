import zipfile

import pytest

from dualmcmc.data.formats.official import OfficialFiles
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.formats.common import load
from tests.data.makers import pixels


def test_damaged_gzip_and_archives_are_refused(tmp_path):
    makers.mnist(tmp_path, pixels(6, 28, 1), pixels(3, 28, 1))
    gz = tmp_path / "train-images-idx3-ubyte.gz"
    whole = gz.read_bytes()
    for content in (whole[:-40], b"nonsense"):
        gz.write_bytes(content)
        with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz"):
            load(source="mnist", size=28, channels=1, path=str(tmp_path))
    for name in ("a.tar.gz", "a.zip"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(UserError, match=f"cannot read .*{name}"):
            OfficialFiles(tmp_path / name).names()


def test_damaged_zip_member_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("train-images-idx3-ubyte", makers.idx(pixels(2, 28, 1)))
    content = bytearray((tmp_path / "a.zip").read_bytes())
    content[200] ^= 255
    (tmp_path / "a.zip").write_bytes(bytes(content))
    with pytest.raises(UserError, match="Bad CRC"):
        load(source="mnist", size=28, channels=1, path=str(tmp_path / "a.zip"))
