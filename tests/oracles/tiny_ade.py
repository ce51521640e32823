"""A generated dataset in the layout of ADE20k's SceneParsing-150: shapes of a few of its classes.

Under `$DETECTRON2_DATASETS`: ADEChallengeData2016/. Label maps have 0 in the background and at the
borders of shapes, and the labels 2, 5 and 150 in shapes of the colors of `shapes.COLORS`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from tests.oracles.shapes import paint, save_jpeg

LABELS = (2, 5, 150)  # of the colors
FOLDERS = {"train": "training", "val": "validation"}


def write_ade(folder: Path, splits: dict[str, int], *, seed: int = 0, size: int = 96) -> Path:
    """Write `splits` = {"train": number of images, "val": ...}; return `folder`."""
    rng = np.random.RandomState(seed)
    root = folder / "ADEChallengeData2016"
    for split, count in splits.items():
        labels = root / "annotations" / FOLDERS[split]
        labels.mkdir(parents=True, exist_ok=True)
        for number in range(1, count + 1):
            name = f"ADE_{split}_{number:08d}"
            image, shapes = paint(rng, number % 3, size)
            save_jpeg(image, root / "images" / FOLDERS[split] / f"{name}.jpg")
            mask = Image.new("L", image.size)
            draw = ImageDraw.Draw(mask)
            for shape in shapes:
                draw.polygon(shape.corners, fill=LABELS[shape.kind], outline=0)
            mask.save(labels / f"{name}.png")
    rows = [f"{i}\t0.1\t1\t1\tthing {i}, synonym {i}  " for i in range(1, 151)]
    (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *rows]))
    return folder
