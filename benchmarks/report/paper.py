"""The paper's printed numbers: `paper.yaml` as tables."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moco.common.cfgnode import read_yaml

OWN = "this paper"


@dataclass(frozen=True)
class PaperRow:
    """One printed row; None where the paper prints no number. Units: AP and accuracy, 0..100.

    `tasks` are those of the table's that the row is the reference of.
    """

    name: str
    values: tuple[float | None, ...]
    gaps: tuple[float | None, ...]
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class PaperTable:
    """One (sub-)table; `metrics[i]` and `methods[i]` belong to `columns[i]`.

    `number` is None for numbers of the text and of tables without one: `label` says where. Of
    `iterations` and `epochs` the one is None that the paper does not give, `trials` where it
    does not tell. A metric is None where the column is no result (the number of parameters).
    `tested_on` is DATASETS.TEST of the tasks, empty for classifications.
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
        """E.g. `Table 2b (tab:voc)`."""
        if self.number is None:
            return self.label
        part = "" if self.part is None else self.part if len(self.part) == 1 else f", {self.part}"
        return f"Table {self.number}{part} ({self.label})"

    @property
    def results(self) -> list[tuple[str, str]]:
        """Metric and method of the columns, without those that are no result."""
        columns = zip(self.metrics, self.methods, strict=True)
        return [(metric, method) for metric, method in columns if metric is not None]

    def number_of(
        self, row: PaperRow, metric: str, method: str = OWN
    ) -> tuple[float | None, float | None]:
        """Value and gap in the column of a metric and a method."""
        columns = list(zip(self.metrics, self.methods, strict=True))
        if (metric, method) not in columns:
            return None, None
        i = columns.index((metric, method))
        return row.values[i], row.gaps[i]


@cache
def load_paper() -> tuple[str, tuple[PaperTable, ...]]:
    """The citation and all tables."""
    tree = read_yaml(Path(__file__).with_name("paper.yaml"))
    return tree["citation"], tuple(_table(**entry) for entry in tree["tables"])


def tables_for(task: str, tested_on: Collection[str]) -> list[PaperTable]:
    """The paper's tables that hold numbers for one of this project's tasks.

    Args:
        tested_on: DATASETS.TEST of the runs. A task is called after its file without the folder, so
            COCO and LVIS have tasks of one name, which this tells apart.
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
