"""Tiny ResNets and ConvNeXts of `transformers`, by its own classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.oracles.layouts_vit import randomize

DIMS, DEPTHS = [8, 12, 16, 24], [1, 2, 1, 1]
DINOV3_EPS = 1e-5  # other than the default, which is the other networks' eps


def resnet(*, head: bool = False, **config: Any) -> nn.Module:
    """Return a ResNet of [3, 4, 6, 3] bottlenecks, or of [2, 2, 2, 2] basic blocks."""
    from transformers import ResNetConfig, ResNetForImageClassification, ResNetModel

    basic = config.get("layer_type") == "basic"
    widths = [8, 16, 32, 64] if basic else [16, 32, 64, 128]
    its = ResNetConfig(
        embedding_size=8, hidden_sizes=widths, depths=[2] * 4 if basic else [3, 4, 6, 3], **config
    )
    return _trained((ResNetForImageClassification if head else ResNetModel)(its))


def regnet() -> nn.Module:
    """Return a RegNet X with as many blocks as a ResNet-50, and its names."""
    from transformers import RegNetConfig, RegNetModel

    widths = [16, 32, 64, 128]
    config = RegNetConfig(
        embedding_size=8, hidden_sizes=widths, depths=[3, 4, 6, 3], groups_width=8, layer_type="x"
    )
    return _trained(RegNetModel(config))


def convnext(kind: str, eps: float = DINOV3_EPS) -> nn.Module:
    """Return a ConvNeXt: "v1", "v1 with a head", "v2", "dinov3" or "dinov3 backbone".

    `eps` is DINOv3's, other than the default.
    """
    import transformers as t

    config, network = {
        "v1": (t.ConvNextConfig, t.ConvNextModel),
        "v1 with a head": (t.ConvNextConfig, t.ConvNextForImageClassification),
        "v2": (t.ConvNextV2Config, t.ConvNextV2ForImageClassification),
        "dinov3": (t.DINOv3ConvNextConfig, t.DINOv3ConvNextModel),
        "dinov3 backbone": (t.DINOv3ConvNextConfig, t.DINOv3ConvNextBackbone),
    }[kind]
    others = {"layer_norm_eps": eps} if "dinov3" in kind else {}
    return _trained(network(config(hidden_sizes=DIMS, depths=DEPTHS, **others)))


def _trained(net: nn.Module) -> nn.Module:
    randomize(net, 0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 1.5)
    return net.eval()


def set_eps(net: nn.Module, eps: float) -> None:
    """Set the epsilon of all layer norms."""
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps


def stages(net: nn.Module, image: Tensor) -> list[Tensor]:
    """Return the outputs of the four stages."""
    found: list[Tensor] = []
    (modules,) = [m for name, m in net.named_modules() if name.rpartition(".")[2] == "stages"]
    hooks = [
        stage.register_forward_hook(lambda module, inputs, output: found.append(output))
        for stage in modules
    ]
    with torch.no_grad():
        net(image)
    for hook in hooks:
        hook.remove()
    return found


def as_meta_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename a DINOv3 ConvNeXt of transformers as facebookresearch/dinov3 names its tensors.

    dinov3/models/convnext.py: the final norm is also the last of `norms`, after three identities.
    """
    names = {
        "depthwise_conv": "dwconv",
        "layer_norm": "norm",
        "pointwise_conv": "pwconv",
        "model.": "",
        ".layers.": ".",
    }
    renamed = {}
    for key, value in state.items():
        for old, new in names.items():
            key = key.replace(old, new)
        if ".downsample_layers." in key:
            _, stage, _, rest = key.split(".", 3)
            key = f"downsample_layers.{stage}.{rest}"
        renamed[key] = value
    return renamed | {f"norms.3.{part}": renamed[f"norm.{part}"] for part in ("weight", "bias")}
