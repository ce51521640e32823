"""The task files that the official MoCo released: facebookresearch/moco@7397dfe detection/configs.

Transcribed key by key, without their comments.
"""

from pathlib import Path

FILES = {
    "Base-RCNN-C4-BN.yaml": """
MODEL:
  META_ARCHITECTURE: "GeneralizedRCNN"
  RPN:
    PRE_NMS_TOPK_TEST: 6000
    POST_NMS_TOPK_TEST: 1000
  ROI_HEADS:
    NAME: "Res5ROIHeadsExtraNorm"
  BACKBONE:
    FREEZE_AT: 0
  RESNETS:
    NORM: "naiveSyncBN"
TEST:
  PRECISE_BN:
    ENABLED: True
SOLVER:
  IMS_PER_BATCH: 16
  BASE_LR: 0.02
""",
    "pascal_voc_R_50_C4_24k.yaml": """
_BASE_: "Base-RCNN-C4-BN.yaml"
MODEL:
  MASK_ON: False
  WEIGHTS: "detectron2://ImageNetPretrained/MSRA/R-50.pkl"
  ROI_HEADS:
    NUM_CLASSES: 20
INPUT:
  MIN_SIZE_TRAIN: (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
  MIN_SIZE_TEST: 800
DATASETS:
  TRAIN: ('voc_2007_trainval', 'voc_2012_trainval')
  TEST: ('voc_2007_test',)
SOLVER:
  STEPS: (18000, 22000)
  MAX_ITER: 24000
  WARMUP_ITERS: 100
""",
    "coco_R_50_C4_2x.yaml": """
_BASE_: "Base-RCNN-C4-BN.yaml"
MODEL:
  MASK_ON: True
  WEIGHTS: "detectron2://ImageNetPretrained/MSRA/R-50.pkl"
INPUT:
  MIN_SIZE_TRAIN: (640, 672, 704, 736, 768, 800)
  MIN_SIZE_TEST: 800
DATASETS:
  TRAIN: ("coco_2017_train",)
  TEST: ("coco_2017_val",)
SOLVER:
  STEPS: (120000, 160000)
  MAX_ITER: 180000
""",
}
# The two "_moco" files differ in the name of their base only.
_MOCO = """
_BASE_: "{base}.yaml"
MODEL:
  PIXEL_MEAN: [123.675, 116.280, 103.530]
  PIXEL_STD: [58.395, 57.120, 57.375]
  WEIGHTS: "See Instructions"
  RESNETS:
    STRIDE_IN_1X1: False
INPUT:
  FORMAT: "RGB"
"""
for _base in ("pascal_voc_R_50_C4_24k", "coco_R_50_C4_2x"):
    FILES[f"{_base}_moco.yaml"] = _MOCO.format(base=_base)

NAMES = {"voc": "pascal_voc_R_50_C4_24k", "coco": "coco_R_50_C4_2x"}


def write_official(folder: Path) -> Path:
    """Write all five files into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder
