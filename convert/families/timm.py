"""Networks of timm with feature maps of strides 4 to 32, by timm's model name.

The tensors do not identify the network, so its name is an option. The family's own names are those
of timm's `features_only` model, prefixed with `net.`; files have the names of the whole classifier.
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
from convert.families.stages import FEATURES
from moco.common.errors import UserError, shown
from moco.common.keys import Key, below
from moco.modeling import soundness

if TYPE_CHECKING:
    from torch import Tensor

OPTION = Option(
    "timm_model",
    None,
    "read the file as this network of timm, any with feature maps of strides 4 to 32, e.g. "
    "regnety_004 or regnety_004.tag; mean and std are those of timm's tag",
    is_text=True,
)
_NAME = re.compile(r"[a-z0-9_]{1,100}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class TimmArchitecture(Architecture):
    """Architecture given by timm's model name without a tag, e.g. "regnety_004".

    Raises:
        UserError: If it cannot be a model name.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UserError(f"name: got {shown(self.name)}, expected a model name of timm")

    def __str__(self) -> str:
        return f"timm {self.name}"

    def d2_keys(self) -> dict[str, Any]:
        """Return the key MODEL.TIMM.NAME."""
        return {"MODEL.TIMM.NAME": self.name}

    def details(self) -> str:
        """Describe that the installed timm defines the network."""
        return "the network as the installed timm defines it"

    def lost_options(self) -> list[str]:
        """Return --timm-model."""
        return [f"--timm-model {self.name}"]

    def task_key(self) -> tuple[str, str]:
        """Return MODEL.TIMM.NAME."""
        return "MODEL.TIMM.NAME", "timm {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        """Return the VOC task of regnety_002."""
        keys = {"MODEL.TIMM.NAME": "regnety_002"}
        return "configs/voc/faster_rcnn_timm_small.yaml", keys, "DATASETS.VOC_DIR path/to/voc "


def check_trained(
    state: Mapping[str, Tensor], where: str, named: Callable[[str], str] = str, **options: Any
) -> list[str]:
    """Check networks with batch norm like ResNets, others like transformers."""
    if any(key.endswith(".running_var") for key in state):
        return soundness.check_trained(state, where, named, **options)
    vectors = {key: value for key, value in state.items() if value.dim() == 1}
    return check_layer_norms(vectors, where, named, pattern=r"\.weight$")


def scheme_of(model: str) -> Scheme:
    """Return the naming scheme and normalization of one network of timm.

    Args:
        model: timm's model name, with or without the tag that selects the normalization.

    Raises:
        UserError: If timm has no such network, or it has no feature pyramid.
    """
    from timm.models import get_pretrained_cfg

    from convert.modeling.timm_features import own_names, usual_names

    name = TimmArchitecture(model.partition(".")[0]).name
    own, usual = own_names(name), usual_names(name)
    original = {new: key for key, new in own.items()}
    weights = [key for key in own if key.endswith(".weight")]
    heads = {*(usual.keys() - own.keys())}
    try:
        its: Any = get_pretrained_cfg(model) or get_pretrained_cfg(name)
    except RuntimeError as error:
        tag = model.partition(".")[2]
        raise UserError(f"timm {name}: the installed timm has no tag {shown(tag)} of it") from error
    # timm's defaults of some networks have no head, but fine-tuned ones do.
    names = (its.classifier,) if isinstance(its.classifier, str) else its.classifier or ()
    heads |= {f"{name}.*" for name in names}
    (mean, std) = (tuple(round(255 * x, 6) for x in values) for values in (its.mean, its.std))
    return Scheme(
        (weights[0], weights[-1]),
        own.get,
        re.compile(""),  # any other name belongs to another network
        lambda key: original.get(key, key),
        "timm",
        is_owners=True,
        dropped={**({"timm's head": " ".join(heads)} if heads else {}), **LEFT_AT_INIT},
        metadata={"pixels of": f"{name}.{its.tag}" if its.tag else name},
        mean=mean,
        std=std,
    )


def note_of_pixels(model: str) -> str:
    """Return the note on the normalization of a network without one of its own."""
    return f"mean and std are those of timm's {model}"


def recognize(state: Mapping[str, Tensor], hints: Hints) -> TimmArchitecture:
    """Return the network that the option names; see `Family.recognize`."""
    if "pixels of" in hints.metadata:
        hints.notes.append(note_of_pixels(hints.metadata["pixels of"]))
    return TimmArchitecture(hints.requested[OPTION.name].partition(".")[0])


# Keys of a detector's configuration.
TASK_KEYS = (
    Key(
        "MODEL.TIMM.NAME",
        "",
        "Model name of timm without a tag; any network with feature maps of strides 4 to 32. Set "
        "by weights from timm://...; required for a file.",
    ),
    Key("MODEL.TIMM.DROP_PATH", 0.0, "timm's drop_path_rate.", below(0, 1)),
)


def _arguments(keys: Any, freeze_at: int) -> dict[str, Any]:
    """Return the arguments of `convert.modeling.timm_features.TimmFeatures` in a detector."""
    if not keys.NAME:
        raise UserError("MODEL.TIMM.NAME: expected timm's model name, e.g. regnety_004")
    from convert.modeling.timm_features import probe  # imports torch and timm

    try:
        probe(keys.NAME)
    except UserError as error:
        raise UserError(f"MODEL.TIMM.NAME: {error}") from error
    return {"name": keys.NAME, "drop_path": keys.DROP_PATH}


@FAMILIES.register()
@functools.cache
def timm() -> Family:
    """Return the family of timm's networks."""
    features = later("convert.modeling.timm_features:TimmFeatures")
    loaded_by_timm = later("convert.modeling.timm_features:LoadedByTimm")
    return Family(
        name="timm",
        networks="others of timm with --timm-model (any with maps of strides 4 to 32)",
        architecture=TimmArchitecture,
        schemes={},
        dropped={},
        heads={"": "head not inspected"},
        to_detectron2=str,
        from_detectron2=str,
        recognize=recognize,
        build=lambda architecture: features(architecture.name),
        reference=lambda architecture: loaded_by_timm(architecture.name),
        owner="timm's own network, as both sides of the comparison are",
        keys=TASK_KEYS,
        # The tensors that precede a feature map differ between networks, so none can be frozen.
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
