"""Images in tar shards (webdataset's convention), for datasets with too many images for files.

A shard is an uncompressed tar. Neighboring members whose paths agree up to the first dot of the
file name form one sample; the image of a sample is the member with the suffix of an image, and the
other members are not read. Nothing is extracted or unpickled: tarfile yields the offsets of the
images, and images are read from these offsets in any order. Since tarfile mistakes a damaged header
for the end of a tar, the rest of the file must be padding.

An epoch visits the shards in a new order and shuffles the images of `window` shards together. To
scale to the paper's billion images, only one number per shard is kept in memory.
"""

import itertools
import json
import os
import re
import tarfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moco.common.errors import DataError, UserError, plural, printable
from moco.common.files import PathLike, atomic_write_json, expand_home, open_file, read_text
from moco.common.progress import Progress
from moco.data.decode import SUFFIXES, decode_pixels

if TYPE_CHECKING:
    from torch import Tensor

SHARD_WINDOW = 16
EXAMPLE = "ROOT/*.tar or ROOT/train-{000000..000146}.tar"
INDEX_NAME = "index.json"  # index next to the shards, in the layout of webdataset's wids
INDEX_SECONDS = 60.0  # interval of writing the index; an interrupted scan loses at most this
MAX_IMAGE_BYTES = 1 << 29  # more than MAX_PIXELS at 16 bits

_PADDING = 20 * tarfile.BLOCKSIZE  # written by tar after the last member
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Member(NamedTuple):
    """Regular file in a tar: path, and offset and size of the content in bytes."""

    name: str
    offset: int
    size: int


class ShardImages:
    """Dataset of the images in tar shards, in the order of the shards.

    Args:
        shards: Paths of the tar files.
        index_file: File that stores the number of images per shard, so that later runs do not scan
            the shards again; None stores nothing. An `index.json` next to the shards is read, too.
            An entry is used if the file size in it is that of the shard.
        window: Number of shards whose images are shuffled together, >= 1. Each data-loader worker
            keeps the headers of twice as many shards.

    Raises:
        DataError: If a shard is missing, compressed or damaged, or none contains an image.
    """

    def __init__(
        self,
        shards: Sequence[PathLike],
        index_file: PathLike | None = None,
        window: int = SHARD_WINDOW,
    ) -> None:
        self._shards = [Path(shard) for shard in shards]
        self._window = window
        counts = _counts(self._shards, None if index_file is None else Path(index_file))
        self._starts = np.concatenate([[0], np.cumsum(counts)])  # (number of shards + 1,)
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        if not len(self):
            raise DataError(
                f"{self._shards[0].parent}: no images ({' '.join(SUFFIXES)}) in "
                f"{plural(len(self._shards), 'shard')}"
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}  # open files stay in their process

    def read(self, index: int) -> "Tensor":
        """Return an image (H, W, 3) uint8 RGB.

        Raises:
            DataError: If the image cannot be decoded; the message starts with tar and member.
        """
        shard, number = self._find(index)
        return decode_pixels(shard.content(number), shard.name(number))

    def name(self, index: int) -> str:
        """Return the tar and the member of an image."""
        shard, number = self._find(index)
        return shard.name(number)

    def epoch_order(self, seed: int, epoch: int) -> "ShardOrder":
        """Shuffle the shards, and the images of each `window` of them together."""
        return ShardOrder(self._starts, self._window, seed, epoch)

    def _find(self, index: int) -> tuple["_Shard", int]:
        """Return the shard of an image and the number of the image in it."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        start, end = self._starts[number : number + 2].tolist()
        shard = self._open.get(number)
        if shard is None:
            try:
                shard = _Shard(self._shards[number], end - start)
            except DataError as error:
                raise DataError(f"image {index - start} of {error}") from error
            self._open[number] = shard
            while len(self._open) > 2 * self._window:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return shard, index - start


class ShardOrder:
    """Order of the images in one epoch, computed window by window when slices are read.

    Args:
        starts: Index of the first image of each shard, then the number of images,
            (number of shards + 1,).
        window: Number of shards whose images are shuffled together.
        seed: Seed of the order.
        epoch: Number of the epoch.
    """

    def __init__(self, starts: NDArray[np.int64], window: int, seed: int, epoch: int) -> None:
        self._starts, self._seed, self._epoch = starts, seed, epoch
        shards = np.random.default_rng([seed, epoch]).permutation(len(starts) - 1)
        cuts = np.arange(window, len(shards), window)
        self._windows = np.split(shards, cuts)
        sizes = [int((starts[part + 1] - starts[part]).sum()) for part in self._windows]
        self._window_starts = np.concatenate([[0], np.cumsum(sizes)])
        self._made: dict[int, NDArray[np.int64]] = {}

    def __getitem__(self, part: slice, /) -> NDArray[np.int64]:
        first, last, step = part.indices(int(self._window_starts[-1]))
        if step != 1:
            raise ValueError(f"step: got {step}, expected consecutive positions")
        found = [np.empty(0, dtype=np.int64)]
        w = int(np.searchsorted(self._window_starts, first, side="right")) - 1
        while first < last:
            here = int(self._window_starts[w])
            indices = self._indices(w)[first - here : last - here]
            found.append(indices)
            first += len(indices)
            w += 1
        return np.concatenate(found)

    def _indices(self, window: int) -> NDArray[np.int64]:
        """Return the indices of a window's images, shuffled."""
        if window not in self._made:
            ranges = [
                np.arange(self._starts[s], self._starts[s + 1]) for s in self._windows[window]
            ]
            # The order of the shards already uses [seed, epoch], which NumPy treats like
            # [seed, epoch, 0], so windows count from 1.
            rng = np.random.default_rng([self._seed, self._epoch, window + 1])
            # Keep the previous window: prefetching and training may be in neighboring windows.
            before = {old: made for old, made in self._made.items() if old == window - 1}
            self._made = {**before, window: rng.permutation(np.concatenate(ranges))}
        return self._made[window]


