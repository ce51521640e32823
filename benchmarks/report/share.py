"""A report for others: of paths on this machine, in records and in texts, the last part is left.

Keys of the protocol stay as they are: they are compared between runs.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.report import page
from benchmarks.report.aggregate import NOT_PROTOCOL
from benchmarks.report.bundle import suite_task, write_bundle
from benchmarks.report.content import Report
from benchmarks.report.progress import PAGE_NAME
from benchmarks.report.records import Results, Run, Unusable
from benchmarks.report.render import page_text
from moco.common.errors import printable
from moco.common.files import PathLike
from moco.common.run import RunRecord

# Up to the last slash of a path from the root or from somebody's home.
_FOLDERS = re.compile(r"(?<![\w.:/~-])[/~][^\s'\",:;=]*/")
IN_SUITE = 5  # parts of <suite>/runs/<task>/<init>/<seed>


def share(results: Results) -> Results:
    """The results without the folders of this machine; those of the runs are shortened."""
    runs = (*results.transfer, *results.pretraining)
    parts = {run.folder: IN_SUITE if run.suite_task else 1 for run in runs}
    for item in results.unusable:
        parts[item.folder] = IN_SUITE if suite_task(item.folder, Path.is_file) else 1
    names = _names(parts)

    def of_run(run: Run) -> Run:
        return Run(names[run.folder], _of_record(run.record), run.suite_task)

    return Results(
        tuple(map(of_run, results.transfer)),
        tuple(map(of_run, results.pretraining)),
        tuple(
            Unusable(
                names[item.folder],
                _without_folders(item.reason),
                item.record and _of_record(item.record),
            )
            for item in results.unusable
        ),
    )


def write_shared(path: PathLike, own: Report, shared: Report) -> None:
    """Write a bundle.

    Args:
        own: where the runs' other files are, for the figures.
        shared: the same tables of `share(own.results)`.
    """
    figures = {}
    for mine, section in zip(own.sections, shared.sections, strict=True):
        found = page.figures(own, mine)
        figures[section.stem] = replace(found, missing=_without_folders(found.missing))
    text = page_text(shared, figures, page.schedules(own.tables))
    results = shared.results
    records = {
        PurePosixPath(run.folder): (run.record, run.suite_task is not None)
        for run in (*results.transfer, *results.pretraining)
    }
    for item in results.unusable:
        if item.record is not None:
            records[PurePosixPath(item.folder)] = item.record, False
    write_bundle(path, (PAGE_NAME, text), records)


def _names(parts: Mapping[Path, int]) -> dict[Path, Path]:
    """As much of the end of each folder's path as tells it from the others, at least N parts."""
    names: dict[Path, Path] = {}
    for length in range(1, max(len(folder.parts) for folder in parts) + 1):
        names = {
            folder: Path(*map(printable, folder.parts[1:][-max(length, least) :]))
            for folder, least in parts.items()
        }
        if len(set(names.values())) == len(names):
            break
    return names


def _of_record(record: RunRecord) -> RunRecord:
    return replace(
        record,
        config={
            key: _without_folders(value, paths=True) if key in NOT_PROTOCOL else value
            for key, value in record.config.items()
        },
        weights_source=_without_folders(record.weights_source, paths=True),
        provenance=_without_folders(record.provenance),
        notes=_without_folders(record.notes),
    )


def _without_folders(value: Any, *, paths: bool = False) -> Any:
    """A value whose texts have lost their folders; `paths`: a text may be one."""
    if isinstance(value, str):
        is_path = paths and value.startswith("/")
        return Path(value).name if is_path else _FOLDERS.sub("", value)
    if isinstance(value, Mapping):
        return {key: _without_folders(item, paths=paths) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item, paths=paths) for item in value]
    return value
