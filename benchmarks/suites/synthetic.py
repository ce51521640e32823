"""Generator of the quickstart's images, which show textured shapes.

* **images** without labels, one object each, for pre-training: `images/000001.jpg`. A few
  labeled ones, in one folder per class, are for the kNN monitor: `knn/{train,val}/<class>/*.jpg`.
* **scenes** of one to five objects in PASCAL VOC's layout, for fine-tuning and evaluation:
  `scenes/{Annotations,ImageSets/Main,JPEGImages}`, splits `trainval` and `test`.

Class i is shape i filled with texture (3i + 1) mod 8, so a class can be recognized by its outline
or its texture. Size, position, rotation, aspect ratio and colors are sampled for every object;
colors are independent of the class. A file depends only on the seed and its own number, so that any
subset can be generated in any order.

Legend: H, W height and width in pixels; P number of corners of an outline.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from benchmarks.suites.prepare import atomic_folder
from moco.common.files import PathLike
from moco.common.progress import Progress

Array = NDArray[np.floating[Any]]

IMAGE_PX = 72
SCENE_PX = 160
OBJECT_IN_IMAGE_PX = (40, 64)
OBJECT_IN_SCENE_PX = (34, 72)
OBJECTS_PER_SCENE = (1, 5)
MAX_OVERLAP_IOU = 0.1
NOISE_SIGMA = 6.0  # of 255
JPEG_QUALITY = 95
SUPERSAMPLING = 3
# Separate random streams, so that an image and a scene of the same number are independent.
IMAGES, KNN_TRAIN, KNN_VAL, SCENES_TRAIN, SCENES_TEST = range(5)


def _polar(radius: Callable[[Array], Array], corners: int = 48) -> Array:
    angle = np.linspace(0.0, 2 * math.pi, corners, endpoint=False, dtype=np.float32)
    r = radius(angle)
    return np.stack([r * np.sin(angle), -r * np.cos(angle)], axis=1)


def _heart() -> Array:
    t = np.linspace(0.0, 2 * math.pi, 48, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([x / 17, -(y + 2.5) / 16], axis=1)


def _crescent() -> Array:
    outer = np.linspace(0.25 * math.pi, 1.75 * math.pi, 36)
    inner = outer[::-1]
    tip_x = math.cos(0.25 * math.pi)
    # The inner arc runs through the same two tips around a center moved to the right.
    center, r = tip_x - 0.12, math.hypot(0.12, math.sin(0.25 * math.pi))
    start = math.atan2(math.sin(0.25 * math.pi), 0.12)
    bend = np.interp(inner, (outer[0], outer[-1]), (start, 2 * math.pi - start))
    x = np.concatenate([np.cos(outer), center + r * np.cos(bend)])
    y = np.concatenate([np.sin(outer), r * np.sin(bend)])
    return np.stack([x + 0.1, y], axis=1)


# Outlines (P, 2) in a square of side 2 around the origin.
SHAPES: dict[str, Array] = {
    name: np.array(corners, dtype=np.float32)
    for name, corners in {
        "disc": _polar(lambda a: np.full_like(a, 0.95)),
        "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
        "triangle": [(0, -0.95), (0.95, 0.75), (-0.95, 0.75)],
        "star": _polar(lambda a: np.where(np.arange(a.size) % 2 == 0, 1.0, 0.45), corners=10),
        "plus": [
            (-0.35, -0.95),
            (0.35, -0.95),
            (0.35, -0.35),
            (0.95, -0.35),
            (0.95, 0.35),
            (0.35, 0.35),
            (0.35, 0.95),
            (-0.35, 0.95),
            (-0.35, 0.35),
            (-0.95, 0.35),
            (-0.95, -0.35),
            (-0.35, -0.35),
        ],
        "heart": _heart(),
        "crescent": _crescent(),
        "arrow": [
            (0, -1),
            (0.85, -0.1),
            (0.38, -0.1),
            (0.38, 0.95),
            (-0.38, 0.95),
            (-0.38, -0.1),
            (-0.85, -0.1),
        ],
    }.items()
}


def _wave(x: Array) -> Array:
    """Compute a soft-edged square wave of period 1, between 0 and 1."""
    return np.clip(0.5 + 2.2 * np.sin(2 * math.pi * x), 0.0, 1.0)


def _cell(x: Array) -> Array:
    """Return the distance of x from the center of its cell of size 1, 0 to 0.5."""
    return np.abs(x - np.floor(x) - 0.5)


def _soft(x: Array) -> Array:
    return np.clip(0.5 + 7.0 * x, 0.0, 1.0)


def _bricks(x: Array, y: Array, rng: Generator) -> Array:
    row = np.floor(y)
    joint = np.maximum(_cell(0.5 * x + 0.5 * (row % 2)) - 0.42, 0.7 * (_cell(y) - 0.36))
    return 1.0 - _soft(2.0 * joint)


# Each maps coordinates x, y (H, W), one period per unit, to the share of the second color in 0..1.
TEXTURES: dict[str, Callable[[Array, Array, Generator], Array]] = {
    "stripes": lambda x, y, rng: _wave(x),
    "checker": lambda x, y, rng: np.clip(
        0.5 + 3.0 * np.sin(math.pi * 1.3 * x) * np.sin(math.pi * 1.3 * y), 0.0, 1.0
    ),
    "dots": lambda x, y, rng: _soft(0.3 - np.hypot(_cell(x), _cell(y))),
    "waves": lambda x, y, rng: _wave(x + 0.35 * np.sin(math.pi * y)),
    "grid": lambda x, y, rng: _soft(np.maximum(_cell(x), _cell(y)) - 0.36),
    "bricks": _bricks,
    "rings": lambda x, y, rng: _wave(np.hypot(x, y)),
    "blotch": lambda x, y, rng: np.clip(0.5 + 2.5 * smooth_noise(x.shape, 9, rng), 0.0, 1.0),
}

_NAMES = list(TEXTURES)
PAIRS: tuple[tuple[str, str], ...] = tuple(
    (shape, _NAMES[(3 * i + 1) % 8]) for i, shape in enumerate(SHAPES)
)
CLASSES: tuple[str, ...] = tuple(f"{texture}-{shape}" for shape, texture in PAIRS)


@dataclass(frozen=True)
class Box:
    """Bounding box of one object of a scene.

    Attributes:
        label: Class index.
        x0: First column that it covers.
        y0: First row.
        x1: Column after the last one.
        y1: Row after the last one.
        truncated: Whether the image's edge cuts the object.
    """

    label: int
    x0: int
    y0: int
    x1: int
    y1: int
    truncated: bool

    def iou(self, other: "Box") -> float:
        """Compute the intersection over union with another box."""
        w = min(self.x1, other.x1) - max(self.x0, other.x0)
        h = min(self.y1, other.y1) - max(self.y0, other.y0)
        shared = max(w, 0) * max(h, 0)
        areas = ((box.x1 - box.x0) * (box.y1 - box.y0) for box in (self, other))
        return shared / (sum(areas) - shared)


def smooth_noise(shape: tuple[int, ...], coarse: int, rng: Generator) -> Array:
    """Sample `coarse` x `coarse` Gaussian values, and enlarge them smoothly to `shape` (H, W)."""
    low = rng.standard_normal((coarse, coarse), dtype=np.float32)
    image = Image.fromarray(low).resize((shape[1], shape[0]), Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.float32)


def draw_object(canvas: Array, label: int, center: Array, size_px: float, rng: Generator) -> Box:
    """Draw one object of class `label` onto `canvas` (H, W, 3), 0..255, in place.

    Args:
        canvas: Pixels that are changed.
        label: Class index.
        center: Position (2,), x and y in pixels.
        size_px: Side of the square that the unrotated outline fills.
        rng: Random numbers.

    Returns:
        The tight box of the pixels of which the object covers at least half.
    """
    height, width = canvas.shape[:2]
    shape, texture = PAIRS[label]
    angle = rng.uniform(0, 2 * math.pi)
    aspect = math.exp(rng.uniform(-0.22, 0.22))
    turn = np.array(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=np.float32
    )
    scale = np.array([aspect, 1 / aspect], dtype=np.float32) * (size_px / 2)
    corners = (SHAPES[shape] * scale) @ turn.T + center

    # Computing only the region that the object can touch saves most of the time.
    left, top = np.clip(np.floor(corners.min(axis=0)), 0, None).astype(int)
    right, bottom = np.minimum(np.ceil(corners.max(axis=0)), (width, height)).astype(int)
    mask = Image.new("L", ((right - left) * SUPERSAMPLING, (bottom - top) * SUPERSAMPLING))
    points = [(x, y) for x, y in (corners - (left, top)) * SUPERSAMPLING]
    ImageDraw.Draw(mask).polygon(points, fill=255)
    covered = np.asarray(mask.reduce(SUPERSAMPLING), dtype=np.float32) / 255
    ys, xs = np.nonzero(covered >= 0.5)
    cut = bool(corners.min() < 0 or (corners > (width, height)).any())
    x0, y0 = int(left + xs.min()), int(top + ys.min())
    x1, y1 = int(left + xs.max() + 1), int(top + ys.max() + 1)
    box = Box(label, x0, y0, x1, y1, cut)

    grid = np.stack(np.meshgrid(np.arange(left, right), np.arange(top, bottom)), axis=-1)
    local = ((grid + 0.5 - center) @ turn / scale).astype(np.float32)
    frequency = rng.uniform(1.7, 2.3)  # periods per half side
    phase = rng.uniform(0, 1, 2).astype(np.float32) * (texture != "rings")
    x, y = np.moveaxis(local * frequency + phase, -1, 0)
    share = TEXTURES[texture](x, y, rng)
    # The lightness of the two colors differs, so that the texture is always visible.
    dark, light = rng.uniform(20, 100), rng.uniform(155, 245)
    one, two = _color(dark, rng), _color(light, rng)
    if rng.random() >= 0.5:
        one, two = two, one
    paint = one + share[..., None] * (two - one)
    region = canvas[top:bottom, left:right]
    region += covered[..., None] * (paint - region)
    return box


def make_image(seed: int, stream: int, index: int, label: int) -> NDArray[np.uint8]:
    """Draw one object of class `label` on a smooth background, (H, W, 3) RGB."""
    rng = np.random.default_rng((seed, stream, index))
    canvas = _background(IMAGE_PX, rng)
    size = rng.uniform(*OBJECT_IN_IMAGE_PX)
    margin = 0.45 * size
    center = rng.uniform(margin, IMAGE_PX - margin, 2).astype(np.float32)
    draw_object(canvas, label, center, size, rng)
    return _finish(canvas, rng)


def make_scene(seed: int, stream: int, index: int) -> tuple[NDArray[np.uint8], list[Box]]:
    """Draw a scene (H, W, 3) RGB whose objects hardly overlap, and return it with their boxes."""
    rng = np.random.default_rng((seed, stream, index))
    canvas = _background(SCENE_PX, rng)
    wanted = int(rng.integers(OBJECTS_PER_SCENE[0], OBJECTS_PER_SCENE[1] + 1))
    boxes: list[Box] = []
    while len(boxes) < wanted:
        before = canvas.copy()
        size = rng.uniform(*OBJECT_IN_SCENE_PX)
        center = rng.uniform(0.5 * size, SCENE_PX - 0.5 * size, 2).astype(np.float32)
        box = draw_object(canvas, int(rng.integers(len(CLASSES))), center, size, rng)
        if all(box.iou(other) <= MAX_OVERLAP_IOU for other in boxes):
            boxes.append(box)
        else:
            canvas[:] = before
    return _finish(canvas, rng), boxes


def write_images(folder: PathLike, count: int, seed: int) -> None:
    """Write `count` images, the classes in turn, into one flat folder without labels."""
    with atomic_folder(folder) as part, Progress(count, "draw images", "img") as progress:
        for index in range(count):
            image = make_image(seed, IMAGES, index, index % len(CLASSES))
            _write_jpeg(part / f"{index + 1:06d}.jpg", image)
            progress.update()


def write_knn(folder: PathLike, train: int, val: int, seed: int) -> None:
    """Write images in one folder per class for the kNN monitor: `{train,val}/<class>/*.jpg`."""
    with atomic_folder(folder) as part:
        for name, stream, count in (("train", KNN_TRAIN, train), ("val", KNN_VAL, val)):
            for index in range(count):
                label = index % len(CLASSES)
                path = part / name / CLASSES[label] / f"{index + 1:06d}.jpg"
                _write_jpeg(path, make_image(seed, stream, index, label))


def write_scenes(folder: PathLike, trainval: int, test: int, seed: int) -> None:
    """Write labeled scenes in VOC's layout; the splits are `trainval` and `test`."""
    number = 0
    splits = (("trainval", SCENES_TRAIN, trainval), ("test", SCENES_TEST, test))
    with atomic_folder(folder) as part, Progress(trainval + test, "draw scenes", "img") as progress:
        lists = part / "ImageSets" / "Main"
        for made in (lists, part / "Annotations"):
            made.mkdir(parents=True)
        for split, stream, count in splits:
            names = []
            for index in range(count):
                number += 1
                names.append(f"{number:06d}")
                image, boxes = make_scene(seed, stream, index)
                _write_jpeg(part / "JPEGImages" / f"{names[-1]}.jpg", image)
                text = _annotation(f"{names[-1]}.jpg", boxes)
                (part / "Annotations" / f"{names[-1]}.xml").write_text(text, encoding="utf-8")
                progress.update()
            (lists / f"{split}.txt").write_text(
                "".join(f"{name}\n" for name in names), encoding="utf-8"
            )


