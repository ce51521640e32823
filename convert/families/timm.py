"""Any network of timm that has feature maps of strides 4 to 32, by timm's name of it.

No tensor tells which network a file holds, so its name is given and convert/timm_files.py reads the
file. The family's own names are those of timm's `features_only` model, below `net.`; timm's usual
ones, which files have, belong to the whole classifier.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from convert.families.base import FAMILIES, Architecture, Family, check_layer_norms, later
from convert.families.convnext import FEATURES
from moco.common.errors import UserError, shown
from moco.modeling import soundness

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"[a-z0-9_]{1,100}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class TimmArchitecture(Architecture):
    """A network of timm by its name without a tag, e.g. "regnety_004"; raises UserError."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UserError(f"name: got {shown(self.name)}, expected timm's name of a network")

    def __str__(self) -> str:
        return f"timm {self.name}"

    def d2_keys(self) -> dict[str, Any]:
        return {"MODEL.TIMM.NAME": self.name}

    def details(self) -> str:
        return "the network as the installed timm has it"

    def lost_options(self) -> list[str]:
        return [f"--timm-model {self.name}"]

    def task_key(self) -> tuple[str, str]:
        return "MODEL.TIMM.NAME", "timm {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        keys = {"MODEL.TIMM.NAME": "regnety_002"}
        return "configs/voc/faster_rcnn_timm_small.yaml", keys, "DATASETS.VOC_DIR path/to/voc "


def check_trained(
    state: Mapping[str, Tensor], where: str, named: Callable[[str], str] = str, **options: Any
) -> list[str]:
    """Of networks with batch norm as of a ResNet, of others as of a transformer."""
    if any(key.endswith(".running_var") for key in state):
        return soundness.check_trained(state, where, named, **options)
    vectors = {key: value for key, value in state.items() if value.dim() == 1}
    return check_layer_norms(vectors, where, named, pattern=r"\.weight$")


@FAMILIES.register()
@functools.cache
def timm() -> Family:
    """timm's networks, by their names."""
    features = later("convert.modeling.timm_features:TimmFeatures")
    loaded_by_timm = later("convert.modeling.timm_features:LoadedByTimm")
    return Family(
        name="timm",
        networks="with --timm-model any network of timm with maps of strides 4 to 32",
        architecture=TimmArchitecture,
        schemes={},
        dropped={},
        heads={"": "not looked at"},
        to_detectron2=str,
        from_detectron2=str,
        recognize=lambda *_: None,  # never asked: there are no schemes
        build=lambda architecture: features(architecture.name),
        reference=lambda architecture: loaded_by_timm(architecture.name),
        features={name: name for name in FEATURES},
        check_trained=check_trained,
    )
