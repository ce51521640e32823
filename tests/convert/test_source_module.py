"""Modules in memory are run: their maps are equal, or they are refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision import models

from convert.backbone import load_backbone
from convert.contract import IMAGENET_MEAN
from moco.common.errors import DataError, UserError
from tests.oracles.resnets import make_resnet

VIT = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3}
CONVNEXT = {"depths": [1, 1, 1, 1], "dims": [16, 24, 32, 40]}
TRANSFORMER = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "image_size": 64,
}


def trained(net: nn.Module) -> Any:
    """Give norms and layer scales random values, so that every tensor has an effect."""
    torch.manual_seed(0)
    with torch.no_grad():
        for key, value in net.state_dict().items():
            if key.endswith(("running_var", "gamma", "lambda1", "layer_scale")) or (
                value.dim() == 1 and key.endswith("weight")
            ):
                value.uniform_(0.5, 1.5)
            elif value.dim() == 1 and value.is_floating_point():
                value.uniform_(-0.1, 0.1)
    return net.eval()


def vit(**arguments: Any) -> Any:
    return trained(timm.create_model("vit_tiny_patch16_224", **{**VIT, **arguments}))


def convnext(**arguments: Any) -> Any:
    return trained(timm.create_model("convnext_atto", **{**CONVNEXT, **arguments}))


def swin(**arguments: Any) -> Any:
    return trained(
        models.SwinTransformer(
            **{
                "patch_size": [4, 4],
                "embed_dim": 12,
                "depths": [1, 1, 2, 1],
                "num_heads": [1, 2, 3, 6],
                "window_size": [3, 3],
                **arguments,
            }
        )
    )


def hf(kind: str, **arguments: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**arguments)
    return trained(getattr(transformers, f"{kind}Model")(config))


def hf_vit(**arguments: Any) -> Any:
    return hf("ViT", intermediate_size=96, **{**TRANSFORMER, **arguments})


def setting(path: str, value: Any) -> Callable[[Any], None]:
    """Return a function that sets an attribute of a module."""
    module, _, name = path.rpartition(".")
    return lambda net: setattr(net.get_submodule(module), name, value)


def settings(path: str, **values: Any) -> Callable[[Any], None]:
    """Return a function that sets several attributes of a module."""
    return lambda net: [setattr(net.get_submodule(path), *item) for item in values.items()] and None


def nothing(net: Any) -> None:
    """Change nothing."""


class Scaled(nn.Module):
    """A module whose output is scaled."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return 1.5 * self.net(x)


