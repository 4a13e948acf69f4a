"""Data given in Python: every form gives the same store, and mistakes are answered in one line."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dualmcmc import UserError
from dualmcmc.config import Data
from dualmcmc.data import custom, fingerprint
from dualmcmc.data.custom import DatasetStore, as_store, load_custom
from dualmcmc.data.images import ImageSpec
from dualmcmc.utils.images import from_uint8

PIXELS = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SPEC = ImageSpec(8, 3)


class Items(Dataset):
    """A map-style dataset of what `make` returns for an index."""

    def __init__(self, make, count=12):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:
            raise IndexError(index)
        return self.make(index)


class Column:
    """As a column of a Hugging Face dataset: a length and items, no Dataset."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


def pil(index):
    return Image.fromarray(PIXELS[index].permute(1, 2, 0).numpy())


FORMS = {
    "uint8 tensor": PIXELS,
    "float tensor": from_uint8(PIXELS),
    "float64 array": from_uint8(PIXELS).double().numpy(),
    "channels last": PIXELS.permute(0, 2, 3, 1),
    "array": PIXELS.numpy(),
    "negative strides": PIXELS.numpy()[::-1].copy()[::-1],
    "list of tensors": list(PIXELS),
    "list of PIL images": [pil(index) for index in range(12)],
    "dataset": Items(lambda index: PIXELS[index]),
    "dataset with labels": TensorDataset(from_uint8(PIXELS), torch.arange(12)),
    "dataset of PIL images": Items(lambda index: (pil(index), 3)),
    "column": Column([pil(index) for index in range(12)]),
    "loader": DataLoader(TensorDataset(PIXELS, torch.arange(12)), batch_size=5, shuffle=True),
    "batches": [PIXELS[:5], PIXELS[5:]].__iter__(),
    "batches with labels": ((PIXELS[i : i + 4], torch.zeros(4)) for i in (0, 4, 8)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_images(form):
    store = as_store(FORMS[form], SPEC)
    assert torch.equal(store.tensor(), PIXELS)
    assert fingerprint(store) == fingerprint(as_store(PIXELS, SPEC))


def test_samples_that_are_not_images():
    points = torch.randn(20, 5)
    for form in (points, points.double().numpy(), list(points), TensorDataset(points)):
        store = as_store(form, SPEC)
        assert store.dtype == torch.float32
        assert torch.equal(store.tensor(), points)


def test_greyscale_without_channel_axis():
    assert torch.equal(as_store(PIXELS[:, 0], SPEC).tensor(), PIXELS[:, :1])


def test_datasets_that_do_not_fit_are_read_as_needed(monkeypatch):
    monkeypatch.setattr(custom, "available_memory", lambda: 100)
    read = []
    store = as_store(Items(lambda index: read.append(index) or PIXELS[index]), SPEC)
    assert isinstance(store, DatasetStore)
    assert set(read) == set(range(8))  # to see whether they are random
    assert torch.equal(store.take([3, 11]), PIXELS[[3, 11]])
    assert store.checksum == as_store(Items(lambda index: PIXELS[index]), SPEC).checksum
    other = PIXELS.clone()
    other[5, 0, 0, 0] ^= 1
    assert store.checksum != as_store(Items(lambda index: other[index]), SPEC).checksum
    with pytest.raises(UserError, match="does not fit into memory"):
        as_store(iter([PIXELS]), SPEC)


def test_settings_describe_the_data():
    cfg, splits = load_custom(Data(source="digits", size=32, channels=1, path=None), PIXELS, PIXELS[:2])
    assert (cfg.source, cfg.channels, cfg.size, cfg.shape) == ("custom", 3, 8, None)
    assert cfg.sample_shape == (3, 8, 8)
    assert len(splits.train) == 12
    assert splits.test is not None
    assert len(splits.test) == 2
    cfg, splits = load_custom(Data(holdout=0.25), torch.randn(8, 2))
    assert (cfg.sample_shape, cfg.is_image, cfg.noun) == ((2,), False, "samples")
    assert (len(splits.train), len(splits.test)) == (6, 2)
    cfg, _ = load_custom(Data(), torch.zeros(4, 3, 10, 12))  # images that our own networks do not support
    assert (cfg.sample_shape, cfg.is_image) == ((3, 10, 12), True)
    assert load_custom(Data(holdout=0.25), torch.randn(8, 2), torch.randn(3, 2))[0].holdout == 0


def test_note_on_floats_from_0_to_1():
    _, splits = load_custom(Data(), torch.rand(9, 1, 8, 8))
    assert "must be in [-1, 1], not [0, 1]" in splits.notes[0]
    assert load_custom(Data(), from_uint8(PIXELS))[1].notes == ()


def random_item(index):
    return torch.rand(2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.rand(5, 3, 8, 8) * 255, "pass pixels from 0 to 255 as uint8"),
        (torch.full((5, 2), float("nan")), "not finite"),
        (torch.zeros(5), "at least one dimension"),
        (torch.zeros(5, 2, dtype=torch.int64), "must be uint8 images or floats, not int64"),
        (torch.zeros(5, 4, 8, 8, dtype=torch.uint8), "images with 1 or 3 channels"),
        (torch.zeros(0, 2), "contain no samples"),
        ([], "is empty"),
        (iter([]), "yields no batches"),
        (7, "not int"),
        (np.array(["a", "b"]), "arrays of"),
        (Items(random_item), "item 0 of the dataset is not the same each time"),
        (Items(lambda index: {"image": pil(index), "label": 1}), "dictionaries with 'image', 'label': pass one column"),
        (Items(lambda index: torch.zeros(2 + (index == 9))), "item 9 of the dataset is float32 of shape (3,)"),
        (Items(lambda index: 1 / 0), "cannot be read (ZeroDivisionError: division by zero)"),
        (Items(lambda index: "text"), "not str"),
        (iter([torch.zeros(3, 2), torch.zeros(3, 4)]), "yields samples that differ"),
    ],
)
def test_mistakes(data, message):
    with pytest.raises(UserError) as refused:
        as_store(data, SPEC)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_test_data_of_another_shape():
    with pytest.raises(UserError, match=r"shape \(2,\), test samples \(3,\)"):
        load_custom(Data(), torch.zeros(5, 2), torch.zeros(5, 3))
