"""Renderers: golden texts, missing cells, the paper's rows apart, files that stand alone."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import make_table
from benchmarks.report.content import Report
from benchmarks.report.escape import latex
from benchmarks.report.records import Results, Unusable
from benchmarks.report.render import RENDERERS, csv, md, tex, to_terminal
from tests.benchmarks.report.fake_runs import (
    CONFIG,
    csv_rows,
    rendered,
    report,
    write_pair,
    write_run,
)

APS = {"random": [10.0, 12.0], "moco": [20.0, 21.0, 25.0], "other_10%": [11.2]}


@pytest.fixture
def own(tmp_path) -> Report:
    """Three inits on a task that the paper does not have, and a failed run."""
    write_pair(tmp_path, APS, task="my_task")
    failed = {"status": "failed", "notes": ["nan"]}
    write_run(tmp_path / "gone", init="random", seed=5, task="my_task", **failed)
    return report(tmp_path)


@pytest.fixture
def voc_both(tmp_path) -> Report:
    """Both of Table 2's tasks, and one that the paper does not have."""
    for task in ("faster_rcnn_R_50_dilated_C5_24k", "faster_rcnn_R_50_C4_24k", "my_task"):
        aps = {"random": [19.0, 21.0], "moco": [22.0, 24.0]}
        write_pair(tmp_path / task, aps, task=task, iterations=24000)
    return report(tmp_path)


def test_a_renderer_from_outside(own, tmp_path, capsys):
    def inits(made: Report) -> dict[str, str]:
        return {"inits.txt": " ".join(row.init for row in made.tables[0].rows)}

    write_run(tmp_path / "other" / "run", task="t")
    RENDERERS.register(inits)
    try:
        make_table.main(
            [str(tmp_path / "other"), "--out", str(tmp_path / "out"), "--format", "inits"]
        )
    finally:
        del RENDERERS._obj_map["inits"]
    assert (tmp_path / "out" / "inits.txt").read_text() == "random"


def test_markdown_golden(own):
    text = md(own)["table.md"]
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
    assert f"- {own.results.unusable[0].folder}: failed: nan" in text
    assert "The paper," not in text


def test_few_trials_are_marked_where_the_paper_says_how_many(tmp_path):
    config = {"DATASETS.TEST": ["coco_2017_val"]}
    write_run(tmp_path / "not the paper's" / "a", task="my_task")
    write_run(tmp_path / "paper does not say" / "a", task="mask_rcnn_R_50_FPN_1x", config=config)
    write_run(tmp_path / "paper says 5" / "a")
    write_pair(tmp_path / "enough", {"random": [9.0] * 5})
    for folder in tmp_path.iterdir():
        for renderer, text in rendered(report(folder)).items():
            mark = "$\\dagger$" if renderer == "tex" else "†"
            few = f"{mark} fewer than 5 trials (the paper averages 5)"
            marked = folder.name == "paper says 5"
            assert (few in text) == (f"1{mark}" in text) == marked, (folder.name, renderer)


def test_printed_gaps_are_the_differences_of_the_printed_means(tmp_path):
    """10.04 is printed as 10.0 and 12.16 as 12.2; the gap, 2.12, is printed as 2.2."""
    write_pair(tmp_path, {"random": [10.03, 10.05], "moco": [12.15, 12.17]}, task="t")
    made = report(tmp_path)
    texts = rendered(made)
    for renderer, text in texts.items():
        line = next(line for line in text.splitlines() if "12.2 " in line)
        assert re.search(r"12\.2 .*?2\.2\b", line) and "2.1)" not in line, renderer
    assert "moco − random: AP +2.2 [" in texts["terminal"]
    assert [row["gap"] for row in csv_rows(csv(made)["table.csv"])][3] == "2.12"
    assert made.tables[0].rows[1].gaps["bbox/AP"].value == pytest.approx(2.12)


