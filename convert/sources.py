"""Recognise a checkpoint by what is in it, and take the trunk of its network out of it.

A layout is one row of SOURCES; file names and extensions are never looked at. Every key of the
file is mapped by convert/keymap.py or dropped by a rule with a name; anything else is an error.
The result is in torchvision's names, tensors on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from convert import keymap
from convert.contract import CHANNEL_ORDERS, FOLDED, STEMS
from moco.errors import DataError, UserError
from moco.fileio import PathLike, load_pickle, load_torch

if TYPE_CHECKING:
    from torch import Tensor

# The ImageNet statistics of main_moco.py and of torchvision's references, times 255; RGB.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)
# MSRA's networks take BGR; their std is inside conv1 (detectron2/config/defaults.py, PIXEL_STD).
MSRA_MEAN = (103.53, 116.28, 123.675)
MSRA_STD = (1.0, 1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Source:
    """One checkpoint layout: how it is recognised and which of its tensors are the trunk."""

    name: str
    # Key of the state dict; None when the file is the state dict.
    container: str | None
    # Choice of --encoder -> what its keys start with; the first is taken by default.
    encoders: Mapping[str, str]
    # Rule -> (start, end) of keys of the state dict that belong to no encoder.
    dropped: Mapping[str, tuple[str, str]]
    # Value of the file's own "format" and "__author__"; None for layouts that do not have one.
    format: str | None = None
    author: str | None = None
    # Two tensors that tell the layout (after the encoder's start).
    first: tuple[str, str] = ("conv1.weight", "layer1.0.conv1.weight")
    # Its names -> torchvision's, None for everything that is not the trunk.
    rename: Callable[[str], str | None] = keymap.keep_torchvision
    # What the network was trained with, where the file does not say.
    channel_order: str = "RGB"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    stride_in_1x1: bool = False


_MOCO_ENCODERS = {"query": "module.encoder_q.", "key": "module.encoder_k."}
_MOCO_DROPPED = {
    "queue": ("module.queue", ""),
    "memory bank": ("module.bank", ""),
    "NCE's constant": ("module.Z", ""),
}
_D2_LAYOUT: dict[str, Any] = {
    "container": "model",
    "encoders": {"single": ""},
    "dropped": {"head": ("stem.fc.", ""), "batch counter": ("", ".num_batches_tracked")},
    "first": ("stem.conv1.weight", "res2.0.conv1.weight"),
    "rename": keymap.from_detectron2,
}
_MSRA: dict[str, Any] = {
    "container": None,
    "encoders": {"single": ""},
    "dropped": {
        "head": ("fc1000_", ""),
        "momentum": ("", "_momentum"),  # as detectron2/checkpoint/detection_checkpoint.py
        "convolution bias": ("", "_b"),
    },
    "channel_order": "BGR",
    "mean": MSRA_MEAN,
    "std": MSRA_STD,
    "stride_in_1x1": True,
}

SOURCES = (
    # moco/checkpoint.py
    Source("moco-transfer", "state_dict", _MOCO_ENCODERS, _MOCO_DROPPED, format="moco-transfer/1"),
    # facebookresearch/moco@7397dfe main_moco.py:382 (the dict) and moco/builder.py (the names under
    # DistributedDataParallel): v1 has fc.*, v2 fc.0.* and fc.2.*.
    Source("facebookresearch/moco", "state_dict", _MOCO_ENCODERS, _MOCO_DROPPED),
    # torchvision/models/resnet.py: net.state_dict(), with or without fc.
    Source("torchvision", None, {"single": ""}, {}),
    # detectron2 tools/convert-torchvision-to-d2.py, so detectron2://ImageNetPretrained/torchvision/;
    # its docstring gives colours, mean, std and the stride's place.
    Source("detectron2/torchvision", **_D2_LAYOUT, author="torchvision"),
    # facebookresearch/moco@7397dfe detection/convert-pretrain-to-detectron2.py; what it belongs to
    # is in *_moco.yaml beside it.
    Source("facebookresearch/moco (converted)", **_D2_LAYOUT, author="MOCO"),
    # detectron2://ImageNetPretrained/MSRA/: Caffe2's names with BN statistics (MODEL_ZOO.md, "we do
    # not fuse BatchNorm"; the keys are printed in detectron2#1688).
    Source(
        "detectron2/MSRA",
        **_MSRA,
        first=("conv1_w", "res2_0_branch2a_bn_gamma"),
        rename=keymap.from_caffe2,
    ),
    # catalog://ImageNetPretrained/MSRA/ of Detectron: the statistics are folded into scale and bias
    # (detectron2/checkpoint/catalog.py: "only load them to a model with FrozenBN").
    Source(
        "detectron/MSRA" + FOLDED,
        **_MSRA,
        first=("conv1_w", "res2_0_branch2a_bn_s"),
        rename=keymap.from_caffe2_folded,
    ),
)


@dataclasses.dataclass(frozen=True)
class Recognised:
    """The trunk of a recognised checkpoint and what the file says about it."""

    source: str
    encoder: str
    state: dict[str, Tensor]  # torchvision's names
    dropped: dict[str, int]  # rule -> number of entries
    filled: int  # tensors of `state` that are not in the file: folded BN statistics, 0 and 1
    epoch: int | None
    head: str  # for people
    shape: dict[str, Any]  # InputContract's depth, stem, *_channels, num_groups, width_per_group
    channel_order: str
    mean: tuple[float, float, float]  # 0..255, in channel order
    std: tuple[float, float, float]
    stride_in_1x1: bool
    notes: list[str]


def read_file(path: PathLike) -> Any:
    """Read a file of weights, whichever of torch's formats or pickle it is in; runs nothing in it.

    Raises DataError: missing, empty, damaged, text, or not plain data.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(512)
    except OSError:
        start = b""  # the reader below names the reason
    is_zip = start.startswith(b"PK")
    is_legacy = b"l\xfc\x9cF\xf9 j\xa8P\x19" in start[:64]  # torch.serialization.MAGIC_NUMBER
    is_tar = start[257:262] == b"ustar"
    return load_torch(path) if is_zip or is_legacy or is_tar else load_pickle(path)


