"""One test a promise of docs/security.md, where no other test shows it already."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dualmcmc
from dualmcmc import settings
from dualmcmc.data import archives, images, open_images, pack
from dualmcmc.data.cifar import read_cifar10
from dualmcmc.data.images import BadImage, Fit, decode
from dualmcmc.data.mnist import read as read_mnist
from dualmcmc.engine import checkpoint
from dualmcmc.engine.folder import RunFolder
from dualmcmc.errors import UserError
from dualmcmc.report.page import write_report
from dualmcmc.words import plain, shown
from tests.conftest import assert_refused
from tests.data.makers import encoded, idx, image_folder, pixels

FIT = Fit(16, 3)
PNG = encoded(pixels(1, 16)[0])
MEGABYTE = 1 << 20


@contextmanager
def at_most(megabytes: float, seconds: float):
    """What is done inside takes little of Python's memory, and little time."""
    tracemalloc.start()
    begin = time.monotonic()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < megabytes * MEGABYTE, f"{peak / MEGABYTE:.0f} MB"
    assert time.monotonic() - begin < seconds


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        open_images(path, FIT)
    assert str(error.value).isprintable()
    return str(error.value)


# Settings


@pytest.mark.parametrize("tag", ["!!python/object/apply:pathlib.Path.touch", "!!python/object/new:pathlib.Path"])
def test_a_settings_file_runs_nothing(call, tmp_path, tag):
    mark, path = tmp_path / "mark", tmp_path / "mine.yaml"
    path.write_text(f"description: {tag} ['{mark}']\n")
    assert_refused(call("config", path), "not valid YAML", "mine.yaml")
    assert not mark.exists()


LAUGHS = "seed:\n- &a0 [ha, ha]\n" + "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGED = "a0: &a0 {k: v}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LAUGHS, "aliases"),
        (MERGED, "aliases"),
        ("train: &a {batch: *a}", "aliases"),
        ("[" * 1_000, "nested too deeply"),
        ("a: {" * 200, "nested too deeply"),
        ("seed: 1" + ":1" * 20_000, "too long"),
        ("seed: 0x" + "f" * 300, "seed must be"),
        ("seed: " + "9" * 5000, "too long"),
        ("train: {batch: 1, batch: 2}", "twice"),
        ("x" * 400_000, "longer than"),
        ("train: !!int ''", "not valid YAML"),
        ("train: !!timestamp x", "not valid YAML"),
        ('data: {path: "a\\0b"}', "NUL"),
        ("a\0b: 1", "special characters"),
        ("é: 1".encode("latin1"), "cannot read"),
        (b"\xff\xfe" + "seed: 1".encode("utf-16-le"), "cannot read"),
        ('"a\\nb\\e[2J": 1', "unknown setting 'a\\nb\\x1b[2J'"),
    ],
)
def test_a_hostile_settings_file_is_refused_at_once(call, tmp_path, content, words):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with at_most(100, seconds=20):
        answer = call("config", path)
    assert_refused(answer, words)
    assert len(answer.err) < 1000
    assert answer.err.strip().isprintable()


def test_a_value_cannot_pass_for_another_setting():
    text = "innocent\ntrain:\n  batch: 1\n\"'# \x1b[2J\u2028"
    config = settings.from_tree({"description": text})
    again = settings.from_tree(settings.parse_yaml(settings.render(config), "again"))
    assert again == config
    assert again.train.batch == settings.from_tree({}).train.batch