def test_missing_is_a_dash(tmp_path):
    write_run(tmp_path / "a", task="t", metrics={"bbox/AP": 10.0, "bbox/AP50": None})
    texts = md(report(tmp_path))
    assert "| random | 1 | 10.0 | – | – |" in texts["table.md"]
    assert "| 0 | 10.0 | – | – | 300 |" in texts["table.runs.md"]
    assert "random, seed 0: no AP50 (null, no reason recorded)" in texts["table.md"]
    assert "no AP75" not in texts["table.md"]


def test_the_papers_rows_are_apart_from_ours(tmp_path):
    write_pair(tmp_path, {"random": [33.0] * 5}, iterations=24000)
    texts = rendered(report(tmp_path))
    text = texts["md"]
    ours, paper = text.split("The paper, Table 2b (tab:voc); not measured here", 1)
    assert "MoCo" not in ours and "53.5" not in ours
    ours, page = texts["html"].split("The paper, Table 2b (tab:voc)", 1)
    assert "MoCo" not in ours and '55.9 <span class="gap strong">(+2.4)</span>' in page
    assert "| MoCo IN-1M | 81.5 (+0.2) | 55.9 (+2.4) | 62.6 (+3.8) |" in paper
    assert "| memory bank | 80.6 | 54.9 | 60.6 |" in paper
    assert "arXiv 1911.05722" in text and "not comparable" not in text


@pytest.mark.parametrize(
    ("split", "tables"),
    [
        ("lvis_v0.5_val", ("Table 6, LVIS", "appendix, LVIS")),
        ("coco_2017_val", ("Table 5b", "Table A.1, 2x")),
        ("my_test", ()),
    ],
)
def test_tasks_of_one_name_have_the_papers_rows_of_their_own_data(tmp_path, split, tables):
    """COCO and LVIS each have a mask_rcnn_R_50_FPN_2x; other data has none of the paper's."""
    config = {"DATASETS.TEST": [split], "SOLVER.MAX_ITER": 180000}
    metrics = {"segm/AP": 24.0, "segm/AP50": 37.0, "segm/AP75": 25.0}
    task = {"task": "mask_rcnn_R_50_FPN_2x", "iterations": 180000, "metrics": metrics}
    write_run(tmp_path / "run", config=config, **task)
    for renderer, text in rendered(report(tmp_path)).items():
        found = re.findall(r"Table 5b|Table 6, LVIS|appendix, LVIS|Table A.1, 2x", text)
        assert tuple(dict.fromkeys(found)) == tables, renderer
        if renderer in ("md", "html"):
            assert ("1911.05722" in text) == bool(tables)


def test_csv_golden(own):
    texts = csv(own)
    rows = csv_rows(texts["table.csv"])
    assert len(rows) == 3 * 3
    assert {name: text for name, text in rows[0].items() if text or "gap_" in name} == {
        "task": "my_task",
        "engine": "embedded",
        "iterations": "300",
        "init": "random",
        "metric": "bbox/AP",
        "n": "2",
        "mean": "11",
        "std": "1.41421",
        "baseline": "random",
        "gap_low": "",
        "gap_high": "",
    }
    assert [rows[3][k] for k in ("init", "mean", "std", "gap")] == ["moco", "22", "2.64575", "11"]
    assert float(rows[3]["gap_low"]) < 11 < float(rows[3]["gap_high"])
    assert [rows[6][k] for k in ("std", "gap_low", "p_value")] == ["", "", ""]
    runs = csv_rows(texts["runs.csv"])
    assert {row["folder"] for row in runs} == {str(run.folder) for run in own.results.transfer}
    assert [(row["init"], row["seed"], row["bbox/AP"]) for row in runs[:3]] == [
        ("random", "0", "10"),
        ("random", "1", "12"),
        ("moco", "0", "20"),
    ]
    assert "table.paper.csv" not in texts


