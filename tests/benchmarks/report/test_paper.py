"""paper.yaml: every number, counted and checked by hand, and against the paper's own source.

The LaTeX source is no part of the project: the tests that read it skip where it is not there.
"""

import ast
import hashlib
import json
import os
import re
from collections import Counter
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.report.paper import OWN, PaperTable, load_paper, tables_for
from benchmarks.report.style import is_strong
from detection.evaluation.metrics import HEADLINE
from moco.common.cfgnode import flatten, read_yaml
from moco.modeling.encoder import EncoderSpec

ROOT = Path(__file__).resolve().parents[3]
TABLES = {(t.number, t.part) if t.number else t.label: t for t in load_paper()[1]}
DIGEST = "0671b5046c15f7b27578bc4fa7c36f27b50864ee985ec0aab162bc9f5055f97a"
MECHANISMS = "Sec. 4.1, contrastive loss mechanisms (text and footnote)"
MOMENTUM = "Sec. 4.1, momentum"
MOCO_V2 = "Sec. 4.1, comparison with previous results (text)"
LVIS_1X = "appendix, LVIS instance segmentation, 1x schedule"
LVIS_2X = "appendix, LVIS instance segmentation, 2x schedule"
FINETUNING = "appendix, Fine-tuning in ImageNet"
INATURALIST = "appendix, iNaturalist fine-grained classification"
PARAMS = "#params (M)"

# The tabulars of the LaTeX source in order: the number of the table that each is in, and ours.
# Ours of one height stand beside each other there, the others below each other.
PRINTED = (
    (None, (MOMENTUM,)),
    ("1", ((1, "previous methods"), (1, "MoCo"))),
    ("2", ((2, "a"),)),
    ("2", ((2, "b"),)),
    ("3", ((3, "R50-dilated-C5"), (3, "R50-C4"))),
    ("4", ((4, None),)),
    ("5", ((5, "a"),)),
    ("5", ((5, "b"),)),
    ("5", ((5, "c"),)),
    ("5", ((5, "d"),)),
    ("6", ((6, "COCO keypoints"),)),
    ("6", ((6, "COCO dense pose"),)),
    ("6", ((6, "LVIS"),)),
    ("6", ((6, "Cityscapes instances"), (6, "Cityscapes semantic"), (6, "VOC semantic"))),
    (None, (LVIS_1X, LVIS_2X)),
    (None, (INATURALIST,)),
    (None, (FINETUNING,)),
    ("A.1", (("A.1", "2x"),)),
    ("A.1", (("A.1", "6x"),)),
)

# What only the text has: its words, and where the number stands with us (a gap where marked).
IN_TEXT = (
    (r"But it is 2.6\% worse than MoCo", MECHANISMS, 0, 0, None, -2.6),
    (r"Here 58.0\% is with InfoNCE and $K$$=$65536", MECHANISMS, 0, 0, 58.0, None),
    (r"54.3\% when using NCE and $K$$=$4096", MECHANISMS, 1, 0, 54.3, None),
    (r"close to 54.0\% in \cite{Wu2018a}", MECHANISMS, 1, 1, 54.0, None),
    (r"MoCo with R50 performs competitively and achieves 60.6\%", MECHANISMS, 2, 0, 60.6, None),
    (r"achieves 71.1\% accuracy with R50 (up from 60.6\%)", MOCO_V2, 0, 0, 71.1, None),
    (r"we report that its accuracy is 77.0\% after fine-tuning", FINETUNING, 2, 0, 77.0, None),
)


