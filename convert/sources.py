"""Recognize a checkpoint by what is in it, and take the backbone of one network out of it.

convert/networks.py says which network; file names and extensions are never looked at. Every key of
the file is mapped by convert/families/keymap.py, dropped by a rule with a name, or, where it can
be no part
of the backbone and of no second network, ignored and listed; anything else is an error. The result
is in torchvision's names, tensors on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from convert.contract import FOLDED, InputContract
from convert.families import keymap
from convert.families.resnet import choose_stem, shape_of
from convert.files import holds_arrays, is_array, names, to_tensor
from convert.layouts import FAIR_STD, Layout, Network
from convert.networks import (
    PLAIN,
    PLAIN_DETECTRON2,
    Choice,
    at,
    choose_network,
    states,
    top_rule,
    unwrapped,
)
from convert.recorded import Recorded
from moco.common.errors import DataError, UserError, shown
from moco.modeling.soundness import check_arch

if TYPE_CHECKING:
    from torch import Tensor


# Heads of a plain state dict that are linear where the backbone is a classifier's.
_FLAT_HEADS = ("classifier", "head")
_MAX_SHARED_BYTES = 64 << 20
# What is beside a backbone and belongs to no network. Notes name at most so many.
IGNORED = "ignored"
_MAX_IGNORED = 12


@dataclasses.dataclass(frozen=True)
class Given:
    """What the caller knows better than the file; None: the file's or the layout's own.

    Attributes:
        encoder: one of the layout's networks, e.g. "query", "key", "teacher".
        stem: where shapes cannot tell (3x3: "cifar" or "stride2").
        mean, std: 0..255 in the order of `channel_order`.
        channel_order: "RGB" or "BGR".
        stride_in_1x1: where the stride of a bottleneck sits.
    """

    encoder: str | None = None
    stem: str | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    channel_order: str | None = None
    stride_in_1x1: bool | None = None

    def missing_convention(self) -> list[str]:
        """Options that would have to be given for weights whose convention nobody wrote down."""
        values = {
            "--mean": self.mean,
            "--std": self.std,
            "--channel-order": self.channel_order,
            "--stride-in-1x1": self.stride_in_1x1,
        }
        return [flag for flag, value in values.items() if value is None]


@dataclasses.dataclass(frozen=True)
class Recognized:
    """The backbone of a recognized checkpoint and what the file says about it."""

    source: str
    encoder: str
    encoders: tuple[str, ...]  # every choice of --encoder that this file has
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
    named: Callable[[str], str]  # a name of `state`, also of what is missing -> as in the file
    notes: list[str]
    warnings: list[str]


@dataclasses.dataclass(frozen=True)
class _Names:
    """What torchvision's names are called in a file; of a missing tensor, what it would be."""

    layout: Layout
    network: Network
    keys: Mapping[str, Any]

    def __call__(self, name: str) -> str:
        if name in self.keys:
            return str(self.keys[name])
        first = str(self.keys.get("conv1.weight", ""))
        start = first.removesuffix(self.layout.first[0])
        shortcut = any(".shortcut." in str(key) for key in self.keys.values())
        name = keymap.original(self.layout.rename, name, shortcut)
        return (start if start != first else self.network.prefix) + name


