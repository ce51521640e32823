"""The paper's printed numbers: tables of `paper.yaml`."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moco.common.cfgnode import read_yaml

OWN = "this paper"


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
        methods: Method of each column: whose pre-training it is.
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
    tree = read_yaml(Path(__file__).with_name("paper.yaml"))
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