def find_shards(root: PathLike) -> list[Path] | None:
    """Return the shards at `root`, or None if `root` is something else.

    Args:
        root: A `.tar`, a pattern such as `path/train-{000000..000146}.tar`, or a folder (or its
            `train`) that contains `*.tar` and no images.

    Raises:
        UserError: If `root` is a pipe, a URL or a compressed tar, none of which has random access.
        DataError: If a tar is missing, or a folder contains both shards and images.
    """
    text = os.fspath(root)
    if re.match(r"(pipe:|\w+://)", text):
        raise UserError(
            f"{text}: pipes and URLs are not supported (a pipe runs commands); "
            f"copy the shards and pass {EXAMPLE}"
        )
    is_folder = expand_home(text).is_dir()
    if not is_folder and re.search(r"\.(tgz|tar\.\w+)$", text):
        raise UserError(f"{text}: {_repack('a compressed tar')}")
    if not is_folder and text.endswith(".tar"):
        shards = []
        for path in expand_braces(text):
            shards.append(expand_home(path))
            if not shards[-1].is_file():
                raise DataError(f"{shards[-1]}: no such file; expected {EXAMPLE}")
        return shards
    folder = expand_home(root)
    folder = folder / "train" if (folder / "train").is_dir() else folder
    shards = sorted(path for path in folder.glob("*.tar") if not path.name.startswith("."))
    if not shards:
        return None
    files = (path for path in sorted(folder.iterdir()) if path.name.lower().endswith(SUFFIXES))
    image = next(files, None)
    if image:
        raise DataError(
            f"{folder}: contains shards ({shards[0].name}) and images ({image.name}); "
            "move them to separate folders"
        )
    return shards


def expand_braces(pattern: str) -> Iterator[str]:
    """Expand a range: `a-{08..11}.tar` to `a-08.tar`, …, `a-11.tar`.

    A name without a range is yielded as it is.

    Raises:
        UserError: If the range is descending.
    """
    match = _RANGE.search(pattern)
    if not match:
        yield pattern
        return
    first, last = match.groups()
    if int(last) < int(first):
        raise UserError(
            f"{pattern}: range {{{first}..{last}}} is descending; expected {{{last}..{first}}}"
        )
    for number in range(int(first), int(last) + 1):
        yield f"{pattern[: match.start()]}{number:0{len(first)}d}{pattern[match.end() :]}"


def scan(path: PathLike) -> list[Member]:
    """Return the images of a shard, one per sample, from its headers.

    Raises:
        DataError: If the file is compressed, truncated or not a tar, if a link or device has the
            name of an image, or if a sample has several images.
    """
    with _open(Path(path)) as file:
        return _images(Path(path), file)


class _Shard:
    """Open shard with the offsets of its images."""

    def __init__(self, path: Path, expected: int) -> None:
        self._path = path
        self._file = _open(path)  # closed when this object is deleted
        found = _images(path, self._file)
        if len(found) != expected:
            raise DataError(
                f"{path}: contains {plural(len(found), 'image')}, expected {expected}; the shard "
                "has changed, or the index is of another one; delete the index and start again"
            )
        self._names = [member.name for member in found]
        self._extents = np.array([member[1:] for member in found], dtype=np.int64)

    def name(self, number: int) -> str:
        return f"{self._path}:{printable(self._names[number])}"

    def content(self, number: int) -> bytes:
        offset, size = self._extents[number].tolist()
        if size > MAX_IMAGE_BYTES:
            raise DataError(f"{self.name(number)}: {size} bytes, the limit is {MAX_IMAGE_BYTES}")
        try:
            return os.pread(self._file.fileno(), size, offset)
        except OSError as error:
            raise DataError(f"{self.name(number)}: cannot be read ({error.strerror})") from error


