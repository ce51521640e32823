"""Hostile and damaged archives: each is refused before anything is written."""

import io
import shutil
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from detection.datasets.unpack import unpack
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


@pytest.mark.parametrize("wanted", ["", "harmless/"])
def test_also_in_what_is_not_wanted(wanted, tmp_path):
    content = packed("a.tar", {"harmless/1": b"x", "../up": b"x"})
    refused(tmp_path, "a.tar", content, "leads out", takes=[wanted])


def test_a_nul_in_a_name(tmp_path):
    content = zip_with("name?/../x").replace(b"name?/../x", b"name\0/../x")
    refused(tmp_path, "a.zip", content, r"\\x00")


@pytest.mark.parametrize("kind", [0o120777, 0o020666, 0o060666, 0o010666, 0o140777])
def test_links_and_devices_in_a_zip(kind, tmp_path):
    refused(tmp_path, "a.zip", zip_with("link", b"/etc/passwd", kind), "'link', a link, device")


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE],
)
def test_links_and_devices_in_a_tar(kind, tmp_path):
    refused(tmp_path, "a.tar", tar_with(info("link", kind, "first")), "'link', a link, device")


def test_a_sparse_file(tmp_path):
    refused(tmp_path, "a.tar", tar_with(info("x", tarfile.GNUTYPE_SPARSE)), "'x'")


def test_an_encrypted_file(tmp_path):
    content = bytearray(zip_with("secret"))
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    refused(tmp_path, "a.zip", bytes(content), "'secret'.*encrypted")


@pytest.mark.parametrize("second", ["d/one", "./d/one", "d//one", "d/./one"])
def test_a_file_twice(second, tmp_path):
    content = tar_with(info("d/one"), info(second))
    refused(tmp_path, "a.tar", content, "twice")


def test_a_file_that_is_a_folder(tmp_path):
    refused(tmp_path, "a.tar", tar_with(info("d"), info("d/one")), "also a file")


@pytest.mark.parametrize("name", KINDS)
def test_more_than_expected(name, tmp_path):
    refused(tmp_path, name, packed(name, {"zeros": bytes(1 << 20)}), "1048583", limit=1 << 20)


@pytest.mark.parametrize("size", [10, 1 << 21])
def test_another_size_than_declared(size, tmp_path):
    content = packed("a.zip", {"zeros": bytes(1 << 20)})
    entry = content.rindex(b"PK\x01\x02") + 24
    assert int.from_bytes(content[entry : entry + 4], "little") == 1 << 20
    lying = content[:entry] + size.to_bytes(4, "little") + content[entry + 4 :]
    (tmp_path / "a.zip").write_bytes(lying)
    with pytest.raises(DataError, match=r"a\.zip"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    assert sum(p.stat().st_size for p in (tmp_path / "out").iterdir()) <= max(size, 1 << 20) + 7


def test_a_negative_size(tmp_path):
    content = bytearray(tar_with(info("x")))
    header = content.index(b"x\0")
    content[header + 124 : header + 136] = b"\xff" * 11 + b"\x00"
    content[header + 148 : header + 156] = b" " * 8
    checksum = sum(content[header : header + 512])
    content[header + 148 : header + 156] = b"%06o\0 " % checksum
    refused(tmp_path, "a.tar", bytes(content), "damaged")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_cut_off(name, part, tmp_path):
    whole = packed(name, {f"{i}": bytes([i]) * 5000 for i in range(9)})
    (tmp_path / name).write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(DataError, match="damaged"):
        unpack(tmp_path / name, tmp_path / "out")


def test_another_archive(tmp_path):
    refused(tmp_path, "a.zip", packed("a.zip", {"x": b""}), "VOCdevkit/", takes=["VOCdevkit/"])


def test_no_space(tmp_path, monkeypatch):
    (tmp_path / "a.zip").write_bytes(packed("a.zip", {"x": bytes(100)}))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=106))
    with pytest.raises(UserError, match=r"107 bytes, 106 are free"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
