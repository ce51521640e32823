"""The architectures of plain vision transformers, as input contracts describe them."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from moco.common.errors import UserError, shown

FEATURE = "last_feat"  # Detectron2's name


def key_of(field: str) -> str:
    """What a field of the architecture is called below MODEL.VIT."""
    return "PRETRAIN_IMAGE_SIZE" if field == "image_size" else field.upper()


@dataclasses.dataclass(frozen=True)
class ViTArchitecture:
    """A plain vision transformer; raises UserError out of its range.

    Attributes:
        mlp_dim: hidden width of the MLPs.
        image_size: px, for which the position embedding was trained.
        qkv_bias: whether queries, keys and values have a bias.
        layer_scale: whether blocks have LayerScale.
        class_position: whether the position embedding has a first slot, for the class token.
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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and not (type(value) is int and 1 <= value <= 2**16):
                raise UserError(
                    f"{field.name}: got {shown(value)}, expected a whole number, 1..65536"
                )
            if field.type == "bool" and type(value) is not bool:
                raise UserError(f"{field.name}: got {shown(value)}, expected true or false")
        if type(self.layer_norm_eps) is not float or not 0 < self.layer_norm_eps < 1:
            raise UserError(f"layer_norm_eps: got {shown(self.layer_norm_eps)}, expected 0..1")
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
        return {f"MODEL.VIT.{key_of(k)}": v for k, v in dataclasses.asdict(self).items()}

    def details(self) -> str:
        return (
            f"patches of {self.patch_size} px, positions of {self.image_size} px images, "
            f"LayerNorm eps {self.layer_norm_eps:g}"
        )

    def lost_options(self) -> list[str]:
        return [f"--num-heads {self.num_heads}"]

    def task_key(self) -> tuple[str, str]:
        return "MODEL.VIT.EMBED_DIM", "ViT of width {}"

    def in_torchvision(self) -> str:
        return f"torchvision has other names for the tensors of a {self}"

    def in_detectron2(self) -> str:
        if importlib.util.find_spec("timm") is None:
            return "timm, which Detectron2's own ViT imports, is not installed"
        return ""

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        keys = {"EMBED_DIM": 192, "DEPTH": 12, "NUM_HEADS": 3, "MLP_DIM": 768}
        keys = {f"MODEL.VIT.{name}": value for name, value in keys.items()}
        data = "DATASETS.VOC_DIR path/to/voc "
        return "configs/voc/faster_rcnn_ViT_Ti_small.yaml", keys, data

    def classification_stem(self) -> str:
        return ""
