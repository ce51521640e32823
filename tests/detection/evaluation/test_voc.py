"""The VOC metric: by hand, by its definition's corner cases, and against Detectron2's evaluator."""

from pathlib import Path

import numpy as np
import pytest

from detection.datasets.voc import GroundTruth
from detection.evaluation.voc import (
    DETECTRON2_MEANS,
    IOU_THRESHOLDS,
    VOCDetections,
    ap_11_points,
    ap_area,
    inclusive_iou,
    match,
    summarize,
)
from tests.oracles.refused_files import box, obj
from tests.oracles.tiny_instances import detectron2_instances


def truth(*objects: tuple[tuple[int, int, int, int], int, bool]) -> GroundTruth:
    """Build objects from ((xmin, ymin, xmax, ymax), class, difficult), 1-based inclusive."""
    return GroundTruth(
        np.array([box for box, _, _ in objects], dtype=np.float64).reshape(-1, 4),
        np.array([label for _, label, _ in objects], dtype=np.int64),
        np.array([difficult for _, _, difficult in objects], dtype=bool),
    )


def evaluate(found: VOCDetections, truths: dict, names: list[str], year: int) -> dict[str, float]:
    return summarize(match(found, truths, len(names)), names, year)


def detect(num_classes: int, *found: tuple[str, tuple[float, ...], float, int]) -> VOCDetections:
    """Build detections from (image id, 1-based inclusive box, score, class)."""
    detections = VOCDetections(num_classes)
    for image_id, (xmin, ymin, xmax, ymax), score, label in found:
        box = np.array([[xmin - 1, ymin - 1, xmax, ymax]], dtype=np.float32)
        detections.add(image_id, box, np.float32([score]), np.array([label]))
    return detections


A, B, ELSEWHERE = (1, 1, 10, 10), (31, 31, 40, 40), (50, 50, 60, 60)


@pytest.mark.parametrize(
    ("objects", "found", "ap_2007", "ap_2012"),
    [
        pytest.param([A], [A], 100, 100, id="exactly"),
        # Ranked: false, true. Precision at every recall is 1/2.
        pytest.param([A], [ELSEWHERE, A], 50, 50, id="a false alarm before the hit"),
        # Recall 1/2 at precision 1: 6 of the 11 points (0 … .5), and half of the area.
        pytest.param([A, B], [A], 600 / 11, 50, id="half of the objects"),
        # True, false (duplicate), true: precision 1, 1/2, 2/3; envelope 1 up to 1/2, then 2/3.
        pytest.param([A, B], [A, A, B], 100 * (6 + 10 / 3) / 11, 250 / 3, id="a duplicate"),
    ],
)
def test_by_hand(objects, found, ap_2007, ap_2012):
    truths = {"a": truth(*((box, 0, False) for box in objects))}
    ranked = detect(1, *(("a", box, 0.9 - 0.1 * i, 0) for i, box in enumerate(found)))
    for year, ap in ((2007, ap_2007), (2012, ap_2012)):
        names = ["bbox/AP", "bbox/AP50", "bbox/AP75", "bbox/AP-cell", "bbox/AP50-cell"]
        metrics = evaluate(ranked, truths, ["cell"], year)
        assert metrics == pytest.approx(dict.fromkeys(names, ap))


@pytest.mark.parametrize("found", [[A, B], [B]])
def test_difficult_objects_count_neither_way(found):
    """The detection of a difficult object is no false alarm, and its miss is no miss."""
    objects = {"a": truth((A, 0, True), (B, 0, False))}
    ranked = detect(1, *(("a", box, 0.9 - 0.1 * i, 0) for i, box in enumerate(found)))
    assert evaluate(ranked, objects, ["x"], 2012)["bbox/AP50"] == pytest.approx(100.0)


