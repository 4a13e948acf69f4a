import re
import shutil
from html.parser import HTMLParser

import pytest
import torch

import dualmcmc
from dualmcmc import data
from dualmcmc.engine import checkpoint
from dualmcmc.report.page import results_section, summarize, write_report


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.sources, self.headings, self.text, self._tag = [], [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        self._tag = tag

    def handle_data(self, text):
        self.text += text
        if self._tag == "h2":
            self.headings.append(text)
            self._tag = ""


def test_page_is_self_contained(finished_run, tmp_path):
    path, numbers = write_report(finished_run, "cpu", tmp_path / "report.html")
    assert path == tmp_path / "report.html"
    page = Page(path.read_text())
    assert page.headings == [
        "Metrics", "Samples", "MCMC revision on x", "MCMC revision on z", "Curves", "Timings and sizes", "Settings",
    ]  # fmt: skip
    assert len(page.sources) == 6
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not re.search(r"https?://", path.read_text())
    assert f"{numbers['mse_revised']:.4g}" in page.text
    for text in ("per iteration", "parameters of the energy network", "latent_dim: 4", "359 held-out images"):
        assert text in page.text


def test_run_without_its_data(finished_run, tmp_path):
    run = tmp_path / "<b>run"  # a name that must be escaped
    shutil.copytree(finished_run, run)
    tensors, info, _ = checkpoint.load(run / "snapshot.safetensors")
    info["config"]["data"] |= {"source": "folder", "path": "gone.zip"}
    checkpoint.save(run / "snapshot.safetensors", tensors, info)
    path, numbers = write_report(run, "cpu")
    assert path == run / "report.html"
    assert "gone.zip" in numbers["measured_on"]
    assert (numbers["data"]["source"], numbers["data"]["images"]) == ("digits", 1438)  # from the log
    page = Page(path.read_text())
    assert "MCMC revision on x" in page.headings
    assert "MCMC revision on z" not in page.headings
    assert "<b>run" not in path.read_text()
    assert "&lt;b&gt;run" in path.read_text()


def test_summary(finished_run):
    run = dualmcmc.load(finished_run, device="cpu")
    numbers = summarize(run, data.load(run.config.data))
    assert numbers["samples"] == 1438
    assert numbers["measured_on"] == "359 held-out images"
    assert numbers["fd_pixels_real"] == pytest.approx(0.1, abs=0.03)
    assert numbers["fd_pixels_generator"] > numbers["fd_pixels_real"]  # barely trained
    assert torch.isfinite(torch.tensor([v for v in numbers.values() if isinstance(v, float)])).all()


def result(**changes):
    return {
        "task": "evaluate",
        "time": "2026-01-01T00:00:00Z",
        "command": "dualmcmc evaluate r",
        "numbers": {},
    } | changes


def test_no_results():
    assert results_section([]) == ""
    assert results_section([result(task="unknown")]) == ""


def test_results_and_their_details():
    numbers = {"generator": {"fid": 8.934}, "ebm": {"fid": 7.861}, "energy": [1.0, 0.5, 0.25], "finite": True}
    page = results_section(
        [
            result(
                numbers=numbers,
                samples=50_000,
                seed=3,
                commit="abc",
                skipped={"is": "no classifier"},
                x_chain={"steps": 70, "step_size": 0.08},
            )
        ]
    )
    for text in ("generator fid <b>8.934</b>", "ebm fid <b>7.861</b>", "energy <b>1 to 0.25</b>", "finite <b>True</b>"):
        assert text in page
    for text in (
        "dualmcmc evaluate r",
        "50000 samples",
        "seed 3",
        "commit abc",
        "is skipped: no classifier",
        "70 steps",
    ):
        assert text in page


@pytest.mark.parametrize(
    ("task", "numbers", "chains"),
    [
        ("reconstruct", {}, "z"),
        ("sample", {}, "x"),
        ("inpaint", {}, "xz"),
        ("interpolate", {}, "z"),
        ("evaluate", {"ebm": {"fid": 8.0}, "reconstruction": {}}, "x"),
        ("evaluate", {"ebm": {}, "reconstruction": {"inference": {"mse": 0.1}}}, "z"),
        ("outliers", {"svhn": {"energy": {"auroc": 0.7}}}, ""),
        ("outliers", {"svhn": {"energy": {}, "reconstruction": {}}}, "z"),
    ],
)
def test_results_show_the_chains_that_were_used(task, numbers, chains):
    both = {"x_chain": {"steps": 70, "step_size": 0.08}, "z_chain": {"steps": 30, "step_size": 0.005}}
    page = results_section([result(task=task, numbers=numbers, images=359, **both)])
    assert ("x-chain: 70 steps of size 0.08" in page) == ("x" in chains)
    assert ("z-chain: 30 steps of size 0.005" in page) == ("z" in chains)
    assert "359 images" in page


def test_results_are_escaped():
    bad = "<script>alert(1)</script>"
    hostile = dict.fromkeys(("command", "samples", "time", "seed"), bad)
    page = results_section([result(**hostile, numbers={bad: bad}, data={"source": bad}, skipped={bad: bad})])
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 8  # a number of samples that is none is not shown
    assert results_section([result(skipped="odd", data="odd", numbers={"a": None, "b": ["x"], "c": []})])


def test_marks_that_reverse_text_are_escaped():
    bad = "\u202egnp.exe\x1b"
    page = results_section([result(command=bad, numbers={bad: bad}, data={"source": bad}, skipped={bad: bad})])
    assert "\u202e" not in page
    assert "\\u202egnp.exe" in page


def test_newest_results_first():
    page = results_section([result(time=f"2026-01-{day:02}") for day in range(1, 31)])
    assert page.index("2026-01-30") < page.index("2026-01-29")
    assert "2026-01-11" in page
    assert "2026-01-10" not in page
