"""Checkpoints of one pre-training as inits of a suite: one row each, in the order of their epochs.

--init 'mine=runs/ckpt_*.pth.tar'       the rows mine-epoch0100, mine-epoch0200, ...
"""

import glob
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.suites import children
from moco.common.command import EPOCH
from moco.common.errors import DataError
from moco.common.files import expanded

_SIGNS = re.compile(r"[*?\[]")
# `checkpoint_0099`, `ckpt-99`, `epoch=99` or `99ep`, but not `step=99`.
_NAME = re.compile(
    r"(?<![a-z])(?:epochs?|ep|checkpoint|ckpt)[-_=]?(\d{1,6})(?!\d)"
    r"|(?<!\d)(\d{1,6})ep(?:ochs?)?(?![a-z\d=])",
    re.IGNORECASE,
)
_Version = tuple[Path, int, int]
_known: dict[_Version, int | None] = {}  # epochs of files that this process has read


def is_pattern(weights: str) -> bool:
    """Return whether a weights argument is a pattern of file names, such as `runs/ckpt_*.pth`."""
    is_file = "://" in weights or expanded(weights).exists()
    return bool(_SIGNS.search(weights)) and not is_file


def matching(pattern: str) -> list[Path]:
    """Return the files that a pattern matches, in alphabetical order."""
    paths = map(Path, glob.glob(os.path.expanduser(pattern)))
    return sorted(path for path in paths if path.is_file())


def by_epoch(files: Sequence[Path], where: str) -> dict[int, Path]:
    """Order checkpoints by the epoch that they record, or else by that in their names.

    Args:
        files: Files of one pre-training.
        where: Argument that names them, for messages.

    Raises:
        DataError: If there are none, one has no epoch, or two have the same.
    """
    if not files:
        raise DataError(f"{where}: no file has such a name; expected checkpoints")
    versions = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    if unread := [version for version in versions if version not in _known]:
        epochs = children.call(_recorded_epochs, [path for path, *_ in unread])
        _known.update(zip(unread, epochs, strict=True))
    found: dict[int, Path] = {}
    for version in versions:
        path, epoch = version[0], _known[version]
        if epoch is None:
            epoch = _named_epoch(path.name)
        if epoch is None:
            raise DataError(
                f"{where}: {path} records no epoch, and its name has none; expected a name such "
                "as epoch0100.pth"
            )
        if epoch in found:
            raise DataError(
                f"{where}: {found[epoch].name} and {path.name} are both of epoch {epoch}; expected "
                "one checkpoint of each, so give a narrower pattern"
            )
        found[epoch] = path
    return dict(sorted(found.items()))


def series(name: str, files: Mapping[int, Path]) -> dict[str, str]:
    """Return the inits of checkpoints by epoch: `mine-epoch0100` → file."""
    return {f"{name}{EPOCH}{epoch:04d}": str(path) for epoch, path in files.items()}


def _recorded_epochs(files: Sequence[Path]) -> list[int | None]:
    return [_recorded_epoch(path) for path in files]


def _recorded_epoch(path: Path) -> int | None:
    """Return the `epoch` of a checkpoint, also in mmengine's `meta`; None if it has none."""
    from convert.read import read_file

    raw: Any = None
    with suppress(DataError):  # the checks before the first run name what cannot be read
        raw = read_file(path)
    for content in (raw, raw.get("meta") if isinstance(raw, Mapping) else None):
        epoch = content.get("epoch") if isinstance(content, Mapping) else None
        if type(epoch) is int and epoch >= 0:
            return epoch
    return None


def _named_epoch(name: str) -> int | None:
    found = _NAME.search(name)
    return int(found[1] or found[2]) if found else None