@pytest.mark.parametrize(
    "height, side, expected",
    [
        # IoU exactly 0.6: found at .50 and .55, not at .60 or above.
        pytest.param(6, 10, (20, 100, 0), id="strict"),
        # IoU .73 counts up to .70, not for AP75; .77 counts for it.
        pytest.param(73, 100, (50, 100, 0), id="below three quarters"),
        pytest.param(77, 100, (60, 100, 100), id="above three quarters"),
    ],
)
def test_thresholds_are_strict_and_separate(height, side, expected):
    whole, found = (1, 1, 10, side), (1, 1, 10, height)
    assert inclusive_iou(*(np.array([b], float) for b in (found, whole))) == [height / side]
    ranked = detect(1, ("a", found, 0.9, 0))
    metrics = evaluate(ranked, {"a": truth((whole, 0, False))}, ["x"], 2012)
    means = tuple(metrics[f"bbox/{name}"] for name in ("AP", "AP50", "AP75"))
    assert means == pytest.approx(expected)


def test_rounding_equals_text_for_many_numbers():
    rng = np.random.default_rng(0)
    boxes = rng.uniform(0, 1500, (500, 4)).astype(np.float32)
    boxes[:100] = np.round(boxes[:100] * 4) / 4  # exact ties such as .25 and .75
    scores = rng.uniform(0, 1, 500).astype(np.float32)
    detections = VOCDetections(1)
    detections.add("a", boxes, scores, np.zeros(500, dtype=int))
    _, rounded_scores, rounded = detections.of_class(0)
    shifted = boxes + np.float32([1, 1, 0, 0])
    assert rounded.tolist() == [[float(f"{x:.1f}") for x in row] for row in shifted]
    assert rounded_scores.tolist() == [float(f"{s:.3f}") for s in scores.tolist()]


@pytest.mark.parametrize("year", [2007, 2012])
def test_classes_without_an_object_are_left_out_of_the_mean(year):
    """And Detectron2's own means, which count them, have names of their own."""
    objects = {"a": truth(((1, 1, 10, 10), 0, False), ((20, 20, 30, 30), 2, True)), "b": truth()}
    found = detect(3, ("a", (1, 1, 10, 10), 0.9, 0), ("b", (1, 1, 10, 10), 0.8, 1))
    metrics = evaluate(found, objects, ["x", "absent", "difficult"], year)
    assert metrics["bbox/AP"] == metrics["bbox/AP50"] == metrics["bbox/AP-x"] == pytest.approx(100)
    assert np.isnan(metrics["bbox/AP-absent"]) and np.isnan(metrics["bbox/AP50-difficult"])
    # Under the area metric Detectron2 divides by the number of objects of the absent class.
    theirs = [metrics[name] for name in DETECTRON2_MEANS]
    expected = [100 / 3] * 3 if year == 2007 else [np.nan] * 3
    assert theirs == pytest.approx(expected, nan_ok=True)


def test_detectron2s_means_are_named_only_where_they_differ():
    metrics = evaluate(VOCDetections(1), {"a": truth(((1, 1, 10, 10), 0, False))}, ["x"], 2007)
    assert set(metrics.values()) == {0.0} and not set(DETECTRON2_MEANS) & set(metrics)
    nothing = evaluate(VOCDetections(1), {"a": truth()}, ["x"], 2007)
    assert np.isnan(nothing["bbox/AP"])


def test_curves_by_hand():
    recall, precision = np.array([0.2, 0.2, 0.6]), np.array([1.0, 0.5, 0.6])
    assert ap_area(recall, precision) == pytest.approx(0.2 * 1 + 0.4 * 0.6)
    # points 0, .1, .2 reach 1; .3 … .6 reach .6; numpy's .6 is 0.6000000000000001 > .6
    assert ap_11_points(recall, precision) == pytest.approx((3 * 1 + 3 * 0.6) / 11)


NAMES = ("cat", "dog", "cow", "absent", "undetected")


