import os
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from dualmcmc.data import containers, open_images
from dualmcmc.data.images import Fit
from dualmcmc.errors import UserError
from tests.data.makers import encoded, image_folder, image_zip, lmdb_of, pixels

FIT = Fit(16, 3)
IMAGES = pixels(7, 16)


def read(path, skip_bad=False):
    return open_images(path, FIT, skip_bad).tensor().permute(0, 2, 3, 1).numpy()


def as_tar(path, kind):
    folder = image_folder(path.parent / "for-tar", IMAGES)
    with tarfile.open(path, f"w:{kind}") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, f"set/{file.name}")
        archive.add(__file__, "set/readme.txt")
    return path


def as_parquet(path, nested, column="image"):
    import pyarrow
    import pyarrow.parquet

    values = [encoded(image) for image in IMAGES]
    rows = [{"bytes": value, "path": None} for value in values] if nested else values
    pyarrow.parquet.write_table(pyarrow.table({"label": [0] * len(rows), column: rows}), path, row_group_size=3)
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda p: image_folder(p / "a", IMAGES),
        lambda p: image_zip(p / "a.zip", IMAGES),
        lambda p: as_tar(p / "a.tar", ""),
        lambda p: as_tar(p / "a.tar.gz", "gz"),
        lambda p: as_tar(p / "a.tgz", "gz"),
        lambda p: as_tar(p / "a.tar.xz", "xz"),
        lambda p: lmdb_of(p / "a_lmdb", IMAGES),
        lambda p: lmdb_of(p / "a_lmdb", IMAGES) / "data.mdb",
        lambda p: as_parquet(p / "a.parquet", nested=True),
        lambda p: as_parquet(p / "a.parquet", nested=False, column="jpeg"),
    ],
)
def test_every_container_gives_the_same_images(tmp_path, make):
    assert np.array_equal(read(make(tmp_path)), IMAGES)


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 3, 1, 2)])
def test_an_npz_in_both_orders(tmp_path, layout):
    np.savez(tmp_path / "a.npz", images=IMAGES.transpose(*layout))
    assert np.array_equal(read(tmp_path / "a.npz"), IMAGES)


def test_a_grey_npz_and_odd_shapes(tmp_path):
    np.savez(tmp_path / "a.npz", IMAGES[..., 0])
    assert np.array_equal(read(tmp_path / "a.npz"), np.repeat(IMAGES[..., :1], 3, 3))
    for shape in ((2, 1, 16, 3), (2, 16, 1, 3), (2, 20, 10, 3)):
        np.savez(tmp_path / "b.npz", np.zeros(shape, np.uint8))
        assert read(tmp_path / "b.npz").shape == (2, 16, 16, 3)


def test_the_array_of_images_in_an_npz_is_found(tmp_path):
    np.savez(tmp_path / "a.npz", labels=np.arange(7), pictures=IMAGES)
    assert np.array_equal(read(tmp_path / "a.npz"), IMAGES)


def test_a_folder_of_parquet_shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    as_parquet(folder / "0.parquet", nested=True)
    as_parquet(folder / "1.parquet", nested=True)
    assert np.array_equal(read(folder), np.concatenate([IMAGES, IMAGES]))


def test_one_image_only(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(IMAGES[0]))
    assert np.array_equal(read(tmp_path / "a.png"), IMAGES[:1])
    assert np.array_equal(read(tmp_path), IMAGES[:1])


