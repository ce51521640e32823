"""Published numbers: of the paper (`paper.yaml`), and of other papers (`literature.yaml`).

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
from moco.common.cfgnode import read_own_yaml, same_value
from moco.common.keys import defaults_of

OWN = "this paper"
NEAR = 2  # maximum number of differing tags of a similar protocol
SAME = ("backbone", "detector", "data")  # tags that must be equal in similar protocols, too
TAG_NAMES = {"lr": "learning rate", "loaded": "pre-trained"}  # tag → name, if they differ
UNVERIFIED = "?"


@dataclass(frozen=True)
class PaperRow:
    """One printed row.

    Attributes:
        name: Name as printed.
        values: AP or accuracy (0..100) per column, None where the paper prints no number.
        gaps: Printed gap per column, None where the paper prints none.
        tasks: Tasks of the table that the row is the reference of.
    """

    name: str
    values: tuple[float | None, ...]
    gaps: tuple[float | None, ...]
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class PaperTable:
    """One table, or part of a table, of the paper.

    Attributes:
        number: Number of the table, or None for unnumbered tables and numbers in the text.
        part: Letter or name of the part, if the table has several.
        label: LaTeX label, or the section if there is no number.
        title: Title of the table.
        tasks: Tasks of this project that the table is the reference of.
        tested_on: DATASETS.TEST of the tasks, empty for classification.
        iterations: Length of the fine-tuning in iterations, None where the paper does not give it.
        epochs: Length of the fine-tuning in epochs, None where the paper does not give it.
        trials: Number of trials that a value averages, None where the paper does not say.
        baseline: Row that the gaps refer to, or None.
        columns: Column heads as printed.
        metrics: Metric of each column, None if the column is not a result (number of parameters).
        methods: Pre-training method of each column.
        rows: Rows in the printed order.
    """

    number: int | str | None
    part: str | None
    label: str
    title: str
    tasks: tuple[str, ...]
    tested_on: tuple[str, ...]
    iterations: int | None
    epochs: int | None
    trials: int | None
    baseline: str | None
    columns: tuple[str, ...]
    metrics: tuple[str | None, ...]
    methods: tuple[str, ...]
    rows: tuple[PaperRow, ...]

    @property
    def cite(self) -> str:
        """Citation of the table, such as `Table 2b (tab:voc)`."""
        if self.number is None:
            return self.label
        part = "" if self.part is None else self.part if len(self.part) == 1 else f", {self.part}"
        return f"Table {self.number}{part} ({self.label})"

    @property
    def results(self) -> list[tuple[str, str]]:
        """Metric and method of each column that is a result."""
        columns = zip(self.metrics, self.methods, strict=True)
        return [(metric, method) for metric, method in columns if metric is not None]

    def number_of(
        self, row: PaperRow, metric: str, method: str = OWN
    ) -> tuple[float | None, float | None]:
        """Return value and gap of a row in the column of a metric and method, None if absent."""
        columns = list(zip(self.metrics, self.methods, strict=True))
        if (metric, method) not in columns:
            return None, None
        i = columns.index((metric, method))
        return row.values[i], row.gaps[i]


@cache
def load_paper() -> tuple[str, tuple[PaperTable, ...]]:
    """Load the citation and all tables."""
    tree = read_own_yaml(Path(__file__).with_name("paper.yaml"))
    return tree["citation"], tuple(_table(**entry) for entry in tree["tables"])


def tables_for(task: str, tested_on: Collection[str]) -> list[PaperTable]:
    """Return the paper's tables that are the reference of one of this project's tasks.

    Args:
        task: Name of the task.
        tested_on: DATASETS.TEST of the runs, which distinguishes COCO and LVIS tasks of one name.
    """
    return [
        table
        for table in load_paper()[1]
        if task in table.tasks and set(table.tested_on) in (set(), set(tested_on))
    ]


def _table(columns: list[Any], rows: list[Any], **entry: Any) -> PaperTable:
    tasks, empty = tuple(entry["tasks"]), [None] * len(columns)
    entry |= {"tasks": tasks, "tested_on": tuple(entry["tested_on"] or ())}
    entry = {"number": entry.pop("table"), "epochs": None, **entry}
    for field, key in (("columns", "name"), ("metrics", "metric"), ("methods", "method")):
        entry[field] = tuple(column[key] for column in columns)
    found = tuple(
        PaperRow(
            row["name"],
            tuple(row["values"]),
            tuple(row.get("gaps", empty)),
            tuple(row.get("tasks", tasks)),
        )
        for row in rows
    )
    return PaperTable(rows=found, **entry)


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
    return read_own_yaml(Path(__file__).with_name("literature.yaml"))


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
