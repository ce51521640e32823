"""Diagnosis of datasets: what exists, is complete, is wrong, by the readers' own checks.

`verify` also decodes every image and checks every label map, which training does not. Images for
pre-training are read by `moco/data`, as in training.
"""

import hashlib
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fvcore.common.config import CfgNode

from detection.datasets.base import (
    ABSENT,
    NOTE,
    OK,
    PART,
    WRONG,
    Custom,
    Finding,
    Format,
    Record,
    Source,
    Split,
    choose_splits,
    doctor_command,
    formats,
    object_counts,
    official_counts,
    small_test_warning,
    why_unusable,
)
from detection.datasets.coco import pairs_note
from detection.datasets.download import fetch_command
from detection.datasets.files import DATASETS_VARIABLE, has_exif_rotation, image_size
from detection.datasets.labels import check_labels
from moco.common.command import program, quote
from moco.common.errors import DataError, UserError, first_few, plural, printable
from moco.common.files import read_bytes
from moco.common.progress import Progress
from moco.common.shipped import display_name
from moco.data.images import describe_images, find_bad_images, open_images

_SHOWN = 30  # classes or bad images in one list
_ESTIMATED_AFTER = 1.0  # seconds of decoding
# Findings on the score of perfect predictions (detection/evaluation/reachable.py).
Score = Callable[[Split], Iterable[Finding]]


def command(cfg: CfgNode) -> str:
    """Return the command that checks the custom dataset of a task, or "" if there is none."""
    return " && ".join(
        f"{doctor_command()} {quote(*arguments)} --verify"
        for format_ in formats().values()
        if format_.custom
        for arguments in format_.custom.arguments(cfg.DATASETS)
    )


def all_right(findings: Sequence[Finding]) -> bool:
    """Return whether at least a part of the dataset exists, and nothing is wrong."""
    states = {finding.state for finding in findings}
    return WRONG not in states and bool(states & {OK, PART})


def examine(
    format_: Format,
    root: str,
    *,
    verify: bool = False,
    splits: Collection[str] = (),
    score: Score = lambda split: (),
) -> list[Finding]:
    """Read the published splits of a format in the folder of all datasets.

    Args:
        format_: The format.
        root: Folder of all datasets.
        verify: Decode every image and check every label map.
        splits: Names of the splits to read; empty for all.
        score: Function that returns findings on the score of perfect predictions.
    """
    every = format_.sources(root)
    sources = [source for source in every if not splits or source.name in splits]
    results = _examine(sources, verify)
    findings = [finding for finding, _ in results]
    for _, split in results:
        # The published training splits are not tested on, and scoring them takes minutes.
        if split and "train" not in split.name:
            findings += score(split)
    if len(sources) < len(every):
        return findings
    return [*findings, *format_.check_folders(root, {f.name: f.state for f in findings})]


def examine_custom(
    custom: Custom,
    value: Any,
    root: str,
    *,
    verify: bool = False,
    score: Score = lambda split: (),
) -> tuple[list[Finding], str]:
    """Read a custom dataset's splits, count its classes, compare the splits with each other.

    Args:
        custom: The format's support for custom datasets.
        value: Value of the format's flag.
        root: Value of --root, or "".
        verify: Decode every image and check every label map.
        score: Function that returns findings on the score of perfect predictions.

    Returns:
        The findings, and the next step.

    Raises:
        DataError: If `value` does not name a dataset.
        UserError: If `root` does not belong to this format.
    """
    sources, keys = custom.parse(value, root)
    results = _examine(sources, verify, explain=True)
    splits = [split for _, split in results if split]
    findings = [finding for finding, _ in results]
    for split in splits:
        findings += [Finding(split.name, NOTE, _classes(split)), *score(split)]
        findings += _find_rotated(split)
        if _is_test(split) and (small := small_test_warning(split)):
            findings.append(Finding(split.name, NOTE, small))
        if split.has_keypoints:
            findings.append(Finding(split.name, NOTE, _flipped(split)))
    if len({split.classes for split in splits}) > 1:
        names = ", ".join(split.name for split in splits)
        findings.append(
            Finding(names, WRONG, "have different classes, or the same in another order")
        )
    findings += _find_repeated(splits, verify)
    usable = {split.name for split in splits}
    findings += [found for s in sources if s.name in usable for found in custom.check(s)]
    states = {finding.state for finding in findings}
    ends = [split.name.rpartition("_")[2] for split in splits]
    # Not every split that a data.yaml names is needed.
    if WRONG not in states and (ABSENT not in states or choose_splits(ends, ("TRAIN", "TEST"))):
        try:
            return findings, _check_command(custom.task(splits, keys), keys)
        except DataError as error:
            names = ", ".join(split.name for split in splits)
            findings.append(Finding(names, WRONG, str(error)))
        except UserError as error:
            return findings, str(error)
    return findings, "fix what is WRONG or absent, then run the same command again"


