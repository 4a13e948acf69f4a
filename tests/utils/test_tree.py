from dataclasses import dataclass, field

import numpy as np
import torch

from dualmcmc.utils.tree import Tree


@dataclass
class Inner(Tree):
    rate: float = 0.1234567
    on: bool = True
    name: str | None = None


@dataclass
class Outer(Tree):
    inner: Inner = field(default_factory=Inner)
    numbers: dict = field(default_factory=lambda: {"fid": 7.5, "by mask": {"M20": 1}, "none": {}})
    images: torch.Tensor = field(default_factory=lambda: torch.zeros(2, 3))
    array: np.ndarray = field(default_factory=lambda: np.zeros(4, np.uint8))
    steps: list = field(default_factory=lambda: list(range(10)))
    text: str = "a\x1b[31mb"
    by_name: dict = field(default_factory=lambda: {"a\x1bb": 1})


SHOWN = r"""inner:
  rate: 0.123457
  on: true
  name: null
numbers:
  fid: 7.5
  by mask:
    M20: 1
  none: {}
images: Tensor (2, 3), float32
array: ndarray (4,), uint8
steps: [0, 1, 2, 3, 4, 5, 6, 7, ... (10 in all)]
text: a\x1b[31mb
by_name:
  a\x1bb: 1"""


def test_tree():
    assert str(Outer()) == SHOWN
    assert repr(Inner()) == "Inner(rate=0.1234567, on=True, name=None)"  # as of any dataclass


def test_ipython_shows_the_tree():
    class Printer:
        def text(self, text):
            self.shown = text

    assert "_repr_pretty_" in vars(Outer)  # or IPython would use the class's own __repr__
    printer = Printer()
    Outer()._repr_pretty_(printer, False)
    assert printer.shown == SHOWN
