"""paper.yaml: the checksum of its tables, spot checks, and their rules."""

import ast
import hashlib
import json
from dataclasses import astuple
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.report.published import OWN, PaperTable, load_paper, tables_for
from benchmarks.report.style import is_strong
from detection.evaluation.metrics import HEADLINE
from moco.common.cfgnode import flatten, read_yaml
from moco.modeling.encoder import EncoderSpec

ROOT = Path(__file__).resolve().parents[3]
TABLES = {(t.number, t.part) if t.number else t.label: t for t in load_paper()[1]}
DIGEST = "2cdd0e040938c09e0126f50b821204ea3b1825ba647e959fa6f4d23351ff5cd2"
MECHANISMS = "Sec. 4.1, contrastive loss mechanisms (text and footnote)"
LVIS_1X = "appendix, LVIS instance segmentation, 1x schedule"
FINETUNING = "appendix, Fine-tuning in ImageNet"
INATURALIST = "appendix, iNaturalist fine-grained classification"
PARAMS = "#params (M)"


def test_every_value_is_in_its_place():
    """All numbers equaled those of the paper's LaTeX source when the digest was taken."""
    content = [
        [
            *(t.number, t.part, t.label, t.iterations, t.epochs, t.trials, t.baseline),
            *(t.columns, t.metrics, t.methods, [astuple(row)[:3] for row in t.rows]),
        ]
        for t in load_paper()[1]
    ]
    assert hashlib.sha256(json.dumps(content).encode()).hexdigest() == DIGEST
    for field, count in (("values", 345), ("gaps", 130)):
        rows = [getattr(row, field) for table in TABLES.values() for row in table.rows]
        assert sum(number is not None for row in rows for number in row) == count
    assert len(TABLES) == len(load_paper()[1])  # no table hides another


@pytest.mark.parametrize(
    ("key", "row", "column", "expected"),
    [
        ((2, "b"), "MoCo IN-1M", "AP75", (62.6, 3.8)),
        ((3, "R50-dilated-C5"), "end-to-end", "AP75", (56.6, None)),
        ((4, None), "unsup. IN-1M", "AP50, RelPos, by Doersch2017", (66.8, -7.4)),
        ((1, "MoCo"), "R50w4x", PARAMS, (375, None)),
        (MECHANISMS, "memory bank, NCE, K 4096", "accuracy, Wu2018a", (54.0, None)),
        (INATURALIST, "MoCo IN-1M", "accuracy", (65.6, None)),
        ((5, "a"), "MoCo IG-1B", "AP^bb", (38.9, 0.0)),
        ((6, "COCO keypoints"), "MoCo IN-1M", "AP50^kp", (87.4, 0.5)),
        ((6, "VOC semantic"), "MoCo IN-1M", "mIoU", (72.5, -1.9)),
        (LVIS_1X, "super. IN-1M, BN tuned", "AP75^mk", (24.8, None)),
    ],
)
def test_values_as_printed(key, row, column, expected):
    table = TABLES[key]
    [found] = [r for r in table.rows if r.name == row]
    index = table.columns.index(column)
    assert (found.values[index], found.gaps[index]) == expected


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda t: t.cite)
def test_rows_fit_their_table_and_gaps_are_the_differences_to_the_baseline(table: PaperTable):
    """To the last digit: the paper rounds every number for itself, but no gap is off by it."""
    rows = {row.name: row for row in table.rows}
    assert len(rows) == len(table.rows)
    assert len(set(table.results)) == len(table.results)  # a metric and a method are one column
    base = rows[table.baseline].values if table.baseline else [None] * len(table.columns)
    names = list(rows)
    below = names[names.index(table.baseline) + 1 :] if table.baseline else []
    for name, row in rows.items():
        assert len(row.values) == len(row.gaps) == len(table.columns), name
        assert set(row.tasks) <= set(table.tasks), name
        for own, gap, other in zip(row.values, row.gaps, base, strict=True):
            if gap is not None:
                assert name != table.baseline
                assert gap == pytest.approx(own - other, abs=1e-6), name
            elif table.number is not None and name in below:  # in brackets: all of these
                assert own is None, name


def test_methods_keep_other_papers_apart():
    table = TABLES[(4, None)]
    row = next(r for r in table.rows if r.name == "unsup. IN-1M")
    found = [table.number_of(row, metric) for metric in ("bbox/AP50", "bbox/AP", "bbox/AP75")]
    assert found == [(74.9, 0.5), (46.6, 4.2), (50.1, 7.4)]
    assert table.number_of(row, "segm/AP") == (None, None)


