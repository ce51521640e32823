"""Renderers: golden texts, missing cells, the paper's rows apart, files that stand alone."""

import csv
import html
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from benchmarks.report.html import to_html
from benchmarks.report.tables import (
    format_cell,
    format_evidence,
    format_gap,
    is_strong,
    paper_to_csv,
    runs_to_csv,
    runs_to_markdown,
    to_csv,
    to_latex,
    to_markdown,
    to_terminal,
)

from benchmarks.report.aggregate import Gap, Table, aggregate, summarize
from benchmarks.report.escape import latex
from benchmarks.report.records import Results, Unusable, collect
from tests.benchmarks.report.fake_runs import write_pair, write_run

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


@pytest.fixture
def voc_both(tmp_path) -> tuple[list[Table], Results]:
    """Both of Table 2's tasks, and one that the paper does not have."""
    for task in ("faster_rcnn_R_50_dilated_C5_24k", "faster_rcnn_R_50_C4_24k", "my_task"):
        aps = {"random": [19.0, 21.0], "moco": [22.0, 24.0]}
        write_pair(tmp_path / task, aps, task=task, iterations=24000)
    results = collect([tmp_path])
    return aggregate(results.transfer), results


def test_cells():
    assert format_cell(None, 3) == "–"
    assert format_cell(summarize([10.04]), 1) == "10.0"
    assert format_cell(summarize([10.0, 12.0]), 2) == "11.0 ± 1.4"
    assert format_cell(summarize([10.0, 12.0]), 3) == "11.0 ± 1.4 (n = 2)"


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
    assert format_evidence(Gap(1.04, 1.1, None, None, None)) == "+1.1 (no interval)"
    assert format_evidence(Gap(1.0, 1.0, -0.26, 2.26, 0.0834)) == "+1.0 [−0.3, 2.3], p = 0.083"
    assert format_evidence(Gap(9.0, 9.0, 8.0, 10.0, 1e-9)) == "+9.0 [8.0, 10.0], p < 0.001"


def test_markdown_golden(own):
    tables, results = own
    text = to_markdown(tables, results)
    assert text.startswith(
        "# Transfer results\n\n## my_task\n\nembedded engine, 300 iterations, "
        "tested on voc_2007_test.\n\n"
        "| pre-train | n | AP | AP50 | AP75 |\n"
        "|---|---|---|---|---|\n"
        "| random | 2 | 11.0 ± 1.4 | 22.0 ± 2.8 | 9.0 ± 1.4 |\n"
        "| moco | 3 | 22.0 ± 2.6 (**+11.0**) | 44.0 ± 5.3 (**+22.0**) | 20.0 ± 2.6 (**+11.0**) |\n"
        "| other_10% | 1 | 11.2 (+0.2) | 22.4 (+0.4) | 9.2 (+0.2) |\n"
    )
    assert "| other_10% − random | +0.2 (no interval) |" in text
    assert f"- {results.unusable[0].folder}: failed: nan" in text
    assert "The paper," not in text


def rendered(root: Path) -> dict[str, str]:
    """The tables of all runs below a folder, by each renderer."""
    results = collect([root])
    tables = aggregate(results.transfer)
    return {
        "markdown": to_markdown(tables, results),
        "html": html.unescape(to_html(tables, results)),
        "latex": to_latex(tables),
        "terminal": to_terminal(tables, (), color=False),
    }


def test_few_trials_are_marked_where_the_paper_says_how_many(tmp_path):
    config = {"DATASETS.TEST": ["coco_2017_val"]}
    write_run(tmp_path / "not the paper's" / "a", task="my_task")
    write_run(tmp_path / "paper does not say" / "a", task="mask_rcnn_R_50_FPN_1x", config=config)
    write_run(tmp_path / "paper says 5" / "a")
    write_pair(tmp_path / "enough", {"random": [9.0] * 5})
    for folder in tmp_path.iterdir():
        for renderer, text in rendered(folder).items():
            mark = "$\\dagger$" if renderer == "latex" else "†"
            few = f"{mark} fewer than 5 trials (the paper averages 5)"
            marked = folder.name == "paper says 5"
            assert (few in text) == (f"1{mark}" in text) == marked, (folder.name, renderer)


