"""Bundles: zip files that share a report, or results that others can verify.

Contents of a bundle, which benchmarks/report/records.py reads:

README.txt                          a description of the bundle
table.html, compare-….html          the pages, except of results that others may cite
<suite>/runs/<task>/<init>/<seed>/run.json    the records, in the folders of the suite
                       …/error_types.json, …     other files of a run that reports read (`EVIDENCE`)
<suite>/suite.json                  marks the folders next to it as those of a suite; it contains
                                    the plan of the looks, if seeds were added until a decision
<suite>/inits/<name>.knn.json       kNN accuracies of the pre-training whose checkpoints are rows
about.json                          for results that others may cite: who measured them, and where
                                    the weights are

Paths on this machine, in records and in texts, are reduced to the last part. Protocol keys are
unchanged, because they are compared between runs. Bundles of the same report are bitwise identical.
`verify` recomputes the numbers of a bundle.
"""

import json
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from benchmarks.report import compare, page
from benchmarks.report.along import epoch_of
from benchmarks.report.bootstrap import METRICS, SAME_AP, checked_matches, class_precisions
from benchmarks.report.export import comparison_text, page_text
from benchmarks.report.records import (
    ABOUT_NAME,
    EVIDENCE,
    PLAN,
    SUITE_NAME,
    TASK_KEYS,
    About,
    FinishedRun,
    Results,
    Unusable,
    collect,
    knn_name,
    protocol_of,
    read_about,
    read_bundle,
    reading,
)
from benchmarks.report.report import Report, Shared, identity, make_tables
from benchmarks.report.style import EACH, PAGE_NAME
from detection.evaluation.matches import MatchFile
from detection.evaluation.metrics import has_matches, headline_names
from moco.common.errors import UserError, first_few, format_value, plural, printable
from moco.common.files import PathLike, atomic_write, open_file
from moco.common.keys import NOT_PROTOCOL, names_of
from moco.common.limits import CorruptFileError, open_zip
from moco.common.run import DIGITS, METRICS_NAME, RECORD_NAME, RunRecord
from moco.common.shipped import RESULTS

README = f"""\
Results of moco-transfer: open {PAGE_NAME} in a browser; each {RECORD_NAME} is the record of a run.
"""
CITED_README = f"Results of moco-transfer: each {RECORD_NAME} is the record of a run.\n"
TABLE = "\n    moco-transfer table THIS.zip    make the tables again\n"
# Everything up to the last slash of an absolute path, or of one from a home directory.
_FOLDERS = re.compile(r"(?<![\w.:/~-])[/~][^\s'\",:;=]*/")


def check_files(path: PathLike) -> int:
    """Compare every file of a bundle with its checksum, and return their number.

    Raises:
        DataError: If one is damaged.
    """
    with reading(path), open_file(path) as file, open_zip(file) as archive:
        if (broken := archive.testzip()) is not None:
            raise CorruptFileError(f"{format_value(broken)}: its checksum differs")
        return len(archive.infolist())


def share(results: Results) -> Results:
    """Remove the folders of this machine from results."""
    runs = (*results.transfer, *results.pretraining)
    tops = [run.folder.parents[4 if run.suite_task else 0] for run in runs]
    top = os.path.commonpath([*tops, *(item.folder.parent for item in results.unusable)])

    def of_run(run: FinishedRun) -> FinishedRun:
        return replace(run, folder=run.folder.relative_to(top), record=_anonymized(run.record))

    return Results(
        tuple(map(of_run, results.transfer)),
        tuple(map(of_run, results.pretraining)),
        tuple(
            Unusable(item.folder.relative_to(top), _without_folders(item.reason))
            for item in results.unusable
        ),
    )


