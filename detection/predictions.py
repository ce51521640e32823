"""A detector's answers on disk: ``OUTPUT_DIR/inference/<split>.json``, the same from both engines.

    {"classes": [names], "predictions": [{"image_id", "category_id", "bbox", "score"}, …]}

``bbox`` is XYXY in pixels of the original picture, 0-based, half-open; ``category_id`` counts
``classes`` from 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moco.fileio import atomic_write_json


def rows(
    image_id: str,
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    classes: NDArray[np.integer],
) -> list[dict[str, Any]]:
    """One dict per detection of a picture, numbers with as many digits as float32 has.

    Args:
        boxes: (N, 4), scores: (N,), classes: (N,).
    """
    return [
        {
            "image_id": image_id,
            "category_id": int(category),
            "bbox": [float(str(side)) for side in box],
            "score": float(str(score)),
        }
        for box, score, category in zip(boxes, scores, classes, strict=True)
    ]


def write(
    folder: Path, split: str, class_names: Sequence[str], predictions: list[dict[str, Any]]
) -> None:
    """Write ``folder/<split>.json``."""
    content = {"classes": list(class_names), "predictions": predictions}
    atomic_write_json(folder / f"{split}.json", content)
