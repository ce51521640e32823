"""Take a network's tensors out of a file: whole, of float32, none shared.

Every value of the file is a part of the backbone, dropped by a rule with a name, or, where it can
be no part of the backbone and of no second network, ignored and listed; anything else is an error.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from convert.families.base import first_rule
from convert.find import Choice, rule_of
from convert.projects import DROPPED
from convert.read import Entry, is_array, names, to_tensor, unwrapped
from moco.common.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = "ignored"  # what is beside a backbone and belongs to no network
_MAX_IGNORED = 12  # names in a note
_MAX_SHARED_BYTES = 64 << 20
# Heads at a network's prefix that are linear where the backbone is a classifier's.
_FLAT_HEADS = ("classifier", "head")


@dataclasses.dataclass
class Parts:
    """Where every value of a file went."""

    backbone: dict[str, Entry] = dataclasses.field(default_factory=dict)  # the family's names
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    tokens: dict[str, Entry] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


def take(choice: Choice, entries: Sequence[Entry], where: str, explicit: bool) -> Parts:
    """Find the backbone's tensors, and a rule for everything else in the file.

    Args:
        explicit: the user named this network, so what else there is cannot be meant.

    Raises:
        DataError: keys of the backbone that its names do not have; or convolutions beside it that
            could be a second network.
    """
    network, project = choice.network, choice.project
    family, parts = network.family, Parts()
    inside = {**family.dropped, **network.scheme.dropped}
    unknown: list[Any] = []
    ignored: list[Any] = []
    second: list[Any] = []
    beside: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        depth = _shared(entry.keys, network.keys)
        is_inside = depth == len(network.keys) == len(entry.keys) - 1
        if not is_inside or (not depth and not is_array(entry.value)):
            beside.setdefault(entry.keys[: depth + 1], []).append(entry)
            continue
        key, short = entry.keys[-1], unwrapped(entry.keys[-1])
        owner = _owner(choice, entry.name)
        name = short.removeprefix(network.prefix) if owner == choice.name else ""
        new = network.scheme.rename(name)
        rule = first_rule(new or name, inside)
        if rule and new:
            name, new = new, None
        rule = rule or rule_of(short, project)
        if new in parts.backbone:
            raise DataError(f"{where}: two tensors for {new}; the second is {names([key])}")
        if new:
            parts.backbone[new] = entry
        elif owner not in (None, choice.name):
            parts.dropped[f"{owner} encoder"] += 1
        elif rule in _FLAT_HEADS and is_array(entry.value) and entry.value.ndim > 2:
            unknown.append(key)  # of a segmentation network, whose backbone is dilated
        elif rule in DROPPED and _is_large_convolution(entry):
            second.append(key)
            parts.dropped[IGNORED] += 1
        elif rule:
            parts.dropped[rule] += 1
            if rule in family.tokens:
                parts.tokens[name] = entry
        elif network.scheme.own.match(name) or (owner == choice.name and network.prefix):
            unknown.append(key)
        else:
            (second if _is_large_convolution(entry) else ignored).append(key)
            parts.dropped[IGNORED] += 1
    if unknown:
        foreign = (unwrapped(key).removeprefix(network.prefix) for key in unknown)
        reasons = dict.fromkeys(first_rule(name, family.obstacles) for name in foreign)
        why = "".join(f"; {reason} has no place here" for reason in reasons if reason)
        raise DataError(
            f"{where}: {len(unknown)} keys that neither the map nor a drop rule knows: "
            f"{names(unknown, limit=50)}{why}; not the network of a {project.name} checkpoint"
        )
    for path, group in beside.items():
        rule = _rule_beside(choice, path, group)
        if rule is None:
            (second if any(map(_is_large_convolution, group)) else ignored).append(path[-1])
        parts.dropped[rule or IGNORED] += 1
    check_shared([entry.value for entry in parts.backbone.values()], where)
    if second and not explicit:
        raise DataError(
            f"{where}: {names(second)}: convolutions beside the backbone of this {project.name} "
            "checkpoint, of another network, or of a segmentation or detection network, whose "
            "backbone may be dilated; it is ambiguous what is meant; give --encoder with one of "
            f"{', '.join(choice.found.networks)}"
        )
    if ignored + second:
        text = names([*ignored, *second], limit=_MAX_IGNORED)
        parts.notes.append(f"{IGNORED}, because the backbone has no place for it: {text}")
    if second:
        parts.warnings.append(
            f"{names(second)} are convolutions, too: if they are a segmentation or detection "
            "network's, its backbone may be dilated, and this one is not"
        )
    return parts


def _shared(keys: Sequence[Any], path: Sequence[str]) -> int:
    """Return how many keys two paths have in common at their start."""
    both = zip(keys, path, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(keys), len(path)))


def _owner(choice: Choice, name: str) -> str | None:
    """Return the network whose tensor this is: that with the longest start before the name.

    Without a prefix every key would be a network's own, so there it has to be one that the
    scheme knows, unless the network is the chosen one.
    """
    networks, second_names = choice.found.networks, choice.found.second_names
    starts = {network.start: role for role, network in networks.items()}
    here = [
        start
        for start in (*starts, *second_names)
        if name.startswith(start) and start.count("/") == choice.network.start.count("/")
    ]
    start = max(here, key=len, default="")
    if start in second_names:
        return f"second name of the {second_names[start]}"
    role = starts.get(start) if here else None
    if role is None or role == choice.name or networks[role].prefix:
        return role
    return role if networks[role].scheme.rename(name.removeprefix(start)) else None


def _rule_beside(choice: Choice, path: tuple[Any, ...], group: Sequence[Entry]) -> str | None:
    """Return the rule for what is at a path of keys beside the backbone; None: there is none."""
    for name, network in choice.found.networks.items():
        if network.keys[: len(path)] == path and name != choice.name:
            return f"{name} encoder"
    for start, name in choice.found.second_names.items():
        rename = choice.found.networks[name].scheme.rename
        is_at_root = not start and all(rename(entry.name) for entry in group)
        if is_at_root or tuple(start.split("/")[:-1])[: len(path)] == path:
            return f"second name of the {name} encoder"
    rule = rule_of(path[-1], choice.project)
    if rule and not (rule in DROPPED and any(map(_is_large_convolution, group))):
        return rule
    arrays = [entry.keys for entry in group if is_array(entry.value)]
    if choice.project.is_ours or not arrays:
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


def join(
    entries: dict[str, Entry], where: str, notes: list[str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a backbone and their keys in the file, by the family's names.

    Parts ("attn.qkv.weight#0", see `convert.families.base.Scheme`) are concatenated; a note says
    which. Raises DataError: not dense tensors, or parts that do not fit together.
    """
    import torch

    groups: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        whole, _, part = name.partition("#")
        groups.setdefault(whole, {})[part] = entry
    state, keys, joined = {}, {}, []
    for whole, parts in groups.items():
        ordered = [parts[part] for part in sorted(parts)]
        keys[whole] = " + ".join(str(entry.keys[-1]) for entry in ordered)
        tensors = [to_tensor(str(e.keys[-1]), e.value, where) for e in ordered]
        if "" not in parts:
            joined.append(whole)
            if len({(t.dtype, t.dim() and t.shape[1:]) for t in tensors}) > 1:
                raise DataError(f"{where}: {keys[whole]} cannot be concatenated: other shapes")
            tensors = [torch.cat(tensors)]
        state[whole] = tensors[0]
    if joined:
        first = min(joined)  # safetensors are read in any order
        notes.append(
            f"{first} is {keys[first]}, concatenated"
            + (f"; so are {len(joined) - 1} more" if joined[1:] else "")
        )
    return state, keys


def check_shared(values: Iterable[Any], where: str) -> None:
    """Raise DataError for a file that names one storage for all of its tensors.

    Each becomes one of its own.
    """
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


def fill_statistics(backbone: dict[str, Tensor], notes: list[str]) -> int:
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


def to_float32(
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
