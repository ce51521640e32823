"""Recognise a checkpoint by what is in it, and take the trunk of its network out of it.

A layout is one row of convert/layouts.py; file names and extensions are never looked at. A dict of
tensors that fits no row but holds a ResNet's names under some prefix is a plain "state dict". Every
key of the file is mapped by convert/keymap.py or dropped by a rule with a name; anything else is an
error. The result is in torchvision's names, tensors on the CPU.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from convert import keymap
from convert.architecture import check_arch, choose_stem, shape_of
from convert.contract import FOLDED, InputContract
from convert.files import describe, holds_arrays, is_array, is_converted, is_state, names, to_tensor
from convert.layouts import FAIR_STD, LAYOUTS, WRAPPERS, Layout, Network
from convert.recorded import Recorded
from moco.errors import DataError, UserError, shown

if TYPE_CHECKING:
    from torch import Tensor


# A dict of tensors that no row of the table names.
PLAIN = "state dict"
PLAIN_DETECTRON2 = "Detectron2's names"
# Starts of keys that only Detectron2's detectors have.
_DETECTOR = (
    *("proposal_generator.", "roi_heads.", "sem_seg_head."),
    *("backbone.stem.", "backbone.bottom_up."),
)
# Heads of a plain state dict that are linear where the trunk is a classifier's.
_FLAT_HEADS = ("classifier", "head")
_MAX_SHARED_BYTES = 64 << 20
_WRAPPED = re.compile("(?:" + "|".join(map(re.escape, WRAPPERS)) + ")*")
# How deep in a file a plain state dict is looked for.
PLAIN_DEPTH = 3


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
class Recognised:
    """The trunk of a recognised checkpoint and what the file says about it."""

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
    notes: list[str]
    warnings: list[str]


def recognise(raw: Any, where: str, given: Given = Given()) -> Recognised:
    """Find the layout of an opened checkpoint and take its trunk.

    Args:
        raw: what `read_file` returned.
        where: the file's name, for error messages.
        given: what to take instead of what the file or its layout says.

    Raises:
        DataError: not a known layout, or damaged: keys, shapes, or claims that disagree.
        UserError: `given` does not fit this checkpoint.
    """
    layout = find_layout(raw, where)
    encoder, choices = _choose_network(layout, raw, given.encoder, where)
    network = layout.networks[encoder]
    state = _state_at(raw, network.at)
    assert state is not None
    notes: list[str] = [layout.note] if layout.note else []
    warnings: list[str] = []
    if layout.name in (PLAIN, PLAIN_DETECTRON2):
        _check_convention(layout, given, where, warnings)
    trunk, dropped = _take(layout, encoder, state, where)
    _drop_outside(layout, network, raw, dropped, where)
    filled = _fill_statistics(trunk, notes) if layout.name.endswith(FOLDED) else 0

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
    shape = shape_of(trunk, where)
    if layout.channel_order == "BGR":
        layout = _caffe2_convention(layout, state, shape, where, notes)
    _to_float32(trunk, warnings)
    check_arch(recorded.arch or _at(raw, ("arch",)), shape, where, notes)
    if recorded.width is not None and 64 * recorded.width != shape["stem_out_channels"]:
        raise DataError(
            f"{where}: says width {recorded.width!r}, but conv1.weight has "
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
    found = [text for key, text in _HEADS.items() if network.prefix + key in keys]
    epoch = _at(raw, layout.epoch)
    stride_in_1x1 = layout.stride_in_1x1 if given.stride_in_1x1 is None else given.stride_in_1x1
    if stride_in_1x1 and shape["depth"] < 50:
        raise UserError(f"--stride-in-1x1 yes: {where} is a ResNet of basic blocks, without 1x1")
    return Recognised(
        source=layout.name,
        encoder=encoder,
        encoders=tuple(choices),
        state=trunk,
        dropped=dropped,
        filled=filled,
        epoch=epoch + layout.epoch_offset if type(epoch) is int else None,
        head=found[0] if found else "no fc",
        shape=shape,
        channel_order=recorded.channel_order or layout.channel_order,
        mean=recorded.mean or layout.mean,
        std=recorded.std or layout.std,
        stride_in_1x1=stride_in_1x1,
        notes=notes,
        warnings=warnings,
    )


def from_contract(
    model: Mapping[str, Tensor], contract: InputContract, where: str, given: Given
) -> Recognised:
    """The trunk of a converted file (Detectron2's names), to be written in another format.

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
    return Recognised(
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
        notes=[],
        warnings=[],
    )


def unwrapped(key: Any) -> str:
    """A key without the wrappers that training put around its network; "" for what is no text."""
    if not isinstance(key, str):
        return ""
    found = _WRAPPED.match(key)
    return key[found.end() :] if found else key


def _at(raw: Any, path: Iterable[str]) -> Any:
    """What lies at a path of keys, or None."""
    for key in path:
        if not isinstance(raw, Mapping):
            return None
        raw = raw.get(key)
    return raw


def _state_at(raw: Any, path: tuple[str, ...]) -> Mapping[Any, Any] | None:
    state = _at(raw, path)
    return state if isinstance(state, Mapping) else None


def find_layout(raw: Any, where: str) -> Layout:
    """The row of LAYOUTS that a file fits, or one made for a plain state dict.

    Raises DataError: nothing known, with what was seen; or several networks and no row for them.
    """
    _refuse_known(raw, where)
    for layout in LAYOUTS:
        if _fits(layout, raw):
            return layout
    if plain := _plain(raw):
        return plain
    for _, state in states(raw):
        if what := keymap.other_network({unwrapped(key) for key in state}):
            raise DataError(f"{where}: cannot be converted: it holds {what}")
    raise DataError(
        f"{where}: unknown layout ({describe(raw)}); docs/converting.md has the known ones, and a "
        "ResNet with torchvision's names under any one prefix is known, too"
    )


def _fits(layout: Layout, raw: Any) -> bool:
    if not isinstance(raw, Mapping):
        return False
    for path, value in layout.marks.items():
        found = _at(raw, path.split("/"))
        if (found is None) if value is ... else (type(found) is not type(value) or found != value):
            return False
    for network in _present(layout, raw).values():
        keys = _keys(raw, network)
        if all(any(key.startswith(start) for key in keys) for start in layout.has):
            return layout.order is None or _in_order(layout.order, raw, network)
    return False


def _in_order(order: tuple[str, str], raw: Any, network: Network) -> bool:
    """Whether two keys of a network's state dict are there, in this order."""
    wanted = [network.prefix + key for key in order]
    keys = [unwrapped(key) for key in _state_at(raw, network.at) or ()]
    return [key for key in keys if key in wanted] == wanted


def _keys(raw: Any, network: Network) -> set[str]:
    return {unwrapped(key) for key in _state_at(raw, network.at) or ()}


def _present(layout: Layout, raw: Any) -> dict[str, Network]:
    """The networks of a layout that a file really has."""
    found = {}
    for choice, network in layout.networks.items():
        keys = _keys(raw, network)
        if all(network.prefix + key in keys for key in layout.first):
            found[choice] = network
    return found


def _plain(raw: Any) -> Layout | None:
    """A layout for tensors under names of torchvision's or Detectron2's, wherever they lie."""
    for name, first, rename in (
        (PLAIN, ("conv1.weight", "layer1.0.conv1.weight"), keymap.keep_torchvision),
        (
            PLAIN_DETECTRON2,
            ("stem.conv1.weight", "res2.0.conv1.weight"),
            keymap.from_detectron2,
        ),
        (PLAIN, ("0.weight", "2.0.conv1.weight"), keymap.from_lightly),
        (PLAIN, ("0.weight", "4.0.conv1.weight"), keymap.from_numbered),
    ):
        networks = {}
        for path, state in states(raw):
            keys = {unwrapped(key) for key in state}
            for key in sorted(keys):
                prefix = key.removesuffix(first[1])
                if not key.endswith(first[1]) or prefix + first[0] not in keys:
                    continue
                if not prefix or prefix.endswith("."):
                    label = ".".join([*path, prefix.removesuffix(".")]).strip(".")
                    networks[label or "single"] = Network(prefix, path)
        if len(networks) == 1:
            networks = {"single": next(iter(networks.values()))}
        if networks:
            return Layout(
                name,
                networks,
                keymap.PLAIN_DROPPED,
                first=first,
                rename=rename,
            )
    return None


def states(raw: Any, depth: int = PLAIN_DEPTH) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every dict of tensors in a file with its path, not deeper than `depth` keys."""
    if not isinstance(raw, Mapping):
        return
    if is_state(raw):
        yield (), raw
    if depth:
        for key, value in raw.items():
            if isinstance(key, str):
                for path, state in states(value, depth - 1):
                    yield (key, *path), state


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
            "the file does not say how its pixels were normalised: ImageNet's RGB mean and std are "
            f"assumed, as torchvision's ResNets have them; else give {' '.join(missing[:3])}"
        )


def _refuse_known(raw: Any, where: str) -> None:
    """Files that are often given by mistake get their own sentence."""
    if not isinstance(raw, Mapping):
        return
    if not is_converted(raw):
        inside = raw.get("model")
        keys = [*raw, *(inside if isinstance(inside, Mapping) else ())]
        if any(unwrapped(key).startswith(_DETECTOR) for key in keys):
            raise DataError(
                f"{where}: a detection model, not a pre-trained backbone; "
                "give it to detection/train_net.py as MODEL.WEIGHTS with --eval-only"
            )
    if isinstance(raw.get("blobs"), Mapping):
        raise DataError(
            f"{where}: a detection model of Detectron (Caffe2), not a pre-trained backbone; this "
            "project does not read those"
        )
    caffe2 = any(isinstance(key, str) and key.startswith("res2_0_branch") for key in raw)
    if caffe2 and not any(_fits(layout, raw) for layout in LAYOUTS):
        raise DataError(
            f"{where}: Caffe2 weights, but not of MSRA's ResNets ({names(raw)}); how its input is "
            "normalised is not known"
        )
    version = raw.get("format")
    formats = {layout.marks.get("format") for layout in LAYOUTS}
    if isinstance(version, str) and version.startswith("moco-transfer") and version not in formats:
        raise DataError(f"{where}: format {shown(version)} is not known to this version")


def _choose_network(
    layout: Layout, raw: Any, encoder: str | None, where: str
) -> tuple[str, list[str]]:
    """The network to take, and all that could be asked for."""
    present = list(_present(layout, raw))
    default = next(iter(layout.networks))
    if layout.name in (PLAIN, PLAIN_DETECTRON2) and len(present) > 1 and encoder is None:
        raise DataError(
            f"{where}: {len(present)} networks, and it is ambiguous which is meant; "
            f"give --encoder with one of {', '.join(present)}"
        )
    if encoder is None and default not in present:
        raise DataError(
            f"{where}: no {default} encoder ({layout.networks[default].prefix}*) in this "
            f"{layout.name} checkpoint; --encoder {present[0]} takes what is there"
        )
    if encoder is not None and encoder not in present:
        choices = "one network" if len(present) == 1 else f"the encoders {', '.join(present)}"
        raise UserError(
            f"--encoder {encoder}: {where} is a {layout.name} checkpoint with {choices}"
        )
    return encoder or default, present


def _take(
    layout: Layout, encoder: str, state: Mapping[Any, Any], where: str
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Split a state dict into the trunk (torchvision's names) and counts of dropped keys."""
    network = layout.networks[encoder]
    others = {
        f"{choice} encoder": (other.prefix, "")
        for choice, other in layout.networks.items()
        if choice != encoder and other.at == network.at and other.prefix
    }
    found: dict[str, tuple[Any, Any]] = {}
    dropped: dict[str, int] = {}
    unknown = []
    nested = {key for path in _paths(layout) if path[:-1] == network.at for key in path[-1:]}
    for key, value in state.items():
        if key in nested:
            continue  # another network's state dict inside this one
        short = unwrapped(key)
        name = short.removeprefix(network.prefix) if short.startswith(network.prefix) else ""
        rule = keymap.drop_rule(name) or keymap.first_rule(short, {**others, **layout.dropped})
        new = layout.rename(name)
        if new in found:
            raise DataError(f"{where}: two tensors for {new}; the second is {names([key])}")
        if new:
            found[new] = (key, value)
        elif network.at == () and not holds_arrays(value):
            count(dropped, "training record")
        elif rule in _FLAT_HEADS and _is_convolution(value):
            unknown.append(key)  # of a segmentation network, whose trunk is dilated
        elif rule or (network.at == () and (rule := _top_rule(layout, key))):
            count(dropped, rule)
        else:
            unknown.append(key)
    if unknown:
        raise DataError(
            f"{where}: {len(unknown)} keys that neither the map nor a drop rule knows: "
            f"{names(unknown, limit=50)}; not the ResNet of a {layout.name} checkpoint"
        )
    _check_shared([value for _, value in found.values()], where)
    return {new: to_tensor(key, value, where) for new, (key, value) in found.items()}, dropped


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


def _paths(layout: Layout) -> set[tuple[str, ...]]:
    return {network.at for network in layout.networks.values()}


def _top_rule(layout: Layout, key: Any) -> str | None:
    for rules in (layout.top, keymap.TOP_DROPPED):
        for rule, keys in rules.items():
            if key in keys:
                return rule
    return None


def _drop_outside(
    layout: Layout, network: Network, raw: Any, dropped: dict[str, int], where: str
) -> None:
    """Count what lies beside the state dict, at each level of the path to it."""
    choices = {other.at: choice for choice, other in layout.networks.items()}
    for depth in range(len(network.at)):
        above = network.at[:depth]
        for key, value in _at(raw, above).items():
            if key == network.at[depth]:
                continue
            path = (*above, key)
            inside = [choice for at, choice in choices.items() if at[: depth + 1] == path]
            if inside:
                rule = f"{inside[0]} encoder"
            else:
                rule = _top_rule(layout, key) or ("" if holds_arrays(value) else "training record")
            if not rule and isinstance(layout.marks.get("format"), str):
                rule = "training record"  # the project's own format is versioned
            if not rule:
                raise DataError(
                    f"{where}: tensors under {names([key])}, which a {layout.name} checkpoint does "
                    "not have; it is ambiguous which network is meant"
                )
            count(dropped, rule)


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


def _to_float32(trunk: dict[str, Tensor], warnings: list[str]) -> None:
    """Bring other floating-point types to what the engines train (in place)."""
    import torch

    for dtype, how in (
        (torch.float16, "widened to float32 without a change of value"),
        (torch.bfloat16, "widened to float32 without a change of value"),
        (torch.float64, "rounded to float32"),
    ):
        keys = [key for key, value in trunk.items() if value.dtype == dtype]
        trunk.update({key: trunk[key].float() for key in keys})
        if keys:
            warnings.append(
                f"{len(keys)} of {len(trunk)} tensors are {dtype} in the file, {how}: {names(keys)}"
            )


_HEADS = {
    "fc.weight": "linear head",
    "fc.0.weight": "MLP head",
    "stem.fc.weight": "linear head",
    "stem.fc.0.weight": "MLP head",
    "fc1000_w": "linear head",
}
