"""Describe any checkpoint without converting it: what it is, what is in it, what it is good for."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.files import about_objects, flatten, is_array, is_converted, names, read_file
from convert.lookalikes import source_file
from convert.networks import all_networks
from convert.report import COMMAND, fine_tune_command, script
from convert.sources import Given, Recognized
from convert.translate import translate
from convert.verify import Converted
from moco.common.errors import DataError, UserError, shown
from moco.common.files import PathLike, named_objects, sha256_file
from moco.common.unpickler import Inert

# How many entries of a file are shown.
MAX_ENTRIES = 12


def inspect_file(path: PathLike) -> str:
    """Lines for people about a file of weights.

    Raises DataError: missing, damaged, or asking to run code. A file that can be read but not
    converted is described, with the reason.
    """
    path = source_file(Path(path))
    objects: set[str] = set()
    raw = read_file(path, objects)
    lines = [
        f"file          {path}: {path.stat().st_size:,} bytes",
        f"sha256        {sha256_file(path)}",
        *(f"holds         {entry}" for entry in _entries(raw)),
    ]
    for kind, lines_of_it in zip(("note", "warning"), about_objects(objects), strict=True):
        lines += [f"{kind:14}{line}" for line in lines_of_it]
    found, problem = _networks(path, raw)
    converted = is_converted(raw)
    if found:
        lines += _describe(found, converted, problem is not None)
    if problem is not None:
        reason = str(problem).removeprefix(f"{path}: ")
        lines.append(f"{'problem       ' if found else 'no use        '}{reason}")
    if not found:
        return "\n".join(lines)
    quoted = shlex.quote(str(path))
    if converted:
        lines.append(f"next          {fine_tune_command(found[0][1].contract, path)}")
    else:
        encoder = f" --encoder {found[0][0].contract.encoder}" if problem is not None else ""
        lines.append(f"next          {script(COMMAND)} {quoted} weights.pth{encoder}")
    return "\n".join(lines)


def _networks(path: Path, raw: Any) -> tuple[list[tuple[Recognized, Converted]], UserError | None]:
    """Every network that a conversion could take, the default first, and what is wrong."""
    problem = None
    try:
        default = translate(path, raw, Given())
        taken = default[0].contract.encoder
        found, choices = [default], [name for name in default[0].encoders if name != taken]
    except UserError as error:
        problem, found = error, []
        try:
            entries = flatten(raw, str(path))
            choices = [] if is_converted(raw) else [*all_networks(raw, entries, str(path))[1]]
        except DataError:
            choices = []
    for choice in choices:
        try:
            found.append(translate(path, raw, Given(encoder=choice)))
        except UserError as error:
            problem = problem or error
    return found, problem


def _describe(
    found: list[tuple[Recognized, Converted]], converted: bool, problem: bool
) -> list[str]:
    recognized, model = found[0]
    contract = model.contract
    epoch = "" if recognized.epoch is None else f", epoch {recognized.epoch}"
    lines = [f"source        {contract.source}{epoch}, {recognized.head}"]
    for number, (one, its) in enumerate(found):
        parameters = sum(
            value.numel()
            for key, value in its.model.items()
            if not key.endswith(("running_mean", "running_var"))
        )
        which = f"; --encoder {one.contract.encoder}" if number or problem else "; default"
        which = which if found[1:] or problem else ""
        lines.append(
            f"network       {one.contract.encoder}: {its.contract.architecture}, "
            f"{len(its.model)} tensors, {parameters:,} parameters{which}"
        )
    lines.append(f"contract      {contract.convention()}")
    if converted:
        lines.append(f"from          a file with sha256 {contract.source_sha256}")
    lines += [f"note          {note}" for note in recognized.notes]
    lines += [f"warning       {warning}" for warning in recognized.warnings]
    return lines


def _entries(raw: Any) -> list[str]:
    """What lies at the top of a file, one text for each entry."""
    if not isinstance(raw, Mapping):
        return [f"a {type(raw).__name__}, not a dict"]
    if not any(isinstance(value, Mapping) for value in raw.values()):
        return [_summary(raw)]
    entries = [f"{names([key])}: {_summary(value)}" for key, value in raw.items()]
    if len(entries) > MAX_ENTRIES:
        entries[MAX_ENTRIES:] = [f"{len(entries) - MAX_ENTRIES} more"]
    return entries


def _summary(value: Any) -> str:
    """A value in a few words; what a stranger wrote is escaped and cut."""
    if is_array(value):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Inert):
        return f"an object, made by {named_objects([value.name])}"
    if not isinstance(value, Mapping):
        return shown(value)
    arrays = [item for item in value.values() if is_array(item)]
    if not arrays:
        return f"a dict of {len(value)}"
    types = Counter(str(item.dtype).removeprefix("torch.") for item in arrays)
    return f"{len(arrays)} tensors ({', '.join(f'{n} {t}' for t, n in types.items())})"
