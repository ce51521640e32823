"""A generated dataset in VOC's segmentation layout: colored shapes and their palette masks.

Under `$DETECTRON2_DATASETS`: VOC<year>/{JPEGImages,SegmentationClass,SegmentationClassAug,
ImageSets/Segmentation}/. Classes in use: aeroplane (red), bicycle (blue), bird (green).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from tests.oracles.shapes import paint, save_jpeg


def write_voc_seg(
    folder: Path, splits: dict[str, int], *, year: int = 2012, seed: int = 0, size: int = 96
) -> Path:
    """Write `splits` = {"train_aug": number of images, "val": ...}; returns `folder`.

    The masks of train_aug are in SegmentationClassAug/, all others in SegmentationClass/.
    """
    rng = np.random.RandomState(seed)
    root = folder / f"VOC{year}"
    (root / "ImageSets" / "Segmentation").mkdir(parents=True, exist_ok=True)
    number = 0
    for split, count in splits.items():
        ids = [f"{year}_{number + i:06d}" for i in range(count)]
        (root / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(ids) + "\n")
        masks = root / ("SegmentationClassAug" if split == "train_aug" else "SegmentationClass")
        masks.mkdir(exist_ok=True)
        for image_id in ids:
            number += 1
            image, shapes = paint(rng, number % 3, size)
            save_jpeg(image, root / "JPEGImages" / f"{image_id}.jpg")
            mask = Image.new("P", image.size)
            mask.putpalette(voc_palette())
            draw = ImageDraw.Draw(mask)
            for shape in shapes:
                draw.polygon(shape.corners, fill=shape.kind + 1, outline=255)
            mask.save(masks / f"{image_id}.png")
    return folder


def voc_palette() -> list[int]:
    """VOC's 256 RGB colors: an index's bits, three at a time, from the highest bit down."""
    colors = []
    for index in range(256):
        red = green = blue = 0
        rest = index
        for bit in range(7, -1, -1):
            red |= (rest & 1) << bit
            green |= (rest >> 1 & 1) << bit
            blue |= (rest >> 2 & 1) << bit
            rest >>= 3
        colors += [red, green, blue]
    return colors
