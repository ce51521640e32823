"""literature.yaml: every number against a second transcription, and whose rows a task has.

The second transcription is literature.txt, which gives each row's protocol in words of its own.
"""

from pathlib import Path

import pytest
import yaml

from benchmarks.report import literature
from benchmarks.report.content import Published
from benchmarks.report.literature import NEAR, LiteratureRow, load_literature, rows_for, tags_of
from benchmarks.report.paper import load_paper
from benchmarks.report.render import RENDERERS
from detection.config.task import default_task
from moco.common.cfgnode import flatten, load_cfg
from tests.benchmarks.report.fake_runs import csv_rows, rendered, report, write_pair

ROOT = Path(__file__).resolve().parents[3]
TREE = yaml.safe_load(Path(literature.__file__).with_suffix(".yaml").read_text())
SHIPPED = (
    "coco/ret*",
    "coco/*C4*",
    "coco/*k_rcnn_R_50_FPN*",
    "coco/key*",
    "coco/*ViT*",
    "cityscapes/*",
    "voc/*",
    "lvis/*",
)
TASKS = [path for pattern in SHIPPED for path in sorted((ROOT / "configs").glob(f"{pattern}.yaml"))]
FPN_1X = ROOT / "configs" / "coco" / "mask_rcnn_R_50_FPN_1x.yaml"
VOC = ROOT / "configs" / "voc" / "faster_rcnn_R_50_C4_24k.yaml"

# A word of literature.txt's protocols → the tags that it stands for; those of all its words count.
DEFAULT = {"schedule": "1x", "backbone": "R50", "data": "COCO train2017, val2017"}
WORDS = {
    "voc": {"data": "VOC trainval07+12, test2007", "schedule": "24k", "lr": "0.02, warm-up 100"},
    "voc07": {"data": "VOC trainval2007, test2007", "schedule": "not stated"},
    "searched": {"lr": "searched for each method"},
    "0.1": {"lr": "0.1, warm-up 1000 from 1/3"},
    "unknown": {"lr": "not stated"},
    "c4": {"detector": "Mask R-CNN, C4", "head": "res5 and BN"},
    "fpn": {"detector": "Mask R-CNN, FPN"},
    "2fc": {"head": "2fc", "lr": "0.02, warm-up 1000", "norm": "SyncBN, also in FPN"},
    "4conv": {"norm": "SyncBN, also in FPN"},
    "resim": {"freezing": "stem and res2", "detector": "not stated", "schedule": "2x"},
    "soco": {"loaded": "backbone, FPN and head", "head": "4conv1fc and mask head with SyncBN"},
    "vicreg": {"head": "not stated"},
    "unchecked": {"head": "not stated", "lr": "not stated"},
    "adamw": {"lr": "AdamW 2.5e-4, layer decay 0.6"},
    "keypoints": {"data": "COCO keypoints train2017, val2017", "schedule": "2x"},
    "cityscapes": {},
    "instances": {"data": "Cityscapes instances, fine train, val", "schedule": "24k, one step"},
    "semantic": {"data": "Cityscapes semantic, fine train, val", "schedule": "FCN 90k"},
    "retinanet": {"detector": "RetinaNet, FPN"},
    "lvis": {"data": "LVIS v1 train, val; ViTDet's", "schedule": "not stated"},
    "v1": {"data": list(TREE["tags"]["data"])[6], "schedule": "1x"},
    "b": {"backbone": "ViT-B"},
    "l": {"backbone": "ViT-L"},
    "h": {"backbone": "ViT-H"},
    "swin": {"backbone": "Swin-B"},
    "convnext": {"backbone": "ConvNeXt-B"},
    "vit-b": {"backbone": "ViT-B"},
    "mae-lite": {"backbone": "ViT-T, 12 heads", "schedule": "100 epochs"},
    "r50": {},
    "r101": {"backbone": "R101"},
    "lsj": {"input": "large-scale jitter to 1024"},
}
WORDS |= {word: {"schedule": word} for word in ("12k", "2x", "6x")}
WORDS |= {word: {"schedule": f"{word} epochs"} for word in ("25", "50", "100", "200", "400")}


