"""Refusals of `table`, `plot`, `errors` and `robustness` about folders of runs."""

import json
from pathlib import Path
from typing import Any

from tests.benchmarks.report.fake_runs import CONFIG, record
from tests.oracles.refused_files import Edit, both, folder_of, text
from tests.refusals.rows import Row, rows

RECORD = vars(record())


def run(name: str = "runs/a", **changes: Any) -> Edit:
    return text(f"{name}/run.json", json.dumps({**RECORD, **changes}))


def raw(content: str | bytes) -> Edit:
    return text("runs/a/run.json", content)


def metrics(name: str, *lines: dict[str, float]) -> Edit:
    return text(f"{name}/metrics.json", "".join(json.dumps(line) + "\n" for line in lines))


RUNS = both(run("runs/random-0"), run("runs/random-1", seed=1, metrics={"bbox/AP": 12.0}))
HUGE, NAN, INF = 10**400, float("nan"), float("inf")
# Fields of a run record with invalid values.
WRONG: dict[str, list[object]] = {
    "kind": [{}],
    "status": [["done"], "running"],
    "schema": [[1], 2],
    "task": [5],
    "engine": [""],
    "init": [["random"], ""],
    "weights_sha256": [5],
    "weights_source": [{}],
    "seed": [HUGE, 1.5, True, "0"],
    "config_sha256": [None],
    "config": [[], *({"DATASETS.TEST": x} for x in (5, "voc", [["voc"]]))],
    "provenance": [
        "x",
        {"versions": ["torch"]},
        {"git": 5},
        *({"hardware": x} for x in ("x", {"gpus": [{}]}, {"gpus": 5}, {"cpu": ["x"]})),
    ],
    "iterations": ["300", HUGE],
    "seconds": [NAN, "12", HUGE],
    "metrics": [5, {"other": NAN}, *({"bbox/AP": x} for x in (HUGE, INF, NAN, [1.0], True, "12"))],
    "coverage": [5],
    "notes": [5, [5], "a note", None],
    "recipe": ["x", {"label": 5}, {"deviations": 5}, {"deviations": "BASE_LR"}],
    "no_such_field": [5],
    "\x1b[2J": [5],
    "start": [[], {"batches": [1]}, {"batches": "2"}],
}
NESTED = json.loads("[" * 200 + "]" * 200)
NO_RECORDS = (
    b"",
    b"[]",
    b"5",
    b'"x"',
    b"null",
    b"{",
    b"\xff\xfe",
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"seed": ' + b"1" * 5000 + b"}",
)
RECORDS = rows(
    "table runs --out out",
    *(
        (run(**{field: value}), rf"runs/a/run\.json.*{field if field.isprintable() else 'x1b'}")
        for field, values in WRONG.items()
        for value in values
    ),
    *((raw(content), r"runs/a/run\.json") for content in NO_RECORDS),
    (run(config={"x": NESTED}), r"run\.json: .*config: nested"),
    *(
        (run(metrics={metric: value}), rf"run\.json: metric {metric}: got {value}")
        for metric, value in (("bbox/AP", 101.0), ("segm/AP50", -1.0), ("sem_seg/mIoU", 100.1))
    ),
)
TABLE = [
    *rows(
        "table runs --out out",
        (run(status="failed", notes=["nan"]), "failed: nan"),
        (folder_of("runs"), "no runs below"),
    ),
    *rows("table missing", ("", "no such run folder")),
    *rows("table", ("", "RUNS|--diff")),
    *rows(
        "table runs",
        ("--format pdf", "--format: got 'pdf'"),
        ("--engine tensorflow", "--engine tensorflow"),
        ("--bundle x.tar", "--bundle"),
        ("--measured-by Me", "--measured-by: is stored with --bundle"),
        ("--bundle x.zip --weights-at https://a.b/c", "--weights-at: is stored with --measured"),
        ("--baseline supervised", "choices are random"),
        *((f"--bootstrap {n}", "--bootstrap") for n in ("99", "-1", "100001")),
        *((f"--margin {m}", "--margin") for m in ("0", "-1", "nan", "101")),
        edit=RUNS,
    ),
    # Runs of different protocols.
    *rows(
        "table runs --out out",
        ({"engine": "detectron2"}, "different engines.*detectron2 .*other.*embedded .*--engine"),
        (
            {"config_sha256": "d" * 64, "config": {**CONFIG, "SOLVER.BASE_LR": 0.01}},
            r"runs/other\).*SOLVER.BASE_LR \(0.0[12] / 0.0[12]\)$",
        ),
        ({"iterations": 100}, r"iterations.*100 \(.*other\)"),
        (
            {"weights_sha256": "a" * 64},
            r"other/run\.json: got the init 'random' with weights_sha256 aaaaaaaaaa; expected",
        ),
        ({"seed": 1}, "seed 1.*random-1.*"),
        on=lambda changes: both(RUNS, run("runs/other", **{"seed": 7, **changes})),
    ),
    *rows(
        "table runs --out out",
        (
            both(
                run("runs/one", init="moco", seed=7, weights_sha256="b" * 64),
                run("runs/other", init="moco", seed=8, weights_sha256="a" * 64),
            ),
            r"'moco' has different weights: bbbbbbbbbb \(.*one\) / aaaaaaaaaa \(.*other\)",
        ),
    ),
]


def broken_summary(folder: Path) -> None:
    RUNS(folder)
    (folder / "runs/random-0/metrics.json").write_text("{half\n")


PLOT = [
    *rows(
        "plot {}",
        ("gone", r"gone: no metrics\.json"),
        ("good new", r"new: no metrics\.json in it"),
        ("empty", "nothing to plot yet"),
        edit=both(
            metrics("good", {"iteration": 1, "epoch": 1, "loss": 2.0}),
            metrics("empty"),
            folder_of("new"),
        ),
        code=3,
    ),
    *rows(
        "plot {}",
        ("broken", "line 1 is not a line of metrics"),
        ("good good", "the same run is given twice"),
        ("good --output x.pdf", r"ends in \.png"),
        edit=both(
            metrics("good", {"iteration": 1, "epoch": 1, "loss": 2.0}),
            metrics("broken", {"loss": 1.0, "iteration": 3}),
        ),
    ),
]
OTHERS = [
    *rows("errors runs", (run(), "no predictions")),
    *rows("robustness runs", (run(), r"model_final\.pth"), code=3, needs=("imagecorruptions",)),
    *rows("robustness runs --severity 6", (run(), "invalid choice: 6")),
    *rows("table runs --out out", (broken_summary, r"metrics\.json: line 1")),
]
REPORT: list[Row] = [*RECORDS, *TABLE, *PLOT, *OTHERS]
