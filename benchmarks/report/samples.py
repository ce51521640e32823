"""Image of ground truth and of every init's predictions on test images, and plots of the APs.

On an image with G objects, the G best-scored predictions of an init's first seed are drawn. The
images are chosen so that each init is right about as often as on the whole split.
"""

import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont, ImageOps

from benchmarks.report import plots
from benchmarks.report.analysis import find_predictions
from benchmarks.report.style import RIGHT, TRUTH, WRONG
from benchmarks.report.table import Table
from detection.datasets.base import Record, Split, image_key
from detection.datasets.files import read_image
from detection.datasets.voc import GroundTruth
from detection.evaluation import voc
from detection.evaluation.coco import metric_annotations, split_annotations
from detection.evaluation.predictions import Row, read_voc
from detection.evaluation.visualize import draw_boxes
from moco.common.errors import UserError, printable
from moco.common.files import atomic_write, read_text

IMAGES, MAX_OBJECTS = 3, 5  # the tags of more objects overlap
IMAGE_PX, BARS_PX, HEAD_PX, FOOT_PX, GAP_PX = 320, 430, 56, 30, 10
LINE_PX, TAG_PX, FONTS_PX = 3, 17.0, (20.0, 17.0)  # boxes, their tags, header and footer
FOOT = (
    "Typical test images; of each the best-scored boxes, as many as it has objects. "
    "Green: right class, IoU above 0.5. Orange: not."
)
ONE_BASED = np.array([1, 1, 0, 0])  # VOC's boxes are 1-based and include their last pixel


class Boxes(NamedTuple):
    """Boxes to draw on an image, (N, 4), 0-based and half-open, with their tags and colors."""

    boxes: NDArray[np.floating]
    tags: list[str]
    colors: list[str]

    @property
    def right(self) -> int:
        """Number of correct predictions."""
        return self.colors.count(RIGHT)


def save_samples(path: Path, table: Table, split: Split) -> Path:
    """Write `samples_image` as a PNG file and return its path.

    Raises:
        DataError: If an image cannot be read.
        UserError: If the file cannot be written.
    """
    image = samples_image(table, split)
    # A palette quarters the size; this method keeps the colors of boxes and bars.
    image = image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    atomic_write(path, lambda file: image.save(file, "PNG", optimize=True))
    return path


def samples_image(table: Table, split: Split) -> Image.Image:
    """Draw a grid of images (rows) by ground truth and inits (columns), and a plot per metric.

    Args:
        table: Table whose runs have predictions.
        split: Test split of the runs, in VOC's or COCO's format.
    """
    records = {str(image_key(record)): record for record in split.records}
    objects = objects_of(split, records)
    columns = {"ground truth": (truth := _truth(split, objects))}
    number = sum(len(of.tags) for of in truth.values())
    distance = dict.fromkeys(truth, 0.0)
    for row in table.rows:
        path = row.runs[0].folder / "inference" / f"{split.name}.json"
        found = _best(predictions_of(split, path, objects), split, objects)
        right = sum(of.right for of in found.values())
        title = f"{printable(row.init)}, seed {row.runs[0].record.seed}\n{right} of {number} found"
        columns[title] = found
        for image_id, of in found.items():
            share = of.right / max(len(truth[image_id].tags), 1)
            distance[image_id] += abs(share - right / max(number, 1))
    sizes = {image_id: max(len(of.tags), MAX_OBJECTS) for image_id, of in truth.items() if of.tags}
    chosen = [image_id for image_id in records if image_id in sizes]
    chosen.sort(key=lambda image_id: (sizes[image_id], distance[image_id]))
    del chosen[IMAGES:]

    step, width = IMAGE_PX + GAP_PX, len(columns) * (IMAGE_PX + GAP_PX)
    bottom = HEAD_PX + len(chosen) * step
    canvas = Image.new("RGB", (GAP_PX + width + BARS_PX, bottom + FOOT_PX), "white")
    pen, head, foot = ImageDraw.Draw(canvas), *map(ImageFont.load_default, FONTS_PX)
    for x, (title, boxes) in zip(range(GAP_PX, width, step), columns.items(), strict=True):
        pen.text((x + IMAGE_PX / 2, HEAD_PX / 2), title, "black", head, "mm", align="center")
        for y, image_id in zip(range(HEAD_PX, bottom, step), chosen, strict=True):
            canvas.paste(_draw(records[image_id], boxes[image_id]), (x, y))
    pen.text((GAP_PX, bottom + FOOT_PX / 3), FOOT, fill="black", font=foot, anchor="lm")
    height = bottom // len(table.metrics)
    for line, metric in enumerate(table.metrics):
        figure = plots.ap_figure(dataclasses.replace(table, metrics=(metric,)))
        figure.set_size_inches(BARS_PX / plots.DPI, height / plots.DPI)
        buffer = io.BytesIO()
        plots.Plot(figure).png(buffer)
        canvas.paste(Image.open(buffer), (GAP_PX + width, line * height))
    return canvas


