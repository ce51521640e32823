"""Recognize a checkpoint by its contents, and take the backbone of one network out of it.

convert/networks.py says which network; file names and endings are never looked at. Every value of
the file is a part of the backbone, dropped by a rule with a name, or, where it can be no part of
the backbone and of no second network, ignored and listed; anything else is an error.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convert.contract import FOLDED, InputContract, Pixels
from convert.families.base import PLAIN_DETECTRON2, Family, Hints, first_rule
from convert.files import Entry, at, flatten, is_array, names, to_tensor, unwrapped
from convert.networks import Choice, Network, choose_network, rule_of
from convert.recorded import Recorded
from moco.common.errors import DataError, UserError
from moco.modeling.soundness import Triple

if TYPE_CHECKING:
    from torch import Tensor


# Heads of a plain state dict that are linear where the backbone is a classifier's.
_FLAT_HEADS = ("classifier", "head")
_MAX_SHARED_BYTES = 64 << 20
# What is beside a backbone and belongs to no network. Notes name at most `_MAX_IGNORED`.
IGNORED = "ignored"
_MAX_IGNORED = 12


@dataclasses.dataclass(frozen=True)
class Given:
    """What the caller knows better than the file; None: the file's or the layout's own.

    Attributes:
        encoder: one of the layout's networks, e.g. "query", "key", "teacher".
        mean, std: 0..255 in the order of `channel_order`.
        channel_order: "RGB" or "BGR"; a mean and std that are not given stay with their colors.
        timm_model: the network is timm's of this name, with or without a tag.
        options: values of the family's own options, by their names.
    """

    encoder: str | None = None
    mean: Triple | None = None
    std: Triple | None = None
    channel_order: str | None = None
    timm_model: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, **values: Any) -> Given:
        """From fields and values of any family's options; None: not given."""
        fields = {field.name for field in dataclasses.fields(cls)} - {"options"}
        own = {name: values.pop(name) for name in fields & values.keys()}
        options = {name: value for name, value in values.items() if value is not None}
        return cls(**own, options=options)

    def missing_pixels(self) -> list[str]:
        """Options that would have to be given for pixels of which nobody wrote down."""
        fields = ("mean", "std", "channel_order")
        return [f"--{name.replace('_', '-')}" for name in fields if getattr(self, name) is None]

    def missing_convention(self, family: Family) -> list[str]:
        """The same for weights whose whole convention nobody wrote down."""
        missing = [o for o in family.options if o.convention and o.name not in self.options]
        return self.missing_pixels() + [option.flag for option in missing]

    def pixels(self, source: Pixels, where: str) -> Pixels:
        """How pixels reach the network: as in the source, unless given; raises UserError."""
        try:
            source = source.in_order(self.channel_order or source.channel_order)
            return Pixels(self.mean or source.mean, self.std or source.std, source.channel_order)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Recognized:
    """The backbone of a recognized checkpoint and what the file says about it.

    Attributes:
        contract: where the backbone comes from, what it is, and how it sees pixels.
        state: its tensors, by the family's names.
        encoders: every choice of --encoder that this file has.
        named: what the family's names are called in the file, also those of missing tensors.
        dropped: rule -> number of entries of the file.
        filled: tensors of `state` that are not in the file: folded BN statistics, 0 and 1.
        tokens: what the family calls so: dropped, but a part of the source's features.
        epoch: epochs finished.
        head, notes, warnings: for people.
    """

    contract: InputContract
    state: dict[str, Tensor]
    encoders: tuple[str, ...]
    named: Callable[[str], str]
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    filled: int = 0
    tokens: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    epoch: int | None = None
    head: str = "already converted"
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


