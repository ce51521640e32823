"""Which archives a published dataset is in: `archives.yaml`, as dataclasses."""

import functools
from dataclasses import dataclass
from pathlib import Path

import yaml

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
    content = yaml.safe_load(FILE.read_text())
    archives = {name: Archive(name=name, **_frozen(a)) for name, a in content["archives"].items()}
    found = {}
    for name, fields in content["datasets"].items():
        parts = tuple(archives[archive] for archive in fields.pop("archives"))
        found[name] = Dataset(name=name, archives=parts, **_frozen(fields))
    return found


def fetch_command(*splits: str, root: str = "") -> str:
    """The command that gets the datasets with these splits; "" if none of them has any."""
    names = [next((n for n, d in datasets().items() if split in d.splits), "") for split in splits]
    if not any(names):
        return ""
    arguments = [*dict.fromkeys(filter(None, names)), *(["--root", root] if root else [])]
    return f"moco-transfer datasets fetch {' '.join(arguments)}"


def _frozen(fields: dict) -> dict:
    """Fields without those that are null, lists as tuples."""
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in fields.items()
        if value is not None
    }
