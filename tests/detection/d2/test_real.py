"""VOC and COCO tasks on real images in both engines, unmodified but for sizes and durations."""

import json
import math

import pytest

from detection.train_net import main
from moco.common.run import read_record
from tests.detection.conftest import ROOT, SLOW
from tests.oracles.real_voc import few_images, with_links
from tests.oracles.small_tasks import assert_same_run, run

pytestmark = [pytest.mark.detectron2, pytest.mark.slow, pytest.mark.usefixtures("detectron2")]

TASKS = (
    "voc/faster_rcnn_R_50_C4_9k",
    "voc/faster_rcnn_R_50_dilated_C5_24k",
    "voc/fcn16s_R_50_30k",
    "coco/mask_rcnn_R_50_FPN_1x",
    "coco/mask_rcnn_R_50_C4_1x",
)
# The real images have VOC2007's splits only.
SPLITS = {
    "voc/faster_rcnn_R_50_dilated_C5_24k": ("voc_2007_trainval", "voc_2007_test"),
    "voc/fcn16s_R_50_30k": ("voc_2007_sem_seg_trainval", "voc_2007_sem_seg_test"),
}
# Of the others generated images have to be enough, for the sake of time.
IN_BOTH = (TASKS[0], TASKS[1], TASKS[3])
NUM_TEST = {"voc/": 78, "coco": 100}


@pytest.fixture(scope="module")
def real_root(shared_data, tmp_path_factory):
    """VOC2007 and COCO under one folder, as $DETECTRON2_DATASETS has them."""
    root = tmp_path_factory.mktemp("real")
    with_links(shared_data / "VOC2007", root / "VOC2007")
    (root / "coco").symlink_to(shared_data / "coco")
    return root


@pytest.mark.parametrize("task", TASKS)
def test_a_task_on_real_images(task, real_root, narrow_r50_file, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(real_root))
    train, test = SPLITS.get(task, (None, None))
    opts = [] if train is None else ["DATASETS.TRAIN", (train,), "DATASETS.TEST", (test,)]
    record = run(task, narrow_r50_file, tmp_path / "run", "detectron2", *opts)
    assert (record.status, record.iterations) == ("done", 2)
    main = "sem_seg/mIoU" if "fcn16s" in task else "bbox/AP"
    value = record.metrics[main]
    assert value is not None and math.isfinite(value) and 0 <= value < 50
    if main == "bbox/AP":  # every test image was looked at: no score is too low to be kept
        (path,) = (tmp_path / "run" / "inference").glob("*.json")
        content = json.loads(path.read_text())
        found = content["predictions"] if "voc" in task else content
        assert len({prediction["image_id"] for prediction in found}) == NUM_TEST[task[:4]]
    if task not in IN_BOTH:
        return
    ours = run(task, narrow_r50_file, tmp_path / "embedded", "embedded", *opts)
    assert_same_run(tmp_path / "run", tmp_path / "embedded")
    assert ours.metrics == record.metrics


FIFTY = {
    "SOLVER.MAX_ITER": 50,
    "SOLVER.STEPS": (35, 45),
    "SOLVER.WARMUP_ITERS": 10,
    "SOLVER.CHECKPOINT_PERIOD": 50,
    "TEST.PRECISE_BN.NUM_ITER": 5,
    "INPUT.MIN_SIZE_TRAIN": (80, 96, 112),
    "MODEL.ANCHOR_GENERATOR.SIZES": [[12, 24, 48, 96]],
    # Many boxes: whatever rounding does to so short a training, some of them are right.
    "MODEL.RPN.POST_NMS_TOPK_TEST": 200,
    "TEST.DETECTIONS_PER_IMAGE": 100,
    "SEED": 5,
}
# A quarter of a ResNet-18, from random weights.
R18 = {"MODEL.RESNETS.STEM_OUT_CHANNELS": 16, "MODEL.RESNETS.RES2_OUT_CHANNELS": 16}
SHORT_TRAININGS = {
    "r18": ("voc/faster_rcnn_R_18_C4_small", R18),
    "r50": ("voc/faster_rcnn_R_50_C4_9k", {}),
}


@pytest.mark.parametrize("name", SHORT_TRAININGS)
def test_a_short_training_gives_the_same_ap(
    name, real_root, narrow_r50_file, tmp_path, monkeypatch
):
    """50 iterations on VOC2007: warm-up, steps, sampling, flips, PreciseBN, every digit of AP."""
    monkeypatch.setenv("DETECTRON2_DATASETS", str(real_root))
    task, keys = SHORT_TRAININGS[name]
    weights = "random" if name == "r18" else narrow_r50_file
    opts = [item for pair in {**FIFTY, **keys}.items() for item in pair]
    records = {
        engine: run(task, weights, tmp_path / engine, engine, *opts)
        for engine in ("detectron2", "embedded")
    }
    assert_same_run(tmp_path / "detectron2", tmp_path / "embedded")
    assert records["detectron2"].metrics == records["embedded"].metrics
    assert records["embedded"].metrics["bbox/AP50"] > 0


# The task files as they are, but for size and length; each object fills its image, so that 50
# iterations are enough to find it again. AP is the mean over 20 classes, of which there are four.
FOUR_IMAGES = ("000081", "000394", "000196", "000294")
FULL_WIDTH = {
    "MODEL.DEVICE": "cpu",
    "MODEL.RPN.POST_NMS_TOPK_TEST": 100,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 16,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 7,
    "INPUT.MIN_SIZE_TRAIN": (112, 128),
    "INPUT.MIN_SIZE_TEST": 128,
    "DATALOADER.NUM_WORKERS": 0,
    "SOLVER.IMS_PER_BATCH": 4,
    "SOLVER.BASE_LR": 0.02,
    "SOLVER.MAX_ITER": 50,
    "SOLVER.STEPS": (38, 46),
    "SOLVER.WARMUP_ITERS": 10,
    "TEST.PRECISE_BN.NUM_ITER": 10,
    "SEED": 1,
}


@SLOW
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SHORT_TRAININGS)
def test_a_short_training_at_full_width(name, shared_data, r18_file, tmp_path, monkeypatch):
    """As above, with networks that learn: the same AP, and one that is well above 0."""
    few_images(shared_data / "VOC2007", tmp_path / "data" / "VOC2007", FOUR_IMAGES)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "data"))
    task, _ = SHORT_TRAININGS[name]
    records = {}
    for engine in ("detectron2", "embedded"):
        values = FULL_WIDTH | {
            "MODEL.WEIGHTS": r18_file if name == "r18" else "random",
            "OUTPUT_DIR": tmp_path / engine,
        }
        argv = ["--config-file", str(ROOT / f"configs/{task}.yaml"), "--engine", engine]
        assert main([*argv, *(str(item) for pair in values.items() for item in pair)]) == 0
        records[engine] = read_record(tmp_path / engine / "run.json")
    assert_same_run(tmp_path / "detectron2", tmp_path / "embedded")
    assert records["detectron2"].metrics == records["embedded"].metrics
    assert records["embedded"].metrics["bbox/AP"] > 2
