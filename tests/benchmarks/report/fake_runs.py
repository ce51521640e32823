"""Hand-made run folders for the tests of the tables."""

import csv
import html
import io
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.export import RENDERERS
from benchmarks.report.plots import Plot
from benchmarks.report.records import collect
from benchmarks.report.report import Report
from benchmarks.report.table import aggregate
from moco.common.run import RunRecord, write_record

CONFIG = {"DATASETS.TEST": ["voc_2007_test"], "SOLVER.MAX_ITER": 300, "SOLVER.BASE_LR": 0.02}


def record(**changes: Any) -> RunRecord:
    init = changes.get("init", "random")
    fields: dict[str, Any] = {
        "kind": "detection",
        "status": "done",
        "task": "faster_rcnn_R_50_C4_24k",
        "engine": "embedded",
        "init": "random",
        "weights_sha256": None
        if init == "random"
        else init.encode(errors="surrogatepass").hex()[:64].ljust(64, "0"),
        "weights_source": None,
        "seed": 0,
        "config_sha256": "c" * 64,
        "config": CONFIG,
        "provenance": {},
        "iterations": 300,
        "seconds": 12.5,
        "metrics": {"bbox/AP": 10.0, "bbox/AP50": 20.0, "bbox/AP75": 8.0},
        "start": {"batches": ["a0"]},
    }
    return RunRecord(**{**fields, **changes})


def write_run(folder: Path, losses: list[float] | None = None, **changes: Any) -> Path:
    """Write a run folder with a record and, given `losses`, Detectron2's metrics lines."""
    folder.mkdir(parents=True)
    if losses is not None:
        lines = [json.dumps({"iteration": 20 * i, "total_loss": x}) for i, x in enumerate(losses)]
        (folder / "metrics.json").write_text("\n".join(lines) + "\n")
    write_record(folder, record(**changes))
    return folder


def write_pair(root: Path, aps: dict[str, list[float]], **changes: Any) -> Path:
    """Write a run per init and value: AP is the value, AP50 twice the value, AP75 two less."""
    for init, values in aps.items():
        for seed, ap in enumerate(values):
            write_run(
                root / f"{init}-{seed}",
                losses=[3.0 / (1 + 0.2 * i * (1 + 0.05 * seed)) for i in range(15)],
                init=init,
                seed=seed,
                weights_sha256=None if init == "random" else init.encode().hex().ljust(64, "0"),
                metrics={"bbox/AP": ap, "bbox/AP50": 2 * ap, "bbox/AP75": ap - 2},
                **changes,
            )
    return root


def report(root: Path, baseline: str | None = None, near: bool = False) -> Report:
    """Make the report of all runs below a folder."""
    results = collect([root])
    return Report(aggregate(results.transfer, baseline), results, near=near)


def rendered(made: Report) -> dict[str, str]:
    """Render a report without figures in every format, with HTML's entities as characters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plot, "svg", "<svg/>")
        texts = {name: renderer(made) for name, renderer in RENDERERS}
    files = {"md": "table.md", "tex": "table.tex", "terminal": "table.txt"}
    found = {name: texts[name][file] for name, file in files.items()}
    return {**found, "html": html.unescape(texts["html"]["table.html"])}


def csv_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))
