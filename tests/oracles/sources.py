"""A network of the owner's class for every naming scheme, saved under that scheme's names.

`python -m tests.docs.families` converts each and compares the features; a scheme without an entry
fails its test. Where an owner's class is not a package, torchvision's or timm's is renamed here,
independently of the tables in convert/.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.oracles import (
    convert_transformers,
    dinov3,
    layouts_swin,
    layouts_transformers,
    layouts_vit,
)
from tests.oracles.checkpoints import caffe2, detectron2_layout
from tests.oracles.layouts import numbered, simclr_v2
from tests.oracles.layouts_transformers import DEPTHS, DIMS
from tests.oracles.resnets import make_resnet

STAGES = ("res2", "res3", "res4", "res5")
Features = Callable[[Tensor], Mapping[str, Tensor]]


class Source(NamedTuple):
    """A network in the names of a scheme.

    Attributes:
        reference: Class that computes the expected features.
        make: Function that returns the content of its file, and the features of an image by the
            names of the converted backbone.
        options: Options of the conversion.
    """

    reference: str
    make: Callable[[], tuple[Any, Features]]
    options: Mapping[str, Any] = {}


def _hooked(net: nn.Module, modules: Sequence[str], image: Tensor) -> Iterator[Tensor]:
    """Yield the outputs of modules in their order."""
    found: dict[str, Tensor] = {}
    for name in modules:
        net.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: found.update({name: output})
        )
    with torch.no_grad():
        net(image)
    yield from (found[name] for name in modules)


def _stages(net: nn.Module, modules: Sequence[str]) -> Features:
    return lambda image: dict(zip(STAGES, _hooked(net, modules, image), strict=True))


_LAYERS = [f"layer{i}" for i in range(1, 5)]


def _resnet(arrange: Callable[[Any], Any], *, in_1x1: bool = False, **kwargs: Any) -> Any:
    net = make_resnet(**kwargs)
    for block in net.modules():
        if in_1x1 and hasattr(block, "conv3"):
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    return arrange(net), _stages(net, _LAYERS)


def _lightly(net: nn.Module) -> dict[str, Tensor]:
    """lightly/models/resnet.py in an nn.Sequential: neither ReLU nor pooling is a module."""
    state = {}
    for key, value in numbered(net.state_dict()).items():
        child, _, rest = key.partition(".")
        if child != "9":
            first = int(child) if int(child) < 2 else int(child) - 1
            state[f"{first}.{rest.replace('downsample', 'shortcut')}"] = value
    return state


def _of_transformers(make: Callable[[], nn.Module]) -> Any:
    net = make()
    stages = layouts_transformers.stages
    return net.state_dict(), lambda image: dict(zip(STAGES, stages(net, image), strict=True))


def _convnext(save: Callable[..., dict[str, Tensor]], *, grn: bool) -> Any:
    from timm.models.convnext import ConvNeXt

    net = ConvNeXt(
        depths=DEPTHS, dims=DIMS, num_classes=5, use_grn=grn, ls_init_value=None if grn else 1.0
    )
    net.load_state_dict(convert_transformers.convnext(grn=grn))
    return save(grn=grn), _stages(net.eval(), [f"stages.{i}" for i in range(4)])


def _torchvisions_convnext() -> Any:
    from torchvision.models import convnext as tv

    dims = [*DIMS, None]
    net = tv.ConvNeXt([tv.CNBlockConfig(dims[i], dims[i + 1], DEPTHS[i]) for i in range(4)])  # type: ignore[arg-type]
    layouts_vit.randomize(net, 0).eval()
    return net.state_dict(), _stages(net, [f"features.{2 * i + 1}" for i in range(4)])


def _swin(save: Callable[[], dict[str, Tensor]]) -> Any:
    from timm.models.swin_transformer import SwinTransformer

    net = SwinTransformer(
        img_size=(96, 192),
        num_classes=5,
        embed_dim=layouts_swin.WIDTH,
        depths=layouts_swin.DEPTHS,
        num_heads=layouts_swin.HEADS,
        window_size=layouts_swin.WINDOW,
        always_partition=True,
    )
    net.load_state_dict(layouts_swin.timm())
    return save(), lambda image: dict(
        zip(STAGES, net.eval().forward_intermediates(image, intermediates_only=True), strict=True)
    )


def _blocks(patches: nn.Module, positions: Tensor, blocks: Any) -> Features:
    """Return the map after the last block, of the patches alone.

    Args:
        patches: Module that embeds the patches: image -> (1, N, C) or (1, C, h, w).
        positions: Positions of the patches, (1, N, C).
        blocks: Blocks: (1, N, C) -> same, or a tuple of it and others.
    """

    def features(image: Tensor) -> Mapping[str, Tensor]:
        with torch.no_grad():
            x = patches(image)
            x = (x.flatten(2).transpose(1, 2) if x.dim() == 4 else x) + positions
            for block in blocks:
                x = block(x)
                x = x[0] if isinstance(x, tuple) else x
        side = round(x.shape[1] ** 0.5)
        return {"last_feat": x.transpose(1, 2).reshape(1, -1, side, side)}

    return features


def _timms_vit(*, in_chunks: bool = False) -> Any:
    net: Any = layouts_vit.timm_vit(0, init_values=1e-5 if in_chunks else None).eval()
    state = layouts_vit.chunked(net.state_dict()) if in_chunks else net.state_dict()
    return state, _blocks(net.patch_embed, net.pos_embed[:, 1:], net.blocks)


def _timms_tower(**settings: Any) -> Any:
    net: Any = layouts_vit.timm_vit(0, **settings).eval()
    positions = net.pos_embed[:, net.num_prefix_tokens :]
    return net.state_dict(), _blocks(net.patch_embed, positions, [net.norm_pre, *net.blocks])


def _clip_tower() -> Any:
    net = layouts_vit.ClipTower(nn.GELU())
    layouts_vit.randomize(net, 0).eval()
    blocks = [net.ln_pre, *net.transformer.get_submodule("resblocks").children()]
    positions = net.positional_embedding[None, 1:]
    return layouts_vit.two_towers(net), _blocks(net.conv1, positions, blocks)


def _tower_of_transformers(kind: str) -> Any:
    import transformers

    maker = getattr(transformers, kind)
    sizes = {
        "hidden_size": layouts_vit.WIDTH,
        "num_hidden_layers": layouts_vit.DEPTH,
        "num_attention_heads": layouts_vit.HEADS,
        "intermediate_size": layouts_vit.MLP,
        "image_size": layouts_vit.IMAGE,
        "patch_size": layouts_vit.PATCH,
    }
    net = layouts_vit.randomize(maker(maker.config_class(**sizes)), 0).eval()
    is_clip = hasattr(net, "pre_layrnorm")
    blocks = [functools.partial(layer, attention_mask=None) for layer in net.encoder.layers]
    blocks = [net.pre_layrnorm, *blocks] if is_clip else blocks
    positions = net.embeddings.position_embedding.weight[None, int(is_clip) :]
    patches = net.embeddings.patch_embedding
    return net.state_dict(), _blocks(patches, positions, blocks)


def _vit_of_transformers(kind: str, saved: str) -> Any:
    import transformers

    maker = getattr(transformers, kind)
    sizes: dict[str, Any] = {
        "hidden_size": layouts_vit.WIDTH,
        "num_hidden_layers": layouts_vit.DEPTH,
    }
    sizes |= {"image_size": layouts_vit.IMAGE, "patch_size": layouts_vit.PATCH}
    sizes |= {"num_attention_heads": layouts_vit.HEADS}
    net = layouts_vit.randomize(maker(maker.config_class(**sizes)), 0).eval()
    (blocks,) = [m for n, m in net.named_modules() if n in ("layers", "encoder.layer")]
    embeddings: Any = net.embeddings
    positions = embeddings.position_embeddings[:, 1:]
    content = functools.partial(_saved_by_transformers, net) if saved else net.state_dict()
    return content, _blocks(embeddings.patch_embeddings, positions, blocks)


def _dinov3(names: Callable[[dict[str, Tensor]], Any], *, gated: bool = False) -> Any:
    net = dinov3.transformers_dinov3(gated=gated)
    if names is dinov3.metas:
        dinov3.stored_periods(net)
    content = names(net.state_dict())
    return content, lambda image: {"last_feat": dinov3.transformers_map(net, image)}


def _timms_dinov3() -> Any:
    net: Any = layouts_vit.timm_dinov3()
    state, net.norm = net.state_dict(), nn.Identity()

    def features(image: Tensor) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {"last_feat": dinov3.as_map(net.forward_features(image), image)}

    return state, features


def _saved_by_transformers(net: Any, path: Any) -> None:
    """Write a network by transformers' own method, which gives tensors their published names."""
    net.save_pretrained(path.parent)
    (path.parent / "model.safetensors").rename(path)


