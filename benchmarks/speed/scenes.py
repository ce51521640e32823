"""Generated data for the measurements of detection: datasets on disk, and predictions.

Boxes are (x1, y1, x2, y2) in pixels, 0-based and half-open.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from benchmarks.speed.input import IMAGENET_PX, generate_images
from detection.datasets.coco import COCO_CATEGORIES, PERSON_KEYPOINTS
from detection.datasets.voc import VOC_CLASSES
from detection.evaluation.base import Prediction

WIDTH, HEIGHT = IMAGENET_PX
CORNERS = 24  # of an object's polygon
MEAN_OBJECTS = 7.0  # of an image of the datasets
Boxes = NDArray[np.float64]


class Scene(NamedTuple):
    """What is in one image: boxes (G, 4), classes (G,) in 0..num_classes-1, difficult (G,)."""

    boxes: Boxes
    classes: NDArray[np.int64]
    difficult: NDArray[np.bool_]


def random_scene(rng: np.random.Generator, num_classes: int, mean_objects: float) -> Scene:
    """At least one object, of whole pixels."""
    count = 1 + rng.poisson(mean_objects - 1)
    boxes = np.rint(_boxes(rng, count))
    return Scene(boxes, rng.integers(num_classes, size=count), rng.random(count) < 0.1)


def random_prediction(
    rng: np.random.Generator, scene: Scene, num_classes: int, num_false: int
) -> Prediction:
    """Most objects found, some twice, moved by some percent, few with another class; false alarms.

    As detectors give it, best first, with scores of 0.05 and more.
    """
    found = np.repeat(np.arange(len(scene.classes)), rng.integers(0, 3, len(scene.classes)))
    boxes = scene.boxes[found]
    sides = np.tile(boxes[:, 2:] - boxes[:, :2], 2)
    spread = rng.choice([0.02, 0.06, 0.15], (len(found), 1))  # of the sides
    boxes = boxes + rng.normal(0, spread, sides.shape) * sides
    others = rng.integers(num_classes, size=len(found))
    classes = np.where(rng.random(len(found)) < 0.9, scene.classes[found], others)
    false = _boxes(rng, num_false)
    scores = np.concatenate([rng.beta(4, 2, len(found)), rng.beta(1, 6, num_false)])
    order = np.argsort(-scores)
    limit = np.array([WIDTH, HEIGHT, WIDTH, HEIGHT])
    return {
        "boxes": np.concatenate([boxes, false]).clip(0, limit).astype(np.float32)[order],
        "scores": scores.clip(0.05, 1).astype(np.float32)[order],
        "classes": np.concatenate([classes, rng.integers(num_classes, size=num_false)])[order],
    }


def write_datasets(root: Path, num_images: int) -> None:
    """VOC2007, VOC2012 and coco as they are named below $DETECTRON2_DATASETS.

    The same images everywhere, for training and testing: VOC2007's boxes, VOC2012's labels of
    pixels (ellipses), COCO's polygons and persons' keypoints.
    """
    images = root / "images"
    images.mkdir(parents=True)
    generate_images(images, num_images)
    ids = sorted(path.stem for path in images.iterdir())
    rng = np.random.default_rng(0)
    voc = {image_id: random_scene(rng, len(VOC_CLASSES), MEAN_OBJECTS) for image_id in ids}
    for folder, lists in (
        ("VOC2007", ("Main/trainval", "Main/test")),
        ("VOC2012", ("Segmentation/train_aug", "Segmentation/val")),
    ):
        for name in lists:
            path = root / folder / "ImageSets" / f"{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(voc) + "\n", encoding="utf-8")
    annotations = root / "VOC2007" / "Annotations"
    masks = [root / "VOC2012" / name for name in ("SegmentationClass", "SegmentationClassAug")]
    for made in (annotations, *masks):
        made.mkdir()
    for image_id, scene in voc.items():
        write_voc_annotation(annotations / f"{image_id}.xml", scene)
        labels = Image.new("P", (WIDTH, HEIGHT))
        for box, label in zip(scene.boxes, scene.classes, strict=True):
            ImageDraw.Draw(labels).polygon(_ellipse(box), fill=int(label) + 1, outline=255)
        labels.putpalette([index // 3 for index in range(768)])
        for target in masks:
            labels.save(target / f"{image_id}.png")
    scenes = [random_scene(rng, len(COCO_CATEGORIES), MEAN_OBJECTS) for _ in ids]
    annotations = root / "coco" / "annotations"
    annotations.mkdir(parents=True)
    for split in ("train2017", "val2017"):
        write_coco(annotations / f"instances_{split}.json", ids, scenes, COCO_CATEGORIES)
        path = annotations / f"person_keypoints_{split}.json"
        write_coco(path, ids, scenes, COCO_CATEGORIES[:1], rng)
    for name in ("VOC2007/JPEGImages", "VOC2012/JPEGImages", "coco/train2017", "coco/val2017"):
        (root / name).symlink_to(images, target_is_directory=True)


def write_voc_annotation(path: Path, scene: Scene) -> None:
    """An image's XML file."""
    objects = []
    for box, label, difficult in zip(*scene, strict=True):
        x1, y1, x2, y2 = map(int, box)
        objects.append(
            f"<object><name>{VOC_CLASSES[label]}</name><pose/><truncated>0</truncated>"
            f"<difficult>{difficult:d}</difficult>"
            f"<bndbox><xmin>{x1 + 1}</xmin><ymin>{y1 + 1}</ymin>"
            f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
        )
    size = f"<width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth>"
    path.write_text(
        f"<annotation><size>{size}</size>{''.join(objects)}</annotation>", encoding="utf-8"
    )