def test_foreign_words_are_shown_on_one_short_line():
    assert plain("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    assert len(plain("x" * 10**6)) < 100
    endless: list = []
    endless.append(endless)
    assert shown(endless) == "a list of 1"
    assert shown(16**5000).isprintable()


# Weights and arrays


class Evil:
    """Where it is unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_pickle_that_calls_itself_a_checkpoint_is_not_run(tmp_path):
    mark = tmp_path / "mark"
    for name, save in (
        ("a.safetensors", lambda path: torch.save({"images": Evil(mark)}, path)),
        ("b.safetensors", lambda path: path.write_bytes(pickle.dumps(Evil(mark)))),
    ):
        save(tmp_path / name)
        with pytest.raises(UserError, match=name):
            dualmcmc.load(tmp_path / name)
    assert not mark.exists()
    pickle.loads((tmp_path / "b.safetensors").read_bytes())
    assert mark.exists()  # elsewhere it would have been


def test_a_small_file_cannot_ask_for_huge_networks(finished_run, tmp_path):
    tensors, info = checkpoint.load(finished_run / "snapshot.safetensors")
    info["config"]["nets"] |= {"energy_width": 16384, "generator_width": 16384, "inference_width": 16384}
    info["config"]["teaching"]["latent_dim"] = 65536
    path = tmp_path / "greedy.safetensors"
    checkpoint.save(path, tensors, info)
    begin = time.monotonic()
    with pytest.raises(UserError, match="does not fit"):
        dualmcmc.load(path)
    assert time.monotonic() - begin < 5  # such networks take minutes to make, and hundreds of gigabytes


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    mark, path = tmp_path / "mark", tmp_path / "a.npz"
    held = np.empty(1, object)
    held[0] = Evil(mark)
    np.savez(path, images=held)
    assert "pickled objects" in refusal(path)
    assert not mark.exists()
    assert np.load(path, allow_pickle=True)["images"] is not None
    assert mark.exists()


def test_an_array_takes_no_more_memory_than_it_has_bytes(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (9000000, 1000, 1000, 3)}"
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 100)
    with at_most(10, seconds=5):
        assert "does not fit the shape" in refusal(path)


# Archives


def tar_header(name: str, size: int, kind: bytes) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def gzip_of_zeros(path: Path, begin: bytes, megabytes: int) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(begin)
        for _ in range(megabytes):
            file.write(b"\0" * MEGABYTE)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_a_tar_with_an_endless_header(tmp_path, kind):
    path = tmp_path / "a.tar.gz"
    gzip_of_zeros(path, tar_header("x", 100 * MEGABYTE, kind), 100)
    assert path.stat().st_size < MEGABYTE
    with at_most(20, seconds=20):
        assert "header that is too long" in refusal(path)


def test_a_tar_of_headers_upon_headers(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_header("x", 0, tarfile.XHDTYPE) * 3000)
    assert "cannot read" in refusal(path)


def test_a_tar_of_very_many_members(tmp_path):
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(20):
            file.write(tar_header("x.txt", 0, tarfile.REGTYPE) * 1000)
    with at_most(10, seconds=60):
        assert "holds no images" in refusal(path)


def test_a_sparse_tar(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_header("x.png", 0, tarfile.GNUTYPE_SPARSE) + b"\0" * 1024)
    assert "sparse" in refusal(path)


def test_archives_of_named_sets_write_nothing_and_follow_no_link(tmp_path):
    inside = tmp_path / "deep" / "mnist"
    inside.mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_bytes(idx(pixels(2, 28, 1)))
    with zipfile.ZipFile(inside / "a.zip", "w") as archive:
        archive.writestr("../../../train-images-idx3-ubyte", idx(pixels(3, 28, 1)))
    with tarfile.open(inside / "b.tar", "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo("t10k-images-idx3-ubyte")
            member.type, member.linkname = kind, str(secret)
            archive.addfile(member)
    before = sorted(tmp_path.rglob("*"))
    found = read_mnist(inside)
    assert list(found) == ["train"]
    assert len(list(found["train"].images(Fit(28, 1)))) == 3
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_that_is_unpacked_whole_before_it_is_counted(tmp_path, method):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.png", b"\0" * (20 * MEGABYTE))
    content = path.read_bytes().replace(struct.pack("<I", 20 * MEGABYTE), struct.pack("<I", 1000))
    path.write_bytes(content)  # it claims to be small
    with at_most(5, seconds=20):
        assert "unusual way" in refusal(path)


def test_a_zip_whose_members_share_their_bytes(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", b"\0" * MEGABYTE)
        first = archive.infolist()[0]
        for number in range(1000):  # as a hostile zip does: a directory of many entries for one content
            other = zipfile.ZipInfo(f"{number}.png")
            for field in ("compress_type", "CRC", "compress_size", "file_size", "header_offset"):
                setattr(other, field, getattr(first, field))
            archive.filelist.append(other)
            archive.NameToInfo[other.filename] = other
    assert "overlap" in refusal(path)


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_large_members_do_not_pile_up(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("dualmcmc.data.source.MOST_HELD", 16 * MEGABYTE)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    path, zeros = tmp_path / f"a.{kind}", b"\0" * (8 * MEGABYTE)
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for number in range(20):
                archive.writestr(f"{number}.png", zeros)
    else:
        with tarfile.open(path, "w:gz", compresslevel=1) as archive:
            for number in range(20):
                member = tarfile.TarInfo(f"{number}.png")
                member.size = len(zeros)
                archive.addfile(member, io.BytesIO(zeros))
    with at_most(80, seconds=60):
        assert "20 images cannot be used" in refusal(path)


def test_a_gzip_bomb_among_the_files_of_a_set(tmp_path, monkeypatch):
    monkeypatch.setattr("dualmcmc.data.bundle.MOST_UNPACKED", 20 * MEGABYTE)
    gzip_of_zeros(tmp_path / "train-images-idx3-ubyte.gz", b"", 100)
    with at_most(60, seconds=10), pytest.raises(UserError, match=r"longer than 21 MB unpacked"):
        list(read_mnist(tmp_path)["train"].images(Fit(28, 1)))


def test_names_in_an_archive_cannot_talk_to_the_terminal(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("evil\x1b]0;owned\x07\n\rname.png", b"no image")
    assert "evil\\x1b]0;owned\\x07\\n\\rname.png" in refusal(path)


def test_a_number_in_a_parquet_is_no_image(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"image": [{"bytes": 10**12}]}), path)  # bytes(10**12) is a terabyte
    assert "no column of images" in refusal(path)


# Images


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(b"\0" * ((3 * width + 1) * height) if width < 1000 else b""))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + rows + chunk(b"IEND", b"")


def test_a_png_that_claims_ten_thousand_million_pixels():
    with at_most(5, seconds=2), pytest.raises(BadImage, match="million pixels"):
        decode(png(100_000, 100_000), FIT)


@pytest.mark.parametrize("kind", [b"iCCP", b"zTXt"])
def test_a_png_with_a_bomb_beside_its_pixels(kind):
    bomb = chunk(kind, b"name\0\0" + zlib.compress(b"\0" * (100 * MEGABYTE), 1))
    with at_most(30, seconds=20):
        try:
            assert decode(png(16, 16, bomb), FIT).shape == (16, 16, 3)  # passed over
        except BadImage as error:
            assert str(error)


def test_a_file_may_be_too_long_for_an_image(tmp_path):
    folder = image_folder(tmp_path / "a", pixels(1, 16))
    with open(folder / "z.png", "wb") as file:
        file.truncate(1 << 40)  # a hole: nothing on the disk
    with at_most(20, seconds=5):
        assert "too many for an image" in refusal(folder)


def test_of_thousands_of_frames_one_is_decoded():
    frames = [Image.new("L", (64, 64), number % 256) for number in range(500)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    with at_most(20, seconds=5):
        assert decode(buffer.getvalue(), FIT).shape == (16, 16, 3)


def test_a_jpeg_of_very_many_scans():
    content = encoded(pixels(1, 16)[0], "JPEG")
    scan = content[content.index(b"\xff\xda") : -2]
    with pytest.raises(BadImage, match="scans"):
        decode(content[:-2] + scan * 300 + content[-2:], FIT)
    assert decode(content, FIT).shape == (16, 16, 3)


def test_postscript_is_not_run(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("a program in a file was run"))
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "EPS")
    with pytest.raises(BadImage, match="no known image format"):
        decode(buffer.getvalue(), FIT)
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    assert "no known image format" in refusal(tmp_path / "a.png")
    with pytest.raises(pytest.fail.Exception):  # elsewhere it would have been
        Image.open(buffer).load()


def test_large_images_are_decoded_one_at_a_time(tmp_path, monkeypatch):
    at_once, most = 0, 0
    plainly = images._plain

    def counted(image):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.02)
        at_once -= 1
        return plainly(image)

    monkeypatch.setattr(images, "_plain", counted)
    monkeypatch.setattr(images, "MANY_PIXELS", 100)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("dualmcmc.data.source.TOGETHER", 1)
    open_images(image_folder(tmp_path / "a", pixels(12, 16)), FIT)
    assert most == 1
    monkeypatch.setattr(images, "MANY_PIXELS", 1000)
    open_images(tmp_path / "a", FIT)
    assert most > 1


def test_a_tall_picture_of_cifar_is_refused_by_its_size(tmp_path):
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.png").write_bytes(png(1024, 300_000))
    with at_most(20, seconds=5), pytest.raises(UserError, match="data_batch_1"):
        list(read_cifar10(tmp_path)["train"].images(Fit(32, 3)))


# Packed files


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [1, 3, 16, float("inf")]}, "whole numbers"),
        ({"data_offsets": [0.5, 768.5]}, "whole numbers"),
        ({"data_offsets": [0, 10**15], "shape": [10**12 // 768, 3, 16, 16]}, "cut short"),
        ({"data_offsets": [-768, 0]}, "not images"),
        ({"shape": [10**400, 3, 16, 16]}, "size is wrong"),
        ({"shape": "1234"}, "damaged"),
    ],
)
def test_a_packed_file_that_claims_too_much(tmp_path, change, words):
    entry = {"dtype": "U8", "shape": [1, 3, 16, 16], "data_offsets": [0, 768]} | change
    assert words in refusal(packed(tmp_path / "a.pack", entry, {}))


@pytest.mark.parametrize("note", [{"left_out": [1]}, {"left_out": {"train": 1}}, {"crop": {}}, {"name": ["x"]}])
def test_a_packed_file_with_another_note(tmp_path, note):
    entry = {"dtype": "U8", "shape": [1, 3, 16, 16], "data_offsets": [0, 768]}
    assert "damaged" in refusal(packed(tmp_path / "a.pack", entry, note))


def packed(path: Path, entry: dict, note: dict) -> Path:
    info = {"splits": {"train": {"sha256": "x"}}} | note
    about = {"format": pack.FORMAT, "version": "1", "info": json.dumps(info)}
    header = json.dumps({"__metadata__": about, "train": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1" * 768)
    return path


def test_a_packed_file_with_an_endless_header(tmp_path):
    path = tmp_path / "a.pack"
    for content in (b"[" * 100_000, b'{"a":' * 100_000):
        path.write_bytes(struct.pack("<Q", len(content)) + content)
        assert "damaged" in refusal(path)
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "not a packed file" in refusal(path)


# The report


class Page(HTMLParser):
    """Which elements and attributes there are, and what the attributes say."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.add(tag)
        self.attributes |= {(name, (value or "")[:22]) for name, value in attributes}


BAD = "</pre></td></title><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def hostile(run: Path, values: list) -> None:
    """A run folder with `values` wherever text or numbers are looked for."""
    tensors, info = checkpoint.load(run / "snapshot.safetensors")
    info["config"] |= {"description": BAD, "preset": BAD}
    info["config"]["data"] |= {"source": "folder", "path": BAD, "split": BAD}
    checkpoint.save(run / "snapshot.safetensors", tensors, info)
    (run / "results").mkdir(exist_ok=True)
    with open(run / "log.jsonl", "a") as log:
        for value in values:
            names = ("source", "split", "images", "size", "crop", "resize", "checksum")
            about = {"device": value, "torch": value, "data": dict.fromkeys(names, value)}
            log.write(json.dumps({"kind": "start", "images": 1, **about}) + "\n")
            for kind in ("train", "save"):
                facts = {"seconds": value, "iteration": value, "energy_data": value, "reconstruction_mse": value}
                log.write(json.dumps({"kind": kind, "images": 1, **facts}) + "\n")
        log.write('{"images": ' + "9" * 5000 + "}\n" + "[" * 100_000 + "\n")
    for number, value in enumerate(values):
        keys = ("time", "command", "samples", "seed", "commit", "device", "torch", "seconds", "x_chain", "data")
        made = {"task": "evaluate", **dict.fromkeys(keys, value), "numbers": {BAD: value, "b": [value]}}
        made |= {"left_out": {BAD: value}}
        (run / "results" / f"{number}.json").write_text(json.dumps(made))


def test_nothing_in_a_run_folder_becomes_a_script(run_folder):
    hostile(run_folder, [BAD])
    path, _ = write_report(RunFolder(run_folder), "cpu")
    text = path.read_text()
    page = Page(text)
    assert page.elements == {
        *("html", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "table", "tr", "td", "th"),
        *("b", "br", "small", "code", "figure", "img", "figcaption", "pre"),
    }
    assert {name for name, _ in page.attributes} == {
        "lang",
        "charset",
        "name",
        "content",
        "class",
        "src",
        "alt",
        "http-equiv",
    }
    assert {value for name, value in page.attributes if name == "src"} == {"data:image/png;base64,"}
    assert text.count("alert(1)") >= 8  # it is all there, as text
    assert "default-src 'none'" in text  # and a browser would refuse it otherwise


ODD = [None, True, -1, 10**400, float("inf"), float("nan"), "\ud800", [], {}, [[]], {"a": {"b": BAD}}]


@pytest.mark.parametrize("values", [ODD, ODD[:4]], ids=["ends-in-a-dict", "ends-in-a-huge-number"])
def test_odd_values_in_a_run_folder_bring_no_traceback(run_folder, values):
    hostile(run_folder, values)
    path, _ = write_report(RunFolder(run_folder), "cpu")
    assert "script" not in Page(path.read_text()).elements


def test_limits_are_as_documented():
    assert images.MOST_PIXELS == 80_000_000
    assert archives.MOST_HEADER == 65_536
