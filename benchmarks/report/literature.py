"""Published numbers of other papers and projects: `literature.yaml`, and which fit a task.

Two numbers are comparable if their protocols are equal: the value of every tag (detector, data,
head, normalization, schedule, learning rate, …). A run's tags are derived from its configuration
alone, so a task that changes loses the rows that it no longer equals.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from detection.config.keys import TRANSFER
from moco.common.cfgnode import read_yaml, same_value

NEAR = 2  # tags that may differ
SAME = ("backbone", "detector", "data")  # and those that may not
TAG_NAMES = {"lr": "learning rate", "loaded": "pre-trained"}  # where the tag is not its name
UNVERIFIED = "?"


@dataclass(frozen=True)
class LiteratureRow:
    """One published row.

    Attributes:
        pretrain: dataset of the pre-training; None: random initialization.
        epochs: of the pre-training; None: not stated, or none.
        n: runs that a value averages; None: not stated.
        tags: the protocol, a value of every tag.
        values: metric → number, AP from 0 to 100; only what is printed.
        unverified: metrics whose number was not seen in the source.
    """

    method: str
    pretrain: str | None
    epochs: int | None
    n: int | None
    source: str
    tags: dict[str, str]
    values: dict[str, float]
    unverified: frozenset[str]

    @property
    def name(self) -> str:
        """E.g. `MoCo v2, IN-1M, 200 epochs`."""
        epochs = f"{self.epochs} epochs" if self.epochs else None
        return ", ".join(filter(None, (self.method, self.pretrain, epochs)))

    def differences(self, tags: Mapping[str, str | None]) -> tuple[str, ...]:
        """Per tag that differs: `schedule (here 1x; there 2x)`."""
        return tuple(
            f"{TAG_NAMES.get(tag, tag)} (here {tags[tag] or 'another'}; there {value})"
            for tag, value in self.tags.items()
            if tags[tag] != value
        )


@cache
def _tree() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("literature.yaml"))


@cache
def load_literature() -> tuple[LiteratureRow, ...]:
    """All rows, in the file's order.

    Raises:
        KeyError: a row without a field, or without a value of a tag.
    """
    tree = _tree()
    return tuple(
        _row({**tree["protocols"][table["protocol"]], **table, **row})
        for table in tree["tables"]
        for row in table["rows"]
    )


def tags_of(config: Mapping[str, Any]) -> dict[str, str | None]:
    """A run's value of every tag; None where it is none of those that the literature has.

    Args:
        config: the flat configuration of its record. What it lacks equals nothing.
    """
    synonyms = _tree()["synonyms"]
    config = {**TRANSFER, **config}  # a key that is newer than the record is at its default

    def has(keys: Mapping[str, Any]) -> bool:
        found = {key: config.get(key) for key in keys}
        norms = {key: synonyms.get(v, v) for key, v in found.items() if isinstance(v, str)}
        return all(same_value({**found, **norms}[key], value) for key, value in keys.items())

    def fits(keys: Mapping[str, Any] | list[Mapping[str, Any]] | None) -> bool:
        return any(map(has, keys if isinstance(keys, list) else [] if keys is None else [keys]))

    return {
        tag: next((name for name, keys in values.items() if fits(keys)), None)
        for tag, values in _tree()["tags"].items()
    }


def rows_for(
    config: Mapping[str, Any], metrics: Collection[str], near: bool = False
) -> dict[tuple[str, ...], list[LiteratureRow]]:
    """What differs from a run's protocol → the rows of that one protocol, the nearest first.

    Args:
        config: as in `tags_of`.
        metrics: rows with none of these are left out.
        near: with those that differ in at most `NEAR` tags; else only the equal ones, under `()`.
    """
    tags, found = tags_of(config), dict[tuple[str, ...], list[LiteratureRow]]()
    for row in load_literature():
        differing = row.differences(tags)
        fits = all(row.tags[tag] == tags[tag] for tag in SAME) and not row.values.keys().isdisjoint(
            metrics
        )
        if fits and len(differing) <= (NEAR if near else 0):
            found.setdefault(differing, []).append(row)
    return dict(sorted(found.items(), key=lambda item: len(item[0])))


def _row(entry: Mapping[str, Any]) -> LiteratureRow:
    pairs = zip(entry["columns"], entry["values"], strict=True)
    printed = {metric: str(value) for metric, value in pairs if value is not None}
    return LiteratureRow(
        method=entry["method"],
        pretrain=entry["pretrain"],
        epochs=entry["epochs"],
        n=entry["n"],
        source=entry["source"],
        tags={tag: str(entry[tag]) for tag in _tree()["tags"]},
        values={metric: float(text.rstrip(UNVERIFIED)) for metric, text in printed.items()},
        unverified=frozenset(m for m, text in printed.items() if text.endswith(UNVERIFIED)),
    )