# Network, module of its last map, alteration, whether it converts.
RESNET, LAST = (lambda: make_resnet(18)), "layer4"
EQUAL: list[tuple[Callable[[], Any], str, Callable[[Any], None]]] = [
    (RESNET, LAST, nothing),
    (RESNET, LAST, lambda net: net.train()),
    (RESNET, LAST, setting("relu.inplace", False)),
    (RESNET, LAST, setting("bn1.momentum", 0.5)),
    (RESNET, LAST, setting("fc", nn.Identity())),
    (RESNET, LAST, setting("avgpool", nn.AdaptiveMaxPool2d(1))),
    (RESNET, LAST, lambda net: net.half()),
    (RESNET, LAST, lambda net: net.double()),
    (vit, "blocks.1", nothing),
    (lambda: vit(num_heads=6), "blocks.1", nothing),
    (lambda: vit(act_layer="quick_gelu"), "blocks.1", nothing),
    (lambda: vit(qkv_bias=False, drop_path_rate=0.1), "blocks.1", nothing),
    (lambda: vit(reg_tokens=4, no_embed_class=True), "blocks.1", nothing),
    (vit, "blocks.1", setting("norm", nn.Identity())),
    (convnext, "stages.3", nothing),
    (swin, "features.7", nothing),
    (hf_vit, "layers.1", nothing),
    (lambda: hf("CLIPVision", intermediate_size=96, **TRANSFORMER), "encoder.layers.1", nothing),
]
REFUSED: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (RESNET, setting("layer2.0.relu", nn.GELU())),
    (RESNET, setting("relu", nn.LeakyReLU(0.1))),
    (RESNET, setting("maxpool", nn.AvgPool2d(3, 2, 1))),
    (RESNET, setting("maxpool", nn.Identity())),
    (RESNET, setting("bn1.eps", 1e-2)),
    (RESNET, setting("layer3.0.bn1.eps", 1e-1)),
    (RESNET, setting("conv1.padding_mode", "reflect")),
    (RESNET, setting("conv1.stride", (1, 1))),
    (RESNET, settings("layer4.1.conv2", dilation=(2, 2), padding=(2, 2))),
    (RESNET, lambda net: setattr(net, "maxpool", Scaled(net.maxpool))),
    (RESNET, lambda net: net.layer3.register_forward_hook(lambda *its: 1.5 * its[2])),
    (lambda: trained(models.resnet50(replace_stride_with_dilation=[False, False, True])), nothing),
    (vit, setting("blocks.1.mlp.act", nn.ReLU())),
    (vit, setting("blocks.0.norm1.eps", 1e-1)),
    (vit, settings("blocks.1.attn", num_heads=6, head_dim=8)),
    (vit, setting("blocks.1.attn.proj_drop", nn.Tanh())),
    (vit, setting("blocks.0.drop_path1", nn.Tanh())),
    (vit, setting("pos_drop", nn.Tanh())),
    (vit, setting("patch_embed.norm", nn.Tanh())),
    (convnext, setting("stages.1.blocks.0.mlp.act", nn.ReLU())),
    (convnext, setting("stem.1.eps", 1e-1)),
    (swin, setting("features.1.0.mlp.1", nn.ReLU())),
    (swin, setting("features.5.1.attn.shift_size", [0, 0])),
    (swin, setting("features.1.0.stochastic_depth", nn.Tanh())),
    (hf_vit, setting("layers.1.mlp.activation_fn", nn.ReLU())),
    (hf_vit, setting("layers.0.layernorm_before.eps", 1e-1)),
    (lambda: hf_vit(hidden_act="relu"), lambda net: setattr(net.config, "hidden_act", "gelu")),
    (lambda: hf_vit(layer_norm_eps=0.1), lambda net: setattr(net.config, "layer_norm_eps", 1e-12)),
]  # fmt: skip


def last_map(net: nn.Module, name: str, x: Tensor) -> Tensor:
    """Return the output of a module as a map, without the tokens in front of it."""
    outputs: list[Any] = []
    handle = net.get_submodule(name).register_forward_hook(lambda *its: outputs.append(its[2]))
    with torch.no_grad():
        net(x)
    handle.remove()
    out = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
    if out.dim() == 3:
        side = int((out.shape[1]) ** 0.5)
        return out[:, -side * side :].transpose(1, 2).reshape(1, -1, side, side)
    return out.permute(0, 3, 1, 2) if name.startswith("features") else out


def size_of(net: Any) -> int:
    return 96 if isinstance(net, models.SwinTransformer) else 64


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(EQUAL)))
@pytest.mark.filterwarnings("ignore")
def test_maps_are_those_of_the_module(index: int) -> None:
    make, name, alter = EQUAL[index]
    net = make()
    alter(net)
    backbone = load_backbone(net)
    assert "itself, run on one image: " in backbone.notes[0]
    image = torch.rand(1, 3, size_of(net), size_of(net))
    mean, std = backbone.mean / 255, backbone.std / 255
    expected = last_map(copy.deepcopy(net).float().eval(), name, (image - mean) / std)
    with torch.no_grad():
        found = list(load_backbone(net)(image).values())[-1]
    if backbone.contract.family.name != "vit":  # whose detectors leave the tokens out
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert found.shape == expected.shape


