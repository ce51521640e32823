"""A generated folder of datasets as Roboflow exports them, two of them in a domain."""

from __future__ import annotations

from pathlib import Path

from detection.config.task import default_task
from detection.datasets import read_split
from tests.oracles.relayout import as_roboflow
from tests.oracles.tiny_voc import write_voc

NAMES = ("birds.v2i.coco", "cars", "drones", "eggs", "aerial/farms", "aerial/ships")
TASKS = ("aerial--farms", "aerial--ships", "birds.v2i.coco", "cars", "drones", "eggs")


def write_collection(folder: Path, names: tuple[str, ...] = NAMES, images: int = 4) -> Path:
    """Write datasets of `images` training images and two test images each; returns the folder."""
    for seed, name in enumerate(names):
        voc = write_voc(folder / ".voc" / f"voc{seed}", {"trainval": images, "test": 2}, seed)
        cfg = default_task()
        cfg.DATASETS.VOC_DIR = str(voc)
        splits = {"train": "trainval", "test": "test"}
        read = {own: read_split(f"{voc.name}_{split}", cfg) for own, split in splits.items()}
        as_roboflow(folder / name, read)
    return folder
