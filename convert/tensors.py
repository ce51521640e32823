"""A backbone's tensors between a file and the converter: whole, of float32, none shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from convert.files import Entry, is_array, names, to_tensor
from moco.common.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

_MAX_SHARED_BYTES = 64 << 20


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