@pytest.mark.slow
def test_a_requested_change_comes_after_the_comparison() -> None:
    backbone = load_backbone(vit(), patch_size=32)
    assert "itself, run on one image: " in backbone.notes[0]
    assert "patches 16 to 32 px" in backbone.contract.source


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(REFUSED)))
@pytest.mark.filterwarnings("ignore")
def test_an_altered_module_is_refused(index: int) -> None:
    make, alter = REFUSED[index]
    net = make()
    alter(net)
    with pytest.raises((DataError, UserError)) as caught:
        load_backbone(net)
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


class Around(nn.Module):
    """A ResNet behind some change of its image."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.change = make_resnet(18), change

    def forward(self, x: Tensor) -> Any:
        return self.net(self.change(x))


def normalize(x: Tensor) -> Tensor:
    return (x - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.2]).view(1, 1, 1)


@pytest.mark.parametrize(
    ("change", "order", "mean", "std"),
    [
        (normalize, "RGB", (127.5, 102, 76.5), (51, 51, 51)),
        (lambda x: normalize(x).flip(1), "BGR", (76.5, 102, 127.5), (51, 51, 51)),
        (lambda x: x / 2 - 60, "RGB", (120, 120, 120), (2, 2, 2)),
        (lambda x: x.flip(1), "BGR", IMAGENET_MEAN[::-1], (57.375, 57.12, 58.395)),
        (lambda x: x, "RGB", IMAGENET_MEAN, (58.395, 57.12, 57.375)),
    ],
)
def test_pixels_inside_a_module(change: Any, order: str, mean: Any, std: Any) -> None:
    pixels = load_backbone(Around(change)).contract.pixels
    assert pixels.channel_order == order
    assert pixels.mean == pytest.approx(mean, abs=0.01)
    assert pixels.std == pytest.approx(std, abs=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: nn.functional.interpolate(x, (32, 32)), "resizes or pads its images"),
        (lambda x: x**2, "the first convolution does not get the image"),
        (lambda x: x[:, [1, 0, 2]], "permutes the channels"),
    ],
)
def test_other_changes_of_the_image_are_refused(change: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"the Around: {said}"):
        load_backbone(Around(change))


def test_a_mean_below_zero_is_refused() -> None:
    with pytest.raises(UserError, match=r"pixel_mean: got \[-127\.5"):
        load_backbone(Around(lambda x: x + 0.5))


def test_an_option_against_the_module() -> None:
    with pytest.raises(UserError, match=r"mean: got .*but the Around itself has"):
        load_backbone(Around(normalize), mean=(1.0, 2.0, 3.0))


def test_a_forward_that_needs_more_than_an_image() -> None:
    net = make_resnet(18)
    net.forward = lambda first, second: first  # type: ignore[assignment]
    assert "not verified by the module: ResNet: its forward" in load_backbone(net).notes[0]


@pytest.mark.filterwarnings("ignore")
def test_a_script_module_is_not_verified() -> None:
    note = load_backbone(torch.jit.script(make_resnet(18))).notes[0]
    assert "not verified by the module: it has ScriptModules" in note


@pytest.mark.slow
def test_random_masks_are_not_verified() -> None:
    import transformers

    config = transformers.ViTMAEConfig(intermediate_size=96, **TRANSFORMER)
    net = trained(transformers.ViTMAEForPreTraining(config))
    assert "not verified by the module: two runs of it differ" in load_backbone(net).notes[0]


class Counting(nn.Module):
    """A ResNet that counts its images, and draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_resnet(18)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        random.random(), torch.rand(1)
        return self.net(x)


def test_the_module_is_left_as_it_was() -> None:
    net = Counting().train()
    net.net.layer1.eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    flags = [module.training for module in net.modules()]
    torch.manual_seed(1)
    random.seed(1)
    expected = (torch.rand(1), random.random())
    torch.manual_seed(1)
    random.seed(1)
    load_backbone(net)
    assert (torch.rand(1), random.random()) == expected
    assert [module.training for module in net.modules()] == flags
    assert not any(module._forward_hooks for module in net.modules())
    assert float(net.count) == 0
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
