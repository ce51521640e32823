"""Results that others can check, the bundles of `results/`, as rows beside one's own.

A result is comparable if its protocol hash and the digests of its data equal those of a table; it
never enters a mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report.aggregate import Table
from benchmarks.report.bundle import About
from benchmarks.report.literature import LiteratureRow, tags_of
from benchmarks.report.records import FinishedRun, Results


@dataclass(frozen=True)
class Shared:
    """Results of one bundle.

    Attributes:
        name: Name of the bundle's file, without its ending.
        about: Who measured them, and where the weights are.
        results: Runs of the bundle.
        tables: Tables of the runs.
    """

    name: str
    about: About
    results: Results
    tables: tuple[Table, ...]

    @property
    def source(self) -> str:
        """Citation of a row: bundle and people."""
        return f"results/{self.name}.zip, measured by {self.about.measured_by}"


def rows_beside(table: Table, shared: Sequence[Shared]) -> list[LiteratureRow]:
    """Return the rows of bundles whose protocol and data equal those of a table."""
    own = identity(table.runs[0])
    return [
        LiteratureRow(
            method=row.init,
            pretrain=None,
            epochs=None,
            n=row.n,
            source=each.source,
            tags={tag: value or "" for tag, value in tags_of(row.runs[0].record.config).items()},
            values={name: cell.mean for name, cell in row.cells.items() if cell is not None},
            unverified=frozenset(),
        )
        for each in shared
        for theirs in each.tables
        if identity(theirs.runs[0]) == own
        for row in theirs.rows
    ]


def identity(run: FinishedRun) -> tuple[object, ...]:
    """Return what runs of one table share: kind, protocol and data."""
    record = run.record
    return record.kind, record.config_sha256, run.tested_on, record.provenance.get("data")
