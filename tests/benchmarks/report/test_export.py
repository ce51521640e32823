"""Renderers: golden numbers of a fixed report in every format, and what they cannot show."""

import html
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from benchmarks import make_table
from benchmarks.report.export import RENDERERS, csv, tex, to_terminal
from benchmarks.report.report import Report
from benchmarks.report.style import latex
from moco.common.shipped import RESULTS
from tests.benchmarks.report.fake_runs import csv_rows, rendered, report, write_pair, write_run
from tests.golden.regenerate_report import FOLDER, build, numbers, pages

GOLDEN = sorted(path.name for path in FOLDER.iterdir())


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


@pytest.mark.stored
@pytest.mark.parametrize("name", GOLDEN)
def test_numbers_and_links_are_the_golden_ones(name, made):
    """After an intended change: python -m tests.golden.regenerate_report."""
    found = numbers(made)
    assert sorted(found) == GOLDEN
    assert found[name] == (FOLDER / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("bundle", "metric"), [("bccd_r18", "VOC07, 11-point"), ("real_small", "")]
)
def test_every_format_names_vocs_metric(bundle, metric):
    """Its AP50 stops at 90.9 where COCO's does not."""
    made = report(RESULTS / f"{bundle}.zip")
    texts = rendered(made)
    texts["csv"] = csv(made)["table.csv"]
    for name, text in texts.items():
        assert ("VOC07" in text) is bool(metric) and metric in text, name
    assert {row["voc_metric"] for row in csv_rows(texts["csv"])} == {metric}


def test_colors_of_a_terminal_are_all_that_differs_from_plain_text(made):
    colored = to_terminal(build(), color=True)
    assert "\033[32m\033[1m(+9.9)\033[0m" in colored and "11.6 ± 0.6 (+1.4)" in colored
    assert "\033[4m30.0\033[0m (+19.8, no test)" in colored, "the best of its column"
    assert "\033[32m(+0.6)\033[0m" in colored, "the paper's own green"
    assert re.sub(r"\033\[[0-9;]*m", "", colored) == made["table.txt"].rstrip("\n")


def test_one_legend_in_every_format(made):
    """What is bold, underlined or untested in one format is so in every other one."""
    sections = {section.stem: section for section in build().sections}
    for section in sections.values():
        assert bool(section.legend) == (len(section.table.rows) > 1)
    legend = sections["my_task-embedded"].legend
    assert "after Holm's correction" in legend and "no test: n = 1" in legend
    assert "no test" not in sections["my_task_tuned-embedded"].legend
    assert f"{legend.replace('<', '&lt;')}." in made["table.md"]
    assert f"{latex(legend)}." in made["table.tex"]
    assert f"{legend}." in html.unescape(made["table.html"])
    found = [r for r in csv_rows(made["table.csv"]) if r["task"] == "my_task"]
    assert {row["legend"] for row in found} == {legend}
    marks = {(r["init"], r["bold"], r["underlined"], r["untested"]) for r in found}
    assert marks == {
        ("random", "False", "False", ""),
        ("few", "False", "False", ""),
        ("moco 10%", "True", "False", ""),
        ("x", "False", "True", "n = 1"),
    }
    assert "<ins>30.0</ins> (+19.8, no test) |" in made["table.md"]
    assert "| 11.6 ± 0.6 (+1.4) |" in made["table.md"], "p = 0.049 before the correction"
    assert "\\underline{30.0} ($+$19.8, no test)" in made["table.tex"]
    assert re.search(r'<u>30\.0</u>.*<span class="gap">.*\(\+19\.8, no test\)', made["table.html"])


def test_tuned_rows_name_their_values_and_the_untuned_result(made):
    """0.04 is the highest value of the grid; the untuned task of the same inits is my_task."""
    [line] = [x for x in made["table.md"].splitlines() if x.endswith("| 20.1 ± 0.1 |")]
    assert line.startswith("| moco 10% | 3 |") and "| 0.04 (at the edge) |" in line
    assert "| 0.02 (inside) | 10.2 ± 0.2 |" in made["table.md"]
    for name in ("table.html", "table.tex", "table.txt"):
        assert "0.04 (at the edge)" in made[name] and "untuned AP" in made[name], name
    [row] = [
        row
        for row in csv_rows(made["table.csv"])
        if (row["task"], row["init"], row["metric"]) == ("my_task_tuned", "moco 10%", "bbox/AP")
    ]
    assert row["tuned"] == "SOLVER.BASE_LR 0.04 (at the edge)"
    assert [row[f"untuned_{x}"] for x in ("n", "mean", "std")] == ["3", "20.1", "0.1"]
    whole = build()
    alone = replace(whole, tables=[t for t in whole.tables if t.task == "my_task_tuned"])
    assert "0.04 (at the edge)  –" in to_terminal(alone, color=False)


def test_a_terminal_ends_with_the_table_and_two_lines():
    """The third one, where the page is, is of who writes it (test_make_table)."""
    whole = build()
    alone = replace(whole, tables=[table for table in whole.tables if table.task == "my_task"])
    *_, last, empty, different, sure = to_terminal(alone, color=False).splitlines()
    assert last.startswith("x ") and not empty
    assert different == (
        "different from random: moco 10% (AP +9.9, AP50 +9.9, AP75 +9.9); not shown for few; "
        "not tested: x; shown to be within ±0.3: none"
    )
    assert sure.startswith("how sure: Welch's test, p < 0.05 after Holm's correction for 6 gaps")
    assert "; over runs and test images, AP: few +1.4 ± 1.7; few, moco 10%: only the" in sure


