"""One dataset in VOC, COCO and YOLO layout: the doctor accepts all, and a run has the same AP."""

import json
from pathlib import Path

import numpy as np
import pytest

from detection.config.task import default_task, load_task
from detection.datasets import read_split
from detection.datasets.__main__ import main as doctor
from detection.evaluation.coco import split_annotations
from detection.train_net import main as train
from moco.common.run import read_record
from tests.detection.datasets.conftest import read
from tests.oracles.relayout import as_roboflow, as_yolo, corners
from tests.oracles.shapes import paint, save_jpeg
from tests.oracles.small_tasks import SMALL_VOC, run


def three_layouts(voc: Path, folder: Path) -> dict[str, tuple[str, Path, list[str]]]:
    """Write the other two; return flag and value of the doctor, and keys of a task, by layout."""
    cfg = default_task()
    cfg.DATASETS.VOC_DIR = str(voc)
    splits = {"train": "trainval", "test": "test"}
    splits = {name: read_split(f"{voc.name}_{own}", cfg) for name, own in splits.items()}
    yolo, coco = as_yolo(folder / "yolo", splits), as_roboflow(folder / "coco", splits)
    return {
        "voc": ("--voc-dir", voc, ["DATASETS.VOC_DIR", str(voc)]),
        "coco": ("--coco-json", coco, ["DATASETS.COCO_DIR", str(coco)]),
        "yolo": ("--yolo", yolo, ["DATASETS.YOLO_YAML", str(yolo)]),
    }


def assert_same_splits(layouts, config, capsys) -> None:
    """Let the doctor read all; each split has the same images, classes and boxes."""
    found = {}
    for layout, (flag, value, keys) in layouts.items():
        assert doctor(["doctor", flag, str(value), "--verify"]) == 0
        assert "WRONG" not in capsys.readouterr().out
        task = load_task(config, [*keys, "MODEL.WEIGHTS", "random"], "embedded")
        found[layout] = [
            [
                Path(record["file_name"]).name,
                *(
                    [item["category_id"], *(round(side, 9) for side in corners(item))]
                    for item in record["annotations"]
                ),
            ]
            for split in (*task.train, task.test)
            for record in split.records
        ]
    assert found["voc"] == found["coco"] == found["yolo"] != []


@pytest.mark.slow
def test_a_run_has_equal_ap(voc_folder, small_config, tmp_path, capsys):
    layouts = three_layouts(voc_folder, tmp_path)
    assert_same_splits(layouts, small_config, capsys)
    values = {**SMALL_VOC, "DATALOADER.NUM_WORKERS": 0, "MODEL.WEIGHTS": "random"}
    options = [str(word) for pair in values.items() for word in pair]
    found = {}
    for layout, (_, _, keys) in layouts.items():
        words = [*keys, *options, "OUTPUT_DIR", str(tmp_path / layout / "run")]
        assert train(["--config-file", small_config, "--engine", "embedded", *words]) == 0
        found[layout] = read_record(tmp_path / layout / "run" / "run.json").metrics
    assert found["voc"] == found["coco"] == found["yolo"]
    assert {"bbox/AP", "bbox/AP50", "bbox/APs", "bbox/AP-red"} <= found["voc"].keys()


@pytest.mark.slow
def test_polygons_are_masks(narrow_r50_file, tmp_path):
    """An FPN task with masks on YOLO polygons, and on the same objects in COCO's format."""
    rng, data = np.random.RandomState(0), {"train": 4, "val": 2}
    yolo, coco = tmp_path / "yolo", []
    for name, number in data.items():
        (yolo / "labels" / name).mkdir(parents=True)
        for i in range(number):
            image, shapes = paint(rng, i % 3)
            save_jpeg(image, yolo / "images" / name / f"{i}.jpg")
            rows = [(s.kind, np.divide(s.corners, image.size).ravel().tolist()) for s in shapes]
            lines = [" ".join(map(str, (kind, *numbers))) + "\n" for kind, numbers in rows]
            (yolo / "labels" / name / f"{i}.txt").write_text("".join(lines))
    places = "".join(f"{name}: images/{name}\n" for name in data)
    (yolo / "data.yaml").write_text(f"{places}names: [red, blue, green]\n")
    for name, key in zip(data, ("TRAIN", "TEST"), strict=True):
        split = read(f"yolo_{name}", YOLO_YAML=yolo / "data.yaml")
        content = split_annotations(split)
        assert isinstance(content, dict)
        for row in content["images"]:
            row["file_name"] = Path(row["file_name"]).name
        file = yolo / "images" / name / f"{name}.json"
        file.write_text(json.dumps(content))
        coco += [f"DATASETS.COCO_{key}_JSON", file]
    task = "coco/mask_rcnn_R_50_FPN_1x"
    one, other = (
        run(task, narrow_r50_file, tmp_path / layout, "embedded", *keys).metrics
        for layout, keys in (("y", ["DATASETS.YOLO_YAML", yolo / "data.yaml"]), ("c", coco))
    )
    assert one == other and {"bbox/AP", "segm/AP", "segm/APs"} <= one.keys()


@pytest.mark.slow
def test_real_images_are_read_equally(shared_data, small_config, tmp_path, capsys):
    """BCCD: 292 images for training, 72 for testing."""
    assert_same_splits(three_layouts(shared_data / "bccd", tmp_path), small_config, capsys)
