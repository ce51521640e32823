"""Files written whole or not at all, and files read without executing anything in them.

Writing: a temporary file in the same folder, fsync, ``os.replace``, fsync of the folder. A crash
or a full disk at any point leaves the old file or the new one, never a half.

Reading: weights come from strangers. Neither Python nor torch unpickles them: moco/plain_pickle.py
reads pickles, and moco/plain_torch.py reads what torch.save writes.
"""

import hashlib
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from moco.errors import DataError, UserError

if TYPE_CHECKING:
    from torch import Tensor

PathLike = str | os.PathLike[str]
TEMPORARY_PREFIX = ".tmp-"
_SAFETENSORS_AT_ONCE = 16 << 20
MAX_SAFETENSORS_HEADER = 16 << 20  # as much as moco/plain_torch.py reads of a list of parts
MIN_SAFETENSORS = 50_000  # tensors
# What people take for weights: first bytes, and a sentence.
_FOREIGN = (
    (
        b"version https://git-lfs",
        "a git-lfs pointer instead of the file: get it with git lfs pull, or download it itself",
    ),
    (b"\x1f\x8b", "compressed by gzip: unpack it with gunzip or tar -xzf"),
    (b"\x89HDF\r\n", "an HDF5 file, as Keras writes: torch.save its weights"),
    (b"\x93NUMPY", "one numpy array (.npy): torch.save a dict of named tensors"),
)
_HTML = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|head|!--|\?xml)", re.IGNORECASE)
# torch.serialization.MAGIC_NUMBER as a pickle holds it, in protocols 0 and 1 and in the others.
_LEGACY_MAGIC = (b"L119547037146038801333356", bytes.fromhex("6cfc9c46f9206aa85019"))
_T = TypeVar("_T")


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
    """Read a ``torch.save`` file onto the CPU: zip, its predecessor, or the tar before that.

    Classes of moco/inert.py come as ``Inert``; nothing in the result contains itself.

    Raises:
        DataError: missing, empty, damaged, holding objects that would execute code, or claiming
            more than the file can hold.
    """
    from moco.plain_torch import read_torch

    return _load(path, read_torch, "a torch checkpoint")


def load_pickle(path: PathLike) -> Any:
    """Read a ``.pkl`` of plain containers and numpy arrays; nothing else is ever imported.

    Raises:
        DataError: as :func:`load_torch`.
    """
    from moco.plain_pickle import PlainUnpickler, Window

    return _load(path, lambda file, size: PlainUnpickler(Window(file, 0, size)).load(), "a pickle")


def load_safetensors(path: PathLike) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata.

    Raises:
        DataError: missing, empty, damaged, or claiming more than the file can hold.
    """
    from moco.plain_pickle import Implausible

    def read(file: BinaryIO, size: int) -> tuple[dict[str, "Tensor"], dict[str, str]]:
        from safetensors import safe_open

        header = int.from_bytes(file.read(8), "little")
        if header > min(size - 8, MAX_SAFETENSORS_HEADER):
            raise Implausible(f"a header of {header} bytes")

        # Each takes some KB of memory, empty ones too, and perhaps a hundred bytes of the file.
        def few(count: int) -> None:
            if count > MIN_SAFETENSORS + size // 1024:
                raise Implausible(f"{count} tensors in a file of {size} bytes")

        few(file.read(header).count(b'"data_offsets"'))
        with safe_open(path, framework="pt", device="cpu") as content:
            names, metadata = list(content.keys()), content.metadata() or {}
        few(len(names))  # JSON has other spellings of a word
        tensors: dict[str, Tensor] = {}
        while len(tensors) < len(names):
            # What it gives is mapped: copied, because that changes or ends with the file, and
            # opened anew now and then, because mapped pages are memory until it is closed.
            with safe_open(path, framework="pt", device="cpu") as content:
                copied = 0
                while len(tensors) < len(names) and copied < _SAFETENSORS_AT_ONCE:
                    name = names[len(tensors)]
                    tensors[name] = content.get_tensor(name).clone()
                    copied += tensors[name].nbytes
        return tensors, metadata

    return _load(path, read, "a safetensors file")


def format_of(path: PathLike) -> str:
    """ "torch", "safetensors" or "pickle" by a file's first bytes; whatever is none is a "pickle".

    Raises:
        DataError: missing or empty.
    """
    _require_file(path)
    with open(path, "rb") as file:
        start = file.read(512)
    is_tar = start[257:262] == b"ustar"
    if start.startswith(b"PK") or is_tar or any(m in start[:64] for m in _LEGACY_MAGIC):
        return "torch"
    # A length of 8 bytes, the least first, then JSON.
    return "safetensors" if start[5:9] == b"\0\0\0{" else "pickle"


def _load(path: PathLike, read: Callable[[BinaryIO, int], _T], form: str) -> _T:
    """Open and read a file; whatever is wrong with it becomes a DataError of one line."""
    from moco.plain_pickle import Implausible, Refused

    _require_file(path)
    try:
        with open(path, "rb") as file:
            return read(file, os.fstat(file.fileno()).st_size)
    except Refused as error:
        raise DataError(
            f"{path}: refused, because loading it would run code ({error}); only tensors, arrays, "
            "numbers and text are read: save them alone, as by torch.save(model.state_dict(), FILE)"
        ) from error
    except Implausible as error:
        raise DataError(
            f"{path}: damaged or made to mislead ({error}); "
            "get the file anew from somebody you trust"
        ) from error
    except MemoryError as error:
        raise DataError(
            f"{path}: does not fit into memory ({Path(path).stat().st_size} bytes)"
        ) from error
    except Exception as error:
        reason = _foreign(path) or _first(error)
        raise DataError(f"{path}: not {form} or damaged ({reason})") from error


def _foreign(path: PathLike) -> str | None:
    """A sentence about a file that could not be read, where its bytes tell what it is."""
    with open(path, "rb") as file:
        start = file.read(512)
    for magic, sentence in _FOREIGN:
        if start.startswith(magic):
            return sentence
    if _HTML.match(start):
        return "a web page instead of the file: open the address in a browser"
    if start[257:262] == b"ustar":
        return "a tar archive of other files: unpack it with tar -xf and give the file inside"
    if not start.startswith(b"PK"):
        return None
    # Only the end of a zip file says that it is whole; its list of parts may be huge.
    if not zipfile.is_zipfile(path):
        return "cut off: copied or downloaded in part?"
    if start.startswith(b"PK\x03\x04"):
        # Of the first part: the length of its name, then the name.
        name = start[30 : 30 + int.from_bytes(start[26:28], "little")].decode("latin-1")
        if name.endswith(".npy"):
            return "an archive of numpy arrays (.npz): torch.save a dict of named tensors"
        if not name.partition("/")[2].startswith(("data", "version", "byteorder", ".")):
            return "a zip archive of other files: unpack it and give the file inside"
    return None


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
    """The first line of an error, at most 120 characters, and nothing that a terminal obeys."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "".join(letter if letter.isprintable() else "?" for letter in lines[0][:120])
