"""What belongs to Detectron2's users: their catalog, test-time augmentation, the model zoo."""

from pathlib import Path

import pytest

from detection.config.task import load_task
from detection.train_net import find_config
from moco.common.cfgnode import flatten
from tests.oracles.tiny_coco import write_coco

pytestmark = [
    pytest.mark.detectron2,
    pytest.mark.slow,
    pytest.mark.usefixtures("detectron2", "fresh_cache"),
]

NAMES = ("DATASETS.TRAIN", "('catalog_train',)", "DATASETS.TEST", "('catalog_test',)")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of the user's and have it in PYTHONPATH; returns its name."""
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
    """The command line of the small task, one iteration, without a folder in VOC layout."""

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
    """A path out of its folder is read as any other file."""
    (tmp_path / "evil.yaml").write_text("SEED: !!python/object/apply:os.getpid []\n")
    name = "../" * 20 + str(tmp_path / "evil.yaml")[1:]
    assert find_config(name, "detectron2", tmp_path) == name
    assert find_config("COCO-Detection/none.yaml", "detectron2", tmp_path) == (
        "COCO-Detection/none.yaml"
    )
    assert find_config("COCO-Detection/retinanet_R_50_FPN_1x.yaml", "embedded", tmp_path)
