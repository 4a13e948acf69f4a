import re
from html.parser import HTMLParser

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


def test_names_are_escaped(finished_run, tmp_path):
    import shutil

    odd = tmp_path / "<b>run"
    shutil.copytree(finished_run, odd)
    path, _ = write_report(RunFolder(odd), "cpu")
    assert "<b>run" not in path.read_text()
    assert "&lt;b&gt;run" in path.read_text()
