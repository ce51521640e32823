"""Checks of weights: damaged, misnamed, never trained, or overflowing.

The checks of the converter and of every other command that reads a checkpoint. Tensors have
torchvision's names; `named` turns them into those of the file, for messages.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from moco.common.errors import DataError, UserError, first_few, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moco.modeling.archs import Spec

Triple = tuple[float, float, float]

CHANNEL_ORDERS = ("RGB", "BGR")
# Height and width differ so that a transposition shows; both are multiples of the largest stride.
IMAGE_SIZE_PX = (96, 128)
# Squares of features are summed, in 32 bits: those of trained networks are below a thousand.
MAX_FEATURE = 1e12

# torchvision's names -> depth, groups, width per group.
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
    """The network that a checkpoint of this project says it holds.

    Raises DataError: the record is missing or damaged.
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
    """The channel order, mean and std (0..1) that a checkpoint of this project says it was fed.

    Raises DataError: the record is missing or damaged.
    """
    image = _part(state, "input")
    order, mean, std = (image.get(name) for name in ("channel_order", "mean", "std"))
    if order not in CHANNEL_ORDERS:
        raise _damaged("input.channel_order", order, f"one of {list(CHANNEL_ORDERS)}")
    for name, values in (("mean", mean), ("std", std)):
        three = isinstance(values, list | tuple) and len(values) == 3
        if not three or not all(map(_is_number, values)):
            raise _damaged(f"input.{name}", values, "three numbers")
    if not all(0 <= value <= 1 for value in mean):
        raise _damaged("input.mean", mean, "three numbers of 0..1")
    if not all(0 < value <= 1 for value in std):
        raise _damaged("input.std", std, "three numbers above 0, at most 1")
    return order, (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])


def problem(name: str, value: "Tensor") -> str | None:
    """What is wrong with the numbers of one tensor, or None."""
    if not bool(value.isfinite().all()):
        return "NaN or Inf"
    if name.endswith("running_var") and bool((value < 0).any()):
        return "negative variance"
    # Biases and means start at zero and may stay there; these do neither.
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
    """Warnings about batch norms that are as initialization left them.

    Statistics start at mean 0 and variance 1, scales at 1 (or, where a block starts as the
    identity, 0) and shifts at 0; a single training step moves them all.

    `folded`: the statistics were filled in, so they say nothing.

    Raises DataError: all statistics are so, and most scales and shifts.
    """
    norms = [key.removesuffix(".bias") for key in state if key.endswith(".bias")]
    still = [norm for norm in norms if _is(state, norm, running_mean=0, running_var=1)]
    unmoved = [
        norm
        for norm in norms
        if _is(state, norm, weight=1, bias=0) or _is(state, norm, weight=0, bias=0)
    ]
    most = len(norms) if folded else len(norms) / 2
    if norms and len(still) == len(norms) and len(unmoved) >= most:
        raise DataError(
            f"{where}: all {len(norms)} batch norms have the statistics of initialization, and "
            f"{len(unmoved)} its scale and shift: this network was never trained; a random "
            "initialization has the name random (MODEL.WEIGHTS random, --checkpoint random)"
        )
    warnings = []
    if still and not folded:
        warnings.append(
            f"{len(still)} of {len(norms)} batch norms have the statistics of initialization "
            f"(mean 0, variance 1), as if they had never seen an image: {_some(map(named, still))}"
        )
    if unmoved:
        warnings.append(
            f"{len(unmoved)} of {len(norms)} batch norms have the scale and shift of "
            f"initialization (1, 0), as if they had been frozen: {_some(map(named, unmoved))}"
        )
    return warnings


def check_arch(
    arch: Any, shape: Mapping[str, Any], where: str, notes: list[str], warnings: list[str]
) -> None:
    """A file that names its architecture must mean the one that its tensors have.

    Args:
        shape: depth, num_groups, width_per_group and stem_out_channels of the tensors.
        notes: what is said of a short name is appended here.
        warnings: what is said of a name that is not known, here.

    Raises DataError: the name is another network's.
    """
    if not isinstance(arch, str):
        return
    if arch not in _ARCHS:
        short = _SHORT_NAME.fullmatch(arch)
        if short and short[1] == str(shape["depth"]):
            notes.append(f"the file names arch {shown(arch)}; the tensors decide")
        else:
            warnings.append(
                f"the file names arch {shown(arch)}, which is no ResNet-{shape['depth']} that is "
                "known here; the tensors decide: if that network computes something else from "
                "them (a stem, a pooling, an activation), these features are not its"
            )
        return
    depth, groups, width = _ARCHS[arch]
    got = (shape["depth"], shape["num_groups"])
    # A width of this project's encoders scales all channels, so it is compared for standard stems.
    if got != (depth, groups) or (
        shape["stem_out_channels"] == 64 and shape["width_per_group"] != width
    ):
        raise DataError(
            f"{where}: says arch {arch!r}, but its tensors are of ResNet-{shape['depth']} "
            f"with {shape['num_groups']} groups of {shape['width_per_group']}"
        )


def fixed_image(size_px: tuple[int, int] = IMAGE_SIZE_PX) -> "Tensor":
    """The image that every network is shown: (1, 3, H, W), as if already normalized."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 3, *size_px, generator=generator)


def check_features(features: "Tensor", failed: str) -> None:
    """Raise DataError, beginning with `failed`, where features overflow or soon will."""
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
    """Show a network (in evaluation mode) the fixed image; see `check_features`."""
    import torch

    with torch.inference_mode():
        check_features(network(fixed_image(size_px)), where)


def _part(state: Mapping[Any, Any], name: str) -> Any:
    part = state.get(name)
    if not isinstance(part, Mapping):
        raise _damaged(name, part, "a dict")
    return part


def _damaged(name: str, value: Any, expected: str) -> DataError:
    got = [shown(v) for v in value[:3]] if isinstance(value, list | tuple) else shown(value)
    return DataError(
        f"a damaged record of its encoder or input ({name}: got {got}, expected {expected})"
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9 and math.isfinite(value)


def _is(state: Mapping[str, "Tensor"], norm: str, **values: float) -> bool:
    """Whether tensors of a batch norm hold one number each; a missing one does not."""
    tensors = {name: state.get(f"{norm}.{name}") for name in values}
    return all(
        tensor is not None and bool((tensor == values[name]).all())
        for name, tensor in tensors.items()
    )


def _some(keys: Iterable[str]) -> str:
    """The first of many, escaped, because they come from an untrusted file."""
    return first_few([shown(key, 200) for key in keys])
