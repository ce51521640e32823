"""Downloads from a real server: whole, broken off and resumed, refused, changed on the way."""

import gzip
import hashlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moco.common.download import cache_folder, download
from moco.common.errors import DataError, UserError
from tests.oracles.file_server import Served, file_server

CONTENT = hashlib.shake_256(b"weights").digest(3 << 20)
THIRD = 1 << 20
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


@pytest.fixture
def served() -> Iterator[Served]:
    with file_server({"/file": CONTENT}) as served:
        yield served


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "name.pth"


def names(file: Path) -> set[str]:
    """What is in the folder, without the locks that failed downloads leave."""
    return {path.name for path in file.parent.iterdir() if path.suffix != ".lock"}


def ranges(served: Served) -> list[str | None]:
    return [asked for _, asked in served.asked]


def break_off(served: Served, file: Path, digest: str = SHA256) -> None:
    """Leave the first third: the server closes the connection there, and then refuses."""
    served.stops_after = THIRD
    served.honors_range = False  # so that the second answer brings nothing more
    with pytest.raises(UserError, match="resume"):
        download(f"{served.url}/file", file, digest)
    served.stops_after, served.honors_range = 1 << 40, True
    assert names(file) == {"name.pth.part", "name.pth.part.etag"}
    assert file.with_name("name.pth.part").read_bytes() == CONTENT[:THIRD]
    served.asked.clear()


@pytest.mark.parametrize("digest", ["", SHA256, MD5, SHA256[:15], MD5[:12]])
def test_whole_and_then_not_again(served: Served, file: Path, digest: str) -> None:
    assert download(f"{served.url}/file", file, digest, len(CONTENT)) == file
    assert download(f"{served.url}/file", file, digest) == file
    assert file.read_bytes() == CONTENT
    assert [path.name for path in file.parent.iterdir()] == ["name.pth"]
    assert ranges(served) == [None]


def test_another_file_of_that_name_is_replaced(served: Served, file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"earlier")
    download(f"{served.url}/file", file, SHA256)
    assert file.read_bytes() == CONTENT


def test_resumes_while_each_answer_brings_more(served: Served, file: Path) -> None:
    served.stops_after = THIRD
    download(f"{served.url}/file", file, SHA256)
    assert file.read_bytes() == CONTENT
    assert ranges(served) == [None, f"bytes={THIRD}-", f"bytes={2 * THIRD}-"]


@pytest.mark.parametrize("digest", ["", SHA256])
def test_resumes_what_an_earlier_call_left(served: Served, file: Path, digest: str) -> None:
    break_off(served, file, digest)
    download(f"{served.url}/file", file, digest)
    assert ranges(served) == [f"bytes={THIRD}-"]
    assert file.read_bytes() == CONTENT
    assert names(file) == {"name.pth"}


def test_a_changed_file_starts_over(served: Served, file: Path) -> None:
    break_off(served, file, "")
    served.files["/file"] = changed = CONTENT[::-1]
    served.etag = '"two"'
    download(f"{served.url}/file", file)
    assert file.read_bytes() == changed


@pytest.mark.parametrize("etag", ["", 'W/"one"'])
def test_a_part_of_unknown_state_is_not_joined_without_a_hash(
    served: Served, file: Path, etag: str
) -> None:
    served.etag = etag
    break_off(served, file, "")
    download(f"{served.url}/file", file)
    assert ranges(served) == [None]
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize("left", [CONTENT, CONTENT + b"more"], ids=["whole", "longer"])
def test_a_part_as_long_as_the_file(served: Served, file: Path, left: bytes) -> None:
    file.parent.mkdir()
    file.with_name("name.pth.part").write_bytes(left)
    download(f"{served.url}/file", file, SHA256)
    assert ranges(served) == [f"bytes={len(left)}-", None][: 1 + (left != CONTENT)]
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize("says_length", [True, False])
def test_a_wrong_hash_keeps_nothing(served: Served, file: Path, says_length: bool) -> None:
    served.says_length = says_length
    with pytest.raises(DataError, match="12345678"):
        download(f"{served.url}/file", file, "sha256:12345678")
    assert names(file) == set()


def test_an_earlier_file_survives_a_wrong_hash(served: Served, file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"earlier")
    with pytest.raises(DataError):
        download(f"{served.url}/file", file, "md5:12345678")
    assert file.read_bytes() == b"earlier"