def test_subfolders_in_the_order_of_their_names_and_no_shadows(tmp_path):
    for index, name in enumerate(["b/1.png", "a.PNG", "b/0.jpeg", "c.png"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(IMAGES[index]))
    (tmp_path / "._a.png").write_bytes(b"a shadow of macOS")
    (tmp_path / "notes.txt").write_text("not an image")
    assert np.array_equal(read(tmp_path), IMAGES[[1, 2, 0, 3]])


def test_links_are_followed_and_loops_end(tmp_path):
    outside = image_folder(tmp_path / "outside", IMAGES[:2])
    folder = image_folder(tmp_path / "in", IMAGES[2:4])
    (folder / "linked").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    (outside / "back").symlink_to(folder)
    (folder / "self").symlink_to("self")
    assert np.array_equal(read(folder), IMAGES[[2, 3, 0, 1]])


def test_names_that_point_outside_are_labels_only(tmp_path):
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


def evil_npz(path):
    array = np.empty(1, object)
    array[0] = print
    np.savez(path, array)


def npy(path):
    with open(path, "wb") as file:
        np.save(file, np.zeros((2, 8, 8), np.uint8))


def damaged(path, kind):
    """A compressed archive with a hurt content, or directory."""
    if kind == "npz":
        np.savez_compressed(path, np.zeros((50, 32, 32, 3), np.uint8))
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.png", np.random.default_rng(0).bytes(2_000))
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02") if kind == "directory" else 60
    content[at : at + 15] = b"\xff" * 15
    path.write_bytes(bytes(content))


def cut_tar(path):
    as_tar(path, "gz")
    path.write_bytes(path.read_bytes()[:2_000])


def broken_link(path):
    path.mkdir()
    (path / "gone.png").symlink_to("nowhere.png")


def no_lmdb(path):
    pytest.importorskip("lmdb")
    path.mkdir()
    (path / "data.mdb").write_bytes(b"\0" * 8192)


def no_images_in_parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"label": [1, 2]}), path)


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("absent", lambda p: None, "there is nothing at"),
        ("empty", lambda p: p.mkdir(), "holds no images"),
        ("text.txt", lambda p: p.write_text("hello"), "is not a folder"),
        ("zero.png", lambda p: p.write_bytes(b""), "empty"),
        ("cut.jpg", lambda p: p.write_bytes(encoded(pixels(1, 64)[0], "JPEG")[:-400]), "truncated"),
        ("links", broken_link, "No such file"),
        ("broken.npz", lambda p: p.write_bytes(b"PK nonsense"), "is not an npz file"),
        ("array.npz", npy, "is not an npz file"),
        ("damaged.npz", lambda p: damaged(p, "npz"), "cannot read"),
        ("damaged.zip", lambda p: damaged(p, "zip"), "cannot be used"),
        ("cut.zip", lambda p: damaged(p, "directory"), "cannot read"),
        ("no.zip", lambda p: p.write_bytes(b"no zip"), "not a zip file"),
        ("cut.tar.gz", cut_tar, "cannot read"),
        ("no.tar", lambda p: p.write_bytes(b"no tar" * 1000), "cannot read"),
        ("pipe", os.mkfifo, "is not a folder"),
        ("pickled.npz", evil_npz, "cannot read"),
        ("nan.npz", lambda p: np.savez(p, np.full((2, 8, 8, 3), np.nan)), "must be uint8"),
        ("ints.npz", lambda p: np.savez(p, np.zeros((2, 8, 8, 3), np.int64)), "must be uint8"),
        ("flat.npz", lambda p: np.savez(p, np.zeros((2, 8), np.uint8)), "has shape"),
        ("none.npz", lambda p: np.savez(p), "holds no array"),
        ("no.parquet", lambda p: p.write_bytes(b"no parquet"), "cannot read"),
        ("labels.parquet", no_images_in_parquet, "no column of images"),
        ("no_lmdb", no_lmdb, "cannot read the LMDB"),
        ("bad.pack", lambda p: p.write_bytes(b"nonsense" * 10), "not a packed file"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, name, make, words):
    make(tmp_path / name)
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    assert words in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pipe_among_the_images_is_passed_over(tmp_path):
    image_folder(tmp_path, IMAGES[:1])
    os.mkfifo(tmp_path / "pipe.png")
    assert len(read(tmp_path)) == 1


def test_all_bad_files_are_listed_and_refused_or_left_out(tmp_path):
    folder = image_folder(tmp_path / "a", IMAGES)
    (folder / "000002.png").write_bytes(b"")
    (folder / "000005.png").write_bytes(b"junk")
    with pytest.raises(UserError) as error:
        read(folder)
    message = str(error.value)
    assert "2 images cannot be used" in message
    assert "000002.png' (the file is empty)" in message
    assert "000005.png" in message
    assert "skip_bad" in message
    assert np.array_equal(read(folder, skip_bad=True), IMAGES[[0, 1, 3, 4, 6]])


def test_a_reason_that_all_share_is_said_once(tmp_path):
    folder = image_folder(tmp_path / "a", IMAGES)
    with pytest.raises(UserError) as error:
        open_images(folder, Fit(16, 3, "celeba140"))
    assert str(error.value).count("celeba140 is for CelebA") == 1
    assert "7 images cannot be used" in str(error.value)
    assert "and 2 more" in str(error.value)


def test_where_nothing_is_left_it_is_said(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(UserError, match="Nothing is left"):
        read(tmp_path, skip_bad=True)


def test_an_image_that_is_too_large_to_be_one(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "MOST_BYTES", 100)
    for make in (lambda: image_zip(tmp_path / "a.zip", IMAGES), lambda: as_tar(tmp_path / "a.tar", "")):
        with pytest.raises(UserError, match="too many for an image"):
            read(make())


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    path = lmdb_of(tmp_path / "a", IMAGES)
    monkeypatch.setitem(__import__("sys").modules, "lmdb", None)
    with pytest.raises(UserError, match=r"pip install 'dualmcmc\[data\]'"):
        read(path)


def test_what_does_not_fit_into_memory_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("dualmcmc.data.source.available_memory", lambda: 2 * 5 * 16 * 16 * 3)
    for path in (image_folder(tmp_path / "a", IMAGES), as_tar(tmp_path / "a.tar", "")):
        monkeypatch.setattr("dualmcmc.data.source.START", 2)
        with pytest.raises(UserError, match="dualmcmc data pack") as error:
            read(path)
        assert "--size 16" in str(error.value)


def test_an_npz_that_unpacks_to_too_much(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", np.zeros((1000, 32, 32, 3), np.uint8))
    assert (tmp_path / "a.npz").stat().st_size < 100_000
    monkeypatch.setattr(containers, "available_memory", lambda: 1_000_000)
    with pytest.raises(UserError, match=r"unpacks to 3\.07 MB"):
        read(tmp_path / "a.npz")


def test_a_tar_longer_than_expected_grows(tmp_path, monkeypatch):
    monkeypatch.setattr("dualmcmc.data.source.START", 2)
    images = open_images(as_tar(tmp_path / "a.tar", ""), FIT).tensor()
    assert torch.equal(images, torch.from_numpy(IMAGES).permute(0, 3, 1, 2))
