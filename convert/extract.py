"""Extraction of a network's tensors from a file, complete and in float32.

Every value of the file is mapped to the backbone or dropped by a named rule. Values that can belong
neither to the backbone nor to a second network are ignored and listed; others are an error.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from convert.families.base import OtherNetworkError, first_rule
from convert.find import Choice, is_average, rule_of
from convert.projects import DROPPED
from convert.read import Entry, format_keys, is_array, strip_wrappers, to_tensor
from moco.common.errors import DataError, format_value

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = "ignored"  # rule of values outside a backbone that belong to no network
_MAX_IGNORED = 12  # names in a note
_MAX_SHARED_BYTES = 64 << 20
# Heads under a network's prefix, which are linear if the backbone is a classifier's.
_FLAT_HEADS = ("classifier", "head")


@dataclasses.dataclass
class Extraction:
    """Assignment of every value of a file: to the backbone, or to a drop rule."""

    backbone: dict[str, Entry] = dataclasses.field(default_factory=dict)  # by the family's names
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    tokens: dict[str, Entry] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


def extract_backbone(
    choice: Choice, entries: Sequence[Entry], where: str, explicit: bool
) -> Extraction:
    """Extract the backbone's tensors, and assign a drop rule to every other value of the file.

    Args:
        choice: Network to convert.
        entries: All values of the file.
        where: Name of the file, for messages.
        explicit: True if the user named this network, so that further convolutions are not
            ambiguous.

    Raises:
        DataError: If keys of the backbone are unknown to its naming scheme, or convolutions
            outside it could be a second network.
    """
    network, project = choice.network, choice.project
    family, parts = network.family, Extraction()
    inside = {**family.dropped, **network.scheme.dropped}
    unknown: list[Any] = []
    heads: list[Any] = []
    ignored: list[Any] = []
    second: list[Any] = []
    outside: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        depth = _shared(entry.keys, network.keys)
        is_inside = depth == len(network.keys) == len(entry.keys) - 1
        if not is_inside or (not depth and not is_array(entry.value)):
            outside.setdefault(entry.keys[: depth + 1], []).append(entry)
            continue
        key, short = entry.keys[-1], strip_wrappers(entry.keys[-1])
        owner = _owner(choice, entry.name)
        name = short.removeprefix(network.inner_prefix) if owner == choice.name else ""
        new = network.scheme.rename(name)
        rule = first_rule(new or name, inside)
        if rule and new:
            name, new = new, None
        rule = rule or rule_of(short, project) or first_rule(short, network.scheme.beside)
        if new in parts.backbone:
            raise DataError(f"{where}: two tensors for {new}; the second is {format_keys([key])}")
        if new:
            parts.backbone[new] = entry
        elif owner not in (None, choice.name):
            parts.dropped[f"{owner} encoder"] += 1
        elif rule in _FLAT_HEADS and is_array(entry.value) and entry.value.ndim > 2:
            # The head of a segmentation network, whose backbone may be dilated.
            (second if explicit else unknown).append(key)
            parts.dropped[IGNORED] += explicit
            heads.append(key)
        elif rule in DROPPED and _is_large_convolution(entry):
            second.append(key)
            parts.dropped[IGNORED] += 1
        elif rule:
            parts.dropped[rule] += 1
            if rule in family.tokens:
                parts.tokens[name] = entry
        elif network.scheme.own.match(name) or (owner == choice.name and network.inner_prefix):
            unknown.append(key)
        else:
            (second if _is_large_convolution(entry) else ignored).append(key)
            parts.dropped[IGNORED] += 1
    if unknown:
        foreign = (strip_wrappers(key).removeprefix(network.inner_prefix) for key in unknown)
        reasons = dict.fromkeys(first_rule(name, family.obstacles) for name in foreign)
        first = next((reason for reason in family.obstacles if reason in reasons), "")
        why = f"; not the network of a {project.name} checkpoint"
        if first:
            why = f"; {first} is not supported"
        start = network.inner_prefix.rstrip(".")
        if start and unknown == heads:
            why = (f"; {first} is not supported" if first else "") + (
                "; they are the head of a network whose backbone may be dilated; if it is not, "
                f"give --encoder {format_value(start)[1:-1]}"
            )
        raise OtherNetworkError(
            f"{where}: {len(unknown)} keys that are neither mapped nor dropped by a rule: "
            f"{format_keys(unknown, limit=2)}{why}"
        )
    for path, group in outside.items():
        if _is_average_without_names(group):
            parts.warnings.append(
                f"{format_keys([path[-1]])} looks like a moving average of the network, without "
                "names, and is not used; to convert it, copy it into the model and save that"
            )
            parts.dropped["average without names"] += len(group)
            continue
        rule = _rule_of_group(choice, path, group)
        if rule is None:
            (second if any(map(_is_large_convolution, group)) else ignored).append(path[-1])
        parts.dropped[rule or IGNORED] += 1
    check_shared([entry.value for entry in parts.backbone.values()], where)
    if second and not explicit:
        raise DataError(
            f"{where}: {format_keys(second)}: convolutions outside the backbone of this "
            f"{project.name} checkpoint, of another network, or of a segmentation or detection "
            "network, whose backbone may be dilated; it is ambiguous which to convert; give "
            f"--encoder with one of {', '.join(choice.found.networks)}",
            option="encoder",
        )
    if ignored + second:
        text = format_keys([*ignored, *second], limit=_MAX_IGNORED)
        parts.notes.append(f"{IGNORED}, because the backbone does not use it: {text}")
    if second:
        parts.warnings.append(
            f"{format_keys(second)} are convolutions: if they belong to a segmentation or "
            "detection network, its backbone may be dilated, but this one is not"
        )
    return parts


def _is_average_without_names(group: Sequence[Entry]) -> bool:
    """Return whether entries are a list of arrays, as torch_ema and diffusers save averages."""
    lists = [entry for entry in group if is_array(entry.value) and type(entry.keys[-1]) is int]
    return len(lists) >= 10 and any(is_average(key) for key in lists[0].keys[:-1])


def _shared(keys: Sequence[Any], path: Sequence[str]) -> int:
    """Return the number of leading keys that two paths have in common."""
    both = zip(keys, path, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(keys), len(path)))


def _owner(choice: Choice, name: str) -> str | None:
    """Return the network that a tensor belongs to: the one with the longest matching prefix.

    An empty prefix matches every key, so the naming scheme of such a network has to know the key,
    unless the network is the chosen one.
    """
    networks, aliases = choice.found.networks, choice.found.aliases
    starts = {network.prefix: role for role, network in networks.items()}
    here = [
        start
        for start in (*starts, *aliases)
        if name.startswith(start) and start.count("/") == choice.network.prefix.count("/")
    ]
    start = max(here, key=len, default="")
    if start in aliases:
        return f"second name of the {aliases[start]}"
    role = starts.get(start) if here else None
    if role is None or role == choice.name or networks[role].inner_prefix:
        return role
    return role if networks[role].scheme.rename(name.removeprefix(start)) else None


def _rule_of_group(choice: Choice, path: tuple[Any, ...], group: Sequence[Entry]) -> str | None:
    """Return the rule for the values at a path of keys outside the backbone, or None."""
    for name, network in choice.found.networks.items():
        if network.keys[: len(path)] == path and name != choice.name:
            return f"{name} encoder"
    for start, name in choice.found.aliases.items():
        rename = choice.found.networks[name].scheme.rename
        is_at_root = not start and all(rename(entry.name) for entry in group)
        if is_at_root or tuple(start.split("/")[:-1])[: len(path)] == path:
            return f"second name of the {name} encoder"
    rule = rule_of(path[-1], choice.project)
    if rule and not (rule in DROPPED and any(map(_is_large_convolution, group))):
        return rule
    arrays = [entry.keys for entry in group if is_array(entry.value)]
    if choice.project.is_ours or not arrays:
        return "training record"  # this project's own format is versioned
    # The group may be the state dict of one or several torch optimizers.
    every = [e.keys[: e.keys.index("param_groups")] for e in group if "param_groups" in e.keys]
    if all(any(keys[: len(one)] == one for one in every) for keys in arrays):
        return "optimizer"
    return None


def _is_large_convolution(entry: Entry) -> bool:
    """Return whether an entry is the weight of a convolution larger than 1x1."""
    named = str(entry.keys[-1]).rpartition(".")[2] == "weight" and entry.name
    return bool(
        named and is_array(entry.value) and entry.value.ndim == 4 and max(entry.value.shape[2:]) > 1
    )


def join_parts(
    entries: dict[str, Entry], where: str, notes: list[str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a backbone and their keys in the file, by the family's names.

    Parts ("attn.qkv.weight#0", see `convert.families.base.Scheme`) are concatenated, with a note.

    Raises:
        DataError: If values are not dense tensors, or parts do not fit together.
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
                raise DataError(
                    f"{where}: {keys[whole]} cannot be concatenated: shapes or types differ"
                )
            tensors = [torch.cat(tensors)]
        state[whole] = tensors[0]
    if joined:
        first = min(joined)  # safetensors have no defined order
        notes.append(
            f"{first} is {keys[first]}, concatenated"
            + (f"; so are {len(joined) - 1} more" if joined[1:] else "")
        )
    return state, keys


def check_shared(values: Iterable[Any], where: str) -> None:
    """Raise DataError if tensors share storages, so that copies may exhaust memory."""
    import torch

    claimed = 0
    held: dict[int, int] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                continue  # `to_tensor` refuses it by name
            claimed += value.nbytes
            held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif is_array(value):
            claimed += value.nbytes
            held[id(value)] = value.nbytes
    if claimed > 2 * sum(held.values()) + _MAX_SHARED_BYTES:
        raise DataError(
            f"{where}: tensors of {claimed} bytes that share {sum(held.values())} bytes; the file "
            "is damaged or malicious"
        )


def fill_statistics(backbone: dict[str, Tensor], notes: list[str]) -> int:
    """Add initial statistics to every BN that has none, in place, and return their number."""
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
        "into scale and bias, which is correct for FrozenBN only"
    )
    return len(missing)


def to_float32(
    backbone: dict[str, Tensor], named: Callable[[str], str], warnings: list[str]
) -> None:
    """Convert other floating-point types to float32, in place, with a warning."""
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
                f"{format_keys(map(named, keys))}"
            )
