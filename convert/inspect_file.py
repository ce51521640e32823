"""Describe any checkpoint without converting it: what it is, what is in it, what it is good for."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.contract import Given
from convert.find import all_networks
from convert.prove import Converted
from convert.read import (
    about_objects,
    digest,
    flatten,
    is_array,
    is_converted,
    names,
    read_file,
    source_file,
)
from convert.report import command, fine_tune_command, lines
from convert.translate import Recognized, translate
from moco.common.errors import DataError, UserError, shown
from moco.common.files import PathLike, named_objects
from moco.common.pretrained import locate
from moco.common.unpickler import Inert

# How many entries of a file are shown.
MAX_ENTRIES = 12


def inspect_file(path: PathLike) -> str:
    """Lines for people about a file of weights.

    Raises DataError: missing, damaged, or asking to run code. A file that can be read but not
    converted is described, with the reason.
    """
    given = locate(path)
    path = source_file(given.path)
    objects: set[str] = set()
    raw = read_file(path, objects)
    notes, warnings = about_objects(objects)
    sha256 = digest(path)
    rows = [
        ("file", f"{path}: {path.stat().st_size:,} bytes"),
        ("sha256", sha256),
        *(("holds", entry) for entry in _entries(raw)),
        *(("note", note) for note in (*given.notes, *notes)),
        *(("warning", warning) for warning in warnings),
    ]
    found, problem = _networks(path, raw, sha256)
    converted = is_converted(raw)
    if found:
        rows += _describe(found, converted, problem is not None)
    if problem is not None:
        rows.append(("problem" if found else "no use", str(problem).removeprefix(f"{path}: ")))
    if found and converted:
        rows.append(("next", fine_tune_command(found[0][1].contract, path)))
    elif found:
        encoder = f" --encoder {found[0][0].contract.encoder}" if problem is not None else ""
        rows.append(("next", f"{command()} {shlex.quote(str(path))} weights.pth{encoder}"))
    return lines(rows)


def _networks(
    path: Path, raw: Any, sha256: str
) -> tuple[list[tuple[Recognized, Converted]], UserError | None]:
    """Every network that a conversion could take, the default first, and what is wrong."""
    problem = None
    try:
        default = translate(path, raw, Given(), sha256=sha256)
        taken = default[0].contract.encoder
        found, choices = [default], [name for name in default[0].encoders if name != taken]
    except UserError as error:
        problem, found = error, []
        try:
            entries = flatten(raw, str(path))
            choices = [] if is_converted(raw) else [*all_networks(raw, entries, str(path)).networks]
        except DataError:
            choices = []
    for choice in choices:
        try:
            found.append(translate(path, raw, Given(encoder=choice), sha256=sha256))
        except UserError as error:
            problem = problem or error
    return found, problem


def _describe(
    found: list[tuple[Recognized, Converted]], converted: bool, problem: bool
) -> list[tuple[str, str]]:
    recognized, contract = found[0][0], found[0][1].contract
    epoch = "" if recognized.epoch is None else f", epoch {recognized.epoch}"
    rows = [("source", f"{contract.source}{epoch}, {recognized.head}")]
    for number, (_, its) in enumerate(found):
        statistics = ("running_mean", "running_var")
        parameters = sum(v.numel() for k, v in its.model.items() if not k.endswith(statistics))
        which = ""
        if found[1:] or problem:
            which = f"; --encoder {its.contract.encoder}" if number or problem else "; default"
        rows.append(
            (
                "network",
                f"{its.contract.encoder}: {its.contract.architecture}, {len(its.model)} tensors, "
                f"{parameters:,} parameters{which}",
            )
        )
    rows.append(("contract", contract.convention()))
    if converted:
        rows.append(("from", f"a file with sha256 {contract.source_sha256}"))
    rows += [("note", note) for note in recognized.notes]
    return rows + [("warning", warning) for warning in recognized.warnings]


def _entries(raw: Any) -> list[str]:
    """The entries at the top of a file, one text for each."""
    if not isinstance(raw, Mapping):
        return [f"a {type(raw).__name__}, not a dict"]
    if not any(isinstance(value, Mapping) for value in raw.values()):
        return [_summary(raw)]
    entries = [f"{names([key])}: {_summary(value)}" for key, value in raw.items()]
    if len(entries) > MAX_ENTRIES:
        entries[MAX_ENTRIES:] = [f"{len(entries) - MAX_ENTRIES} more"]
    return entries


def _summary(value: Any) -> str:
    """A value in a few words; untrusted text is escaped and cut."""
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
