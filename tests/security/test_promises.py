"""One test per promise of docs/guide/security.md that no other test covers."""

from __future__ import annotations

import gzip
import io
import json
import os
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
from dualmcmc import config_io
from dualmcmc.data import images, open_images, pack
from dualmcmc.data.formats import archives
from dualmcmc.data.formats.cifar import read_cifar10
from dualmcmc.data.formats.idx import read as read_mnist
from dualmcmc.data.images import ImageSpec, UnreadableImage, decode
from dualmcmc.engine import checkpoint
from dualmcmc.report.page import write_report
from dualmcmc.utils.errors import UserError, format_value, sanitize
from tests.conftest import assert_refused
from tests.data.makers import encoded, idx, image_folder, pixels

SPEC = ImageSpec(16, 3)
PNG = encoded(pixels(1, 16)[0])
MEGABYTE = 1 << 20


@contextmanager
def max_memory(megabytes: float):
    """The block allocates at most this much of Python's memory."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < megabytes * MEGABYTE, f"{peak / MEGABYTE:.0f} MB"


def refusal(path: Path) -> str:
    """The error message for images at `path`."""
    with pytest.raises(UserError) as error:
        open_images(path, SPEC)
    assert str(error.value).isprintable()
    return str(error.value)


# Config files


@pytest.mark.parametrize("tag", ["!!python/object/apply:pathlib.Path.touch", "!!python/object/new:pathlib.Path"])
def test_config_file_executes_nothing(call, tmp_path, tag):
    mark, path = tmp_path / "mark", tmp_path / "mine.yaml"
    path.write_text(f"description: {tag} ['{mark}']\n")
    assert_refused(call("config", path), "not valid YAML", "mine.yaml")
    assert not mark.exists()


LAUGHS = "seed:\n- &a0 [ha, ha]\n" + "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGED = "a0: &a0 {k: v}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LAUGHS, "aliases"),
        (MERGED, "aliases"),
        ("train: &a {batch: *a}", "aliases"),
        ("[" * 1_000, "nested too deeply"),
        ("a: {" * 200, "nested too deeply"),
        ("seed: 1" + ":1" * 20_000, "too long"),
        ("seed: 0x" + "f" * 300, "seed must be"),
        ("seed: " + "9" * 5000, "too long"),
        ("train: {batch: 1, batch: 2}", "duplicate key"),
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
def test_hostile_config_file_is_refused(call, tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with max_memory(100):
        answer = call("config", path)
    assert_refused(answer, message)
    assert len(answer.err) < 1000
    assert answer.err.strip().isprintable()


def test_value_cannot_inject_a_setting():
    text = "innocent\ntrain:\n  batch: 1\n\"'# \x1b[2J\u2028"
    config = config_io.from_tree({"description": text})
    again = config_io.from_tree(config_io.parse_yaml(config_io.render(config), "again"))
    assert again == config
    assert again.train.batch == config_io.from_tree({}).train.batch


def test_marks_that_reverse_text_are_not_printed(call, tmp_path):
    """In a value that `config` prints, and in a file name that `data check` lists."""
    path = tmp_path / "mine.yaml"
    path.write_text('description: "a\u202eb\u2066"\n', encoding="utf-8")
    answer = call("config", path)
    assert 'description: "a\\u202Eb\\u2066"' in answer.out
    assert config_io.from_tree(config_io.parse_yaml(answer.out, "again")).description == "a\u202eb\u2066"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "\u202egnp.png").write_bytes(b"")
    image_folder(tmp_path / "photos", np.zeros((2, 8, 8, 3), np.uint8))
    answer = call("data", "check", tmp_path / "photos", "--out", tmp_path / "sheet.png")
    assert "\\u202egnp.png" in answer.out
    assert "\u202e" not in answer.out + answer.err


def test_untrusted_text_is_printed_on_one_short_line():
    assert sanitize("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    assert len(sanitize("x" * 10**6)) < 100
    endless: list = []
    endless.append(endless)
    assert format_value(endless) == "a list of 1"
    assert format_value(16**5000).isprintable()


# Weights and arrays


class Evil:
    """Creates the file `mark` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_pickle_named_safetensors_is_not_executed(tmp_path):
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
    assert mark.exists()  # so the test can fail


