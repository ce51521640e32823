"""Verification of a conversion: tensors, inverse mapping and features of an image.

The feature check compares the family's reference implementation, filled from the source, with the
family's own backbone, filled from the converted file; they share no code. `read_converted` is also
used by detection to open converted weights.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convert.contract import InputContract
from convert.families.base import LEFT_AT_INIT, Architecture, Family, first_rule
from convert.metadata import to_255
from convert.modeling.reference import filled, module_outputs, reference_features
from convert.modeling.timm_network import NOT_BUILT
from convert.read import describe, is_converted, names, read_file, to_tensor
from moco.common.command import converter
from moco.common.errors import DataError, UserError, plural, shown
from moco.common.files import PathLike
from moco.modeling import soundness
from moco.modeling.soundness import fixed_image

_WORDS = re.compile(r"[a-z]+")
# Attributes of timm's transformers, and the classes of their activations.
_FACTS = {
    "timm": "blocks.0.attn.num_heads",
    "activation": "blocks.0.mlp.act",
    "layer_norm_eps": "blocks.0.norm1.eps",
    "dynamic_img_size": "dynamic_img_size",
}
_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
# Relative to the largest feature. Both networks do the same operations in the same order, so their
# features are expected to be bitwise equal, but a nondeterministic backend may round differently.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Converted:
    """Converted weights.

    Attributes:
        model: Tensors by Detectron2's names (`stem.conv1.weight`).
        contract: Contract of the input.
        notes: Lines that are shown with results.
        origin: Those of the notes that tell where the weights are from.
        path: File that the weights were read from.
    """

    model: dict[str, Tensor]
    contract: InputContract
    notes: tuple[str, ...] = ()
    origin: tuple[str, ...] = ()
    path: Path | None = None


@dataclasses.dataclass(frozen=True)
class FeatureCheck:
    """Agreement of two networks on one feature map."""

    stride: int  # input pixels per cell, equal in both
    max_abs_diff: float
    bitwise: bool


def read_converted(path: PathLike, raw: Any = None) -> Converted:
    """Read and check a file that convert_to_d2.py wrote for Detectron2, in any of its formats.

    Args:
        path: Converted file.
        raw: Contents of `path` as `read_file` returned them, if it is already open.

    Raises:
        DataError: If it is unreadable or not a converted file, or tensors are missing, unknown, of
            another shape or type, not finite or all zero.
    """
    own = raw is None
    if own:
        raw = read_file(path)
    if not is_converted(raw):
        raise DataError(
            f"{path}: not a file that {converter()} wrote ({describe(raw)}); "
            "convert the checkpoint first"
        )
    if not isinstance(raw["model"], dict):
        raise DataError(f"{path}: 'model' is a {type(raw['model']).__name__}, expected a dict")
    try:
        contract = InputContract.from_dict(raw["contract"])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    # Convert the arrays of a pickle one by one, so that memory never holds all of them twice.
    values: dict[Any, Any] = raw["model"] if own else dict(raw["model"])
    model = {key: to_tensor(key, values.pop(key), str(path)) for key in list(values)}
    check_model(model, contract, str(path))
    notes = ("BN statistics start at 0 and 1: they were folded",) if contract.bn_folded else ()
    return Converted(model, contract, notes)


def build_backbone(contract: InputContract) -> nn.Module:
    """Build the backbone that a contract describes, with all features."""
    return contract.family.build(contract.architecture)


def filled_backbone(converted: Converted) -> nn.Module:
    """Build the backbone of converted weights with their tensors, in eval mode."""
    return filled(lambda: build_backbone(converted.contract), converted.model)


def proof_image(contract: InputContract) -> Tensor:
    """Return the image for the feature check: (1, 3, H, W), as if already normalized."""
    return fixed_image(contract.family.image_size(contract.architecture))


def target_tensors(contract: InputContract) -> dict[str, Tensor]:
    """Return the tensors of the contract's backbone on the meta device, by name."""
    with torch.device("meta"):
        return build_backbone(contract).state_dict()


def check_model(
    model: Mapping[str, Tensor],
    contract: InputContract,
    where: str,
    named: Callable[[str], str] = str,
) -> None:
    """Check that the tensors are exactly those of the contract's backbone, and sound.

    Args:
        model: Tensors by Detectron2's names.
        contract: Their input contract.
        where: Name of the file, for messages.
        named: Map from Detectron2's names to those in the file.

    Raises:
        DataError: If tensors are missing, unknown, of another shape or type, not finite or all
            zero; the message has the first names of each.
    """
    targets = target_tensors(contract).items()
    expected = {key: value for key, value in targets if not first_rule(key, LEFT_AT_INIT)}
    problems = {"missing": [named(key) for key in expected.keys() - model.keys()]}
    for key, value in model.items():
        problem: str | None
        if key not in expected:
            problem = "unknown"
        elif value.dtype != expected[key].dtype:
            problem = f"{value.dtype} where {expected[key].dtype} is expected"
        elif value.shape != expected[key].shape:
            problem = f"shape {list(value.shape)} where {list(expected[key].shape)} is expected"
        else:
            problem = soundness.problem(key, value)
        if problem is not None:
            problems.setdefault(problem, []).append(named(key))
    texts = [f"{what}: {names(sorted(keys), 3)}" for what, keys in problems.items() if keys]
    if texts:
        more = f"; {plural(len(texts) - 2, 'more kind')}" if len(texts) > 2 else ""
        text = f"{'; '.join(texts[:2])}{more}"
        raise DataError(f"{where}: not a sound {contract.architecture} ({text})")