def recognize(raw: Any, where: str, given: Given = Given(), sha256: str = "unknown") -> Recognized:
    """Find the layout of an opened checkpoint and take its backbone.

    Args:
        raw: what `read_file` returned.
        where: the file's name, for error messages.
        given: what to take instead of what the file or its layout says.
        sha256: of the file.

    Raises:
        DataError: not a known layout, or damaged: keys, shapes, or records that disagree.
        UserError: `given` does not fit this checkpoint.
    """
    entries = flatten(raw, where)
    choice = choose_network(raw, entries, given.encoder, where)
    network, layout = choice.network, choice.network.layout
    network.family.check_options(given.options, where)
    notes = [note for note in (layout.note, choice.note) if note]
    warnings: list[str] = []
    if layout.plain:
        _check_convention(network, given, where, warnings)
    taken = _take(choice, entries, where, given.encoder is not None)
    notes += taken.notes
    warnings += taken.warnings
    own = network.family.in_own_shape
    backbone = {
        new: own(new, to_tensor(e.keys[-1], e.value, where)) for new, e in taken.backbone.items()
    }
    named = _names_in_file(network, {new: str(e.keys[-1]) for new, e in taken.backbone.items()})
    filled = _fill_statistics(backbone, notes) if layout.name.endswith(FOLDED) else 0
    recorded = _recorded(network, raw, given, where)
    if recorded.note:
        notes.append(recorded.note)
    _to_float32(backbone, named, warnings)
    tokens = {new: to_tensor(e.keys[-1], e.value, where).float() for new, e in taken.tokens.items()}
    hints = Hints(
        arch=recorded.arch or at(raw, ("arch",)),
        says={**layout.says, **recorded.says},
        asked=given.options,
        assumed_pixels="" if recorded.mean or given.mean is not None else layout.name,
    )
    architecture = network.family.recognize(backbone, hints, where, named, notes, warnings)
    pixels = Pixels(
        recorded.mean or layout.mean,
        recorded.std or layout.std,
        recorded.channel_order or layout.channel_order,
    )
    source = layout.name.replace("MSRA", recorded.owner or "MSRA")
    keys = {entry.name for entry in entries}
    heads = (text for key, text in network.family.heads.items() if network.start + key in keys)
    epoch = at(raw, layout.epoch.split("/"))
    return Recognized(
        contract=InputContract(
            given.pixels(pixels, where), network.family, architecture, source, sha256, choice.name
        ),
        state=backbone,
        encoders=tuple(choice.networks),
        named=named,
        dropped=dict(taken.dropped),
        filled=filled,
        tokens=tokens,
        epoch=epoch + layout.epoch_offset if type(epoch) is int else None,
        head=next(heads, network.family.heads[""]),
        notes=notes,
        warnings=warnings,
    )


def from_contract(
    model: Mapping[str, Tensor], contract: InputContract, where: str, given: Given
) -> Recognized:
    """The backbone of a converted file (Detectron2's names), to be written in another format.

    Raises UserError: `given` contradicts what the contract says about the network.
    """
    family = contract.family
    if given.encoder not in (None, contract.encoder):
        raise UserError(
            f"--encoder {given.encoder}: {where} was converted with encoder {contract.encoder}"
        )
    family.check_options(given.options, where)
    architecture = family.with_options(contract.architecture, given.options, where)
    pixels = given.pixels(contract.pixels, where)
    return Recognized(
        contract=dataclasses.replace(contract, pixels=pixels, architecture=architecture),
        state={family.from_detectron2(key) or key: value for key, value in model.items()},
        encoders=(contract.encoder,),
        named=lambda name: family.to_detectron2(name) or name,
    )


def _recorded(network: Network, raw: Any, given: Given, where: str) -> Recorded:
    """What the file says of its network; raises DataError where that needs options."""
    layout = network.layout
    try:
        recorded = layout.recorded(raw) if layout.recorded else Recorded()
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if recorded.other and (missing := given.missing_convention(network.family)):
        raise DataError(
            f"{where}: its configuration says {', '.join(recorded.other)}, which is not the "
            f"convention of {layout.name}; give {' '.join(missing)} as its training had them"
        )
    return recorded


def _names_in_file(network: Network, keys: Mapping[str, str]) -> Callable[[str], str]:
    """What the family's names are called in a file; of a missing tensor, what it would be."""
    scheme = network.scheme
    first = keys.get(scheme.rename(scheme.first[0]) or "", "")
    start = first.removesuffix(scheme.first[0]) if first else network.prefix
    shortcut = any(".shortcut." in key for key in keys.values())

    def named(name: str) -> str:
        original = start + scheme.original(name)
        if shortcut:
            original = original.replace(".downsample.", ".shortcut.")
        return keys.get(name, original)

    return named


def _check_convention(network: Network, given: Given, where: str, warnings: list[str]) -> None:
    """A file of unknown origin does not say how its network sees pixels."""
    missing = given.missing_convention(network.family)
    if network.layout.name == PLAIN_DETECTRON2 and missing:
        raise DataError(
            f"{where}: a network in Detectron2's names without an input contract, and BGR and RGB, "
            f"1x1 and 3x3 strides are all usual there; give {' '.join(missing)} as its "
            "training had them, or convert the checkpoint that it was made from"
        )
    if given.missing_pixels():
        warnings.append(
            "the file does not say how its pixels were normalized: ImageNet's RGB mean and std are "
            f"assumed, as torchvision's networks have them; else give {' '.join(missing[:3])}"
        )


@dataclasses.dataclass
class _Taken:
    """Where every value of a file went."""

    backbone: dict[str, Entry] = dataclasses.field(default_factory=dict)  # the family's names
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    tokens: dict[str, Entry] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


