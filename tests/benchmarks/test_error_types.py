"""Error types: computed by hand, compared with tidecv, and shown in a report."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.error_types import error_types, main
from benchmarks.report.records import FinishedRun, collect
from detection.datasets.base import Split
from detection.datasets.voc import GroundTruth
from detection.evaluation.coco import COCOEvaluator
from detection.evaluation.metrics import ERRORS_NAME
from detection.evaluation.predictions import write_voc
from moco.common.errors import DataError
from moco.common.run import write_record
from tests.benchmarks.report.fake_runs import CONFIG, rendered, report, write_run
from tests.oracles.tiny_instances import answers, coco_annotations, coco_split

pytest.importorskip("hotcoco")


def voc_run(tmp_path, monkeypatch) -> FinishedRun:
    """Write a run on two cats, a dog, and a difficult cat, with one error of each type.

    The first cat is detected (IoU 1) and has a duplicate; the second one is classified as a dog;
    the dog has only a box with IoU 1/3 and, classified as a cat, one with IoU 0.25; one box is on
    the background.
    """
    boxes = [[1, 1, 100, 100], [201, 1, 300, 100], [1, 201, 100, 300], [201, 201, 300, 300]]
    classes, difficult = np.array([0, 0, 1, 0]), np.array([False, False, False, True])
    truth = GroundTruth(np.array(boxes, float), classes, difficult)
    kinds = ("voc_2007_test", "pascal_voc", ("cat", "dog"), (), "e" * 64)
    split = Split(*kinds, truth={"7": truth}, metadata={"year": 2007})
    rows = [
        (0, [0, 0, 100, 100], 0.9),  # right
        (0, [0, 0, 100, 98], 0.8),  # duplicate
        (1, [200, 0, 300, 100], 0.7),  # class
        (1, [50, 200, 150, 300], 0.6),  # localization
        (0, [60, 200, 160, 300], 0.5),  # both
        (0, [400, 400, 500, 500], 0.4),  # background
        (0, [200, 200, 300, 300], 0.3),  # on the difficult one: no error
    ]
    config, ap50 = CONFIG, 100 * (6 / 11 + 0) / 2  # 11 recall points; half of the cats are found
    folder = write_run(tmp_path / "run", config=config, metrics={"bbox/AP50": ap50})
    found = [{"image_id": "7", "category_id": c, "bbox": b, "score": s} for c, b, s in rows]
    write_voc(folder / "inference", "voc_2007_test", ("cat", "dog"), found)
    monkeypatch.setattr("detection.datasets.read_split", lambda name, cfg: split)
    return collect([tmp_path]).transfer[0]


def test_error_types_by_hand(tmp_path, monkeypatch):
    """A class half of which is found has precision 1 at 51 of the 101 recall points."""
    found = error_types(voc_run(tmp_path, monkeypatch))
    assert found["counts"] == {"Cls": 1, "Loc": 1, "Both": 1, "Dupe": 1, "Bkg": 1, "Miss": 0}
    assert found["ap50"] == pytest.approx(100 * 51 / 101 / 2, abs=1e-5)
    # If localized, the dog is found after the cat that is classified as a dog: precision 1/2.
    assert found["delta"]["Loc"] == pytest.approx(100 * 0.5 / 2, abs=1e-5)
    # If classified, the second cat is found after a right and a wrong box: precision 2/3.
    assert found["delta"]["Cls"] == pytest.approx(100 * 50 / 101 * (2 / 3) / 2, abs=1e-5)
    assert found["delta"]["Dupe"] == found["delta"]["Bkg"] == found["delta"]["Both"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_against_tidecv(tmp_path, monkeypatch, seed):
    pytest.importorskip("tidecv")
    from tidecv import TIDE
    from tidecv.data import Data

    content = coco_annotations(seed, classes=4, keypoints=0)
    content["annotations"] = [a for a in content["annotations"] if not a["iscrowd"]]
    used = {a["category_id"] for a in content["annotations"]}
    content["categories"] = [c for c in content["categories"] if c["id"] in used]
    split = coco_split(tmp_path / "a.json", content)
    contiguous = split.metadata["thing_dataset_id_to_contiguous_id"]
    ids = {own: given for given, own in contiguous.items()}
    config = {**CONFIG, "DATASETS.TEST": [split.name]}
    folder = tmp_path / "run" / "inference"
    evaluator = COCOEvaluator(
        split.name, str(tmp_path / "a.json"), ids, split.classes, ["bbox"], folder
    )
    random = np.random.default_rng(seed)
    for record, prediction in zip(split.records, answers(split, content, seed), strict=True):
        scores = random.random(len(prediction["scores"])).astype(np.float32)  # no ties
        evaluator.add(record, {**prediction, "scores": scores})
    metrics = evaluator.evaluate()
    run = SimpleNamespace(folder=tmp_path / "run", tested_on=(split.name,))
    run.record = SimpleNamespace(config=config, metrics=metrics)
    monkeypatch.setattr("detection.datasets.read_split", lambda name, cfg: split)

    truth, found = Data("truth", 100), Data("found", 100)
    for each in content["categories"]:
        truth.add_class(each["id"], each["name"])
    for image in content["images"]:
        truth.add_image(image["id"], str(image["id"]))
    for a in content["annotations"]:
        truth.add_ground_truth(a["image_id"], a["category_id"], a["bbox"])
    for row in json.loads((folder / f"{split.name}.json").read_text()):
        found.add_detection(row["image_id"], row["category_id"], row["score"], row["bbox"])
    theirs = TIDE().evaluate(truth, found, mode=TIDE.BOX)
    ours = error_types(run)
    assert ours["ap50"] == pytest.approx(theirs.ap, abs=1e-5) and ours["ap50"] > 0
    assert ours["counts"] == {k.short_name: v for k, v in theirs.count_errors().items()}
    for kind, delta in theirs.fix_main_errors().items():
        assert ours["delta"][kind.short_name] == pytest.approx(delta, abs=1e-4), kind


def test_as_many_detections_count_as_in_the_runs_metric(tmp_path, monkeypatch):
    boxes = [[12 * (i % 20), 12 * (i // 20), 10, 10] for i in range(150)]
    row = {"image_id": 1, "category_id": 1}
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 240, "height": 240}],
        "annotations": [
            {**row, "id": i, "bbox": box, "area": 100, "iscrowd": 0}
            for i, box in enumerate(boxes, 1)
        ],
        "categories": [{"id": 1, "name": "cat"}],
    }
    split = coco_split(tmp_path / "many.json", content)
    monkeypatch.setattr("detection.datasets.read_split", lambda name, cfg: split)
    found = [{**row, "bbox": box, "score": 1.0} for box in boxes]
    (tmp_path / "run" / "inference").mkdir(parents=True)
    (tmp_path / "run" / "inference" / "many.json").write_text(json.dumps(found))
    config = {**CONFIG, "DATASETS.TEST": ["many"], "TEST.COCO_MAX_DETECTIONS": 500}
    run = SimpleNamespace(folder=tmp_path / "run", tested_on=("many",))
    run.record = SimpleNamespace(config=config, metrics={"bbox/AP50": 100.0})
    assert error_types(run)["ap50"] == 100


def test_command_writes_what_the_report_shows(tmp_path, monkeypatch, capsys):
    run = voc_run(tmp_path, monkeypatch)
    assert "(TIDE)" not in rendered(report(tmp_path))["html"]
    main([str(tmp_path)])
    assert "Loc 25.0" in capsys.readouterr().out
    for name in ("md", "tex", "html", "terminal"):
        text = rendered(report(tmp_path))[name]
        assert "(TIDE)" in text and "localization" in text and "25.0" in text, name
    path = run.folder / ERRORS_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "delta": 3}))
    with pytest.raises(DataError, match=ERRORS_NAME):
        rendered(report(tmp_path))


@pytest.mark.parametrize("later", [{"metrics": {"bbox/AP50": 20.0}}, {"provenance": {"utc": "1"}}])
def test_what_was_made_of_an_earlier_run_is_not_read(tmp_path, monkeypatch, later):
    """A detector trained again in the same folder makes other errors."""
    run = voc_run(tmp_path, monkeypatch)
    main([str(tmp_path)])
    write_record(run.folder, replace(run.record, **later))
    for name, text in rendered(report(tmp_path)).items():
        assert "(TIDE)" not in text, name
        said = text.replace("\\", "")
        assert f"{ERRORS_NAME} of random, seed 0, belongs to another run and is ignored" in said, (
            name
        )
