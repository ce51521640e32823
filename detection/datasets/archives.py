"""Archives of the published datasets: `archives.yaml` as dataclasses."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moco.common.command import program, quoted
from moco.common.files import read_text

FILE = Path(__file__).with_name("archives.yaml")


@dataclass(frozen=True)
class Archive:
    """One file to download; the header of archives.yaml documents the fields."""

    name: str
    folder: str
    complete: tuple[str, ...]
    takes: tuple[str, ...] = ()
    strip: int = 0
    url: str = ""
    size: int = 0
    about: int = 0
    hash: str = ""
    contents: str = ""
    source: str = ""
    prepare: str = ""

    def present(self, root: Path) -> bool:
        """Return whether the archive is unpacked below `root`, the folder of all datasets."""
        return all((root / self.folder / path).exists() for path in self.complete)


@dataclass(frozen=True)
class Dataset:
    """A dataset that `datasets fetch` gets; the header of archives.yaml documents the fields."""

    name: str
    contains: str
    doctor: str
    splits: tuple[str, ...]
    archives: tuple[Archive, ...]
    terms: str
    custom: str = ""
    account: str = ""
    license: str = ""


@functools.cache
def datasets() -> dict[str, Dataset]:
    """Return all datasets that can be fetched, by name."""
    facts = yaml.safe_load(read_text(FILE))
    archives = {name: Archive(name, **_fields(a)) for name, a in facts["archives"].items()}
    for dataset in facts["datasets"].values():
        dataset["archives"] = [archives[name] for name in dataset["archives"]]
    return {name: Dataset(name, **_fields(d)) for name, d in facts["datasets"].items()}


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Drop null values and turn lists into tuples, so that the dataclasses are hashable."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if v is not None}


def fetch_command(*splits: str, root: str = "") -> str:
    """Return the command that fetches the datasets with these splits, or "" if there is none."""
    every = datasets().values()
    names = [next((d.name for d in every if split in d.splits), "") for split in splits]
    arguments = [*filter(None, dict.fromkeys(names)), *(["--root", root] if root else [])]
    start = program("datasets", "python -m detection.datasets")
    return f"{start} fetch {quoted(*arguments)}" if any(names) else ""
