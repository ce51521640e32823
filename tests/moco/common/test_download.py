"""Downloads from a local server: complete, resumed, refused, changed in between."""

import gzip
import hashlib
import shutil
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from moco.common.download import cache_folder, download
from moco.common.errors import DataError, UserError
from tests.oracles.file_server import file_server

CONTENT = hashlib.shake_256(b"weights").digest(3 << 20)
THIRD = 1 << 20
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"
WRONG = "sha256:12345678"


@pytest.fixture
def served():
    with file_server({"/file": CONTENT}) as served:
        yield served


@pytest.fixture
def file(tmp_path):
    return tmp_path / "folder" / "name.pth"


def names(file):
    """Return the names in the folder, without the locks that failed downloads leave."""
    return {path.name for path in file.parent.iterdir() if path.suffix != ".lock"}


def ranges(served):
    return [requested for _, requested in served.requests]


@pytest.mark.parametrize("digest", ["", SHA256, MD5, SHA256[:15], MD5[:12]])
def test_a_file_is_downloaded_once(served, file, digest, monkeypatch, capfd):
    monkeypatch.setenv("MOCO_PROGRESS", "on")
    assert download(f"{served.url}/file", file, digest, len(CONTENT)) == file
    assert download(f"{served.url}/file", file, digest) == file
    assert file.read_bytes() == CONTENT
    assert [path.name for path in file.parent.iterdir()] == ["name.pth"]
    assert ranges(served) == [None]
    assert "name.pth: 3/3 MB" in capfd.readouterr().err


def test_an_earlier_file_survives_a_wrong_hash_and_is_then_replaced(served, file):
    file.parent.mkdir()
    file.write_bytes(b"earlier")
    with pytest.raises(DataError):
        download(f"{served.url}/file", file, "md5:12345678")
    assert file.read_bytes() == b"earlier"
    download(f"{served.url}/file", file, SHA256)
    assert file.read_bytes() == CONTENT


def test_a_download_resumes_as_long_as_it_makes_progress(served, file):
    served.stops_after = THIRD
    download(f"{served.url}/file", file, SHA256)
    assert file.read_bytes() == CONTENT
    assert ranges(served) == [None, f"bytes={THIRD}-", f"bytes={2 * THIRD}-"]


@pytest.mark.parametrize(
    ("digest", "etag", "changed", "resumed"),
    [
        ("", '"one"', {}, True),
        (SHA256, '"one"', {}, True),
        ("", '"one"', {"etag": '"two"', "files": {"/file": CONTENT[::-1]}}, True),
        ("", "", {}, False),  # a version that is unknown or weak, and no hash
        ("", 'W/"one"', {}, False),
    ],
)
def test_a_later_call_resumes_the_same_version(served, file, digest, etag, changed, resumed):
    served.etag, served.stops_after = etag, THIRD
    served.honors_range = False  # so that the second answer makes no progress
    with pytest.raises(UserError, match="resume"):
        download(f"{served.url}/file", file, digest)
    assert names(file) == {"name.pth.part", "name.pth.part.etag"}
    assert file.with_name("name.pth.part").read_bytes() == CONTENT[:THIRD]
    served.requests.clear()
    vars(served).update({"stops_after": 1 << 40, "honors_range": True, **changed})
    download(f"{served.url}/file", file, digest)
    assert ranges(served) == [f"bytes={THIRD}-" if resumed else None]
    assert file.read_bytes() == served.files["/file"]
    assert names(file) == {"name.pth"}


@pytest.mark.parametrize("left", [CONTENT, CONTENT + b"more"], ids=["whole", "longer"])
def test_a_part_as_long_as_the_file(served, file, left):
    file.parent.mkdir()
    file.with_name("name.pth.part").write_bytes(left)
    download(f"{served.url}/file", file, SHA256)
    assert ranges(served) == [f"bytes={len(left)}-", None][: 1 + (left != CONTENT)]
    assert file.read_bytes() == CONTENT


# It could be expanded without end, and its length is unknown.
ZIPPED = {
    "headers": {"Content-Encoding": "gzip"},
    "files": {"/file": gzip.compress(bytes(1 << 20))},
}
ENDLESS = {"sends_length": False, "files": {"/file": bytes(64 << 20)}}


@pytest.mark.parametrize(
    ("server", "expected", "error", "match"),
    [
        *(({"status": status}, {}, UserError, str(status)) for status in (401, 404, 503)),
        *(({"sends_length": s}, {"digest": WRONG}, DataError, "12345678") for s in (True, False)),
        ({"sends_length": False, "stops_after": THIRD}, {"size": 3 << 20}, DataError, "3145728"),
        ({"stops_after": 0}, {"size": 5}, UserError, "expected 5;"),
        (ENDLESS, {"size": 5}, DataError, "got more than the 5 bytes of the file"),
        (ZIPPED, {}, UserError, r"got the file compressed \('gzip'\)"),
    ],
)
def test_a_refused_file_is_not_kept(served, file, server, expected, error, match):
    vars(served).update(server)
    with pytest.raises(error, match=match):
        download(f"{served.url}/file", file, **expected)
    assert names(file) == set()


def test_a_full_disk(served, file, monkeypatch):
    free = SimpleNamespace(free=len(CONTENT) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(UserError, match=str(len(CONTENT))):
        download(f"{served.url}/file", file, SHA256)
    assert names(file) == set()


@pytest.mark.parametrize("listens", [True, False])
def test_a_server_that_does_not_answer(file, monkeypatch, listens):
    monkeypatch.setattr("moco.common.download.TIMEOUT_SECONDS", 0.1)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen(1)  # accepts, but never answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}/file"
        start = time.monotonic()
        with pytest.raises(UserError, match=f"{url}: .*timed out" if listens else url):
            download(url, file, SHA256)
        assert time.monotonic() - start < 20
    assert names(file) == set()


def test_offline(served, file, monkeypatch):
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    with pytest.raises(UserError, match="MOCO_TRANSFER_OFFLINE"):
        download(f"{served.url}/file", file, SHA256)
    assert not file.parent.exists()
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "0")
    download(f"{served.url}/file", file, SHA256)
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    assert download(f"{served.url}/file", file, SHA256) == file
    assert ranges(served) == [None]


URLS = (
    "http://example.org/a", "ftp://example.org/a", "file:///etc/passwd", "https:///a", "a",
    "https://user:word@example.org/a", "http://127.0.0.1.example.org/a", "https://[::1/a",
)  # fmt: skip
DIGESTS = ("1234abcd", "sha512:1234abcd", "md5:123", "sha256:xyz12345")


@pytest.mark.parametrize(
    ("url", "digest"),
    [*((url, "") for url in URLS), *(("https://example.org/a", digest) for digest in DIGESTS)],
)
def test_unsupported_addresses_and_digests(file, url, digest):
    with pytest.raises(UserError, match=digest or None):
        download(url, file, digest)
    assert not file.parent.exists()


def test_redirects(served, file):
    served.redirects = {"/here": f"{served.url}/file", "/away": "http://example.org/file"}
    download(f"{served.url}/here", file, SHA256)
    with pytest.raises(UserError, match=r"example\.org"):
        download(f"{served.url}/away", file.with_name("other"))
    assert names(file) == {"name.pth"}


def test_concurrent_downloads_share_the_file(served, file):
    arguments = f"{served.url}/file", file, SHA256
    threads = [threading.Thread(target=download, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() == CONTENT
    assert ranges(served) == [None]


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MOCO_TRANSFER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("MOCO_TRANSFER_CACHE")
    assert cache_folder().name == "moco-transfer"
