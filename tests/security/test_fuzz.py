"""Fuzz tests with Hypothesis: any file or argument gives a valid result or a one-line error.

`pytest tests/security` runs a few hundred cases, always the same; DUALMCMC_FAULTS=long runs tens of thousands,
different each time.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import struct
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, features

import dualmcmc
from dualmcmc import cli, config_io
from dualmcmc.config import Config
from dualmcmc.data import images, open_images, pack, safe_pickle
from dualmcmc.data.formats.idx import parse_idx
from dualmcmc.data.images import ImageSpec
from dualmcmc.engine import checkpoint
from dualmcmc.engine.log import read_log
from dualmcmc.report.page import results_section
from dualmcmc.tasks.results import read_all
from dualmcmc.utils.errors import UserError
from tests.data.makers import cifar_batch, idx, pixels
from tests.security import cases
from tests.security.cases import any_of, damaged, fuzz, json_values, valid_or_refused

SPEC = ImageSpec(16, 3)


@pytest.fixture(autouse=True, scope="module")
def _low_pixel_limit():
    """Damaged images often claim many pixels; a lower limit makes decoding them quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "MAX_PIXELS", 1_000_000)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


# Arguments and config files


def run_command(*arguments: str) -> tuple[int, str, str]:
    """Run the command in this process: exit code, standard output, standard error."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["dualmcmc", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue(), err.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("the command did not end with an exit code")


NASTY = [
    *("", "null", "~", "nan", ".inf", "-.inf", "1e999", "1_0", "0x" + "f" * 400, "1:2:3", "9" * 5000, "-0", "1e-400"),
    *("!!int ''", "!!float ''", "!!bool x", "!!timestamp x", "!!binary x", "!!python/name:os.system", "!!set {a}"),
    *("&a [*a]", "[" * 400, "{a: " * 50, "*x", "<<: {a: 1}", "? [a]", "2001-99-99", "=", "'", '"\\x', "%YAML 9", "\t"),
    *("\x1b[2J", "a\nb", "\udce9", "\u2028", "..", "/dev/zero", "[0.5, .nan]", "[1, [2]]", "true", "'\\0'", '"\\0"'),
]
texts = st.one_of(st.text(max_size=30), st.sampled_from(NASTY), st.floats().map(str), st.integers().map(str))
keys = st.one_of(st.sampled_from(sorted(config_io.setting_names())), st.text(max_size=20))
overrides = st.builds("{}={}".format, keys, texts).filter(lambda word: "\0" not in word and not word.startswith("-"))


@fuzz(0.25)
@given(st.lists(overrides, min_size=1, max_size=3), st.booleans())
def test_overrides(words, as_json):
    cases.run += 1
    code, out, err = run_command("config", *words, *(["--json"] if as_json else []))
    if code == 0:
        assert out
        assert err == ""
    else:
        assert code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1
        assert err.rstrip("\n").isprintable(), err
        assert len(err) < 5000


def mapping(inner):
    names = st.sampled_from([part for name in config_io.setting_names() for part in name.split(".")] + ["extends"])
    return st.dictionaries(st.one_of(names, st.text(max_size=8)), inner, max_size=4)


trees = st.recursive(st.one_of(json_values(3), texts), mapping, max_leaves=15)
PRESETS = {name: (Path(config_io.__file__).parent / "presets" / f"{name}.yaml").read_bytes() for name in ("digits",)}
files = st.one_of(
    mapping(trees).map(lambda tree: yaml.safe_dump(tree).encode()),
    st.builds("{}: {}\n".format, keys, texts).map(lambda text: text.encode(errors="surrogatepass")),
    st.lists(st.sampled_from([*NASTY, "a:", " ", "\n", "- ", "train:", "&x", ": "]), max_size=12).map(
        lambda parts: "".join(parts).encode(errors="surrogatepass")
    ),
    st.binary(max_size=60),
    any_of(PRESETS).map(lambda found: found[1]),
)


@fuzz(0.75)
@given(files)
def test_config_files(folder, content):
    path = folder / "mine.yaml"
    path.write_bytes(content)
    with valid_or_refused():
        config = config_io.load_config(str(path))
        assert isinstance(config, Config)
        again = config_io.from_tree(config_io.parse_yaml(config_io.render(config), "again"))
        assert again == config  # no value can inject another setting


@fuzz(0.25)
@given(st.text(max_size=60), st.text(max_size=60))
def test_text_survives_a_round_trip(description, split):
    with valid_or_refused():
        config = config_io.from_tree({"description": description, "data": {"split": split}})
        assert config_io.from_tree(config_io.parse_yaml(config_io.render(config), "again")) == config


# Checkpoints

dtypes = st.one_of(
    st.sampled_from(["F32", "F64", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64"]), st.text(max_size=4)
)
sizes = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**62, 2**63, 2**64 - 1, 10**30]), json_values(2))
tensor_entries = st.one_of(
    st.fixed_dictionaries(
        {"dtype": dtypes, "shape": st.lists(sizes, max_size=4), "data_offsets": st.lists(sizes, max_size=3)}
    ),
    json_values(4),
)
metadata = st.one_of(
    st.fixed_dictionaries(
        {
            "format": st.sampled_from(["dualmcmc", "pt"]),
            "version": st.sampled_from([str(checkpoint.VERSION), "1", "99", "x"]),
            "info": st.one_of(json_values(4).map(json.dumps), st.text(max_size=20), st.just("[" * 5000)),
        },
        optional={"sha256": st.one_of(st.just("0" * 64), st.text(max_size=70))},
    ),
    json_values(4),
)
headers = st.one_of(
    st.builds(
        lambda tensors, metadata: tensors | {"__metadata__": metadata},
        st.dictionaries(st.text(max_size=6), tensor_entries, max_size=3),
        metadata,
    ),
    json_values(),
)


def safetensors_file(header, length_error, body):
    text = json.dumps(header).encode()
    return struct.pack("<Q", max(0, min(2**64 - 1, len(text) + length_error))) + text + body


invalid = st.one_of(
    st.binary(max_size=200),
    st.builds(safetensors_file, headers, st.sampled_from([0, 0, 0, 1, -1, 2**40]), st.binary(max_size=64)),
    st.just(struct.pack("<Q", 60_000) + b"[" * 60_000),
    st.just(pickle.dumps({"a": 1})),
)


def load_checkpoint(path):
    """Load a file in every way that a checkpoint is loaded."""
    for read in (checkpoint.load, checkpoint.load_info, dualmcmc.load):
        with valid_or_refused():
            read(path)


@fuzz()
@given(invalid)
def test_invalid_checkpoints(folder, content):
    path = folder / "invalid.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError):
        checkpoint.load(path)
    load_checkpoint(path)


@fuzz()
@given(st.data())
def test_damaged_checkpoints(folder, finished_run, data):
    content = (finished_run / "snapshot.safetensors").read_bytes()
    changed = data.draw(damaged(content))
    path = folder / "damaged.safetensors"
    path.write_bytes(changed)
    if changed != content:
        with pytest.raises(UserError):
            checkpoint.load(path)
    load_checkpoint(path)


def paths(tree, prefix=()):
    for key, value in tree.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, key))


small = st.one_of(json_values(4), st.sampled_from([1, 2, 8, 16, 64, "resnet", "simple", None, [], {}]))


@fuzz(0.3)
@given(st.data())
def test_modified_checkpoints(folder, finished_run, data):
    """With a valid checksum, but other settings or tensors than training wrote."""
    tensors, info, _ = checkpoint.load(finished_run / "snapshot.safetensors")
    if data.draw(st.booleans()):
        where = data.draw(st.sampled_from(sorted(paths(info), key=str)))
        node = info
        for part in where[:-1]:
            node = node[part]
        if data.draw(st.booleans()):
            node[where[-1]] = data.draw(small)
        else:
            del node[where[-1]]
    else:
        name = data.draw(st.sampled_from(sorted(tensors)))
        kind = data.draw(st.sampled_from([torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]))
        change = data.draw(st.sampled_from(["drop", "type", "shape", "nan", "rename"]))
        old = tensors.pop(name)
        if change == "type":
            tensors[name] = old.to(kind)
        elif change == "shape":
            tensors[name] = torch.zeros(data.draw(st.lists(st.integers(0, 3), max_size=4)))
        elif change == "nan":
            tensors[name] = torch.full_like(old.float(), float("nan"))
        elif change == "rename":
            tensors[data.draw(st.text(max_size=10).filter(str.isprintable))] = old
    path = folder / "modified.safetensors"
    checkpoint.save(path, tensors, info)
    load_checkpoint(path)


# Images and containers


def encoded(kind, **options):
    image = Image.fromarray(pixels(1, 24)[0]).convert(options.pop("mode", "RGB"))
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pictures():
    exif = Image.Exif()
    exif[0x0112] = 6
    found = {
        "a.png": encoded("PNG"),
        "grey.png": encoded("PNG", mode="L"),
        "palette.png": encoded("PNG", mode="P"),
        "alpha.png": encoded("PNG", mode="RGBA", exif=exif),
        "a.jpg": encoded("JPEG", exif=exif),
        "progressive.jpg": encoded("JPEG", progressive=True),
        "a.gif": encoded("GIF"),
        "two.gif": encoded("GIF", save_all=True, append_images=[Image.new("RGB", (24, 24))]),
        "a.bmp": encoded("BMP"),
        "palette.bmp": encoded("BMP", mode="P"),
        "a.tif": encoded("TIFF"),
        "lzw.tif": encoded("TIFF", compression="tiff_lzw"),
        "deflate.tif": encoded("TIFF", compression="tiff_adobe_deflate"),
        "a.ppm": encoded("PPM"),
        "a.tga": encoded("TGA", compression="tga_rle"),
    }
    for name, kind, feature in (
        ("a.webp", "WEBP", "webp"),
        ("a.jp2", "JPEG2000", "jpg_2000"),
        ("a.avif", "AVIF", "avif"),
    ):
        if features.check(feature):
            found[name] = encoded(kind)
    return found


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


def open_or_refuse(path):
    with valid_or_refused():
        store = open_images(path, SPEC)
        assert store.shape[1:] == (3, 16, 16)
        assert len(store.tensor()) == len(store)


@fuzz()
@given(any_of(pictures()))
def test_damaged_images(folder, found):
    open_or_refuse(written(folder, *found))


def archives():
    png = encoded("PNG")
    found = {}
    for name, method in (
        ("stored.zip", zipfile.ZIP_STORED),
        ("a.zip", zipfile.ZIP_DEFLATED),
        ("b.zip", zipfile.ZIP_BZIP2),
    ):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as archive:
            for entry in ("a.png", "../b.png"):
                archive.writestr(entry, png)
        found[name] = buffer.getvalue()
    for name, mode, kind in (
        ("a.tar", "w", tarfile.PAX_FORMAT),
        ("gnu.tar", "w", tarfile.GNU_FORMAT),
        ("a.tar.gz", "w:gz", tarfile.PAX_FORMAT),
        ("a.tar.xz", "w:xz", tarfile.PAX_FORMAT),
        ("a.tar.bz2", "w:bz2", tarfile.PAX_FORMAT),
    ):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=mode, format=kind) as archive:
            for entry in ("a.png", "b" * 120 + "é.png"):
                member = tarfile.TarInfo(entry)
                member.size = len(png)
                archive.addfile(member, io.BytesIO(png))
        found[name] = buffer.getvalue()
    for name, save in (("a.npz", np.savez), ("b.npz", np.savez_compressed)):
        buffer = io.BytesIO()
        save(buffer, images=pixels(2, 16))
        found[name] = buffer.getvalue()
    return found


@fuzz()
@given(any_of(archives()))
def test_damaged_archives(folder, found):
    open_or_refuse(written(folder, *found))


npy_headers = st.fixed_dictionaries(
    {
        "descr": st.one_of(st.sampled_from(["|u1", "|O", "<f8", "|V9999999", "<U5"]), json_values(3)),
        "fortran_order": st.one_of(st.booleans(), json_values(2)),
        "shape": st.one_of(st.lists(sizes, max_size=5).map(tuple), json_values(2)),
    }
)


@fuzz()
@given(st.one_of(npy_headers.map(repr), st.text(max_size=60)), st.binary(max_size=60))
def test_invalid_arrays(folder, header, body):
    text = header.encode("latin1", "replace")
    path = folder / "invalid.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body)
    open_or_refuse(path)


def a_pack():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pack"
        parts = pixels(3, 16).transpose(0, 3, 1, 2)
        pack.write(
            path,
            {"train": parts, "test": parts[:1]},
            (3, 16, 16),
            {"name": "folder", "crop": "center", "resize": "lanczos"},
        )
        return path.read_bytes()


PACK = a_pack()
pack_metadata = st.fixed_dictionaries(
    {
        "format": st.just(pack.FORMAT),
        "version": st.one_of(st.just("1"), json_values(2)),
        "info": st.one_of(
            st.builds(
                lambda base, more: json.dumps(base | more),
                st.just({"splits": {"train": {"sha256": "x"}}}),
                st.dictionaries(
                    st.sampled_from(["name", "crop", "resize", "skipped", "left_out", "splits", "stamp"]),
                    json_values(4),
                    max_size=3,
                ),
            ),
            json_values(3).map(json.dumps),
            json_values(3),
        ),
    }
)
pack_headers = st.builds(
    lambda metadata, entry: {"__metadata__": metadata, "train": entry},
    st.one_of(pack_metadata, json_values(4)),
    st.one_of(tensor_entries, st.just({"dtype": "U8", "shape": [1, 3, 16, 16], "data_offsets": [0, 768]})),
)


@fuzz()
@given(
    st.one_of(
        damaged(PACK),
        damaged(PACK[:1200]).map(lambda start: start + PACK[1200:]),
        st.builds(safetensors_file, pack_headers, st.sampled_from([0, 0, 1, 2**40]), st.just(b"\1" * 768)),
    )
)
def test_damaged_packed_files(folder, content):
    open_or_refuse(written(folder, "a.pack", content))


@fuzz()
@given(st.one_of(*(damaged(cifar_batch(pixels(2), protocol)) for protocol in range(5))))
def test_damaged_pickles(content):
    with valid_or_refused():
        safe_pickle.read(content, "data_batch_1")


@fuzz()
@given(damaged(idx(pixels(2, 8, 1))))
def test_damaged_idx_files(content):
    with valid_or_refused():
        parse_idx(content, "train-images")


# Logs and records

lines = st.one_of(
    json_values().map(json.dumps),
    st.dictionaries(st.sampled_from(["images", "kind", "seconds", "data", "iteration"]), json_values(3)).map(
        json.dumps
    ),
    st.sampled_from(['{"images": ' + "9" * 5000 + "}", "[" * 5000, '{"images": NaN}', "\ud800", "\0"]),
    st.text(max_size=30),
)


@fuzz()
@given(st.lists(lines, max_size=5), st.binary(max_size=10))
def test_logs(folder, found, tail):
    path = folder / "log.jsonl"
    path.write_bytes("\n".join(found).encode(errors="surrogatepass") + tail)
    with valid_or_refused():
        for entry in read_log(path):
            assert isinstance(entry["images"], int)


FACTS = ("skipped", "left_out", "command", "samples", "x_chain", "seed", "data", "commit")
records = st.fixed_dictionaries(
    {"task": st.one_of(st.just("evaluate"), json_values(2)), "time": json_values(2), "numbers": json_values(5)},
    optional={key: json_values(4) for key in FACTS},
)


@fuzz()
@given(st.one_of(records, json_values()))
def test_records(folder, content):
    results = folder / "results"
    results.mkdir(exist_ok=True)
    (results / "a.json").write_text(json.dumps(content))
    with valid_or_refused():
        page = results_section(read_all(results))
        page.encode(errors="xmlcharrefreplace")
        assert "<script" not in page
