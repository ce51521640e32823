"""Reader of the bundles of `results/`, which computes again what they claim."""

from collections import defaultdict
from pathlib import Path, PurePath

from benchmarks.report.bootstrap import METRICS, SAME_AP, checked_matches, class_precisions
from benchmarks.report.bundle import check_files, read_about, read_bundle
from benchmarks.report.records import FinishedRun, collect, protocol_of
from benchmarks.report.shared import Shared, identity
from benchmarks.report.tables import EACH, make_tables
from detection.evaluation.matches import MatchFile
from detection.evaluation.metrics import has_matches
from moco.common.errors import UserError, first_few, plural, printable, shown
from moco.common.files import PathLike
from moco.common.run import DIGITS, RunRecord
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
    computed from its configuration, and its AP, also of each class, from its match records. What
    stands twice has to agree: the run in its path and its record, the hash of its weights. Runs of
    a table must have the same data.

    Raises:
        UserError: If a record is invalid, or anything differs.
        DataError: If the bundle is damaged, or does not say who measured it.
    """
    claimed = read_shared(path)
    files = check_files(path)
    runs = {at: found for at, found in read_bundle(path).items() if found[0].kind != "pretrain"}
    for folder, (record, suite_task, _) in runs.items():
        if (found := protocol_of(record)) != record.config_sha256:
            raise UserError(
                f"{path}: {record.task}, {record.init}, seed {record.seed}: protocol hash: got "
                f"{record.config_sha256[:DIGITS]}, expected {found[:DIGITS]} from its configuration"
            )
        _check_twice(f"{path}: {folder}", folder, record, in_suite=suite_task is not None)
    recomputed, left, of_classes = 0, set[str](), set[str]()
    for table in claimed.tables:
        classes = _Classes()
        for run in table.runs:
            if identity(run) != identity(table.runs[0]):
                raise UserError(f"{path}: {run.folder}: not the data of the table's other runs")
            left |= run.record.metrics.keys()
            if has_matches(run.record.metrics):
                try:
                    stored = checked_matches(run, table.metrics)
                except UserError as error:
                    raise UserError(f"{path}: {run.folder}: {error}") from error
                own = classes.add(run, stored)
                of_classes |= own
                left -= own | {f"{kind}/{name}" for kind in stored.kinds for name in METRICS}
                recomputed += 1
        if name := classes.wrong():
            of = f"{path}: {table.title}: {shown(name)}"
            raise UserError(f"{of}: not the AP of a class in the match records")
    numbers = f"AP of {recomputed}" if recomputed else "no AP"
    numbers += ", also of each class" if of_classes else ""
    return (
        f"{path}: {plural(files, 'file')} read; computed again and equal: the protocol hashes of "
        f"{plural(len(runs), 'run')}, {numbers}"
        + (f"; only recorded: {printable(first_few(sorted(left)))}" if left else "")
    )


def _check_twice(where: str, folder: PurePath, record: RunRecord, *, in_suite: bool) -> None:
    """Raise UserError if two places of a bundle contradict each other about a run."""
    if in_suite:  # .../runs/<task>/<init>/seed<k>-<id>
        init, seed = folder.parent.name, folder.name.partition("-")[0]
        if (init, seed) != (record.init, f"seed{record.seed}"):
            raise UserError(
                f"{where}: the record is of {shown(record.init)}, seed {record.seed}; expected the "
                "init and the seed of its folder"
            )
    start = record.start or {}
    if "weights_sha256" in start and start["weights_sha256"] != record.weights_sha256:
        started, stated = (
            str(sha256)[:DIGITS] for sha256 in (start["weights_sha256"], record.weights_sha256)
        )
        raise UserError(
            f"{where}: weights_sha256: got {stated}, but the training started from {started}"
        )


class _Classes:
    """AP of the classes in a table's runs, by name as recorded and by id as computed.

    Match records have no names, but one name belongs to one id in all runs of a table.
    """

    def __init__(self) -> None:
        self._recorded: dict[str, list[float]] = defaultdict(list)
        self._computed: dict[tuple[str, int], list[float]] = defaultdict(list)

    def add(self, run: FinishedRun, stored: MatchFile) -> set[str]:
        """Add a run; return the names of its metrics that are compared."""
        compared = set()
        for kind, matches in stored.kinds.items():
            for class_id, found in class_precisions(stored.metric, matches).items():
                for short in ("AP", "AP50"):
                    if any(name.startswith(f"{kind}/{short}-") for name in run.record.metrics):
                        self._computed[f"{kind}/{short}", class_id].append(found[short])
            for name, value in run.record.metrics.items():
                if name.startswith((f"{kind}/AP-", f"{kind}/AP50-")):
                    compared.add(name)
                    if value is not None:  # a class without an object
                        self._recorded[name].append(value)
        return compared

    def wrong(self) -> str:
        """Return the name of a metric whose values no class has, or ""; each class has one name."""
        unused = dict(self._computed)
        for name, values in self._recorded.items():
            same = [
                key
                for key, own in unused.items()
                if name.startswith(f"{key[0]}-")
                and len(own) == len(values)
                and all(abs(a - b) <= SAME_AP for a, b in zip(own, values, strict=True))
            ]
            if not same:
                return name
            del unused[same[0]]
        return f"{next(iter(unused))[0]}-…" if unused else ""
