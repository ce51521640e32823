"""Resumable downloads with a hash check.

Data is written to `FILE.part`, which survives an interruption and is renamed to `FILE` once it is
complete and its hash matches. Two environment variables are read:

- `MOCO_TRANSFER_CACHE`: Folder of the downloads (default: the system's cache folder).
- `MOCO_TRANSFER_OFFLINE=1`: Download nothing; use only files that have been downloaded.
"""

import errno
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from filelock import FileLock, Timeout

from moco.common.errors import DataError, UserError, format_value, printable
from moco.common.files import PathLike, expand_home, open_file, read_text, write_error
from moco.common.progress import Progress

if TYPE_CHECKING:
    from requests import Response

CACHE = "MOCO_TRANSFER_CACHE"
OFFLINE = "MOCO_TRANSFER_OFFLINE"
TIMEOUT_SECONDS = 30.0  # of one connection or read, not of the download
ALGORITHMS = ("sha256", "md5")  # of the hash in an address
ATTEMPTS = 5  # in total, as long as each one receives data
CHUNK_BYTES = 1 << 18
MB = 1_000_000
LOCAL = ("127.0.0.1", "localhost", "::1")
_REFUSALS = {
    401: "access denied; it may need an account: download it in a browser",
    403: "access denied; it may need an account: download it in a browser",
    404: "not found; compare the address with its authors' page",
    410: "not found; compare the address with its authors' page",
}


def cache_folder() -> Path:
    """Return the folder of the downloads; it need not exist."""
    from pooch import os_cache

    return expand_home(os.environ.get(CACHE) or os_cache("moco-transfer"))


def is_offline() -> bool:
    """Return whether `MOCO_TRANSFER_OFFLINE` forbids downloads."""
    return os.environ.get(OFFLINE, "") not in ("", "0")