def test_small_file_cannot_build_huge_networks(finished_run, tmp_path):
    tensors, info, _ = checkpoint.load(finished_run / "snapshot.safetensors")
    info["config"]["nets"] |= {"energy_width": 16384, "generator_width": 16384, "inference_width": 16384}
    info["config"]["teaching"]["latent_dim"] = 65536
    path = tmp_path / "greedy.safetensors"
    checkpoint.save(path, tensors, info)
    with max_memory(100), pytest.raises(UserError, match="does not match"):  # the networks would need 100s of GB
        dualmcmc.load(path)


def test_array_of_objects_is_not_unpickled(tmp_path):
    mark, path = tmp_path / "mark", tmp_path / "a.npz"
    array = np.empty(1, object)
    array[0] = Evil(mark)
    np.savez(path, images=array)
    assert "pickled objects" in refusal(path)
    assert not mark.exists()
    assert np.load(path, allow_pickle=True)["images"] is not None
    assert mark.exists()


def test_claimed_array_shape_allocates_no_memory(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (9000000, 1000, 1000, 3)}"
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 100)
    with max_memory(10):
        assert "does not match the shape" in refusal(path)


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
def test_tar_with_a_huge_header(tmp_path, kind):
    path = tmp_path / "a.tar.gz"
    gzip_of_zeros(path, tar_header("x", 100 * MEGABYTE, kind), 100)
    assert path.stat().st_size < MEGABYTE
    with max_memory(20):
        assert "header that is too long" in refusal(path)


def test_tar_of_nested_headers(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_header("x", 0, tarfile.XHDTYPE) * 3000)
    assert "cannot read" in refusal(path)


def test_tar_with_many_members(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_header("x.txt", 0, tarfile.REGTYPE) * 4000)
    with max_memory(0.5):  # tarfile would keep the members, 2 MB
        assert sum(1 for _ in archives.tar_members(path)) == 4000
    assert "contains no images" in refusal(path)


def test_sparse_tar(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_header("x.png", 0, tarfile.GNUTYPE_SPARSE) + b"\0" * 1024)
    assert "sparse" in refusal(path)


def test_official_archives_write_nothing_and_follow_no_links(tmp_path):
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
    assert len(list(found["train"].images(ImageSpec(28, 1)))) == 3
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_with_a_false_size(tmp_path, method):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.png", b"\0" * (20 * MEGABYTE))
    content = path.read_bytes().replace(struct.pack("<I", 20 * MEGABYTE), struct.pack("<I", 1000))
    path.write_bytes(content)
    with max_memory(5):
        assert "unsupported compression" in refusal(path)


def test_zip_with_overlapping_members(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", b"\0" * MEGABYTE)
        first = archive.infolist()[0]
        for number in range(1000):  # many entries with the same content
            other = zipfile.ZipInfo(f"{number}.png")
            for field in ("compress_type", "CRC", "compress_size", "file_size", "header_offset"):
                setattr(other, field, getattr(first, field))
            archive.filelist.append(other)
            archive.NameToInfo[other.filename] = other
    assert "overlap" in refusal(path)


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_readahead_of_large_members_is_bounded(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("dualmcmc.data.source.MAX_READAHEAD", 16 * MEGABYTE)
    monkeypatch.setattr("dualmcmc.data.source.cpu_count", lambda: 16)
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
    with max_memory(80):
        assert "20 images cannot be used" in refusal(path)


def test_gzip_bomb_in_official_files(tmp_path, monkeypatch):
    monkeypatch.setattr("dualmcmc.data.formats.official.MAX_GUNZIPPED", 20 * MEGABYTE)
    gzip_of_zeros(tmp_path / "train-images-idx3-ubyte.gz", b"", 100)
    with max_memory(60), pytest.raises(UserError, match=r"larger than 21 MB unpacked"):
        list(read_mnist(tmp_path)["train"].images(ImageSpec(28, 1)))


def test_control_characters_in_names_are_escaped(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("evil\x1b]0;owned\x07\n\rname.png", b"no image")
    assert "evil\\x1b]0;owned\\x07\\n\\rname.png" in refusal(path)


def test_integer_in_a_parquet_is_not_an_image(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"image": [{"bytes": 10**12}]}), path)  # bytes(10**12) would allocate a terabyte
    assert "no column of encoded images" in refusal(path)


# Images


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(b"\0" * ((3 * width + 1) * height) if width < 1000 else b""))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + rows + chunk(b"IEND", b"")


