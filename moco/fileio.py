"""Files written whole or not at all, and files read without executing anything in them.

Writing: a temporary file in the same folder, fsync, ``os.replace``, fsync of the folder. A crash
or a full disk at any point leaves the old file or the new one, never a half.

Reading: weights come from strangers. ``torch.load`` is always called with ``weights_only=True``,
and ``.pkl`` files go through an unpickler that knows numpy arrays and containers and nothing else.
"""

import hashlib
import json
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from moco.errors import DataError, UserError

if TYPE_CHECKING:
    from torch import Tensor

PathLike = str | os.PathLike[str]
TEMPORARY_PREFIX = ".tmp-"


def atomic_write(path: PathLike, writer: Callable[[BinaryIO], None]) -> None:
    """Call ``writer`` on a temporary file, then move it to ``path`` in one step.

    Raises:
        UserError: the folder cannot be written or the disk is full; what was at ``path`` before
            is untouched.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            writer(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
        _sync_folder(path.parent)
    except OSError as error:
        written = os.path.getsize(temporary) if temporary and os.path.exists(temporary) else 0
        raise cannot_write(path, error, written) from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def cannot_write(path: PathLike, error: OSError, written: int) -> UserError:
    """What is said when the disk is full or a folder is not ours, after so many bytes."""
    reason = error.strerror or str(error)
    return UserError(
        f"cannot write {path}: {reason} ({written} bytes written); "
        "free space or choose another folder"
    )


def atomic_write_text(path: PathLike, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    data = text.encode()
    atomic_write(path, lambda file: _write_all(file, data))


def atomic_write_json(path: PathLike, value: Any) -> None:
    """Write ``value`` as indented JSON (keys sorted, NaN refused), atomically."""
    atomic_write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def atomic_torch_save(path: PathLike, value: Any) -> None:
    """``torch.save``, atomically."""
    import torch

    def write(file: BinaryIO) -> None:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            # torch's writer covers a full disk with a complaint of its own about positions.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    atomic_write(path, write)


def load_torch(path: PathLike) -> Any:
    """Read a ``torch.save`` file onto the CPU with ``weights_only=True``.

    Raises:
        DataError: missing, empty, damaged, or holding objects that would execute code.
    """
    import torch

    _require_file(path)
    try:
        with warnings.catch_warnings():
            # About pickle protocols and slow checks; what matters to a user becomes an error.
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Weights only load failed" in str(error):
            refused = _refused_global(str(error))
            raise DataError(
                f"{path}: refused, because loading it would run code ({refused}); "
                "only files of tensors, numbers and text are read"
            ) from error
        raise DataError(f"{path}: not a torch checkpoint or damaged ({_first(error)})") from error
    except MemoryError:
        raise
    except Exception as error:
        raise DataError(f"{path}: not a torch checkpoint or damaged ({_first(error)})") from error


def load_pickle(path: PathLike) -> Any:
    """Read a ``.pkl`` of plain containers and numpy arrays; nothing else is ever imported.

    Raises:
        DataError: missing, damaged, or holding anything else.
    """
    from moco.plain_pickle import PlainUnpickler, Refused

    _require_file(path)
    try:
        with open(path, "rb") as file:
            return PlainUnpickler(file, encoding="latin-1").load()
    except Refused as error:
        raise DataError(
            f"{path}: refused, because loading it would run code ({error}); "
            "only containers and numpy arrays are read"
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        raise DataError(f"{path}: not a pickle or damaged ({_first(error)})") from error


def sha256_file(path: PathLike) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_state(state: Mapping[str, "Tensor"]) -> str:
    """Hex SHA-256 of names, dtypes, shapes and bytes of tensors, in sorted order of the names."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _require_file(path: PathLike) -> None:
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path}: {what}; expected a file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes); was it copied completely?")


def _write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _first(error: Exception) -> str:
    """The first line of an error, at most 120 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]


def _refused_global(message: str) -> str:
    """torch names the global it refused in the middle of a long advice; keep only the name."""
    for marker in ("Unsupported global: GLOBAL ", "unsupported GLOBAL ", "Unsupported class "):
        if marker in message:
            return "it names " + message.split(marker, 1)[1].split()[0]
    return "unsupported objects"
