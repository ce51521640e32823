"""Backbones inside whole detectors and depth networks: named, and taken out by an option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convert.backbone import load_backbone
from convert.convert_to_d2 import convert_file
from moco.common.errors import DataError, UserError
from tests.oracles.layouts_vit import randomize
from tests.oracles.resnets import make_resnet

DINO = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "patch_size": 16}
DINO |= {"image_size": 64, "mlp_ratio": 2}
SMALL = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
SMALL |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
SMALL |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}


def detector(net: nn.Module) -> Any:
    """Give frozen batch norms, whose tensors are buffers, other than their initial values."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in net.named_buffers():
            if name.endswith(("running_var", ".weight")):
                value.uniform_(0.5, 1)
    return net.eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_network_in_a_depth_anything(tmp_path: Path) -> None:
    import transformers

    inner = transformers.Dinov2Config(
        **DINO, out_features=["stage2"], reshape_hidden_states=False, layer_norm_eps=1e-5
    )
    sizes: dict[str, Any] = {"reassemble_hidden_size": 48, "neck_hidden_sizes": [8] * 4}
    sizes |= {"reassemble_factors": [1] * 4, "fusion_hidden_size": 8, "head_hidden_size": 4}
    config = transformers.DepthAnythingConfig(backbone_config=inner, **sizes)
    net = randomize(transformers.DepthAnythingForDepthEstimation(config), 0).eval()
    net.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="give --encoder backbone"):
        convert_file(tmp_path, tmp_path / "out.pth")
    report = convert_file(tmp_path, tmp_path / "out.pth", encoder="backbone")
    architecture: Any = report.contract.architecture
    assert (architecture.num_heads, architecture.layer_norm_eps) == (3, 1e-5)
    backbone, image = load_backbone(net.backbone), torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        expected = backbone(image)["last_feat"]
        found = load_backbone(tmp_path / "out.pth")(image)["last_feat"]
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Detr", "TableTransformer"])
@pytest.mark.parametrize("dilation", [False, True])
def test_the_network_in_a_detr(kind: str, dilation: bool, tmp_path: Path) -> None:
    import transformers

    timm = {"use_timm_backbone": True, "use_pretrained_backbone": False, "backbone": "resnet18"}
    config = getattr(transformers, f"{kind}Config")(**SMALL, **timm, dilation=dilation)
    detector(getattr(transformers, f"{kind}ForObjectDetection")(config)).save_pretrained(tmp_path)
    match = "dilation is True" if dilation else "a whole detector.*give --encoder model.backbone"
    with pytest.raises(DataError, match=match):
        convert_file(tmp_path, tmp_path / "out.pth")
    options = {"encoder": "backbone.conv_encoder.model"}
    if dilation:
        with pytest.raises(DataError, match="dilation is True"):
            convert_file(tmp_path, tmp_path / "out.pth", **options)
    else:
        report = convert_file(tmp_path, tmp_path / "out.pth", **options)
        assert str(report.contract.architecture).startswith("ResNet-18")


class Student(nn.Module):
    """A network in a module of any name."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = make_resnet(18)


def test_the_encoder_of_a_module_is_its_name() -> None:
    assert load_backbone(Student(), encoder="teacher").contract.encoder == "single"
    with pytest.raises(UserError, match=r"a single network, state_dict\.teacher"):
        load_backbone(Student(), encoder="student")
