"""VOC and COCO tasks on real images in both engines; only sizes and durations are changed."""

import json
import math

import pytest

from detection.train_net import main
from moco.common.run import read_record
from tests.detection.conftest import ROOT, SLOW
from tests.oracles.real_voc import few_images, with_links
from tests.oracles.small_tasks import ENGINES, assert_same_run, options, run

pytestmark = [pytest.mark.detectron2, pytest.mark.slow, pytest.mark.usefixtures("detectron2")]

TASKS = (
    "voc/faster_rcnn_R_50_C4_9k",
    "voc/faster_rcnn_R_50_dilated_C5_24k",
    "voc/fcn16s_R_50_30k",
    "coco/mask_rcnn_R_50_FPN_1x",
    "coco/mask_rcnn_R_50_C4_1x",
)
# There are real images of VOC2007's splits only.
SPLITS = {
    "voc/faster_rcnn_R_50_dilated_C5_24k": ("voc_2007_trainval", "voc_2007_test"),
    "voc/fcn16s_R_50_30k": ("voc_2007_sem_seg_trainval", "voc_2007_sem_seg_test"),
}
# The others are compared on generated images, which takes less time.
IN_BOTH = (TASKS[0], TASKS[1], TASKS[3])
NUM_TEST = {"voc/": 78, "coco": 100}


@pytest.fixture(scope="module")
def real_root(shared_data, tmp_path_factory):
    """VOC2007 and COCO in one folder, in the layout of $DETECTRON2_DATASETS."""
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
    if main == "bbox/AP":  # every image has predictions, because no score is too low
        (path,) = (tmp_path / "run" / "inference").glob("*.json")
        content = json.loads(path.read_text())
        found = content["predictions"] if "voc" in task else content
        assert len({prediction["image_id"] for prediction in found}) == NUM_TEST[task[:4]]
    if task not in IN_BOTH:
        return
    run(task, narrow_r50_file, tmp_path / "embedded", "embedded", *opts)
    assert_same_run(tmp_path / "run", tmp_path / "embedded")


SHORT = {
    "SOLVER.WARMUP_ITERS": 10,
    "SOLVER.CHECKPOINT_PERIOD": 50,
    "TEST.PRECISE_BN.NUM_ITER": 5,
    "INPUT.MIN_SIZE_TRAIN": (80, 96, 112),
    "MODEL.ANCHOR_GENERATOR.SIZES": [[12, 24, 48, 96]],
    # With many boxes some are right after so few iterations, whatever the rounding.
    "MODEL.RPN.POST_NMS_TOPK_TEST": 200,
    "TEST.DETECTIONS_PER_IMAGE": 100,
    "SEED": 5,
}
FIFTY = {"SOLVER.MAX_ITER": 50, "SOLVER.STEPS": (35, 45)}
# A quarter of a ResNet-18.
NARROW = {"MODEL.RESNETS.STEM_OUT_CHANNELS": 16, "MODEL.RESNETS.RES2_OUT_CHANNELS": 16}
# The task files at full width. Each object fills its image, so that 50 iterations are enough to
# learn it. AP is the mean over 20 classes, of which there are four.
FOUR_IMAGES = ("000081", "000394", "000196", "000294")
FULL_WIDTH = {
    **FIFTY,
    "MODEL.DEVICE": "cpu",
    "MODEL.RPN.POST_NMS_TOPK_TEST": 100,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 16,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 7,
    "INPUT.MIN_SIZE_TRAIN": (112, 128),
    "INPUT.MIN_SIZE_TEST": 128,
    "DATALOADER.NUM_WORKERS": 0,
    "SOLVER.IMS_PER_BATCH": 4,
    "SOLVER.BASE_LR": 0.02,
    "SOLVER.WARMUP_ITERS": 10,
    "TEST.PRECISE_BN.NUM_ITER": 10,
    "SEED": 1,
}
R18, R50 = "voc/faster_rcnn_R_18_C4_small", TASKS[0]
WIDE = (SLOW, pytest.mark.timeout(3600))


@pytest.mark.parametrize(
    ("task", "weights", "keys", "metric", "least"),
    [
        pytest.param(
            R18, "random", options(R18) | SHORT | FIFTY | NARROW, "bbox/AP50", 0, id="r18"
        ),
        pytest.param(R18, "r18_file", FULL_WIDTH, "bbox/AP", 2, id="r18-full-width", marks=WIDE),
        pytest.param(R50, "random", FULL_WIDTH, "bbox/AP", 2, id="r50-full-width", marks=WIDE),
    ],
)
def test_a_short_training_is_equal(
    task, weights, keys, metric, least, real_root, shared_data, request, tmp_path, monkeypatch
):
    """Both engines train equally on VOC2007: warm-up, steps, sampling, flips, PreciseBN, AP."""
    root = real_root
    if keys is FULL_WIDTH:
        root = few_images(shared_data / "VOC2007", tmp_path / "VOC2007", FOUR_IMAGES).parent
    monkeypatch.setenv("DETECTRON2_DATASETS", str(root))
    weights = weights if weights == "random" else request.getfixturevalue(weights)
    for engine in ENGINES:
        values = keys | {"MODEL.WEIGHTS": weights, "OUTPUT_DIR": tmp_path / engine}
        argv = ["--config-file", str(ROOT / f"configs/{task}.yaml"), "--engine", engine]
        assert main([*argv, *(str(item) for pair in values.items() for item in pair)]) == 0
    assert_same_run(*(tmp_path / engine for engine in ENGINES))
    assert read_record(tmp_path / "embedded" / "run.json").metrics[metric] > least
