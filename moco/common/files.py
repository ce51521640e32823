"""Atomic writing of files, and reading of untrusted files without executing their content.

Writing: a temporary file in the same folder, fsync, `os.replace`, fsync of the folder. A crash or a
full disk at any point leaves the old file or the new one, never a partial one.

Reading: no file is trusted. `open_file` opens regular files only, because a pipe or a device may
never answer. One reader, moco/common/unpickler.py with moco/common/torch_files.py for the format of
torch.save, reads both weights and the project's own checkpoints. In weights, objects of any class
become inert data, and their names are listed. The project's own checkpoints contain no objects, and
a file with objects in their place is refused.
"""

import errno
import hashlib
import io
import json
import os
import re
import stat
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TextIO, TypeVar, overload
from uuid import uuid4

from moco.common.errors import DataError, UserError, first_few, printable

if TYPE_CHECKING:
    from torch import Tensor

PathLike = str | os.PathLike[str]
TEMPORARY_PREFIX = ".tmp-"
MAX_SAFETENSORS_HEADER = 16 << 20
MIN_SAFETENSORS = 50_000  # tensors
# Files often mistaken for weights: their first bytes, and how the message names them.
_FOREIGN = (
    (
        rb"version https://git-lfs",
        "a git-lfs pointer: get it with git lfs pull, or download it itself",
    ),
    (rb"\xff\xd8\xff", "a JPEG image, which holds no tensors"),
    (rb"\x89PNG", "a PNG image, which holds no tensors"),
    (rb"\x1f\x8b", "compressed by gzip: unpack it with gunzip or tar -xzf"),
    (rb"\x89HDF\r\n", "an HDF5 file, as Keras writes: torch.save its weights"),
    (rb"GGUF", "a GGUF file, as llama.cpp reads: give the weights that it was made from"),
    (
        rb"\x08[\x01-\x1f](\x12.[\x20-\x7e]|:)",
        "an ONNX file, a graph of operations: give the weights that it was exported from",
    ),
    (rb"\x93NUMPY", "one numpy array (.npy): torch.save a dict of named tensors"),
    (
        rb"(\xef\xbb\xbf)?\s*<(?i:!doctype html|html|head|!--|\?xml)",
        "a web page: open the address in a browser",
    ),
    (
        rb".{257}ustar",
        "a tar archive: unpack it with tar -xf and give the file inside; where torch before "
        "0.1.10 wrote it, load and save it with torch",
    ),
    (
        rb"PK\x03\x04.{26}[^/]*\.npy",
        "an archive of numpy arrays (.npz): torch.save a dict of named tensors",
    ),
    (
        rb"PK\x03\x04.{26}(?![^/]*/(data|version|byteorder|\.))",
        "a zip archive of other files: unpack it and give the file inside",
    ),
    (rb"[\t\n\r\x20-\x7e\x80-\xff]+\Z", "a text file, which holds no tensors"),
)
# Names in a pickle that can run a program, and that no object in a file of weights needs.
_HARMFUL = re.compile(
    r"\A(asyncio|commands|ctypes|importlib|nt|os|pickle|posix|pty|runpy|shutil|socket|subprocess|sys"
    r"|webbrowser)\.|\.(os|posix|subprocess|sys)\.|"
    r"\A(builtins|__builtin__)\.(__import__|compile|eval|exec|execfile|open)\Z"
)
# torch.serialization.MAGIC_NUMBER as pickled by protocols 0 and 1, and by the later ones.
_LEGACY_MAGIC = (b"L119547037146038801333356", bytes.fromhex("6cfc9c46f9206aa85019"))
_T = TypeVar("_T")


@overload
def open_file(path: PathLike, mode: Literal["rb"] = "rb") -> io.BufferedReader: ...


@overload
def open_file(path: PathLike, mode: Literal["ab", "wb", "xb"]) -> io.BufferedWriter: ...


@overload
def open_file(path: PathLike, mode: Literal["r", "a"], **text: str) -> TextIO: ...


def open_file(path: PathLike, mode: str = "rb", **text: Any) -> Any:
    """Open a regular file, as `open` does.

    Raises:
        OSError: If `open` raises it, or the file is a pipe or a device.
    """
    return open(path, mode, opener=open_descriptor, **text)


def open_descriptor(path: PathLike, flags: int) -> int:
    """Open a regular file as `os.open` does; raise OSError for anything else."""
    try:
        # Opening a pipe would otherwise wait for its other end.
        fd = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe that nobody reads
            raise _special(path) from error
        raise
    try:
        _check_regular(path, os.fstat(fd))
    except OSError:
        os.close(fd)
        raise
    return fd


def require_regular(path: PathLike) -> PathLike:
    """Return the path of a file, which a library will open; raise OSError unless it is regular."""
    _check_regular(path, os.stat(path))
    return path


def _check_regular(path: PathLike, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise _special(path)


def _special(path: PathLike) -> OSError:
    return OSError(errno.EINVAL, "a pipe or device, not a file", os.fspath(path))


def read_bytes(path: PathLike) -> bytes:
    """Read a regular file, as `Path.read_bytes` does; see `open_file`."""
    with open_file(path) as file:
        return file.read()


def read_text(path: PathLike, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Read a regular file as text, as `Path.read_text` does; see `open_file`."""
    with open_file(path, "r", encoding=encoding, errors=errors) as file:
        return file.read()


def atomic_write(path: PathLike, writer: Callable[[BinaryIO], object]) -> None:
    """Call `writer` on a temporary file, then move that to `path` in one step.

    Raises:
        UserError: If the folder cannot be written or the disk is full; an earlier file at `path` is
            untouched.
    """
    path = Path(path)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_file(temporary, "xb") as file:
            writer(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        written = temporary.stat().st_size if temporary.exists() else 0
        raise write_error(path, error, written) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_error(path: PathLike, error: OSError, written: int) -> UserError:
    """Return the error for a full disk or a read-only folder."""
    reason = error.strerror or str(error)
    return UserError(
        f"cannot write {path}: {reason} ({written} bytes written); "
        "free space or choose another folder"
    )


def atomic_write_text(path: PathLike, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    atomic_write(path, lambda file: file.write(text.encode()))


def write_together(texts: Mapping[Path, str]) -> None:
    """Write new text files as UTF-8, all or none.

    Files are renamed in order, so the last one should be the file that readers require: if the
    process is killed before the last rename, that file is missing, and the same call completes the
    set.

    Raises:
        UserError: If a file exists with other content, or cannot be written.
    """
    for path, text in texts.items():
        own = path.is_file() and not path.is_symlink()
        if os.path.lexists(path) and not (own and read_text(path) == text):
            raise UserError(f"{path} exists, and is not overwritten; move it away")
    temporaries = {path: path.with_name(f"{TEMPORARY_PREFIX}{uuid4().hex}") for path in texts}
    written: list[Path] = []
    try:
        for path, text in texts.items():
            atomic_write_text(temporaries[path], text)
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
            written.append(path)
    except BaseException as error:
        for path in written:
            path.unlink()
        if isinstance(error, OSError):
            raise write_error(path, error, 0) from error
        raise
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def atomic_write_json(path: PathLike, value: Any) -> None:
    """Write `value` as indented JSON (keys sorted, NaN refused), atomically."""
    atomic_write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def atomic_torch_save(path: PathLike, value: Any) -> None:
    """Write `value` with `torch.save`, atomically."""
    import torch

    def write(file: BinaryIO) -> None:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            # torch's writer hides the error of a full disk behind one about file positions.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    atomic_write(path, write)


def load_torch(
    path: PathLike, objects: set[str] | None = None, part: tuple[int, int] | None = None
) -> Any:
    """Read a `torch.save` file onto the CPU, in the zip or the legacy format.

    Args:
        path: File to read.
        objects: Set that receives the names of the classes and functions in the file, whose objects
            are read as `OpaqueObject`. If None, a file with any such name is refused.
        part: Offset and length in bytes of the part to read; None for the whole file.

    Raises:
        DataError: If the file is missing, empty, damaged, a program, names classes although
            `objects` is None, or declares more data than it contains.
    """
    from moco.common.torch_files import read_torch

    def read(file: BinaryIO, size: int, objects: set[str]) -> Any:
        if part is None:
            return read_torch(file, size, objects)
        file.seek(part[0])
        content = file.read(min(part[1], size))
        return read_torch(io.BytesIO(content), len(content), objects)

    return _load(path, read, "a torch checkpoint", objects)


def load_pickle(path: PathLike, objects: set[str] | None = None) -> Any:
    """Read a `.pkl` of containers and numpy arrays; see `load_torch` for `objects` and errors."""
    from moco.common.unpickler import read_pickle

    return _load(path, read_pickle, "a pickle", objects)


def load_safetensors(path: PathLike) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file.

    Raises:
        DataError: If the file is missing, empty, damaged, or declares more data than it contains.
    """
    from moco.common.limits import CorruptFileError

    def read(
        file: BinaryIO, size: int, objects: set[str]
    ) -> tuple[dict[str, "Tensor"], dict[str, str]]:
        from safetensors.torch import load

        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(size - 8, MAX_SAFETENSORS_HEADER):
            raise CorruptFileError(f"a header of {header_bytes} bytes")
        header = json.loads(file.read(header_bytes))
        # A tensor, even an empty one, takes some KB of memory but only about 100 bytes of the file.
        if len(header) > MIN_SAFETENSORS + size // 1024:
            raise CorruptFileError(f"{len(header)} tensors in a file of {size} bytes")
        file.seek(0)
        return load(file.read()), header.get("__metadata__", {})

    return _load(path, read, "a safetensors file", None)


def detect_format(path: PathLike) -> str:
    """Return a file's format by its first bytes: "torch", "safetensors", else "pickle".

    Raises:
        DataError: If the file is missing or empty.
    """
    _require_file(path)
    with open_file(path) as file:
        start = file.read(512)
    if start.startswith(b"PK") or any(m in start[:64] for m in _LEGACY_MAGIC):
        return "torch"
    # A length of 8 bytes (little-endian), then JSON.
    return "safetensors" if start[5:9] == b"\0\0\0{" else "pickle"


def _load(
    path: PathLike,
    read: Callable[[BinaryIO, int, set[str]], _T],
    form: str,
    objects: set[str] | None,
) -> _T:
    """Open and read a file; turn any error in it into a DataError of one line."""
    from moco.common.limits import CorruptFileError
    from moco.common.unpickler import RefusedFileError

    _require_file(path)
    found: set[str] = set()
    try:
        with open_file(path) as file:
            value = read(file, os.fstat(file.fileno()).st_size, found)
        if found and objects is None:
            raise RefusedFileError(
                f"it names {named_objects(found)}, where only tensors and text can be"
            )
    except RefusedFileError as error:
        raise DataError(f"{path}: refused, and nothing in it was run ({error})") from error
    except CorruptFileError as error:
        raise DataError(
            f"{path}: damaged or made to mislead ({error}); "
            "download it again from somebody you trust"
        ) from error
    except MemoryError as error:
        raise DataError(
            f"{path}: does not fit into memory ({Path(path).stat().st_size} bytes)"
        ) from error
    except Exception as error:
        raise DataError(f"{path}: {_reason(path, form, error)}") from error
    if objects is not None:
        objects |= found
    return value


def named_objects(objects: Collection[str], limit: int = 6) -> str:
    """Join the names of classes for a message, harmful ones first."""
    harmful = harmful_objects(objects)
    every = [*harmful, *sorted(set(objects) - set(harmful))]
    return first_few([repr(name[:80])[1:-1] for name in every], limit)


def harmful_objects(objects: Collection[str]) -> list[str]:
    """Return the names that can run a program and that no file of weights needs."""
    return sorted(name for name in objects if _HARMFUL.search(name))


def _reason(path: PathLike, form: str, error: Exception) -> str:
    """Return the reason why a file could not be read, without control characters."""
    with open_file(path) as file:
        start = file.read(512)
    # Only the end of a zip file shows that it is complete.
    if start.startswith(b"PK") and not zipfile.is_zipfile(require_regular(path)):
        return f"not {form} or damaged (cut off: copied or downloaded in part?)"
    for magic, what in _FOREIGN:
        if re.match(magic, start, re.DOTALL):
            return f"this is {what}"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"not {form} or damaged ({printable(lines[0][:120])})"


def expand_home(path: PathLike) -> Path:
    """Return the path with the home folder in place of a leading `~` or `~user`.

    A name such as `~backup` that does not belong to a user is the name of a file and stays.

    Raises:
        UserError: If the home folder is not known.
    """
    found = Path(os.path.expanduser(path))
    if found.parts[:1] == ("~",):
        raise UserError(f"{path}: the home folder is unknown; set HOME, or give the whole path")
    return found


def existing_folder(path: PathLike) -> Path:
    """Return the nearest existing folder at or above a path; its disk will hold the path."""
    path = expand_home(path).absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def files_below(folder: PathLike, without: Collection[str] = ()) -> Iterator[str]:
    """Yield the paths of all files below a folder, relative to it, except hidden ones.

    Symbolic links are followed; each real folder is visited once.

    Args:
        folder: Folder to walk.
        without: Names of files; a subfolder that contains one of them is skipped.
    """
    seen = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real, inside = os.path.realpath(parent), os.path.relpath(parent, folder)
        skip = real in seen or (inside != os.curdir and not set(without).isdisjoint(files))
        folders[:] = [] if skip else sorted(name for name in folders if name[0] != ".")
        for name in () if skip else files:
            if name[0] != ".":
                yield name if inside == os.curdir else os.path.join(inside, name)
        seen.add(real)


def sha256_file(path: PathLike) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_state(state: Mapping[str, "Tensor"]) -> str:
    """Return the hex SHA-256 of the names, dtypes, shapes and bytes of tensors, sorted by name."""
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
        exists = "is a folder" if path.is_dir() else "is a pipe or device"
        what = exists if path.exists() else "does not exist"
        raise DataError(f"{path}: {what}; expected a file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes); was it copied completely?")