def recognize(raw: Any, where: str, given: Given = Given()) -> Recognized:
    """Find the layout of an opened checkpoint and take its backbone.

    Args:
        raw: what `read_file` returned.
        where: the file's name, for error messages.
        given: what to take instead of what the file or its layout says.

    Raises:
        DataError: not a known layout, or damaged: keys, shapes, or claims that disagree.
        UserError: `given` does not fit this checkpoint.
    """
    chosen = choose_network(raw, given.encoder, where)
    layout, network = chosen.layout, chosen.network
    state = at(raw, network.at)
    notes = [note for note in (layout.note, chosen.note) if note]
    warnings: list[str] = []
    if layout.name in (PLAIN, PLAIN_DETECTRON2):
        _check_convention(layout, given, where, warnings)
    found, dropped, *more = _take(chosen, raw, where, given.encoder is not None)
    notes += more[0]
    warnings += more[1]
    _check_shared([value for _, value in found.values()], where)
    backbone = {new: to_tensor(key, value, where) for new, (key, value) in found.items()}
    named = _Names(layout, network, {new: key for new, (key, _) in found.items()})
    filled = _fill_statistics(backbone, notes) if layout.name.endswith(FOLDED) else 0

    try:
        recorded = layout.recorded(raw) if layout.recorded else Recorded()
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if recorded.note:
        notes.append(recorded.note)
    missing = given.missing_convention()
    if recorded.other and missing:
        raise DataError(
            f"{where}: its configuration says {', '.join(recorded.other)}, which is not the "
            f"convention of {layout.name}; give {' '.join(missing)} as its training had them"
        )
    shape = shape_of(backbone, where, named)
    if layout.channel_order == "BGR":
        layout = _caffe2_convention(layout, state, shape, where, notes)
    _to_float32(backbone, named, warnings)
    check_arch(recorded.arch or at(raw, ("arch",)), shape, where, notes, warnings)
    if recorded.width is not None and 64 * recorded.width != shape["stem_out_channels"]:
        raise DataError(
            f"{where}: says width {recorded.width!r}, but {shown(named('conv1.weight'), 200)} has "
            f"{shape['stem_out_channels']} channels instead of 64 x width"
        )
    kernel_size = shape.pop("kernel_size")
    shape["stem"] = choose_stem(kernel_size, recorded.stem, given.stem, where, warnings)
    if kernel_size == 3 and layout.no_3x3_stem:
        raise DataError(f"{where}: a CIFAR network; {layout.no_3x3_stem}")
    if kernel_size == 3 and not recorded.mean and given.mean is None:
        warnings.append(
            f"a network with a 3x3 stem is seldom trained on {layout.name}'s usual pixels, which "
            "are assumed: else give --mean, --std"
        )
    keys = {unwrapped(key) for key in state}
    heads = [text for key, text in _HEADS.items() if network.prefix + key in keys]
    epoch = at(raw, layout.epoch)
    stride_in_1x1 = layout.stride_in_1x1 if given.stride_in_1x1 is None else given.stride_in_1x1
    if stride_in_1x1 and shape["depth"] < 50:
        raise UserError(f"--stride-in-1x1 yes: {where} is a ResNet of basic blocks, without 1x1")
    return Recognized(
        source=layout.name,
        encoder=chosen.name,
        encoders=tuple(chosen.networks),
        state=backbone,
        dropped=dropped,
        filled=filled,
        epoch=epoch + layout.epoch_offset if type(epoch) is int else None,
        head=heads[0] if heads else "no fc",
        shape=shape,
        channel_order=recorded.channel_order or layout.channel_order,
        mean=recorded.mean or layout.mean,
        std=recorded.std or layout.std,
        stride_in_1x1=stride_in_1x1,
        named=named,
        notes=notes,
        warnings=warnings,
    )


def from_contract(
    model: Mapping[str, Tensor], contract: InputContract, where: str, given: Given
) -> Recognized:
    """The backbone of a converted file (Detectron2's names), to be written in another format.

    Raises UserError: `given` contradicts what the contract says about the network.
    """
    for flag, asked, recorded in (
        ("encoder", given.encoder, contract.encoder),
        ("stem", given.stem, contract.stem),
    ):
        if asked not in (None, recorded):
            raise UserError(f"--{flag} {asked}: {where} was converted with {flag} {recorded}")
    stride_in_1x1 = contract.stride_in_1x1 if given.stride_in_1x1 is None else given.stride_in_1x1
    shape = {
        field: getattr(contract, field)
        for field in (
            *("depth", "stem", "stem_out_channels", "res2_out_channels"),
            *("num_groups", "width_per_group"),
        )
    }
    return Recognized(
        source=contract.source,
        encoder=contract.encoder,
        encoders=(contract.encoder,),
        state={keymap.from_detectron2(key) or key: value for key, value in model.items()},
        dropped={},
        filled=0,
        epoch=None,
        head="already converted",
        shape=shape,
        channel_order=contract.channel_order,
        mean=contract.pixel_mean,
        std=contract.pixel_std,
        stride_in_1x1=stride_in_1x1,
        named=lambda name: keymap.to_detectron2(name) or name,
        notes=[],
        warnings=[],
    )


def _check_convention(layout: Layout, given: Given, where: str, warnings: list[str]) -> None:
    """A file of unknown origin does not say how its network sees pixels."""
    missing = given.missing_convention()
    if layout.name == PLAIN_DETECTRON2 and missing:
        raise DataError(
            f"{where}: a network in Detectron2's names without an input contract, and BGR and RGB, "
            f"1x1 and 3x3 strides are all usual there; give {' '.join(missing)} as its "
            "training had them, or convert the checkpoint that it was made from"
        )
    if missing and set(missing) != {"--stride-in-1x1"}:
        warnings.append(
            "the file does not say how its pixels were normalized: ImageNet's RGB mean and std are "
            f"assumed, as torchvision's ResNets have them; else give {' '.join(missing[:3])}"
        )