def test_latex_golden(own):
    text = tex(own)["table.tex"]
    assert (
        "\\textcolor{gray}{random} & \\textcolor{gray}{2} & "
        "\\textcolor{gray}{11.0 $\\pm$ 1.4} & \\textcolor{gray}{22.0 $\\pm$ 2.8} & "
        "\\textcolor{gray}{9.0 $\\pm$ 1.4} \\\\\n"
        "moco & 3 & 22.0 $\\pm$ 2.6 \\textcolor[HTML]{39b54a}{($+$\\textbf{11.0})} & "
    ) in text
    assert "other\\_10\\% & 1 & 11.2 ($+$0.2) &" in text
    assert "pre-train & $n$ & AP & AP$_{50}$ & AP$_{75}$ \\\\" in text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("fixture", ["own", "voc_both"])
def test_latex_compiles(fixture, request, tmp_path):
    (tmp_path / "table.tex").write_text(tex(request.getfixturevalue(fixture))["table.tex"])
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_latex_is_arranged_as_the_papers_tables(voc_both):
    """Tables 2 and 3, each (a) and (b) side by side, our rows above the paper's."""
    parts = tex(voc_both)["table.tex"].split("\\begin{table}")[1:]
    first, second, third = (part.partition("\\end{table}")[0] for part in parts)
    assert "As Table 2 of the paper" in first and "As Table 3 of the paper" in second
    assert "faster\\_rcnn" not in first and "my\\_task" in third
    for part in (first, second):
        assert part.count("\\begin{subtable}[t]{0.49\\linewidth}") == 2
        assert part.count("pre-train & $n$ & AP$_{50}$ & AP & AP$_{75}$ \\\\") == 2
        assert part.index("dilated-C5") < part.rindex("R50-C4")
    left, right = first.split("\\end{subtable}")[:2]
    assert left.index("40.0 $\\pm$") < left.index("The paper, Table 2a") < left.index("64.4")
    assert "MoCo IN-1M & 5 & 81.5 ($+$0.2) & 55.9 \\textcolor[HTML]{39b54a}{($+$" in right
    assert "\\textcolor{gray}{random init.} & \\textcolor{gray}{5} &" in left


def test_latex_has_the_columns_of_other_methods(tmp_path):
    """Table 4: our numbers are below MoCo's columns, the others' stay empty."""
    write_run(tmp_path / "a", task="faster_rcnn_R_50_C4_9k", iterations=9000)
    text = tex(report(tmp_path))["table.tex"]
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


def provenance_runs(root: Path) -> Report:
    """Two seeds of moco, of which the second deviates, ran on a CPU and has another torch."""
    write_run(root / "random", task="t")
    for seed, (label, deviations, torch, gpus) in enumerate(
        [
            ("as in the paper (24k)", [], "2.5.1", ["V100", "V100"]),
            ("not the paper's", ["BASE_LR: 0.01, not 0.02"], "2.4.0", []),
        ]
    ):
        write_run(
            root / f"moco{seed}",
            **{"task": "t", "init": "moco", "seed": seed, "notes": ["SEED was sampled"]},
            weights_sha256="ab" * 32,
            weights_source="moco_v1_200ep.pth.tar",
            recipe={"recipe": "voc", "label": label, "deviations": deviations},
            provenance={
                "versions": {"python": "3.11.4", "torch": torch, "detectron2": None},
                "git": "f" * 40,
                "hardware": {"cpu": "AMD EPYC", "cpu_threads": 2, "gpus": gpus},
                "utc": "2026-11-21T01:30:00+02:00",
            },
            config={**CONFIG, "OUTPUT_DIR": "/elsewhere/out"},
        )
    return report(root)


