"""Writer of bundles: reports to share in one zip file, which benchmarks/report/bundle.py reads.

Paths on this machine, in records and in texts, are reduced to their last part. Protocol keys are
unchanged, because they are compared between runs. Bundles of the same report are bitwise identical.
"""

import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.report import comparison, page
from benchmarks.report.along import epoch_of
from benchmarks.report.bundle import ABOUT_NAME, EVIDENCE, PLAN, SUITE_NAME, About, knn_name
from benchmarks.report.content import Report
from benchmarks.report.progress import PAGE_NAME
from benchmarks.report.records import TASK_KEYS, FinishedRun, Results, Unusable
from benchmarks.report.render import comparison_text, page_text
from moco.common.files import PathLike, atomic_write
from moco.common.keys import NOT_PROTOCOL, names_of
from moco.common.run import RECORD_NAME, RunRecord

README = f"""\
Results of moco-transfer: open {PAGE_NAME} in a browser; each {RECORD_NAME} is the record of a run.
"""
RESULTS = f"Results of moco-transfer: each {RECORD_NAME} is the record of a run.\n"
TABLE = "\n    moco-transfer table THIS.zip    make the tables again\n"
# Everything up to the last slash of an absolute path, or of one from a home directory.
_FOLDERS = re.compile(r"(?<![\w.:/~-])[/~][^\s'\",:;=]*/")


def share(results: Results) -> Results:
    """Remove the folders of this machine from results."""
    runs = (*results.transfer, *results.pretraining)
    tops = [run.folder.parents[4 if run.suite_task else 0] for run in runs]
    top = os.path.commonpath([*tops, *(item.folder.parent for item in results.unusable)])

    def of_run(run: FinishedRun) -> FinishedRun:
        return replace(run, folder=run.folder.relative_to(top), record=_of_record(run.record))

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
        files = {"README.txt": RESULTS + TABLE, ABOUT_NAME: f"{json.dumps(asdict(about))}\n"}
    evidence: dict[str, Callable[[], bytes | None]] = {}
    for run in (*shared.results.transfer, *shared.results.pretraining):
        evidence |= {f"{run.folder / name}": partial(_evidence, run, name) for name in EVIDENCE}
        content = json.dumps(asdict(run.record), indent=2, sort_keys=True)
        files[f"{run.folder / RECORD_NAME}"] = f"{content}\n"
        if run.suite_task:
            plan = {} if run.plan is None else {PLAN: asdict(run.plan)}
            suite = run.folder.parents[3]
            files[f"{suite / SUITE_NAME}"] = f"{json.dumps(plan)}\n"
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
    for name, (section, made) in comparison.comparisons(own).items():
        compared = replace(made, missing=_without_folders(made.missing))
        pages[name] = comparison_text(shared, stems[section.stem], compared)
    return pages


def _evidence(run: FinishedRun, name: str) -> bytes | None:
    content = run.read(name)
    if content is None or not name.endswith(".json"):
        return content
    return json.dumps(_without_folders(json.loads(content)), sort_keys=True).encode()


def _of_record(record: RunRecord) -> RunRecord:
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
