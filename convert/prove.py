"""Proof that a converted file is what it says: read back, inverted, and shown an image.

`read_converted` is also how the detection room opens converted weights. The source network of the
feature check is the family's reference implementation, the target its own backbone, which share no
code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convert.contract import InputContract
from convert.families.base import LEFT_AT_INIT, Architecture, Family, first_rule
from convert.read import describe, is_converted, names, read_file, to_tensor
from moco.common.command import converter
from moco.common.errors import DataError, shown
from moco.common.files import PathLike
from moco.modeling import soundness
from moco.modeling.soundness import fixed_image

_WORDS = re.compile(r"[a-z]+")
# Both networks do the same operations in the same order, so their features are expected to be
# bitwise equal; a backend that is not deterministic may differ by rounding, relative to the largest
# feature.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Converted:
    """A converted file: tensors by Detectron2's names (`stem.conv1.weight`) and their contract."""

    model: dict[str, Tensor]
    contract: InputContract
    notes: tuple[str, ...] = ()  # what a reader of a result has to know
    path: Path | None = None  # of the file that was given


@dataclasses.dataclass(frozen=True)
class FeatureCheck:
    """How two networks agree on one feature map."""

    stride: int  # input pixels per cell, equal in both
    max_abs_diff: float
    bitwise: bool


def read_converted(path: PathLike, raw: Any = None) -> Converted:
    """Read and check a file that convert_to_d2.py wrote for Detectron2, in any of its formats.

    `raw`: what `read_file` returned for it, when it is already open.

    Raises DataError: unreadable, not a converted file, or tensors that are missing, unknown, of
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
    # The arrays of a pickle become tensors one by one: both need not be in memory at once.
    values: dict[Any, Any] = raw["model"] if own else dict(raw["model"])
    model = {key: to_tensor(key, values.pop(key), str(path)) for key in list(values)}
    check_model(model, contract, str(path))
    notes = ("BN statistics start at 0 and 1: they were folded",) if contract.bn_folded else ()
    return Converted(model, contract, notes)


def build_backbone(contract: InputContract) -> nn.Module:
    """The backbone that a contract describes, with all features."""
    return contract.family.build(contract.architecture)


def proof_image(contract: InputContract) -> Tensor:
    """The image that both networks are shown: (1, 3, H, W), as if already normalized."""
    return fixed_image(contract.family.image_size(contract.architecture))


def target_tensors(contract: InputContract) -> dict[str, Tensor]:
    """Every tensor of the contract's backbone by name, without memory: shapes and types only."""
    with torch.device("meta"):
        return build_backbone(contract).state_dict()


def check_model(
    model: Mapping[str, Tensor],
    contract: InputContract,
    where: str,
    named: Callable[[str], str] = str,
) -> None:
    """Check every tensor that the contract's backbone needs: there, and nothing else, and sound.

    `named`: what Detectron2's names are called in the file, for messages.

    Raises DataError with the names of all offending tensors.
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
    texts = [f"{what}: {names(sorted(keys), 50)}" for what, keys in problems.items() if keys]
    if texts:
        raise DataError(f"{where}: not a sound {contract.architecture} ({'; '.join(texts)})")


def check_round_trip(source: Mapping[str, Tensor], converted: Converted, where: str) -> None:
    """Invert the converted names and compare bitwise with the source (the family's names).

    Raises DataError with the names that differ.
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
            f"{where}: verification failed: read back, these tensors are not the source's: "
            f"{names(sorted(wrong), limit=50)}"
        )


def check_features(
    source: Mapping[str, Tensor],
    architecture: Architecture,
    converted: Converted,
    where: str,
) -> dict[str, FeatureCheck]:
    """Show one fixed image to the source's network and to the embedded backbone, in eval mode.

    `architecture`: the source's; the contract may not decide it.

    Returns the agreement at the stem and res2..res5. Raises DataError at the first feature whose
    stride or values differ.
    """
    contract = converted.contract
    image = proof_image(contract)
    with torch.no_grad():
        expected = reference_features(contract.family, architecture, source, image)
        with torch.device("meta"):
            backbone: Any = build_backbone(contract)
        _fill(backbone, converted.model)
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
    """Compare two feature maps, (1, C, H, W); `failed`: how the message of a DataError begins."""
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
    # Written so that a NaN fails.
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise DataError(f"{failed}: features differ by up to {difference:g}")
    return FeatureCheck(stride, difference, _is_bitwise_equal(expected, actual))


