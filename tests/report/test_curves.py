import pytest
import torch

from dualmcmc.report.curves import PANELS, make_figure, plot_log

LOG = [
    {"kind": "start", "images": 0},
    {"kind": "train", "images": 100, "energy_gap": 0.2, "x_displacement_rms": 0.1, "z_displacement_rms": 0.5},
    {"kind": "train", "images": 200, "energy_gap": -0.1, "x_displacement_rms": 0.2, "z_displacement_rms": 0.4},
    {"kind": "train", "images": 300, "energy_gap": "nan", "x_displacement_rms": "inf"},  # diverged
]


def panel(figure, title):
    return figure.axes[[panel.title for panel in PANELS].index(title)]


def test_curves_are_the_finite_values_of_the_log():
    figure = make_figure(LOG, {})
    (gap,) = panel(figure, "Energy gap, samples minus data").get_lines()
    assert gap.get_xydata().tolist() == [[100, 0.2], [200, -0.1]]
    x, z = panel(figure, "Chain displacement").get_lines()
    assert (x.get_label(), z.get_label()) == ("x-chain", "z-chain")
    assert z.get_xydata().tolist() == [[100, 0.5], [200, 0.4]]


@pytest.mark.parametrize(("bands", "scale"), [({}, "linear"), ({"energy_gap": (-5, 5)}, "symlog")])
def test_bands_are_shaded(bands, scale):
    figure = make_figure(LOG, bands)
    gap, displacement = panel(figure, "Energy gap, samples minus data"), panel(figure, "Chain displacement")
    assert (len(gap.patches), gap.get_yscale()) == (len(bands), scale)
    assert (len(displacement.patches), displacement.get_yscale()) == (0, "log")


def test_empty_log():
    picture = plot_log([])
    assert (picture.dtype, picture.shape[0]) == (torch.uint8, 3)
