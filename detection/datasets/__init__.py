"""Datasets by name: Detectron2's own names and the user's own, never by substring.

`read_split(name, cfg)` gives both engines the same validated records.
"""

import dataclasses
import difflib
import functools
import gc
from collections.abc import Iterable

from fvcore.common.config import CfgNode

from detection.datasets import cityscapes, coco, lvis, sem_seg, voc
from detection.datasets.base import Record, Source, Split
from detection.datasets.coco import custom_names
from detection.datasets.official import image_count
from detection.datasets.voc import VOC_CLASSES, VOCSource, folder_sources
from moco.common.errors import UserError

__all__ = [
    "VOC_CLASSES",
    "Record",
    "Source",
    "Split",
    "VOCSource",
    "cache_clear",
    "custom_names",
    "folder_sources",
    "known",
    "provide",
    "read_split",
]

# Names that exist, and why they cannot be used.
_WITHOUT_ANNOTATIONS = (
    *("coco_2017_test", "coco_2017_test-dev"),
    *("lvis_v0.5_test", "lvis_v1_test_dev", "lvis_v1_test_challenge"),
    *("cityscapes_fine_instance_seg_test", "cityscapes_fine_sem_seg_test"),
)


_PROVIDED: dict[str, Source] = {}


def provide(source: Source) -> None:
    """Make a source known in this process, by its name; this project's own names come first."""
    _PROVIDED[source.name] = source


def known(cfg: CfgNode) -> dict[str, Source]:
    """All datasets by name. With DATASETS.VOC_DIR, only the splits of that folder.

    Raises:
        DataError, UserError: the user's own dataset is not one.
    """
    if cfg.DATASETS.get("VOC_DIR", ""):
        return dict(voc.sources(cfg))
    return {name: source for name, source in _PROVIDED.items() if source.present()} | {
        name: source
        for module in (voc, sem_seg, coco, lvis, cityscapes)
        for name, source in module.sources(cfg).items()
    }


def read_split(name: str, cfg: CfgNode) -> Split:
    """Read and check a whole split; the result is kept, so that asking twice costs nothing.

    Raises:
        UserError: an unknown name; DataError: anything that cannot be used.
    """
    table = known(cfg)
    if name not in table:
        raise UserError(_unknown(name, table, own=bool(cfg.DATASETS.get("VOC_DIR", ""))))
    return _read(table[name])  # type: ignore[arg-type]  # sources are hashable


def cache_clear() -> None:
    """Forget what was read, for whoever rewrites files in place."""
    _read.cache_clear()
    voc.annotated_classes.cache_clear()


@functools.lru_cache(maxsize=16)
def _read(source: Source) -> Split:
    # The collector would go through millions of new lists again and again, and free none.
    collecting = gc.isenabled()
    gc.disable()
    try:
        split = source.read()
    finally:
        if collecting:
            gc.enable()
    official = image_count(split.name)
    if official and official != len(split.records):
        note = f"{len(split.records)} images, the official split has {official}"
        split = dataclasses.replace(split, notes=(*split.notes, note))
    return split


def _unknown(name: str, table: Iterable[str], *, own: bool) -> str:
    names = list(table)
    if own:
        return f"unknown dataset {name!r} in DATASETS.VOC_DIR; choices are {', '.join(names)}"
    if name in _WITHOUT_ANNOTATIONS:
        return f"{name}: its annotations are not public, so nothing can be measured on it"
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.5) or names[:1]
    return (
        f"unknown dataset {name!r}; near it are {', '.join(near)}; for one of your own set "
        "DATASETS.VOC_DIR (a folder in VOC layout), or DATASETS.COCO_TRAIN_JSON and "
        "COCO_TEST_JSON, or register the name in Detectron2's DatasetCatalog (--import MODULE)"
    )
