"""Small images in a folder, and a recipe that trains on them in milliseconds."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

NUM_IMAGES = 26
# 26 images in batches of 8: 3 steps per epoch; 8 does not divide a queue of 20.
TINY = {
    "DEVICE": "cpu", "NUM_THREADS": 1, "DATA.NUM_WORKERS": 0, "AUG.CROP_PX": 16,
    "MODEL.ARCH": "resnet10", "MODEL.STEM": "stride2", "MODEL.WIDTH": 0.125,
    "MOCO.DIM": 16, "MOCO.K": 20, "MOCO.M": 0.9, "MOCO.T": 0.2, "MOCO.BN_SPLITS": 2,
    "SOLVER.BATCH_SIZE": 8, "SOLVER.BASE_LR": 0.1, "SOLVER.SCHEDULE": "cosine",
    "SOLVER.LR_UPDATE": "iter", "SOLVER.MAX_ITERS": 8, "SOLVER.PRECISION": "fp32",
    "LOG.EVERY_ITERS": 2, "LOG.LOGGERS": (),
}  # fmt: skip


def options(**changes: object) -> list[str]:
    """Return TINY with changes (`SOLVER__MAX_ITERS=3`) as `KEY VALUE` arguments."""
    keys = TINY | {key.replace("__", "."): value for key, value in changes.items()}
    return [str(part) for pair in keys.items() for part in pair]


def write_images(folder: Path) -> Path:
    """Write a flat folder of small JPEG images of different sizes."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(NUM_IMAGES):
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        coarse.resize((20 + i, 30), Image.Resampling.BICUBIC).save(folder / f"{i:03d}.jpg")
    return folder


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """See `write_images`."""
    return write_images(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="session")
def tiny():
    """Return the function `options`."""
    return options
