"""Renderers: golden texts, missing cells, the paper's rows apart, files that stand alone."""

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.aggregate import Gap, Table, aggregate, summarise
from benchmarks.results import Results, Unusable, collect
from benchmarks.tables import (
    escape_latex,
    format_cell,
    format_evidence,
    format_gap,
    is_strong,
    runs_to_csv,
    to_csv,
    to_html,
    to_latex,
    to_markdown,
    to_terminal,
)
from tests.benchmarks.fake_runs import write_pair, write_run

APS = {"random": [10.0, 12.0], "moco": [20.0, 21.0, 25.0], "other_10%": [11.2]}


@pytest.fixture
def own(tmp_path) -> tuple[list[Table], Results]:
    """Three inits on a task that the paper does not have; one run of the last has no AP75."""
    write_pair(tmp_path, APS, task="my_task")
    write_run(
        tmp_path / "gone", init="random", seed=5, task="my_task", status="failed", notes=["nan"]
    )
    results = collect([tmp_path])
    return aggregate(results.transfer), results


@pytest.fixture
def voc(tmp_path) -> tuple[list[Table], Results]:
    write_pair(tmp_path, {"random": [33.0] * 5}, iterations=24000)
    results = collect([tmp_path])
    return aggregate(results.transfer), results


def test_cells():
    assert format_cell(None, 3) == "–"
    assert format_cell(summarise([10.04]), 1) == "10.0"
    assert format_cell(summarise([10.0, 12.0]), 2) == "11.0 ± 1.4"
    assert format_cell(summarise([10.0, 12.0]), 3) == "11.0 ± 1.4 (n = 2)"


@pytest.mark.parametrize(
    ("value", "text", "strong"),
    [
        (0.44, "+0.4", False),
        (0.4999, "+0.5", True),
        (0.5, "+0.5", True),
        (-0.04, "+0.0", False),
        (-3.04, "−3.0", False),
        (12.0, "+12.0", True),
    ],
)
def test_gaps_are_bold_from_half_a_point_as_printed(value, text, strong):
    assert (format_gap(value), is_strong(value)) == (text, strong)


def test_evidence():
    assert format_evidence(None) == "–"
    assert format_evidence(Gap(1.0, None, None, None)) == "+1.0 (no interval)"
    assert format_evidence(Gap(1.0, -0.26, 2.26, 0.0834)) == "+1.0 [−0.3, 2.3], p = 0.083"
    assert format_evidence(Gap(9.0, 8.0, 10.0, 1e-9)) == "+9.0 [8.0, 10.0], p < 0.001"


def test_markdown_golden(own):
    tables, results = own
    text = to_markdown(tables, results)
    assert text.startswith(
        "# Transfer results\n\n## my_task\n\nembedded engine, 300 iterations, "
        "tested on voc_2007_test.\n\n"
        "| pre-train | n | AP | AP50 | AP75 |\n"
        "|---|---|---|---|---|\n"
        "| random | 2† | 11.0 ± 1.4 | 22.0 ± 2.8 | 9.0 ± 1.4 |\n"
        "| moco | 3† | 22.0 ± 2.6 (**+11.0**) | 44.0 ± 5.3 (**+22.0**) | 20.0 ± 2.6 (**+11.0**) |\n"
        "| other_10% | 1† | 11.2 (+0.2) | 22.4 (+0.4) | 9.2 (+0.2) |\n"
        "\n† fewer than 5 trials (the paper averages 5)\n"
    )
    assert "| other_10% − random | +0.2 (no interval) |" in text
    for run in results.transfer:
        assert str(run.folder) in text
    assert f"- {results.unusable[0].folder}: failed: nan" in text
    assert "The paper," not in text


def test_missing_is_a_dash(tmp_path):
    write_run(tmp_path / "a", task="t", metrics={"bbox/AP": 10.0, "bbox/AP50": None})
    results = collect([tmp_path])
    text = to_markdown(aggregate(results.transfer), results)
    assert "| random | 1† | 10.0 | – | – |" in text
    assert "| random | 0 | 10.0 | – | – | 300 |" in text


def test_the_papers_rows_stand_apart(voc):
    tables, results = voc
    text = to_markdown(tables, results)
    ours, paper = text.split("The paper, Table 2b (tab:voc); not measured here", 1)
    assert "MoCo" not in ours and "53.5" not in ours
    assert "| MoCo IN-1M | 55.9 (**+2.4**) | 81.5 (+0.2) | 62.6 (**+3.8**) |" in paper
    assert "| memory bank | 54.9 | 80.6 | 60.6 |" in paper
    assert "arXiv 1911.05722" in text and "not comparable" not in text


def test_another_schedule_is_not_comparable(tmp_path):
    write_run(tmp_path / "short", iterations=100)
    results = collect([tmp_path])
    note = "not comparable with Table 2b (tab:voc) of the paper: 100 iterations here, 24000 there"
    tables = aggregate(results.transfer)
    assert note in to_markdown(tables, results)
    assert note in to_terminal(tables, (), colour=False)
    assert note in to_html(tables, results)
    assert note in to_latex(tables)


def test_csv_golden(own):
    tables, _ = own
    lines = list(csv.DictReader(io.StringIO(to_csv(tables))))
    assert len(lines) == 3 * 3
    assert lines[0] == {
        **{"task": "my_task", "engine": "embedded", "iterations": "300", "init": "random"},
        **{"metric": "bbox/AP", "n": "2", "mean": "11", "std": "1.41421", "baseline": "random"},
        **{"gap": "", "gap_low": "", "gap_high": "", "p_value": ""},
    }
    assert [lines[3][k] for k in ("init", "mean", "std", "gap")] == ["moco", "22", "2.64575", "11"]
    assert float(lines[3]["gap_low"]) < 11 < float(lines[3]["gap_high"])
    assert [lines[6][k] for k in ("std", "gap_low", "p_value")] == ["", "", ""]


