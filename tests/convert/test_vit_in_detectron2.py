"""A converted vision transformer through plain Detectron2's own loader, at width 256 exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convert.convert_to_d2 import convert_file
from convert.verify import read_converted
from tests.convert.test_vit import make_state

pytestmark = [pytest.mark.slow, pytest.mark.detectron2]
WIDTH = 256  # of the transformer, and of ViTDet's pyramid


def vitdet() -> nn.Module:
    """Detectron2's `ViT` with its pyramid, as projects/ViTDet/configs/common/models builds them."""
    pytest.importorskip("detectron2")
    from detectron2.modeling.backbone.fpn import LastLevelMaxPool
    from detectron2.modeling.backbone.vit import SimpleFeaturePyramid, ViT

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            net = ViT(
                img_size=64,
                patch_size=16,
                embed_dim=WIDTH,
                depth=2,
                num_heads=4,
                mlp_ratio=0.25,
                window_size=2,
                window_block_indexes=(0,),
                use_rel_pos=True,
                pretrain_img_size=64,
                out_feature="last_feat",
            )
            self.backbone = SimpleFeaturePyramid(
                net, "last_feat", WIDTH, (4.0, 2.0, 1.0, 0.5), LastLevelMaxPool(), norm="LN"
            )

    return Detector()


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the detector's tensors before and after Detectron2's own loader."""
    torch.manual_seed(0)
    model = vitdet()
    from detectron2.checkpoint import DetectionCheckpointer

    before = {key: value.clone() for key, value in model.state_dict().items()}
    DetectionCheckpointer(model).load(str(path))
    return before, model.state_dict()


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    state = make_state(embed_dim=WIDTH, mlp_dim=64, num_heads=4, patch_size=16, image_size=64)
    assert state["norm.weight"].shape == (WIDTH,)
    torch.save(state, tmp_path / "a.file")
    convert_file(tmp_path / "a.file", tmp_path / "out.pth", num_heads=4)
    return tmp_path / "out.pth"


def test_nothing_lands_in_a_pyramids_norm(converted: Path) -> None:
    model = read_converted(converted).model
    assert not {"norm.weight", "norm.bias"} & model.keys()
    before, after = load(converted)
    names = {f"backbone.net.{key}": value for key, value in model.items()}
    assert names.keys() <= after.keys()
    norms = [key for key in after if key.startswith("backbone.simfp_") and ".norm." in key]
    assert len(norms) >= 8
    for key, value in after.items():
        assert torch.equal(value, names.get(key, before[key])), key


def test_the_danger_is_real(converted: Path, tmp_path: Path) -> None:
    """The final norm's name ends as those of all norms of the pyramid do: Detectron2 stops."""
    raw = torch.load(converted)
    raw["model"]["norm.weight"] = torch.full((WIDTH,), 7.0)
    torch.save(raw, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match="multiple keys"):
        load(tmp_path / "bad.pth")