def test_printed_gaps_are_the_differences_of_the_printed_means(tmp_path):
    """10.04 is printed as 10.0 and 12.16 as 12.2; the gap, 2.12, is printed as 2.2."""
    write_pair(tmp_path, {"random": [10.03, 10.05], "moco": [12.15, 12.17]}, task="t")
    for renderer, text in rendered(tmp_path).items():
        line = next(line for line in text.splitlines() if "12.2 " in line)
        assert re.search(r"12\.2 .*?2\.2\b", line) and "2.1)" not in line, renderer
    assert "moco − random: AP +2.2 [" in rendered(tmp_path)["terminal"]
    tables = aggregate(collect([tmp_path]).transfer)
    lines = list(csv.DictReader(io.StringIO(to_csv(tables))))
    assert next(line["gap"] for line in lines if line["init"] == "moco") == "2.12"
    assert tables[0].rows[1].gaps["bbox/AP"].value == pytest.approx(2.12)


def test_intervals_say_which_seeds_they_are_of(tmp_path):
    write_pair(tmp_path / "one", {"random": [10.0], "moco": [12.0]}, task="t")
    write_pair(tmp_path / "more", {"random": [10.0, 11.0], "moco": [12.0, 14.0]}, task="t")
    for renderer, text in rendered(tmp_path / "more").items():
        assert "fine-tuning seeds only" in text, renderer
    for renderer, text in rendered(tmp_path / "one").items():
        assert "seeds only" not in text, renderer


def test_missing_is_a_dash(tmp_path):
    write_run(tmp_path / "a", task="t", metrics={"bbox/AP": 10.0, "bbox/AP50": None})
    results = collect([tmp_path])
    text = to_markdown(aggregate(results.transfer), results)
    assert "| random | 1 | 10.0 | – | – |" in text
    runs = runs_to_markdown(aggregate(results.transfer), results)
    assert "| 0 | 10.0 | – | – | 300 |" in runs
    # AP50 was measured and is no number: the reason stands below; AP75 was not to be measured
    assert "random, seed 0: no AP50 (null, no reason recorded)" in text
    assert "no AP75" not in text


def test_the_papers_rows_stand_apart(voc):
    tables, results = voc
    text = to_markdown(tables, results)
    ours, paper = text.split("The paper, Table 2b (tab:voc); not measured here", 1)
    assert "MoCo" not in ours and "53.5" not in ours
    assert "| MoCo IN-1M | 81.5 (+0.2) | 55.9 (**+2.4**) | 62.6 (**+3.8**) |" in paper
    assert "| memory bank | 80.6 | 54.9 | 60.6 |" in paper
    assert "arXiv 1911.05722" in text and "not comparable" not in text


def test_tasks_of_one_name_have_the_papers_rows_of_their_own_data(tmp_path):
    """COCO and LVIS each have a mask_rcnn_R_50_FPN_2x; other data has none of the paper's."""
    metrics = {"segm/AP": 24.0, "segm/AP50": 37.0, "segm/AP75": 25.0}
    cited = {}
    for split in ("lvis_v0.5_val", "coco_2017_val", "my_test"):
        config = {"DATASETS.TEST": [split], "SOLVER.MAX_ITER": 180000}
        task = {"task": "mask_rcnn_R_50_FPN_2x", "iterations": 180000, "metrics": metrics}
        write_run(tmp_path / split, config=config, **task)
        results = collect([tmp_path / split])
        tables = aggregate(results.transfer)
        texts = [to_markdown(tables, results), to_latex(tables), to_html(tables, results)]
        for text in [*texts, to_terminal(tables, (), color=False)]:
            found = re.findall(r"Table 5b|Table 6, LVIS|appendix, LVIS|Table A.1, 2x", text)
            cited.setdefault(split, set()).add(tuple(dict.fromkeys(found)))
        assert ("1911.05722" in texts[0]) == ("1911.05722" in texts[2]) == (split != "my_test")
    assert cited == {
        "lvis_v0.5_val": {("Table 6, LVIS", "appendix, LVIS")},
        "coco_2017_val": {("Table 5b", "Table A.1, 2x")},
        "my_test": {()},
    }