def examine_images(root: str, *, verify: bool = False) -> tuple[list[Finding], str]:
    """Examine the images for pre-training: a folder, a list, shards or CIFAR-10.

    Args:
        root: Value of DATA.ROOT.
        verify: Decode every image.

    Returns:
        The findings, and the next step.
    """
    try:
        images = open_images(root)
        bad = find_bad_images(images) if verify else []
    except DataError as error:
        return [Finding("images", WRONG, str(error))], "fix what is WRONG, then run it again"
    decoded = ", all decoded" if verify and not bad else ""
    findings = [Finding("images", OK, plural(len(images), "image") + decoded)]
    findings += [Finding("images", NOTE, note) for note in describe_images(images)]
    findings += [Finding("images", WRONG, text) for text in bad[:_SHOWN]]
    if bad:
        left = f", the first {_SHOWN} are named above" if len(bad) > _SHOWN else ""
        findings.append(Finding("images", WRONG, f"{len(bad)} cannot be decoded{left}"))
        return findings, "replace or remove what is WRONG, then run the same command again"
    recipe = display_name("configs/pretrain/small_r18.yaml")
    pretrain = program("pretrain")
    return findings, f"{pretrain} --config-file {recipe} DATA.ROOT {quote(root)}"


def _check_command(task: Sequence[str], keys: Mapping[str, str]) -> str:
    opts = [part for key, text in keys.items() for part in (f"DATASETS.{key}", text)]
    arguments = quote(display_name(task[0]), *opts, *task[1:], "MODEL.WEIGHTS", "random")
    return f"{_train_command()} --check-only --config-file {arguments}"


def report(findings: Sequence[Finding], following: str, tree: Iterable[str] = ()) -> str:
    """Format the expected `tree`, the findings and the `following` command as text."""
    width = max(len(finding.name) for finding in findings)
    absent = [finding.name for finding in findings if finding.state == ABSENT and not finding.text]
    shown = [f for f in findings if f.state != ABSENT or f.text]
    lines = [*tree, "found:", *(f"  {f.state:<5}  {f.name:<{width}}  {f.text}" for f in shown)]
    if absent:
        lines.append(f"  absent {', '.join(absent)}")
    if all(finding.state == ABSENT for finding in findings):
        lines.append("  nothing")
    return "\n".join(map(printable, [*lines, "", f"next: {following}"]))


