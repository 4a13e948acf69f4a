import re
import shutil
from html.parser import HTMLParser

from dualmcmc.engine import checkpoint
from dualmcmc.engine.folder import RunFolder
from dualmcmc.report.page import write_report


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.addresses, self.headings, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        self._in = tag

    def handle_data(self, text):
        self.text += text
        if getattr(self, "_in", "") == "h2":
            self.headings.append(text)
            self._in = ""


def test_one_page_with_everything_inside(finished_run, tmp_path):
    path, numbers = write_report(RunFolder(finished_run), "cpu", tmp_path / "report.html")
    page = Reader()
    page.feed(path.read_text())
    assert page.headings == [
        "Numbers", "Samples", "MCMC revision on x", "MCMC revision on z", "Curves", "Timings and sizes", "Settings",
    ]  # fmt: skip
    assert len(page.addresses) == 6
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"https?://", path.read_text())
    assert f"{numbers['mse_revised']:.4g}" in page.text
    for words in ("per iteration", "parameters of the energy", "latent_dim: 4", "359 held-out images"):
        assert words in page.text


def test_a_run_whose_data_are_gone(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    _, info = checkpoint.load(run / "snapshot.safetensors")
    tensors = checkpoint.load(run / "snapshot.safetensors")[0]
    info["config"]["data"] |= {"source": "folder", "path": "gone.zip"}
    checkpoint.save(run / "snapshot.safetensors", tensors, info)
    path, numbers = write_report(RunFolder(run), "cpu")
    assert "gone.zip" in numbers["measured_on"]
    assert (numbers["data"]["source"], numbers["data"]["images"]) == ("digits", 1438)  # from the log
    page = Reader()
    page.feed(path.read_text())
    assert "MCMC revision on x" in page.headings
    assert "MCMC revision on z" not in page.headings


def test_names_are_escaped(finished_run, tmp_path):
    odd = tmp_path / "<b>run"
    shutil.copytree(finished_run, odd)
    path, _ = write_report(RunFolder(odd), "cpu")
    assert "<b>run" not in path.read_text()
    assert "&lt;b&gt;run" in path.read_text()