def write_bundle(path: PathLike, own: Report, shared: Report, about: About | None = None) -> None:
    """Write the page, the records of finished runs and their evidence atomically.

    Results that others may cite get no page: it would show images of the dataset, and whoever reads
    the bundle makes one from the records.

    Args:
        path: Path of the zip file.
        own: Report of the original runs, whose files are read for the figures.
        shared: Report of the same tables from `share(own.results)`.
        about: Origin of results that others may cite.
    """
    if about is None:
        files = {"README.txt": README + TABLE, **_pages(own, shared)}
    else:
        files = {"README.txt": CITED_README + TABLE, ABOUT_NAME: f"{json.dumps(asdict(about))}\n"}
    evidence: dict[str, Callable[[], bytes | None]] = {}
    for run in (*shared.results.transfer, *shared.results.pretraining):
        evidence |= {f"{run.folder / name}": partial(_evidence, run, name) for name in EVIDENCE}
        content = json.dumps(asdict(run.record), indent=2, sort_keys=True)
        files[f"{run.folder / RECORD_NAME}"] = f"{content}\n"
        if run.suite_task:
            suite = run.folder.parents[3]
            if (name := f"{suite / SUITE_NAME}") not in files:
                plan = {key: x for key, x in run.read_suite().items() if key == PLAN and x}
                files[name] = f"{json.dumps(plan)}\n"
            if at := epoch_of(run.record.init):
                evidence[f"{suite / knn_name(at[0])}"] = partial(run.read_knn, at[0])

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name in sorted(files.keys() | evidence.keys()):
                # Match records may be large, so only one file is in memory at a time.
                content = files[name] if name in files else evidence[name]()
                if content is None:
                    continue
                info = zipfile.ZipInfo(name)  # with a constant time stamp
                info.external_attr = 0o644 << 16
                archive.writestr(info, content, zipfile.ZIP_DEFLATED)

    atomic_write(path, write)


def _pages(own: Report, shared: Report) -> dict[str, str]:
    """Render the page and its comparisons with the figures of the original runs."""
    figures = {}
    for mine, section in zip(own.sections, shared.sections, strict=True):
        found = page.figures(own, mine)
        figures[section.stem] = replace(found, missing=_without_folders(found.missing))
    pages = {PAGE_NAME: page_text(shared, figures, page.overviews(own))}
    stems = dict(zip((mine.stem for mine in own.sections), shared.sections, strict=True))
    for name, (section, made) in compare.comparisons(own).items():
        compared = replace(made, missing=_without_folders(made.missing))
        pages[name] = comparison_text(shared, stems[section.stem], compared)
    return pages


def _evidence(run: FinishedRun, name: str) -> bytes | None:
    content = run.read(name)
    if name == METRICS_NAME and content is not None:
        return _evaluations(content)
    if content is None or not name.endswith(".json"):
        return content
    return json.dumps(_without_folders(json.loads(content)), sort_keys=True).encode()


def _evaluations(content: bytes) -> bytes | None:
    """Return the lines of `metrics.json` that have a headline metric, with these alone, if any."""
    lines = []
    for line in map(json.loads, content.splitlines()):
        if names := [name for name in line if name in headline_names([name])]:
            kept = {name: line[name] for name in ("iteration", *names)}
            lines.append(json.dumps(kept, sort_keys=True) + "\n")
    return "".join(lines).encode() or None


def _anonymized(record: RunRecord) -> RunRecord:
    not_protocol = names_of(TASK_KEYS, *NOT_PROTOCOL)
    return replace(
        record,
        config={
            key: _without_folders(value, paths=True) if key in not_protocol else value
            for key, value in record.config.items()
        },
        weights_source=_without_folders(record.weights_source, paths=True),
        provenance=_without_folders(record.provenance),
        notes=_without_folders(record.notes),
        warnings=_without_folders(record.warnings),
    )


def _without_folders(value: Any, *, paths: bool = False) -> Any:
    """Remove folders from all texts in a value; with `paths`, a whole text may be a path."""
    if isinstance(value, str):
        is_path = paths and value.startswith("/")
        return Path(value).name if is_path else _FOLDERS.sub("", value)
    if isinstance(value, Mapping):
        return {key: _without_folders(item, paths=paths) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item, paths=paths) for item in value]
    return value


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
    """Read all bundles of a folder, sorted by name.

    Raises:
        UserError: If there is no bundle.
        DataError: If a bundle is damaged.
    """
    found = sorted(folder.glob("*.zip"))
    if not found:
        raise UserError(f"{folder}: no bundles there; expected files that end in .zip")
    return [read_shared(path) for path in found]


def verify(path: PathLike) -> str:
    """Recompute the numbers of a bundle; return one line that says what was compared.

    Every file is compared with its checksum. The protocol hash of each run in a table is computed
    from the run's configuration, and the AP, also of each class, from the match records. Facts that
    are stored twice must agree: the run in path and record, the hash of the weights. Runs of a
    table must have the same data.

    Raises:
        UserError: If a record is invalid, or anything differs.
        DataError: If the bundle is damaged, or does not say who measured it.
    """
    claimed = read_shared(path)
    files = check_files(path)
    runs = {at: found for at, found in read_bundle(path).items() if found[0].kind != "pretrain"}
    for folder, (record, suite_task) in runs.items():
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
            of = f"{path}: {table.title}: {format_value(name)}"
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
                f"{where}: the record is of {format_value(record.init)}, seed {record.seed}; "
                "expected the init and the seed of its folder"
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
