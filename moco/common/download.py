"""Downloads: one address to one file, resumed after a break, its hash checked.

pooch's HTTP downloader writes to `FILE.part`, which survives a break; it becomes `FILE` in one step
when it is whole and its hash is right. Two environment variables:

- `MOCO_TRANSFER_CACHE`: the folder of what is downloaded (the system's folder for caches if unset).
- `MOCO_TRANSFER_OFFLINE=1`: nothing is downloaded; the files at hand are used.
"""

import errno
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urljoin, urlsplit

from filelock import FileLock, Timeout

from moco.common.errors import DataError, UserError, printable, shown
from moco.common.files import PathLike, cannot_write
from moco.common.progress import Progress

if TYPE_CHECKING:
    from requests import Response

CACHE = "MOCO_TRANSFER_CACHE"
OFFLINE = "MOCO_TRANSFER_OFFLINE"
TIMEOUT_SECONDS = 30.0  # of one connection or read, not of the download
ATTEMPTS = 5  # for as long as each brings more of the file
CHUNK_BYTES = 1 << 18
MB = 1_000_000
LOCAL = ("127.0.0.1", "localhost", "::1")
_DIGEST = re.compile(r"(md5|sha256):[0-9a-f]{8,64}")


def cache_folder() -> Path:
    """The folder of what is downloaded; it need not exist."""
    if folder := os.environ.get(CACHE):
        return Path(folder).expanduser()
    from pooch import os_cache

    return Path(os_cache("moco-transfer"))


def is_offline() -> bool:
    """Whether `MOCO_TRANSFER_OFFLINE` forbids to download."""
    return os.environ.get(OFFLINE, "") not in ("", "0")


def download(
    url: str, file: PathLike, digest: str = "", size: int = 0, allow_http: bool = False
) -> Path:
    """Download `url` to `file`, unless that is there and its hash is right.

    Processes that want the same file at once wait for the first of them.

    Args:
        url: begins with `https://`; with `http://` on this machine only. Redirects never leave
            https.
        file: where it goes; nothing in the address has a part in that.
        digest: `sha256:` or `md5:` and hexadecimal digits. All of them, or the first ones where no
            more are published: these are compared with the beginning of the file's hash. `""`: not
            checked, and a file that is there is taken as it is.
        size: bytes, 0 where it is not known.
        allow_http: for a mirror that the user has named.

    Returns:
        `file`.

    Raises:
        UserError: an address or digest that is not allowed, not found, no network, no space,
            offline. What has come stays in `FILE.part`, and the next call resumes there.
        DataError: another hash or size than expected; nothing of it is kept.
    """
    file, digest = Path(file), digest.lower()
    check_address(url, allow_http)
    check_digest(digest)
    if is_downloaded(file, digest):
        return file
    if is_offline():
        raise UserError(
            f"{url}: not downloaded, as {OFFLINE} is set; unset it, or put the file at {file}"
        )
    with _only_one(file):
        if not is_downloaded(file, digest):
            part = _Part(url, file, digest, size)
            part.download()
            part.keep()
            _lock_of(file).unlink(missing_ok=True)  # who waits for it finds the file
    return file


def is_downloaded(file: PathLike, digest: str = "") -> bool:
    """Whether the file is there and has this hash."""
    return Path(file).is_file() and (not digest or has_digest(file, digest))


def has_digest(file: PathLike, digest: str) -> bool:
    """Whether a file's hash begins with the digits of `digest` (`sha256:…` or `md5:…`)."""
    from pooch import file_hash

    algorithm, _, digits = digest.partition(":")
    return bool(file_hash(str(file), algorithm).startswith(digits))


def check_digest(digest: str) -> None:
    """Whether a digest is one that `download` takes.

    Raises:
        UserError: it is not.
    """
    if digest and not _DIGEST.fullmatch(digest):
        raise UserError(
            f"got the hash {shown(digest)}, expected sha256: or md5: and 8 or more of its digits"
        )