def _take(
    chosen: Choice, raw: Any, where: str, explicit: bool
) -> tuple[dict[str, tuple[Any, Any]], dict[str, int], list[str], list[str]]:
    """Find the backbone's tensors, and a rule for everything else in the file.

    Args:
        explicit: the user named this network, so what else there is cannot be meant.

    Returns torchvision's name -> (key, value); counts by rule; notes; warnings.

    Raises DataError: keys of the backbone that its names do not have; or convolutions beside it
    that could be a second network.
    """
    layout, network = chosen.layout, chosen.network
    found: dict[str, tuple[Any, Any]] = {}
    dropped: dict[str, int] = {}
    unknown: list[Any] = []
    ignored: list[Any] = []
    second: list[Any] = []

    def set_aside(key: Any, value: Any, rule: str | None) -> None:
        """What is beside the backbone: under its rule, else ignored by its name."""
        if rule is None:
            (second if _holds_convolutions(value, key) else ignored).append(key)
        count(dropped, rule or IGNORED)

    state = at(raw, network.at)
    for key, value in state.items():
        if network.at == () and not is_array(value):
            set_aside(key, value, _rule_outside(chosen, (key,), value))
            continue
        short = unwrapped(key)
        owner = _owner(chosen, short)
        name = short.removeprefix(network.prefix) if owner == chosen.name else ""
        rule = keymap.drop_rule(name) or keymap.first_rule(short, layout.dropped)
        new = layout.rename(name)
        if new in found:
            raise DataError(f"{where}: two tensors for {new}; the second is {names([key])}")
        if new:
            found[new] = (key, value)
        elif owner not in (None, chosen.name):
            count(dropped, f"{owner} encoder")
        elif rule in _FLAT_HEADS and _is_convolution(value):
            unknown.append(key)  # of a segmentation network, whose backbone is dilated
        elif rule or (network.at == () and (rule := top_rule(layout, key))):
            count(dropped, rule)
        elif not isinstance(value, Mapping) and keymap.is_own(layout.rename, name):
            unknown.append(key)
        else:
            inside = isinstance(value, Mapping)
            rule = _rule_outside(chosen, (*network.at, key), value) if inside else None
            set_aside(key, value, rule)
    if unknown:
        raise DataError(
            f"{where}: {len(unknown)} keys that neither the map nor a drop rule knows: "
            f"{names(unknown, limit=50)}; not the ResNet of a {layout.name} checkpoint"
        )
    for depth in range(len(network.at)):
        above = network.at[:depth]
        for key, value in at(raw, above).items():
            if key != network.at[depth]:
                set_aside(key, value, _rule_outside(chosen, (*above, key), value))
    if second and not explicit:
        raise DataError(
            f"{where}: {names(second)}: convolutions beside the backbone of this {layout.name} "
            "checkpoint, of another network, or of a segmentation or detection network, whose "
            "backbone may be dilated; it is ambiguous what is meant; give --encoder with one of "
            f"{', '.join(chosen.networks)}"
        )
    notes, warnings = [], []
    if ignored + second:
        text = names([*ignored, *second], limit=_MAX_IGNORED)
        notes.append(f"{IGNORED}, because the backbone has no place for it: {text}")
    if second:
        warnings.append(
            f"{names(second)} are convolutions, too: if they are a segmentation or detection "
            "network's, its backbone may be dilated, and this one is not"
        )
    return found, dropped, notes, warnings


def _owner(chosen: Choice, key: str) -> str | None:
    """The network of the same dict whose key this is: the one with the longest prefix."""
    here = {
        name: network.prefix
        for name, network in {**chosen.layout.networks, **chosen.networks}.items()
        if network.at == chosen.network.at and key.startswith(network.prefix)
    }
    if chosen.name in here and here[chosen.name] == max(here.values(), key=len):
        return chosen.name
    # Without a prefix every key would be its own.
    rest = {name: prefix for name, prefix in here.items() if prefix}
    if rest:
        return max(rest, key=lambda name: len(rest[name]))
    if chosen.name in here:
        return chosen.name
    other = next((name for name in here if chosen.layout.rename(key)), None)
    return other


def _rule_outside(chosen: Choice, path: tuple[str, ...], value: Any) -> str | None:
    """The rule for what is beside the state dict, at a path of keys; None: there is none."""
    for name, network in chosen.networks.items():
        if network.at[: len(path)] == path and name != chosen.name:
            return f"{name} encoder"
    if rule := top_rule(chosen.layout, path[-1]):
        return rule
    if isinstance(chosen.layout.marks.get("format"), str) or not holds_arrays(value):
        return "training record"  # the project's own format is versioned
    return "optimizer" if _is_optimizer(value) else None


def _is_optimizer(value: Any, depth: int = 2) -> bool:
    """Whether a value is the state dict of a torch optimizer, or holds nothing else than some."""
    if isinstance(value, Mapping) and "param_groups" in value:
        return True
    inside = list(value.values()) if isinstance(value, Mapping) else value
    if not depth or not isinstance(inside, list | tuple):
        return False
    known = [_is_optimizer(item, depth - 1) for item in inside]
    return any(known) and not any(
        holds_arrays(item) for item, one in zip(inside, known, strict=True) if not one
    )