def recognise(
    raw: Any, where: str, *, encoder: str | None = None, stem: str | None = None
) -> Recognised:
    """Find the layout of an opened checkpoint and take its trunk.

    Args:
        raw: what `read_file` returned.
        where: the file's name, for error messages.
        encoder: "query" or "key" for layouts that have both; None: the layout's default.
        stem: overrides the guess where shapes cannot tell (3x3: "cifar" or "stride2").

    Raises:
        DataError: not a layout of SOURCES, or damaged: keys, shapes, or claims that disagree.
        UserError: `encoder` or `stem` does not fit this checkpoint.
    """
    raw = _unwrap(raw)
    source = _find_source(raw, where)
    state = raw if source.container is None else raw[source.container]
    encoder = _choose_encoder(source, state, encoder, where)
    prefix = source.encoders[encoder]
    notes: list[str] = []
    trunk, dropped = _take(source, encoder, state, where)
    if source.container is not None:
        _drop_top_level(source, raw, dropped, where)
    filled = _fill_statistics(trunk, notes) if source.name.endswith(FOLDED) else 0

    arch, recorded_stem, width = raw.get("arch"), None, None
    mean, std, order = source.mean, source.std, source.channel_order
    if source.format is not None:
        own = _own_record(raw, where)
        arch, recorded_stem, width = own["arch"], own["stem"], own["width"]
        order, mean, std = own["channel_order"], own["mean"], own["std"]
    shape = _shape(trunk, where)
    if source.stride_in_1x1:
        _check_msra(source, state, trunk, shape, where, notes)
    _check_arch(arch, shape, where, notes)
    if width is not None and 64 * width != shape["stem_out_channels"]:
        raise DataError(
            f"{where}: says width {width!r}, but conv1.weight has {shape['stem_out_channels']} "
            "channels instead of 64 x width"
        )
    shape["stem"] = _choose_stem(shape.pop("kernel_size"), recorded_stem, stem, where, notes)
    found = [text for key, text in _HEADS.items() if prefix + key in state]
    epoch = raw.get("epoch")
    return Recognised(
        source=source.name,
        encoder=encoder,
        state=trunk,
        dropped=dropped,
        filled=filled,
        epoch=epoch if type(epoch) is int else None,
        head=found[0] if found else "no head",
        shape=shape,
        channel_order=order,
        mean=mean,
        std=std,
        stride_in_1x1=source.stride_in_1x1,
        notes=notes,
    )


def is_converted(raw: Any) -> bool:
    """Whether this is a file that convert_to_d2.py wrote."""
    return isinstance(raw, dict) and {"model", "__author__", "contract"} <= set(raw)


