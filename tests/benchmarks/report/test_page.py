"""The HTML page: one file, every link has a target, and everything that can be is plotted."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from PIL import Image

import benchmarks.report.report
from benchmarks.report.export import html
from benchmarks.report.plots import Plot
from benchmarks.report.style import Progress
from tests.benchmarks.report.fake_runs import report, write_run
from tests.golden.regenerate_report import build, pages


class Page(HTMLParser):
    """Ids, links and images; every tag is closed, and one script is inside."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.goals: list[str] = []
        self.ids: list[str] = []
        self.scripts = 0
        self.feed(text)
        assert self.open == [] and self.scripts == 1
        assert len(set(self.ids)) == len(self.ids)
        here = {goal.removeprefix("#") for goal in self.goals if goal.startswith("#")}
        assert here <= set(self.ids)

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


@pytest.mark.slow
def test_it_is_one_file_and_every_number_leads_to_its_runs():
    text, report = pages()["table.html"], build()
    page = Page(text)
    for source in page.sources:
        ElementTree.fromstring(unquote(source.removeprefix("data:image/svg+xml,")))
    assert len(page.sources) > len(report.tables)
    assert "url(" not in text and "@import" not in text and "http:" not in text
    # n and every number of a row, each proof, and in the contents the summary, tables and runs
    cells = sum(len(each.table.rows) * (len(each.head) - 1) for each in report.sections)
    cells += sum(len(each.isolation) for each in report.sections)
    here = [goal for goal in page.goals if goal.startswith("#")]
    assert len(here) == cells + len(report.tables) + 2 and text.count("<nav") == 1
    gaps = [gap for table in report.tables for row in table.rows for gap in row.gaps.values()]
    others = [goal for goal in page.goals if goal not in here]
    lines = [grid.rows for section in report.sections for grid in section.gaps]
    assert len(others) == len([gap for gap in gaps if gap]) + sum(map(len, lines)) > 0
    assert set(others) == set(report.compared.values())
    assert "<nav" not in html(replace(report, tables=report.tables[:1]))["table.html"]


@pytest.mark.slow
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
    text = html(report(tmp_path / "runs"))["table.html"]
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
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert captions == [*of_task, *of_task, schedules]
    assert "Not plotted" not in text
    jpegs = [s for s in Page(text).sources if s.startswith("data:image/jpeg")]
    assert len(jpegs) == 2 * 2 * 4 and max(map(len, jpegs)) < 4000  # made small


def test_inits_that_differ_in_signs_alone_have_their_own_anchors(tmp_path):
    for init in ("a b", "a/b", "a-b"):
        write_run(tmp_path / init.encode().hex(), task="t", init=init)
    [section] = report(tmp_path).sections
    assert len({section.row_anchor(row) for row in section.table.rows}) == 3


@pytest.mark.slow
def test_a_live_page_lists_the_newest_runs(monkeypatch):
    monkeypatch.setattr(benchmarks.report.report, "LIVE_RUNS", 2)
    monkeypatch.setattr(Plot, "svg", "<svg/>")
    done = build()
    live = replace(done, progress=Progress("s", 0.5, "", {}, [], "now"))
    done_page, live_page = (html(each)["table.html"] for each in (done, live))
    assert (
        done_page.count(" s</td>") == len(done.results.transfer) > 2 == live_page.count(" s</td>")
    )
    assert "older runs are not listed" in live_page
    refresh = '<meta http-equiv="refresh"'
    assert refresh in live_page and refresh not in done_page