def test_cut_off_without_a_length_is_found_by_the_size(served: Served, file: Path) -> None:
    served.says_length, served.stops_after = False, THIRD
    with pytest.raises(DataError, match=str(len(CONTENT))):
        download(f"{served.url}/file", file, size=len(CONTENT))
    assert names(file) == set()


@pytest.mark.parametrize("status", [401, 404, 503])
def test_refused(served: Served, file: Path, status: int) -> None:
    served.status = status
    with pytest.raises(UserError, match=str(status)):
        download(f"{served.url}/file", file)
    assert names(file) == set()


def test_another_size_is_refused_before_it_comes(served: Served, file: Path) -> None:
    served.stops_after = 0
    with pytest.raises(UserError, match="expected 5;"):
        download(f"{served.url}/file", file, size=5)
    assert names(file) == set()


def test_an_endless_answer_is_left_at_the_size(served: Served, file: Path) -> None:
    served.says_length = False
    served.files["/file"] = bytes(64 << 20)
    with pytest.raises(DataError, match="sends more than the 5 bytes of the file"):
        download(f"{served.url}/file", file, size=5)
    assert names(file) == set()


def test_a_compressed_answer_is_refused(served: Served, file: Path) -> None:
    """It could be expanded without end; no length is known of what comes out."""
    served.files["/file"] = gzip.compress(bytes(1 << 20))
    served.headers["Content-Encoding"] = "gzip"
    with pytest.raises(UserError, match="sends the file as 'gzip', although it was asked not to"):
        download(f"{served.url}/file", file)
    assert names(file) == set()


def test_no_space(served: Served, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(free=len(CONTENT) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(UserError, match=str(len(CONTENT))):
        download(f"{served.url}/file", file, SHA256)
    assert names(file) == set()


def test_no_network(file: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/file"
        with pytest.raises(UserError, match=url):
            download(url, file, SHA256)
    assert names(file) == set()


def test_a_server_that_does_not_answer(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moco.common.download.TIMEOUT_SECONDS", 0.1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)  # accepts, and never says a word
        start = time.monotonic()
        with pytest.raises(UserError, match="timed out"):
            download(f"http://127.0.0.1:{server.getsockname()[1]}/file", file)
        assert time.monotonic() - start < 20
    assert names(file) == set()


def test_progress_is_in_megabytes(
    served: Served, file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOCO_PROGRESS", "on")
    download(f"{served.url}/file", file)
    assert "name.pth: 3/3 MB" in capfd.readouterr().err


def test_offline(served: Served, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    with pytest.raises(UserError, match="MOCO_TRANSFER_OFFLINE"):
        download(f"{served.url}/file", file, SHA256)
    assert not file.parent.exists()
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "0")
    download(f"{served.url}/file", file, SHA256)
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    assert download(f"{served.url}/file", file, SHA256) == file
    assert ranges(served) == [None]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a",
        "ftp://example.org/a",
        "file:///etc/passwd",
        "https:///a",
        "a",
        "https://user:word@example.org/a",
        "http://127.0.0.1.example.org/a",
        "https://[::1/a",
    ],
)
def test_addresses_that_are_not_read(file: Path, url: str) -> None:
    with pytest.raises(UserError):
        download(url, file)
    assert not file.parent.exists()


@pytest.mark.parametrize("digest", ["1234abcd", "sha1:1234abcd", "md5:123", "sha256:xyz12345"])
def test_digests_that_are_none(file: Path, digest: str) -> None:
    with pytest.raises(UserError, match=digest):
        download("https://example.org/a", file, digest)


def test_redirects(served: Served, file: Path) -> None:
    served.redirects = {"/here": f"{served.url}/file", "/away": "http://example.org/file"}
    download(f"{served.url}/here", file, SHA256)
    with pytest.raises(UserError, match=r"example\.org"):
        download(f"{served.url}/away", file.with_name("other"))
    assert names(file) == {"name.pth"}


def test_those_that_want_it_at_once_share_it(served: Served, file: Path) -> None:
    threads = [
        threading.Thread(target=download, args=(f"{served.url}/file", file, SHA256))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() == CONTENT
    assert ranges(served) == [None]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOCO_TRANSFER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("MOCO_TRANSFER_CACHE")
    assert cache_folder().name == "moco-transfer"
