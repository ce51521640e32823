"""Published numbers of other papers and projects (`literature.yaml`), matched to runs by protocol.

Two numbers are comparable if their protocols are equal, that is, the values of all tags (detector,
data, head, normalization, schedule, learning rate, …). A run's tags are derived from its
configuration only, so a changed task no longer matches rows of its former protocol.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from detection.config.keys import OURS
from moco.common.cfgnode import read_yaml, same_value
from moco.common.keys import defaults_of

NEAR = 2  # maximum number of differing tags of a similar protocol
SAME = ("backbone", "detector", "data")  # tags that must be equal in similar protocols, too
TAG_NAMES = {"lr": "learning rate", "loaded": "pre-trained"}  # tag → name, if they differ
UNVERIFIED = "?"


@dataclass(frozen=True)
class LiteratureRow:
    """One published row.

    Attributes:
        method: Name of the pre-training method.
        pretrain: Dataset of the pre-training, or None for random initialization or if not stated.
        epochs: Epochs of the pre-training, or None if not stated or not pre-trained.
        n: Number of runs that a value averages, or None if not stated.
        source: Citation.
        tags: Protocol: tag → value, for every tag.
        values: Metric → printed number, AP from 0 to 100.
        unverified: Metrics whose number was not checked against the source.
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
        """Name of the row, such as `MoCo v2, IN-1M, 200 epochs`."""
        epochs = f"{self.epochs} epochs" if self.epochs else None
        return ", ".join(filter(None, (self.method, self.pretrain, epochs)))

    def differences(self, tags: Mapping[str, str | None]) -> tuple[str, ...]:
        """Format each tag that differs from a run's `tags`: `schedule (here 1x; there 2x)`."""
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
    """Load all rows in the order of the file.

    Raises:
        KeyError: If a row lacks a field or the value of a tag.
    """
    tree = _tree()
    return tuple(
        _row({**tree["protocols"][table["protocol"]], **table, **row})
        for table in tree["tables"]
        for row in table["rows"]
    )


def tags_of(config: Mapping[str, Any]) -> dict[str, str | None]:
    """Return a run's value of every tag, or None if it is not among those in the file.

    Args:
        config: Flat configuration of the run's record. A missing key equals no value.
    """
    synonyms = _tree()["synonyms"]
    # Keys that were added after the run was recorded are at their default.
    config = {**defaults_of(OURS), **config}

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
    """Group published rows by their differences from a run's protocol, the most similar first.

    Args:
        config: Flat configuration of the run's record.
        metrics: Metrics of which a row must have at least one.
        near: Include protocols that differ in at most `NEAR` tags.

    Returns:
        Differences → rows; rows of the run's own protocol are under `()`.
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
