"""The real Detectron2 loads what was converted: a R50-C4 detector, through its own checkpointer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet50

from convert.convert_to_d2 import convert_file
from convert.verify import read_converted

pytestmark = pytest.mark.detectron2


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, Any]:
    """Return a full-size ResNet-50 in the official layout, every tensor random."""
    torch.manual_seed(0)
    state = resnet50(num_classes=128).state_dict()
    for key, value in state.items():
        if value.dim() == 1:
            value.uniform_(0.5, 1.5)
        assert value.dim() == 0 or value.any(), key
    names = {f"module.encoder_q.{key}": value for key, value in state.items()}
    names["module.queue"] = torch.randn(128, 64)
    names["module.queue_ptr"] = torch.zeros(1, dtype=torch.long)
    return {"epoch": 200, "arch": "resnet50", "state_dict": names, "optimizer": {}}


@pytest.fixture(scope="module")
def detector() -> nn.Module:
    """GeneralizedRCNN R50-C4 as the official Base-RCNN-C4-BN.yaml and *_moco.yaml set it."""
    pytest.importorskip("detectron2")
    from detectron2.config import get_cfg
    from detectron2.modeling import build_model

    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.MASK_ON = False
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 20
    return build_model(cfg)


@pytest.mark.parametrize("suffix", [".pth", ".pkl"])
def test_every_tensor_of_the_backbone_and_of_res5_arrives(
    suffix: str, checkpoint: dict[str, Any], detector: nn.Module, tmp_path: Path
) -> None:
    from detectron2.checkpoint import DetectionCheckpointer

    torch.save(checkpoint, tmp_path / "in")
    convert_file(tmp_path / "in", tmp_path / f"out{suffix}")
    model = copy.deepcopy(detector)
    before = copy.deepcopy(detector.state_dict())
    DetectionCheckpointer(model).load(str(tmp_path / f"out{suffix}"))
    state = model.state_dict()
    source = {
        key.removeprefix("module.encoder_q."): value
        for key, value in checkpoint["state_dict"].items()
    }
    arrived = set()
    for key, value in read_converted(tmp_path / f"out{suffix}").model.items():
        place = "roi_heads." + key if key.startswith("res5") else "backbone." + key
        assert torch.equal(state[place], value), key
        arrived.add(place)
    # Straight from the source too, without a name of ours in between.
    for theirs, ours in (
        ("backbone.stem.conv1.weight", "conv1.weight"),
        ("backbone.stem.conv1.norm.running_var", "bn1.running_var"),
        ("backbone.res2.0.shortcut.weight", "layer1.0.downsample.0.weight"),
        ("backbone.res3.0.shortcut.norm.running_mean", "layer2.0.downsample.1.running_mean"),
        ("backbone.res4.5.conv3.norm.bias", "layer3.5.bn3.bias"),
        ("roi_heads.res5.2.conv2.weight", "layer4.2.conv2.weight"),
    ):
        assert torch.equal(state[theirs], source[ours]), theirs
    backbone = {k for k in state if k.startswith(("backbone.", "roi_heads.res5."))}
    counters = {k for k in backbone if k.endswith("num_batches_tracked")}
    assert backbone - counters == arrived and len(arrived) == 265
    for key in state.keys() - arrived:
        assert torch.equal(state[key], before[key]), f"{key} was touched"
