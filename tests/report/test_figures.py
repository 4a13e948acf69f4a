import torch

from dualmcmc.engine.journal import read
from dualmcmc.report import figures


def test_curves_show_the_log(finished_run):
    log = read(finished_run / "log.jsonl")
    assert figures.curves(log) != figures.curves([])
    assert figures.curves(log) == figures.curves(log)
    assert figures.curves([*log, {"kind": "train", "images": 999, "energy_gap": "nan"}])  # a diverged run's last line


def test_a_picture_is_part_of_the_page():
    assert figures.picture(torch.zeros(3, 4, 5, dtype=torch.uint8)).startswith("data:image/png;base64,")