def next_step(kind: str, format_: Format, root: str, findings: Sequence[Finding]) -> str:
    """Return the next step after examining the published splits of a format."""
    again = f"{doctor_command()} {quote(kind, '--root', root)}"
    if any(finding.state == WRONG for finding in findings):
        return f"fix what is WRONG, then run again: {again}"
    usable = {finding.name for finding in findings if finding.state in (OK, PART)}
    task = next((task for task, names in format_.tasks.items() if usable.issuperset(names)), None)
    if task is None:
        first, splits = next(iter(format_.tasks.items()), ("", ()))
        fetch = fetch_command(*splits, root=root)
        get = f"for {display_name(first)}: {fetch}" if fetch else format_.download.format(root=root)
        return f"{get}; then run again: {again}"
    arguments = quote("--config-file", display_name(task), "--check-only")
    where = f"{DATASETS_VARIABLE}={quote(root)}"
    return f"{where} {_train_command()} {arguments} MODEL.WEIGHTS random"


def _train_command() -> str:
    return program("train")


def _examine(
    sources: Sequence[Source], verify: bool, *, explain: bool = False
) -> list[tuple[Finding, Split | None]]:
    """Return each source's finding, and its split if it can be used.

    Args:
        sources: Splits to read.
        verify: Decode every image and check every label map.
        explain: State what an absent split lacks.
    """
    seen: set[str] = set()  # images that were already decoded
    results: list[tuple[Finding, Split | None]] = []
    for source in sources:
        if not source.present():
            results.append(
                (Finding(source.name, ABSENT, _why_absent(source) if explain else ""), None)
            )
            continue
        try:
            split = source.read()
            if verify:
                _verify(split, seen)
        except DataError as error:
            results.append((Finding(source.name, WRONG, str(error)), None))
        except UserError as error:  # a package is missing, which says nothing about the data
            results.append((Finding(source.name, ABSENT, f"not examined: {error}"), None))
        else:
            results.append((_compare_counts(split), split))
    return results


def _why_absent(source: Source) -> str:
    try:
        source.read()
    except DataError as error:
        return str(error)
    return ""


def _compare_counts(split: Split) -> Finding:
    """Compare the number of images of a readable split with the published one."""
    images, (official, official_objects) = len(split.records), official_counts(split.name)
    text = plural(images, "image")
    if split.evaluator_type != "sem_seg":
        objects = sum(len(record.get("annotations", ())) for record in split.records)
        text += f", {plural(objects, 'object')}"
    if official == images:
        text += " (official count)"
    elif official:
        published = f", {official_objects} objects" if official_objects else ""
        text += f" (official count: {official} images{published})"
    state = OK if official in (0, images) else PART
    if split.evaluator_type != "sem_seg" and (why := why_unusable(split, measured=_is_test(split))):
        state, text = WRONG, f"{text}; {why}, so nothing can be trained or tested"
    return Finding(split.name, state, "; ".join((text, *split.notes)))


def _is_test(split: Split) -> bool:
    return "train" not in split.name.rpartition("_")[2]


def _verify(split: Split, seen: set[str]) -> None:
    """Decode every image that is not in `seen` (extended), and check every label map.

    Raises:
        DataError: If images are damaged or not of the annotated size; names the first one.
    """
    records = [record for record in split.records if record["file_name"] not in seen]
    seen.update(record["file_name"] for record in records)
    with Progress(len(records), f"verify {split.name}", unit="img") as progress:
        _decode(records, progress)
    if split.evaluator_type == "sem_seg":
        labels = len(split.classes), split.metadata["ignore_label"]
        check_labels(split.records, *labels, everything=True)


def decode_within(splits: Sequence[Split], seconds: float) -> str:
    """Decode the images of splits if that is expected to take at most `seconds`.

    Returns:
        A note on images that were not decoded, or "".

    Raises:
        DataError: If images are damaged or not of the annotated size; names the first one.
    """
    own = [split for split in splits if not split.from_catalog]
    records = list({r["file_name"]: r for split in own for r in split.records}.values())
    with Progress(len(records), "decode", unit="img", silent=True) as progress:
        decoded = _decode(records, progress, seconds)
    if decoded == len(records):
        return ""
    return (
        f"{len(records) - decoded} of {plural(len(records), 'image')} were not decoded beforehand, "
        "so a damaged one would stop a run"
    )