def test_every_number_leads_to_what_it_was_made_of(tmp_path):
    made = provenance_runs(tmp_path)
    page, documents = rendered(made)["html"], md(made)
    for text in (page, documents["table.runs.md"]):
        for fact in (
            "ab" * 32,
            "moco_v1_200ep.pth.tar",
            "none: random",
            made.tables[0].runs[0].record.config_sha256,
            "as in the paper (24k) (seed 0) / not the paper's; BASE_LR: 0.01, not 0.02 (seed 1)",
            "python 3.11.4, torch 2.5.1, git ffffffffffff (seed 0) / "
            "python 3.11.4, torch 2.4.0, git ffffffffffff (seed 1)",
            "2 x V100 (seed 0) / AMD EPYC, 2 threads (seed 1)",
            "0, 1",
            "25 s in 2 runs",
            "2026-11-20 23:30:00 UTC",
            "SEED was sampled",
            *(str(run.folder) for run in made.results.transfer),
        ):
            assert fact in text, fact
    assert '<a href="#runs-t--moco">' in page and 'id="runs-t--moco"' in page
    assert "(table.runs.md#runs-t)" in documents["table.md"]
    assert '<a id="runs-t"></a>' in documents["table.runs.md"]
    assert "runs of different versions: torch (2.4.0 / 2.5.1)" in documents["table.md"]
    rows = csv_rows(csv(made)["runs.csv"])
    assert [row["finished"] for row in rows] == ["", *["2026-11-20 23:30:00 UTC"] * 2]
    assert rows[2]["label"] == "not the paper's; BASE_LR: 0.01, not 0.02"
    assert (rows[1]["weights_source"], rows[1]["notes"]) == (
        "moco_v1_200ep.pth.tar",
        "SEED was sampled",
    )


def test_what_changes_from_one_report_to_the_next_is_not_in_the_tables(tmp_path):
    """Time, hardware and folders: the tables of a resumed suite are the same bytes."""
    made = []
    for name, seconds, utc in (("here", 5.0, "2026-01-01T00:00:00+00:00"), ("there", 9.0, "x")):
        write_pair(tmp_path / name, APS, seconds=seconds, provenance={"utc": utc})
        each = report(tmp_path / name)
        texts = rendered(each)
        made.append((texts["md"], texts["tex"], texts["terminal"], csv(each)["table.csv"]))
    assert made[0] == made[1]


def test_a_null_has_its_reason_and_partial_rows_their_n(tmp_path):
    reason = "not a number, so null: bbox/AP75, bbox/AP75-cat"
    for seed, ap75 in enumerate([8.0, None, 10.0]):
        metrics = {"bbox/AP": 10.0, "bbox/AP50": 20.0 + seed, "bbox/AP75": ap75}
        notes = [] if ap75 else ["sampled seed", reason]
        write_run(tmp_path / str(seed), task="t", seed=seed, metrics=metrics, notes=notes)
    made = report(tmp_path)
    for text in rendered(made).values():
        plain = re.sub(r"<[^>]*>|\\textcolor\{gray\}|[|&{}$\s]|\\\\", "", text)
        plain = plain.replace("\\pm", "±").replace("\\dagger", "†")
        assert "random310.0±0.021.0±1.09.0±1.4(n=2of3)" in plain
        assert f"random, seed 1: no AP75 ({reason})" in text
        assert "no AP50" not in text
    assert "nan" not in csv(made)["table.csv"].lower()


def test_layers_frozen_at_random_weights_are_under_the_table(tmp_path):
    frozen = {**CONFIG, "MODEL.BACKBONE.FREEZE_AT": 2}
    for init, sha256 in (("random", None), ("moco", "a" * 64)):
        write_run(tmp_path / init, init=init, weights_sha256=sha256, config=frozen)
    text = rendered(report(tmp_path))["md"]
    assert "random: MODEL.BACKBONE.FREEZE_AT 2: the first layers stay at the random" in text
    assert "moco: MODEL.BACKBONE" not in text