def check_address(url: str, allow_http: bool = False) -> None:
    """Whether an address is one that `download` takes.

    Raises:
        UserError: it is not.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # [ without ]
        parts = urlsplit("")
    http = parts.scheme == "http" and (allow_http or parts.hostname in LOCAL)
    if not (parts.hostname and (parts.scheme == "https" or http)):
        raise UserError(f"{shown(url, 200)}: expected an address that begins with https://")
    if parts.username or parts.password:  # records would show them
        raise UserError(f"{parts.hostname}: an address here has no user name or password in it")


class _Part:
    """A file that is being downloaded; pooch's downloader writes to it as to an open file.

    Beside it is what the server calls this state of the file (its ETag or date): the rest of a file
    that has changed since is not joined to it.
    """

    def __init__(self, url: str, file: Path, digest: str, size: int) -> None:
        self._url, self._final, self._digest, self._size = url, file, digest, size
        self._path = file.with_name(f"{file.name}.part")
        self._state_path = file.with_name(f"{file.name}.part.etag")
        self._total = size
        self._file: BinaryIO
        self._progress: Progress | None = None

    def download(self) -> None:
        """Get what is missing."""
        for attempt in range(ATTEMPTS):
            before = self._have()
            if before and before == self._size:
                return
            try:
                with open(self._path, "ab") as self._file:
                    self._get(before)
                    self._file.flush()
                    os.fsync(self._file.fileno())
                return
            except ConnectionError as error:
                if self._have() <= before or attempt + 1 == ATTEMPTS:
                    have = self._have()
                    again = f"run again to resume after {have} bytes" if have else "run again"
                    raise UserError(
                        f"{self._url}: {_reason(error)}; check the network and {again}, or put the "
                        f"file at {self._final}"
                    ) from error
            except OSError as error:
                raise cannot_write(self._path, error, self._have()) from error
            finally:
                if self._progress is not None:
                    self._progress.close()
                    self._progress = None
                if not self._have():
                    self._remove()

    def keep(self) -> None:
        """Move it to its name.

        Raises:
            DataError: its size or hash is not the expected one; it is removed.
        """
        have, wrong = self._have(), ""
        if self._total and have != self._total:
            wrong = f"it has {have} bytes, not {self._total}"
        elif self._digest and not has_digest(self._path, self._digest):
            wrong = f"its hash is not {self._digest}"
        else:
            os.replace(self._path, self._final)
        self._remove()
        if wrong:
            raise DataError(
                f"{self._url}: {wrong}, so it was not kept; it has changed there or on the way: "
                "compare with what its authors publish"
            )

    def write(self, chunk: bytes) -> None:
        """Append what has come.

        Raises:
            DataError: more than the file has; what came before it is removed.
        """
        if self._total and self._file.tell() + len(chunk) > self._total:
            self._empty()
            raise DataError(f"{self._url}: sends more than the {self._total} bytes of the file")
        self._file.write(chunk)
        done = self._file.tell()
        more = done // MB - (done - len(chunk)) // MB
        if self._progress is not None and more:
            self._progress.update(more)

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()

    def _get(self, have: int) -> None:
        import requests
        from pooch import HTTPDownloader

        headers = {"Accept-Encoding": "identity"}  # compressed, a part has no place in the file
        state = self._state_path.read_text(encoding="utf-8") if self._state_path.exists() else ""
        if have and (state or self._digest):
            headers |= {"Range": f"bytes={have}-"} | ({"If-Range": state} if state else {})
        get = HTTPDownloader(
            chunk_size=CHUNK_BYTES,
            timeout=TIMEOUT_SECONDS,
            headers=headers,
            hooks={"response": self._answered},
        )
        try:
            get(self._url, self, None)
        except requests.HTTPError:  # 416, see _answered
            if not self._file.tell():
                self._get(0)
        except requests.RequestException as error:
            raise ConnectionError(error) from error

    def _answered(self, response: "Response", **settings: Any) -> None:
        """Prepare for what a server is about to send, before the first byte of it.

        Raises:
            UserError: refused, redirected away from https, another size, no space.
        """
        if response.is_redirect:
            target = urljoin(response.url, response.headers["location"])
            here, there = urlsplit(response.url), urlsplit(target)
            stays = there.hostname == here.hostname and there.scheme == here.scheme
            if not (stays or there.scheme == "https"):
                raise UserError(f"{self._url}: redirected to {shown(target, 200)}, not https")
            return
        have, said = self._file.tell(), response.headers.get("Content-Length", "")
        length = int(said) if said.isdecimal() else 0
        if response.status_code == 416 and have:
            if response.headers.get("Content-Range") == f"bytes */{have}":
                self._total = have  # it is whole
            else:
                self._empty()
            return
        if response.status_code not in (200, 206):
            raise UserError(f"{self._url}: {_refusal(response.status_code)}")
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise UserError(
                f"{self._url}: sends the file as {shown(encoding)}, although it was asked not to"
            )
        if response.status_code == 206 and _starts_at(response) == have:
            self._total = have + length
        else:  # Range is not honored, or the file has changed
            have, self._total = 0, length
            self._empty()
            state = response.headers.get("ETag", "")
            if not state or state.startswith("W/"):
                state = response.headers.get("Last-Modified", "")
            self._state_path.write_text(state, encoding="utf-8")
        if self._size and self._total not in (0, self._size):
            raise UserError(
                f"{self._url}: got a file of {self._total} bytes, expected {self._size}; "
                "it is another one"
            )
        self._total = self._total or self._size
        free = shutil.disk_usage(self._path.parent).free
        if self._total - have > free:
            full = OSError(errno.ENOSPC, f"{self._total - have} bytes are needed, {free} are free")
            raise cannot_write(self._path.parent, full, 0)
        if self._total >= MB:
            desc = f"download {self._final.name}"
            self._progress = Progress(self._total // MB, desc, "MB", have // MB)

    def _have(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def _empty(self) -> None:
        self._file.seek(0)
        self._file.truncate()

    def _remove(self) -> None:
        for path in (self._path, self._state_path):
            path.unlink(missing_ok=True)


def _starts_at(response: "Response") -> int:
    """Where the bytes of a 206 begin; -1 where that is not said."""
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else -1


def _refusal(status: int) -> str:
    if status in (404, 410):
        return f"not found ({status}); compare the address with its authors' page"
    if status in (401, 403):
        return f"not permitted ({status}); it may need an account: download it in a browser"
    return f"the server answered {status}; try again later"


def _reason(error: BaseException) -> str:
    """What is at the bottom of an error of the network."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return printable(" ".join(text.split()))[:160]


def _lock_of(file: Path) -> Path:
    return file.with_name(f".{file.name}.lock")


@contextmanager
def _only_one(file: Path) -> Iterator[None]:
    """Hold the lock of a file, after whoever holds it."""
    lock = FileLock(_lock_of(file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"{file.name}: another process downloads it; waiting", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise cannot_write(file, error, 0) from error
    try:
        yield
    finally:
        lock.release()