def _color(lightness: float, rng: Generator) -> Array:
    """Sample a muted color (3,) around a gray level."""
    tint = rng.standard_normal(3)
    tint -= tint.mean()
    tint *= rng.uniform(10, 45) / max(float(np.abs(tint).max()), 1e-6)
    return np.clip(lightness + tint, 0, 255).astype(np.float32)


def _background(side: int, rng: Generator) -> Array:
    """Mix two muted colors by smooth noise, (side, side, 3), 0..255."""
    level = rng.uniform(70, 190)
    one = _color(level - rng.uniform(10, 40), rng)
    two = _color(level + rng.uniform(10, 40), rng)
    share = np.clip(0.5 + 0.35 * smooth_noise((side, side), 5, rng), 0, 1)[..., None]
    return (one + share * (two - one)).astype(np.float32)


def _finish(canvas: Array, rng: Generator) -> NDArray[np.uint8]:
    noise = rng.standard_normal(canvas.shape, dtype=np.float32)
    return np.clip(np.rint(canvas + NOISE_SIGMA * noise), 0, 255).astype(np.uint8)


def _write_jpeg(path: Path, image: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, quality=JPEG_QUALITY)


def _annotation(filename: str, boxes: Sequence[Box]) -> str:
    """Format boxes as PASCAL VOC XML, with 1-based inclusive corners."""
    objects = "".join(
        f"""
  <object>
    <name>{CLASSES[box.label]}</name>
    <pose>Unspecified</pose>
    <truncated>{int(box.truncated)}</truncated>
    <difficult>0</difficult>
    <bndbox>
      <xmin>{box.x0 + 1}</xmin>
      <ymin>{box.y0 + 1}</ymin>
      <xmax>{box.x1}</xmax>
      <ymax>{box.y1}</ymax>
    </bndbox>
  </object>"""
        for box in boxes
    )
    return f"""<annotation>
  <folder>scenes</folder>
  <filename>{filename}</filename>
  <size>
    <width>{SCENE_PX}</width>
    <height>{SCENE_PX}</height>
    <depth>3</depth>
  </size>
  <segmented>0</segmented>{objects}
</annotation>
"""
