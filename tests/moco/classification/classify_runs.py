"""Tiny classification runs: labeled images of 16 x 16 pixels and an encoder of 8 channels."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moco.engine.checkpoint import FORMAT
from moco.modeling.encoder import EncoderSpec, build_backbone

COLORS = {"blue": (20, 40, 200), "green": (30, 180, 40), "red": (210, 30, 20)}
SIDE_PX = 16
SPEC = EncoderSpec("resnet10", "stride2", 0.125)
COUNTS = {"train": (8, 8, 6), "val": (3, 2, 2)}
MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.3, 0.35)
# 22 images in batches of 8: 2 steps per epoch.
TINY = {
    "DEVICE": "cpu",
    "NUM_THREADS": 1,
    "DATA.NUM_WORKERS": 0,
    "AUG.CROP_PX": SIDE_PX,
    "SOLVER.BATCH_SIZE": 8,
    "SOLVER.BASE_LR": 3.0,
    "SOLVER.MAX_EPOCHS": 3,
    "SOLVER.MILESTONES_EPOCHS": "(1,)",
    "LOG.EVERY_ITERS": 1,
    "LOG.LOGGERS": (),
}


def write_labeled(
    root: Path, counts: dict[str, tuple[int, int, int]] = COUNTS, noise: float = 25
) -> Path:
    """`counts[split][class]` images of noise around the three colors."""
    rng = np.random.default_rng(0)
    for split, numbers in counts.items():
        for (name, color), number in zip(COLORS.items(), numbers, strict=True):
            folder = root / split / name
            for i in range(number):
                folder.mkdir(parents=True, exist_ok=True)
                pixels = color + rng.normal(0, noise, (SIDE_PX, SIDE_PX, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i:02d}.png")
    return root


def write_pretrained(path: Path) -> Path:
    """Write a checkpoint as pre-training does, with BN statistics that differ from the initial."""
    torch.manual_seed(3)
    backbone = build_backbone(SPEC)
    with torch.no_grad():
        for _ in range(3):
            backbone(torch.randn(16, 3, SIDE_PX, SIDE_PX) * 2 + 0.5)
    state = {f"module.encoder_q.{k}": v for k, v in backbone.state_dict().items()}
    state |= {f"module.encoder_k.{k}": v + 1 for k, v in backbone.state_dict().items()}
    state |= {
        "module.encoder_q.fc.weight": torch.randn(16, SPEC.feature_dim),
        "module.encoder_q.fc.bias": torch.randn(16),
        "module.queue": torch.randn(16, 20),
        "module.queue_ptr": torch.zeros(1, dtype=torch.long),
    }
    content = {
        "epoch": 1,
        "step": 3,
        "seed": 0,
        "num_images": 26,
        "seconds": 1.0,
        "arch": SPEC.arch,
        "format": FORMAT,
        "state_dict": state,
        "optimizer": {},
        "config": {},
        "encoder": {**asdict(SPEC), "dim": 16, "mlp": False},
        "input": {"channel_order": "RGB", "mean": list(MEAN), "std": list(STD)},
    }
    torch.save(content, path)
    return path


@pytest.fixture(scope="session")
def labeled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write images of three colors."""
    return write_labeled(tmp_path_factory.mktemp("labeled"))


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `write_pretrained`."""
    return write_pretrained(tmp_path_factory.mktemp("weights") / "moco.pth.tar")


def words(folder: Path, data: Path, checkpoint: object, **changes: object) -> list[str]:
    """Return the arguments of a tiny run; `SOLVER__BASE_LR=3` changes a key."""
    keys = TINY | {key.replace("__", "."): value for key, value in changes.items()}
    keys |= {"OUTPUT_DIR": folder, "DATA.ROOT": data}
    if checkpoint == "random":
        keys |= {"MODEL.ARCH": SPEC.arch, "MODEL.STEM": SPEC.stem, "MODEL.WIDTH": SPEC.width}
    options = [str(word) for pair in keys.items() for word in pair]
    return ["--checkpoint", str(checkpoint), *options]
