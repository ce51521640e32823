"""A generated dataset in Cityscapes' layout: road, sky, buildings, and cars and persons on them.

Under `$DETECTRON2_DATASETS`: cityscapes/{leftImg8bit,gtFine}/<split>/<city>/. The label images
are rendered from the polygons in their order, as cityscapesscripts does.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

# label → id, train id, color in the image
LABELS = {
    "road": (7, 0, (90, 60, 90)),
    "building": (11, 2, (190, 180, 60)),
    "sky": (23, 10, (120, 200, 250)),
    "person": (24, 11, (230, 40, 50)),
    "car": (26, 13, (40, 60, 230)),
    "trailer": (30, 255, (20, 20, 20)),
    "bicycle": (33, 18, (40, 210, 60)),
}
CITIES = ("aachen", "bochum")


def write_cityscapes(
    folder: Path,
    splits: dict[str, int],
    *,
    train_ids: bool = True,
    seed: int = 0,
    size: tuple[int, int] = (96, 144),
) -> Path:
    """Write `splits` = {"train": number of images, "val": ...} of `size` (height, width)."""
    rng = np.random.RandomState(seed)
    number = 0
    for split, count in splits.items():
        for index in range(count):
            city = CITIES[index % len(CITIES)]
            frame = f"{city}_{number:06d}_000019"
            number += 1
            objects = _objects(rng, index, *size)
            images = folder / "cityscapes" / "leftImg8bit" / split / city
            truth = folder / "cityscapes" / "gtFine" / split / city
            for path in (images, truth):
                path.mkdir(parents=True, exist_ok=True)
            _image(rng, objects, size).save(images / f"{frame}_leftImg8bit.png")
            content = {"imgHeight": size[0], "imgWidth": size[1], "objects": objects}
            (truth / f"{frame}_gtFine_polygons.json").write_text(json.dumps(content))
            label_ids, instance_ids, train = _label_maps(objects, size)
            Image.fromarray(label_ids).save(truth / f"{frame}_gtFine_labelIds.png")
            Image.fromarray(instance_ids).save(truth / f"{frame}_gtFine_instanceIds.png")
            if train_ids:
                Image.fromarray(train).save(truth / f"{frame}_gtFine_labelTrainIds.png")
    return folder


def _objects(rng: np.random.RandomState, index: int, height: int, width: int) -> list[dict]:
    """Return the objects in drawing order: stuff, then things, the last over the one before."""
    horizon = int(height * 0.4)
    shapes: list[tuple[str, list[list[int]]]] = [
        ("sky", _box(0, 0, width - 1, horizon)),
        ("building", _box(width // 2, horizon // 2, width - 1, horizon)),
        ("road", _box(0, horizon, width - 1, height - 1)),
    ]
    names = ("car", "person", "bicycle")
    for place in range(2):
        w, h = (int(side) for side in rng.randint(height // 4, height // 2, 2))
        x = int(place * width // 2 + rng.randint(0, max(width // 2 - w, 1)))
        y = int(rng.randint(horizon // 2, height - h - 8))
        corners = _box(x, y, x + w, y + h)
        if rng.randint(2):
            corners = [[x + w // 2, y], [x + w, y + h // 2], [x + w // 2, y + h], [x, y + h // 2]]
        shapes.append((names[(index + place) % 3], corners))
    if index == 0:
        # What the reader has to tell apart: hidden wholly, cut in two, a group, not evaluated.
        hidden = _box(4, height - 8, 8, height - 4)
        shapes += [("person", hidden), ("car", _box(2, height - 10, 20, height - 2))]
        shapes += [("bicycle", _box(30, height - 9, 60, height - 6))]
        shapes += [("trailer", _box(40, height - 12, 46, height - 3))]
        shapes += [("persongroup", _box(70, height - 7, 90, height - 3))]
        shapes += [("license plate", _box(5, height - 6, 9, height - 4))]
    objects: list[dict[str, Any]] = [{"label": name, "polygon": p} for name, p in shapes]
    objects.append({"label": "car", "polygon": _box(0, 0, 9, 9), "deleted": 1})
    return objects


def _box(x0: int, y0: int, x1: int, y1: int) -> list[list[int]]:
    return [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]


def _drawn(objects: list[dict[str, Any]]) -> list[tuple[str, bool, list[tuple[int, int]]]]:
    rows = []
    for item in objects:
        name = item["label"].removesuffix("group")
        if "deleted" not in item and name in LABELS:
            corners = [(x, y) for x, y in item["polygon"]]
            rows.append((name, name != item["label"], corners))
    return rows


def _image(
    rng: np.random.RandomState, objects: list[dict[str, Any]], size: tuple[int, int]
) -> Image.Image:
    image = Image.new("RGB", size[::-1])
    draw = ImageDraw.Draw(image)
    for name, _, corners in _drawn(objects):
        draw.polygon(corners, fill=LABELS[name][2])
    noise = rng.randint(-8, 9, (*size, 3))
    return Image.fromarray((np.asarray(image, np.int64) + noise).clip(0, 255).astype(np.uint8))


def _label_maps(
    objects: list[dict[str, Any]], size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """LabelIds uint8, instanceIds uint16 (id * 1000 + number for things), labelTrainIds uint8."""
    labels, train = Image.new("L", size[::-1]), Image.new("L", size[::-1], 255)
    instances = Image.new("I", size[::-1])
    numbers: dict[str, int] = {}
    for name, group, corners in _drawn(objects):
        label, train_id, _ = LABELS[name]
        value = label
        if label >= 24 and not group:
            value = 1000 * label + numbers.get(name, 0)
            numbers[name] = numbers.get(name, 0) + 1
        for image, fill in ((labels, label), (train, train_id), (instances, value)):
            ImageDraw.Draw(image).polygon(corners, fill=fill)
    return np.asarray(labels), np.asarray(instances).astype(np.uint16), np.asarray(train)


def alias_package(monkeypatch: Any, *modules: str) -> None:
    """Let Detectron2 import `modules` of cityscapesscripts, whose path it has from elsewhere."""
    parent = "deeplearning.projects.cityscapesApi"
    for name in ("deeplearning", "deeplearning.projects", parent):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    package = importlib.import_module("cityscapesscripts")
    monkeypatch.setattr(sys.modules[parent], "cityscapesscripts", package, raising=False)
    names = {f"cityscapesscripts.{'.'.join(m.split('.')[:n])}" for m in modules for n in (1, 2)}
    for name in ("cityscapesscripts", *names):
        monkeypatch.setitem(sys.modules, f"{parent}.{name}", importlib.import_module(name))
    for name in ("deeplearning.projects", parent):
        outer, _, inner = name.rpartition(".")
        monkeypatch.setattr(sys.modules[outer], inner, sys.modules[name], raising=False)
