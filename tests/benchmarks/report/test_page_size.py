"""Size of the page of a large suite: seven inits on ten tasks, everything plotted."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from benchmarks.report import compare, page
from benchmarks.report.export import html
from tests.benchmarks.report.fake_runs import report, write_run

INITS = ("random", "supervised", "moco", "mocov2", "mocov3", "byol", "simclr")
TASKS, SEEDS, CLASSES, LINES = 10, 3, 20, 900
MAX_BYTES = 3_500_000


@pytest.mark.slow
def test_seven_inits_on_ten_tasks_are_at_most_three_and_a_half_megabytes(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    for task in range(TASKS):
        for i, init in enumerate(INITS):
            for seed in range(SEEDS):
                aps = {f"bbox/AP-class{c}": float(x) for c, x in enumerate(random.random(CLASSES))}
                main = {"bbox/AP": 30.0 + i + random.random(), "bbox/AP50": 50.0 + i}
                folder = write_run(
                    tmp_path / "runs" / f"task{task}" / init / f"seed{seed}",
                    **{"task": f"faster_rcnn_R_50_FPN_task{task}", "init": init, "seed": seed},
                    weights_sha256=None if init == "random" else init.encode().hex().ljust(64, "0"),
                    metrics={**main, "bbox/AP75": 30.0 + random.random(), **aps},
                )
                if task:
                    continue
                lines = [
                    {"iteration": 20 * n, "total_loss": 2 + random.random()}
                    | ({"bbox/AP": n / 50} if n % 90 == 0 else {})
                    for n in range(LINES)
                ]
                (folder / "metrics.json").write_text("\n".join(map(json.dumps, lines)))
                samples = folder / "inference" / "visualize"
                samples.mkdir(parents=True)
                for number in range(0 if seed else page.SAMPLES):
                    pixels = random.integers(0, 255, (8, 12, 3), np.uint8)
                    image = Image.fromarray(pixels).resize((600, 400))
                    image.save(samples / f"{number}.jpg")
    recall = np.linspace(0, 1, 101)
    monkeypatch.setattr(page, "precision_recall", lambda run: (recall, 1 - recall**2))
    made = report(tmp_path / "runs")
    # The first task has every figure, and stands for the others: plotting all takes a minute.
    figures = page.figures(made, made.sections[0])
    assert not figures.missing and all(figures.samples.values())
    monkeypatch.setattr(page, "figures", lambda report, section: figures)
    monkeypatch.setattr(compare, "comparisons", lambda report: {})  # files of their own
    text = html(made)["table.html"]
    links = re.findall(r'href="(compare-[^"]*)"', text)
    # Three gaps, and the lines of evidence: one with intervals, two that are corrected.
    assert len(set(links)) == TASKS * (len(INITS) - 1) and len(links) == 6 * len(set(links))
    assert len(text.encode()) < MAX_BYTES
