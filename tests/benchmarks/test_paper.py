"""paper.yaml: every number, counted and checked by hand."""

import pytest

from benchmarks.paper import PaperTable, load_paper, tables_for
from moco.cfgnode import read_yaml
from moco.encoder import EncoderSpec

TABLES = {(t.number, t.part) if t.number else t.label: t for t in load_paper()[1]}
MECHANISMS = "Sec. 4.1, contrastive loss mechanisms (text and footnote)"
MOMENTUM = "Sec. 4.1, momentum"
FINETUNING = "appendix, Fine-tuning in ImageNet"
INATURALIST = "appendix, iNaturalist fine-grained classification"


def test_every_value_is_there():
    values = {
        key: sum(v is not None for r in t.rows for v in r.values) for key, t in TABLES.items()
    }
    gaps = {key: sum(v is not None for r in t.rows for v in r.gaps) for key, t in TABLES.items()}
    assert values == {
        (2, "a"): 12,
        (2, "b"): 12,
        (3, "R50-dilated-C5"): 9,
        (3, "R50-C4"): 9,
        (4, None): 27,
        (1, "MoCo"): 4,
        MECHANISMS: 3,
        MOMENTUM: 4,
        FINETUNING: 3,
        INATURALIST: 4,
    }
    assert gaps == {
        (2, "a"): 6,
        (2, "b"): 6,
        (3, "R50-dilated-C5"): 0,
        (3, "R50-C4"): 0,
        (4, None): 19,
        (1, "MoCo"): 0,
        MECHANISMS: 0,
        MOMENTUM: 0,
        FINETUNING: 0,
        INATURALIST: 0,
    }


def value(table: PaperTable, row: str, column: str) -> tuple[float | None, float | None]:
    [found] = [r for r in table.rows if r.name == row]
    index = table.columns.index(column)
    return found.values[index], found.gaps[index]


@pytest.mark.parametrize(
    ("key", "row", "column", "expected"),
    [
        ((2, "a"), "random init.", "AP75", (38.6, None)),
        ((2, "a"), "super. IN-1M", "AP50", (81.4, None)),
        ((2, "a"), "MoCo IN-1M", "AP50", (81.1, -0.3)),
        ((2, "a"), "MoCo IG-1B", "AP", (55.5, 1.5)),
        ((2, "b"), "random init.", "AP", (33.8, None)),
        ((2, "b"), "super. IN-1M", "AP", (53.5, None)),
        ((2, "b"), "MoCo IN-1M", "AP75", (62.6, 3.8)),
        ((2, "b"), "MoCo IG-1B", "AP50", (82.2, 0.9)),
        ((3, "R50-dilated-C5"), "end-to-end", "AP75", (56.6, None)),
        ((3, "R50-dilated-C5"), "memory bank", "AP", (52.9, None)),
        ((3, "R50-C4"), "end-to-end", "AP50", (80.4, None)),
        ((3, "R50-C4"), "MoCo", "AP", (55.9, None)),
        ((4, None), "super. IN-1M", "AP50, LocalAgg Zhuang2019", (74.6, None)),
        ((4, None), "unsup. IN-1M", "AP50, RelPos, by Doersch2017", (66.8, -7.4)),
        ((4, None), "unsup. IN-1M", "AP75, Multi-task Doersch2017", (43.9, -0.4)),
        ((4, None), "unsup. IN-14M", "AP50, Jigsaw, by Goyal2019", (69.2, -1.3)),
        ((4, None), "unsup. YFCC-100M", "AP, MoCo", (45.9, 3.5)),
        ((4, None), "unsup. IG-1B", "AP75, MoCo", (51.7, 9.0)),
        ((4, None), "unsup. IG-1B", "AP50, Jigsaw, by Goyal2019", (None, None)),
        ((1, "MoCo"), "R50", "accuracy", (60.6, None)),
        ((1, "MoCo"), "RX50", "accuracy", (63.9, None)),
        ((1, "MoCo"), "R50w2x", "accuracy", (65.4, None)),
        ((1, "MoCo"), "R50w4x", "accuracy", (68.6, None)),
        (MECHANISMS, "memory bank, InfoNCE, K 65536", "accuracy", (58.0, None)),
        (MECHANISMS, "memory bank, NCE, K 4096", "accuracy", (54.3, None)),
        (MECHANISMS, "MoCo, K 65536", "accuracy", (60.6, None)),
        (MOMENTUM, "m 0", "accuracy", (None, None)),
        (MOMENTUM, "m 0.9", "accuracy", (55.2, None)),
        (MOMENTUM, "m 0.99", "accuracy", (57.8, None)),
        (MOMENTUM, "m 0.999", "accuracy", (59.0, None)),
        (MOMENTUM, "m 0.9999", "accuracy", (58.9, None)),
        (FINETUNING, "random init.", "accuracy", (76.5, None)),
        (FINETUNING, "MoCo IG-1B", "accuracy", (77.3, None)),
        (FINETUNING, "MoCo IN-1M", "accuracy", (77.0, None)),
        (INATURALIST, "rand init.", "accuracy", (61.8, None)),
        (INATURALIST, "super. IN-1M", "accuracy", (66.1, None)),
        (INATURALIST, "MoCo IN-1M", "accuracy", (65.6, None)),
        (INATURALIST, "MoCo IG-1B", "accuracy", (65.8, None)),
    ],
)
def test_values_as_printed(key, row, column, expected):
    assert value(TABLES[key], row, column) == expected


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda t: t.cite)
def test_printed_gaps_are_the_differences_to_the_baseline(table: PaperTable):
    [base] = [row for row in table.rows if row.name == table.baseline] or [None]
    for row in table.rows:
        for own, gap, i in zip(row.values, row.gaps, range(len(row.gaps)), strict=True):
            if gap is not None:
                # Both values are rounded to 0.1, so the printed gap may be off by one more 0.1.
                assert gap == pytest.approx(own - base.values[i], abs=0.1001), (row.name, i)


def test_methods_keep_other_papers_apart():
    table = TABLES[(4, None)]
    row = next(r for r in table.rows if r.name == "unsup. IN-1M")
    assert [table.own(row, m) for m in ("bbox/AP50", "bbox/AP", "bbox/AP75")] == [
        (74.9, 0.5),
        (46.6, 4.2),
        (50.1, 7.4),
    ]
    assert table.own(row, "segm/AP") == (None, None)


def test_tasks_name_config_files(request):
    """A detection task is its file's name, a classification task its TASK and a network."""
    configs = request.config.rootpath / "configs"
    named = {task for table in TABLES.values() for task in table.tasks}
    classifications = {
        task
        for table in TABLES.values()
        for task in table.tasks
        if table.metrics[0] in ("linear/top1", "finetune/top1")
    }
    assert named - classifications <= {path.stem for path in configs.rglob("*.yaml")}
    networks = [EncoderSpec("resnet50", width=width).name for width in (1.0, 2.0, 4.0)]
    networks.append(EncoderSpec("resnext50_32x8d").name)
    files = ("imagenet/linear", "imagenet/finetune", "inaturalist/finetune_2018")
    kinds = [read_yaml(configs / f"{file}.yaml")["TASK"] for file in files]
    tasks = {f"{kind}_{network}" for kind in kinds for network in networks}
    assert len(classifications) == 6 and classifications <= tasks
    assert [t.cite for t in tables_for("faster_rcnn_R_50_C4_9k")] == ["Table 4 (tab:voc07)"]
    assert tables_for("quickstart") == []
