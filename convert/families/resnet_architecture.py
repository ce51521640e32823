"""The architectures of the ResNet family, as input contracts describe them."""

from __future__ import annotations

import dataclasses
from typing import Any

from convert.families.base import Architecture
from moco.common.errors import UserError, shown

# Blocks in res2..res5. 10 is this project's small network (one basic block per stage); the others
# are Table 1 of "Deep Residual Learning for Image Recognition" (arXiv:1512.03385).
NUM_BLOCKS: dict[int, tuple[int, int, int, int]] = {
    10: (1, 1, 1, 1),
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
# Kernel size, stride of the convolution, stride of the whole stem (the ImageNet stem max-pools).
STEMS: dict[str, tuple[int, int, int]] = {
    "imagenet": (7, 2, 4),
    "cifar": (3, 1, 1),
    "stride2": (3, 2, 2),
}


def is_bottleneck(depth: int) -> bool:
    """Whether a ResNet of this depth is made of bottlenecks (50 and deeper) or basic blocks."""
    return depth >= 50


@dataclasses.dataclass(frozen=True)
class ResNetArchitecture(Architecture):
    """A ResNet, as Detectron2's MODEL.RESNETS describes it; raises UserError out of its range."""

    stride_in_1x1: bool  # False: a bottleneck's stride is in its 3x3 (torchvision)
    depth: int  # 10, 18, 34, 50, 101 or 152
    stem: str  # "imagenet" 7x7/2 + max-pool, "cifar" 3x3/1, "stride2" 3x3/2
    stem_out_channels: int
    res2_out_channels: int
    num_groups: int
    width_per_group: int  # channels per group of res2's 3x3; 64 where there are no bottlenecks

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("depth", tuple(NUM_BLOCKS)), ("stem", tuple(STEMS))):
            value = getattr(self, name)
            if value not in choices:
                raise UserError(f"{name}: got {shown(value)}, expected one of {list(choices)}")
        if not is_bottleneck(self.depth) and self.num_groups != 1:
            raise UserError(
                f"num_groups: got {self.num_groups}, but ResNet-{self.depth} has basic blocks, "
                "which have no groups"
            )

    def __str__(self) -> str:
        text = f"ResNet-{self.depth}"
        if self.stem != "imagenet":
            text += f", {self.stem} stem"
        if self.stem_out_channels != 64:
            text += f", {self.stem_out_channels} stem channels"
        if self.num_groups != 1 or (is_bottleneck(self.depth) and self.width_per_group != 64):
            text += f", {self.num_groups} groups of {self.width_per_group}"
        return text

    def d2_keys(self) -> dict[str, Any]:
        return {f"MODEL.RESNETS.{k.upper()}": v for k, v in dataclasses.asdict(self).items()}

    def details(self) -> str:
        return f"stride in the {'1x1' if self.stride_in_1x1 else '3x3'}"

    def lost_options(self) -> list[str]:
        return ["--stem stride2"] if self.stem == "stride2" else []

    def task_key(self) -> tuple[str, str]:
        return "MODEL.RESNETS.DEPTH", "ResNet-{}"

    def in_torchvision(self) -> str:
        if not self.stride_in_1x1:
            return ""
        return (
            f"the stride of this {self} is in the 1x1, and torchvision has no such network: its "
            "own would load these tensors and compute something else"
        )

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        folder, depth = "configs/voc/faster_rcnn", "MODEL.RESNETS.DEPTH"
        if is_bottleneck(self.depth):
            return f"{folder}_R_50_C4_24k.yaml", {depth: 50}, ""
        channels = {"MODEL.RESNETS.RES2_OUT_CHANNELS": 64}
        data = "DATASETS.VOC_DIR path/to/voc "
        return f"{folder}_R_18_C4_small.yaml", {depth: 18, **channels}, data