def _decode(records: Sequence[Record], progress: Progress, seconds: float = math.inf) -> int:
    """Decode images, unless that is expected to take longer; return the number of decoded ones.

    Raises:
        DataError: If images are damaged or not of the annotated size; names the first one.
    """
    damaged, start = [], time.monotonic()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for number, fault in enumerate(pool.map(_find_fault, records), start=1):
            progress.update()
            damaged += [fault] if fault else []
            elapsed = time.monotonic() - start
            expected = elapsed / number * len(records)
            if expected > seconds and elapsed > min(seconds, _ESTIMATED_AFTER):
                pool.shutdown(cancel_futures=True)
                break
        else:
            number = len(records)
    if damaged:
        others = f" (and {len(damaged) - 1} more images)" if len(damaged) > 1 else ""
        raise DataError(damaged[0] + others)
    return number


def _find_fault(record: Record) -> str:
    path, annotated = record["file_name"], (record["width"], record["height"])
    try:
        size = image_size(path, decode=True)
    except DataError as error:
        return str(error)
    (W, H), (width, height) = size, annotated
    return "" if size == annotated else f"{path}: {W}x{H}, but annotated as {width}x{height}"


def _classes(split: Split) -> str:
    """Format the objects of each class: `classes: cat 12, dog 3; no object of cow`."""
    counts = object_counts(split)
    present = first_few(
        [f"{name} {counts[name]}" for name in split.classes if counts[name]], _SHOWN
    )
    absent = first_few([name for name in split.classes if not counts[name]], _SHOWN)
    text = f"classes: {present or 'none with an object'}"
    return f"{text}; no object of {absent}" if absent else text


def _flipped(split: Split) -> str:
    try:
        text = pairs_note(split)
    except UserError as error:  # only keypoint tasks need the pairs
        text = str(error)
    return text.removeprefix(f"{split.name}: ")


def _find_rotated(split: Split) -> Iterator[Finding]:
    """Yield a note on images that their EXIF orientation rotates or mirrors."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        turned = list(
            pool.map(has_exif_rotation, (record["file_name"] for record in split.records))
        )
    if number := sum(turned):
        first = split.records[turned.index(True)]["file_name"]
        text = (
            f"{plural(number, 'image')} rotated by EXIF: annotations must be of the rotated image"
        )
        yield Finding(split.name, NOTE, f"{text}; the first is {first}")


def _find_repeated(splits: Sequence[Split], verify: bool) -> Iterator[Finding]:
    """Yield notes on images that occur twice, or in two splits; `verify` also finds equal files."""
    files = {split.name: [record["file_name"] for record in split.records] for split in splits}
    for name, paths in files.items():
        if twice := [path for path, count in Counter(paths).items() if count > 1]:
            number = plural(len(twice), "image")
            text = f"listed under several ids: {number}, the first is {twice[0]}"
            yield Finding(name, NOTE, f"{text}; each id is trained and tested on")
    for one, other in itertools.combinations(files, 2):
        endings = {name.rsplit("_", 1)[-1] for name in (one, other)}
        both = set(files[one]) & set(files[other])
        # VOC's trainval is the union of train and val.
        if both and endings not in ({"train", "trainval"}, {"val", "trainval"}):
            text = f"in both: {plural(len(both), 'image')}, the first is {min(both)}"
            yield Finding(f"{one}, {other}", NOTE, text)
    groups: dict[bytes, list[str]] = {}
    for path in dict.fromkeys(itertools.chain(*files.values())) if verify else ():
        groups.setdefault(hashlib.sha256(read_bytes(path)).digest(), []).append(path)
    if equal := [paths for paths in groups.values() if len(paths) > 1]:
        copies = plural(sum(len(paths) - 1 for paths in equal), "image")
        text = f"copies of others: {copies}, the first {' and '.join(equal[0][:2])}"
        yield Finding("duplicates", NOTE, text)
