"""Match records: AP from them is bitwise identical to the evaluators'; no others are read."""

import sys
import zipfile

import numpy as np
import pytest

from detection.evaluation import coco, voc
from detection.evaluation.matches import parse_matches, write_matches
from detection.evaluation.metrics import MATCHES_NAME
from moco.common.errors import DataError
from tests.detection.evaluation.test_coco import evaluator, lvis_annotations, ours
from tests.detection.evaluation.test_voc import NAMES, random_case
from tests.oracles.tiny_instances import answers, coco_annotations, coco_split


def stored_matches(path):
    return parse_matches(path.read_bytes(), path)


def voc_evaluator(folder, year):
    truth, found = random_case(0, absent=True)
    result = voc.VOCEvaluator("tiny", NAMES, truth, year, folder)
    for image_id, boxes, scores, classes in found:
        prediction = {"boxes": boxes, "scores": scores, "classes": classes}
        result.add({"image_id": image_id}, prediction)
    return result


@pytest.mark.parametrize("year", [2007, 2012])
def test_voc_ap_again(tmp_path, year):
    own = voc_evaluator(tmp_path, year)
    metrics = own.evaluate()
    stored = stored_matches(tmp_path / MATCHES_NAME)
    assert (stored.metric, len(stored.images)) == (f"voc_{year}", 40)
    again = voc.summarize(stored.kinds["bbox"], own.class_names, year)
    assert all(np.array_equal(again[n], metrics[n], equal_nan=True) for n in metrics)
    assert 0 < metrics["bbox/AP"] < metrics["bbox/AP50"] < 100
    matches = stored.kinds["bbox"]
    assert matches.ignored.any() and not (matches.true & matches.ignored).any()
    assert matches.scores.tolist() == sorted(matches.scores[matches.of_class(0)])[::-1] + [
        score for c in range(1, 5) for score in sorted(matches.scores[matches.of_class(c)])[::-1]
    ]


@pytest.mark.parametrize("package", ["hotcoco", "pycocotools"])
@pytest.mark.parametrize("seed, keypoints", [(0, 0), (1, 0), (3, 17)])
def test_coco_ap_again(tmp_path, monkeypatch, package, seed, keypoints):
    pytest.importorskip(package)
    if package == "pycocotools":
        monkeypatch.setitem(sys.modules, "hotcoco", None)
    content = coco_annotations(seed, classes=1 if keypoints else 4, keypoints=keypoints)
    first = min(annotation["id"] for annotation in content["annotations"])
    for annotation in content["annotations"]:
        annotation["id"] -= first  # one has the id 0, which the packages take differently
    split = coco_split(tmp_path / "tiny.json", content)
    kinds = ["bbox", "keypoints" if keypoints else "segm"]
    metrics = ours(split, answers(split, content, seed, keypoints=keypoints), kinds, tmp_path)
    stored = stored_matches(tmp_path / "ours" / MATCHES_NAME)
    assert stored.metric == "coco" and stored.images == tuple(
        str(image["id"]) for image in sorted(content["images"], key=lambda image: image["id"])
    )
    for kind in kinds:
        again = coco.summarize(stored.kinds[kind])
        assert again == {name: metrics[f"{kind}/{name}"] for name in again} and again["AP"] > 0


@pytest.mark.parametrize("most", [300, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lvis_ap_again(tmp_path, monkeypatch, most, seed):
    """Without what nobody looked for in an image, and what is beyond its limit of detections."""
    pytest.importorskip("hotcoco")
    monkeypatch.setattr(coco.LVISEvaluator, "per_image", most)
    content = lvis_annotations(seed)
    split = coco_split(tmp_path / "lvis.json", content, "lvis")
    predictions = answers(split, content, seed)
    metrics = ours(split, predictions, ["bbox", "segm"], tmp_path, cls=coco.LVISEvaluator)
    stored = stored_matches(tmp_path / "ours" / MATCHES_NAME)
    assert stored.metric == "lvis"
    for kind, matches in stored.kinds.items():
        again = coco.summarize(matches)
        expected = {name: metrics[f"{kind}/{name}"] for name in again}
        assert again == pytest.approx(expected, abs=1e-9) and again["AP"] > 0
        assert max(np.bincount(matches.images)) <= most
    assert most < 300 or matches.ignored.any()
    assert sorted(stored.kinds) == ["bbox", "segm"]
    assert len(stored.kinds["bbox"].scores) < sum(len(p["scores"]) for p in predictions)


def test_without_predictions_there_are_objects_alone(tmp_path):
    content = coco_annotations(0, classes=4, keypoints=0)
    folder = tmp_path / "run"
    evaluator(coco_split(tmp_path / "tiny.json", content), ["bbox"], folder).evaluate()
    found = stored_matches(folder / MATCHES_NAME).kinds["bbox"]
    assert len(found.scores) == 0 and len(found.object_classes) > 0


def test_what_is_no_file_of_matches_is_refused(tmp_path, monkeypatch):
    voc_evaluator(tmp_path, 2007).evaluate()
    path, other = tmp_path / MATCHES_NAME, tmp_path / "other.npz"
    arrays = dict(np.load(path))

    def refused(**changes):
        np.savez(other, **{**arrays, **changes})
        with pytest.raises(DataError, match=r"other\.npz"):
            stored_matches(other)

    refused(metric=np.array(["x"]))
    refused(images=np.array([object()]))  # pickled
    refused(images=arrays["images"][:3])  # others are named
    refused(**{"bbox.scores": arrays["bbox.scores"][:-1]})
    refused(**{"bbox.scores": arrays["bbox.scores"].astype("<f4")})
    refused(**{"bbox.scores": np.full_like(arrays["bbox.scores"], np.nan)})
    refused(**{"bbox.classes": arrays["bbox.classes"][::-1]})
    refused(**{"bbox.true": arrays["bbox.true"][:, None]})
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(other, "w") as made:
        for info in archive.infolist():
            content = archive.read(info)
            made.writestr(info.filename, content.replace(b"(40,)", b"(10000000000,)"))
    for content in (other.read_bytes(), path.read_bytes()[:-40], b"", b"PK"):
        other.write_bytes(content)
        with pytest.raises(DataError):
            stored_matches(other)
    monkeypatch.setattr("detection.evaluation.matches.MAX_MATCHES_BYTES", 1000)
    with pytest.raises(DataError, match="1000 bytes"):
        stored_matches(path)


def test_the_same_matches_make_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        voc_evaluator(tmp_path / name, 2007).evaluate()
    a, b = ((tmp_path / name / MATCHES_NAME).read_bytes() for name in ("a", "b"))
    assert a == b
    write_matches(tmp_path, stored_matches(tmp_path / "a" / MATCHES_NAME))
    assert (tmp_path / MATCHES_NAME).read_bytes() == a
