"""COCO dataset with the edge cases of real datasets, in the layout of `$DETECTRON2_DATASETS`.

Boxes and polygons of floats, of integers, and of both in one object, which Detectron2 rounds in
three ways; objects of one pixel and of one row; images with an aspect ratio of 10; crowds; images
without objects, and with crowds alone. With `runs`, masks are polygons, run lengths and compressed
run lengths.
"""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from detection.datasets.coco import COCO_CATEGORIES, PERSON_KEYPOINTS
from tests.oracles.shapes import COLORS
from tests.oracles.tiny_coco import KINDS, write_annotations
from tests.oracles.tiny_instances import rectangle, rle
from tests.oracles.tiny_voc_seg import voc_palette

# Width and height, px.
SIZES = [(96, 80), (70, 101), (120, 12), (11, 110), (85, 85), (64, 90), (99, 67), (77, 78)]


def write_edge_cases(root: Path, *, runs: bool = False) -> Path:
    """Write coco/ with instances and keypoints; return `root`."""
    rng = np.random.RandomState(11)
    for split, count in (("train2017", 16), ("val2017", 6)):
        images, annotations = [], []
        for number in range(count):
            width, height = SIZES[number % len(SIZES)]
            image_id, name = 900 - 7 * number, f"{number:012d}.jpg"
            pixels = rng.randint(90, 150, (height, width, 3)).astype(np.uint8)
            for item in _objects(number, width, height, rng, runs=runs):
                x, y, w, h = (round(value) for value in item["bbox"])
                color = COLORS[KINDS.index(item["category_id"])]
                if not item["iscrowd"]:
                    pixels[y : y + max(h, 1), x : x + max(w, 1)] = color
                item |= {"id": 3 * len(annotations) + 2, "image_id": image_id}
                annotations.append(item)
            path = root / "coco" / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=95)
            size = {"height": height, "width": width}
            images.append({"id": image_id, "file_name": name, **size})
        kinds = [{"id": id_, "name": kind} for id_, kind in COCO_CATEGORIES]
        write_annotations(root, f"instances_{split}", images, annotations, kinds)
        people = [_with_keypoints(item, rng) for item in annotations if item["category_id"] == 1]
        points = {"keypoints": PERSON_KEYPOINTS, "skeleton": [[1, 2]]}
        write_annotations(
            root, f"person_keypoints_{split}", images, people, [{**kinds[0], **points}]
        )
    return root


def write_labels(root: Path) -> Path:
    """Write VOC2012/ with labels of every pixel, images of the same odd sizes; return `root`."""
    rng = np.random.RandomState(12)
    voc = root / "VOC2012"
    (voc / "ImageSets" / "Segmentation").mkdir(parents=True)
    for split, masks, count in (
        ("train_aug", "SegmentationClassAug", 10),
        ("val", "SegmentationClass", 5),
    ):
        names = [f"{split}_{number:03d}" for number in range(count)]
        (voc / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(names) + "\n")
        for number, name in enumerate(names):
            width, height = SIZES[number % len(SIZES)]
            y, x = np.mgrid[:height, :width]
            labels = np.where((y + 2 * x) % 40 < 12, number % 4, (x // 19 + y // 13) % 3)
            labels = np.where(rng.rand(height, width) < 0.03, 255, labels).astype(np.uint8)
            if number == 1:
                labels[:] = 0  # background alone
            pixels = np.clip(
                60 * (labels % 4)[..., None] + rng.randint(0, 60, (height, width, 3)), 0, 255
            )
            for folder, array, ending in (("JPEGImages", pixels, "jpg"), (masks, labels, "png")):
                (voc / folder).mkdir(exist_ok=True)
                image = Image.fromarray(array.astype(np.uint8), "RGB" if array.ndim == 3 else "P")
                if array.ndim == 2:
                    image.putpalette(voc_palette())
                image.save(voc / folder / f"{name}.{ending}")
    return root


def _objects(
    number: int, width: int, height: int, rng: np.random.RandomState, *, runs: bool
) -> list[dict[str, Any]]:
    """Return the objects of an image, which follow from its number."""
    if number % 8 == 5:
        return []
    crowd = _object([0, height - 3, width, 3], 0, height, width, "runs") | {"iscrowd": 1}
    if number % 8 == 6 and number > 8:
        return [crowd]
    shapes = ["polygon", "compressed", "runs"] if runs else ["polygon"]
    boxes: list[list[float]] = []
    for place in range(3):
        w, h = (max(1, int(side * rng.uniform(0.3, 0.6))) for side in (width, height))
        x, y = (int(rng.uniform(0, side - size)) for side, size in ((width, w), (height, h)))
        if (number + place) % 3 == 0:
            boxes.append([x, y, w, h])
        elif (number + place) % 3 == 1:
            boxes.append([x + 0.37, y + 0.81, w - 0.63, h - 0.9 if h > 1 else 0.5])
        else:  # one float among integers
            boxes.append([x, y, w - 0.25, h])
    if number % 4 == 0:
        boxes += [[width // 2, height // 3, 1, 1], [width / 3 + 0.2, height / 2, 1.0, 1.0]]
        boxes += [[1, height // 2, width - 2, 1]]
    found = [
        _object(box, (number + place) % 3, height, width, shapes[(number + place) % len(shapes)])
        for place, box in enumerate(boxes)
    ]
    return [*found, crowd] if number % 3 == 0 else found


def _object(box: list[float], kind: int, height: int, width: int, shape: str) -> dict[str, Any]:
    x, y, w, h = box
    mask = rectangle(height, width, np.array([x, y, x + max(w, 1), y + max(h, 1)]))
    # A box without a corner; of integers if the box is.
    polygon = [x, y, x + w, y, x + w, y + h, x, y + h, x, y + h // 2]
    counts = np.diff(np.flatnonzero(np.diff(np.r_[2, mask.ravel(order="F"), 2])))
    first = [] if mask[0, 0] == 0 else [0]
    segmentation = {
        "polygon": [polygon],
        "compressed": rle(mask),
        "runs": {"size": [height, width], "counts": [*first, *counts.tolist()]},
    }[shape]
    area = float(mask.sum())
    its = {"category_id": KINDS[kind], "iscrowd": 0, "area": area}
    return {"bbox": box, "segmentation": segmentation, **its}


def _with_keypoints(item: dict[str, Any], rng: np.random.RandomState) -> dict[str, Any]:
    """Add 17 keypoints around the box, some hidden, integer if the box is; a crowd's are 0."""
    x, y, w, h = item["bbox"]
    points = rng.uniform(-0.1, 1.1, (17, 2)) * (w, h) + (x, y)
    if all(isinstance(value, int) for value in item["bbox"]):
        points = np.floor(points)
    visible = rng.randint(0, 3, (17, 1)) * (not item["iscrowd"])
    rows = (np.concatenate([points, visible], axis=1) * (visible > 0)).round(2)
    values = [int(v) if v == int(v) else v for v in rows.ravel().tolist()]
    return {**item, "keypoints": values, "num_keypoints": int((visible > 0).sum())}