def test_another_schedule_is_not_comparable(tmp_path):
    write_run(tmp_path / "short", iterations=100)
    results = collect([tmp_path])
    note = "not comparable with Table 2b (tab:voc) of the paper: 100 iterations here, 24000 there"
    tables = aggregate(results.transfer)
    assert note in to_markdown(tables, results)
    assert note in to_terminal(tables, (), color=False)
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
        "\\textcolor{gray}{random} & \\textcolor{gray}{2} & "
        "\\textcolor{gray}{11.0 $\\pm$ 1.4} & \\textcolor{gray}{22.0 $\\pm$ 2.8} & "
        "\\textcolor{gray}{9.0 $\\pm$ 1.4} \\\\\n"
        "moco & 3 & 22.0 $\\pm$ 2.6 \\textcolor[HTML]{39b54a}{($+$\\textbf{11.0})} & "
    ) in text
    assert "other\\_10\\% & 1 & 11.2 ($+$0.2) &" in text
    assert "pre-train & $n$ & AP & AP$_{50}$ & AP$_{75}$ \\\\" in text


@pytest.mark.parametrize("fixture", ["own", "voc", "voc_both"])
def test_latex_is_balanced(fixture, request):
    text = to_latex(request.getfixturevalue(fixture)[0])
    plain = re.sub(r"\\[\\{}%&#_$]", "", re.sub(r"(?m)(?<!\\)%.*$", "", text))
    depth = 0
    for char in plain:
        depth += {"{": 1, "}": -1}.get(char, 0)
        assert depth >= 0
    assert depth == 0 and plain.count("$") % 2 == 0
    assert nested(text) == {"document", "table", "tabular"} | (
        {"subtable"} if fixture == "voc_both" else set()
    )
    widths = {
        line.replace("\\&", "").count("&") for line in text.splitlines() if line.endswith(r" \\")
    }
    assert widths <= {4, 0}  # five columns, or one \multicolumn


def nested(text: str) -> set[str]:
    """The environments, each of which must end within the one that it began in."""
    seen, inside = set(), []
    for word, name in re.findall(r"\\(begin|end)\{(\w+)", text):
        if word == "begin":
            seen.add(name)
            inside.append(name)
        else:
            assert inside.pop() == name
    assert not inside
    return seen


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("fixture", ["own", "voc_both"])
def test_latex_compiles(fixture, request, tmp_path):
    (tmp_path / "table.tex").write_text(to_latex(request.getfixturevalue(fixture)[0]))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_latex_is_arranged_as_the_papers_tables(voc_both):
    """Tables 2 and 3, each (a) and (b) side by side, our rows above the paper's."""
    text = to_latex(voc_both[0])
    floats = text.split("\\begin{table}")[1:]
    assert ["As Table 2 of the paper" in floats[0], "As Table 3 of the paper" in floats[1]] == [
        True,
        True,
    ]
    assert len(floats) == 3 and "faster\\_rcnn" not in floats[0] and "my\\_task" in floats[2]
    for part in floats[:2]:
        assert part.count("\\begin{subtable}[t]{0.49\\linewidth}") == 2
        assert part.count("pre-train & $n$ & AP$_{50}$ & AP & AP$_{75}$ \\\\") == 2
        assert part.index("dilated-C5") < part.rindex("R50-C4")
    left, right = floats[0].split("\\end{subtable}")[:2]
    assert left.index("40.0 $\\pm$") < left.index("The paper, Table 2a") < left.index("64.4")
    assert "MoCo IN-1M & 5 & 81.5 ($+$0.2) & 55.9 \\textcolor[HTML]{39b54a}{($+$" in right
    assert "\\textcolor{gray}{random init.} & \\textcolor{gray}{5} &" in left


def test_latex_has_the_columns_of_other_methods(tmp_path):
    """Table 4: our numbers stand below MoCo's columns, the others' stay empty."""
    write_run(tmp_path / "a", task="faster_rcnn_R_50_C4_9k", iterations=9000)
    text = to_latex(aggregate(collect([tmp_path]).transfer))
    [methods] = [line for line in text.splitlines() if line.startswith("pre-train")]
    columns = [column.strip() for column in methods.rstrip("\\ ").split("&")]
    [ours] = [line for line in text.splitlines() if line.startswith("\\textcolor{gray}{random}")]
    cells = [re.sub(r"\\textcolor\{gray\}\{(.*)\}", r"\1", c.strip()) for c in ours.split("&")]
    found = dict(zip(enumerate(columns), cells, strict=True))
    assert columns[2] == "RelPos, by Doersch2017" and found[2, columns[2]] == "--"
    shown = [cell for (_, column), cell in found.items() if column == "MoCo"]
    assert [cell.rstrip("\\ }") for cell in shown] == ["20.0", "10.0", "8.0"]