def draw_pair(pair: Table, objects: Mapping[str, int]) -> dict[str, tuple[Image.Image, ...]]:
    """Draw images with their ground truth and the predictions of the first run of both rows.

    Args:
        pair: Table of two rows.
        objects: Id of a test image → number of its objects when the runs were tested.

    Raises:
        UserError: If the predictions or the test dataset are not on this machine.
    """
    first = [row.runs[0] for row in pair.rows]
    (split, path), (_, other) = map(find_predictions, first)
    name = f"the {split.name} of this machine"
    try:
        masked = first[0].record.config.get("MODEL.MASK_ON", False)
        truth = objects_of(split, objects, masked=masked)
        columns = [_truth(split, truth)]
        for image_id, number in objects.items():
            if len(columns[0][image_id].tags) != number:
                raise UserError(f"{name} has other objects than the runs were tested on")
        columns += [_best(predictions_of(split, p, truth), split, truth) for p in (path, other)]
        records = {str(image_key(record)): record for record in split.records}
        return {i: tuple(_draw(records[i], of[i]) for of in columns) for i in objects}
    except (UserError, ImportError):
        raise
    except Exception as error:  # untrusted predictions may raise anything
        raise UserError(f"{path}: no predictions on {name}") from error


def objects_of(
    split: Split, image_ids: Iterable[str], *, masked: bool = False
) -> dict[str, GroundTruth]:
    """Return the objects of images of a split in VOC's or COCO's format; crowds are difficult.

    Args:
        split: Split that contains the images.
        image_ids: Ids of the images.
        masked: Leave out objects without a mask.
    """
    if split.evaluator_type == "pascal_voc":
        return {image_id: split.truth[image_id] for image_id in image_ids}
    if split.evaluator_type not in ("coco", "lvis"):
        raise UserError(f"not drawn for the metric {split.evaluator_type}")
    ids, number = set(image_ids), split.metadata["thing_dataset_id_to_contiguous_id"]
    objects: dict[str, list[tuple[Any, int, bool]]] = {image_id: [] for image_id in ids}
    content = metric_annotations(split_annotations(split), split.images, masked=masked)
    for row in content["annotations"]:
        if (image_id := str(row["image_id"])) in ids:
            own = row["bbox"], number[row["category_id"]], bool(row.get("iscrowd", 0))
            objects[image_id].append(own)
    found = {}
    for image_id, rows in objects.items():
        boxes = _xyxy([box for box, *_ in rows]) + ONE_BASED
        classes = np.array([class_id for _, class_id, _ in rows], np.int64)
        found[image_id] = GroundTruth(boxes, classes, np.array([crowd for *_, crowd in rows], bool))
    return found


def predictions_of(split: Split, path: Path, image_ids: Iterable[str]) -> dict[str, list[Row]]:
    """Read the predictions on images of a split, as `read_voc` does."""
    ids = set(image_ids)
    if split.evaluator_type == "pascal_voc":
        everything = read_voc(path)
        return {image_id: everything[image_id] for image_id in ids}
    found: dict[str, list[Row]] = {image_id: [] for image_id in ids}
    number = split.metadata["thing_dataset_id_to_contiguous_id"]
    for row in json.loads(read_text(path)):
        if (image_id := str(row["image_id"])) in ids and "bbox" in row:
            [box] = _xyxy([row["bbox"]])
            own = {**row, "category_id": number[row["category_id"]], "bbox": box.tolist()}
            found[image_id].append(own)
    return found


def _xyxy(boxes: Sequence[Sequence[float]]) -> NDArray[np.floating]:
    """Convert COCO's boxes XYWH to 0-based XYXY, (N, 4)."""
    found = np.array(boxes, float).reshape(-1, 4)
    found[:, 2:] += found[:, :2]
    return found


def _truth(split: Split, objects: Mapping[str, GroundTruth]) -> dict[str, Boxes]:
    """Return the objects of every image, without the difficult ones."""
    found = {}
    for image_id, truth in objects.items():
        tags = [split.classes[i] for i in truth.classes[~truth.difficult]]
        boxes = truth.boxes[~truth.difficult] - ONE_BASED
        found[image_id] = Boxes(boxes, tags, [TRUTH] * len(tags))
    return found


def _best(
    rows: Mapping[str, Sequence[Row]], split: Split, objects: Mapping[str, GroundTruth]
) -> dict[str, Boxes]:
    """Return the best-scored predictions on every image, as many as the image has objects."""
    found = {}
    for image_id, truth in objects.items():
        number = np.count_nonzero(~truth.difficult)
        best = sorted(rows[image_id], key=lambda row: -row["score"])[:number]
        boxes = np.array([row["bbox"] for row in best]).reshape(-1, 4)
        classes = np.array([row["category_id"] for row in best], dtype=np.int64)
        # `best_matches` pairs boxes with equal keys: images in the metric, classes here.
        order = np.argsort(truth.classes, kind="stable")
        own = truth.classes[order], truth.boxes[order]
        matches = voc.best_matches(classes, boxes + ONE_BASED, *own)
        right = voc.count(*matches, truth.difficult[order])[0][:, 0]
        tags = [f"{split.classes[row['category_id']]} {row['score']:.2f}" for row in best]
        found[image_id] = Boxes(boxes, tags, [RIGHT if hit else WRONG for hit in right])
    return found


def _draw(record: Record, boxes: Boxes) -> Image.Image:
    """Draw an image with its boxes in a square of IMAGE_PX."""
    image = read_image(record["file_name"])
    scale = IMAGE_PX / max(image.size)
    image = ImageOps.contain(image, (IMAGE_PX, IMAGE_PX), Image.Resampling.LANCZOS)
    colors = [ImageColor.getrgb(color)[:3] for color in boxes.colors]
    draw_boxes(image, boxes.boxes * scale, boxes.tags, colors, LINE_PX, TAG_PX)
    return ImageOps.pad(image, (IMAGE_PX, IMAGE_PX), color="white")
