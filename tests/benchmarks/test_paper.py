"""paper.yaml: every number of the paper's VOC tables, counted and checked by hand."""

import pytest

from benchmarks.paper import PaperTable, load_paper, tables_for

TABLES = {(t.number, t.part): t for t in load_paper()[1]}


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
    }
    assert gaps == {
        (2, "a"): 6,
        (2, "b"): 6,
        (3, "R50-dilated-C5"): 0,
        (3, "R50-C4"): 0,
        (4, None): 19,
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
    configs = request.config.rootpath / "configs"
    named = {task for table in TABLES.values() for task in table.tasks}
    assert named <= {path.stem for path in configs.rglob("*.yaml")}
    assert [t.cite for t in tables_for("faster_rcnn_R_50_C4_9k")] == ["Table 4 (tab:voc07)"]
    assert tables_for("quickstart") == []
