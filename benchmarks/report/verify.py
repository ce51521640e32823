"""Reader of the bundles of `results/`, which computes again what they claim."""

from pathlib import Path

from benchmarks.report.bootstrap import checked_matches
from benchmarks.report.bundle import check_files, read_about, read_bundle
from benchmarks.report.records import collect, protocol_of
from benchmarks.report.shared import Shared, identity
from benchmarks.report.tables import EACH, make_tables
from detection.evaluation.metrics import has_matches
from moco.common.errors import UserError, plural
from moco.common.files import PathLike
from moco.common.run import DIGITS
from moco.common.shipped import RESULTS


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
    files = check_files(path)
    records = [record for record, *_ in read_bundle(path).values() if record.kind != "pretrain"]
    for record in records:
        if (found := protocol_of(record)) != record.config_sha256:
            raise UserError(
                f"{path}: {record.task}, {record.init}, seed {record.seed}: protocol hash: got "
                f"{record.config_sha256[:DIGITS]}, expected {found[:DIGITS]} from its configuration"
            )
    recomputed = 0
    for table in shared.tables:
        for run in table.runs:
            if identity(run) != identity(table.runs[0]):
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
