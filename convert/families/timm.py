"""Any network of timm that has feature maps of strides 4 to 32, by timm's name of it.

No tensor tells which network a file holds, so its name is given. The family's own names are those
of timm's `features_only` model, below `net.`; timm's usual ones, which files have, belong to the
whole classifier.
"""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from convert.families.base import (
    FAMILIES,
    LEFT_AT_INIT,
    Architecture,
    Family,
    Hints,
    Option,
    Pyramid,
    Scheme,
    check_layer_norms,
    later,
)
from convert.families.convnext import FEATURES
from moco.common.errors import UserError, shown
from moco.modeling import soundness

if TYPE_CHECKING:
    from torch import Tensor

OPTION = Option(
    "timm_model",
    None,
    "take the file for this network of timm, which may be any with maps of strides 4 to 32, e.g. "
    "regnety_004 or regnety_004.tag; its mean and std are timm's of that tag",
    is_text=True,
)
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
    """Check networks with batch norm as a ResNet, others as a transformer."""
    if any(key.endswith(".running_var") for key in state):
        return soundness.check_trained(state, where, named, **options)
    vectors = {key: value for key, value in state.items() if value.dim() == 1}
    return check_layer_norms(vectors, where, named, pattern=r"\.weight$")


def scheme_of(model: str) -> Scheme:
    """Return how files name the tensors of one network of timm, and its pixels.

    Args:
        model: timm's name, with or without the tag that the pixels belong to.

    Raises:
        UserError: timm has no such network, or none with a pyramid.
    """
    from timm.models import get_pretrained_cfg

    from convert.modeling.timm_features import own_names, usual_names

    name = TimmArchitecture(model.partition(".")[0]).name
    own, usual = own_names(name), usual_names(name)
    original = {new: key for key, new in own.items()}
    weights = [key for key in own if key.endswith(".weight")]
    heads = usual.keys() - own.keys()
    its: Any = get_pretrained_cfg(model) or get_pretrained_cfg(name)
    (mean, std) = (tuple(round(255 * x, 6) for x in values) for values in (its.mean, its.std))
    return Scheme(
        (weights[0], weights[-1]),
        own.get,
        re.compile(""),  # every other name is another network's
        lambda key: original.get(key, key),
        "timm",
        is_owners=True,
        dropped={"timm's head": " ".join(heads), **LEFT_AT_INIT},
        says={"pixels of": f"{name}.{its.tag}" if its.tag else name},
        mean=mean,
        std=std,
    )


def recognize(state: Mapping[str, Tensor], hints: Hints) -> TimmArchitecture:
    """Return the network that the option names, see `convert.families.base.Family`."""
    if "pixels of" in hints.says:
        hints.notes.append(f"pixels are those of timm's {hints.says['pixels of']}")
    return TimmArchitecture(hints.asked[OPTION.name].partition(".")[0])


# Of a detector's configuration.
TASK_KEYS: dict[str, Any] = {
    # Any network of timm with maps of strides 4 to 32, by its name without a tag. Weights by
    # timm://... set it; for a file it has to be set.
    "MODEL.TIMM.NAME": "",
    "MODEL.TIMM.DROP_PATH": 0.0,  # timm's drop_path_rate, 0 to below 1
}


def _arguments(keys: Any, freeze_at: int) -> dict[str, Any]:
    """Return the arguments of `convert.modeling.timm_features.TimmFeatures` in a detector."""
    if not keys.NAME:
        raise UserError("MODEL.TIMM.NAME: set it to timm's name of the network, e.g. regnety_004")
    if not 0 <= keys.DROP_PATH < 1:
        raise UserError(f"MODEL.TIMM.DROP_PATH: got {keys.DROP_PATH}, expected 0 to below 1")
    from convert.modeling.timm_features import probe  # imports torch and timm

    try:
        probe(keys.NAME)
    except UserError as error:
        raise UserError(f"MODEL.TIMM.NAME: {error}") from error
    return {"name": keys.NAME, "drop_path": keys.DROP_PATH}


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
        recognize=recognize,
        build=lambda architecture: features(architecture.name),
        reference=lambda architecture: loaded_by_timm(architecture.name),
        owner="timm's own network",
        assumes="the network as the installed timm has it, which is on both sides of the proof",
        keys=TASK_KEYS,
        # Which tensors are before which map differs from network to network.
        pyramid=Pyramid(
            lambda: pkgutil.resolve_name("convert.modeling.timm_features:TimmFeatures"),
            _arguments,
            num_parts=0,
        ),
        features={name: name for name in FEATURES},
        named_by=OPTION.name,
        named_scheme=scheme_of,
        options=(OPTION,),
        check_trained=check_trained,
    )