def _take(choice: Choice, entries: Sequence[Entry], where: str, explicit: bool) -> _Taken:
    """Find the backbone's tensors, and a rule for everything else in the file.

    Args:
        explicit: the user named this network, so what else there is cannot be meant.

    Raises DataError: keys of the backbone that its names do not have; or convolutions beside it
    that could be a second network.
    """
    network, layout = choice.network, choice.network.layout
    own, rename = network.scheme.own, network.scheme.rename
    taken = _Taken()
    unknown: list[Any] = []
    ignored: list[Any] = []
    second: list[Any] = []
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        depth = _shared(entry.keys, network.keys)
        is_inside = depth == len(network.keys) == len(entry.keys) - 1
        if not is_inside or (not depth and not is_array(entry.value)):
            groups.setdefault(entry.keys[: depth + 1], []).append(entry)
            continue
        key, short = entry.keys[-1], unwrapped(entry.keys[-1])
        owner = _owner(choice, short)
        name = short.removeprefix(network.prefix) if owner == choice.name else ""
        rule = first_rule(name, network.family.dropped) or rule_of(short, layout)
        new = rename(name)
        if new in taken.backbone:
            raise DataError(f"{where}: two tensors for {new}; the second is {names([key])}")
        if new:
            taken.backbone[new] = entry
        elif owner not in (None, choice.name):
            taken.dropped[f"{owner} encoder"] += 1
        elif rule in _FLAT_HEADS and is_array(entry.value) and entry.value.ndim > 2:
            unknown.append(key)  # of a segmentation network, whose backbone is dilated
        elif rule:
            taken.dropped[rule] += 1
            if rule in network.family.tokens:
                taken.tokens[name] = entry
        elif own.match(name):
            unknown.append(key)
        else:
            (second if _is_large_convolution(entry) else ignored).append(key)
            taken.dropped[IGNORED] += 1
    if unknown:
        raise DataError(
            f"{where}: {len(unknown)} keys that neither the map nor a drop rule knows: "
            f"{names(unknown, limit=50)}; not the network of a {layout.name} checkpoint"
        )
    for path, group in groups.items():
        rule = _rule_beside(choice, path, group)
        if rule is None:
            (second if any(map(_is_large_convolution, group)) else ignored).append(path[-1])
        taken.dropped[rule or IGNORED] += 1
    _check_shared([entry.value for entry in taken.backbone.values()], where)
    if second and not explicit:
        raise DataError(
            f"{where}: {names(second)}: convolutions beside the backbone of this {layout.name} "
            "checkpoint, of another network, or of a segmentation or detection network, whose "
            "backbone may be dilated; it is ambiguous what is meant; give --encoder with one of "
            f"{', '.join(choice.networks)}"
        )
    if ignored + second:
        text = names([*ignored, *second], limit=_MAX_IGNORED)
        taken.notes.append(f"{IGNORED}, because the backbone has no place for it: {text}")
    if second:
        taken.warnings.append(
            f"{names(second)} are convolutions, too: if they are a segmentation or detection "
            "network's, its backbone may be dilated, and this one is not"
        )
    return taken


def _shared(keys: Sequence[Any], path: Sequence[str]) -> int:
    """How many keys two paths have in common at their start."""
    both = zip(keys, path, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(keys), len(path)))


def _owner(choice: Choice, key: str) -> str | None:
    """The network of the chosen one's dict whose key this is: the one with the longest prefix."""
    chosen = choice.network
    starts = {**chosen.layout.networks, **{n: net.start for n, net in choice.networks.items()}}
    here = {
        name: start
        for name, start in starts.items()
        if start.startswith(chosen.directory)
        and "/" not in (prefix := start.removeprefix(chosen.directory))
        and key.startswith(prefix)
    }
    longest = max(here.values(), key=len, default="")
    if longest == chosen.directory and choice.name not in here:
        # Without a prefix every key would be its own.
        return next((name for name in here if chosen.scheme.rename(key)), None)
    if here.get(choice.name) == longest:
        return choice.name
    return next((name for name, start in here.items() if start == longest), None)


def _rule_beside(choice: Choice, path: tuple[Any, ...], group: Sequence[Entry]) -> str | None:
    """The rule for what is at a path of keys beside the backbone; None: there is none."""
    for name, network in choice.networks.items():
        if network.keys[: len(path)] == path and name != choice.name:
            return f"{name} encoder"
    if rule := rule_of(path[-1], choice.network.layout):
        return rule
    arrays = [entry.keys for entry in group if is_array(entry.value)]
    if choice.network.layout.is_own or not arrays:
        return "training record"  # the project's own format is versioned
    # The state dict of a torch optimizer, or several.
    every = [e.keys[: e.keys.index("param_groups")] for e in group if "param_groups" in e.keys]
    if all(any(keys[: len(one)] == one for one in every) for keys in arrays):
        return "optimizer"
    return None


def _is_large_convolution(entry: Entry) -> bool:
    """Whether an entry is a convolution's weight, larger than 1x1."""
    named = str(entry.keys[-1]).rpartition(".")[2] == "weight" and entry.name
    return bool(
        named and is_array(entry.value) and entry.value.ndim == 4 and max(entry.value.shape[2:]) > 1
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
