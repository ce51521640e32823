"""Verify a dataset: decode each image as training does, compare files with recorded hashes.

    python -m moco.verify ROOT --write      # once, when the data are known to be good
    python -m moco.verify ROOT              # later, or on the copy

A bit that flips inside a JPEG mostly decodes to another image without any error, so only a hash
tells. `ROOT/SHA256SUMS` lists every file below ROOT whose name does not start with a dot, in the
format of `sha256sum`, which can check it, too (`cd ROOT && sha256sum -c SHA256SUMS`). It is
optional: without it the images are only decoded.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moco.common.command import program
from moco.common.errors import DataError, UserError, plural, run_cli
from moco.common.files import PathLike, atomic_write_text, files_below, sha256_file

if TYPE_CHECKING:
    from moco.data.images import Images

SUMS_NAME = "SHA256SUMS"
MAX_NAMED = 20
_CHUNK = 64  # items per message to a worker
_function: Callable[[Any], str]  # of a worker
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def bad_images(root: PathLike, workers: int = 0) -> tuple[int, list[str]]:
    """Number of images that training would find, and why those that it cannot read are bad.

    Args:
        root: what DATA.ROOT may be. workers: processes.

    Raises:
        DataError: there are no images.
    """
    from moco.data.images import open_images

    images = open_images(root)
    problems = _each(partial(_problem, images), range(len(images)), "decode", workers)
    return len(images), [found for found in problems if found]


def write_sums(root: PathLike, workers: int = 0) -> int:
    """Record the hash of every file below the folder `root`; returns how many there are.

    Raises:
        UserError: there are recorded hashes already. DataError: a name that cannot be listed.
    """
    path = Path(root) / SUMS_NAME
    if path.exists():
        raise UserError(f"{path}: exists; delete it to record the files as they are now")
    names = _names(root)
    odd = [name for name in names if "\n" in name or "\r" in name or "\\" in name]
    if odd:
        raise DataError(f"{root}: cannot list {odd[0]!r}; rename it, without \\ and line breaks")
    sums = _each(partial(_sha256, root), names, "sha256", workers)
    lines = (f"{digest}  {name}\n" for digest, name in zip(sums, names, strict=True))
    atomic_write_text(path, "".join(lines))
    return len(names)


def changed_files(root: PathLike, workers: int = 0) -> list[str]:
    """Files that are missing, new, or not what `SHA256SUMS` says; only those below `root`.

    Raises:
        DataError: a malformed list.
    """
    path = Path(root) / SUMS_NAME
    recorded = {}
    for number, line in enumerate(path.read_text(errors="surrogateescape").splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if not match:
            raise DataError(f"{path}: line {number}: expected a SHA-256 and a file's name")
        recorded[match[2].removeprefix("./")] = match[1]
    # Names are compared, not opened: a list cannot name a file elsewhere.
    here = _names(root)
    problems = [f"{name}: missing" for name in sorted(recorded.keys() - set(here))]
    problems += [f"{name}: not in {SUMS_NAME}" for name in here if name not in recorded]
    both = [name for name in here if name in recorded]
    sums = _each(partial(_sha256, root), both, "sha256", workers)
    for name, digest in zip(both, sums, strict=True):
        if digest != recorded[name]:
            problems.append(
                f"{name}: has changed (SHA-256 {digest[:8]}…, was {recorded[name][:8]}…)"
            )
    return problems


def _names(root: PathLike) -> list[str]:
    """Paths below `root`, sorted."""
    return sorted({n for n in files_below(root) if os.path.isfile(Path(root, n))} - {SUMS_NAME})


def _problem(images: "Images", index: int) -> str:
    try:
        images.read(index)
    except DataError as error:
        return str(error)
    return ""


def _sha256(root: PathLike, name: str) -> str:
    return sha256_file(Path(root, name))


def _each(
    function: Callable[[Any], str], items: Sequence[Any], what: str, workers: int
) -> list[str]:
    """`function` of each item, in worker processes if there are any."""
    from moco.common.progress import Progress

    results: list[str] = []
    with ExitStack() as stack:
        each: Iterator[str] = map(function, items)
        if workers:
            pool = ProcessPoolExecutor(workers, initializer=_start, initargs=(function,))
            each = stack.enter_context(pool).map(_work, items, chunksize=_CHUNK)
        bar = stack.enter_context(Progress(len(items), what, "files"))
        for result in each:
            results.append(result)
            bar.update()
    return results


def _start(function: Callable[[Any], str]) -> None:
    global _function
    _function = function  # sent once to each worker: it may hold a million paths


def _work(item: Any) -> str:
    return _function(item)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=program("verify", "python -m moco.verify"),
        description="Decode every image, and compare the files with recorded hashes.",
    )
    parser.add_argument("root", metavar="ROOT", help="what DATA.ROOT is")
    parser.add_argument("--write", action="store_true", help=f"record hashes in ROOT/{SUMS_NAME}")
    parser.add_argument("-j", "--workers", type=int, default=0, help="worker processes")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The command `python -m moco.verify`."""
    args = build_parser().parse_args(argv)
    root = Path(args.root).expanduser()
    if args.write and not root.is_dir():
        raise UserError(f"{root}: --write needs a folder, for {SUMS_NAME} in it")
    print(f"verify: {root}", flush=True)
    total, problems = bad_images(root, args.workers)
    print(f"{plural(total, 'image')}, {len(problems)} bad")
    if (root / SUMS_NAME).is_file() and not args.write:
        changed = changed_files(root, args.workers)
        print(f"{SUMS_NAME}: {len(changed)} differences")
        problems += [f"{root}: {problem}" for problem in changed]
    for problem in problems[:MAX_NAMED]:
        print(problem)
    if problems:
        more = f" (and {len(problems) - MAX_NAMED} more)" if len(problems) > MAX_NAMED else ""
        raise DataError(f"{root}: {len(problems)} problems, named above{more}")
    if args.write:
        print(f"{root / SUMS_NAME}: {write_sums(root, args.workers)} files")


if __name__ == "__main__":
    run_cli(main)
