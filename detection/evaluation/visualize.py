"""Rendering of predictions on their images (`--visualize N`).

Instances are rendered as boxes with class and score, masks and keypoints: all with a score of at
least 0.5 or, if there are none, the few best. Semantic segmentation is rendered as the classes'
colors over the image, and a legend.
"""

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from detection.datasets.base import Record, Split, image_key
from detection.datasets.files import OpenURL, read_image
from detection.evaluation.base import Prediction
from moco.common.files import atomic_write

SCORE_FROM = 0.5
AT_LEAST = 3  # number of instances if none has that score
KEYPOINT_FROM = 0.05  # as in Detectron2's visualizer
MASK_OPACITY, LABELS_OPACITY = 0.45, 0.6
# Pairs of COCO's 17 keypoints: face, arms, legs, torso.
_SKELETON = (
    (0, 1), (0, 2), (1, 3), (2, 4), (5, 6), (5, 7), (7, 9), (6, 8), (8, 10), (5, 11), (6, 12),
    (11, 12), (11, 13), (13, 15), (12, 14), (14, 16),
)  # fmt: skip

Color = tuple[int, int, int]
Box = tuple[float, float, float, float]


class Visualizer:
    """Renderer of evenly spread images of a split, as `folder/<image>.jpg`.

    Every process may have one: each renders the chosen images among its own.

    Args:
        folder: Folder of the files.
        number: Number of images.
        split: The split.
        open_url: Opens an image whose path contains `://`.

    Attributes:
        records: Records of the chosen images.
    """

    def __init__(
        self, folder: Path, number: int, split: Split, open_url: OpenURL | None = None
    ) -> None:
        count = min(number, len(split.records))
        self.records = [split.records[i * len(split.records) // count] for i in range(count)]
        stems = [Path(record["file_name"]).stem for record in self.records]
        if len(set(stems)) < count:
            stems = [f"{index:03d}-{stem}" for index, stem in enumerate(stems)]
        paths = [folder / f"{stem}.jpg" for stem in stems]
        self._paths = dict(zip(map(image_key, self.records), paths, strict=True))
        self._names, self._colors = split.classes, split.metadata.get("stuff_colors")
        self._open_url = open_url

    def add(self, record: Record, prediction: Prediction) -> None:
        """Render the image if it is one of the chosen ones.

        Raises:
            DataError: If the image cannot be read.
            UserError: If the file cannot be written.
        """
        path = self._paths.get(image_key(record))
        if path is not None:
            image = render(record, prediction, self._names, self._colors, self._open_url)
            atomic_write(path, lambda file: image.save(file, "JPEG", quality=92))


def render(
    record: Mapping[str, Any],
    prediction: Prediction,
    class_names: Sequence[str],
    colors: Sequence[Sequence[int]] | None = None,
    open_url: OpenURL | None = None,
) -> Image.Image:
    """Render a prediction on its image.

    Args:
        record: Record of the image, which is rotated by its EXIF orientation.
        prediction: The prediction.
        class_names: Class names by contiguous id.
        colors: Colors of the semantic classes, RGB 0..255; default VOC's.
        open_url: Opens an image whose path contains `://`.
    """
    image = read_image(record["file_name"], open_url)
    if "sem_seg" not in prediction:
        return _draw_instances(image, prediction, class_names)
    if colors is None:
        colors = [voc_color(i) for i in range(len(class_names))]
    palette = [(int(r), int(g), int(b)) for r, g, b in colors]
    return _draw_labels(image, np.asarray(prediction["sem_seg"]), class_names, palette)


def visible_instances(scores: NDArray[np.floating]) -> list[int]:
    """Return the indices of the instances to render, the highest score first."""
    order = np.argsort(-scores, kind="stable").tolist()
    return [i for i in order if scores[i] >= SCORE_FROM] or order[:AT_LEAST]


def _draw_instances(
    image: Image.Image, prediction: Prediction, class_names: Sequence[str]
) -> Image.Image:
    scores, classes = np.asarray(prediction["scores"]), np.asarray(prediction["classes"])
    boxes = np.asarray(prediction["boxes"], dtype=float)
    masks = prediction.get("masks")
    chosen = visible_instances(scores)
    # One color per instance if there are masks, which overlap, else one per class.
    hues = range(len(chosen)) if masks is not None else classes[chosen].tolist()
    colors = dict(zip(chosen, map(_color, hues), strict=True))
    from_large = sorted(chosen, key=lambda i: -np.prod(boxes[i, 2:] - boxes[i, :2]))
    if masks is not None:
        image = _draw_masks(image, [(masks[i], colors[i]) for i in from_large])
    if "keypoints" in prediction:
        for i in from_large:
            _draw_keypoints(image, np.asarray(prediction["keypoints"][i]), colors[i])
    tags = [f"{class_names[int(classes[i])]} {float(scores[i]):.2f}" for i in chosen]
    draw_boxes(image, boxes[chosen], tags, [colors[i] for i in chosen])
    return image


def draw_boxes(
    image: Image.Image,
    boxes: NDArray[np.floating],
    tags: Sequence[str],
    colors: Sequence[Color],
    line_px: int | None = None,
    font_px: float | None = None,
) -> None:
    """Draw boxes and their tags in place, small boxes over large ones.

    Args:
        image: Image to draw on.
        boxes: (N, 4) XYXY.
        tags: Text of each box; earlier ones have precedence for the place above their box.
        colors: Color of each box.
        line_px: Width of a line; None for the default of the image's size.
        font_px: Height of the letters; None for the default of the image's size.
    """
    pen = ImageDraw.Draw(image)
    for i in np.argsort(-np.prod(boxes[:, 2:] - boxes[:, :2], axis=1), kind="stable"):
        pen.rectangle(boxes[i].tolist(), outline=colors[i], width=line_px or _line(image))
    font = _font(image) if font_px is None else ImageFont.load_default(font_px)
    taken: list[Box] = []
    for box, tag, color in zip(boxes, tags, colors, strict=True):
        taken.append(_draw_tag(pen, box, tag, font, color, image, taken))


def _draw_masks(image: Image.Image, masks: Sequence[tuple[dict[str, Any], Color]]) -> Image.Image:
    """Tint masks (compressed RLE), and draw their edges, the pixels with a neighbor outside."""
    from pycocotools import mask as mask_util

    pixels = np.array(image, dtype=np.float32)  # (H, W, 3)
    for code, color in masks:
        mask = mask_util.decode(code).astype(bool)
        around = np.pad(mask, 1)
        inner = around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
        pixels[mask] += MASK_OPACITY * (np.array(color, dtype=np.float32) - pixels[mask])
        pixels[mask & ~inner] = color
    return Image.fromarray(pixels.round().astype(np.uint8))


def _draw_keypoints(image: Image.Image, points: NDArray[np.floating], color: Color) -> None:
    """Draw the keypoints (K, 3) of one instance, with lines between them if they are COCO's."""
    pen, line = ImageDraw.Draw(image), _line(image)
    visible = points[:, 2] > KEYPOINT_FROM
    for pair in _SKELETON if len(points) == 17 else ():
        if visible[list(pair)].all():
            pen.line(points[list(pair), :2].ravel().tolist(), fill=color, width=line)
    for x, y, _ in points[visible].tolist():
        pen.circle((x, y), line + 1, fill=color, outline=(255, 255, 255))


def _draw_tag(
    pen: ImageDraw.ImageDraw,
    box: NDArray[np.floating],
    text: str,
    font: Any,
    color: Color,
    image: Image.Image,
    taken: Sequence[Box],
) -> Box:
    """Draw a tag above its box, or elsewhere if occupied, inside the image; return its area."""
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    width, height = right - left + 6, bottom - top + 4
    x = float(np.clip(box[0], 0, max(image.width - width, 0)))
    places = np.clip([box[1] - height, box[1], box[3] - height, box[3]], 0, image.height - height)
    areas = [(x, y, x + width, y + height) for y in places.tolist()]
    area = min(areas, key=lambda area: sum(_overlap(area, other) for other in taken))
    pen.rectangle(area, fill=color, outline=(40, 40, 40))
    ink = (0, 0, 0) if np.dot(color, (0.299, 0.587, 0.114)) > 140 else (255, 255, 255)
    pen.text((area[0] + 3 - left, area[1] + 2 - top), text, fill=ink, font=font)
    return area


def _overlap(a: Box, b: Box) -> float:
    """Return the area that two boxes share."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0) * max(height, 0)


def _draw_labels(
    image: Image.Image,
    labels: NDArray[np.integer],
    class_names: Sequence[str],
    palette: Sequence[Color],
) -> Image.Image:
    """Blend the colors of the labels (H, W) with the image, except on background; add a legend."""
    tint = np.array(palette, dtype=np.float32)[labels]  # (H, W, 3)
    opacity = np.full((*labels.shape, 1), LABELS_OPACITY, dtype=np.float32)
    if class_names[0] == "background":
        opacity[labels == 0] = 0
    pixels = np.asarray(image, dtype=np.float32)
    overlay = Image.fromarray((pixels + opacity * (tint - pixels)).round().astype(np.uint8))
    present = [i for i in np.unique(labels).tolist() if (class_names[i], i) != ("background", 0)]
    return _with_legend(overlay, [(class_names[i], palette[i]) for i in present])


def _with_legend(image: Image.Image, entries: Sequence[tuple[str, Color]]) -> Image.Image:
    """Add a legend below the image: squares of the colors with their names, in rows."""
    font = _font(image)
    measure = ImageDraw.Draw(image)
    _, top, _, bottom = measure.textbbox((0, 0), "Ag", font=font)
    side, gap = round(bottom - top), 6
    places, x, y = [], gap, gap
    for name, _ in entries:
        width = side + 3 * gap + int(measure.textlength(name, font=font))
        if x + width > image.width and x > gap:
            x, y = gap, y + side + 8
        places.append((x, image.height + y))
        x += width
    height = image.height + (y + side + 8 if entries else 0)
    canvas = Image.new("RGB", (image.width, height), "white")
    canvas.paste(image)
    pen = ImageDraw.Draw(canvas)
    for (left, upper), (name, color) in zip(places, entries, strict=True):
        pen.rectangle((left, upper, left + side, upper + side), color, outline=(90, 90, 90))
        pen.text((left + side + gap, upper - top), name, fill=(0, 0, 0), font=font)
    return canvas


def _line(image: Image.Image) -> int:
    return max(2, round(min(image.size) / 200))


def _font(image: Image.Image) -> Any:
    return ImageFont.load_default(float(min(max(min(image.size) / 36, 11), 36)))


def _color(index: int) -> Color:
    """Return a bright color; those of successive indices are far apart on the color wheel."""
    red, green, blue = colorsys.hsv_to_rgb((0.02 + index * 0.618034) % 1, 0.8, 0.97)
    return round(255 * red), round(255 * green), round(255 * blue)


def voc_color(index: int) -> list[int]:
    """Return VOC's color of a class id, whose bits go to red, green and blue in turn."""
    return [
        sum((index >> (3 * bit + channel) & 1) << (7 - bit) for bit in range(8))
        for channel in range(3)
    ]