def protocol(text: str) -> dict[str, str]:
    words = text.split()
    tags = dict(DEFAULT)
    if words[0] in ("vit", "vitdet") or words[1:2] == ["rel"]:
        del tags["schedule"]  # each has its own
        kind = {"vit": "Mask R-CNN, FPN on", "vitdet": "Mask R-CNN, simple pyramid of a ViT"}
        tags["detector"] = kind.get(words[0], "Cascade Mask R-CNN, simple")
    if (
        "mmdet" in words
        or words[:2] == ["cascade", "vit-b"]
        or words[:2] == ["cascade", "convnext"]
    ):
        del tags["schedule"]
        tags["lr"] = "not stated"
    if words[-1].endswith("%"):
        tags |= {"data": f"COCO train2017 {words[-1]}", "schedule": "not stated"}
    for word in words:
        tags |= WORDS.get(word, {})
    return tags


def number_text(row: LiteratureRow) -> str:
    return "/".join(f"{v:g}{'?' * (m in row.unverified)}" for m, v in row.values.items())


def test_every_number_is_published_so_and_has_its_protocol_and_mark():
    left = list(load_literature())
    lines = (ROOT / "tests/benchmarks/report/literature.txt").read_text().splitlines()[1:]
    for line in lines:
        where, source, method, values = (part.strip() for part in line.split("|"))
        printed = [v for v in values.split("/") if v != "–"]
        wanted = "/".join(f"{float(v.rstrip('?')):g}{'?' * v.endswith('?')}" for v in printed)
        found = [
            row
            for row in left
            if number_text(row) == wanted
            and source.lower() in row.source.lower()
            and all(row.tags[tag].startswith(v) for tag, v in protocol(where).items())
        ]
        words = set(method.split())
        found = [row for row in found if words <= set(row.name.replace(",", "").split())]
        assert len({(row.name, *row.tags.values()) for row in found}) == 1, line
        left.remove(found[0])
    assert not left


def config_of(path: Path, **changes: object) -> dict[str, object]:
    return flatten(load_cfg(default_task(), path, [])) | changes


def test_every_row_has_a_known_value_of_every_tag():
    for row in load_literature():
        assert list(row.tags) == list(TREE["tags"])
        assert all(value in map(str, TREE["tags"][tag]) for tag, value in row.tags.items()), row
        assert row.values and row.source and (row.method == "random") == (row.pretrain is None)
        assert all(0 < value < 100 for value in row.values.values())
        assert row.n in (None, 5) and (row.epochs or 1) > 0


