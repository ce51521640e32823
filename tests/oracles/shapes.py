"""Images of colored rectangles and ellipses on noise: the class shows by the color alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

# Far apart from each other and from the gray noise around them.
COLORS = ((230, 40, 50), (40, 60, 230), (40, 210, 60))


@dataclass(frozen=True)
class Shape:
    """One object; `kind` indexes `COLORS`, corners (x, y) and box (x, y, w, h) in pixels.

    Those of rectangles are integers, whose fractions Detectron2 truncates after resizing.
    """

    kind: int
    corners: tuple[tuple[float, float], ...]
    box: tuple[float, float, float, float]

    @property
    def polygon(self) -> list[float]:
        return [value for corner in self.corners for value in corner]

    @property
    def area(self) -> float:
        x, y = np.array(self.corners).T
        return float(abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2)


def paint(
    rng: np.random.RandomState, first_kind: int, size: int = 96, *, one_large: bool = False
) -> tuple[Image.Image, list]:
    """Return an image of about `size` px, wide or tall, with one or two shapes, left and right.

    `one_large`: a single one, about half of the image.
    """
    width, height = (int(size + rng.randint(0, size // 3)) for _ in range(2))
    image = Image.fromarray(rng.randint(90, 150, (height, width, 3)).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    shapes = []
    sides = (size // 2, size * 3 // 4) if one_large else (size // 4, size // 2)
    for index, left in enumerate((0,) if one_large else (0, width // 2)[: 1 + rng.randint(2)]):
        w, h = (int(side) for side in rng.randint(*sides, 2))
        x = int(left + rng.randint(0, max((width if one_large else width // 2) - w, 1)))
        y = int(rng.randint(0, max(height - h - size // 8, 1)))  # the lowest rows stay free
        x = min(x, width - w - 1)
        if rng.randint(2):
            corners = ((x, y), (x + w, y), (x + w, y + h), (x, y + h))
        else:
            angles = np.arange(24) * 2 * np.pi / 24
            corners = tuple(
                (round(x + w / 2 * (1 + np.cos(a)), 2), round(y + h / 2 * (1 + np.sin(a)), 2))
                for a in angles
            )
        kind = (first_kind + index) % len(COLORS)
        draw.polygon(corners, fill=COLORS[kind])
        xs, ys = zip(*corners, strict=True)
        box = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
        shapes.append(Shape(kind, corners, box))
    return image, shapes


def save_jpeg(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=95)
