"""The page that compares a row with the baseline: numbers, images, links, what is missing."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageColor

from benchmarks.report import samples
from benchmarks.report.analysis import ERROR_TYPES
from benchmarks.report.compare import Comparison, comparisons, found_objects
from benchmarks.report.export import html
from benchmarks.report.records import collect
from benchmarks.report.style import RIGHT, TRUTH, WRONG, Progress
from benchmarks.report.table import aggregate
from detection.datasets.base import Split
from detection.datasets.voc import GroundTruth
from detection.evaluation.matches import Matches, MatchFile, write_matches
from detection.evaluation.metrics import ERRORS_NAME
from moco.common.errors import UserError
from tests.benchmarks.report.fake_runs import report, write_run

IMAGES = ("easy", "hard", "odd")
SPLIT = "voc_2007_test"
BOX = (10.0, 20.0, 60.0, 80.0)  # of the only object of each image


def matches(*right: bool) -> Matches:
    """Return the matches of one object and one detection on each image."""
    D = len(right)
    flags = np.array(right)[:, None] & np.ones(10, bool)
    numbers = np.arange(D)
    zeros = np.zeros(D, int)
    return Matches(zeros, numbers, np.full(D, 0.5), flags, np.zeros((D, 10), bool), zeros, numbers)


@pytest.fixture
def root(tmp_path):
    """Two rows of two runs: MoCo finds the hard image's object, in one run also the odd one's."""
    found = {"random": [(1, 0, 1), (1, 0, 1)], "moco": [(1, 1, 0), (1, 1, 1)]}
    for init, of_seeds in found.items():
        for seed, right in enumerate(of_seeds):
            better = 10.0 if init == "moco" else 0.0
            folder = write_run(
                tmp_path / "runs" / f"{init}{seed}",
                losses=[3.0, 2.0 - 0.1 * better],
                **{"init": init, "seed": seed},
                weights_sha256=None if init == "random" else "a" * 64,
                metrics={
                    **{f"bbox/{name}": 20 + better + seed for name in ("AP", "AP50", "AP75")},
                    "bbox/AP-cat": 10 + 2 * better + seed,
                    "bbox/AP-dog": 30.0 - seed,
                },
            )
            stored = MatchFile("voc_2007", IMAGES, {"bbox": matches(*map(bool, right))})
            write_matches(folder / "inference", stored)
            rows = [
                {"image_id": i, "category_id": 0 if hit else 1, "bbox": BOX, "score": 0.5}
                for i, hit in zip(IMAGES, right, strict=True)
            ]
            content = {"classes": ["cat", "dog"], "predictions": rows}
            (folder / "inference" / f"{SPLIT}.json").write_text(json.dumps(content))
    return tmp_path / "runs"


def compared(root) -> Comparison:
    [(section, found)] = comparisons(report(root)).values()
    assert section.stem == report(root).sections[0].stem
    return found


def lines(found: Comparison, title: str) -> dict[str, list[str]]:
    [grid] = [grid for grid in found.grids if title in grid.title]
    return {row[0].text: [cell.text for cell in row[1:]] for row in grid.rows}


def test_differences_by_metric_class_and_error_with_their_intervals(root):
    for run in collect([root]).transfer:
        cost = 5.0 if run.record.init == "random" else 3.0
        types = dict.fromkeys(ERROR_TYPES, cost + run.record.seed)
        made = {"run": run.digest, "ap50": 1.0, "delta": types}
        (run.folder / ERRORS_NAME).write_text(json.dumps(made))
    found = compared(root)
    assert found.title == "moco − random" and not found.missing.keys() & {"Error types"}
    [table] = aggregate(collect([root]).transfer)
    gap = table.rows[1].gaps["bbox/AP"]
    metric = lines(found, "Metrics")["AP"]
    assert metric[:2] == ["20.5 ± 0.7", "30.5 ± 0.7"]
    assert metric[2].startswith(f"+10.0 [{gap.low:.1f}, {gap.high:.1f}], p = 0.005")
    classes = lines(found, "by class")
    assert list(classes) == ["cat", "dog"], "the largest gain comes first"
    assert classes["cat"][2].startswith("+20.0 [17.0, 23.0]")  # t(2) = 4.30, error 0.71
    assert classes["dog"][2].startswith("+0.0 [−3.0, 3.0]") and classes["dog"][3] == "p = 1.000"
    p, holm = (float(re.search(r"0\.\d+", classes["cat"][i])[0]) for i in (2, 3))
    assert holm == pytest.approx(2 * p, abs=2e-3)
    assert lines(found, "TIDE")["missed"][:2] == ["5.5 ± 0.7", "3.5 ± 0.7"]
    assert list(found.figures) == [
        "AP by class, differences with 95% intervals",
        "Loss during fine-tuning",
    ]


def test_images_with_the_largest_differences_are_drawn_side_by_side(root, tmp_path, monkeypatch):
    records, truth = [], {}
    for name in IMAGES:
        path = tmp_path / f"{name}.png"
        Image.new("RGB", (100, 100), "white").save(path)
        records.append({"file_name": str(path), "image_id": name, "height": 100, "width": 100})
        box = np.array([BOX]) + samples.ONE_BASED
        truth[name] = GroundTruth(box, np.array([0]), np.array([False]))
    split = Split(SPLIT, "pascal_voc", ("cat", "dog"), tuple(records), "e" * 64, truth=truth)
    monkeypatch.setattr(
        samples,
        "find_predictions",
        lambda run: (split, run.folder / "inference" / f"{SPLIT}.json"),
    )
    found = compared(root)
    assert found.columns == ("ground truth", "random, seed 0", "moco, seed 0")
    assert {title: [s.caption for s in of] for title, of in found.samples.items()} == {
        "moco finds more": ["hard: 1 object, random finds 0.0, moco 1.0 (+1.0)"],
        "random finds more": ["odd: 1 object, random finds 1.0, moco 0.5 (−0.5)"],
    }
    for of in found.samples.values():
        assert [len(s.sources) for s in of] == [3]
    [table] = aggregate(collect([root]).transfer)
    [panels] = samples.draw_pair(table, {"hard": 1}).values()
    edge = round(BOX[0] * samples.IMAGE_PX / 100), samples.IMAGE_PX // 2
    assert [panel.getpixel(edge) for panel in panels] == [
        ImageColor.getrgb(color) for color in (TRUTH, WRONG, RIGHT)
    ]
    with pytest.raises(UserError, match="other objects than"):
        samples.draw_pair(table, {"hard": 2})


def test_coco_s_objects_and_predictions_are_drawn_like_voc_s(tmp_path):
    rows = [
        {"id": 1, "image_id": 7, "category_id": 5, "bbox": [10, 20, 50, 60], "area": 9},
        {"id": 2, "image_id": 7, "category_id": 3, "bbox": [0, 0, 5, 5], "iscrowd": 1, "area": 9},
        {"id": 3, "image_id": 8, "category_id": 3, "bbox": [1, 1, 5, 5], "iscrowd": 0, "area": 9},
    ]
    images = [{"id": i, "file_name": f"{i}.png", "height": 100, "width": 100} for i in (7, 8)]
    categories = [{"id": 3, "name": "dog"}, {"id": 5, "name": "cat"}]
    content = {"images": images, "annotations": rows, "categories": categories}
    (tmp_path / "truth.json").write_text(json.dumps(content))
    metadata = {
        "json_file": str(tmp_path / "truth.json"),
        "thing_dataset_id_to_contiguous_id": {3: 0, 5: 1},
    }
    split = Split("mine", "coco", ("dog", "cat"), (), "e" * 64, metadata=metadata)
    [truth] = samples.objects_of(split, ["7"]).values()
    assert (truth.boxes - samples.ONE_BASED).tolist() == [[10, 20, 60, 80], [0, 0, 5, 5]]
    assert (truth.classes.tolist(), truth.difficult.tolist()) == ([1, 0], [False, True])
    found = [
        {"image_id": i, "category_id": 5, "bbox": [10, 20, 50, 60], "score": 1} for i in (7, 8)
    ]
    (tmp_path / "found.json").write_text(json.dumps(found))
    [[own]] = samples.predictions_of(split, tmp_path / "found.json", ["7"]).values()
    assert own["bbox"] == [10, 20, 60, 80] and own["category_id"] == 1
    with pytest.raises(UserError, match="sem_seg"):
        samples.objects_of(replace(split, evaluator_type="sem_seg"), ["7"])


def test_what_is_missing_is_named(root):
    found = compared(root)
    assert found.samples["moco finds more"][0].sources == ()
    assert "voc_2007_test" in found.missing["Predictions on the images"]
    assert "moco-transfer errors" in found.missing["Error types"]
    (root / "moco1" / "inference" / "matches.npz").unlink()
    assert "match records" in compared(root).missing["Images with the largest differences"]


def test_as_many_detections_as_objects_are_counted():
    """Image 0 has one object, found by its second detection; image 1 two, both found."""
    true = np.array([0, 1, 1, 1, 0], bool)[:, None] & np.ones(10, bool)
    ignored = np.zeros((5, 10), bool)
    scores = np.array([0.9, 0.8, 0.7, 0.6, 0.5])
    images, objects = np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1])
    zeros = np.zeros(5, int)
    made = Matches(zeros, images, scores, true, ignored, np.zeros(3, int), objects)
    assert [of.tolist() for of in found_objects(made, 3)] == [[1, 2, 0], [0, 2, 0]]
    ignored[0] = True  # a detection that does not count takes no place
    assert found_objects(made, 3)[1].tolist() == [1, 2, 0]


def test_each_gap_links_to_its_page_and_back(root):
    made = report(root)
    files = html(made)
    [name] = set(files) - {"table.html"}
    lines = [len(grid.rows) for grid in made.sections[0].gaps]
    assert files["table.html"].count(f'href="{name}"') == len(made.tables[0].metrics) + sum(lines)
    assert f'href="table.html#{made.sections[0].anchor}"' in files[name]
    live = replace(made, progress=Progress("s", 0.5, "", {}, [], "now"))
    assert list(html(live)) == ["table.html"], "a running suite would make them again and again"
    assert name not in html(live)["table.html"]