def test_png_that_claims_ten_billion_pixels():
    with max_memory(5), pytest.raises(UnreadableImage, match="million pixels"):
        decode(png(100_000, 100_000), SPEC)


@pytest.mark.parametrize("kind", [b"iCCP", b"zTXt"])
def test_png_with_a_bomb_in_a_chunk(kind):
    bomb = chunk(kind, b"name\0\0" + zlib.compress(b"\0" * (100 * MEGABYTE), 1))
    with max_memory(30):
        try:
            assert decode(png(16, 16, bomb), SPEC).shape == (16, 16, 3)  # ignored
        except UnreadableImage as error:
            assert str(error)


def test_huge_image_file_is_not_read(tmp_path):
    folder = image_folder(tmp_path / "a", pixels(1, 16))
    with open(folder / "z.png", "wb") as file:
        file.truncate(1 << 40)  # sparse: takes no space on the disk
    with max_memory(20):
        assert "too many for an image" in refusal(folder)


def test_only_the_first_frame_is_decoded():
    frames = [Image.new("L", (64, 64), number % 256) for number in range(500)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    with max_memory(20):
        assert decode(buffer.getvalue(), SPEC).shape == (16, 16, 3)


def test_jpeg_with_many_scans():
    content = encoded(pixels(1, 16)[0], "JPEG")
    scan = content[content.index(b"\xff\xda") : -2]
    with pytest.raises(UnreadableImage, match="scans"):
        decode(content[:-2] + scan * 300 + content[-2:], SPEC)
    assert decode(content, SPEC).shape == (16, 16, 3)


def test_postscript_is_not_executed(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("Ghostscript was called"))
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "EPS")
    with pytest.raises(UnreadableImage, match="unknown image format"):
        decode(buffer.getvalue(), SPEC)
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    assert "unknown image format" in refusal(tmp_path / "a.png")
    with pytest.raises(pytest.fail.Exception):  # so the test can fail
        Image.open(buffer).load()


def test_large_images_are_decoded_one_at_a_time(tmp_path, monkeypatch):
    running, max_running = 0, 0
    real = images._to_8_bit

    def count(image):
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        time.sleep(0.02)
        running -= 1
        return real(image)

    monkeypatch.setattr(images, "_to_8_bit", count)
    monkeypatch.setattr(images, "SERIAL_PIXELS", 100)
    monkeypatch.setattr("dualmcmc.data.source.cpu_count", lambda: 8)
    monkeypatch.setattr("dualmcmc.data.source.FILES_PER_TASK", 1)
    open_images(image_folder(tmp_path / "a", pixels(12, 16)), SPEC)
    assert max_running == 1
    monkeypatch.setattr(images, "SERIAL_PIXELS", 1000)
    open_images(tmp_path / "a", SPEC)
    assert max_running > 1


def test_cifar_png_with_too_many_rows(tmp_path):
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.png").write_bytes(png(1024, 300_000))
    with max_memory(20), pytest.raises(UserError, match="data_batch_1"):
        list(read_cifar10(tmp_path)["train"].images(ImageSpec(32, 3)))


