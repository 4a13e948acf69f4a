"""Data given in Python: every form gives the same store, and mistakes are answered in one line."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dualmcmc import UserError
from dualmcmc.config import Data
from dualmcmc.data import custom, fingerprint
from dualmcmc.data.custom import DatasetStore, as_store, load_custom
from dualmcmc.utils.images import from_uint8

PIXELS = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
CFG = Data(size=8, channels=3)


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
    store = as_store(FORMS[form], CFG)
    assert torch.equal(store.tensor(), PIXELS)
    assert fingerprint(store) == fingerprint(as_store(PIXELS, CFG))


def test_samples_that_are_not_images():
    points = torch.randn(20, 5)
    for form in (points, points.double().numpy(), list(points), TensorDataset(points)):
        store = as_store(form, CFG)
        assert store.dtype == torch.float32
        assert torch.equal(store.tensor(), points)


def test_vectors_in_other_forms(tmp_path):
    points = torch.randn(20, 5)
    np.save(tmp_path / "a.npy", points.numpy())
    forms = {
        "memory-mapped": np.load(tmp_path / "a.npy", mmap_mode="r"),
        "big-endian": points.numpy().astype(">f4"),
        "long double": points.numpy().astype(np.longdouble),
        "lists of numbers": points.tolist(),
        "column of lists": Column(points.tolist()),
        "batches with a length": Stream(points.split(4)),
        "loader of samples with a length": DataLoader(Stream(points), batch_size=4),
    }
    for name, form in forms.items():
        assert torch.equal(as_store(form, CFG).tensor(), points), name


class Stream(IterableDataset):
    """Has a length, but no items."""

    def __init__(self, parts):
        self.parts = parts

    def __len__(self):
        return len(self.parts)

    def __iter__(self):
        return iter(self.parts)


def test_order_of_a_loader_does_not_matter():
    """With a function of its own to join samples, the loader itself is read, in order and to the end."""
    dataset = TensorDataset(PIXELS, torch.arange(12))
    loader = DataLoader(
        dataset, 5, shuffle=True, drop_last=True, collate_fn=lambda rows: torch.stack([x for x, _ in rows])
    )
    assert torch.equal(as_store(loader, CFG).tensor(), PIXELS)
    for sampler in (SubsetRandomSampler(range(6)), WeightedRandomSampler([1.0] * 12, 12)):
        with pytest.raises(UserError, match=f"has a {type(sampler).__name__}, but training uses all samples"):
            as_store(DataLoader(dataset, sampler=sampler), CFG)
    assert len(as_store(DataLoader(Subset(dataset, range(6)), shuffle=True), CFG)) == 6


def test_floats_that_are_no_images():
    """Spectrograms, say."""
    spectra = 5 * torch.randn(6, 1, 8, 8)
    cfg, splits = load_custom(Data(as_images=False), spectra)
    assert (cfg.sample_shape, cfg.is_image) == ((1, 8, 8), False)
    assert torch.equal(splits.train.tensor(), spectra)
    assert not load_custom(Data(), torch.randn(6, 3, 7, 9))[0].is_image  # too small
    with pytest.raises(UserError, match=r"data\.as_images=false"):
        load_custom(Data(), spectra)
    assert Data(source="digits", as_images=False).is_image  # of custom data only


def test_greyscale_without_channel_axis():
    assert torch.equal(as_store(PIXELS[:, 0], CFG).tensor(), PIXELS[:, :1])


def test_datasets_that_do_not_fit_are_read_as_needed(monkeypatch):
    monkeypatch.setattr(custom, "available_memory", lambda: 100)
    read = []
    store = as_store(Items(lambda index: read.append(index) or PIXELS[index]), CFG)
    assert isinstance(store, DatasetStore)
    assert set(read) == set(range(8))  # to see whether they are random
    assert torch.equal(store.take([3, 11]), PIXELS[[3, 11]])
    assert store.checksum == as_store(Items(lambda index: PIXELS[index]), CFG).checksum
    other = PIXELS.clone()
    other[5, 0, 0, 0] ^= 1
    assert store.checksum != as_store(Items(lambda index: other[index]), CFG).checksum
    with pytest.raises(UserError, match="does not fit into memory"):
        as_store(iter([PIXELS]), CFG)


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
        (iter([torch.zeros(3)]), "must yield batches, not single samples"),
        (iter([pil(0)]), "must yield batches, not single samples"),
        (np.ma.masked_array(np.zeros((3, 2)), True), "masked arrays"),
        (torch.eye(3).to_sparse(), "dense tensors"),
        (torch.zeros(3, 2, device="meta"), "dense tensors"),
        (np.full((3, 2), 1e300), "not finite in float32"),
        ([[1.0, 2.0], [3.0]], "item 1 of the dataset is float32 of shape (1,)"),
    ],
)
def test_mistakes(data, message):
    with pytest.raises(UserError) as refused:
        as_store(data, CFG)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_test_data_of_another_shape():
    with pytest.raises(UserError, match=r"shape \(2,\), test samples \(3,\)"):
        load_custom(Data(), torch.zeros(5, 2), torch.zeros(5, 3))
