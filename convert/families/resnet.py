"""Which ResNet tensors are, from their shapes and what the user says of the stem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from convert.families import keymap
from moco.common.errors import DataError, UserError, shown

if TYPE_CHECKING:
    from torch import Tensor


_MAX_NAME = 200  # of a tensor's name that is shown


def shape_of(
    state: Mapping[str, Tensor], where: str, named: Callable[[str], str] = str
) -> dict[str, Any]:
    """Recognize a ResNet from its tensors: InputContract's fields, and the stem's kernel_size.

    `named`: what torchvision's names are called in the file, for messages.
    """
    from convert.families.resnet_network import NUM_BLOCKS, is_bottleneck

    def dims(key: str, count: int) -> tuple[int, ...]:
        if key not in state:
            name = shown(named(key), _MAX_NAME)
            raise DataError(f"{where}: {name} is missing; not a ResNet, or not the whole of it")
        shape = tuple(state[key].shape)
        if len(shape) != count or 0 in shape:
            name = shown(named(key), _MAX_NAME)
            raise DataError(f"{where}: {name} has shape {list(shape)}, expected {count} dimensions")
        return shape

    blocks = tuple(
        len({key.split(".")[1] for key in state if key.startswith(stage + ".")})
        for stage in keymap.STAGES
    )
    missing = [stage for stage, count in zip(keymap.STAGES, blocks, strict=True) if not count]
    if missing:
        texts = [shown(named(f"{stage}.0.conv1.weight"), _MAX_NAME) for stage in missing]
        raise DataError(
            f"{where}: {', '.join(missing)} is missing; not the whole of a ResNet (no "
            f"{', '.join(texts)})"
        )
    bottleneck = "layer1.0.conv3.weight" in state
    depths = [d for d, n in NUM_BLOCKS.items() if n == blocks and is_bottleneck(d) == bottleneck]
    if not depths:
        kind = "bottleneck" if bottleneck else "basic"
        raise DataError(
            f"{where}: {list(blocks)} {kind} blocks, not one of ResNet-{sorted(NUM_BLOCKS)}"
        )
    stem_channels, image_channels, kernel_size, _ = dims("conv1.weight", 4)
    if image_channels != 3:
        name = shown(named("conv1.weight"), _MAX_NAME)
        raise DataError(f"{where}: {name} takes {image_channels} channels, expected 3 (RGB)")
    if bottleneck:
        width = dims("layer1.0.conv1.weight", 4)[0]
        width_per_group = dims("layer1.0.conv2.weight", 4)[1]
        res2_channels = dims("layer1.0.conv3.weight", 4)[0]
        num_groups = max(1, width // width_per_group)
    else:
        # Detectron2's default: basic blocks have no groups.
        num_groups, width_per_group = 1, 64
        res2_channels = dims("layer1.0.conv2.weight", 4)[0]
    return {
        "depth": depths[0],
        "kernel_size": kernel_size,
        "stem_out_channels": stem_channels,
        "res2_out_channels": res2_channels,
        "num_groups": num_groups,
        "width_per_group": width_per_group,
    }


def choose_stem(
    kernel_size: int, recorded: str | None, asked: str | None, where: str, warnings: list[str]
) -> str:
    possible = {7: ("imagenet",), 3: ("cifar", "stride2")}.get(kernel_size)
    if possible is None:
        raise DataError(
            f"{where}: conv1.weight is {kernel_size}x{kernel_size}, expected 7x7 or 3x3"
        )
    if recorded is not None:
        if recorded not in possible:
            raise DataError(
                f"{where}: says stem {recorded!r}, but conv1.weight is {kernel_size}x{kernel_size}"
            )
        possible = (recorded,)
    if asked is not None and asked not in possible:
        raise UserError(f"--stem {asked}: {where} can only have {' or '.join(possible)}")
    if len(possible) == 1 or asked is not None:
        return asked or possible[0]
    warnings.append(
        f"the stem is 3x3 and its stride is not in the file: assumed {possible[0]!r} (stride 1); "
        f"if it is 3x3 with stride 2, convert again with --stem {possible[1]}"
    )
    return possible[0]
