"""Recognize a checkpoint by its contents, and take the backbone of one network out of it.

convert/networks.py says which network; file names and endings are never looked at. Every value of
the file is a part of the backbone, dropped by a rule with a name, or, where it can be no part of
the backbone and of no second network, ignored and listed; anything else is an error.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convert import named
from convert.contract import FOLDED, InputContract, Pixels
from convert.families.base import PLAIN_DETECTRON2, Adapted, Family, Hints, first_rule
from convert.files import Entry, at, flatten, is_array, names, to_tensor, unwrapped
from convert.networks import Choice, Network, choose_network, rule_of
from convert.recorded import Recorded
from convert.tensors import check_shared, fill_statistics, join, to_float32
from moco.common.errors import DataError, UserError
from moco.modeling.soundness import Triple

if TYPE_CHECKING:
    from torch import Tensor


# Heads of a plain state dict that are linear where the backbone is a classifier's.
_FLAT_HEADS = ("classifier", "head")
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
        proof: architecture and tensors of the network that the features are compared with; None:
            the contract's and `state`.
        epoch: epochs finished.
        keys: of the nested dicts that its network is in, outermost first.
        unclear_names: where the network is named -> a name that timm alone can explain.
        assumed: what neither tensors nor a name tell, for people; "": nothing.
        head, notes, warnings: for people.
    """

    contract: InputContract
    state: dict[str, Tensor]
    encoders: tuple[str, ...]
    named: Callable[[str], str]
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    filled: int = 0
    tokens: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    proof: tuple[Any, Mapping[str, Tensor]] | None = None
    epoch: int | None = None
    keys: tuple[str, ...] = ()
    unclear_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    assumed: str = ""
    head: str = "already converted"
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def source_network(self) -> tuple[Mapping[str, Tensor], Any]:
        """Tensors and architecture of the network that the features are compared with."""
        architecture, state = self.proof or (self.contract.architecture, self.state)
        return state, architecture

    def effect_of_tokens(self) -> list[str]:
        """By how much the features change without the tokens, for people; empty without any."""
        effect, (state, architecture) = self.contract.family.effect, self.source_network()
        return [effect(architecture, state, self.tokens)] if effect and self.tokens else []


