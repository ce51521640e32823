"""Which archives a published dataset is in: `archives.yaml`, as dataclasses."""

import functools
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moco.common.command import program

FILE = Path(__file__).with_name("archives.yaml")


@dataclass(frozen=True)
class Archive:
    """One file to download; archives.yaml says what its fields mean."""

    name: str
    folder: str
    complete: tuple[str, ...]
    takes: tuple[str, ...] = ()
    strip: int = 0
    url: str = ""
    size: int = 0
    about: int = 0
    hash: str = ""
    source: str = ""
    prepare: str = ""

    def present(self, root: Path) -> bool:
        """Whether it is unpacked below `root`, the folder of all datasets."""
        return all((root / self.folder / path).exists() for path in self.complete)


@dataclass(frozen=True)
class Dataset:
    """What one name of `datasets fetch` stands for."""

    name: str
    contains: str
    doctor: str
    splits: tuple[str, ...]
    archives: tuple[Archive, ...]
    terms: str
    account: str = ""


@functools.cache
def datasets() -> dict[str, Dataset]:
    """All datasets that can be fetched, by name."""
    facts = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    archives = {name: Archive(name, **_fields(a)) for name, a in facts["archives"].items()}
    for dataset in facts["datasets"].values():
        dataset["archives"] = [archives[name] for name in dataset["archives"]]
    return {name: Dataset(name, **_fields(d)) for name, d in facts["datasets"].items()}


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Those that are not null, lists as tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if v is not None}


def fetch_command(*splits: str, root: str = "") -> str:
    """The command that gets the datasets with these splits; "" where there is none."""
    every = datasets().values()
    names = [next((d.name for d in every if split in d.splits), "") for split in splits]
    arguments = [*filter(None, dict.fromkeys(names)), *(["--root", root] if root else [])]
    start = program("datasets", "python -m detection.datasets")
    return f"{start} fetch {shlex.join(arguments)}" if any(names) else ""
