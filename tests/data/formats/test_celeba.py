import numpy as np
import pytest
from PIL import Image

from dualmcmc import data
from dualmcmc.config import Data
from dualmcmc.data.images import ImageSpec, convert
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.formats.common import load
from tests.data.makers import pixels


def test_celeba_with_partition_and_crop(cache):
    makers.celeba(cache / "celeba")
    settings = {"source": "celeba", "size": 64, "crop": "celeba140"}
    images = data.load(Data(**settings))
    assert (len(images.train), len(images.test)) == (5, 2)
    photo = np.asarray(Image.open(cache / "celeba" / "img_align_celeba" / "000000.jpg"))
    expected = convert(photo, ImageSpec(64, 3, "celeba140"))
    assert np.array_equal(images.train.take([0])[0].permute(1, 2, 0).numpy(), expected)
    other = data.load(Data(**{**settings, "crop": "celeba108"}))
    assert other.train.checksum != images.train.checksum
    assert data.describe(Data(**settings), images)["crop"] == "celeba140"
    assert len(data.load(Data(**settings, split="train+valid+test")).train) == 10


def test_celeba_zip_without_partition(tmp_path):
    path = makers.image_zip(tmp_path / "img_align_celeba.zip", pixels(4, (109, 89)), "img_align_celeba")
    images, test = load(source="celeba", size=64, crop="celeba140", path=str(path))
    assert images.shape == (4, 64, 64, 3)
    assert test is None
    assert sorted(item.name for item in tmp_path.iterdir()) == ["img_align_celeba.zip"]  # nothing was written


@pytest.mark.parametrize(
    ("line", "message"), [("000000.jpg 3", "line 3"), ("000000.jpg", "line 3"), ("other.jpg 0", "do not match")]
)
def test_invalid_partition_file(tmp_path, line, message):
    makers.celeba(tmp_path, 4)
    file = tmp_path / "list_eval_partition.txt"
    kept = file.read_text().splitlines()[:2]
    file.write_text("\n".join([*kept, line]))
    with pytest.raises(UserError, match=message):
        load(source="celeba", size=64, path=str(tmp_path))


def test_celeba_crop_of_cropped_images_is_refused(tmp_path):
    makers.image_folder(tmp_path / "img_align_celeba", pixels(2, 64), "jpg")
    with pytest.raises(UserError, match="64x64"):
        load(source="celeba", size=64, crop="celeba140", path=str(tmp_path))


def test_celebahq_folder_and_zip(cache):
    images = pixels(3, 64)
    makers.image_folder(cache / "celebahq256" / "celeba_hq_256", images)
    train, test = load(source="celebahq256", size=64)
    assert np.array_equal(train, images)
    assert test is None
    zipped = cache / "celebahq256" / "zipped"
    zipped.mkdir()
    makers.image_zip(zipped / "any.zip", images)
    assert np.array_equal(load(source="celebahq256", size=64, path=str(zipped))[0], images)
