"""The embedded data pipeline against Detectron2's mapper, sampler and grouping, bit for bit."""

import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from detection.embedded import data

pytestmark = pytest.mark.usefixtures("detectron2")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """RGB, grey, palette and turned pictures of odd sizes, with boxes at and over the border."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.RandomState(0)
    records = []
    for number in range(12):
        height, width = rng.randint(40, 160, 2)
        image = Image.fromarray(rng.randint(0, 255, (height, width, 3)).astype(np.uint8))
        exif = Image.Exif()
        if number % 3 == 1:
            image = image.convert(("L", "P", "RGBA")[number % 3 - 1])
        elif number % 3 == 2:
            exif[274] = 1 + number % 8
            if exif[274] >= 5:
                height, width = width, height
        path = folder / f"{number}.{'png' if image.mode != 'RGB' else 'jpg'}"
        image.save(path, exif=exif)
        annotations = []
        for _ in range(number % 4):
            x0, y0 = rng.uniform(-3, [width / 2, height / 2])
            x1 = x0 + rng.uniform(1, width / 2 + 9)
            y1 = y0 + rng.uniform(1, height / 2 + 9)
            annotations.append(
                {"bbox": [x0, y0, x1, y1], "bbox_mode": 0, "category_id": int(rng.randint(5))}
            )
        if number == 7:
            annotations.append({"bbox": [5.0, 5.0, 5.0, 9.0], "bbox_mode": 0, "category_id": 1})
        records.append(
            {
                "file_name": str(path),
                "image_id": str(number),
                "height": int(height),
                "width": int(width),
                "annotations": annotations,
            }
        )
    return records


def config(order: str, flip: str, sampling: str, sizes: tuple[int, ...]) -> Any:
    from detectron2.config import get_cfg

    cfg = get_cfg()
    cfg.INPUT.FORMAT = order
    cfg.INPUT.RANDOM_FLIP = flip
    cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING = sampling
    cfg.INPUT.MIN_SIZE_TRAIN = sizes
    cfg.INPUT.MAX_SIZE_TRAIN = 170
    cfg.INPUT.MIN_SIZE_TEST = 111
    cfg.INPUT.MAX_SIZE_TEST = 150
    cfg.SEED = 11
    return cfg


def assert_same_sample(theirs: dict[str, Any], ours: data.Sample) -> None:
    assert torch.equal(theirs["image"], ours["image"])
    for name in ("file_name", "image_id", "height", "width"):
        assert theirs[name] == ours[name]
    if "instances" in theirs:
        assert torch.equal(theirs["instances"].gt_boxes.tensor, ours["boxes"])
        assert torch.equal(theirs["instances"].gt_classes, ours["classes"])


SETTINGS = [
    ("RGB", "horizontal", "choice", (90, 100, 120)),
    ("BGR", "vertical", "range", (60, 140)),
    ("RGB", "none", "choice", (0,)),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s[0]}-{s[1]}-{s[2]}")
def test_mapper(setting: tuple[Any, ...], pictures: list[dict[str, Any]]) -> None:
    from detectron2.data import DatasetMapper

    order, flip, sampling, sizes = setting
    mapper = DatasetMapper(config(*setting), True)
    augmentation = data.Augmentation(sizes, sampling, flip)
    np.random.seed(5)
    rng = np.random.RandomState(5)
    flips = set()
    for index in [*range(len(pictures))] * 2:
        draw = augmentation.draw(index, rng)
        flips.add(draw.flip)
        sample = data.load_sample(pictures[index], draw, max_size_px=170, channel_order=order)
        assert_same_sample(mapper(pictures[index]), sample)
    assert flips == {"none", flip}


def test_mapper_on_real_pictures(shared_data: Path) -> None:
    from detectron2.data import DatasetMapper

    setting = ("RGB", "horizontal", "choice", (480, 512, 800))
    mapper = DatasetMapper(config(*setting), True)
    augmentation = data.Augmentation(setting[3], "choice", "horizontal")
    np.random.seed(1)
    rng = np.random.RandomState(1)
    for index, path in enumerate(sorted((shared_data / "bccd/JPEGImages").glob("*.jpg"))[:8]):
        with Image.open(path) as image:
            width, height = image.size
        record = {
            "file_name": str(path),
            "image_id": path.stem,
            "height": height,
            "width": width,
            "annotations": [
                {"bbox": [0.0, 3.0, width - 7.0, height], "bbox_mode": 0, "category_id": 3}
            ],
        }
        draw = augmentation.draw(index, rng)
        sample = data.load_sample(record, draw, max_size_px=170, channel_order="RGB")
        assert_same_sample(mapper(record), sample)


def test_evaluation_batches(pictures: list[dict[str, Any]]) -> None:
    from detectron2.data import DatasetMapper, build_detection_test_loader

    cfg = config(*SETTINGS[0])
    theirs = build_detection_test_loader(pictures, mapper=DatasetMapper(cfg, False))
    ours = data.evaluation_batches(
        pictures, short_edge_px=111, max_size_px=150, channel_order="RGB", num_workers=0
    )
    for expected, batch in zip(theirs, ours, strict=True):
        assert_same_sample(expected[0], batch[0])


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_batches(grouped: bool, num_workers: int, pictures: list[dict[str, Any]]) -> None:
    """Ours with any number of workers give what Detectron2 gives without."""
    from detectron2.data import DatasetMapper, build_detection_train_loader
    from detectron2.data.build import filter_images_with_only_crowd_annotations
    from detectron2.data.samplers import TrainingSampler

    setting = SETTINGS[0]
    theirs = filter_images_with_only_crowd_annotations(pictures)
    ours = data.with_objects(pictures)
    assert theirs == ours
    assert len(ours) < len(pictures)
    loader = build_detection_train_loader(
        theirs,
        mapper=DatasetMapper(config(*setting), True),
        sampler=TrainingSampler(len(theirs), seed=11),
        total_batch_size=4,
        aspect_ratio_grouping=grouped,
        num_workers=0,
    )
    batches = data.training_batches(
        ours,
        data.Augmentation(setting[3], setting[2], setting[1]),
        max_size_px=170,
        channel_order="RGB",
        batch_size=4,
        group_by_shape=grouped,
        num_workers=num_workers,
        seed=11,
    )
    np.random.seed(11)
    random.seed(11)
    for expected, batch in islice(zip(loader, batches, strict=False), 12):
        assert len(batch) == 4
        for one, other in zip(expected, batch, strict=True):
            assert_same_sample(one, other)
