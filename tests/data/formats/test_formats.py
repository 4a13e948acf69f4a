"""Images in every container format: all give the same pixels, and damaged ones are refused in one line."""

import os
import zipfile

import numpy as np
import pytest

from dualmcmc.utils.errors import UserError
from tests.data.formats.common import IMAGES, image_parquet, image_tar, read
from tests.data.makers import encoded, image_folder, image_lmdb, image_zip, pixels


@pytest.mark.parametrize(
    "make",
    [
        lambda p: image_folder(p / "a", IMAGES),
        lambda p: image_zip(p / "a.zip", IMAGES),
        lambda p: image_tar(p / "a.tar", ""),
        lambda p: image_tar(p / "a.tar.gz", "gz"),
        lambda p: image_tar(p / "a.tgz", "gz"),
        lambda p: image_tar(p / "a.tar.xz", "xz"),
        lambda p: image_lmdb(p / "a_lmdb", IMAGES),
        lambda p: image_lmdb(p / "a_lmdb", IMAGES) / "data.mdb",
        lambda p: image_parquet(p / "a.parquet", nested=True),
        lambda p: image_parquet(p / "a.parquet", nested=False, column="jpeg"),
    ],
)
def test_all_formats_give_the_same_images(tmp_path, make):
    assert np.array_equal(read(make(tmp_path)), IMAGES)


def object_npz(path):
    array = np.empty(1, object)
    array[0] = print
    np.savez(path, array)


def npy(path):
    with open(path, "wb") as file:
        np.save(file, np.zeros((2, 8, 8), np.uint8))


def damaged_zip(path, directory=False):
    """A compressed zip or npz with damaged content, or a damaged directory."""
    if path.suffix == ".npz":
        np.savez_compressed(path, np.zeros((50, 32, 32, 3), np.uint8))
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.png", np.random.default_rng(0).bytes(2_000))
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02") if directory else 60
    content[at : at + 15] = b"\xff" * 15
    path.write_bytes(bytes(content))


def truncated_tar(path):
    image_tar(path, "gz")
    path.write_bytes(path.read_bytes()[:2_000])


def broken_link(path):
    path.mkdir()
    (path / "gone.png").symlink_to("nowhere.png")


def invalid_lmdb(path):
    pytest.importorskip("lmdb")
    path.mkdir()
    (path / "data.mdb").write_bytes(b"\0" * 8192)


def parquet_without_images(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"label": [1, 2]}), path)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("absent", lambda p: None, "does not exist"),
        ("empty", lambda p: p.mkdir(), "contains no images"),
        ("text.txt", lambda p: p.write_text("hello"), "is not a folder"),
        ("zero.png", lambda p: p.write_bytes(b""), "empty"),
        ("cut.jpg", lambda p: p.write_bytes(encoded(pixels(1, 64)[0], "JPEG")[:-400]), "truncated"),
        ("links", broken_link, "No such file"),
        ("broken.npz", lambda p: p.write_bytes(b"PK nonsense"), "is not an npz file"),
        ("array.npz", npy, "is not an npz file"),
        ("damaged.npz", damaged_zip, "cannot read"),
        ("damaged.zip", damaged_zip, "cannot be used"),
        ("cut.zip", lambda p: damaged_zip(p, directory=True), "cannot read"),
        ("no.zip", lambda p: p.write_bytes(b"no zip"), "not a zip file"),
        ("cut.tar.gz", truncated_tar, "cannot read"),
        ("no.tar", lambda p: p.write_bytes(b"no tar" * 1000), "cannot read"),
        ("pipe", os.mkfifo, "is not a folder"),
        ("pickled.npz", object_npz, "cannot read"),
        ("nan.npz", lambda p: np.savez(p, np.full((2, 8, 8, 3), np.nan)), "expected uint8"),
        ("ints.npz", lambda p: np.savez(p, np.zeros((2, 8, 8, 3), np.int64)), "expected uint8"),
        ("flat.npz", lambda p: np.savez(p, np.zeros((2, 8), np.uint8)), "has shape"),
        ("none.npz", lambda p: np.savez(p), "contains no array"),
        ("no.parquet", lambda p: p.write_bytes(b"no parquet"), "cannot read"),
        ("labels.parquet", parquet_without_images, "no column of encoded images"),
        ("no_lmdb", invalid_lmdb, "cannot read the LMDB"),
        ("bad.pack", lambda p: p.write_bytes(b"nonsense" * 10), "not a packed file"),
    ],
)
def test_invalid_files_are_refused(tmp_path, name, make, message):
    make(tmp_path / name)
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    assert message in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