def download(
    url: str, file: PathLike, digest: str = "", size: int = 0, allow_http: bool = False
) -> Path:
    """Download `url` to `file`, unless the file exists and its hash matches.

    If several processes need the same file, one downloads it and the others wait.

    Args:
        url: `https://` address; `http://` is allowed for this machine only. Redirects from https to
            another scheme are refused.
        file: Path to write, which is returned; it does not depend on the address.
        digest: `sha256:`, `sha1:` or `md5:` and the hexadecimal digits, all or the first ones. If
            empty, the hash is not checked and an existing file is used as it is.
        size: Size in bytes, 0 if unknown.
        allow_http: Allow `http://`, for a mirror named by the user.

    Raises:
        UserError: If the address or digest is not allowed, the file is not found, or there is no
            network, no space or no permission to download. The data received so far stays in
            `FILE.part`, and the next call resumes there.
        DataError: If the hash or size differs from the expected one; nothing is kept.
    """
    file, digest = Path(file), digest.lower()
    check_address(url, allow_http)
    check_digest(digest, (*ALGORITHMS, "sha1"))  # of archives that are published with it
    if is_downloaded(file, digest):
        return file
    if is_offline():
        raise UserError(
            f"{url}: not downloaded, because {OFFLINE} is set; unset it, or put the file at {file}"
        )
    lock = FileLock(file.with_name(f".{file.name}.lock"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"{file.name}: another process is downloading it; waiting", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise write_error(file, error, 0) from error
    try:
        if not is_downloaded(file, digest):
            _Part(url, file, digest, size).download()
            Path(lock.lock_file).unlink(missing_ok=True)  # waiting processes find the file
    finally:
        lock.release()
    return file


def is_downloaded(file: PathLike, digest: str = "") -> bool:
    """Return whether the file exists and has the given hash, if any."""
    return Path(file).is_file() and (not digest or has_digest(file, digest))


def has_digest(file: PathLike, digest: str) -> bool:
    """Return whether a file's hash begins with the digits of `digest`, such as `sha256:…`."""
    from pooch import file_hash

    algorithm, _, digits = digest.partition(":")
    return bool(file_hash(str(file), algorithm).startswith(digits))


def check_digest(digest: str, algorithms: Sequence[str] = ALGORITHMS) -> None:
    """Check that a digest is valid for one of the algorithms; raise UserError otherwise."""
    if digest and not re.fullmatch(rf"({'|'.join(algorithms)}):[0-9a-f]{{8,64}}", digest):
        raise UserError(
            f"got hash {format_value(digest)}, expected sha256: or md5: and at least 8 of its "
            "digits"
        )


def check_address(url: str, allow_http: bool = False) -> None:
    """Check that `download` accepts an address; raise UserError otherwise."""
    try:
        parts = urlsplit(url)
    except ValueError:  # such as [ without ]
        parts = urlsplit("")
    http = parts.scheme == "http" and (allow_http or parts.hostname in LOCAL)
    if not (parts.hostname and (parts.scheme == "https" or http)):
        raise UserError(f"{format_value(url, 200)}: expected an address that begins with https://")
    if parts.username or parts.password:  # they would appear in records
        raise UserError(f"{parts.hostname}: remove the user name and password from the address")


class _Part:
    """Partial download of a file.

    A sidecar file stores the version of the file on the server (its ETag or date), so that a
    download is not continued with a newer version.
    """

    def __init__(self, url: str, file: Path, digest: str, size: int) -> None:
        self._url, self._final, self._digest, self._size = url, file, digest, size
        self._path = file.with_name(f"{file.name}.part")
        self._state_path = file.with_name(f"{file.name}.part.etag")
        self._total = size

    def download(self) -> None:
        """Download the missing part, check the file, and rename it."""
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
                raise write_error(self._path, error, self._have()) from error
            finally:
                if not self._have():
                    self._remove()
        have, wrong = self._have(), ""
        if self._total and have != self._total:
            wrong = f"got {have} bytes, expected {self._total}"
        elif self._digest and not has_digest(self._path, self._digest):
            wrong = f"its hash is not {self._digest}"
        else:
            os.replace(self._path, self._final)
        self._remove()
        if wrong:
            raise DataError(
                f"{self._url}: {wrong}, so it was deleted; the file changed on the server or in "
                "transit: compare with the hash that its authors publish"
            )

    def _get(self, have: int) -> None:
        import requests

        headers = {
            "Accept-Encoding": "identity"
        }  # offsets of a compressed part do not fit the file
        state = read_text(self._state_path) if self._state_path.exists() else ""
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
                self._total = have  # the file is complete
            else:
                self._remove()
                self._get(0)

    def _check_redirect(self, response: "Response", **settings: Any) -> None:
        target = urljoin(response.url, response.headers.get("location", ""))
        here, there = urlsplit(response.url), urlsplit(target)
        stays = there.hostname == here.hostname and there.scheme == here.scheme
        if response.is_redirect and not stays and there.scheme != "https":
            raise UserError(f"{self._url}: redirected to {format_value(target, 200)}, not https")

    def _receive(self, response: "Response", have: int) -> None:
        """Append the response, or start over if the server sends the whole file."""
        status, headers = response.status_code, response.headers
        if status not in (200, 206):
            reason = _REFUSALS.get(status, "the server cannot answer; try again later")
            raise UserError(f"{self._url}: {reason} ({status})")
        if (encoding := headers.get("Content-Encoding", "identity")) != "identity":
            raise UserError(
                f"{self._url}: got the file compressed ({format_value(encoding)}), expected it as "
                "it is"
            )
        rest = status == 206 and headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if rest else 0  # Range was ignored, or the file has changed
        length = headers.get("Content-Length", "")
        self._total = total = have + int(length) if length.isdecimal() else self._size
        if self._size and total != self._size:
            raise UserError(
                f"{self._url}: got a file of {total} bytes, expected {self._size}; "
                "it is a different file"
            )
        free = shutil.disk_usage(self._path.parent).free
        if total - have > free:
            full = OSError(errno.ENOSPC, f"{total - have} bytes are needed, {free} are free")
            raise write_error(self._path.parent, full, 0)
        if not rest:
            state = headers.get("ETag", "")
            if not state or state.startswith("W/"):
                state = headers.get("Last-Modified", "")
            self._state_path.write_text(state, encoding="utf-8")
        desc = f"download {self._final.name}"
        bar = Progress(total // MB, desc, "MB", have // MB, silent=total < MB)
        with open_file(self._path, "ab" if rest else "wb") as file, bar:
            for chunk in response.iter_content(CHUNK_BYTES):
                before, have = have, have + len(chunk)
                if total and have > total:
                    file.truncate(0)
                    raise DataError(f"{self._url}: got more than the {total} bytes of the file")
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
    """Return the root cause of a network error as one short line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return printable(" ".join(text.split()))[:160]