def _torchvisions_vit() -> Any:
    net = layouts_vit.torchvision_vit(0)
    positions = net.encoder.pos_embedding[:, 1:]
    return net.state_dict(), _blocks(net.conv_proj, positions, net.encoder.layers)


def _timms(name: str) -> Any:
    from tests.oracles.timm_sweep import make

    net: Any = make(name)
    content = {"state_dict": net.state_dict(), "arch": name, "version": 2, "epoch": 1}
    return content, lambda image: dict(
        zip(STAGES, net.forward_intermediates(image, intermediates_only=True)[-4:], strict=True)
    )


_HEADS = {"num_heads": layouts_vit.HEADS}
_DINOV3, _DINOV3_HEADS = "transformers' DINOv3ViTModel", {"num_heads": dinov3.HEADS}
_RENAMED = "torchvision's ResNet, renamed"
_SWIN = "timm's SwinTransformer, always_partition"
SOURCES: dict[tuple[str, str], tuple[Source, ...]] = {
    ("resnet", "usual"): tuple(
        Source(
            "torchvision's ResNet", functools.partial(_resnet, nn.Module.state_dict, depth=depth)
        )
        for depth in (18, 50)
    ),
    ("resnet", "detectron2"): (
        Source(
            _RENAMED,
            functools.partial(_resnet, functools.partial(detectron2_layout, author="MOCO")),
        ),
    ),
    ("resnet", "lightly"): (Source(_RENAMED, functools.partial(_resnet, _lightly, stem="cifar")),),
    ("resnet", "unpooled"): (
        Source(
            _RENAMED,
            functools.partial(_resnet, lambda net: numbered(net.state_dict()), stem="cifar"),
        ),
    ),
    ("resnet", "numbered"): (
        Source(
            "nn.Sequential of torchvision's children",
            functools.partial(
                _resnet, lambda net: nn.Sequential(*[*net.children()][:-1]).state_dict()
            ),
        ),
    ),
    ("resnet", "simclr v2"): (
        Source(
            _RENAMED, functools.partial(_resnet, lambda net: simclr_v2(net.state_dict()), depth=50)
        ),
    ),
    ("resnet", "transformers"): tuple(
        Source(
            f"transformers' ResNetModel{text}",
            functools.partial(
                _of_transformers, functools.partial(layouts_transformers.resnet, **config)
            ),
            options,
        )
        for text, config, options in (
            (" of basic blocks", {"layer_type": "basic"}, {}),
            ("", {}, {}),
            (
                ", downsample_in_bottleneck",
                {"downsample_in_bottleneck": True},
                {"stride_in_1x1": True},
            ),
        )
    ),
    ("resnet", "caffe2"): (
        Source(
            f"{_RENAMED}, stride in the 1x1",
            functools.partial(_resnet, caffe2, in_1x1=True, depth=50),
        ),
    ),
    ("resnet", "caffe2 folded"): (
        Source(
            f"{_RENAMED}, stride in the 1x1",
            functools.partial(
                _resnet, functools.partial(caffe2, folded=True), in_1x1=True, depth=50
            ),
        ),
    ),
    ("convnext", "usual"): tuple(
        Source(
            "timm's ConvNeXt", functools.partial(_convnext, convert_transformers.convnext, grn=grn)
        )
        for grn in (False, True)
    ),
    ("convnext", "official"): tuple(
        Source(
            "timm's ConvNeXt, renamed",
            functools.partial(_convnext, convert_transformers.official_convnext, grn=grn),
        )
        for grn in (False, True)
    ),
    ("convnext", "torchvision"): (Source("torchvision's ConvNeXt", _torchvisions_convnext),),
    ("convnext", "transformers"): tuple(
        Source(
            f"transformers' {name}",
            functools.partial(
                _of_transformers, functools.partial(layouts_transformers.convnext, kind)
            ),
        )
        for name, kind in (("ConvNextModel", "v1"), ("ConvNextV2ForImageClassification", "v2"))
    ),
    ("convnext", "transformers DINOv3"): (
        Source(
            "transformers' DINOv3ConvNextModel",
            functools.partial(
                _of_transformers, functools.partial(layouts_transformers.convnext, "dinov3", 1e-6)
            ),
        ),
    ),
    ("vit", "usual"): (Source("timm's VisionTransformer", _timms_vit, _HEADS),),
    ("vit", "chunked"): (
        Source(
            "timm's VisionTransformer, renamed",
            functools.partial(_timms_vit, in_chunks=True),
            _HEADS,
        ),
    ),
    ("vit", "transformers"): (
        Source(
            "transformers' ViTModel, by save_pretrained",
            functools.partial(_vit_of_transformers, "ViTModel", "by itself"),
        ),
    ),
    ("vit", "transformers 5"): (
        Source(
            "transformers' ViTModel, by torch.save",
            functools.partial(_vit_of_transformers, "ViTModel", ""),
            _HEADS,
        ),
    ),
    ("vit", "transformers DINOv2"): (
        Source(
            "transformers' Dinov2Model",
            functools.partial(_vit_of_transformers, "Dinov2Model", "by itself"),
        ),
    ),
    ("vit", "pytorch/vision ViT"): (
        Source("torchvision's VisionTransformer", _torchvisions_vit, _HEADS),
    ),
    ("swin", "usual"): (Source(_SWIN, functools.partial(_swin, layouts_swin.timm)),),
    **{
        ("swin", name): (Source(f"{_SWIN}, renamed", functools.partial(_swin, save)),)
        for name, save in (
            ("microsoft", layouts_swin.official),
            ("transformers", layouts_swin.transformers),
            ("torchvision", layouts_swin.torchvision),
        )
    },
    ("vit", "timm CLIP"): (
        Source(
            "timm's VisionTransformer, pre_norm",
            functools.partial(
                _timms_tower,
                pre_norm=True,
                act_layer="quick_gelu",
                norm_layer=functools.partial(nn.LayerNorm, eps=1e-5),
            ),
            {**_HEADS, "activation": "quick_gelu"},
        ),
    ),
    ("vit", "timm SigLIP"): (
        Source(
            "timm's VisionTransformer, attention pool",
            functools.partial(
                _timms_tower, class_token=False, global_pool="map", act_layer="gelu_tanh"
            ),
            {**_HEADS, "activation": "gelu_tanh"},
        ),
    ),
    ("vit", "openai/CLIP or open_clip"): (
        Source("torch's MultiheadAttention", _clip_tower, {**_HEADS, "activation": "gelu"}),
    ),
    ("vit", "transformers CLIP"): (
        Source(
            "transformers' CLIPVisionModel",
            functools.partial(_tower_of_transformers, "CLIPVisionModel"),
            {**_HEADS, "activation": "quick_gelu"},
        ),
    ),
    ("vit", "transformers SigLIP"): (
        Source(
            "transformers' SiglipVisionModel",
            functools.partial(_tower_of_transformers, "SiglipVisionModel"),
            _HEADS,
        ),
    ),
    ("vit", "facebookresearch/dinov3"): (
        Source(f"{_DINOV3}, renamed", functools.partial(_dinov3, dinov3.metas), _DINOV3_HEADS),
    ),
    ("vit", "timm DINOv3"): (Source("timm's Eva", _timms_dinov3, _DINOV3_HEADS),),
    **{
        ("vit", f"{library} DINOv3{', gated' if gated else ''}"): (
            Source(_DINOV3, functools.partial(_dinov3, names, gated=gated), _DINOV3_HEADS),
        )
        for library, names in (("transformers 5", dict), ("transformers", dinov3.old_names))
        for gated in (True, False)
    },
    ("timm", "timm_model"): tuple(
        Source(f"timm's {name}", functools.partial(_timms, name))
        for name in ("resnet18d", "seresnet18", "regnety_002", "edgenext_xx_small", "dla34")
    ),
}