def test_metrics_are_canonical():
    pairs = [zip(t.columns, t.metrics, strict=True) for t in TABLES.values()]
    named = set(chain.from_iterable(pairs))
    assert {name for name, metric in named if metric is None} == {PARAMS}
    known = {f"{kind}/{name}" for kind, names in HEADLINE.items() for name in names}
    assert {metric for _, metric in named if metric is not None} <= known


@pytest.mark.parametrize(
    "table", [t for t in TABLES.values() if t.tasks and t.tested_on], ids=lambda t: t.cite
)
def test_tasks_of_detection_are_files_of_that_data_and_length(table: PaperTable):
    for task in table.tasks:
        configs = [flatten(read_yaml(path)) for path in (ROOT / "configs").rglob(f"{task}.yaml")]
        [cfg] = [c for c in configs if ast.literal_eval(c["DATASETS.TEST"]) == table.tested_on]
        assert table.iterations in (None, cfg["SOLVER.MAX_ITER"])
        assert table.epochs is None
        frozen = cfg["MODEL.RESNETS.NORM"] == "FrozenBN"
        rows = [row.name for row in table.rows if task in row.tasks]
        assert rows and frozen == all("BN frozen" in name for name in rows)


def test_every_task_of_the_paper_has_its_numbers():
    """All other files in configs/ have "Not in the paper" in their first line."""
    tasks = {
        path.stem: path.read_text()
        for folder in ("voc", "coco", "lvis", "cityscapes", "ade20k")
        for path in (ROOT / "configs" / folder).glob("*.yaml")
    }
    named = {task for table in TABLES.values() for task in table.tasks if table.tested_on}
    assert {name for name, text in tasks.items() if "Not in the paper" not in text[:30]} == named


def test_tasks_of_classification_are_a_task_and_a_network():
    tables = [table for table in TABLES.values() if table.tasks and not table.tested_on]
    named = {task for table in tables for task in table.tasks}
    networks = [EncoderSpec("resnet50", width=width).name for width in (1.0, 2.0, 4.0)]
    networks.append(EncoderSpec("resnext50_32x8d").name)
    files = ("imagenet/linear", "imagenet/finetune", "inaturalist/finetune_2018")
    kinds = [read_yaml(ROOT / "configs" / f"{file}.yaml")["TASK"] for file in files]
    assert len(named) == 6 and named <= {f"{kind}_{net}" for kind in kinds for net in networks}
    assert [row.tasks for row in TABLES[1, "MoCo"].rows] == [
        (f"imagenet_linear_{name}",)
        for name in ("resnet50", "resnext50_32x8d", "resnet50w2", "resnet50w4")
    ]
    metrics = {metric for table in tables for metric in table.metrics}
    assert metrics == {None, "linear/top1", "finetune/top1"}
    # What is not this project's to reproduce: other papers' pre-training.
    assert [t.cite for t in TABLES.values() if not t.tasks] == [
        "Table 1, previous methods (tab:results_imgnet)"
    ]
    assert OWN not in TABLES[1, "previous methods"].methods


def test_tables_of_a_task():
    def cited(task, *tested_on):
        return [table.cite for table in tables_for(task, tested_on)]

    assert cited("faster_rcnn_R_50_C4_9k", "voc_2007_test") == ["Table 4 (tab:voc07)"]
    assert cited("faster_rcnn_R_50_C4_9k", "my_test") == []
    assert cited("quickstart", "voc_2007_test") == []
    name = "mask_rcnn_R_50_FPN_2x"
    coco = ["Table 5b (tab:coco)", "Table A.1, 2x (tab:coco_longer)"]
    assert cited(name, "coco_2017_val") == coco
    assert cited(name, "lvis_v0.5_val") == [
        "Table 6, LVIS (tab:more_tasks)",
        LVIS_1X.replace("1x", "2x"),
    ]
    assert cited("imagenet_finetune_resnet50") == [FINETUNING]


def test_the_paper_is_green_from_where_our_tables_are():
    """The paper colors 75 of the 129 gaps in its tables."""
    tables = [table for key, table in TABLES.items() if key != MECHANISMS]  # a gap in the text
    gaps = [gap for t in tables for row in t.rows for gap in row.gaps if gap is not None]
    assert (len(gaps), sum(map(is_strong, gaps))) == (129, 75)