def test_latex_specials():
    assert latex("a_b & 5% {x} ±\\") == ("a\\_b \\& 5\\% \\{x\\} $\\pm$\\textbackslash{}")
    assert latex("é 数") == "é [U+6570]"  # what no font of LaTeX's has must not stop it


PROVENANCE = {
    "versions": {"python": "3.11.4", "torch": "2.5.1", "detectron2": None},
    "git": "f" * 40,
    "hardware": {"cpu": "AMD EPYC", "cpu_threads": 2, "gpus": ["V100", "V100"]},
    "utc": "2026-11-21T01:30:00+02:00",
}


def provenance_runs(root: Path) -> tuple[list[Table], Results]:
    """Two seeds of moco, of which the second deviates, ran on a CPU and has another torch."""
    write_run(root / "random", task="t")
    recipes = [("as in the paper (24k)", []), ("not the paper's", ["BASE_LR: 0.01, not 0.02"])]
    for seed, (label, deviations) in enumerate(recipes):
        made = dict(PROVENANCE)
        if seed == 1:
            made["versions"] = {"python": "3.11.4", "torch": "2.4.0", "detectron2": None}
            made["hardware"] = {"cpu": "AMD EPYC", "cpu_threads": 2, "gpus": []}
        write_run(
            root / f"moco{seed}",
            task="t",
            init="moco",
            seed=seed,
            weights_sha256="ab" * 32,
            weights_source="moco_v1_200ep.pth.tar",
            recipe={"recipe": "voc", "label": label, "deviations": deviations},
            provenance=made,
            config={"DATASETS.TEST": ["voc_2007_test"], "OUTPUT_DIR": "/elsewhere/out"},
            notes=["SEED was drawn"],
        )
    results = collect([root])
    return aggregate(results.transfer), results


def test_every_number_leads_to_what_it_was_made_of(tmp_path):
    tables, results = provenance_runs(tmp_path)
    page, document = to_html(tables, results), runs_to_markdown(tables, results)
    for text in (html.unescape(page), document):
        for fact in (
            *("ab" * 32, "moco_v1_200ep.pth.tar", "none: random", "c" * 64),
            "as in the paper (24k) (seed 0) / not the paper's; BASE_LR: 0.01, not 0.02 (seed 1)",
            "python 3.11.4, torch 2.5.1, git ffffffffffff (seed 0) / "
            "python 3.11.4, torch 2.4.0, git ffffffffffff (seed 1)",
            "2 x V100 (seed 0) / AMD EPYC, 2 threads (seed 1)",
            *("0, 1", "25 s in 2 runs", "2026-11-20 23:30:00 UTC", "SEED was drawn"),
            *(str(run.folder) for run in results.transfer),
        ):
            assert fact in text, fact
    assert '<a href="#runs-t--moco">' in page and 'id="runs-t--moco"' in page
    main = to_markdown(tables, results, "table.runs.md")
    assert "(table.runs.md#runs-t)" in main and '<a id="runs-t"></a>' in document
    assert "runs of different versions: torch (2.4.0 / 2.5.1)" in main
    lines = list(csv.DictReader(io.StringIO(runs_to_csv(tables))))
    assert [line["finished"] for line in lines] == ["", *["2026-11-20 23:30:00 UTC"] * 2]
    assert lines[2]["label"] == "not the paper's; BASE_LR: 0.01, not 0.02"
    assert (lines[1]["weights_source"], lines[1]["notes"]) == (
        "moco_v1_200ep.pth.tar",
        "SEED was drawn",
    )


def test_what_changes_from_one_making_to_the_next_is_not_in_the_tables(tmp_path):
    """Time, hardware and folders: the tables of a resumed suite are the same bytes."""
    made = []
    for name, seconds, utc in (("here", 5.0, "2026-01-01T00:00:00+00:00"), ("there", 9.0, "x")):
        write_pair(tmp_path / name, APS, seconds=seconds, provenance={"utc": utc})
        results = collect([tmp_path / name])
        tables = aggregate(results.transfer)
        made.append(
            [
                to_markdown(tables, results, "table.runs.md"),
                *(to_csv(tables), to_latex(tables), to_terminal(tables, (), color=False)),
            ]
        )
    assert made[0] == made[1]


