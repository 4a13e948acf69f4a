import tarfile
import zipfile

import numpy as np

from tests.data.formats.common import IMAGES, read
from tests.data.makers import encoded


def test_member_names_are_labels_only(tmp_path):
    inside = tmp_path / "deep" / "deeper"
    inside.mkdir(parents=True)
    with zipfile.ZipFile(inside / "a.zip", "w") as archive:
        archive.writestr("../../../escaped.png", encoded(IMAGES[0]))
    with tarfile.open(inside / "a.tar", "w") as archive:
        (tmp_path / "x.png").write_bytes(encoded(IMAGES[0]))
        archive.add(tmp_path / "x.png", "/absolute/../../escaped.png")
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    for name in ("a.zip", "a.tar"):
        assert np.array_equal(read(inside / name), IMAGES[:1])
    assert sorted(tmp_path.rglob("*")) == before