def test_a_renderer_from_outside(register, tmp_path):
    def inits(made: Report) -> dict[str, str]:
        return {"inits.txt": " ".join(row.init for row in made.tables[0].rows)}

    write_run(tmp_path / "run", task="t")
    register(RENDERERS, inits)
    make_table.main([str(tmp_path), "--out", str(tmp_path / "out"), "--format", "inits"])
    assert (tmp_path / "out" / "inits.txt").read_text() == "random"


def test_a_small_test_split_is_named_under_the_table(tmp_path):
    note = "small test split: own_test has 9 images and 12 objects, fewer than 30 or 50"
    write_pair(
        tmp_path, {"random": [11.0, 12.0], "mine": [13.0, 14.0]}, notes=["other"], warnings=[note]
    )
    pages = rendered(report(tmp_path))
    texts = {name: " ".join(text.replace("\\_", "_").split()) for name, text in pages.items()}
    assert all(note in text for text in texts.values())
    assert texts["terminal"].count(note) == 1


def test_printed_gaps_are_the_differences_of_the_printed_means(made):
    """10.04 is printed as 10.0 and 12.16 as 12.2; the gap, 2.12, is printed as 2.2."""
    for name in ("table.md", "table.tex", "table.html", "table.txt"):
        [line] = [line for line in made[name].splitlines() if re.search(r"12\.2 \S+ 0\.0", line)]
        assert re.search(r"12\.2 .*?2\.2\b", line) and "2.1)" not in line, name
    [row] = [r for r in csv_rows(made["table.csv"]) if (r["task"], r["n"]) == ("rounded", "2")][1:]
    assert row["gap"] == "2.12"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("tasks", [("my_task",), ("24k", "my_task")])
def test_latex_compiles(tasks, tmp_path):
    made = build()
    made = replace(made, tables=[table for table in made.tables if table.task.endswith(tasks)])
    (tmp_path / "table.tex").write_text(tex(made)["table.tex"])
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_latex_specials():
    assert latex("a_b & 5% {x} ±\\") == ("a\\_b \\& 5\\% \\{x\\} $\\pm$\\textbackslash{}")
    assert latex("é 数") == "é [U+6570]"  # LaTeX stops at characters that its fonts lack


def test_what_changes_from_one_report_to_the_next_is_not_in_the_tables(tmp_path):
    """Time, hardware and folders: the tables of a resumed suite are bitwise identical."""
    found = []
    for name, seconds, utc in (("here", 5.0, "2026-01-01T00:00:00+00:00"), ("there", 9.0, "x")):
        aps = {"random": [10.0, 12.0], "moco": [20.0, 21.0, 25.0], "other_10%": [11.2]}
        write_pair(tmp_path / name, aps, seconds=seconds, provenance={"utc": utc})
        each = report(tmp_path / name)
        texts = rendered(each)
        found.append((texts["md"], texts["tex"], texts["terminal"], csv(each)["table.csv"]))
    assert found[0] == found[1]


def test_a_suites_names_of_tasks_are_titles(tmp_path):
    """They also distinguish tasks of one name, while the files keep their names."""
    for name, data in (("lvis_mask", "lvis_v0.5_val"), ("coco_mask", "coco_2017_val")):
        folder = tmp_path / "runs" / name / "random" / "seed0-0123456789"
        write_run(folder, task="m", config={"DATASETS.TEST": [data]})
    headings = [section.heading for section in report(tmp_path).sections]
    assert headings == ["m on coco_2017_val", "m on lvis_v0.5_val"]
    (tmp_path / "suite.json").write_text("{}")
    made = report(tmp_path)
    assert [section.heading for section in made.sections] == ["coco_mask", "lvis_mask"]
    assert [section.stem for section in made.sections] == ["m-coco_2017_val", "m-lvis_v0.5_val"]
    for renderer, text in rendered(made).items():
        assert text.count("lvis") > 1 and "lvis_mask" in text.replace("\\_", "_"), renderer
    assert made.plots["ap-m-lvis_v0.5_val"].figure.get_suptitle() == "lvis_mask"


def test_logme_is_a_column_beside_ap_without_a_test(tmp_path):
    """Its mean over the runs, in every format; a table without it has neither column nor note."""
    ap = {"bbox/AP": 10.0, "bbox/AP50": 20.0, "bbox/AP75": 8.0}
    for init, values in {
        "random": (-0.5, -0.7),
        "mine": (0.25, 0.25),
        "none": (None, None),
    }.items():
        for seed, value in enumerate(values):
            logme = {} if value is None else {"logme": value}
            metrics = {name: x + seed for name, x in ap.items()} | logme
            folder = tmp_path / f"{init}-{seed}"
            write_run(folder, init=init, seed=seed, metrics=metrics, task="mine")
    texts = rendered(made := report(tmp_path))
    [section] = made.sections
    assert section.head[-2:] == ["AP75", "LogME"]
    shown = {row[0].text: row[-1].text for row in section.rows()}
    assert shown == {"random": "−0.600", "mine": "0.250", "none": "–"}
    for text in texts.values():
        assert "LogME" in text and "0.250" in text
    for name in ("md", "html", "terminal"):
        assert "arXiv 2102.11005" in texts[name]
    rows = csv_rows(dict(RENDERERS)["csv"](made)["table.csv"])
    assert {row["init"]: row["logme"] for row in rows} == {
        "random": "-0.6",
        "mine": "0.25",
        "none": "",
    }
    write_run(tmp_path / "other", task="other")
    other = next(s for s in report(tmp_path).sections if s.table.task == "other")
    assert "LogME" not in other.head and not any("LogME" in note for note in other.notes)