def test_the_papers_numbers_as_csv(voc_both, tmp_path):
    rows = csv_rows(csv(voc_both)["table.paper.csv"])
    found = [x for x in rows if (x["table"], x["part"], x["pre-train"]) == ("2", "b", "MoCo IG-1B")]
    assert [(x["metric"], x["value"], x["gap"]) for x in found] == [
        ("bbox/AP50", "82.2", "0.9"),
        ("bbox/AP", "57.2", "3.7"),
        ("bbox/AP75", "63.7", "4.9"),
    ]
    assert len(rows) == 2 * (4 * 3 + 3 * 3)
    # what the paper does not print is not there
    write_run(tmp_path / "linear" / "a", task="imagenet_linear_resnet50", config={})
    names = [
        row["pre-train"] for row in csv_rows(csv(report(tmp_path / "linear"))["table.paper.csv"])
    ]
    assert "m 0.9" in names and "m 0" not in names


def test_terminal(own):
    failed = Unusable(Path("runs/x"), "failed: nan")
    made = replace(own, results=Results((), (), (failed,)))
    plain = to_terminal(made, color=False)
    assert "\033" not in plain
    assert re.search(r"moco +3 +22\.0 ± 2\.6 \(\+11\.0\) +44\.0", plain)
    assert "moco − random: AP +11.0 [" in plain
    assert "runs/x: failed: nan" in plain
    colored = to_terminal(made, color=True)
    assert "\033[32m\033[1m(+11.0)\033[0m" in colored and "\033[32m(+0.2)" not in colored
    assert re.sub(r"\033\[[0-9;]*m", "", colored) == plain


def test_heads_name_the_kinds_as_the_paper_does(tmp_path):
    both = {f"{kind}/{name}": 40.0 for kind in ("segm", "bbox") for name in ("AP", "AP50", "AP75")}
    write_run(tmp_path / "a", task="coco", metrics=both)
    write_run(tmp_path / "b", task="fcn", metrics={"sem_seg/mIoU": 70.0})
    write_run(tmp_path / "c", task="people", metrics={"keypoints/AP": 60.0, "keypoints/AP50": None})
    texts = rendered(report(tmp_path))
    for line in (
        "| pre-train | n | AP^bb | AP50^bb | AP75^bb | AP^mk | AP50^mk | AP75^mk |",
        "| pre-train | n | mIoU |",
        "| random | 1 | 70.0 |",
        "| pre-train | n | AP^kp | AP50^kp | AP75^kp |",
        "| random | 1 | 60.0 | – | – |",
    ):
        assert line in texts["md"]
    for head in ("AP<sup>bb</sup><sub>50</sub>", "AP<sup>mk</sup>", "mIoU"):
        assert f'<th scope="col">{head}</th>' in texts["html"]
    heads = "& AP$^{bb}$ & AP$^{bb}_{50}$ & AP$^{bb}_{75}$ & AP$^{mk}$ & AP$^{mk}_{50}$ &"
    assert heads in texts["tex"] and "$n$ & mIoU \\\\" in texts["tex"]


def test_a_suites_names_of_tasks_are_titles(tmp_path):
    """And tell tasks of one name apart; the files keep their names."""
    for name, data in (("lvis_mask", "lvis_v0.5_val"), ("coco_mask", "coco_2017_val")):
        folder = tmp_path / "runs" / name / "random" / "seed0-0123456789"
        write_run(folder, task="m", config={"DATASETS.TEST": [data]})
    assert [section.heading for section in report(tmp_path).sections] == [
        "m on coco_2017_val",
        "m on lvis_v0.5_val",
    ]
    (tmp_path / "suite.json").write_text("{}")
    made = report(tmp_path)
    assert [section.heading for section in made.sections] == ["coco_mask", "lvis_mask"]
    assert [section.stem for section in made.sections] == ["m-coco_2017_val", "m-lvis_v0.5_val"]
    for renderer, text in rendered(made).items():
        assert text.count("lvis") > 1 and "lvis_mask" in text.replace("\\_", "_"), renderer
    title = made.plots["ap-m-lvis_v0.5_val"].figure.get_suptitle()
    assert title == "lvis_mask"