def to_tensor(key: str, value: Any, where: str) -> Tensor:
    """A value of a file as a contiguous CPU tensor of its own; DataError names the key."""
    import torch

    if not _is_array(value):
        raise DataError(f"{where}: {key!r} is a {type(value).__name__}, expected a tensor")
    if not isinstance(value, torch.Tensor):
        # The copy is writable and in this machine's byte order.
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        raise DataError(f"{where}: {key!r} is not a dense tensor with values ({value.layout})")
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise DataError(f"{where}: {key!r} claims more elements than the file holds for it")
    value = value.detach().contiguous()
    if value.untyped_storage().nbytes() > value.numel() * value.element_size():
        # A view would drag its whole storage into the output.
        value = value.clone()
    return value


def describe(raw: Any) -> str:
    """The first keys of a checkpoint, for the message about a layout that nobody knows."""
    if not isinstance(raw, Mapping):
        return f"the file holds a {type(raw).__name__}, not a dict"
    parts = [f"top level: {names(raw)}"]
    parts += [f"{key!r}: {names(value)}" for key, value in raw.items() if _is_state(value)]
    return "; ".join(parts[:4])


def names(keys: Iterable[Any], limit: int = 6) -> str:
    """Keys for an error message; escaped, because they come from a stranger's file."""
    every = [repr(key)[:80] for key in keys]
    if len(every) <= limit:
        return ", ".join(every) or "nothing"
    return f"{', '.join(every[:limit])} and {len(every) - limit} more"


def _is_array(value: Any) -> bool:
    import numpy as np
    import torch

    return isinstance(value, torch.Tensor | np.ndarray)


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(_is_array(item) for item in value.values())


def _unwrap(raw: Any) -> Any:
    """Blobs of Caffe2 as Detectron2 also keeps them: {"model": blobs, "__author__": "Caffe2"}."""
    if isinstance(raw, Mapping) and raw.get("__author__") == "Caffe2":
        model = raw.get("model")
        return model if isinstance(model, Mapping) else raw
    return raw