def write_coco(
    path: Path,
    ids: Sequence[str],
    scenes: Sequence[Scene],
    categories: Sequence[tuple[int, str]],
    keypoints: np.random.Generator | None = None,
) -> None:
    """An annotation file; with `keypoints` from that stream every object is a person.

    A person's keypoints are anywhere in the box, two thirds of them labeled.
    """
    annotations: list[dict[str, Any]] = []
    for image_id, scene in zip(ids, scenes, strict=True):
        for box, label in zip(scene.boxes, scene.classes, strict=True):
            (x, y), (w, h) = box[:2].tolist(), (box[2:] - box[:2]).tolist()
            item = {
                "id": len(annotations) + 1,
                "image_id": int(image_id),
                "category_id": categories[0 if keypoints else int(label)][0],
                "iscrowd": 0,
                "bbox": [x, y, w, h],
                "area": w * h * np.pi / 4,
                "segmentation": [_ellipse(box)],
            }
            if keypoints:
                number = len(PERSON_KEYPOINTS)
                points = np.rint(keypoints.uniform(box[:2], box[2:] - 1, (number, 2)))
                visible = keypoints.integers(0, 3, number)
                flat = np.column_stack([points * (visible > 0)[:, None], visible])
                item["keypoints"] = flat.astype(int).ravel().tolist()
                item["num_keypoints"] = int((visible > 0).sum())
            annotations.append(item)
    sizes = {"height": HEIGHT, "width": WIDTH}
    content = {
        "info": {},
        "licenses": [],
        "images": [{"id": int(i), "file_name": f"{i}.jpg", **sizes} for i in ids],
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in categories],
    }
    path.write_text(json.dumps(content), encoding="utf-8")


def _ellipse(box: Boxes) -> list[float]:
    """The largest in the box, as a polygon x0, y0, x1, y1, ..."""
    angles = np.linspace(0, 2 * np.pi, CORNERS, endpoint=False)
    corners = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    points: Boxes = (box[:2] + box[2:]) / 2 + corners * (box[2:] - box[:2]) / 2
    return [float(number) for number in points.round(2).ravel()]


def _boxes(rng: np.random.Generator, count: int) -> Boxes:
    """Sides of 10 pixels to most of the image, evenly in their logarithm."""
    limit = np.array([WIDTH, HEIGHT])
    sides = np.exp(rng.uniform(np.log(10), np.log(0.9 * limit), (count, 2)))
    corners = rng.uniform(0, 1, (count, 2)) * (limit - sides - 1)
    return np.concatenate([corners, corners + sides], axis=1)
