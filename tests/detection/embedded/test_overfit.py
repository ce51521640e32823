"""FCN-16s trained to overfit a few images.

It fails if training and evaluation disagree about colors, class ids, strides or batch-norm
statistics. Detectors are instead compared bitwise with plain Detectron2
(tests/detection/parity/test_plain_detectron2.py), and C4 overfits on the embedded engine
(tests/detection/engine/test_trainer.py). The network is narrow and randomly initialized.
"""

import pytest

from detection.train_net import main
from moco.common.run import read_record
from tests.detection.conftest import ROOT
from tests.oracles.tiny_voc_seg import write_voc_seg

KEYS = {
    "MODEL.DEVICE": "cpu",
    "MODEL.WEIGHTS": "random",
    # A quarter of R50's width.
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 16,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 16,
    "DATALOADER.NUM_WORKERS": 0,
    # A batch is all images: BN statistics of wide and of tall ones alone are not those of all.
    "DATALOADER.ASPECT_RATIO_GROUPING": False,
    "DATASETS.TEST": ("voc_2012_sem_seg_train_aug",),
    "INPUT.SEM_SEG_SCALE_RANGE": [0.75, 1.25],
    "INPUT.SEM_SEG_CROP_SIZE": 97,
    "SOLVER.IMS_PER_BATCH": 4,
    "SOLVER.BASE_LR": 0.02,
    "SOLVER.MAX_ITER": 250,
    "SOLVER.STEPS": (187, 225),
    "SOLVER.WARMUP_ITERS": 20,
    "SOLVER.CHECKPOINT_PERIOD": 100_000,
    "TEST.PRECISE_BN.NUM_ITER": 20,
    "SEED": 1,
}


@pytest.mark.slow
def test_semantic_segmentation(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    write_voc_seg(tmp_path, {"train_aug": 4})
    values = KEYS | {"OUTPUT_DIR": tmp_path / "run"}
    argv = ["--config-file", str(ROOT / "configs/voc/fcn16s_R_50_30k.yaml")]
    argv += ["--engine", "embedded"]
    assert main([*argv, *(str(item) for pair in values.items() for item in pair)]) == 0
    assert read_record(tmp_path / "run" / "run.json").metrics["sem_seg/mIoU"] > 90
