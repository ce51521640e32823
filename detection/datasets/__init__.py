"""Datasets by name: `read_split(name, cfg)` returns the same validated records for both engines.

Each dataset format is one file here, which registers itself in `FORMATS`.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from pathlib import Path

from fvcore.common.config import CfgNode

from detection.datasets import (  # noqa: F401  # register their formats
    ade20k,
    cityscapes,
    coco,
    lvis,
    voc,
    yolo,
)
from detection.datasets.base import (
    PartSource,
    Source,
    formats,
    gc_disabled,
    official_counts,
    split_command,
    with_masks,
)
from detection.datasets.base import Split as Split
from detection.datasets.coco import custom_names as custom_names
from detection.datasets.coco import is_coco, json_files
from detection.datasets.coco import roboflow_sources as roboflow_sources
from detection.datasets.files import datasets_root, describe_folder, inner_folders
from detection.datasets.voc import annotated_classes
from detection.datasets.voc import folder_sources as folder_sources
from detection.datasets.yolo import data_sources as data_sources
from moco.common.errors import DataError, UserError, first_few, plural

_PROVIDED: dict[str, Source] = {}


def register_source(source: Source) -> None:
    """Register a source by its name in this process; this project's own names take precedence."""
    _PROVIDED[source.name] = source


def known_sources(cfg: CfgNode) -> dict[str, Source]:
    """Return all sources by name; those of `custom_keys` take precedence.

    Raises:
        DataError: If the files of a custom dataset are missing or damaged.
        UserError: If the keys of a custom dataset contradict each other.
    """
    sources = [source for source in _PROVIDED.values() if source.present()]
    for format_ in formats().values():
        sources += format_.sources(datasets_root())
    for format_ in formats().values():
        sources += format_.custom.sources(cfg.DATASETS) if format_.custom else ()
    return {source.name: source for source in sources}


def custom_keys(datasets: CfgNode) -> list[str]:
    """Return the keys of DATASETS that name custom datasets, as far as they are set."""
    keys = ("VOC_DIR", "COCO_DIR", "COCO_TRAIN_JSON", "COCO_TEST_JSON", "YOLO_YAML")
    return [key for key in keys if datasets.get(key, "")]


def find_custom(folder: Path) -> dict[str, str]:
    """Return the keys of DATASETS that read the dataset in a folder, and their values.

    If the folder itself has none, the only dataset in its subfolders is taken.

    Raises:
        DataError: If there is no dataset in a known layout, or several.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the folder of a dataset")
    if not (found := _datasets_in(folder)):
        found = [keys for inner in inner_folders(folder) for keys in _datasets_in(inner)]
    if len(found) == 1:
        return {key: str(value) for key, value in found[0].items()}
    if found:
        named = [
            " ".join(f"{key} {value.relative_to(folder)}" for key, value in keys.items())
            for keys in found
        ]
        several = first_few(named, 3)
        one = "give the folder of one, or move the others away"
        raise DataError(f"{folder}: has several datasets ({several}); {one}")
    if (folder / "classes.txt").is_file() or any(map(is_coco, json_files(folder))):
        divide = f"to divide it: {split_command(folder)}"
        raise DataError(f"{folder}: a dataset without splits ({describe_folder(folder)}); {divide}")
    raise DataError(
        f"{folder}: no dataset ({describe_folder(folder)}); expected VOC's Annotations/ and "
        "JPEGImages/, a data.yaml, Roboflow's train/_annotations.coco.json, or COCO's JSON files, "
        "whose names have train and val (or test)"
    )


def _datasets_in(folder: Path) -> list[dict[str, Path]]:
    customs = [format_.custom for format_ in formats().values() if format_.custom]
    return [keys for custom in customs for keys in custom.find(folder)]


def read_split(name: str, cfg: CfgNode) -> Split:
    """Read and validate a split; the result is cached.

    If the configuration trains masks, objects without a usable mask are left out.

    Raises:
        UserError: If the name is unknown.
        DataError: If the split contains anything that cannot be used.
    """
    split = _read(find_source(name, cfg))  # type: ignore[arg-type]  # sources are hashable
    trains_masks = cfg.get("MODEL", {}).get("MASK_ON", False)
    return with_masks(split) if trains_masks and split.has_masks else split


def find_source(name: str, cfg: CfgNode) -> Source:
    """Return the source of a split, or of a part of one such as `name@10%`.

    Raises:
        UserError: If the name is unknown.
    """
    whole, _, part = name.partition("@")
    table = known_sources(cfg)
    if whole not in table:
        raise UserError(_unknown(whole, table))
    if not part:
        return table[whole]
    return PartSource(table[whole], part, cfg.get("SEED", 0), cfg.DATASETS.PART_INDEX)


def cache_clear() -> None:
    """Clear the caches of read splits, for callers that rewrite annotation files in place."""
    _read.cache_clear()
    annotated_classes.cache_clear()


@functools.lru_cache(maxsize=16)
def _read(source: Source) -> Split:
    with gc_disabled():
        split = source.read()
    official, _ = official_counts(split.name)
    if official and official != len(split.records):
        note = f"{plural(len(split.records), 'image')}, the official split has {official}"
        split = dataclasses.replace(split, notes=(*split.notes, note))
    return split


def _unknown(name: str, table: Iterable[str]) -> str:
    if any(name in f.private for f in formats().values()):
        return f"{name}: its annotations are not public, so it cannot be evaluated"
    names = list(table)
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.5) or names[:1]
    return (
        f"unknown dataset {name!r}; did you mean {', '.join(near)}? For a custom dataset set "
        "DATASETS.VOC_DIR (a folder in VOC layout), DATASETS.YOLO_YAML (a data.yaml), "
        "DATASETS.COCO_DIR (Roboflow's folders), or DATASETS.COCO_TRAIN_JSON and COCO_TEST_JSON, "
        "or register the name in Detectron2's DatasetCatalog (--import MODULE)"
    )