def _find_source(raw: Any, where: str) -> Source:
    _refuse_known(raw, where)
    found = [source for source in SOURCES if _matches(source, raw)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(source.name for source in SOURCES)
    if found:
        both = " and ".join(source.name for source in found)
        raise DataError(f"{where}: ambiguous, holds the layouts of {both}; keep one of them")
    raise DataError(f"{where}: unknown layout ({describe(raw)}); known sources: {known}")


def _matches(source: Source, raw: Any) -> bool:
    if not isinstance(raw, Mapping) or raw.get("format") != source.format:
        return False
    if raw.get("__author__") != source.author:
        return False
    state = raw if source.container is None else raw.get(source.container)
    return isinstance(state, Mapping) and any(
        all(prefix + key in state for key in source.first) for prefix in source.encoders.values()
    )


def _refuse_known(raw: Any, where: str) -> None:
    """Files that are often given by mistake get their own sentence."""
    if not isinstance(raw, Mapping):
        return
    if is_converted(raw):
        raise DataError(
            f"{where}: already converted; give it to detection/train_net.py as MODEL.WEIGHTS"
        )
    model = raw.get("model")
    if isinstance(model, Mapping):
        starts = {str(key).split(".")[0] for key in model}
        if starts & {"backbone", "proposal_generator", "roi_heads"}:
            raise DataError(
                f"{where}: a detection model, not a pre-trained backbone; "
                "give it to detection/train_net.py as MODEL.WEIGHTS with --eval-only"
            )
        authors = [source.author for source in SOURCES if source.author is not None]
        if {"stem", "res2"} <= starts and raw.get("__author__") not in authors:
            raise DataError(
                f"{where}: in Detectron2's layout by {str(raw.get('__author__'))[:40]!r}, without "
                f"an input contract (known without one: {', '.join(authors)}); convert the "
                "checkpoint that it was made from"
            )
    if isinstance(raw.get("blobs"), Mapping):
        raise DataError(
            f"{where}: a detection model of Detectron (Caffe2), not a pre-trained backbone; this "
            "project does not read those"
        )
    caffe2 = any(str(key).startswith("res2_0_branch") for key in raw)
    if caffe2 and not any(_matches(source, raw) for source in SOURCES):
        raise DataError(
            f"{where}: Caffe2 weights, but not of MSRA's ResNets ({names(raw)}); how its input is "
            "normalised is not known"
        )
    version = raw.get("format")
    if isinstance(version, str) and version not in {source.format for source in SOURCES}:
        raise DataError(f"{where}: format {version[:80]!r} is not known to this version")


def _choose_encoder(
    source: Source, state: Mapping[str, Any], encoder: str | None, where: str
) -> str:
    present = [n for n, prefix in source.encoders.items() if prefix + source.first[0] in state]
    default = next(iter(source.encoders))
    if encoder is None and default not in present:
        prefix = source.encoders[default]
        raise DataError(
            f"{where}: no {default} encoder ({prefix}*) in this {source.name} checkpoint; "
            f"--encoder {present[0]} takes what is there"
        )
    if encoder is not None and encoder not in present:
        choices = "one network" if default == "single" else f"the encoders {', '.join(present)}"
        raise UserError(
            f"--encoder {encoder}: {where} is a {source.name} checkpoint with {choices}"
        )
    return encoder or default


def _take(
    source: Source, encoder: str, state: Mapping[str, Any], where: str
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Split a state dict into the trunk (torchvision's names) and counts of dropped keys."""
    prefix = source.encoders[encoder]
    others = {
        f"{name} encoder": (start, "") for name, start in source.encoders.items() if name != encoder
    }
    trunk: dict[str, Tensor] = {}
    dropped: dict[str, int] = {}
    unknown = []
    for key, value in state.items():
        name = key.removeprefix(prefix) if isinstance(key, str) and key.startswith(prefix) else ""
        rule = keymap.drop_rule(name) or keymap.first_rule(str(key), {**others, **source.dropped})
        new = source.rename(name)
        if new:
            trunk[new] = to_tensor(key, value, where)
        elif rule:
            dropped[rule] = dropped.get(rule, 0) + 1
        else:
            unknown.append(key)
    if unknown:
        raise DataError(
            f"{where}: {len(unknown)} keys that neither the map nor a drop rule knows: "
            f"{names(unknown, limit=50)}; not the ResNet of a {source.name} checkpoint"
        )
    return trunk, dropped


def _fill_statistics(trunk: dict[str, Tensor], notes: list[str]) -> int:
    """Give every BN without statistics those it starts with (in place); their number."""
    import torch

    missing = {}
    for key, value in trunk.items():
        module, _, tensor = key.rpartition(".")
        if tensor == "bias":  # only batch norms have one
            missing[f"{module}.running_mean"] = torch.zeros_like(value)
            missing[f"{module}.running_var"] = torch.ones_like(value)
    trunk.update(missing)
    notes.append(
        f"BN statistics start at 0 and 1 ({len(missing)} tensors): in this file they are folded "
        "into scale and bias, which is right for FrozenBN only"
    )
    return len(missing)


def _check_msra(
    source: Source,
    state: Mapping[str, Any],
    trunk: dict[str, Tensor],
    shape: Mapping[str, Any],
    where: str,
    notes: list[str],
) -> None:
    """What is particular to Caffe2's files; rounds float64 to float32 (in place).

    MSRA's input convention is documented for MSRA's networks and not extended to others.
    """
    if shape["num_groups"] != 1:
        raise DataError(
            f"{where}: a ResNeXt in Caffe2's names; its std and the place of its stride are not "
            "MSRA's (detectron2's mask_rcnn_X_101_32x8d_FPN_3x.yaml), so it is not read"
        )
    for key in state:
        rule = keymap.first_rule(str(key), source.dropped)
        if source.rename(str(key)) or rule != "convolution bias":
            continue
        values = to_tensor(key, state[key], where)
        if not bool(values.any()):
            continue
        if key != "conv1_b":
            raise DataError(f"{where}: {key!r} is not zero, and no ResNet has a place for it")
        notes.append(
            f"conv1_b (up to {float(values.abs().max()):.2g}) is dropped, as Detectron2 does: its "
            "networks have no place for it"
        )
    double = [key for key, value in trunk.items() if value.element_size() == 8]
    trunk.update({key: trunk[key].float() for key in double})
    if double:
        notes.append(f"{len(double)} tensors are of 64 bits in the file, rounded to float32")


def _drop_top_level(
    source: Source, raw: Mapping[str, Any], dropped: dict[str, int], where: str
) -> None:
    for key, value in raw.items():
        if key == source.container:
            continue
        if key == "optimizer":
            rule = "optimizer"
        elif source.format is not None or not _holds_arrays(value):
            # The project's own format is versioned; elsewhere tensors must not go unnoticed.
            rule = "training record"
        else:
            raise DataError(
                f"{where}: tensors under {key!r}, which a {source.name} checkpoint does not have; "
                "it is ambiguous which network is meant"
            )
        dropped[rule] = dropped.get(rule, 0) + 1


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_arrays(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_arrays(item) for item in value)
    return _is_array(value)


def _shape(state: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """Recognise a ResNet from its tensors: InputContract's fields, and the stem's kernel_size."""
    from convert.backbone import NUM_BLOCKS, is_bottleneck

    def dims(key: str, count: int) -> tuple[int, ...]:
        if key not in state:
            raise DataError(f"{where}: {key} is missing; not a ResNet, or not the whole of it")
        shape = tuple(state[key].shape)
        if len(shape) != count or 0 in shape:
            raise DataError(f"{where}: {key} has shape {list(shape)}, expected {count} dimensions")
        return shape

    blocks = tuple(
        len({key.split(".")[1] for key in state if key.startswith(stage + ".")})
        for stage in keymap.STAGES
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
        raise DataError(f"{where}: conv1.weight takes {image_channels} channels, expected 3 (RGB)")
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


def _choose_stem(
    kernel_size: int, recorded: str | None, asked: str | None, where: str, notes: list[str]
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
    notes.append(
        f"the stem is 3x3 and its stride is not in the file: assumed {possible[0]!r} (stride 1); "
        f"if it is 3x3 with stride 2, convert again with --stem {possible[1]}"
    )
    return possible[0]


_HEADS = {
    "fc.weight": "linear head",
    "fc.0.weight": "MLP head",
    "stem.fc.weight": "linear head",
    "stem.fc.0.weight": "MLP head",
    "fc1000_w": "linear head",
}

# torchvision's names -> depth, groups, width per group.
_ARCHS = {
    **{f"resnet{depth}": (depth, 1, 64) for depth in (18, 34, 50, 101, 152)},
    "resnext50_32x4d": (50, 32, 4),
    "resnext50_32x8d": (50, 32, 8),  # the paper's RX50; torchvision has none
    "resnext101_32x8d": (101, 32, 8),
    "resnext101_64x4d": (101, 64, 4),
    "wide_resnet50_2": (50, 1, 128),
    "wide_resnet101_2": (101, 1, 128),
}


def _check_arch(arch: Any, shape: Mapping[str, Any], where: str, notes: list[str]) -> None:
    """A file that names its architecture must mean the one that its tensors have."""
    if not isinstance(arch, str):
        return
    if arch not in _ARCHS and arch != "resnet10":
        notes.append(f"the file names arch {arch[:80]!r}; the tensors decide")
        return
    depth, groups, width = _ARCHS.get(arch, (10, 1, 64))
    got = (shape["depth"], shape["num_groups"])
    # A width of this project's encoders scales all channels, so it is compared for standard stems.
    if got != (depth, groups) or (
        shape["stem_out_channels"] == 64 and shape["width_per_group"] != width
    ):
        raise DataError(
            f"{where}: says arch {arch!r}, but its tensors are of ResNet-{shape['depth']} "
            f"with {shape['num_groups']} groups of {shape['width_per_group']}"
        )


def _own_record(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What moco/checkpoint.py writes about the encoder and its input; means become 0..255."""
    try:
        encoder, image = raw["encoder"], raw["input"]
        record = {
            "arch": encoder["arch"],
            "stem": encoder["stem"],
            "width": float(encoder["width"]),
            "channel_order": image["channel_order"],
            "mean": _to_255(image["mean"]),
            "std": _to_255(image["std"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: a moco-transfer checkpoint with a damaged record of its encoder or input "
            f"({type(error).__name__}: {error})"
        ) from error
    for name, choices in (("stem", STEMS), ("channel_order", CHANNEL_ORDERS)):
        if record[name] not in choices:
            raise DataError(f"{where}: {name} {record[name]!r}, expected one of {list(choices)}")
    return record


def _to_255(values: Any) -> tuple[float, float, float]:
    red, green, blue = (round(float(value) * 255, 6) for value in values)
    return (red, green, blue)
