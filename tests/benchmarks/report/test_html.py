"""The page: one file, every link leads somewhere, what is drawn, and what is said to be missing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from benchmarks.report.html import to_html
from PIL import Image

from benchmarks.report.aggregate import Table, aggregate
from benchmarks.report.records import Results, collect
from moco.common.errors import UserError
from tests.benchmarks.report.fake_runs import CONFIG, write_pair, write_run


class Page(HTMLParser):
    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.goals: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.sources += [v for k, v in attrs if k in ("src", "data", "srcset")]
        self.goals += [v for k, v in attrs if k == "href"]
        self.ids += [v for k, v in attrs if k == "id"]
        assert tag not in ("script", "link", "iframe")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def made(root: Path, baseline: str | None = None) -> tuple[list[Table], Results]:
    results = collect([root])
    return aggregate(results.transfer, baseline), results


def captions(text: str) -> list[str]:
    return re.findall("<figcaption>(.*?)</figcaption>", text)


def test_it_is_one_file_and_every_number_leads_to_its_runs(tmp_path):
    for task in ("my_task", "other task"):
        write_pair(tmp_path / task, {"random": [10.0, 12.0], "moco 10%": [20.0, 24.0]}, task=task)
    text = to_html(*made(tmp_path))
    page = Page(text)
    assert page.sources and all(s.startswith("data:image/png;base64,") for s in page.sources)
    assert len(set(page.ids)) == len(page.ids)
    assert {goal.removeprefix("#") for goal in page.goals} <= set(page.ids)
    assert all(goal.startswith("#") for goal in page.goals)
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert (
        '<a href="#runs-my_task--moco:20:10:25:">22.0 ± 2.8 <span class="gap strong">(+11.0)'
        in text
    )
    # two rows of two tasks, n and three metrics in each; two tasks and all runs in the heading
    assert len(page.goals) == 2 * 2 * 4 + 3


def test_the_papers_rows_stand_beside_ours(tmp_path):
    write_pair(tmp_path, {"random": [33.0] * 5}, iterations=24000)
    text = to_html(*made(tmp_path))
    ours, paper = text.split("The paper, Table 2b (tab:voc)", 1)
    assert "33.0 ± 0.0" in ours and "MoCo" not in ours
    assert '55.9 <span class="gap strong">(+2.4)</span>' in paper


def test_what_is_not_there_is_said(tmp_path):
    write_run(tmp_path / "runs" / "a", task="t")
    write_run(tmp_path / "runs" / "b", task="t", seed=1, status="failed", notes=["loss: nan"])
    text = to_html(*made(tmp_path / "runs"))
    assert captions(text) == ["AP and every seed"]
    said = Page(text).text
    for reason in (
        "Loss: the folders hold no metrics.json with one",
        "AP during fine-tuning: the runs were evaluated at their end alone (TEST.EVAL_PERIOD)",
        "Gap to the baseline, 95% interval over fine-tuning seeds: no baseline",
        "By class: the records hold no number of a class",
        "first seed: no predictions (voc_2007_test.json) in the run's inference folder",
        "Sample predictions: no run has any",
        "failed: loss: nan",
    ):
        assert reason in said


def test_everything_that_is_there_is_drawn(tmp_path, monkeypatch):
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
    monkeypatch.setattr("benchmarks.report.html.precision_recall", lambda run: curve)
    text = to_html(*made(tmp_path / "runs"))
    of_task = [
        *("Loss", "AP during fine-tuning", "AP and every seed"),
        *("Gap to the baseline, 95% interval over fine-tuning seeds", "By class"),
        "Precision and recall of boxes, IoU 0.5, first seed",
        "Sample predictions, first seed that has them",
    ]
    schedules = "mask_R_50, voc_2007_test, embedded: by length of the fine-tuning"
    assert captions(text) == [*of_task, *of_task, schedules]
    assert "Not drawn" not in text
    jpegs = [s for s in Page(text).sources if s.startswith("data:image/jpeg")]
    assert len(jpegs) == 2 * 2 * 4 and max(map(len, jpegs)) < 4000  # made small


def test_what_is_drawn_already_is_not_drawn_again(tmp_path, monkeypatch):
    write_pair(tmp_path, {"random": [10.0, 12.0]}, task="t")
    for name in ("loss_figure", "ap_figure"):
        monkeypatch.delattr(f"benchmarks.report.plots.{name}")
    text = to_html(*made(tmp_path), {"loss-t": b"loss", "ap-t": b"ap"})
    sources = Page(text).sources
    assert sources[:2] == ["data:image/png;base64,bG9zcw==", "data:image/png;base64,YXA="]


def test_a_sample_that_is_no_image_is_named(tmp_path):
    folder = write_run(tmp_path / "a" / "run") / "inference" / "visualize"
    folder.mkdir(parents=True)
    (folder / "x.jpg").write_text("not an image")
    with pytest.raises(UserError, match=r"visualize/x\.jpg: not an image"):
        to_html(*made(tmp_path / "a"))


def test_names_cannot_break_out(tmp_path):
    evil = "<script>x</script>\"'&"
    write_run(tmp_path / "a", task=evil, init=evil, config={**CONFIG, "X": evil}, notes=[evil])
    text = to_html(*made(tmp_path))
    page = Page(text)  # which refuses scripts
    assert {goal.removeprefix("#") for goal in page.goals} <= set(page.ids)
    assert f"X: {evil}" in page.text


def test_inits_that_differ_in_signs_alone_have_their_own_anchors(tmp_path):
    for init in ("a b", "a/b", "a-b"):
        write_run(tmp_path / init.encode().hex(), task="t", init=init)
    page = Page(to_html(*made(tmp_path)))
    assert len([i for i in page.ids if i.startswith("runs-t--")]) == 3
    assert len(set(page.ids)) == len(page.ids)