def _holds_convolutions(value: Any, key: Any) -> bool:
    """Whether a value is a convolution's weight, larger than 1x1, or a dict that has one."""
    if is_array(value):
        name = key.rpartition(".")[2] if isinstance(key, str) else ""
        return name == "weight" and value.ndim == 4 and max(value.shape[2:]) > 1
    return any(
        _holds_convolutions(item, key)
        for _, state in states(value)
        for key, item in state.items()
        if is_array(item)
    )


def _check_shared(values: Iterable[Any], where: str) -> None:
    """Each tensor becomes one of its own; a file may name one storage for all of them."""
    import torch

    claimed = 0
    held: dict[int, int] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                continue  # refused by name below
            claimed += value.nbytes
            held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif is_array(value):
            claimed += value.nbytes
            held[id(value)] = value.nbytes
    if claimed > 2 * sum(held.values()) + _MAX_SHARED_BYTES:
        raise DataError(
            f"{where}: tensors of {claimed} bytes that share {sum(held.values())}; damaged or made "
            "to mislead"
        )


def _is_convolution(value: Any) -> bool:
    return is_array(value) and value.ndim > 2


def count(counts: dict[str, int], rule: str) -> None:
    """One more entry under a rule (in place)."""
    counts[rule] = counts.get(rule, 0) + 1


def _fill_statistics(backbone: dict[str, Tensor], notes: list[str]) -> int:
    """Give every BN without statistics those it starts with (in place); their number."""
    import torch

    missing = {}
    for key, value in backbone.items():
        module, _, tensor = key.rpartition(".")
        if tensor == "bias":  # only batch norms have one
            missing[f"{module}.running_mean"] = torch.zeros_like(value)
            missing[f"{module}.running_var"] = torch.ones_like(value)
    backbone.update(missing)
    notes.append(
        f"BN statistics start at 0 and 1 ({len(missing)} tensors): in this file they are folded "
        "into scale and bias, which is right for FrozenBN only"
    )
    return len(missing)


def _caffe2_convention(
    layout: Layout,
    state: Mapping[Any, Any],
    shape: Mapping[str, Any],
    where: str,
    notes: list[str],
) -> Layout:
    """The layout with the convention of the network that a Caffe2 file holds.

    MSRA's is documented for MSRA's networks; of others, FAIR's X-101-32x8d is
    (detectron2's configs/COCO-InstanceSegmentation/mask_rcnn_X_101_32x8d_FPN_3x.yaml).
    """
    if (shape["depth"], shape["num_groups"], shape["width_per_group"]) == (101, 32, 8):
        layout = dataclasses.replace(
            layout,
            name=layout.name.replace("MSRA", "FAIR X-101-32x8d"),
            std=FAIR_STD,
            stride_in_1x1=False,
        )
    elif shape["num_groups"] != 1:
        raise DataError(
            f"{where}: a ResNeXt in Caffe2's names; its std and the place of its stride are not "
            "MSRA's (detectron2's mask_rcnn_X_101_32x8d_FPN_3x.yaml), so it is not read"
        )
    for key in state:
        rule = keymap.first_rule(str(key), layout.dropped)
        if layout.rename(str(key)) or rule != "convolution bias":
            continue
        values = to_tensor(key, state[key], where)
        if not bool(values.any()):
            continue
        if key != "conv1_b":
            raise DataError(f"{where}: {shown(key)} is not zero, and no ResNet has a place for it")
        notes.append(
            f"conv1_b (up to {float(values.abs().max()):.2g}) is dropped, as Detectron2 does: its "
            "networks have no place for it"
        )
    return layout


def _to_float32(
    backbone: dict[str, Tensor], named: Callable[[str], str], warnings: list[str]
) -> None:
    """Bring other floating-point types to what the engines train (in place)."""
    import torch

    for dtype, how in (
        (torch.float16, "widened to float32 without a change of value"),
        (torch.bfloat16, "widened to float32 without a change of value"),
        (torch.float64, "rounded to float32"),
    ):
        keys = [key for key, value in backbone.items() if value.dtype == dtype]
        backbone.update({key: backbone[key].float() for key in keys})
        if keys:
            warnings.append(
                f"{len(keys)} of {len(backbone)} tensors are {dtype} in the file, {how}: "
                f"{names(map(named, keys))}"
            )


_HEADS = {
    "fc.weight": "linear head",
    "fc.0.weight": "MLP head",
    "stem.fc.weight": "linear head",
    "stem.fc.0.weight": "MLP head",
    "fc1000_w": "linear head",
    "9.weight": "linear head",
}
