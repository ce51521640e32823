"""A generated dataset in VOC layout: colored rectangles on noise, three classes by color."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLORS = {"blue": (40, 60, 230), "green": (40, 210, 60), "red": (230, 40, 50)}
# The same colors under names that PASCAL VOC has.
VOC_NAMES = {"blue": "car", "green": "dog", "red": "person"}


def write_voc(
    folder: Path,
    splits: dict[str, int],
    seed: int = 0,
    size: int = 96,
    names: dict[str, str] | None = None,
    one_large: bool = False,
) -> Path:
    """Write `splits` = {name: number of images}; images of about `size` px, wide and tall.

    `names`: color → class, default the colors themselves. `one_large`: one object per image,
    about half of it, the colors in turn.
    """
    rng = np.random.RandomState(seed)
    for part in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    number = 0
    for split, count in splits.items():
        ids = [f"{number + i:06d}" for i in range(count)]
        number += count
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(ids) + "\n")
        for image_id in ids:
            only = sorted(COLORS)[int(image_id) % len(COLORS)] if one_large else None
            _write_image(folder, image_id, rng, size, names or {}, only)
    return folder


def _write_image(
    folder: Path,
    image_id: str,
    rng: np.random.RandomState,
    size: int,
    names: dict[str, str],
    only: str | None,
) -> None:
    width, height = size + rng.randint(0, size // 3), size + rng.randint(0, size // 3)
    pixels = rng.randint(90, 150, (height, width, 3)).astype(np.uint8)
    objects = []
    for left in (0,) if only else (0, width // 2)[: 1 + rng.randint(2)]:
        if only:
            name = only
            w, h = rng.randint(size // 2, size * 3 // 4, 2)
            x = rng.randint(0, width - w)
        else:
            name = sorted(COLORS)[rng.randint(len(COLORS))]
            w, h = rng.randint(size // 4, size // 2, 2)
            x = left + rng.randint(0, max(width // 2 - w, 1))
        y = rng.randint(0, height - h)
        pixels[y : y + h, x : x + w] = COLORS[name]
        objects.append(
            f"<object><name>{names.get(name, name)}</name><pose>Unspecified</pose>"
            f"<truncated>0</truncated><difficult>0</difficult>"
            f"<bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin>"
            f"<xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
        )
    Image.fromarray(pixels).save(folder / "JPEGImages" / f"{image_id}.jpg", quality=95)
    (folder / "Annotations" / f"{image_id}.xml").write_text(
        f"<annotation><size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        + "".join(objects)
        + "</annotation>"
    )