def check_round_trip(source: Mapping[str, Tensor], converted: Converted, where: str) -> None:
    """Map converted tensors back to the family's names and compare them bitwise with the source.

    Raises:
        DataError: If tensors differ; the message has their names.
    """
    original = converted.contract.family.from_detectron2
    back = {original(key) or key: value for key, value in converted.model.items()}
    wrong = [
        key
        for key in source.keys() | back.keys()
        if key not in source or key not in back or not _is_bitwise_equal(source[key], back[key])
    ]
    if wrong:
        raise DataError(
            f"{where}: verification failed: these tensors differ from the source when read back: "
            f"{names(sorted(wrong), limit=3)}"
        )


def check_features(
    source: Mapping[str, Tensor],
    architecture: Architecture,
    converted: Converted,
    where: str,
) -> dict[str, FeatureCheck]:
    """Compare features of a fixed image between the source's network and the embedded backbone.

    Args:
        source: Tensors by the family's names.
        architecture: Architecture of the source, independent of the contract.
        converted: Converted weights.
        where: Name of the file, for messages.

    Returns:
        The agreement of each feature, e.g. of the stem and res2..res5.

    Raises:
        DataError: If the stride or the values of a feature differ.
    """
    contract = converted.contract
    image = proof_image(contract)
    with torch.no_grad():
        expected = reference_features(contract.family, architecture, source, image)
        backbone: Any = filled_backbone(converted)
        actual: Mapping[str, Tensor] = backbone(image)
    checks = {}
    for name, stride in backbone.strides.items():
        failed = f"{where}: verification failed at {name} of the embedded backbone"
        size = [pixels // stride for pixels in image.shape[2:]]
        checks[name] = _compare(expected[name], actual[name], stride, size, failed)
    return checks


def _compare(
    expected: Tensor, actual: Tensor, stride: int, size: list[int], failed: str
) -> FeatureCheck:
    """Compare two feature maps, (1, C, H, W); messages of DataError start with `failed`."""
    if not list(expected.shape[2:]) == list(actual.shape[2:]) == size:
        raise DataError(
            f"{failed}: source {list(expected.shape)} and converted {list(actual.shape)} do not "
            f"both have stride {stride}"
        )
    if expected.shape[1] != actual.shape[1]:
        raise DataError(
            f"{failed}: {expected.shape[1]} channels in the source, {actual.shape[1]} converted"
        )
    soundness.check_features(expected, failed)
    difference = float((expected - actual).abs().max())
    # `not <=` also fails for NaN.
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise DataError(f"{failed}: features differ by up to {difference:g}")
    return FeatureCheck(stride, difference, _is_bitwise_equal(expected, actual))


def _is_bitwise_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # Compare as integers, because 0.0 == -0.0 and NaN != NaN as floats.
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def check_names(
    names: Mapping[str, str],
    arguments: Mapping[str, Mapping[str, Any]],
    family: Family,
    requested: Mapping[str, Any],
    where: str,
) -> dict[str, str]:
    """Return the names that have to be compared with timm's network, by where they are recorded.

    Args:
        names: CheckpointMetadata names of the network by place.
        arguments: CheckpointMetadata arguments of timm's network by place.
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
                f"{where}: {place} names {shown(name)}, built with {shown(min(own))}, and the "
                "installed timm has no such network; give its state dict alone if that changes "
                "no feature"
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
                f"{where}: {place} names {shown(name)}, which is not known to be a plain "
                f"{family.name}; give its state dict alone if it computes the same features"
            )
    return unclear


def is_plain(name: str, family: Family) -> bool:
    """Return whether a recorded name is that of a plain network of a family."""
    return set(_WORDS.findall(name)) <= family.plain_names


def facts_in_timm(
    names: Mapping[str, str], arguments: Mapping[str, Mapping[str, Any]], tag: str = ""
) -> dict[str, Any]:
    """Return what no tensor holds of the first of these transformers in timm, or nothing.

    `arguments` are those with which they were built, by the places of `names`.

    It is the number of heads, as "timm", the activation, and the epsilon of the norms. The weights
    of some tags were trained with another activation; timm has a second network of theirs.
    """
    import timm

    for place, name in names.items():
        if not in_timm(name):
            continue
        try:
            with torch.device("meta"):
                net = _create(name, **arguments.get(place, {}))
        except NOT_BUILT:  # `compare_with_timm` names what it is built with
            return {}
        found = {}
        for fact, place in _FACTS.items():
            with suppress(AttributeError):
                found[fact] = attrgetter(place)(net)
        if "activation" in found:
            found["activation"] = _ACTIVATIONS.get(type(found["activation"]).__name__)
        second = name.replace("_clip_", "_clip_quickgelu_")
        if tag and second != name and timm.is_model_pretrained(f"{second}.{tag}"):
            found["trained_with"] = "quick_gelu"
        return {fact: value for fact, value in found.items() if value}
    return {}


def pixels_in_timm(
    names: Mapping[str, str], notes: list[str]
) -> tuple[soundness.Triple | None, soundness.Triple | None]:
    """Return mean and std, 0..255, of the first of these networks in timm, with a note.

    timm's train.py records None for both if they are the network's own. Both are None without such
    a network.

    Args:
        names: CheckpointMetadata names by place, with the tags of their weights.
        notes: Notes of the conversion, to which one is appended.
    """
    for place, name in names.items():
        if not in_timm(name):
            continue
        from timm.models import get_pretrained_cfg  # takes longer than a conversion without names

        try:
            own: Any = get_pretrained_cfg(name)
        except RuntimeError:  # an unknown tag
            own = get_pretrained_cfg(name.partition(".")[0])
        if own is not None:
            notes.append(f"mean and std are those of timm's {name}, which {place} names")
            return to_255(own.mean), to_255(own.std)
    return None, None


def compare_with_timm(
    names: Mapping[str, str],
    arguments: Mapping[str, Mapping[str, Any]],
    family: Family,
    source: tuple[Mapping[str, Tensor], Any],
    tokens: Mapping[str, Tensor],
    requested: Mapping[str, Any],
    where: str,
) -> list[str]:
    """Compare features with timm's own network of each of these names.

    Args:
        names: Result of `check_names`.
        arguments: Arguments with which timm built them, by the places of `names`.
        family: Family of the recognized network.
        source: Its tensors and architecture.
        tokens: Its class token and registers.
        requested: Values of the family's options, which take precedence over the name's.
        where: Name of the file, for messages.

    Returns:
        A note for each name.

    Raises:
        DataError: If timm's network computes other features from these tensors.
    """
    options = {o.in_timm: requested[o.name] for o in family.options if o.name in requested}
    options.pop("", None)
    notes = []
    for place, name in names.items():
        own = arguments.get(place, {})
        built = f" with {', '.join(sorted(own))}" if own else ""
        if difference := _difference(name, {**own, **options}, family, *source, tokens):
            raise DataError(
                f"{where}: {place} names {shown(name)}{built}, which is not a plain {source[1]}: "
                f"{difference}"
            )
        notes.append(f"{place} names {name}{built}: timm's own network of that name agrees")
    return notes


def _difference(
    name: str,
    changed: Mapping[str, Any],
    family: Family,
    state: Mapping[str, Tensor],
    architecture: Any,
    tokens: Mapping[str, Tensor],
) -> str:
    """Return how timm's network of a name differs from the recognized one, or ""."""
    size = family.image_size(architecture)
    options = {"num_classes": 0, **({"img_size": size[0]} if family.tokens else {}), **changed}
    if family.is_windowed:
        options["img_size"] = size  # windows are for any size, but timm's network takes one
    rules = {**family.dropped, **LEFT_AT_INIT}
    try:
        with torch.device("meta"):  # the name may be that of a network of gigabytes
            whole = _create(name, **options).state_dict()
    except NOT_BUILT as error:
        return f"timm does not build it ({' '.join(str(error).split())[:100]})"
    try:
        tensors = family.tensors_in_timm(architecture, {**state, **tokens}, whole.keys())
        needed = {key for key in whole if not first_rule(key, rules)}
        if others := sorted((needed - tensors.keys()) | (tensors.keys() - whole.keys())):
            return f"timm's has other tensors ({others[0]})"
        # timm's small ConvNeXts compute linear layers as convolutions.
        tensors = {key: value.reshape(whole[key].shape) for key, value in tensors.items()}
        net = _create(name, **options)
        net.load_state_dict(tensors, strict=False)
    except (RuntimeError, TypeError, AssertionError, ValueError):
        return "timm's has tensors of other shapes"
    image = fixed_image(size)
    with torch.no_grad():
        modules, expected = family.source_features(architecture, state, tokens, image)
        try:
            actual = module_outputs(net.eval(), modules, image)
        except AttributeError:
            return "timm's has other modules"
        except NOT_BUILT as error:
            return f"timm's does not take its image ({' '.join(str(error).split())[:100]})"
    largest = 0.0
    for feature, value in expected.items():
        other = actual[feature]
        if other.shape != value.shape:
            return f"timm's has maps of other sizes at {feature}"
        scale = max(1.0, float(value.abs().max()))
        largest = max(largest, float((other - value).abs().max()) / scale)
    # Operations that timm fuses round differently; GELU by tanh differs by 5e-4 and more.
    return f"its features differ from timm's by up to {largest:.2g}" if largest > TOLERANCE else ""


def in_timm(name: str) -> bool:
    """Return whether the installed timm has a network of this name, with or without a tag."""
    import timm

    return bool(timm.is_model(name))


def _create(name: str, **options: Any) -> Any:
    """Create timm's network with random weights, without a download."""
    import timm

    return timm.create_model(name, pretrained=False, **options)
