"""Shared by the tests of the detection room: a small data set and a converted ResNet-18."""

from pathlib import Path

import pytest
import torch

from tests.oracles.tiny_voc import write_voc

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def r18_file(tmp_path_factory) -> Path:
    """A seeded torchvision ResNet-18 with BN statistics of its own, converted for real."""
    from torchvision.models import resnet18

    from convert.convert_to_d2 import convert_file

    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(5)
    net = resnet18()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    torch.save(net.state_dict(), folder / "resnet18.pth")
    convert_file(folder / "resnet18.pth", folder / "r18.pth")
    return folder / "r18.pth"


@pytest.fixture(scope="session")
def voc_folder(tmp_path_factory) -> Path:
    """Coloured rectangles in VOC layout: 6 pictures to train on, 3 to test on, 3 classes."""
    return write_voc(tmp_path_factory.mktemp("data") / "shapes", {"trainval": 6, "test": 3})


@pytest.fixture(scope="session")
def small_config() -> str:
    return str(ROOT / "configs" / "voc" / "faster_rcnn_R_18_C4_small.yaml")


@pytest.fixture(scope="session")
def small_options(voc_folder) -> list[str]:
    """The small task cut down to seconds: 3 iterations of 2 pictures at about 100 px."""
    values = {
        "DATASETS.VOC_DIR": voc_folder,
        "MODEL.DEVICE": "cpu",
        "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 8,
        "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,  # hardly trained, and yet with detections
        "MODEL.RPN.POST_NMS_TOPK_TRAIN": 30,
        "MODEL.RPN.POST_NMS_TOPK_TEST": 15,
        "INPUT.MIN_SIZE_TRAIN": (80, 96),
        "INPUT.MIN_SIZE_TEST": 96,
        "SOLVER.IMS_PER_BATCH": 2,
        "SOLVER.MAX_ITER": 3,
        "SOLVER.STEPS": (2,),
        "SOLVER.WARMUP_ITERS": 2,
        "SOLVER.CHECKPOINT_PERIOD": 2,
        "TEST.PRECISE_BN.NUM_ITER": 2,
        "SEED": 7,
    }
    return [str(item) for pair in values.items() for item in pair]
