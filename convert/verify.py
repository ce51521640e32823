"""Verification of a conversion: tensors, inverse mapping and features of an image.

The feature check compares the family's reference implementation, filled from the source, with the
family's own backbone, filled from the converted file; they share no code. `read_converted` is also
used by detection to open converted weights.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convert.contract import InputContract
from convert.families.base import LEFT_AT_INIT, Architecture, Family, first_rule
from convert.modeling.reference import TOLERANCE, fill_network, on_meta_device, reference_features
from convert.read import CONVERSION, describe, format_keys, is_converted, read_file, to_tensor
from moco.common.command import converter
from moco.common.errors import DataError, format_value, plural, printable
from moco.common.files import PathLike
from moco.modeling import soundness
from moco.modeling.soundness import fixed_image


@dataclasses.dataclass(frozen=True)
class Converted:
    """Converted weights.

    Attributes:
        model: Tensors by Detectron2's names (`stem.conv1.weight`).
        contract: Input contract.
        notes: Lines to show with results.
        origin: Notes about the origin of the weights, which `notes` has as well.
        path: File that the weights were read from.
        sha256: SHA-256 of the checkpoint that `path` was converted from, if `path` records it.
    """

    model: dict[str, Tensor]
    contract: InputContract
    notes: tuple[str, ...] = ()
    origin: tuple[str, ...] = ()
    path: Path | None = None
    sha256: str | None = None


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
    notes: tuple[str, ...] = ()
    if contract.bn_folded:
        notes = ("BN statistics start at 0 and 1: they were folded",)
    if CONVERSION not in raw:
        return Converted(model, contract, notes)
    sha256, origin, notes = _read_conversion(raw[CONVERSION], str(path))
    return Converted(model, contract, notes, origin, sha256=sha256)


def _read_conversion(conversion: Any, where: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the SHA-256 of the source, its origin and the notes that `write` has recorded.

    Raises:
        DataError: If they are not those of a conversion.
    """
    parts = conversion if isinstance(conversion, dict) else {}
    sha256, texts = parts.get("sha256"), []
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise DataError(
            f"{where}: {CONVERSION}: sha256: got {format_value(sha256)}, expected 64 hex digits"
        )
    for name in ("origin", "notes"):
        lines = parts.get(name)
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            got = format_value(lines)
            raise DataError(f"{where}: {CONVERSION}: {name}: got {got}, expected a list of texts")
        texts.append(tuple(map(printable, lines)))
    return sha256, texts[0], texts[1]


def build_backbone(contract: InputContract) -> nn.Module:
    """Build the backbone that a contract describes, with all features."""
    return contract.family.build(contract.architecture)


def filled_backbone(converted: Converted) -> nn.Module:
    """Build the backbone of converted weights, filled with the weights and in eval mode."""
    return fill_network(lambda: build_backbone(converted.contract), converted.model)


def verification_image(contract: InputContract) -> Tensor:
    """Return the image for the feature check: (1, 3, H, W), as if already normalized."""
    return fixed_image(contract.family.image_size(contract.architecture))


def target_tensors(contract: InputContract) -> dict[str, Tensor]:
    """Return the tensors of the contract's backbone on the meta device, by name."""
    return dict(_meta_tensors(contract.family, contract.architecture))


@functools.lru_cache(maxsize=16)  # a conversion needs them three times
def _meta_tensors(family: Family, architecture: Architecture) -> Mapping[str, Tensor]:
    with on_meta_device():
        return family.build(architecture).state_dict()


def check_model(
    model: Mapping[str, Tensor],
    contract: InputContract,
    where: str,
    named: Callable[[str], str] = str,
) -> None:
    """Check that the tensors are exactly those of the contract's backbone, and sound.

    Args:
        model: Tensors by Detectron2's names.
        contract: Input contract of the tensors.
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
            problem = soundness.describe_problem(key, value)
        if problem is not None:
            problems.setdefault(problem, []).append(named(key))
    texts = [f"{what}: {format_keys(sorted(keys), 3)}" for what, keys in problems.items() if keys]
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
            f"{format_keys(sorted(wrong), limit=3)}"
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
    image = verification_image(contract)
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
