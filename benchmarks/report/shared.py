"""Results that others can check: the bundles of `results/`, with their page and beside one's own.

A result is comparable if its protocol hash and the digests of its data equal those of a table; it
never enters a mean. What a bundle claims is checked by computing it again.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report.aggregate import Table
from benchmarks.report.bootstrap import checked_matches
from benchmarks.report.bundle import About, read_about, read_bundle
from benchmarks.report.literature import LiteratureRow, tags_of
from benchmarks.report.records import FinishedRun, Results, collect, protocol_of
from benchmarks.report.tables import EACH, make_tables
from detection.evaluation.metrics import has_matches
from moco.common.errors import DataError, UserError, plural
from moco.common.files import PathLike
from moco.common.run import DIGITS
from moco.common.shipped import RESULTS


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


def read_shared(path: PathLike) -> Shared:
    """Read a bundle with its tables.

    Raises:
        UserError: If runs of the bundle must not be averaged.
        DataError: If the bundle is damaged, or does not say who measured it.
    """
    results = collect([path])
    tables = tuple(make_tables(results, engine=EACH))
    return Shared(Path(path).stem, read_about(path), results, tables)


def read_all(folder: Path = RESULTS) -> list[Shared]:
    """Read all bundles of a folder, in the order of their names.

    Raises:
        UserError: If there is none.
        DataError: If one is damaged.
    """
    found = sorted(folder.glob("*.zip"))
    if not found:
        raise UserError(f"{folder}: no bundles there; expected files that end in .zip")
    return [read_shared(path) for path in found]


def rows_beside(table: Table, shared: Sequence[Shared]) -> list[LiteratureRow]:
    """Return the rows of bundles whose protocol and data equal those of a table."""
    own = _identity(table.runs[0])
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
        if _identity(theirs.runs[0]) == own
        for row in theirs.rows
    ]


def _identity(run: FinishedRun) -> tuple[object, ...]:
    record = run.record
    return record.kind, record.config_sha256, run.tested_on, record.provenance.get("data")


def verify(path: PathLike) -> str:
    """Compute again what a bundle claims, and return one line that says what was compared.

    Every file is read and compared with its checksum. The protocol hash of each run of a table is
    computed from its configuration, and AP from its match records. Runs of a table must have the
    same data.

    Raises:
        UserError: If a record is invalid, or anything differs.
        DataError: If the bundle is damaged, or does not say who measured it.
    """
    shared = read_shared(path)
    with zipfile.ZipFile(path) as archive:
        if (broken := archive.testzip()) is not None:
            raise DataError(f"{path}: {broken}: damaged (its checksum differs)")
        files = len(archive.namelist())
    records = [record for record, _ in read_bundle(path).values() if record.kind != "pretrain"]
    for record in records:
        if (found := protocol_of(record)) != record.config_sha256:
            raise UserError(
                f"{path}: {record.task}, {record.init}, seed {record.seed}: protocol hash: got "
                f"{record.config_sha256[:DIGITS]}, expected {found[:DIGITS]} from its configuration"
            )
    recomputed = 0
    for table in shared.tables:
        for run in table.runs:
            if _identity(run) != _identity(table.runs[0]):
                raise UserError(f"{path}: {run.folder}: not the data of the table's other runs")
            if has_matches(run.record.metrics):
                try:
                    checked_matches(run, table.metrics)
                except UserError as error:
                    raise UserError(f"{path}: {run.folder}: {error}") from error
                recomputed += 1
    return (
        f"{path}: {plural(files, 'file')} read; computed again and equal: the protocol hashes of "
        f"{plural(len(records), 'run')}, AP of {recomputed}"
    )
