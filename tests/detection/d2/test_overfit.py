"""Trained to overfit: after a few hundred iterations a detector knows the handful of images that
it was trained on. It could not if training and evaluation disagreed about colors, coordinates,
class ids, strides or batch-norm statistics. C4 learns so on the embedded engine
(tests/detection/embedded/test_trainer.py), whose whole runs are Detectron2's.

The networks start at random and are narrow, so that each takes a minute or two.
"""

from pathlib import Path

import pytest

from detection.train_net import main
from moco.common.run import read_record
from tests.detection.conftest import ROOT
from tests.oracles.tiny_coco import write_coco
from tests.oracles.tiny_voc import write_voc
from tests.oracles.tiny_voc_seg import write_voc_seg

pytestmark = [pytest.mark.detectron2, pytest.mark.slow, pytest.mark.usefixtures("detectron2")]

SIDE_PX = 96
COMMON = {
    "MODEL.DEVICE": "cpu",
    "MODEL.WEIGHTS": "random",
    # A quarter of R50's width.
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 16,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 16,
    "DATALOADER.NUM_WORKERS": 0,
    # A batch is all images: BN statistics of wide and of tall ones alone are not those of all.
    "DATALOADER.ASPECT_RATIO_GROUPING": False,
    "SOLVER.WARMUP_ITERS": 20,
    "SOLVER.CHECKPOINT_PERIOD": 100_000,
    "TEST.PRECISE_BN.NUM_ITER": 20,
    "SEED": 1,
}
BOXES = {
    "INPUT.MIN_SIZE_TRAIN": (SIDE_PX,),
    "INPUT.MIN_SIZE_TEST": SIDE_PX,
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 64,
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 200,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 200,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 64,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 32,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 32,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 128,
}


def overfit(task: str, folder: Path, options: dict[str, object]) -> dict[str, float | None]:
    values = COMMON | options | {"OUTPUT_DIR": folder / "run"}
    argv = ["--config-file", str(ROOT / "configs" / f"{task}.yaml"), "--engine", "detectron2"]
    assert main([*argv, *(str(item) for pair in values.items() for item in pair)]) == 0
    return read_record(folder / "run" / "run.json").metrics


def schedule(iterations: int, base_lr: float) -> dict[str, object]:
    """Steps at 3/4 and 9/10."""
    steps = (iterations * 3 // 4, iterations * 9 // 10)
    return {"SOLVER.MAX_ITER": iterations, "SOLVER.STEPS": steps, "SOLVER.BASE_LR": base_lr}


def test_boxes(tmp_path):
    root = write_voc(tmp_path / "shapes", {"trainval": 3}, size=SIDE_PX, seed=3, one_large=True)
    data = {
        "DATASETS.VOC_DIR": root,
        "DATASETS.TRAIN": ("shapes_trainval",),
        "DATASETS.TEST": ("shapes_trainval",),
        "SOLVER.IMS_PER_BATCH": 3,
    }
    options = BOXES | data | schedule(300, 0.01)
    metrics = overfit("voc/faster_rcnn_R_50_dilated_C5_24k", tmp_path, options)
    assert metrics["bbox/AP"] > 85  # on some processors one box in ten falls short of IoU .95


def test_boxes_and_masks(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    write_coco(tmp_path, {"train2017": 3}, crowd=False, size=SIDE_PX, one_large=True)
    options = BOXES | schedule(300, 0.02) | {
        "SOLVER.IMS_PER_BATCH": 3,
        "MODEL.FPN.OUT_CHANNELS": 32,
        "MODEL.ROI_MASK_HEAD.CONV_DIM": 32,
        "DATASETS.TEST": ("coco_2017_train",),
    }  # fmt: skip
    metrics = overfit("coco/mask_rcnn_R_50_FPN_1x", tmp_path, options)
    assert metrics["bbox/AP"] > 85
    assert metrics["segm/AP"] > 85


def test_semantic_segmentation(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    write_voc_seg(tmp_path, {"train_aug": 4}, size=192)
    options = schedule(250, 0.02) | {
        "SOLVER.IMS_PER_BATCH": 4,
        "INPUT.SEM_SEG_SCALE_RANGE": [0.75, 1.25],
        "INPUT.SEM_SEG_CROP_SIZE": 193,
        "DATASETS.TEST": ("voc_2012_sem_seg_train_aug",),
    }
    metrics = overfit("voc/fcn16s_R_50_30k", tmp_path, options)
    assert metrics["sem_seg/mIoU"] > 90
