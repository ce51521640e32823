"""Interfaces for users of Detectron2: the model zoo, their catalog, their path handlers."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from detection.config.task import load_task
from detection.data.mapper import AugmentationParams, Mapper, SeededMapper
from detection.datasets.base import Split
from detection.evaluation.visualize import render
from detection.train_net import find_config
from moco.common.cfgnode import flatten
from moco.common.errors import DataError
from tests.oracles.tiny_coco import write_coco

pytestmark = [
    pytest.mark.detectron2,
    pytest.mark.slow,
    pytest.mark.usefixtures("detectron2", "fresh_cache"),
]

NAMES = ("DATASETS.TRAIN", "('catalog_train',)", "DATASETS.TEST", "('catalog_test',)")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a user's module into PYTHONPATH and return its name."""
    write_coco(tmp_path, {"train2017": 4, "val2017": 2})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def write(name: str, evaluator: str = "coco") -> str:
        lines = ["from detectron2.data import MetadataCatalog"]
        lines += ["from detectron2.data.datasets import register_coco_instances"]
        for split, fold in (("train", "train2017"), ("test", "val2017")):
            file = str(tmp_path / "coco" / "annotations" / f"instances_{fold}.json")
            folder = str(tmp_path / "coco" / fold)
            lines += [f"register_coco_instances('catalog_{split}', {{}}, {file!r}, {folder!r})"]
        lines += [f"vars(MetadataCatalog.get('catalog_test'))['evaluator_type'] = {evaluator!r}"]
        (tmp_path / f"{name}.py").write_text("\n".join(lines))
        return name

    return write


@pytest.fixture
def arguments(small_config, small_options, narrow_r18_file):
    """Return the arguments of the small task for one iteration, without a VOC folder."""

    def build(folder: Path, *opts: object, flags: tuple[str, ...] = ()) -> list[str]:
        values = dict(zip(small_options[::2], small_options[1::2], strict=True))
        del values["DATASETS.VOC_DIR"]
        values |= {"MODEL.RESNETS.RES2_OUT_CHANNELS": 16, "MODEL.WEIGHTS": narrow_r18_file}
        values |= {
            "SOLVER.MAX_ITER": 1,
            "SOLVER.STEPS": (),
            "SOLVER.WARMUP_ITERS": 0,
            "OUTPUT_DIR": folder,
        }
        argv = ["--config-file", small_config, "--engine", "detectron2", *flags]
        return argv + [str(x) for pair in values.items() for x in pair] + [str(x) for x in opts]

    return build


@pytest.mark.parametrize(
    ("name", "key", "value", "recipe"),
    [
        ("COCO-Detection/faster_rcnn_R_50_FPN_1x", "MODEL.RESNETS.DEPTH", 50, True),
        ("COCO-Detection/retinanet_R_50_FPN_1x", "MODEL.META_ARCHITECTURE", "RetinaNet", True),
        ("COCO-Detection/faster_rcnn_R_101_FPN_3x", "MODEL.RESNETS.DEPTH", 101, False),
        ("Misc/cascade_mask_rcnn_R_50_FPN_1x", "MODEL.ROI_HEADS.NAME", "CascadeROIHeads", False),
    ],
)
def test_names_of_the_model_zoo(name, key, value, recipe, data_of, tmp_path):
    data_of("coco")
    file = find_config(f"{name}.yaml", "detectron2", tmp_path)
    task = load_task(file, ["MODEL.WEIGHTS", "random", "MODEL.DEVICE", "cpu"], "detectron2")
    assert task.name == Path(name).stem and task.train[0].name == "coco_2017_train"
    assert flatten(task.cfg)[key] == value
    assert (task.recipe.label == "not a task of the paper") is not recipe


def test_classes_of_a_retinanet_follow_the_data(voc_folder, tmp_path):
    file = find_config("COCO-Detection/retinanet_R_50_FPN_1x.yaml", "detectron2", tmp_path)
    opts = ["MODEL.WEIGHTS", "random", "DATASETS.VOC_DIR", str(voc_folder)]
    cfg = load_task(file, opts, "detectron2").cfg
    assert cfg.MODEL.RETINANET.NUM_CLASSES == 3
    assert cfg.MODEL.ANCHOR_GENERATOR.SIZES[1] == [64, 64 * 2 ** (1.0 / 3), 64 * 2 ** (2.0 / 3)]


