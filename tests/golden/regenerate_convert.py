"""Golden verdicts of the converter on every generated file: a network or a reason of refusal.

    python -m tests.golden.regenerate_convert

writes convert_verdicts.yaml next to this file. Run it only if another verdict is intended.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from convert.convert_to_d2 import convert_file
from convert.inspect_file import inspect_file
from moco.common.errors import DataError, UserError
from tests.oracles import (
    convert_damaged,
    convert_files,
    convert_hostile,
    convert_transformers,
    layouts_swin,
)
from tests.oracles.convert_files import File

GOLDEN = Path(__file__).parent / "convert_verdicts.yaml"
GROUPS: dict[str, Callable[[Path], dict[str, File]]] = {
    "self-supervised": lambda folder: convert_files.self_supervised(),
    "own": lambda folder: convert_files.our_own(),
    "plain": lambda folder: convert_files.plain(),
    "Detectron2": lambda folder: convert_files.of_detectron2(),
    "transformers": lambda folder: convert_transformers.transformers(),
    "ConvNeXt": lambda folder: convert_transformers.convnexts(),
    "Swin": lambda folder: layouts_swin.swins(),
    "packages": lambda folder: convert_files.by_packages(),
    "damaged ResNets": lambda folder: convert_damaged.damaged_resnets(),
    "unclear": lambda folder: convert_hostile.unclear(),
    "damaged records": lambda folder: convert_damaged.damaged_records(),
    "damaged others": lambda folder: convert_damaged.damaged_others(),
    "damaged Swins": lambda folder: layouts_swin.damaged_swins(),
    "other files": lambda folder: convert_hostile.other_files(),
    "timm's networks": lambda folder: convert_hostile.networks_of_timm(),
    "payloads": lambda folder: convert_hostile.payloads(folder / "marker"),
}


def verdicts(group: str, folder: Path) -> dict[str, Any]:
    """Return the verdict on each file of a group whose packages are installed."""
    made = {}
    for name, file in GROUPS[group](folder).items():
        if all(importlib.util.find_spec(package) for package in file.needs):
            with TemporaryDirectory(dir=folder) as scratch:
                made[name] = verdict(file, Path(scratch))
    return made


def verdict(file: File, folder: Path) -> dict[str, Any]:
    """Convert a file and describe network, origin of the tensors and contract, or the refusal.

    A file without options is also inspected: its description names the same networks or gives the
    same reason, unless only the features reveal that reason.
    """
    path, content = file.write(folder)
    inspected = not file.options
    description = ""
    try:
        description = inspect_file(path) if inspected else ""
    except UserError as error:
        description = _reason(error, path)
    try:
        report = convert_file(path, folder / "out.pth", **file.options)
    except UserError as error:
        reason = _reason(error, path)
        kind = DataError if isinstance(error, DataError) else UserError
        refused = {kind.__name__: reason}
        if inspected and reason not in description:
            refused["inspect"] = "does not refuse it"
        return refused
    converted = torch.load(folder / "out.pth", weights_only=True)
    contract = converted["contract"]
    assert len(contract.pop("source_sha256")) == 64
    networks = {contract["encoder"]: origin(converted["model"], content)}
    for encoder in report.encoders:
        if encoder not in networks:
            options = {**file.options, "encoder": encoder}
            other = convert_file(path, folder / "other.pth", **options).contract.encoder
            model = torch.load(folder / "other.pth", weights_only=True)["model"]
            networks[other] = origin(model, content)
            assert other == encoder
    assert not inspected or all(name in description for name in networks), description
    assert not inspected or str(report.contract.architecture) in description
    made = {
        "network": str(report.contract.architecture),
        "encoders": networks,
        "head": report.head,
        "epoch": report.epoch,
        "dropped": _OnOneLine(report.dropped),
        "contract": _OnOneLine(json.loads(json.dumps(contract))),
        "warnings": report.warnings,
    }
    return {name: value for name, value in made.items() if value not in (None, [])}


def origin(model: Mapping[str, torch.Tensor], content: Any) -> list[str]:
    """Return how many tensors were under which path of keys, or paths if they have two names.

    A path ends where the network's own names start.
    """
    places = defaultdict(list)
    for place, value in _arrays(content, ""):
        places[_identity(value)].append(place)
    found = [places[_identity(value)] for value in model.values()]
    found = [names for names in found if names]
    starts = []
    for first in found[0] if found else ():
        nearest = [max(names, key=lambda name: len(_common([name, first]))) for names in found]
        starts.append(_common(nearest))
    starts = [start[: max(start.rfind("."), start.rfind("/")) + 1] for start in starts]
    return [f"{len(found)} of {len(model)} from {start!r}" for start in dict.fromkeys(starts)]


def _reason(error: UserError, path: Path) -> str:
    """Return an error's message without parts that depend on the machine or are always the same."""
    message = str(error).removeprefix(f"{path}: ")
    assert len(message) <= 300 and "\n" not in message, f"{len(message)}: {message}"
    reason = message.split("; supported are ")[0]
    # A library's reason has another text in another version.
    reason = re.sub(r"(or damaged|not JSON) \(.*\)", r"\1", reason)
    return reason.replace(str(path.parent), "FOLDER").replace(str(path.parent.parent), "PARENT")


class _OnOneLine(dict[str, Any]):
    """Dict that YAML writes in flow style."""


yaml.SafeDumper.add_representer(
    _OnOneLine,
    lambda dumper, value: dumper.represent_mapping(
        "tag:yaml.org,2002:map", value.items(), flow_style=True
    ),
)


def _common(names: list[str]) -> str:
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in same)


def _arrays(content: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _arrays(
                value, f"{place}{key}/" if isinstance(value, Mapping) else place + str(key)
            )
    elif hasattr(content, "dtype") and getattr(content, "ndim", 0):
        yield place, torch.as_tensor(content)


def _identity(value: torch.Tensor) -> tuple[Any, ...]:
    value = value.detach().float().contiguous()
    return tuple(value.shape), hash(value.numpy().tobytes())


def main() -> None:
    torch.set_num_threads(1)
    with TemporaryDirectory() as scratch:
        golden = {group: verdicts(group, Path(scratch)) for group in GROUPS}
    GOLDEN.write_text(yaml.safe_dump(golden, sort_keys=False, default_flow_style=None, width=100))
    print(f"{GOLDEN}: {sum(map(len, golden.values()))} files")


if __name__ == "__main__":
    main()
