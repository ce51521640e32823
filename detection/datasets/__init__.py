"""Datasets by name: `read_split(name, cfg)` gives both engines the same validated records.

A format is one file here, which registers itself in `FORMATS`.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterable

from fvcore.common.config import CfgNode

from detection.datasets import cityscapes, coco, lvis, voc  # noqa: F401  # they register themselves
from detection.datasets.base import Source, formats, official_counts, uncollected, with_masks
from detection.datasets.base import Split as Split
from detection.datasets.coco import custom_names as custom_names
from detection.datasets.layout import datasets_root
from detection.datasets.parts import PartSource
from detection.datasets.voc import annotated_classes
from detection.datasets.voc import folder_sources as folder_sources
from moco.common.errors import UserError, plural

_PROVIDED: dict[str, Source] = {}


def provide(source: Source) -> None:
    """Make a source known in this process, by its name; this project's own names come first."""
    _PROVIDED[source.name] = source


def known(cfg: CfgNode) -> dict[str, Source]:
    """All datasets by name; custom ones (DATASETS.VOC_DIR, COCO_TRAIN_JSON) come first.

    Raises:
        DataError, UserError: a custom dataset that is none.
    """
    sources = [source for source in _PROVIDED.values() if source.present()]
    for format_ in formats().values():
        sources += format_.sources(datasets_root())
    for format_ in formats().values():
        sources += format_.custom.sources(cfg.DATASETS) if format_.custom else ()
    return {source.name: source for source in sources}


def read_split(name: str, cfg: CfgNode) -> Split:
    """Read and check a whole split; the result is kept, so that reading twice costs nothing.

    Where the configuration learns masks, objects without a usable one are left out.

    Raises:
        UserError: an unknown name; DataError: anything that cannot be used.
    """
    split = _read(find_source(name, cfg))  # type: ignore[arg-type]  # sources are hashable
    learned = cfg.get("MODEL", {}).get("MASK_ON", False)
    return with_masks(split) if learned and split.has_masks else split


def find_source(name: str, cfg: CfgNode) -> Source:
    """The source of a split or of a part of one; raises UserError: an unknown name."""
    whole, _, part = name.partition("@")
    table = known(cfg)
    if whole not in table:
        raise UserError(_unknown(whole, table))
    if not part:
        return table[whole]
    return PartSource(table[whole], part, cfg.get("SEED", 0), cfg.DATASETS.PART_INDEX)


def cache_clear() -> None:
    """Forget what was read, for whoever rewrites files in place."""
    _read.cache_clear()
    annotated_classes.cache_clear()


@functools.lru_cache(maxsize=16)
def _read(source: Source) -> Split:
    with uncollected():
        split = source.read()
    official, _ = official_counts(split.name)
    if official and official != len(split.records):
        note = f"{plural(len(split.records), 'image')}, the official split has {official}"
        split = dataclasses.replace(split, notes=(*split.notes, note))
    return split


def _unknown(name: str, table: Iterable[str]) -> str:
    if any(name in f.private for f in formats().values()):
        return f"{name}: its annotations are not public, so nothing can be measured on it"
    names = list(table)
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.5) or names[:1]
    return (
        f"unknown dataset {name!r}; near it are {', '.join(near)}; for a custom dataset set "
        "DATASETS.VOC_DIR (a folder in VOC layout), or DATASETS.COCO_TRAIN_JSON and "
        "COCO_TEST_JSON, or register the name in Detectron2's DatasetCatalog (--import MODULE)"
    )