def test_every_value_is_in_its_place():
    """Checked by hand, number by number, when the hash was taken."""
    named = [((table.number, table.part, table.label), table) for table in load_paper()[1]]
    content = [(*key, *astuple(row)[:3]) for key, table in named for row in table.rows]
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
        ((4, None), "unsup. IG-1B", "AP50, Jigsaw, by Goyal2019", (None, None)),
        ((1, "MoCo"), "R50w4x", PARAMS, (375, None)),
        ((1, "MoCo"), "R50", "accuracy", (60.6, None)),
        (MECHANISMS, "memory bank, NCE, K 4096", "accuracy, Wu2018a", (54.0, None)),
        (MOMENTUM, "m 0.999", "accuracy", (59.0, None)),
        (INATURALIST, "MoCo IN-1M", "accuracy", (65.6, None)),
        ((5, "a"), "MoCo IG-1B", "AP^bb", (38.9, 0.0)),
        ((6, "COCO keypoints"), "MoCo IN-1M", "AP50^kp", (87.4, 0.5)),
        ((6, "VOC semantic"), "MoCo IN-1M", "mIoU", (72.5, -1.9)),
        (LVIS_1X, "super. IN-1M, BN tuned", "AP75^mk", (24.8, None)),
        (("A.1", "6x"), "MoCo IG-1B", "AP75^mk", (41.3, 0.5)),
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
    """Of the files in configs/ the others say "Not in the paper" in their first line."""
    tasks = {
        path.stem: path.read_text()
        for folder in ("voc", "coco", "lvis", "cityscapes")
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
    assert cited(name, "lvis_v0.5_val") == ["Table 6, LVIS (tab:more_tasks)", LVIS_2X]
    assert cited("imagenet_finetune_resnet50") == [FINETUNING]


@dataclass(frozen=True)
class Tabular:
    """A table's body as printed: per row its numbers, each with the gap in brackets or None.

    `green` are the gaps that the paper colors, `plain` those that it does not.
    """

    number: str | None
    rows: list[list[tuple[float, float | None]]]
    green: list[float]
    plain: list[float]


def read_tabulars(source: str) -> list[Tabular]:
    """All tables of the LaTeX source, by its own macros.

    A number is a cell that is nothing else once the markup is gone; names that hold digits
    (IN-1M, R50w4x) are none. What comes before the first thick line (shline) is the head.
    """
    source = re.sub(r"(?<!\\)%.*", "", source)
    source = source.replace(r"{\transparent{0}+}", "+")  # the sign of 0.0 is there but not seen
    found, prefix, count, inside = [], "", 0, False
    begin, end, tabular = r"\\begin\{table\*?\}", r"\\end\{table\*?\}", r"\{tabular\}"
    parts = rf"\\appendix\b|{begin}|{end}|\\begin{tabular}(.*?)\\end{tabular}"
    for part in re.finditer(parts, source, re.S):
        if part[0] == r"\appendix":
            prefix, count = "A.", 0
        elif re.fullmatch(begin, part[0]):
            count, inside = count + 1, True
        elif re.fullmatch(end, part[0]):
            inside = False
        elif r"\shline" in part[1]:  # the others are macros that set a cell
            found.append(_tabular(part[1].split(r"\shline")[1], f"{prefix}{count}", inside))
    return found


def _tabular(body: str, number: str, numbered: bool) -> Tabular:
    body = re.sub(r"\\fontsize\{.*?\}\{.*?\}|\\cite\{.*?\}|\\hline", "", body)
    decimals = len(re.findall(r"\d+\.\d+", body))
    # One form for a value and its gap, in two cells as Tables 5 and A.1 have it.
    body = re.sub(r"\\res(hl)?(\{[\d.]+\})(\{[+-]\}\{[\d.]+\})", r"\2 & \\cgap\1\3", body)
    body = re.sub(r"\\res(?:rand|sup)(\{[\d.-]+\})\{\}", r"\1", body)
    rows, green, plain, used = [], [], [], 0
    for line in body.split(r"\\"):
        row: list[tuple[float, float | None]] = []
        for cell in line.split("&"):
            bare = re.sub(r"\\demph|\\textbf|\\quad|\$\^\\dagger\$|[{}~\s]", "", cell)
            if gap := re.fullmatch(r"\\cgap(hl)?([+-])([\d.]+)", bare):
                value = float(gap[2] + gap[3])
                row[-1] = (row[-1][0], value)
                (green if gap[1] else plain).append(value)
                used += 1
            elif re.fullmatch(r"\d+(\.\d+)?", bare):
                row.append((float(bare), None))
                used += "." in bare
        if row:
            rows.append(row)
    assert used == decimals, f"table {number}: {used} of {decimals} decimal numbers are read"
    return Tabular(number if numbered else None, rows, green, plain)


def ours(keys) -> list[tuple[float, float | None]]:
    """Our numbers in the order in which one tabular prints them."""
    said = {(key, row) for _, key, row, *_ in IN_TEXT}
    tables = [
        [
            [(v, g) for v, g in zip(row.values, row.gaps, strict=True) if v is not None]
            for i, row in enumerate(TABLES[key].rows)
            if (key, i) not in said
        ]
        for key in keys
    ]
    beside = len({len(rows) for rows in tables}) == 1
    rows = chain.from_iterable(zip(*tables, strict=True) if beside else tables)
    return list(chain.from_iterable(rows))


@pytest.fixture(scope="session")
def paper_source() -> str:
    """The LaTeX source of the paper, one file."""
    folder = Path(os.environ.get("MOCO_TEST_PAPER", ROOT.parent / "shared" / "paper"))
    texts = [path.read_text() for path in folder.glob("*")] if folder.is_dir() else []
    texts = [text for text in texts if r"\begin{document}" in text]
    if not texts:
        pytest.skip("no LaTeX source here; MOCO_TEST_PAPER names a folder with the paper's")
    [text] = texts
    return text


def test_numbers_are_those_of_the_latex_source(paper_source: str):
    for tabular, (number, keys) in zip(read_tabulars(paper_source), PRINTED, strict=True):
        assert tabular.number == number
        printed, own = list(chain.from_iterable(tabular.rows)), ours(keys)
        assert Counter(printed) == Counter(own), keys  # what is missing and what is too many
        assert printed == own, keys  # and in its place


def test_the_latex_source_has_no_other_table(paper_source: str):
    tabulated = list(chain.from_iterable(keys for _, keys in PRINTED))
    assert Counter([*tabulated, MECHANISMS, MOCO_V2]) == Counter(list(TABLES))
    labels = re.findall(r"\\label\{(tab:\w+)\}", paper_source)
    order = dict.fromkeys(t.label for t in TABLES.values() if t.number)
    assert labels == list(order)


def test_numbers_of_the_text(paper_source: str):
    for words, key, row, column, value, gap in IN_TEXT:
        assert " ".join(words.split()) in " ".join(paper_source.split())
        found = TABLES[key].rows[row]
        values, expected = (found.values, value) if gap is None else (found.gaps, gap)
        assert values[column] == expected, words


def test_the_paper_is_green_from_where_our_tables_are(paper_source: str):
    tabulars = read_tabulars(paper_source)
    green = [gap for tabular in tabulars for gap in tabular.green]
    plain = [gap for tabular in tabulars for gap in tabular.plain]
    assert (len(green), len(plain)) == (75, 54)
    assert all(map(is_strong, green)) and not any(map(is_strong, plain))
