"""Networks of timm by their names, as timm builds them; see convert/modeling/timm_network.py.

The tensors do not identify the network, so the name is an option, or recorded in the file. The
family's own names of tensors are timm's, prefixed with `net.`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from convert.families.base import (
    FEATURES,
    LEFT_AT_INIT,
    TIMM,
    Architecture,
    Family,
    Hints,
    Option,
    Pyramid,
    Scheme,
    check_layer_norms,
    register,
    scale_to_255,
)
from convert.families.timm_index import is_plain
from convert.families.vit import FEATURE
from moco.common.errors import DataError, UserError, format_value, plural
from moco.common.keys import Key, Keys, half_open_interval
from moco.modeling import soundness

if TYPE_CHECKING:
    from torch import Tensor, nn

# Arguments of timm's `create_model` that name files or other code, or ask for another kind of
# module. A record that sets one is no description of a network.
NOT_OF_A_NETWORK = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"),
    *("features_only", "out_indices", "feature_cls", "scriptable", "exportable", "no_jit"),
    *("device", "dtype", "pretrained_strict", "pretrained_filter_fn"),
)
# Arguments that change no feature; all others are given to timm, whose signatures decide.
WITHOUT_EFFECT = frozenset(
    (
        *("num_classes", "drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate"),
        *("pos_drop_rate", "patch_drop_rate", "weight_init", "head_init_scale"),
        *("strict_img_size",),
    )
)
_MAX_NUMBER, _MAX_DEPTH = 2**16, 256  # a network of more blocks takes long to describe


def network_arguments(recorded: Any, where: str) -> dict[str, Any]:
    """Return the recorded arguments of `timm.create_model` that may change features.

    timm's signatures decide which arguments there are. Values are numbers, truth values, texts, or
    lists of these.

    Args:
        recorded: Value in the record, or None.
        where: Name of the record, for messages.

    Raises:
        DataError: If the value is no mapping, or has other arguments than those of a network.
    """
    if recorded is None:
        return {}
    if not isinstance(recorded, Mapping):
        raise DataError(f"{where}: got {format_value(recorded)}, expected arguments by name")
    found = {}
    for name, value in recorded.items():
        if (name in NOT_OF_A_NETWORK and not value) or name in WITHOUT_EFFECT:
            continue
        limit = _MAX_DEPTH if "depth" in str(name) or "layers" in str(name) else _MAX_NUMBER
        is_text = isinstance(name, str) and name not in NOT_OF_A_NETWORK
        if not (is_text and _is_plain_value(value, limit)):
            raise DataError(
                f"{where} has {format_value(name)}, which is not supported as it is set there"
            )
        found[name] = value
    return found


def _is_plain_value(value: Any, limit: int) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64 and all(_is_plain_value(item, limit) for item in value)
    if isinstance(value, int | float):
        return math.isfinite(value) and abs(value) <= limit
    return value is None or (isinstance(value, str) and len(value) <= 100)


def format_arguments(arguments: Mapping[str, Any]) -> str:
    """Format arguments as canonical text, e.g. `act_layer="relu" depth=2`.

    The text is not JSON, which a command line would read as a dict.
    """
    values = {name: json.dumps(value, separators=(",", ":")) for name, value in arguments.items()}
    return " ".join(f"{name}={values[name]}".replace(" ", r"\u0020") for name in sorted(values))


def parse_arguments(text: str, where: str = "arguments") -> dict[str, Any]:
    """Parse the text of arguments; values that are not JSON are texts.

    Raises:
        UserError: If the text has other arguments than those of a network.
    """
    found: dict[str, Any] = {}
    for word in text.split():
        name, mark, value = word.partition("=")
        if not (mark and name.isidentifier()):
            raise UserError(
                f"{where}: got {format_value(text)}, expected e.g. img_size=384 depth=2"
            )
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return network_arguments(found, where)


OPTION = Option(
    "timm_model",
    None,
    "read the file as this network of timm, e.g. regnety_004 or regnety_004.tag; mean and std are "
    "those of timm's tag",
    is_text=True,
)
ARGUMENTS = Option(
    "timm_arguments",
    None,
    "arguments of timm.create_model with which the network of --timm-model was built, e.g. "
    "'img_size=384 act_layer=relu' (default: the file's)",
    is_text=True,
)
_NAME = re.compile(r"[a-z0-9_]{1,100}", re.ASCII)
EXAMPLE_PX = 400  # of the images of the example task, at most
PATCH_PX = 16  # to which patches are resampled whose side is no power of two


@dataclasses.dataclass(frozen=True)
class TimmArchitecture(Architecture):
    """Architecture given by timm's model name and its arguments.

    Attributes:
        name: Model name without a tag, e.g. "regnety_004".
        arguments: Arguments of `timm.create_model` as text, see `format_arguments`.

    Raises:
        UserError: If they cannot be a model name, or arguments of a network.
    """

    name: str
    arguments: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UserError(f"name: got {format_value(self.name)}, expected a model name of timm")
        if not isinstance(self.arguments, str):
            raise UserError(f"arguments: got {format_value(self.arguments)}, expected a text")
        object.__setattr__(self, "arguments", format_arguments(parse_arguments(self.arguments)))

    def __str__(self) -> str:
        return f"timm {self.name}" + (f" with {self.arguments}" if self.arguments else "")

    def d2_keys(self) -> dict[str, Any]:
        """Return the keys MODEL.TIMM.NAME and ARGUMENTS."""
        return {"MODEL.TIMM.NAME": self.name, "MODEL.TIMM.ARGUMENTS": self.arguments}

    def details(self) -> str:
        """Describe that the installed timm defines the network."""
        return "the network as the installed timm defines it"

    def lost_options(self) -> list[str]:
        """Return --timm-model and --timm-arguments."""
        arguments = [f"--timm-arguments '{self.arguments}'"] if self.arguments else []
        return [f"--timm-model {self.name}", *arguments]

    def task_key(self) -> tuple[str, str]:
        """Return MODEL.TIMM.NAME."""
        return "MODEL.TIMM.NAME", "timm {}"

    def example_task(self) -> tuple[str, dict[str, Any], str]:
        """Return the VOC task of regnety_002 or, for a single map, of DeiT-Ti."""
        from convert.modeling.timm_network import network_maps

        one_map = FEATURE in network_maps(self.name, self.arguments).strides
        task, name = ("_vit", "deit_tiny_patch16_224") if one_map else ("", "regnety_002")
        config = f"configs/voc/faster_rcnn_timm{task}_small.yaml"
        return config, {"MODEL.TIMM.NAME": name}, "DATASETS.VOC_DIR path/to/voc "

    def keys_to_set(self) -> dict[str, Any]:
        """Return the network's name, and the square that one of a single size needs."""
        from convert.modeling.timm_network import FIXED, network_maps

        maps = network_maps(self.name, self.arguments)
        needs_square = maps.sizes == FIXED and FEATURE not in maps.strides
        side = maps.image_size[0]
        square = {"MODEL.BACKBONE.SQUARE_PAD": -(-EXAMPLE_PX // side) * side}
        return {**super().keys_to_set(), **(square if needs_square else {})}


def requested_architecture(requested: Mapping[str, Any]) -> TimmArchitecture:
    """Return the architecture that the options name."""
    name = str(requested[OPTION.name]).partition(".")[0]
    return TimmArchitecture(name, requested.get(ARGUMENTS.name, ""))


def published_config(model: str) -> Any:
    """Return timm's configuration of published weights, or None if a network has none.

    Args:
        model: Name of the network, with or without the tag of its weights.

    Raises:
        UserError: If timm has no such tag.
    """
    from timm.models import get_pretrained_cfg  # takes longer than a conversion without names

    name, _, tag = model.partition(".")
    try:
        return get_pretrained_cfg(model) or get_pretrained_cfg(name)
    except RuntimeError as error:
        raise UserError(
            f"timm {name}: the installed timm has no tag {format_value(tag)} of it"
        ) from error


def named_pixels(
    names: Mapping[str, str], notes: list[str]
) -> tuple[soundness.Triple | None, soundness.Triple | None]:
    """Return mean and std, 0..255, of the first of these networks that timm has, or None.

    timm's train.py records neither if they are the network's own.

    Args:
        names: Recorded names by place, with the tags of their weights.
        notes: Notes of the conversion, to which one is appended.
    """
    for place, name in names.items():
        if not in_timm(name):
            continue
        try:
            own = published_config(name)
        except UserError:  # an unknown tag
            own = published_config(name.partition(".")[0])
        if own is not None:
            notes.append(f"mean and std are those of timm's {name}, which {place} names")
            return scale_to_255(own.mean), scale_to_255(own.std)
    return None, None


def in_timm(name: str) -> bool:
    """Return whether the installed timm has a network of this name, with or without a tag."""
    import timm

    return bool(timm.is_model(name))


def check_names(
    names: Mapping[str, str],
    arguments: Mapping[str, Mapping[str, Any]],
    family: Family,
    requested: Mapping[str, Any],
    where: str,
) -> dict[str, str]:
    """Return the names that have to be compared with timm's network, by where they are recorded.

    Args:
        names: Recorded names of the network by place.
        arguments: Recorded arguments of timm's network by place.
        family: Its family.
        requested: Values of the family's options, of which one may name the network.
        where: Name of the file, for messages.

    Raises:
        DataError: If an unknown name belongs to this family, or was built with arguments.
        UserError: If the option names another network than the file.
    """
    unclear = {}
    given = str(requested.get(family.named_by, "")).partition(".")[0]
    for place, name in names.items():
        own = arguments.get(place, {})
        if own and not in_timm(name):
            raise DataError(
                f"{where}: {place} names {format_value(name)}, built with "
                f"{format_value(min(own))}, and the installed timm has no such network; give its "
                "state dict alone if that changes no feature"
            )
        if name == given or (is_plain(name, family) and not own):
            continue
        if given and in_timm(name):
            raise UserError(
                f"--{family.named_by.replace('_', '-')} {given}: {where} is of another network, "
                f"{place} names {name}; give its state dict alone if that is wrong"
            )
        if in_timm(name):
            unclear[place] = name
        elif any(word in name for word in family.words):
            raise DataError(
                f"{where}: {place} names {format_value(name)}, which is not known to be a plain "
                f"{family.name}; give its state dict alone if it computes the same features"
            )
    return unclear


def pixels_note(model: str) -> str:
    """Return the note that a normalization is the one of a network of timm."""
    return f"mean and std are those of timm's {model}"


# Keys of a detector's configuration.
TASK_KEYS: Keys = {
    "MODEL.TIMM.NAME": Key(
        "",
        "Model name of timm without a tag. Set by weights from timm://..., and by the weights' "
        "contract; required for a file that names no network.",
    ),
    "MODEL.TIMM.ARGUMENTS": Key(
        "",
        "Arguments of timm.create_model, e.g. img_size=384 act_layer=relu; empty: none. Set by the "
        "weights' contract.",
    ),
    "MODEL.TIMM.PATCH_SIZE": Key(
        0,
        "Side of a patch, px, to which timm resamples the weights' patches; 0: the network's own "
        f"or, if that is no power of two, {PATCH_PX}. For networks with one map.",
    ),
    "MODEL.TIMM.DROP_PATH": Key(0.0, "timm's drop_path_rate.", half_open_interval(0, 1)),
    "MODEL.TIMM.CHECKPOINT_BLOCKS": Key(
        False,
        "Recompute activations in the backward pass as timm does it: less memory, more time. "
        "Batch norm then updates its statistics twice.",
    ),
}


def _arguments_in(keys: Any) -> str:
    return format_arguments(parse_arguments(keys.ARGUMENTS, "MODEL.TIMM.ARGUMENTS"))


def _maps_in(keys: Any) -> tuple[Any, int]:
    """Return the maps of the network in a detector's keys, and the side of its patches or 0.

    Raises:
        UserError: If timm has no such network, or not with these arguments.
    """
    if not keys.NAME:
        raise UserError("MODEL.TIMM.NAME: expected timm's model name, e.g. regnety_004")
    from convert.modeling.timm_network import network_maps  # imports torch and timm

    arguments = _arguments_in(keys)
    try:
        maps = network_maps(keys.NAME, arguments)
    except UserError as error:
        raise UserError(f"MODEL.TIMM.NAME: {error}") from error
    if FEATURE not in maps.strides:
        if keys.PATCH_SIZE:
            raise UserError(
                f"MODEL.TIMM.PATCH_SIZE {keys.PATCH_SIZE}: timm {keys.NAME} has maps of several "
                "strides, whose patches are not resampled; set it to 0"
            )
        return maps, 0
    own = maps.strides[FEATURE]
    patch = keys.PATCH_SIZE or (PATCH_PX if own & (own - 1) else own)
    return maps, 0 if patch == own else patch


def _sizes(keys: Any, backbone: Any) -> dict[str, int]:
    """Return the arguments of `convert.modeling.timm_network.size_arguments` in a detector.

    Raises:
        UserError: If the network takes images of one size alone, and that is not set or not one
            that it takes.
    """
    from convert.modeling.timm_network import FIXED, size_problem

    maps, patch = _maps_in(keys)
    side = backbone.SQUARE_PAD if maps.sizes == FIXED else 0
    if maps.sizes == FIXED and not side:
        raise UserError(
            f"MODEL.BACKBONE.SQUARE_PAD 0: timm {keys.NAME} takes images of one size alone, so a "
            "detector pads them to a square; set it, with INPUT.MAX_SIZE_TRAIN and MAX_SIZE_TEST "
            "at most that"
        )
    if side or patch:
        key = f"MODEL.BACKBONE.SQUARE_PAD {side}" if side else f"MODEL.TIMM.PATCH_SIZE {patch}"
        arguments = _arguments_in(keys)
        if reason := size_problem(keys.NAME, arguments, side, patch):
            raise UserError(f"{key}: timm {keys.NAME} does not take it ({reason})")
    return {"image_size": side, "patch_size": patch}


def _arguments(keys: Any, backbone: Any) -> dict[str, Any]:
    """Return the arguments of `convert.modeling.timm_network.TimmNetwork` in a detector."""
    return {
        "name": keys.NAME,
        "arguments": _arguments_in(keys),
        **_sizes(keys, backbone),
        "drop_path": keys.DROP_PATH,
        "freeze_at": backbone.FREEZE_AT,
        "checkpoint_blocks": keys.CHECKPOINT_BLOCKS,
    }


def _features(keys: Any) -> dict[str, int]:
    """Return the strides of the maps by name, see `Pyramid.features`."""
    maps, patch = _maps_in(keys)
    return dict.fromkeys(maps.strides, patch) if patch else dict(maps.strides)


def _num_parts(keys: Any) -> int:
    from convert.modeling.timm_network import parts

    return len(parts(keys.NAME, _arguments_in(keys)))


def _network() -> type[nn.Module]:
    from convert.modeling.timm_network import TimmNetwork

    return TimmNetwork


def requested_scheme(requested: Mapping[str, Any]) -> Scheme:
    """Return the naming scheme and normalization of the network of timm that the options name.

    Raises:
        UserError: If timm has no such network, or it has no maps for a pyramid.
    """
    from convert.modeling.timm_network import meta_tensors, own_names

    model, architecture = str(requested[OPTION.name]), requested_architecture(requested)
    name, arguments = architecture.name, architecture.arguments
    own, usual = own_names(name, arguments), meta_tensors(name, arguments)
    original = {new: key for key, new in own.items()}
    weights = [key for key in own if key.endswith(".weight")]
    heads = {*(usual.keys() - own.keys())}
    its = published_config(model)
    # timm's defaults of some networks have no head, but fine-tuned ones do.
    names = (its.classifier,) if isinstance(its.classifier, str) else its.classifier or ()
    heads |= {f"{name}.*" for name in names}
    return Scheme(
        (weights[0], weights[-1]),
        own.get,
        re.compile(""),  # any other name belongs to another network
        lambda key: original.get(key, key),
        "timm",
        has_reference_names=True,
        dropped={**({"timm's head": " ".join(heads)} if heads else {}), **LEFT_AT_INIT},
        metadata={"pixels of": f"{name}.{its.tag}" if its.tag else name},
        mean=scale_to_255(its.mean),
        std=scale_to_255(its.std),
    )


@register
class TimmFamily(Family):
    """Networks of timm by their names."""

    name = TIMM
    networks = "any of timm by its name (with maps of strides 4 to 32, or of one stride)"
    architecture = TimmArchitecture
    schemes = MappingProxyType({})
    dropped = MappingProxyType({})
    heads = MappingProxyType({"": "head not inspected"})
    owner = "timm's own network, as both sides of the comparison are"
    features = MappingProxyType({name: name for name in (*FEATURES, FEATURE)})
    keys = TASK_KEYS
    pyramid = Pyramid(
        _network,
        _arguments,
        num_parts=_num_parts,
        freezes_whole=True,
        features=_features,
        kinds=("", "_fpn", "_sfp"),
    )
    named_by = OPTION.name
    options = (OPTION, ARGUMENTS)

    def to_detectron2(self, key: str) -> str:
        """Return the name itself, as this project's networks have timm's names."""
        return key

    from_detectron2 = to_detectron2

    def schemes_of(self, requested: Mapping[str, Any]) -> Mapping[str, Scheme]:
        """Return the naming scheme of the network that the options name, or nothing."""
        return {OPTION.name: requested_scheme(requested)} if OPTION.name in requested else {}

    def recognize(self, state: Mapping[str, Tensor], hints: Hints) -> TimmArchitecture:
        """Return the network that the options name; see `Family.recognize`."""
        if "pixels of" in hints.metadata:
            hints.notes.append(pixels_note(hints.metadata["pixels of"]))
        return requested_architecture(hints.requested)

    def build(self, architecture: TimmArchitecture) -> nn.Module:
        """Build timm's network without the parts after the last map."""
        return _network()(architecture.name, architecture.arguments)

    def reference(self, architecture: TimmArchitecture) -> nn.Module:
        """Build timm's whole network, filled by timm's own loader."""
        from convert.modeling.timm_network import LoadedByTimm

        return LoadedByTimm(architecture.name, architecture.arguments)

    def check_trained(
        self, state: Mapping[str, Tensor], where: str, named: Callable[[str], str], *, folded: bool
    ) -> list[str]:
        """Check networks with batch norm like ResNets, others like transformers."""
        if any(key.endswith(".running_var") for key in state):
            return super().check_trained(state, where, named, folded=folded)
        vectors = {key: value for key, value in state.items() if value.dim() == 1}
        return check_layer_norms(vectors, where, r"\.weight$")

    def image_size(self, architecture: TimmArchitecture) -> tuple[int, int]:
        """Return the size of the images that the network takes."""
        from convert.modeling.timm_network import verification_size

        return verification_size(architecture)

    def resample(
        self, architecture: TimmArchitecture, state: Mapping[str, Tensor], model: Any
    ) -> tuple[Mapping[str, Tensor], str]:
        """Return tensors for the sizes of images and patches in a detector, and what changed.

        Args:
            architecture: Architecture of the weights.
            state: Tensors of the weights.
            model: Node MODEL of the detector's configuration.

        Raises:
            UserError: If timm does not resample the tensors.
        """
        from convert.modeling.timm_network import network_maps, resample_tensors

        sizes = _sizes(model.TIMM, model.BACKBONE)
        maps = network_maps(architecture.name, architecture.arguments)
        side, patch = sizes["image_size"], sizes["patch_size"]
        has_own_size = not side or maps.image_size == (side, side)
        if has_own_size and not patch:
            return state, ""
        made = resample_tensors(architecture.name, architecture.arguments, state, **sizes)
        number = sum(value.shape != state[key].shape for key, value in made.items())
        changes = []
        if patch:
            changes.append(f"patches of {patch} px instead of {max(maps.strides.values())}")
        if not has_own_size:
            height, width = maps.image_size
            changes.append(f"images of {side} px instead of {height} x {width}")
        return made, f"{', '.join(changes)}: timm resampled {plural(number, 'tensor')}"
