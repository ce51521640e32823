"""The doctor for custom datasets: a folder in VOC layout, or files in COCO's format.

Beside what training's own readers check: the objects of each class in each split, images that are
there twice and, with `verify`, every image decoded and compared with its annotations.
"""

import dataclasses
import hashlib
import itertools
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fvcore.common.config import CfgNode

from detection.datasets import coco, voc
from detection.datasets.base import Split, object_counts
from detection.datasets.doctor import ABSENT, NOTE, WRONG, Finding, examine_source
from moco.common.errors import DataError

_SHOWN = 30  # classes


def command(cfg: CfgNode) -> str:
    """What checks the whole custom dataset of a task, for messages; "" if it has none."""
    datasets = cfg.DATASETS
    calls = [["--voc-dir", datasets.VOC_DIR]] if datasets.get("VOC_DIR", "") else []
    files: dict[str, list[str]] = {}  # by the folder of the images
    for role in ("TRAIN", "TEST"):
        if file := datasets.get(f"COCO_{role}_JSON", ""):
            files.setdefault(datasets.get(f"COCO_{role}_ROOT", ""), []).append(file)
    for root, names in files.items():
        call = [part for name in dict.fromkeys(names) for part in ("--coco-json", name)]
        calls.append([*call, "--root", root] if root else call)
    return " && ".join(
        shlex.join(["python", "-m", "detection.datasets", "doctor", *call, "--verify"])
        for call in calls
    )


def examine_voc(folder: Path, *, verify: bool = False) -> list[Finding]:
    """Every split of a folder in VOC layout, and how the splits fit together."""
    keys = {"VOC_DIR": str(folder), "VOC_YEAR": 2007, "VOC_CLASSES": []}
    try:
        sources = voc.folder_sources(CfgNode(keys))
    except DataError as error:
        return [Finding(str(folder), WRONG, str(error))]
    return _examine(sources, verify)


def examine_coco(files: Sequence[Path], root: str, *, verify: bool = False) -> list[Finding]:
    """Every file, and how they fit together.

    Args:
        root: the folder of the images; "": near each file.
    """
    sources = [coco.own_source(str(file), root, "TRAIN") for file in files]
    findings = _examine(sources, verify)
    wrong = {finding.name for finding in findings if finding.state in (WRONG, ABSENT)}
    usable = [source for source in sources if source.name not in wrong]
    return findings + [finding for source in usable for finding in _only_to_train(source)]


def report(findings: Sequence[Finding], config: str, keys: Mapping[str, str]) -> str:
    """For people: what was found, and the next command: a check of the task `config`.

    Args:
        keys: of DATASETS, which the task needs.
    """
    width = max(len(finding.name) for finding in findings)
    lines = ["found:"]
    lines += [f"  {f.state:<5}  {f.name:<{width}}  {f.text}" for f in findings]
    following = "fix what is WRONG or absent, then the same command again"
    if not any(finding.state in (WRONG, ABSENT) for finding in findings):
        opts = [part for key, value in keys.items() for part in (f"DATASETS.{key}", value)]
        following = "python detection/train_net.py --check-only --config-file " + shlex.join(
            [config, *opts, "MODEL.WEIGHTS", "random"]
        )
    return "\n".join([*lines, "", f"next: {following}"])


def _examine(
    sources: Sequence[voc.VOCSource] | Sequence[coco.COCOSource], verify: bool
) -> list[Finding]:
    seen: set[str] | None = set() if verify else None
    findings, splits = [], []
    for source in sources:
        finding = examine_source(source.name, source, seen)
        findings.append(finding)
        if finding.state not in (WRONG, ABSENT):
            splits.append(source.read())
    findings += [Finding(split.name, NOTE, _classes(split)) for split in splits]
    if len({split.classes for split in splits}) > 1:
        names = ", ".join(split.name for split in splits)
        findings.append(Finding(names, WRONG, "their classes are not the same in the same order"))
    findings += [*_listed_twice(splits), *_shared(splits)]
    return findings + (_same_content(splits) if verify else [])


def _classes(split: Split) -> str:
    """`classes: cat 12, dog 3; no object of cow`."""
    counts = object_counts(split)
    shown = [f"{name} {counts[name]}" for name in split.classes if counts[name]]
    absent = [name for name in split.classes if not counts[name]]
    text = f"classes: {_some(shown) or 'none with an object'}"
    return text + (f"; no object of {_some(absent)}" if absent else "")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shared(splits: Sequence[Split]) -> list[Finding]:
    """Images that are in two splits, but for VOC's trainval, which is made of train and val."""
    files = {split.name: {record["file_name"] for record in split.records} for split in splits}
    findings = []
    for (one, mine), (other, theirs) in itertools.combinations(files.items(), 2):
        endings = {name.rsplit("_", 1)[-1] for name in (one, other)}
        both = mine & theirs
        if both and endings not in ({"train", "trainval"}, {"val", "trainval"}):
            text = f"{len(both)} images are in both, the first is {min(both)}"
            findings.append(Finding(f"{one}, {other}", NOTE, text))
    return findings


def _listed_twice(splits: Sequence[Split]) -> list[Finding]:
    findings = []
    for split in splits:
        counts = Counter(record["file_name"] for record in split.records)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            text = f"{len(twice)} images are listed more than once, the first is {twice[0]}"
            findings.append(Finding(split.name, WRONG, text))
    return findings


def _same_content(splits: Sequence[Split]) -> list[Finding]:
    """Files that are equal byte by byte."""
    groups: dict[bytes, list[str]] = {}
    for name in dict.fromkeys(record["file_name"] for s in splits for record in s.records):
        groups.setdefault(hashlib.sha256(Path(name).read_bytes()).digest(), []).append(name)
    equal = [names for names in groups.values() if len(names) > 1]
    if not equal:
        return []
    number = sum(len(names) - 1 for names in equal)
    text = f"{number} images are copies of others, the first are {' and '.join(equal[0][:2])}"
    return [Finding("duplicates", NOTE, text)]


def _only_to_train(source: coco.COCOSource) -> list[Finding]:
    """What COCO's metric would lack in a file that can be trained on."""
    try:
        dataclasses.replace(source, role="TEST").read()
    except DataError as error:
        return [Finding(source.name, NOTE, f"not for DATASETS.COCO_TEST_JSON: {error}")]
    return []
