"""Hostile and damaged archives: each is refused before anything is written."""

import io
import shutil
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from detection.datasets.download import unpack
from moco.common.errors import DataError, UserError
from tests.oracles.tiny_archives import packed

KINDS = ["a.zip", "a.tar", "a.tgz"]


def refused(tmp_path: Path, name: str, content: bytes, match: str, **settings) -> None:
    """DataError, and nothing is written, in the folder or elsewhere."""
    (tmp_path / "in").mkdir()
    archive = tmp_path / "in" / name
    archive.write_bytes(content)
    with pytest.raises(DataError, match=match) as error:
        unpack(archive, tmp_path / "in" / "out", **settings)
    assert str(archive) in str(error.value) and "\n" not in str(error.value)
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {archive}


def zip_with(name: str, content: bytes = b"x", attributes: int = 0) -> bytes:
    info = zipfile.ZipInfo("placeholder")
    info.filename, info.external_attr = name, attributes << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("first", b"harmless")
        archive.writestr(info, content)
    return buffer.getvalue()


def tar_with(*infos: tarfile.TarInfo, content: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("first"))
        for info in infos:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def info(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize("name", KINDS)
def test_plain_files(name, tmp_path):
    content = packed(name, {"a/b/1.txt": b"one", "a/b/c/2.txt": b"", "a/x": b"x"})
    (tmp_path / name).write_bytes(content)
    unpack(tmp_path / name, tmp_path / "out", ["a/b/"], strip=2, limit=3)
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.txt")}
    assert found == {"1.txt", "c/2.txt"} and (tmp_path / "out/1.txt").read_bytes() == b"one"
    assert not (tmp_path / "out" / "x").exists()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "path", ["/abs", "../up", "a/../../up", "..", "a\\b", "..\\up", "C:/x", "c:x", "//host/x"]
)
def test_names_that_lead_out(name, path, tmp_path):
    refused(tmp_path, name, packed(name, {path: b"x"}), "refused|leads out")


def encrypted() -> bytes:
    content = bytearray(zip_with("secret"))
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


def with_negative_size() -> bytes:
    content = bytearray(tar_with(info("x")))
    header = content.index(b"x\0")
    content[header + 124 : header + 136] = b"\xff" * 11 + b"\x00"
    content[header + 148 : header + 156] = b" " * 8
    checksum = sum(content[header : header + 512])
    content[header + 148 : header + 156] = b"%06o\0 " % checksum
    return bytes(content)


OUTSIDE = packed("a.tar", {"harmless/1": b"x", "../up": b"x"})
ZIP_KINDS = (0o120777, 0o020666, 0o060666, 0o010666, 0o140777)  # links, devices, pipes, sockets
TAR_KINDS = (
    tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE,
)  # fmt: skip
HOSTILE = [
    ("a.tar", OUTSIDE, "leads out", {}),
    ("a.tar", OUTSIDE, "leads out", {"takes": ["harmless/"]}),  # also in what is not wanted
    ("a.zip", zip_with("name?/../x").replace(b"name?/../x", b"name\0/../x"), r"\\x00", {}),
    *(("a.zip", zip_with("x", b"/etc/passwd", k), "'x', a link, device", {}) for k in ZIP_KINDS),
    *(("a.tar", tar_with(info("x", k, "first")), "'x', a link, device", {}) for k in TAR_KINDS),
    ("a.tar", tar_with(info("x", tarfile.GNUTYPE_SPARSE)), "'x'", {}),
    ("a.zip", encrypted(), "'secret'.*encrypted", {}),
    *(
        ("a.tar", tar_with(info("d/one"), info(second)), "twice", {})
        for second in ("d/one", "./d/one", "d//one", "d/./one")
    ),
    ("a.tar", tar_with(info("d"), info("d/one")), "also a file", {}),
    *((n, packed(n, {"0": bytes(1 << 20)}), "1048583", {"limit": 1 << 20}) for n in KINDS),
    ("a.tar", with_negative_size(), "damaged", {}),
    ("a.zip", packed("a.zip", {"x": b""}), "VOCdevkit/", {"takes": ["VOCdevkit/"]}),
]


@pytest.mark.parametrize("name, content, match, settings", HOSTILE, ids=lambda value: "")
def test_hostile_archives(name, content, match, settings, tmp_path):
    refused(tmp_path, name, content, match, **settings)


@pytest.mark.parametrize("size", [10, 1 << 21])
def test_another_size_than_declared(size, tmp_path):
    content = packed("a.zip", {"zeros": bytes(1 << 20)})
    entry = content.rindex(b"PK\x01\x02") + 24
    assert int.from_bytes(content[entry : entry + 4], "little") == 1 << 20
    misdeclared = content[:entry] + size.to_bytes(4, "little") + content[entry + 4 :]
    (tmp_path / "a.zip").write_bytes(misdeclared)
    with pytest.raises(DataError, match=r"a\.zip"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert sum(p.stat().st_size for p in (tmp_path / "out").iterdir()) <= max(size, 1 << 20) + 7


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_cut_off(name, part, tmp_path):
    whole = packed(name, {f"{i}": bytes([i]) * 5000 for i in range(9)})
    (tmp_path / name).write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(DataError, match="damaged"):
        unpack(tmp_path / name, tmp_path / "out")


def test_no_space(tmp_path, monkeypatch):
    (tmp_path / "a.zip").write_bytes(packed("a.zip", {"x": bytes(100)}))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=106))
    with pytest.raises(UserError, match=r"107 bytes, 106 are free"):
        unpack(tmp_path / "a.zip", tmp_path / "out")


def test_modes_are_those_of_new_files(tmp_path):
    """A file that only its owner may read in the archive is readable as any other file."""
    secret = info("x")
    secret.mode = 0o4700
    (tmp_path / "a.tar").write_bytes(tar_with(secret, content=b"x"))
    unpack(tmp_path / "a.tar", tmp_path / "out")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "out" / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode
