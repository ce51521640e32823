"""Checks for damaged, misnamed, untrained and overflowing weights.

All commands that read weights use these checks. Tensors have torchvision's names; `named` maps them
to the names in the file, for messages.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from moco.common.errors import DataError, UserError, first_few, format_value, format_values

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moco.modeling.archs import Spec

Triple = tuple[float, float, float]

CHANNEL_ORDERS = ("RGB", "BGR")
# Height and width differ to reveal a transposition; both are multiples of the largest stride.
IMAGE_SIZE_PX = (96, 128)
# Squares of features are summed in float32. Features of trained networks are below a thousand.
MAX_FEATURE = 1e12

# Depth, groups and width per group of torchvision's architectures.
_ARCHS = {
    **{f"resnet{depth}": (depth, 1, 64) for depth in (10, 18, 34, 50, 101, 152)},
    "resnext50_32x4d": (50, 32, 4),
    "resnext50_32x8d": (50, 32, 8),  # the paper's RX50; torchvision has none
    "resnext101_32x8d": (101, 32, 8),
    "resnext101_64x4d": (101, 64, 4),
    "wide_resnet50_2": (50, 1, 128),
    "wide_resnet101_2": (101, 1, 128),
}
_SHORT_NAME = re.compile(r"(?:resnet|res|rn|r)[-_]?(\d+)", re.IGNORECASE)


def read_spec(state: Mapping[Any, Any]) -> "Spec":
    """Return the specification of the network recorded in a checkpoint of this project.

    Raises:
        DataError: If the record is missing or damaged.
    """
    from moco.modeling.archs import VITS, EncoderSpec, ViTSpec

    encoder = _part(state, "encoder")
    if encoder.get("arch") in tuple(VITS):
        size = encoder.get("image_size")
        if type(size) is not int:
            raise _damaged("encoder.image_size", size, "a whole number")
        try:
            return ViTSpec(encoder["arch"], size)
        except UserError as error:
            raise DataError(f"a damaged record of its encoder ({error})") from error
    arch, stem, width = (encoder.get(name) for name in ("arch", "stem", "width"))
    for name, value in (("arch", arch), ("stem", stem)):
        if not isinstance(value, str):
            raise _damaged(f"encoder.{name}", value, "a name")
    if not _is_number(width):
        raise _damaged("encoder.width", width, "a number")
    try:
        return EncoderSpec(arch, stem, float(width))
    except UserError as error:
        raise DataError(f"a damaged record of its encoder ({error})") from error


def read_input(state: Mapping[Any, Any]) -> tuple[str, Triple, Triple]:
    """Return the input contract recorded in a checkpoint of this project.

    Returns:
        Channel order; mean and standard deviation of each channel, for values in 0..1.

    Raises:
        DataError: If the record is missing or damaged.
    """
    image = _part(state, "input")
    order, mean, std = (image.get(name) for name in ("channel_order", "mean", "std"))
    if order not in CHANNEL_ORDERS:
        raise _damaged("input.channel_order", order, f"one of {list(CHANNEL_ORDERS)}")
    for name, values in (("mean", mean), ("std", std)):
        if not is_triple(values):
            raise _damaged(f"input.{name}", values, "three numbers")
    if not all(0 <= value <= 1 for value in mean):
        raise _damaged("input.mean", mean, "three numbers of 0..1")
    if not all(0 < value <= 1 for value in std):
        raise _damaged("input.std", std, "three numbers above 0, at most 1")
    return order, (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])


def describe_problem(name: str, value: "Tensor") -> str | None:
    """Describe what is wrong with the values of a tensor; None if nothing is."""
    if not bool(value.isfinite().all()):
        return "NaN or Inf"
    if name.endswith("running_var") and bool((value < 0).any()):
        return "negative variance"
    # Biases and means start at zero and may stay there, but weights and variances do not.
    if name.endswith(("weight", "running_var")) and not bool(value.any()):
        return "all zero"
    return None


def check_trained(
    state: Mapping[str, "Tensor"],
    where: str,
    named: Callable[[str], str] = str,
    *,
    folded: bool = False,
) -> list[str]:
    """Return warnings about batch norms that still have initial values.

    Means start at 0, variances at 1, shifts at 0, and scales at 1, or at 0 if blocks start as the
    identity. A single training step changes all of them.

    Args:
        state: Tensors of the network by torchvision's names.
        where: Start of the error message.
        named: Function that maps a name to the name in the file.
        folded: The converter filled in the statistics, so only scales and shifts are checked.

    Raises:
        DataError: If all statistics and most scales and shifts have their initial values.
    """
    norms = [key.removesuffix(".bias") for key in state if key.endswith(".bias")]
    unused = [norm for norm in norms if _equals(state, norm, running_mean=0, running_var=1)]
    untrained = [
        norm
        for norm in norms
        if _equals(state, norm, weight=1, bias=0) or _equals(state, norm, weight=0, bias=0)
    ]
    most = len(norms) if folded else len(norms) / 2
    if norms and len(unused) == len(norms) and len(untrained) >= most:
        raise DataError(
            f"{where}: all {len(norms)} batch norms have the statistics of initialization, and "
            f"{len(untrained)} the initial scale and shift: this network was never trained; a "
            "random initialization has the name random (MODEL.WEIGHTS random, --checkpoint random)"
        )
    warnings = []
    if unused and not folded:
        warnings.append(
            f"{len(unused)} of {len(norms)} batch norms have the statistics of initialization (mean"
            f" 0, variance 1), as if they had never seen an image: {_first(map(named, unused))}"
        )
    if untrained:
        warnings.append(
            f"{len(untrained)} of {len(norms)} batch norms have the scale and shift of "
            f"initialization (1, 0), as if they had been frozen: {_first(map(named, untrained))}"
        )
    return warnings


def check_arch(
    arch: Any, shape: Mapping[str, Any], where: str, notes: list[str], warnings: list[str]
) -> None:
    """Check that the architecture recorded in a file agrees with the shapes of its tensors.

    Args:
        arch: Recorded name; ignored unless it is a string.
        shape: depth, num_groups, width_per_group and stem_out_channels of the tensors.
        where: Start of the error message.
        notes: List to which a note on an abbreviated name is appended.
        warnings: List to which a warning about an unknown name is appended.

    Raises:
        DataError: If the name belongs to another network.
    """
    if not isinstance(arch, str):
        return
    if arch not in _ARCHS:
        short = _SHORT_NAME.fullmatch(arch)
        if short and short[1] == str(shape["depth"]):
            notes.append(f"the file names arch {format_value(arch)}; the tensors decide")
        else:
            warnings.append(
                f"the file names arch {format_value(arch)}, which is no ResNet-{shape['depth']} "
                "that is known here; the tensors decide: if that network computes something else "
                "from them (a stem, a pooling, an activation), the features are wrong"
            )
        return
    depth, groups, width = _ARCHS[arch]
    got = (shape["depth"], shape["num_groups"])
    # `width` of this project's encoders scales all channels, so only standard stems are compared.
    if got != (depth, groups) or (
        shape["stem_out_channels"] == 64 and shape["width_per_group"] != width
    ):
        raise DataError(
            f"{where}: says arch {arch!r}, but its tensors are of ResNet-{shape['depth']} "
            f"with {shape['num_groups']} groups of {shape['width_per_group']}"
        )


def fixed_image(size_px: tuple[int, int] = IMAGE_SIZE_PX) -> "Tensor":
    """Return the normalized image (1, 3, H, W) with which every network is checked."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 3, *size_px, generator=generator)


def check_features(features: "Tensor", failed: str) -> None:
    """Raise DataError, starting with `failed`, if features overflow or are about to."""
    if not bool(features.isfinite().all()):
        raise DataError(f"{failed}: the source's own features are not finite")
    largest = float(features.abs().max())
    if largest > MAX_FEATURE:
        raise DataError(
            f"{failed}: the source's own features reach {largest:.2g} and would overflow in use; "
            "the weights are damaged or of a training that diverged"
        )


def check_network(
    network: "torch.nn.Module", where: str, size_px: tuple[int, int] = IMAGE_SIZE_PX
) -> None:
    """Check the features of a network in evaluation mode on the fixed image."""
    import torch

    with torch.inference_mode():
        check_features(network(fixed_image(size_px)), where)


def _part(state: Mapping[Any, Any], name: str) -> Any:
    part = state.get(name)
    if not isinstance(part, Mapping):
        raise _damaged(name, part, "a dict")
    return part


def _damaged(name: str, value: Any, expected: str) -> DataError:
    return DataError(
        f"a damaged record of its encoder or input ({name}: got {format_values(value)}, "
        f"expected {expected})"
    )


def is_triple(value: Any) -> bool:
    """Return whether a recorded value is three numbers, such as a mean of RGB."""
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9 and math.isfinite(value)


def _equals(state: Mapping[str, "Tensor"], norm: str, **values: float) -> bool:
    """Return whether all elements of the tensors of a batch norm equal the given values."""
    tensors = {name: state.get(f"{norm}.{name}") for name in values}
    return all(
        tensor is not None and bool((tensor == values[name]).all())
        for name, tensor in tensors.items()
    )


def _first(keys: Iterable[str]) -> str:
    """Format the first of several keys, escaped since they come from an untrusted file."""
    return first_few([format_value(key, 200) for key in keys])