def _is_bitwise_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # As integers: 0.0 == -0.0 and NaN != NaN are questions of value, not of bits.
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def _fill(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a network without memory of its own `state`'s tensors; eval mode."""
    left = [key for key in net.state_dict() if first_rule(key, LEFT_AT_INIT)]
    counters = {key: torch.zeros((), dtype=torch.int64) for key in left}
    net.load_state_dict({**state, **counters}, strict=True, assign=True)
    net.eval()


def reference_features(
    family: Family, architecture: Architecture, state: Mapping[str, Tensor], image: Tensor
) -> dict[str, Tensor]:
    """Outputs of the reference implementation's modules, by Detectron2's names of the features."""
    import torchvision.models  # noqa: F401 - which computes: not on meta

    with torch.device("meta"):
        net = family.reference(architecture)
    _fill(net, state)
    return _outputs(net, family.features, image)


def check_names(names: Mapping[str, str], family: Family, where: str) -> dict[str, str]:
    """Return the names of which only timm's own network can tell whether they are plain.

    Raises:
        DataError: A name of this family that is not known.
    """
    unclear = {}
    for place, name in names.items():
        if set(_WORDS.findall(name)) <= family.plain_names:
            continue
        if _in_timm(name):
            unclear[place] = name
        elif any(word in name for word in family.words):
            raise DataError(
                f"{where}: {place} names {shown(name)}, which is not known to be a plain "
                f"{family.name}; give its state dict alone if you know it computes the same"
            )
    return unclear


def heads_in_timm(names: Mapping[str, str]) -> int | None:
    """Return the attention heads of timm's vision transformer of one of these names."""
    for name in names.values():
        if _in_timm(name):
            with torch.device("meta"):
                blocks = getattr(_create(name), "blocks", None)
            heads = getattr(getattr(blocks[0], "attn", None), "num_heads", None) if blocks else None
            return heads if type(heads) is int else None
    return None


def compare_with_timm(
    names: Mapping[str, str],
    family: Family,
    source: tuple[Mapping[str, Tensor], Any],
    tokens: Mapping[str, Tensor],
    where: str,
) -> list[str]:
    """Show one image to timm's own network of each name that is not clear; returns notes.

    Args:
        names: from `check_names`.
        source: tensors and architecture of the recognized network.
        tokens: its class token and registers.

    Raises:
        DataError: timm's computes something else from these tensors.
    """
    for place, name in names.items():
        if difference := _difference(name, family, *source, tokens):
            raise DataError(
                f"{where}: {place} names {shown(name)}, which is no plain {source[1]}: "
                f"{difference}; --timm-model {name} takes it where it has maps of strides 4 to 32"
            )
    return [
        f"{place} names {n}: timm's own network of that name agrees" for place, n in names.items()
    ]


def _difference(
    name: str,
    family: Family,
    state: Mapping[str, Tensor],
    architecture: Any,
    tokens: Mapping[str, Tensor],
) -> str:
    """How timm's network of a name differs from the recognized one; "": it does not."""
    tensors, size = {**state, **tokens}, family.image_size(architecture)
    options = {"num_classes": 0, **({"img_size": size[0]} if family.tokens else {})}
    rules = {**family.dropped, **LEFT_AT_INIT}
    try:
        with torch.device("meta"):  # a name may be that of a network of gigabytes
            its = _create(name, **options).state_dict()
        needed = {key for key in its if not first_rule(key, rules)}
        if others := sorted((needed - tensors.keys()) | (tensors.keys() - its.keys())):
            return f"timm's has other tensors ({others[0]})"
        # Small ConvNeXts have linear layers as convolutions.
        tensors = {key: value.reshape(its[key].shape) for key, value in tensors.items()}
        net = _create(name, **options)
        net.load_state_dict(tensors, strict=False)
    except (RuntimeError, TypeError, AssertionError, ValueError):
        return "timm's has tensors of other shapes"
    image = fixed_image(size)
    with torch.no_grad():
        modules: Mapping[str, str] = family.in_timm
        if family.source_features is not None:
            modules, expected = family.source_features(architecture, state, tokens, image)
        else:
            expected = reference_features(family, architecture, state, image)
        try:
            actual = _outputs(net.eval(), modules, image)
        except (AttributeError, RuntimeError):
            return "timm's has other modules"
    largest = 0.0
    for feature, value in expected.items():
        other = actual[feature]
        if other.shape != value.shape:
            return f"timm's has maps of other sizes at {feature}"
        scale = max(1.0, float(value.abs().max()))
        largest = max(largest, float((other - value).abs().max()) / scale)
    # timm may fuse operations, which rounds otherwise.
    return f"its features differ from timm's by up to {largest:.2g}" if largest > 1e-3 else ""


def _outputs(net: nn.Module, modules: Mapping[str, str], image: Tensor) -> dict[str, Tensor]:
    """Outputs of modules by the names of their features."""
    outputs: dict[str, Tensor] = {}

    def keep(feature: str) -> Callable[..., None]:
        return lambda module, inputs, output: outputs.update({feature: output})

    for module, feature in modules.items():
        net.get_submodule(module).register_forward_hook(keep(feature))
    net(image)
    return outputs


def _in_timm(name: str) -> bool:
    import timm

    return bool(timm.is_model(name))


def _create(name: str, **options: Any) -> Any:
    """timm's network with random weights: nothing is ever downloaded."""
    import timm

    return timm.create_model(name, pretrained=False, **options)
