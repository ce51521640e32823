"""Numbers and links of a fixed report in every format: rows, evidence, provenance, the paper's.

    python -m tests.golden.regenerate_report

writes the CSV files of the report, and the numbers and links of its other files, into report/ next
to this file. Run it only to change them on purpose, and read the difference before committing it.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report import published
from benchmarks.report.export import RENDERERS
from benchmarks.report.plots import Plot
from benchmarks.report.records import FinishedRun, Results, Unusable
from benchmarks.report.report import Report
from benchmarks.report.table import Resampled, Resamples, aggregate
from detection.config.task import default_task
from moco.common.cfgnode import flatten, load_cfg
from tests.benchmarks.report.fake_runs import CONFIG, record

FOLDER = Path(__file__).with_name("report")
CONFIGS = Path(__file__).parents[2] / "configs"
COCO = {"DATASETS.TEST": ["coco_2017_val"]}
LINEAR = {"kind": "linear", "engine": "moco", "config": {"SOLVER.MAX_EPOCHS": 2}}
GRID = "SOLVER.BASE_LR=0.01,0.02,0.04 at 0.25 of the schedule"
BOTH = [f"{kind}/{name}" for kind in ("segm", "bbox") for name in ("AP", "AP50", "AP75")]


def run(init: str, seed: int, suite_task: str | None = None, **changes: object) -> FinishedRun:
    """Return a run whose weights are named after its init."""
    sha256 = None if init == "random" else init.encode().hex().ljust(64, "0")
    made = record(init=init, seed=seed, weights_sha256=sha256, **changes)
    return FinishedRun(Path("runs", made.task, init, f"seed{seed}"), made, suite_task)


def runs(aps: dict[str, list[float]], *metrics: str, **changes: object) -> list[FinishedRun]:
    """Return a run per init and value: the first metric is the value, the next one point more."""
    named = metrics or ("bbox/AP", "bbox/AP50", "bbox/AP75")
    return [
        run(init, seed, metrics={name: ap + i for i, name in enumerate(named)}, **changes)
        for init, values in aps.items()
        for seed, ap in enumerate(values)
    ]


def voc_runs() -> list[FinishedRun]:
    """Return runs of Table 2b with provenance, a null with its reason, and published rows."""
    whole = flatten(load_cfg(default_task(), CONFIGS / "voc/faster_rcnn_R_50_C4_24k.yaml", []))
    tags = str(published._tree()["tags"])
    config = {key: value for key, value in whole.items() if f"'{key}'" in tags}
    own = {"iterations": 24000, "config": config}
    found = runs({"random": [33.0, 35.0]}, **own)
    for seed, (label, deviations, torch, gpus) in enumerate(
        [
            ("as in the paper (24k)", [], "2.5.1", ["V100", "V100"]),
            ("not the paper's", ["BASE_LR: 0.01, not 0.02"], "2.4.0", []),
            ("", [], "2.5.1", []),
        ]
    ):
        ap75 = None if seed == 1 else 60.0 + seed
        reason = "not a number, so null: bbox/AP75, bbox/AP75-cat"
        made = run(
            "moco",
            seed,
            **own,
            metrics={"bbox/AP": 55.0 + seed, "bbox/AP50": 80.1 + seed / 10, "bbox/AP75": ap75},
            weights_source="moco_v1_200ep.pth.tar",
            recipe={"recipe": "voc", "label": label, "deviations": deviations},
            notes=["SEED was sampled", *([] if ap75 else [reason])],
            provenance={
                "versions": {"python": "3.11.4", "torch": torch, "detectron2": None},
                "git": "f" * 40,
                "hardware": {"cpu": "AMD EPYC", "cpu_threads": 2, "gpus": gpus},
                "utc": "2026-11-21T01:30:00+02:00",
            },
        )
        found.append(made)
    return found


def build() -> Report:
    """Build the report: all of the paper's kinds of tables, one that is not in it, a failed run."""
    frozen = {**CONFIG, "MODEL.BACKBONE.FREEZE_AT": 2}
    members = [
        *voc_runs(),
        *runs(
            {"random": [19.0, 21.0], "moco": [22.0, 24.0]},
            task="faster_rcnn_R_50_dilated_C5_24k",
            iterations=24000,
        ),
        *runs({"random": [9.0] * 5}, task="faster_rcnn_R_50_C4_9k", iterations=9000),
        *runs({"random": [30.0]}, *BOTH, task="mask_rcnn_R_50_FPN_1x", config=COCO),
        *runs({"random": [70.0]}, "sem_seg/mIoU", task="my_segmentation", suite_task="streets"),
        *runs(
            {"random": [10.0, 12.0], "moco": [60.0, 61.0]},
            "linear/top1",
            "linear/top5",
            **LINEAR,
            task="imagenet_linear_resnet50",
        ),
        # `few` has p = 0.049, which Holm's correction removes; `x` is best on a single seed.
        *runs(
            {
                "random": [10.0, 10.2, 10.4],
                "few": [10.9, 12.1, 11.8],
                "moco 10%": [20.0, 20.2, 20.1],
                "x": [30.0],
            },
            task="my_task",
            config=frozen,
        ),
        # Tuned: one row chose the edge of the grid. The untuned task has the same inits.
        *(
            each
            for init, value, rate in (("random", 11.0, 0.02), ("moco 10%", 21.0, 0.04))
            for each in runs(
                {init: [value, value + 0.3, value + 0.4]},
                task="my_task_tuned",
                config={**frozen, "SOLVER.TUNED": GRID, "SOLVER.BASE_LR": rate},
            )
        ),
        # 10.04 is printed as 10.0 and 12.16 as 12.2; their gap, 2.12, is printed as 2.2.
        *runs({"random": [10.03, 10.05], "moco": [12.15, 12.17]}, "knn/top1", task="rounded"),
    ]
    tables = aggregate(members)
    resampled = {
        ("few", "bbox/AP"): Resampled((0.2, 2.4, 0.002, 0.006), (-0.3, 3.1, 0.11, 0.33), True),
        ("moco 10%", "bbox/AP"): Resampled((8.0, 11.0, 0.002, 0.006), None, True),
    }
    resamples = Resamples(1000, resampled, {"x": "a run has no match records in its folder"})
    tables = [
        replace(table, margin=0.3, resamples=resamples) if table.task == "my_task" else table
        for table in tables
    ]
    failed = Unusable(Path("runs/my_task/gone/seed5"), "failed: nan")
    return Report(tables, Results(tuple(members), (), (failed,)), near=True)