def test_a_null_has_its_reason_and_partial_rows_their_n(tmp_path):
    reason = "not a number, so null: bbox/AP75, bbox/AP75-cat"
    for seed, ap75 in enumerate([8.0, None, 10.0]):
        metrics = {"bbox/AP": 10.0, "bbox/AP50": 20.0 + seed, "bbox/AP75": ap75}
        notes = [] if ap75 else ["drawn seed", reason]
        write_run(tmp_path / str(seed), task="t", seed=seed, metrics=metrics, notes=notes)
    results = collect([tmp_path])
    tables = aggregate(results.transfer)
    row = "3 10.0±0.0 21.0±1.0 9.0±1.4(n=2)"
    texts = [to_markdown(tables, results), to_latex(tables), to_terminal(tables, (), color=False)]
    for text in [*texts, html.unescape(to_html(tables, results))]:
        plain = re.sub(r"<[^>]*>|\\textcolor\{gray\}|[|&{}$\s]|\\\\", "", text)
        plain = plain.replace("\\pm", "±").replace("\\dagger", "†")
        assert "random" + row.replace(" ", "") in plain
        assert f"random, seed 1: no AP75 ({reason})" in text
        assert "no AP50" not in text
    assert '"nan"' not in to_csv(tables).lower() and "nan" not in to_csv(tables).lower()


def test_the_papers_numbers_as_csv(voc_both):
    lines = list(csv.DictReader(io.StringIO(paper_to_csv(voc_both[0]))))
    found = [
        x for x in lines if (x["table"], x["part"], x["pre-train"]) == ("2", "b", "MoCo IG-1B")
    ]
    assert [(x["metric"], x["value"], x["gap"]) for x in found] == [
        *(("bbox/AP50", "82.2", "0.9"), ("bbox/AP", "57.2", "3.7"), ("bbox/AP75", "63.7", "4.9")),
    ]
    assert len(lines) == 2 * (4 * 3 + 3 * 3)


def test_what_the_paper_does_not_print_is_not_in_its_csv(tmp_path):
    write_run(tmp_path / "a", task="imagenet_linear_resnet50", config={})
    text = paper_to_csv(aggregate(collect([tmp_path]).transfer))
    lines = list(csv.DictReader(io.StringIO(text)))
    assert "m 0.9" in text and not [line for line in lines if line["pre-train"] == "m 0"]


def test_names_cannot_break_out_of_the_page(tmp_path):
    write_run(tmp_path / "a", task="<b>t</b>", init="<script>x</script>|y")
    results = collect([tmp_path])
    tables = aggregate(results.transfer)
    text = to_html(tables, results)
    assert "<script>" not in text and "<b>" not in text
    assert "| &lt;script&gt;x&lt;/script&gt;\\|y |" in to_markdown(tables, results)


def test_terminal(own):
    tables, _ = own
    missing = [Unusable(Path("runs/x"), "failed: nan")]
    plain = to_terminal(tables, missing, color=False)
    assert "\033" not in plain
    assert re.search(r"moco +3 +22\.0 ± 2\.6 \(\+11\.0\) +44\.0", plain)
    assert "moco − random: AP +11.0 [" in plain
    assert "runs/x: failed: nan" in plain
    colored = to_terminal(tables, missing, color=True)
    assert "\033[1;32m(+11.0)\033[0m" in colored and "\033[1;32m(+0.2)" not in colored
    assert re.sub(r"\033\[[0-9;]*m", "", colored) == plain


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
    assert "| pre-train | n | mIoU |" in markdown and "| random | 1 | 70.0 |" in markdown
    assert "| pre-train | n | AP^kp | AP50^kp | AP75^kp |" in markdown
    assert "| random | 1 | 60.0 | – | – |" in markdown
    page = to_html(tables, results)
    assert "<th>AP<sup>bb</sup><sub>50</sub></th>" in page and "<th>AP<sup>mk</sup></th>" in page
    assert "<th>mIoU</th>" in page
    latex = to_latex(tables)
    assert "& AP$^{bb}$ & AP$^{bb}_{50}$ & AP$^{bb}_{75}$ & AP$^{mk}$ & AP$^{mk}_{50}$ &" in latex
    assert "$n$ & mIoU \\\\" in latex