def _open(path: Path) -> BinaryIO:
    try:
        return open_file(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _images(path: Path, file: BinaryIO) -> list[Member]:
    samples = itertools.groupby(_members(path, file), _key)
    return [_image_of(path, list(group)) for _, group in samples]


def _members(path: Path, file: BinaryIO) -> Iterator[Member]:
    """Yield the regular files with the suffix of an image, in the order of the tar.

    Raises:
        DataError: See `scan`.
    """
    start, end = os.pread(file.fileno(), 8, 0), os.fstat(file.fileno()).st_size
    for magic, kind in _COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(f"{path}: {_repack(f'compressed with {kind}')}")
    offset = -1
    try:
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
        while found := tar.next():
            # tarfile would keep every member in memory.
            tar.members.clear()  # type: ignore[attr-defined]
            # A negative size would move tarfile back (CVE-2025-8194).
            if not offset < found.offset_data <= found.offset_data + found.size <= end:
                raise DataError(
                    f"{path}:{printable(found.name)}: a member of {found.size} bytes goes beyond "
                    "the end of the file; it is damaged or was not copied completely"
                )
            offset = found.offset_data
            if not _is_image(found.name):
                continue
            if found.isreg() and not found.issparse():
                yield Member(found.name, found.offset_data, found.size)
            elif not found.isdir():
                raise DataError(
                    f"{path}:{printable(found.name)}: a link or special file without content; "
                    "archive the contents instead (tar -h)"
                )
        rest = os.pread(file.fileno(), _PADDING, tar.offset)
    except (tarfile.TarError, ValueError, OverflowError, EOFError, MemoryError) as error:
        raise DataError(
            f"{path}: not a tar, or damaged ({error}); check that it was copied completely"
        ) from error
    if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise DataError(
            f"{path}: byte {tar.offset} is neither a member of a tar nor its end; the file is "
            "damaged, truncated, or joined by cat (join tars with tar -A)"
        )


def _repack(problem: str) -> str:
    """Return a message with the advice to decompress a tar."""
    return (
        f"{problem}, which has no random access; images are already compressed, so decompress it "
        "to a plain .tar"
    )


def _counts(shards: Sequence[Path], index_file: Path | None) -> list[int]:
    """Return the number of images of each shard, from an index or by scanning the shard."""
    known = _read_index(shards[0].parent / INDEX_NAME)
    if index_file is not None:
        known |= _read_index(index_file)
    sizes = [path.stat().st_size for path in shards]
    names = [str(path.resolve()) for path in shards]
    keys = list(zip(names, sizes, strict=True))
    unknown = [i for i, key in enumerate(keys) if key not in known]
    written = time.monotonic()
    with Progress(len(unknown), "scan shards", "shard", silent=not unknown) as progress:
        for i in unknown:
            known[keys[i]] = len(scan(shards[i]))
            progress.update()
            due = i == unknown[-1] or time.monotonic() - written >= INDEX_SECONDS
            if due and index_file is not None:
                _write_index(index_file, {key: known[key] for key in keys if key in known})
                written = time.monotonic()
    return [known[key] for key in keys]


def _write_index(path: Path, counts: dict[tuple[str, int], int]) -> None:
    shards = [{"url": name, "nsamples": n, "filesize": size} for (name, size), n in counts.items()]
    atomic_write_json(path, {"wids_version": 1, "shardlist": shards})


def _read_index(path: Path) -> dict[tuple[str, int], int]:
    """Read the number of images by (resolved path, file size); {} if there is no valid index."""
    try:
        entries = json.loads(read_text(path))["shardlist"]
        return {
            (str((path.parent / entry["url"]).resolve()), int(entry["filesize"])): entry["nsamples"]
            for entry in entries
            if type(entry["nsamples"]) is int and entry["nsamples"] >= 0 and "filesize" in entry
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.rpartition("/")[2].startswith(".")


def _key(member: Member) -> str:
    """Return the key of a member's sample: the path up to the first dot of the file name."""
    folder, _, name = member.name.rpartition("/")
    return f"{folder}/{name.split('.', 1)[0]}"


def _image_of(path: Path, group: Sequence[Member]) -> Member:
    """Return the image of a sample.

    Of several images, such as a photo and a mask, the one whose name has a single dot is returned.
    """
    plain = [m for m in group if m.name.rpartition("/")[2].count(".") == 1]
    for found in (group, plain):
        if len(found) == 1:
            return found[0]
    names = ", ".join(printable(member.name) for member in group[:3])
    raise DataError(
        f"{path}: {len(group)} images in one sample ({names}); names that agree up to the first "
        "dot are one sample, so rename them without further dots"
    )