@pytest.mark.parametrize("path", TASKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_rows_of_a_task_do_not_repeat_the_papers(path):
    config = config_of(path)
    metrics = {metric for row in load_literature() for metric in row.values}
    for row in rows_for(config, metrics).get((), ()):
        assert row.tags == tags_of(config)
        for table in load_paper()[1]:
            if path.stem in table.tasks and config["DATASETS.TEST"] == table.tested_on:
                theirs = [dict(zip(table.metrics, r.values, strict=True)) for r in table.rows]
                assert len(row.values) == 1 or row.values not in theirs


@pytest.mark.parametrize(
    ("task", "source", "methods"),
    [
        ("coco/mask_rcnn_ViT_B_100ep", "ViTDet, arXiv 2203.16527, Table 5", {"MAE": 51.6}),
        ("coco/mask_rcnn_ViT_L_100ep", "ViTDet, arXiv 2203.16527, Table 5", {"MAE": 55.6}),
        (
            "coco/mask_rcnn_ViT_Ti_640_100ep",
            "wangsr126/MAE-Lite",
            {"DeiT": 40.4, "MAE": 39.9, "D-MAE": 42.3, "MoCo v3": 39.7},
        ),
    ],
)
def test_tasks_of_vision_transformers_have_the_rows_of_their_protocol(task, source, methods):
    rows = rows_for(config_of(ROOT / "configs" / f"{task}.yaml"), ["bbox/AP"])[()]
    assert {row.source for row in rows} == {source}
    assert {row.method: row.values["bbox/AP"] for row in rows} == methods
    absolute = config_of(FPN_1X.with_name("mask_rcnn_ViT_B_100ep.yaml"))
    absolute["MODEL.VIT.REL_POS"] = False
    table_4 = rows_for(absolute, ["bbox/AP"])[()]
    assert [row.values["bbox/AP"] for row in table_4] == [51.2, 51.1]


@pytest.mark.parametrize(
    ("task", "differing", "values"),
    [
        ("coco/mask_rcnn_ViT_B_FPN_25ep", "learning rate", [48.1]),
        ("coco/mask_rcnn_ViT_B_FPN_50ep", "learning rate", [50.1]),
        ("coco/mask_rcnn_ViT_B_FPN_100ep", "learning rate", [50.3]),
    ],
)
def test_what_was_searched_for_each_method_is_near_and_not_equal(task, differing, values):
    found = rows_for(config_of(ROOT / "configs" / f"{task}.yaml"), ["bbox/AP"], near=True)
    assert () not in found
    ((line,), rows) = next(iter(found.items()))
    assert line.startswith(differing) and "searched for each method" in line
    assert [row.values["bbox/AP"] for row in rows] == values


def test_vitdets_lvis_rows_say_neither_schedule_nor_learning_rate():
    config = config_of(ROOT / "configs" / "lvis" / "mask_rcnn_ViT_B_v1_100ep.yaml")
    assert () not in rows_for(config, ["segm/APr"])
    ((lines, rows),) = rows_for(config, ["segm/APr"], near=True).items()
    assert [line.split(" (")[0] for line in lines] == ["schedule", "learning rate"]
    assert [row.values["segm/APr"] for row in rows] == [26.4, 28.8, 29.1]


def test_sparks_recipe_has_sparks_rows_and_no_sgd():
    config = config_of(FPN_1X.with_name("mask_rcnn_R_50_FPN_1x_SparK.yaml"))
    (rows,) = rows_for(config, ["bbox/AP"]).values()
    assert [(row.method, row.values["bbox/AP"]) for row in rows] == [("SparK", 41.6)]
    assert tags_of(config_of(FPN_1X, **{"SOLVER.OPTIMIZER": "AdamW"}))["lr"] is None
    # A record of before there was the key was trained with SGD.
    earlier = config_of(FPN_1X)
    del earlier["SOLVER.OPTIMIZER"], earlier["INPUT.LSJ.ENABLED"]
    assert tags_of(earlier) == tags_of(config_of(FPN_1X))


# Task of another protocol than the paper's → the sources whose rows are of it. SoCo's differ in
# weight decay and what is loaded, or do not say; the paper's own recipe on LVIS v1 nobody has.
OF_OTHERS = {
    "coco/mask_rcnn_R_50_FPN_1x_4conv1fc": {"PyContrast", "PixPro, README", "InsLoc"},
    "coco/mask_rcnn_R_50_FPN_2x_4conv1fc": {"PyContrast", "InsLoc"},
    "coco/retinanet_R_50_FPN_90k": {"DetCo, Tables 5, 7 and 9"},
    "coco/retinanet_R_50_FPN_180k": {"DetCo, Tables 5, 7 and 9"},
    "coco/retinanet_R_50_FPN_12k": {"DetCo, Table 5"},
    "voc/faster_rcnn_R_50_C4_24k_lr0.1": {"Barlow Twins, Table 4"},
    "lvis/mask_rcnn_R_50_FPN_1x_v1": set[str](),
    "lvis/mask_rcnn_R_50_FPN_1x_v1_4conv1fc": set[str](),
}


@pytest.mark.parametrize(("task", "sources"), OF_OTHERS.items(), ids=OF_OTHERS)
def test_a_task_of_another_protocol_has_its_rows(task, sources):
    config = config_of(ROOT / "configs" / f"{task}.yaml")
    tags = tags_of(config)
    assert None not in tags.values(), tags
    rows = rows_for(config, ["bbox/AP"]).get((), [])
    assert {row.source for row in rows} == sources
    assert all(row.tags == tags for row in rows)
    if task.endswith("v1_4conv1fc"):
        near = rows_for(config, ["bbox/AP"], near=True)
        assert {row.source for group in near.values() for row in group} == {"SoCo, README"}


@pytest.mark.parametrize(
    ("key", "value", "tag"),
    [
        ("MODEL.ROI_BOX_HEAD.NUM_FC", 1, "head"),
        ("MODEL.FPN.NORM", "", "norm"),
        ("INPUT.MAX_SIZE_TRAIN", 1200, "input"),
        ("SOLVER.MAX_ITER", 45000, "schedule"),
        ("SOLVER.BASE_LR", 0.01, "learning rate"),
        ("MODEL.BACKBONE.FREEZE_AT", 2, "freezing"),
        ("MODEL.RESNETS.DEPTH", 101, None),
        ("DATASETS.TRAIN", ("mine_train",), None),
        ("MODEL.MASK_ON", False, None),
    ],
)
def test_what_differs_from_the_protocol_is_named(key, value, tag):
    equal = rows_for(config_of(FPN_1X), ["bbox/AP"])
    assert {row.source for row in equal[()]} == {"DetCo, Table 4"}
    changed = config_of(FPN_1X, **{key: value})
    assert rows_for(changed, ["bbox/AP"]) == {}
    groups = rows_for(changed, ["bbox/AP"], near=True)
    assert all(1 <= len(differs) <= NEAR for differs in groups)
    assert any(d[0].startswith(f"{tag} (here ") for d in groups) == (tag is not None)
    assert bool(groups) == (tag is not None)  # another network, task or dataset is not near
    for rows in groups.values():
        assert all(row.tags == rows[0].tags for row in rows)  # one protocol under one header


def test_norms_of_one_kind_are_equal_and_an_incomplete_configuration_equals_nothing():
    changed = {"MODEL.RESNETS.NORM": "SyncBN", "DATASETS.TRAIN": ["coco_2017_train"]}
    assert rows_for(config_of(FPN_1X, **changed), ["bbox/AP"])
    assert rows_for({"DATASETS.TEST": ["coco_2017_val"]}, ["bbox/AP"], near=True) == {}
    assert rows_for(config_of(FPN_1X), ["sem_seg/mIoU"], near=True) == {}


def test_no_unverified_number_without_its_mark():
    for row in load_literature():
        [cells] = Published((), [row]).cells([(metric, "this paper") for metric in row.values])
        marked = {m for m, c in zip(row.values, cells[2:-1], strict=True) if c.text[-1] == "‡"}
        assert marked == row.unverified
        assert ("not verified" in Published((), [row]).note) == bool(marked)


@pytest.mark.parametrize("near", [False, True])
def test_rendered_below_ours_and_near_ones_apart(tmp_path, near):
    write_pair(tmp_path, {"random": [33.0, 34.0]}, config=config_of(VOC), iterations=24000)
    made = report(tmp_path, near=near)
    for renderer, text in rendered(made).items():
        ours, _, theirs = text.partition("Published elsewhere, same protocol")
        assert "DenseCL" not in ours and "60.2" in theirs.partition("not comparable")[0], renderer
        mark = "$\\ddagger$" if renderer == "tex" else "‡"
        assert f"82.8{mark}" in theirs and "58.7" in theirs and f"58.7{mark}" not in theirs
        equal, *others = theirs.split("not comparable: ")
        assert "SimSiam" not in equal and bool(others) == near
        [*_, last] = [part for part in others if "SimSiam" in part] or [""]
        assert last.startswith("learning rate (here ") == near
    rows = csv_rows(RENDERERS.get("csv")(made)["table.literature.csv"])
    [row] = [row for row in rows if row["verified"] == "False" and row["metric"] == "bbox/AP50"]
    assert (row["method"], row["epochs"], row["value"], row["lr"], row["differs"]) == (
        "DenseCL",
        "200",
        "82.8",
        "0.02, warm-up 100",
        "",
    )
    assert any("SimSiam" in row["source"] for row in rows) == near