# Packed files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [1, 3, 16, float("inf")]}, "not an integer"),
        ({"data_offsets": [0.5, 768.5]}, "not an integer"),
        ({"data_offsets": [0, 10**15], "shape": [10**12 // 768, 3, 16, 16]}, "truncated"),
        ({"data_offsets": [-768, 0]}, "does not contain images"),
        ({"shape": [10**400, 3, 16, 16]}, "does not match its shape"),
        ({"shape": "1234"}, "damaged"),
    ],
)
def test_packed_file_with_false_sizes(tmp_path, change, message):
    entry = {"dtype": "U8", "shape": [1, 3, 16, 16], "data_offsets": [0, 768]} | change
    assert message in refusal(packed(tmp_path / "a.pack", entry, {}))


@pytest.mark.parametrize("info", [{"skipped": [1]}, {"left_out": {"train": 1}}, {"crop": {}}, {"name": ["x"]}])
def test_packed_file_with_invalid_info(tmp_path, info):
    entry = {"dtype": "U8", "shape": [1, 3, 16, 16], "data_offsets": [0, 768]}
    assert "damaged" in refusal(packed(tmp_path / "a.pack", entry, info))


def packed(path: Path, entry: dict, info: dict) -> Path:
    info = {"splits": {"train": {"sha256": "x"}}} | info
    metadata = {"format": pack.FORMAT, "version": "1", "info": json.dumps(info)}
    header = json.dumps({"__metadata__": metadata, "train": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1" * 768)
    return path


def test_packed_file_with_a_huge_header(tmp_path):
    path = tmp_path / "a.pack"
    for content in (b"[" * 100_000, b'{"a":' * 100_000):
        path.write_bytes(struct.pack("<Q", len(content)) + content)
        assert "damaged" in refusal(path)
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "not a packed file" in refusal(path)


# The report


class Page(HTMLParser):
    """The elements and attributes of a page."""

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
    """Write `values` wherever the report reads text or numbers."""
    tensors, info, _ = checkpoint.load(run / "snapshot.safetensors")
    info["config"] |= {"description": BAD, "preset": BAD}
    info["config"]["data"] |= {"source": "folder", "path": BAD, "split": BAD}
    checkpoint.save(run / "snapshot.safetensors", tensors, info)
    (run / "results").mkdir(exist_ok=True)
    with open(run / "log.jsonl", "a") as log:
        for value in values:
            names = ("source", "split", "images", "size", "crop", "resize", "checksum")
            start = {"device": value, "torch": value, "data": dict.fromkeys(names, value)}
            log.write(json.dumps({"kind": "start", "images": 1, **start}) + "\n")
            for kind in ("train", "save"):
                stats = {"seconds": value, "iteration": value, "energy_data": value, "reconstruction_mse": value}
                log.write(json.dumps({"kind": kind, "images": 1, **stats}) + "\n")
        log.write('{"images": ' + "9" * 5000 + "}\n" + "[" * 100_000 + "\n")
    for number, value in enumerate(values):
        keys = ("time", "command", "samples", "seed", "commit", "device", "torch", "seconds", "x_chain", "data")
        record = {"task": "evaluate", **dict.fromkeys(keys, value), "numbers": {BAD: value, "b": [value]}}
        record |= {"left_out": {BAD: value}, "skipped": {BAD: value}}
        (run / "results" / f"{number}.json").write_text(json.dumps(record))


@pytest.fixture
def no_curves(monkeypatch):
    """Drawing the curves takes most of the time of a report."""
    monkeypatch.setattr("dualmcmc.report.curves.render", lambda figure: torch.zeros(3, 8, 8, dtype=torch.uint8))


@pytest.mark.usefixtures("no_curves")
def test_report_contains_no_script(run_folder):
    hostile(run_folder, [BAD])
    path, _ = write_report(run_folder, "cpu")
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
    assert text.count("alert(1)") >= 8  # all of it is there, as text
    assert "default-src 'none'" in text  # and a browser would not execute it


ODD = [None, True, -1, 10**400, float("inf"), float("nan"), "\ud800", [], {}, [[]], {"a": {"b": BAD}}]


def test_report_of_odd_values(run_folder):
    hostile(run_folder, ODD)
    path, _ = write_report(run_folder, "cpu")
    assert "script" not in Page(path.read_text()).elements


@pytest.mark.usefixtures("no_curves")
def test_report_of_a_huge_number(run_folder):
    hostile(run_folder, ODD[:4])  # the last entry of the log has a section of its own
    path, _ = write_report(run_folder, "cpu")
    assert "script" not in Page(path.read_text()).elements


def test_documented_limits():
    assert images.MAX_PIXELS == 80_000_000
    assert archives.MAX_TAR_HEADER == 65_536


@pytest.mark.parametrize("kind", ["pipe", "endless"])
@pytest.mark.parametrize(
    ("file", "commands"),
    [
        ("log.jsonl", [("doctor",), ("report",)]),
        ("snapshot.safetensors", [("export", "--out", "a.safetensors"), ("sample", "-n", 2), ("report",)]),
    ],
)
def test_special_files_in_a_run_folder_are_refused(
    call, run_folder, tmp_path, monkeypatch, no_curves, kind, file, commands
):
    monkeypatch.chdir(tmp_path)
    path = run_folder / file
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    for command, *options in commands:
        assert_refused(call(command, run_folder, *options), file)


def test_special_files_among_the_records_are_skipped(call, run_folder, no_curves):
    (run_folder / "results").mkdir()
    os.mkfifo(run_folder / "results" / "a.json")
    (run_folder / "results" / "b.json").symlink_to("/dev/zero")
    assert call("report", run_folder).code == 0