def random_case(
    seed: int, *, absent: bool
) -> tuple[dict[str, GroundTruth], list[tuple[str, np.ndarray, ...]]]:
    """Images with objects and detections near, on and away from them; many equal scores."""
    rng = np.random.default_rng(seed)
    objects, found = {}, []
    for index in range(40):
        image_id = f"{index:06d}"
        count = rng.integers(0, 6)
        low = rng.integers(1, 150, (count, 2))
        boxes = np.concatenate([low, low + rng.integers(0, 80, (count, 2))], axis=1)
        labels = rng.choice([0, 0, 1, 2, 4] if absent else [0, 1, 2, 3, 4], count)
        objects[image_id] = GroundTruth(
            boxes.astype(np.float64), labels.astype(np.int64), rng.random(count) < 0.2
        )
        copies = np.repeat(np.arange(count), rng.integers(0, 4, count))
        jitter = rng.normal(0, 4, (len(copies), 4)) * (rng.random((len(copies), 1)) < 0.8)
        near = boxes[copies] - [1, 1, 0, 0] + jitter
        low = rng.uniform(0, 150, (4, 2))
        far = np.concatenate([low, low + rng.uniform(1, 80, (4, 2))], axis=1)
        all_boxes = np.concatenate([near.reshape(-1, 4), far]).astype(np.float32)
        wrong = rng.random(len(copies)) < 0.1
        detected = np.concatenate([np.where(wrong, 3, labels[copies]), rng.integers(0, 4, 4)])
        keep = detected != 4
        scores = np.round(rng.uniform(0.05, 1, len(all_boxes)), rng.integers(1, 5))
        found.append((image_id, all_boxes[keep], scores[keep].astype(np.float32), detected[keep]))
    return objects, found


def write_annotations(folder: Path, objects: dict[str, GroundTruth]) -> None:
    (folder / "Annotations").mkdir(parents=True)
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    (folder / "ImageSets" / "Main" / "test.txt").write_text("\n".join(objects) + "\n")
    for image_id, truths in objects.items():
        rows = zip(truths.boxes.astype(int), truths.classes, truths.difficult, strict=True)
        more = "<pose>x</pose><truncated>0</truncated><difficult>{:d}</difficult>"
        parts = [obj(NAMES[label], box(*sides) + more.format(hard)) for sides, label, hard in rows]
        xml = f"<annotation>{''.join(parts)}</annotation>"
        (folder / "Annotations" / f"{image_id}.xml").write_text(xml)


@pytest.mark.detectron2
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("year", [2007, 2012])
@pytest.mark.parametrize("seed", range(4))
def test_equal_to_detectron2(tmp_path, seed, year, absent):
    """Detectron2's evaluator gives the same on the same predictions, to 1e-6 (it is bitwise)."""
    from detectron2.data import MetadataCatalog
    from detectron2.evaluation import PascalVOCDetectionEvaluator

    objects, found = random_case(seed, absent=absent)
    write_annotations(tmp_path, objects)
    name = f"random_voc_{seed}_{year}"
    MetadataCatalog.get(name).set(
        thing_classes=list(NAMES), dirname=str(tmp_path), split="test", year=year
    )
    reference = PascalVOCDetectionEvaluator(name)
    reference.reset()
    ours = VOCDetections(len(NAMES))
    for image_id, boxes, scores, labels in found:
        found_here = {"boxes": boxes, "scores": scores, "classes": labels}
        instances = detectron2_instances(found_here, 300, 300)
        reference.process([{"image_id": image_id}], [{"instances": instances}])
        ours.add(image_id, boxes, scores, labels)
    with np.errstate(invalid="ignore"):
        expected = reference.evaluate()["bbox"]
    metrics = evaluate(ours, objects, NAMES, year)
    # With a class that the split does not have, Detectron2's arithmetic goes by a name of its own.
    for key, value in expected.items():
        name = f"bbox/{key}{'_detectron2' * absent}"
        np.testing.assert_allclose(metrics[name], value, rtol=0, atol=1e-6)
    assert metrics["bbox/AP"] > 5 and np.isnan(metrics["bbox/AP-absent"]) == absent
    # What is detected but absent has no recall in Detectron2.
    assert np.isnan(expected["AP"]) == (absent and year == 2012)
    assert len(IOU_THRESHOLDS) == 10