def test_only_files_of_the_model_zoo_are_found(tmp_path):
    """A path that leaves the zoo's folder is read as any other file."""
    (tmp_path / "evil.yaml").write_text("SEED: !!python/object/apply:os.getpid []\n")
    name = "../" * 20 + str(tmp_path / "evil.yaml")[1:]
    assert find_config(name, "detectron2", tmp_path) == name
    assert find_config("COCO-Detection/none.yaml", "detectron2", tmp_path) == (
        "COCO-Detection/none.yaml"
    )
    assert find_config("COCO-Detection/retinanet_R_50_FPN_1x.yaml", "embedded", tmp_path)


@pytest.fixture
def records(tmp_path):
    """Read a split with one object of these keys, in an image that EXIF rotates."""
    from detectron2.data import DatasetCatalog, MetadataCatalog

    from detection.d2.catalog import CatalogSource

    exif = Image.Exif()
    exif[274] = 6  # shown as 30 x 50
    path = tmp_path / "turned.jpg"
    Image.new("RGB", (50, 30)).save(path, exif=exif)

    def read(file_name: str = str(path), **item: object) -> Split:
        record = {
            "file_name": file_name,
            "image_id": 1,
            "annotations": [{"category_id": 0, **item}],
        }
        name = f"completed_{len(DatasetCatalog)}"
        DatasetCatalog.register(name, lambda: [record])
        MetadataCatalog.get(name).set(thing_classes=["a"], evaluator_type="coco")
        return CatalogSource(name).read()

    return read


@pytest.mark.parametrize(
    ("mode", "box", "expected"),
    [
        ("XYXY_ABS", [1, 2, 3, 4], [1, 2, 3, 4]),
        ("XYXY_ABS", np.array([1, 2, 3, 4]), [1, 2, 3, 4]),
        ("XYWH_ABS", (1.5, 2, 3, 4), [1.5, 2, 3, 4]),
        ("XYWHA_ABS", [10.0, 20.0, 8.0, 4.0, 90.0], [8.0, 16.0, 12.0, 24.0]),
    ],
)
def test_records_are_completed(mode, box, expected, records):
    """Sizes come from the header, and boxes are Python numbers in a supported mode."""
    from detectron2.structures import BoxMode

    (record,) = records(bbox=box, bbox_mode=BoxMode[mode]).records
    assert (record["width"], record["height"]) == (30, 50)
    (item,) = record["annotations"]
    kept = mode if mode != "XYWHA_ABS" else "XYXY_ABS"
    assert item["bbox_mode"] == BoxMode[kept].value
    assert item["bbox"] == pytest.approx(expected, abs=1e-4)
    assert [type(value) for value in item["bbox"]] == [type(value) for value in expected]


@pytest.mark.parametrize(
    "item",
    [
        {"bbox": [0.1, 0.1, 0.5, 0.5], "bbox_mode": 2},
        {"bbox": [1, 2, 3, 4]},
        {"bbox": [1, 2, 3], "bbox_mode": 0},
        {"bbox": [1, 2, 3, 4], "bbox_mode": 9},
    ],
    ids=["relative", "no mode", "three numbers", "unknown mode"],
)
def test_boxes_that_cannot_be_converted_are_refused(item, records):
    with pytest.raises(DataError, match=r"turned\.jpg: cannot convert the box .* to XYXY_ABS"):
        records(**item)


def test_paths_of_the_users_handler(records, tmp_path):
    """Sizes, samples and visualizations are read through Detectron2's PathManager."""
    from detectron2.utils.file_io import PathManager
    from iopath.common.file_io import PathHandler

    from detection.d2.engine import open_url

    class Store(PathHandler):
        def _get_supported_prefixes(self) -> list[str]:
            return ["store://"]

        def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: object):
            return open(tmp_path / path.removeprefix("store://"), mode)  # type: ignore[call-overload]

    PathManager.register_handler(Store(), allow_override=True)
    (record,) = records("store://turned.jpg", bbox=[1, 2, 9, 9], bbox_mode=0).records
    assert (record["width"], record["height"]) == (30, 50)
    sample = Mapper(100, "RGB", open_url=open_url)(record, AugmentationParams(50))
    assert sample["image"].shape == (3, 83, 50) and len(sample["boxes"]) == 1
    assert SeededMapper(dict, open_url)(record, 0)["image_id"] == 1
    nothing = {"boxes": np.zeros((0, 4)), "scores": np.zeros(0), "classes": np.zeros(0, dtype=int)}
    assert render(record, nothing, ["a"], open_url=open_url).size == (30, 50)
    with pytest.raises(DataError, match=r"store://missing\.jpg: cannot be opened"):
        records("store://missing.jpg", bbox=[1, 2, 9, 9], bbox_mode=0)