def recognize(
    raw: Any,
    where: str,
    given: Given = Given(),
    sha256: str = "unknown",
    beside: Callable[[], Recorded | None] = lambda: None,
) -> Recognized:
    """Find the layout of an opened checkpoint and take its backbone.

    Args:
        raw: what `read_file` returned.
        where: the file's name, for error messages.
        given: what to take instead of what the file or its layout says.
        sha256: of the file.
        beside: reads the configuration beside it, for names that come with one.

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
    recorded, names = named.recorded(
        network, raw, given.missing_convention(network.family), where, beside
    )
    unclear = named.check_names(names, network.family, where)
    _check_convention(network, given, where, warnings, recorded.mean is not None)
    taken = _take(choice, entries, where, given.encoder is not None)
    notes += taken.notes
    warnings += taken.warnings
    backbone, keys = join(taken.backbone, where, notes)
    own = network.family.in_own_shape
    backbone = {name: own(name, value) for name, value in backbone.items()}
    in_file = _names_in_file(network, keys)
    filled = fill_statistics(backbone, notes) if layout.name.endswith(FOLDED) else 0
    if recorded.note:
        notes.append(recorded.note)
    to_float32(backbone, in_file, warnings)
    tokens = {new: to_tensor(e.keys[-1], e.value, where).float() for new, e in taken.tokens.items()}
    said = {**named.heads(backbone, names), **network.scheme.says}
    hints = Hints(
        where=where,
        named=in_file,
        notes=notes,
        warnings=warnings,
        arch=recorded.arch or at(raw, ("arch",)),
        says={**said, **layout.says, **recorded.says},
        asked=given.options,
        dropped=taken.dropped,
        tokens=tokens,
        assumed_pixels="" if recorded.mean or given.mean is not None else layout.name,
    )
    architecture = network.family.recognize(backbone, hints)
    adapted = network.family.adapt(architecture, backbone, given.options, where)
    notes += [f"changed as requested: {change}" for change in adapted.changes]
    pixels = Pixels(
        recorded.mean or layout.mean,
        recorded.std or layout.std,
        recorded.channel_order or layout.channel_order,
    )
    source = _changed(layout.name.replace("MSRA", recorded.owner or "MSRA"), adapted)
    every = {entry.name for entry in entries}
    heads = (text for key, text in network.family.heads.items() if network.start + key in every)
    epoch = at(raw, layout.epoch.split("/"))
    return Recognized(
        contract=InputContract(
            given.pixels(pixels, where),
            network.family,
            adapted.architecture,
            source,
            sha256,
            choice.name,
        ),
        state=adapted.state,
        encoders=tuple(choice.networks),
        named=in_file,
        dropped=dict(taken.dropped),
        filled=filled,
        tokens=tokens,
        proof=adapted.proof,
        epoch=epoch + layout.epoch_offset if type(epoch) is int else None,
        keys=network.keys,
        unclear_names=unclear,
        assumed=named.assumed(network, names, recorded, pixels, given=given.mean is not None),
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
    state = {family.from_detectron2(key) or key: value for key, value in model.items()}
    adapted = family.adapt(architecture, state, given.options, where)
    return Recognized(
        contract=dataclasses.replace(
            contract,
            pixels=given.pixels(contract.pixels, where),
            architecture=adapted.architecture,
            source=_changed(contract.source, adapted),
        ),
        state=adapted.state,
        encoders=(contract.encoder,),
        named=lambda name: family.to_detectron2(name) or name,
        proof=adapted.proof,
        notes=[f"changed as requested: {change}" for change in adapted.changes],
    )


def _changed(source: str, adapted: Adapted) -> str:
    """A source's name, and what was changed in its backbone."""
    return f"{source} ({'; '.join(adapted.changes)})" if adapted.changes else source


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


def _check_convention(
    network: Network, given: Given, where: str, warnings: list[str], has_pixels: bool
) -> None:
    """A file of unknown origin does not say how its network sees pixels."""
    missing = given.missing_convention(network.family)
    if network.layout.name == PLAIN_DETECTRON2 and missing:
        raise DataError(
            f"{where}: a network in Detectron2's names without an input contract, and BGR and RGB, "
            f"1x1 and 3x3 strides are all usual there; give {' '.join(missing)} as its "
            "training had them, or convert the checkpoint that it was made from"
        )
    layout, usual = network.layout, network.family.pixels
    varied = layout.any_network and usual
    if given.missing_pixels() and not has_pixels and (layout.plain or varied):
        others = f"as torchvision's networks have them; else give {' '.join(missing[:3])}"
        warnings.append(
            "the file does not say how its pixels were normalized: ImageNet's RGB mean and std are "
            f"assumed, {f'and {usual}' if usual else others}"
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
        new = rename(name)
        rule = first_rule(new or name, network.family.dropped)
        if rule and new:
            name, new = new, None
        rule = rule or rule_of(short, layout)
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
        foreign = (unwrapped(key).removeprefix(network.prefix) for key in unknown)
        reasons = dict.fromkeys(first_rule(name, network.family.obstacles) for name in foreign)
        why = "".join(f"; {reason} has no place here" for reason in reasons if reason)
        raise DataError(
            f"{where}: {len(unknown)} keys that neither the map nor a drop rule knows: "
            f"{names(unknown, limit=50)}{why}; not the network of a {layout.name} checkpoint"
        )
    for path, group in groups.items():
        rule = _rule_beside(choice, path, group)
        if rule is None:
            (second if any(map(_is_large_convolution, group)) else ignored).append(path[-1])
        taken.dropped[rule or IGNORED] += 1
    check_shared([entry.value for entry in taken.backbone.values()], where)
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