def test_runs_csv_has_every_run(own):
    tables, results = own
    lines = list(csv.DictReader(io.StringIO(runs_to_csv(tables))))
    assert {line["folder"] for line in lines} == {str(run.folder) for run in results.transfer}
    assert [(line["init"], line["seed"], line["bbox/AP"]) for line in lines[:3]] == [
        ("random", "0", "10"),
        ("random", "1", "12"),
        ("moco", "0", "20"),
    ]


def test_latex_golden(own):
    text = to_latex(own[0])
    assert (
        "random & 2$\\dagger$ & 11.0 $\\pm$ 1.4 & 22.0 $\\pm$ 2.8 & 9.0 $\\pm$ 1.4 \\\\\n"
        "moco & 3$\\dagger$ & 22.0 $\\pm$ 2.6 \\textcolor[HTML]{39b54a}{($+$\\textbf{11.0})} & "
    ) in text
    assert "other\\_10\\% & 1$\\dagger$ & 11.2 ($+$0.2) &" in text
    assert "pre-train & $n$ & AP & AP$_{50}$ & AP$_{75}$ \\\\" in text


@pytest.mark.parametrize("fixture", ["own", "voc"])
def test_latex_is_balanced(fixture, request):
    text = to_latex(request.getfixturevalue(fixture)[0])
    plain = re.sub(r"\\[\\{}%&#_$]", "", re.sub(r"(?m)(?<!\\)%.*$", "", text))
    depth = 0
    for char in plain:
        depth += {"{": 1, "}": -1}.get(char, 0)
        assert depth >= 0
    assert depth == 0 and plain.count("$") % 2 == 0
    begun, ended = re.findall(r"\\begin\{(\w+)", text), re.findall(r"\\end\{(\w+)", text)
    assert sorted(begun) == sorted(ended) and {"table", "tabular"} == set(begun)
    widths = {
        line.replace("\\&", "").count("&") for line in text.splitlines() if line.endswith(r" \\")
    }
    assert widths <= {4, 0}  # five columns, or one \multicolumn


def test_latex_specials():
    assert escape_latex("a_b & 5% {x} ±\\") == ("a\\_b \\& 5\\% \\{x\\} $\\pm$\\textbackslash{}")


class Page(HTMLParser):
    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href", "data", "srcset")]
        assert tag not in ("script", "link", "iframe")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_html_is_one_file(own, tmp_path):
    tables, results = own
    figure = tmp_path / "loss.png"
    figure.write_bytes(b"not really a picture")
    text = to_html(tables, results, [figure])
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == ["data:image/png;base64,bm90IHJlYWxseSBhIHBpY3R1cmU="]
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert "22.0 ± 2.6 (+11.0)" in page.text
    assert '<span class="gap strong">(+11.0)</span>' in text


def test_names_cannot_break_out_of_the_page(tmp_path):
    write_run(tmp_path / "a", task="<b>t</b>", init="<script>x</script>|y")
    results = collect([tmp_path])
    tables = aggregate(results.transfer)
    text = to_html(tables, results)
    assert "<script>" not in text and "<b>" not in text
    assert "| <script>x</script>\\|y |" in to_markdown(tables, results)


def test_terminal(own):
    tables, _ = own
    missing = [Unusable(Path("runs/x"), "failed: nan")]
    plain = to_terminal(tables, missing, colour=False)
    assert "\033" not in plain
    assert re.search(r"moco +3† +22\.0 ± 2\.6 \(\+11\.0\) +44\.0", plain)
    assert "moco − random: AP +11.0 [" in plain
    assert "runs/x: failed: nan" in plain
    coloured = to_terminal(tables, missing, colour=True)
    assert "\033[1;32m(+11.0)\033[0m" in coloured and "\033[1;32m(+0.2)" not in coloured
    assert re.sub(r"\033\[[0-9;]*m", "", coloured) == plain


def test_heads_name_the_kinds_as_the_paper_does(tmp_path):
    both = {f"{kind}/{name}": 40.0 for kind in ("segm", "bbox") for name in ("AP", "AP50", "AP75")}
    write_run(tmp_path / "a", task="coco", metrics=both)
    write_run(tmp_path / "b", task="fcn", metrics={"sem_seg/mIoU": 70.0})
    write_run(tmp_path / "c", task="people", metrics={"keypoints/AP": 60.0, "keypoints/AP50": None})
    results = collect([tmp_path])
    tables = aggregate(results.transfer)
    heads = ["AP^bb", "AP50^bb", "AP75^bb", "AP^mk", "AP50^mk", "AP75^mk"]
    markdown = to_markdown(tables, results)
    assert f"| pre-train | n | {' | '.join(heads)} |" in markdown
    assert "| pre-train | n | mIoU |" in markdown and "| random | 1† | 70.0 |" in markdown
    assert "| pre-train | n | AP^kp | AP50^kp | AP75^kp |" in markdown
    assert "| random | 1† | 60.0 | – | – |" in markdown
    assert all(head in to_html(tables, results) for head in [*heads, "mIoU"])
    latex = to_latex(tables)
    assert "& AP$^{bb}$ & AP$^{bb}_{50}$ & AP$^{bb}_{75}$ & AP$^{mk}$ & AP$^{mk}_{50}$ &" in latex
    assert "$n$ & mIoU \\\\" in latex
