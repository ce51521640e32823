"""The registry of formats: names, official counts, and a format that is added from outside."""

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from PIL import Image

from detection.config.task import default_task
from detection.datasets import read_split
from detection.datasets.__main__ import main
from detection.datasets.base import FORMATS, Format, Split, formats, official_counts
from detection.datasets.files import read_json
from moco.common.errors import DataError, UserError

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class ToySource:
    """A list of files of one class, each with one box."""

    name: str
    file: str

    def present(self) -> bool:
        return Path(self.file).is_file()

    def read(self) -> Split:
        rows, sha256 = read_json(self.file)
        if not isinstance(rows, dict):
            raise DataError(f"{self.file}: expected an object")
        box = {"bbox": [0, 0, 4, 4], "bbox_mode": 0, "category_id": 0}
        records = [
            {
                "file_name": str(Path(self.file).parent / name),
                "image_id": name,
                "width": width,
                "height": height,
                "annotations": [box],
            }
            for name, (width, height) in rows.items()
        ]
        return Split(self.name, "coco", ("toy",), tuple(records), sha256)


def toy() -> Format:
    """Return a format of this test."""

    def sources(root: str) -> Sequence[ToySource]:
        return [ToySource("toy_train", str(Path(root) / "toy" / "train.json"))]

    return Format(
        sources=sources,
        counts={"toy_train": (3, 3)},
        tree="toy/train.json",
        download="get it into {root}/toy",
        tasks={"configs/toy.yaml": ("toy_train",)},
        private=("toy_test",),
    )


def test_a_format_from_outside(register, tmp_path, monkeypatch, capsys):
    """Read, checked and examined by the doctor, without a change of any file."""
    register(FORMATS, toy)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    assert main(["doctor", "toy"]) == 3
    assert f"get it into {tmp_path}/toy" in capsys.readouterr().out
    (tmp_path / "toy").mkdir()
    file = tmp_path / "toy" / "train.json"
    file.write_text("[]")
    with pytest.raises(DataError, match=r"train\.json"):
        read_split("toy_train", default_task())
    assert main(["doctor", "toy"]) == 3 and "WRONG  toy_train" in capsys.readouterr().out
    Image.new("RGB", (8, 6)).save(file.with_name("a.png"))
    file.write_text(json.dumps({"a.png": (8, 6)}))
    split = read_split("toy_train", default_task())
    assert split.classes == ("toy",) and split.records[0]["width"] == 8
    assert split.notes == ("1 image, the official split has 3",)
    assert main(["doctor", "toy", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "part   toy_train  1 image, 1 object" in shown and "configs/toy.yaml" in shown
    file.write_text(json.dumps({"a.png": (9, 9)}))
    assert main(["doctor", "toy", "--verify"]) == 3 and "a.png" in capsys.readouterr().out
    with pytest.raises(UserError, match="not public"):
        read_split("toy_test", default_task())


def datasets_of(config: Path) -> dict[str, tuple[str, ...]]:
    """DATASETS of a YAML file and of those that it is based on."""
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    found = datasets_of(config.parent / content["_BASE_"]) if "_BASE_" in content else {}
    own = content.get("DATASETS", {}).items()
    return found | {key: tuple(ast.literal_eval(value)) for key, value in own}


@pytest.mark.parametrize("kind", formats())
def test_counts_and_tasks_are_of_the_formats_splits(kind):
    names = {source.name for source in formats()[kind].sources("x")}
    assert names == set(formats()[kind].counts)
    for config, splits in formats()[kind].tasks.items():
        datasets = datasets_of(ROOT / config)
        assert (*datasets["TRAIN"], *datasets["TEST"]) == splits and names.issuperset(splits)


def test_official_counts():
    assert official_counts("coco_2017_train") == (118287, 860001)
    assert official_counts("keypoints_coco_2017_val") == (5000, 11004)
    assert official_counts("voc_2012_sem_seg_train_aug") == (10582, 0)
    assert official_counts("lvis_v1_val") == (19809, 244707)
    assert official_counts("mine") == (0, 0)
    assert sum(images for f in formats().values() for images, _ in f.counts.values()) == 677283


def test_a_split_of_too_many_classes():
    """COCO's metric took 8 GB for 20,000 of them, and aborted for 100,000."""
    with pytest.raises(DataError, match="own: got 10001 classes, expected at most 10000"):
        Split("own", "coco", tuple(map(str, range(10_001))), (), "0")
