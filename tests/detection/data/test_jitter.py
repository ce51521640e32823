"""Large-scale jitter against values written out; against Detectron2's in tests/detection/parity."""

import numpy as np
import pytest
import torch
from PIL import Image

from detection.data.mapper import Mapper
from detection.data.transforms import JitterParams, LargeScaleJitter

SQUARE = [[20, 10, 60, 10, 60, 50, 20, 50]]


@pytest.fixture
def record(tmp_path):
    """100 x 60 px, black with a white square."""
    pixels = np.zeros((60, 100, 3), dtype=np.uint8)
    pixels[10:50, 20:60] = 255
    Image.fromarray(pixels).save(tmp_path / "image.png")
    item = {"bbox": [0, 0, 99, 59], "bbox_mode": 0, "category_id": 2, "segmentation": SQUARE}
    shape = {"file_name": str(tmp_path / "image.png"), "height": 60, "width": 100}
    return {**shape, "annotations": [item]}


def jittered(record, params, masks="polygon", pad=True):
    jitter = LargeScaleJitter(50, (0.1, 2.0), pad, "horizontal")
    return Mapper(1, "RGB", masks, jitter=jitter)(record, params)


@pytest.mark.parametrize("masks", ["polygon", "bitmask"])
def test_a_small_image_is_filled_up_and_its_box_is_the_masks(record, masks):
    pytest.importorskip("shapely")
    sample = jittered(record, JitterParams("horizontal", 1.0, 0.7), masks)
    assert sample["image"].shape == (3, 50, 50)
    assert (sample["image"][:, 30:] == 128).all()
    assert (sample["image"][:, 10:20, 25:35] == 255).all()
    assert sample["boxes"].tolist() == [[20, 5, 40, 25]]
    assert jittered(record, JitterParams("none", 1.0, 0.7), pad=False)["image"].shape == (3, 30, 50)


def test_a_large_image_is_cut_and_objects_with_it(record):
    pytest.importorskip("shapely")
    # 200 x 120 px at (0, 0), then at (150, 70), where nothing of the object is left.
    cut = jittered(record, JitterParams("none", 4.0, 0.0))
    assert cut["boxes"].tolist() == [[40, 20, 50, 50]]
    assert sorted(cut["masks"][0][0].reshape(4, 2).tolist()) == [
        [40, 20],
        [40, 50],
        [50, 20],
        [50, 50],
    ]
    gone = jittered(record, JitterParams("none", 4.0, 1.0))
    assert (gone["boxes"].shape, gone["classes"].shape, gone["masks"]) == ((0, 4), (0,), [])
    # Without masks the box is the annotation's, cut to the image.
    plain = jittered(record, JitterParams("none", 4.0, 1.0), masks="")
    assert plain["boxes"].tolist() == [[0, 0, 48, 48]]
    assert torch.equal(plain["image"], gone["image"])
