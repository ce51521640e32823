"""Description of a checkpoint: contents, networks, and the command that converts them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.contract import InputContract, Overrides
from convert.find import all_networks
from convert.read import (
    digests,
    find_file,
    flatten,
    format_keys,
    is_array,
    is_converted,
    object_messages,
    read_file,
)
from convert.recognize import Recognition
from convert.report import (
    assumed_rows,
    contract_rows,
    fine_tune_command,
    lines,
    source_row,
)
from convert.translate import translate
from moco.common.command import converter, quote
from moco.common.errors import DataError, UserError, format_value
from moco.common.files import PathLike, named_objects
from moco.common.unpickler import OpaqueObject

# Limit on the listed entries of a file.
MAX_LISTED = 12


def inspect_file(weights: PathLike) -> str:
    """Describe weights as text, see `inspected`."""
    return inspected(weights)[0]


def inspected(
    weights: PathLike, find_tasks: Callable[[InputContract], Sequence[str]] | None = None
) -> tuple[str, int]:
    """Describe weights as text, and return the exit code that `convert` has for them.

    For a file that can be read but not converted, the description has the reason.

    Args:
        weights: File, folder, name or address.
        find_tasks: Function that returns the names of the tasks for a contract.

    Returns:
        The description, and 0 if a network in the file can be converted, perhaps with an option.

    Raises:
        UserError: If they cannot be downloaded.
        DataError: If the file is missing, damaged, or a program.
    """
    located = find_file(weights)
    path, objects = located.path, set[str]()
    raw = read_file(path, objects)
    notes, warnings = object_messages(objects)
    sha256, parts = digests(path)
    size = sum(path.with_name(name).stat().st_size for name in parts or [path.name])
    rows = [
        ("file", f"{path}: {size:,} bytes" + (f" in {len(parts)} files" if parts else "")),
        ("sha256", sha256),
        *(("sha256", f"{part} {name}") for name, part in parts.items()),
        *(("holds", entry) for entry in _entries(raw)),
        *(("note", note) for note in (*located.notes, *notes)),
        *(("warning", warning) for warning in warnings),
    ]
    found, problem = _networks(path, raw, (sha256, parts))
    converted = is_converted(raw)
    if found:
        rows += _describe(found, converted, problem is not None)
    if found and find_tasks is not None:
        rows += _by_folder(find_tasks(found[0].contract))
    if problem is not None:
        rows.append(("problem" if found else "not usable", str(problem).removeprefix(f"{path}: ")))
    if found and converted:
        rows.append(("next", fine_tune_command(found[0].contract, path)))
    elif found:
        encoder = f" --encoder {found[0].contract.encoder}" if problem is not None else ""
        source = quote(weights)
        rows.append(("next", f"{converter()} {source} weights.pth{encoder}"))
    if found or problem is None or problem.option:
        return lines(rows), 0
    return lines(rows), problem.exit_code


def _networks(
    path: Path, raw: Any, hashes: tuple[str, dict[str, str]]
) -> tuple[list[Recognition], UserError | None]:
    """Return every convertible network, the default first, and the first error."""
    problem = None
    try:
        default = translate(path, raw, Overrides(), hashes=hashes)
        taken = default.contract.encoder
        found, choices = [default], [name for name in default.encoders if name != taken]
    except UserError as error:
        problem, found = error, []
        try:
            entries = flatten(raw, str(path))
            choices = [] if is_converted(raw) else [*all_networks(raw, entries, str(path)).networks]
        except DataError:
            choices = []
    for choice in choices:
        try:
            found.append(translate(path, raw, Overrides(encoder=choice), hashes=hashes))
        except UserError as error:
            problem = problem or error
    return found, problem


def _describe(found: list[Recognition], converted: bool, problem: bool) -> list[tuple[str, str]]:
    recognized, contract = found[0], found[0].contract
    rows = [source_row(contract.source, recognized.epoch, recognized.head)]
    for number, each in enumerate(found):
        its = each.contract
        statistics = ("running_mean", "running_var")
        parameters = sum(v.numel() for k, v in each.model.items() if not k.endswith(statistics))
        which = ""
        if found[1:] or problem:
            which = f"; --encoder {its.encoder}" if number or problem else "; default"
        rows.append(
            (
                "network",
                f"{its.encoder}: {its.architecture}, {len(each.state)} tensors, "
                f"{parameters:,} parameters, family {its.family.name}{which}",
            )
        )
    if converted:
        rows.append(("from", f"a file with sha256 {contract.source_sha256}"))
    rows += contract_rows(contract, recognized.notes, recognized.warnings)
    return rows + assumed_rows(recognized.assumed)


def _by_folder(tasks: Sequence[str]) -> list[tuple[str, str]]:
    """List names of task files, one row for each folder."""
    folders = itertools.groupby(tasks, lambda task: task.rpartition("/")[0])
    rows = [
        ("tasks", f"{folder}/ {' '.join(t[len(folder) + 1 :] for t in own)}")
        for folder, own in folders
    ]
    return rows or [("tasks", "no task file takes it as it is")]


def _entries(raw: Any) -> list[str]:
    """Describe the top-level entries of a file, one string for each."""
    if not isinstance(raw, Mapping):
        return [f"a {type(raw).__name__}, not a dict"]
    if not any(isinstance(value, Mapping) for value in raw.values()):
        return [_summary(raw)]
    entries = [f"{format_keys([key])}: {_summary(value)}" for key, value in raw.items()]
    if len(entries) > MAX_LISTED:
        entries[MAX_LISTED:] = [f"{len(entries) - MAX_LISTED} more"]
    return entries


def _summary(value: Any) -> str:
    """Describe a value in a few words; untrusted text is escaped and truncated."""
    if is_array(value):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, OpaqueObject):
        return f"an object, made by {named_objects([value.name])}"
    if not isinstance(value, Mapping):
        return format_value(value)
    arrays = [item for item in value.values() if is_array(item)]
    if not arrays:
        return f"a dict of {len(value)}"
    types = Counter(str(item.dtype).removeprefix("torch.") for item in arrays)
    return f"{len(arrays)} tensors ({', '.join(f'{n} {t}' for t, n in types.items())})"
