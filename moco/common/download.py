"""Downloads: one address to one file, resumed after a break, its hash checked.

What comes goes to `FILE.part`, which survives a break; it becomes `FILE` in one step when it is
whole and its hash is right. Two environment variables:

- `MOCO_TRANSFER_CACHE`: the folder of what is downloaded (the system's folder for caches if unset).
- `MOCO_TRANSFER_OFFLINE=1`: nothing is downloaded; the files at hand are used.
"""

import errno
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
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
_REFUSALS = {
    401: "not permitted; it may need an account: download it in a browser",
    403: "not permitted; it may need an account: download it in a browser",
    404: "not found; compare the address with its authors' page",
    410: "not found; compare the address with its authors' page",
}


def cache_folder() -> Path:
    """The folder of what is downloaded; it need not exist."""
    from pooch import os_cache

    return Path(os.environ.get(CACHE) or os_cache("moco-transfer")).expanduser()


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
        file: where it goes, and what is returned; nothing in the address has a part in that.
        digest: `sha256:` or `md5:` and hexadecimal digits, all of them or the first ones. `""`: not
            checked, and a file that is there is taken as it is.
        size: bytes, 0 where it is not known.
        allow_http: for a mirror that the user has named.

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
    lock = FileLock(file.with_name(f".{file.name}.lock"))
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
        if not is_downloaded(file, digest):
            _Part(url, file, digest, size).download()
            Path(lock.lock_file).unlink(missing_ok=True)  # who waits for it finds the file
    finally:
        lock.release()
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
    """Raise a UserError unless a digest is one that `download` takes."""
    if digest and not re.fullmatch(r"(md5|sha256):[0-9a-f]{8,64}", digest):
        raise UserError(
            f"got the hash {shown(digest)}, expected sha256: or md5: and 8 or more of its digits"
        )


def check_address(url: str, allow_http: bool = False) -> None:
    """Raise a UserError unless an address is one that `download` takes."""
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
    """A file that is being downloaded.

    Beside it is what the server calls this state of the file (its ETag or date): the rest of a file
    that has changed since is not joined to it.
    """

    def __init__(self, url: str, file: Path, digest: str, size: int) -> None:
        self._url, self._final, self._digest, self._size = url, file, digest, size
        self._path = file.with_name(f"{file.name}.part")
        self._state_path = file.with_name(f"{file.name}.part.etag")
        self._total = size

    def download(self) -> None:
        """Get what is missing, check it, move it to its name."""
        import requests

        for attempt in range(ATTEMPTS):
            before = self._have()
            try:
                if not before or before != self._size:
                    self._get(before)
                break
            except requests.RequestException as error:
                have = self._have()
                if have <= before or attempt + 1 == ATTEMPTS:
                    again = f"run again to resume after {have} bytes" if have else "run again"
                    raise UserError(
                        f"{self._url}: {_reason(error)}; check the network and {again}, or put the "
                        f"file at {self._final}"
                    ) from error
            except OSError as error:
                raise cannot_write(self._path, error, self._have()) from error
            finally:
                if not self._have():
                    self._remove()
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

    def _get(self, have: int) -> None:
        import requests

        headers = {"Accept-Encoding": "identity"}  # compressed, a part has no place in the file
        state = self._state_path.read_text(encoding="utf-8") if self._state_path.exists() else ""
        if have and (state or self._digest):
            headers["Range"] = f"bytes={have}-"
            if state:
                headers["If-Range"] = state
        hooks = {"response": self._check_redirect}
        with requests.get(
            self._url, headers=headers, stream=True, timeout=TIMEOUT_SECONDS, hooks=hooks
        ) as response:
            if response.status_code != 416 or not have:
                self._receive(response, have)
            elif response.headers.get("Content-Range") == f"bytes */{have}":
                self._total = have  # it is whole
            else:
                self._remove()
                self._get(0)

    def _check_redirect(self, response: "Response", **settings: Any) -> None:
        target = urljoin(response.url, response.headers.get("location", ""))
        here, there = urlsplit(response.url), urlsplit(target)
        stays = there.hostname == here.hostname and there.scheme == here.scheme
        if response.is_redirect and not stays and there.scheme != "https":
            raise UserError(f"{self._url}: redirected to {shown(target, 200)}, not https")

    def _receive(self, response: "Response", have: int) -> None:
        """Append what a server sends, or start over where it is not the rest."""
        status, headers = response.status_code, response.headers
        if status not in (200, 206):
            reason = _REFUSALS.get(status, "the server cannot answer; try again later")
            raise UserError(f"{self._url}: {reason} ({status})")
        if (encoding := headers.get("Content-Encoding", "identity")) != "identity":
            raise UserError(
                f"{self._url}: sends the file as {shown(encoding)}, although it was asked not to"
            )
        rest = status == 206 and headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if rest else 0  # Range is not honored, or the file has changed
        length = headers.get("Content-Length", "")
        self._total = total = have + int(length) if length.isdecimal() else self._size
        if self._size and total != self._size:
            raise UserError(
                f"{self._url}: got a file of {total} bytes, expected {self._size}; "
                "it is another one"
            )
        free = shutil.disk_usage(self._path.parent).free
        if total - have > free:
            full = OSError(errno.ENOSPC, f"{total - have} bytes are needed, {free} are free")
            raise cannot_write(self._path.parent, full, 0)
        if not rest:
            state = headers.get("ETag", "")
            if not state or state.startswith("W/"):
                state = headers.get("Last-Modified", "")
            self._state_path.write_text(state, encoding="utf-8")
        desc = f"download {self._final.name}"
        bar = Progress(total // MB, desc, "MB", have // MB, silent=total < MB)
        with open(self._path, "ab" if rest else "wb") as file, bar:
            for chunk in response.iter_content(CHUNK_BYTES):
                before, have = have, have + len(chunk)
                if total and have > total:
                    file.truncate(0)
                    raise DataError(f"{self._url}: sends more than the {total} bytes of the file")
                file.write(chunk)
                if have // MB > before // MB:
                    bar.update(have // MB - before // MB)
            file.flush()
            os.fsync(file.fileno())

    def _have(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def _remove(self) -> None:
        for path in (self._path, self._state_path):
            path.unlink(missing_ok=True)


def _reason(error: BaseException) -> str:
    """What is at the bottom of an error of the network."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return printable(" ".join(text.split()))[:160]
