"""The architectures of plain vision transformers, as input contracts describe them."""

from __future__ import annotations

import dataclasses
from typing import Any

from convert.families.base import Architecture
from moco.common.errors import UserError

FEATURE = "last_feat"  # Detectron2's name
# How patches are resized, the default first; see convert/families/vit_changes.py.
PATCH_RULES = ("pseudo-inverse", "bicubic")
# Fields of the architecture -> their keys below MODEL.VIT. The other fields are about the source.
KEYS = {
    "embed_dim": "EMBED_DIM",
    "depth": "DEPTH",
    "num_heads": "NUM_HEADS",
    "mlp_dim": "MLP_DIM",
    "patch_size": "PATCH_SIZE",
    "image_size": "PRETRAIN_IMAGE_SIZE",
    "qkv_bias": "QKV_BIAS",
    "layer_scale": "LAYER_SCALE",
    "class_position": "CLASS_POSITION",
    "layer_norm_eps": "LAYER_NORM_EPS",
}


@dataclasses.dataclass(frozen=True)
class ViTArchitecture(Architecture):
    """A plain vision transformer; raises UserError out of its range.

    Attributes:
        mlp_dim: hidden width of the MLPs.
        image_size: px, for which the position embedding was trained.
        qkv_bias: whether queries, keys and values have a bias.
        layer_scale: whether blocks have LayerScale.
        class_position: whether the position embedding has a first slot, for the class token.
        class_token, registers, final_norm: what the source has, and the backbone here has not;
            registers are counted.
    """

    embed_dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: int
    image_size: int
    qkv_bias: bool
    layer_scale: bool
    class_position: bool
    layer_norm_eps: float
    class_token: bool = False
    registers: int = 0
    final_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, whole in (("num_heads", "embed_dim"), ("patch_size", "image_size")):
            if getattr(self, whole) % getattr(self, name):
                raise UserError(
                    f"{name}: got {getattr(self, name)}, which does not divide {whole} "
                    f"{getattr(self, whole)}"
                )

    def __str__(self) -> str:
        text = f"ViT of {self.depth} blocks, width {self.embed_dim}, {self.num_heads} heads"
        return text + (", LayerScale" if self.layer_scale else "")

    def d2_keys(self) -> dict[str, Any]:
        its = dataclasses.asdict(self)
        return {f"MODEL.VIT.{key}": its[name] for name, key in KEYS.items()}

    def details(self) -> str:
        slot = "with" if self.class_position else "without"
        lacks = [
            *(["class token"] if self.class_token else []),
            *([f"{self.registers} registers"] if self.registers else []),
            *(["final norm"] if self.final_norm else []),
        ]
        return (
            f"patches of {self.patch_size} px, positions of {self.image_size} px images {slot} a "
            f"class slot, LayerNorm eps {self.layer_norm_eps:g}"
            + (f", without the source's {', '.join(lacks)}" if lacks else "")
        )

    def lost_options(self) -> list[str]:
        return [f"--num-heads {self.num_heads}"]

    def task_key(self) -> tuple[str, str]:
        return "MODEL.VIT.EMBED_DIM", "ViT of width {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        keys = {"EMBED_DIM": 192, "DEPTH": 12, "NUM_HEADS": 3, "MLP_DIM": 768}
        keys = {f"MODEL.VIT.{name}": value for name, value in keys.items()}
        data = "DATASETS.VOC_DIR path/to/voc "
        return "configs/voc/faster_rcnn_ViT_Ti_small.yaml", keys, data
