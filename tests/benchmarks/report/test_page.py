"""The page: one file, every link leads somewhere, what is plotted, what is missing and why."""

import base64
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image

from benchmarks.report import content
from benchmarks.report.progress import Progress
from benchmarks.report.render import html, to_terminal
from benchmarks.report.significance import significance
from tests.benchmarks.report.fake_runs import rendered, report, write_pair, write_run


class Page(HTMLParser):
    """Ids, links, images and texts; every tag is closed, and one script is inside."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.goals: list[str] = []
        self.ids: list[str] = []
        self.text, self.scripts = "", 0
        self.feed(text)
        assert self.open == [] and self.scripts == 1
        assert len(set(self.ids)) == len(self.ids)
        assert all(goal.startswith("#") for goal in self.goals)
        assert {goal.removeprefix("#") for goal in self.goals} <= set(self.ids)

    def handle_starttag(self, tag, attrs):
        self.sources += [v for k, v in attrs if k in ("src", "data", "srcset")]
        self.goals += [v for k, v in attrs if k == "href"]
        self.ids += [v for k, v in attrs if k == "id"]
        self.scripts += tag == "script"
        assert tag not in ("link", "iframe")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def made(root: Path) -> str:
    return html(report(root))["table.html"]


def captions(text: str) -> list[str]:
    return re.findall("<figcaption>(.*?)</figcaption>", text)


def test_it_is_one_file_and_every_number_leads_to_its_runs(tmp_path):
    for task in ("my_task", "other task"):
        write_pair(tmp_path / task, {"random": [10.0, 12.0], "moco 10%": [20.0, 24.0]}, task=task)
    text = made(tmp_path)
    page = Page(text)
    for source in page.sources:
        ElementTree.fromstring(base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")))
    assert len(page.sources) == 2 * 3
    assert "url(" not in text and "@import" not in text and "http:" not in text
    # two rows of two tasks, n and three metrics in each; two tasks and all runs in the heading
    assert len(page.goals) == 2 * 2 * 4 + 3


def test_best_significant_and_sortable(tmp_path):
    """`x` is best but on a single seed; bold is what Holm's correction leaves below 0.05.

    The gap of `few` has p = 0.049, which of six gaps is nothing.
    """
    aps = {"random": [10.0, 10.2, 10.4], "few": [10.9, 12.1, 11.8], "moco": [20.0, 20.2, 20.1]}
    write_pair(tmp_path, {**aps, "x": [30.0]}, task="t")
    [table] = report(tmp_path).tables
    holms = {(e.row.init, e.metric): e.holm for e in significance(table)}
    p_value = table.rows[1].gaps["bbox/AP"].p_value
    assert p_value < 0.05 < holms["few", "bbox/AP"] and holms["moco", "bbox/AP"] < 0.05
    text = made(tmp_path)
    ours = text.split("<tbody>")[1].split("</tbody>")[0]
    random, few, moco, x = (row.split("</td>")[1] for row in ours.split("</tr>")[:4])
    link, gap = '<td data-value="{}"><a href="#runs-t--{}">{}</a>', '<span class="gap strong">'
    assert random == link.format(10.200000000000001, "random", "10.2 ± 0.2")
    assert few.endswith(f"{gap}(+1.4)</span></a>")
    assert moco == link.format(20.099999999999998, "moco", f"20.1 ± 0.1 {gap}<b>(+9.9)</b></span>")
    assert x == link.format("30.0", "x", f"<u>30.0</u> {gap}(+19.8)</span>")
    assert ours.count("<b>") == 3 and ours.count("<u>") == 3
    assert "Bold: the gap's p-value is below 0.05 after Holm" in unescape(text)
    assert "Underlined: best of the column" in text
    texts = rendered(report(tmp_path))
    assert "(**+9.9**)" in texts["md"] and texts["md"].count("(**+") == 3
    assert "Bold: the gap's p-value is below 0.05 after Holm" in texts["md"]
    assert "\\textbf{9.9}" in texts["tex"] and texts["tex"].count("\\textbf{") == 3
    assert "bold where its p-value is below 0.05 after Holm" in texts["tex"]
    colored = to_terminal(report(tmp_path), color=True)
    assert "\033[32m\033[1m(+9.9)\033[0m" in colored and colored.count("\033[1m") == 3
    for rule in ("prefers-color-scheme: dark", "max-width: 40rem", "position: sticky", "aria-sort"):
        assert rule in text


def test_what_is_missing_is_said(tmp_path):
    write_run(tmp_path / "runs" / "a", task="t")
    write_run(tmp_path / "runs" / "b", task="t", seed=1, status="failed", notes=["loss: nan"])
    text = made(tmp_path / "runs")
    assert captions(text) == ["AP and every seed"]
    said = Page(text).text
    for reason in (
        "Loss: the folders hold no metrics.json",
        "AP during fine-tuning: the runs were evaluated at their end alone (TEST.EVAL_PERIOD)",
        "Gap to the baseline, 95% interval over fine-tuning seeds: no baseline",
        "By class: the records hold no number of a class",
        "first seed: no predictions (voc_2007_test.json) in the run's inference folder",
        "Sample predictions: no run has any",
        "failed: loss: nan",
    ):
        assert reason in said


def test_everything_that_can_be_is_plotted(tmp_path, monkeypatch):
    for task, length in (("mask_R_50_1x", 100), ("mask_R_50_2x", 200)):
        for init, ap in (("random", 10.0), ("moco", 20.0)):
            for seed in range(2):
                folder = write_run(
                    tmp_path / "runs" / f"{task}-{init}-{seed}",
                    **{"task": task, "init": init, "seed": seed, "iterations": length},
                    weights_sha256=None if init == "random" else "a" * 64,
                    metrics={"bbox/AP": ap + seed, "bbox/AP-cat": ap, "bbox/AP-dog": ap + 3},
                )
                lines = [
                    {"iteration": i, "total_loss": 2.0, "bbox/AP": ap * i / length}
                    for i in (length // 2, length)
                ]
                (folder / "metrics.json").write_text("\n".join(map(json.dumps, lines)))
                samples = folder / "inference" / "visualize"
                samples.mkdir(parents=True)
                for number in range(5):
                    Image.new("RGB", (900, 600), (90, number, 9)).save(samples / f"{number}.jpg")
    curve = ([0.0, 1.0], [1.0, 0.5])
    monkeypatch.setattr("benchmarks.report.page.precision_recall", lambda run: curve)
    text = made(tmp_path / "runs")
    of_task = [
        "Loss",
        "AP during fine-tuning",
        "AP and every seed",
        "Gap to the baseline, 95% interval over fine-tuning seeds",
        "By class",
        "Precision and recall of boxes, IoU 0.5, first seed",
        "Sample predictions, first seed that has them",
    ]
    schedules = "mask_R_50, voc_2007_test, embedded: by length of the fine-tuning"
    assert captions(text) == [*of_task, *of_task, schedules]
    assert "Not plotted" not in text
    jpegs = [s for s in Page(text).sources if s.startswith("data:image/jpeg")]
    assert len(jpegs) == 2 * 2 * 4 and max(map(len, jpegs)) < 4000  # made small


def test_inits_that_differ_in_signs_alone_have_their_own_anchors(tmp_path):
    for init in ("a b", "a/b", "a-b"):
        write_run(tmp_path / init.encode().hex(), task="t", init=init)
    assert len([i for i in Page(made(tmp_path)).ids if i.startswith("runs-t--")]) == 3


def test_a_live_page_lists_the_newest_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "LIVE_RUNS", 2)
    write_pair(tmp_path, {"random": [10, 11, 12], "moco": [20, 21, 22]})
    done = report(tmp_path)
    live = replace(done, progress=Progress("s", 0.5, "", {}, [], "now"))
    counts = {
        name: html(each)["table.html"].count(" s</td>")
        for name, each in (("done", done), ("live", live))
    }
    assert counts == {"done": 6, "live": 2}
    page = html(live)["table.html"]
    assert "older runs are not listed" in page and '<meta http-equiv="refresh"' in page
    assert 'http-equiv="refresh"' not in html(done)["table.html"]
