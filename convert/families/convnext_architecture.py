"""The architectures of ConvNeXts, as input contracts describe them."""

from __future__ import annotations

import dataclasses
from typing import Any

from convert.families.base import Architecture
from moco.common.errors import UserError, shown

FEATURES = ("res2", "res3", "res4", "res5")  # Detectron2's words, of strides 4 to 32


@dataclasses.dataclass(frozen=True)
class ConvNeXtArchitecture(Architecture):
    """A ConvNeXt, or a ConvNeXt V2; raises UserError out of its range.

    Attributes:
        depths: number of blocks in each of the four stages.
        dims: their channels.
        layer_scale: whether blocks have LayerScale, as version 1.
        grn: whether their MLPs have a global response normalization, as version 2.
    """

    depths: tuple[int, ...]
    dims: tuple[int, ...]
    layer_scale: bool
    grn: bool
    layer_norm_eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("depths", "dims"):
            values = getattr(self, name)
            four = isinstance(values, list | tuple) and len(values) == len(FEATURES)
            if not four or not all(type(v) is int and 1 <= v <= 2**16 for v in values):
                raise UserError(f"{name}: got {shown(values)}, expected four numbers, 1..65536")
            object.__setattr__(self, name, tuple(values))

    def __str__(self) -> str:
        blocks, widths = ("-".join(map(str, values)) for values in (self.depths, self.dims))
        return f"ConvNeXt{' V2' if self.grn else ''} of {blocks} blocks, widths {widths}"

    def d2_keys(self) -> dict[str, Any]:
        return {
            f"MODEL.CONVNEXT.{name.upper()}": list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }

    def details(self) -> str:
        return f"LayerNorm eps {self.layer_norm_eps:g}"

    def task_key(self) -> tuple[str, str]:
        return "MODEL.CONVNEXT.DIMS", "ConvNeXt of widths {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        file, depths, width, data = "coco/mask_rcnn_ConvNeXt_T_FPN_3x", [3, 3, 9, 3], 96, ""
        if self.dims[0] < width:  # timm's small ones
            file, depths, width = "voc/faster_rcnn_ConvNeXt_A_small", [2, 2, 6, 2], 40
            data = "DATASETS.VOC_DIR path/to/voc "
        dims = [width * 2**stage for stage in range(len(FEATURES))]
        keys = {"MODEL.CONVNEXT.DEPTHS": depths, "MODEL.CONVNEXT.DIMS": dims}
        return f"configs/{file}.yaml", keys, data