def pages() -> dict[str, str]:
    """Render the report in every format, without the comparisons, with placeholders for figures."""
    report = build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plot, "svg", "<svg/>")
        files = {name: text for _, of in RENDERERS for name, text in of(report).items()}
    return {name: text for name, text in files.items() if name not in report.compared.values()}


# Style sheet, script and policy of a page have hashes and sizes that say nothing of the results.
LAYOUT = re.compile(r"<(style|script)\b.*?</\1>|<meta[^>]*>", re.S)
NUMBER_OR_LINK = re.compile(r'href="([^"]*)"|\]\(([^)]*)\)|([-+\u2212]?\d+(?:\.\d+)?)')


def numbers(pages: dict[str, str]) -> dict[str, str]:
    """Return the CSV files of a report, and of each other file the numbers and links, by line."""
    found = {}
    for name, text in pages.items():
        if name.endswith(".csv"):
            found[name] = text
            continue
        lines = [NUMBER_OR_LINK.findall(line) for line in LAYOUT.sub("", text).splitlines()]
        kept = (" ".join("".join(each) for each in line) for line in lines if line)
        found[f"{name}.numbers"] = "".join(f"{line}\n" for line in kept)
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, page in numbers(pages()).items():
        (FOLDER / file_name).write_text(page, encoding="utf-8")
        print(f"wrote {FOLDER / file_name}")
