"""Files are written whole or not at all; what is wrong with one that is read is one line."""

import gzip
import io
import os
import subprocess
import sys
import tarfile
import zipfile

import pytest
import torch

from moco.common import files as fileio
from moco.common.errors import DataError, UserError


def test_a_failing_writer_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "file"
    fileio.atomic_write_text(path, "old")

    def fail(file):
        file.write(b"half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        fileio.atomic_write(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_one_line_and_the_old_file_stays(tmp_path):
    """RLIMIT_FSIZE stands in for a full disk: the write fails with EFBIG after 64 KB."""
    path = tmp_path / "file"
    path.write_text("old")
    program = f"""
import resource, signal
from moco.common import errors
from moco.common import files as fileio
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
errors.run_cli(lambda argv: fileio.atomic_write_text({str(path)!r}, "x" * 10**6))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and str(path) in done.stderr, done.stderr
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def _truncated_zip() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(1000)}, buffer)
    return buffer.getvalue()[:2000]


def _zip(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, bytes(1000))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"hello world\n", bytes(4096), b"PK\x03\x04" + bytes(4096)),
        *(b"\x89PNG\r\n\x1a\n" + bytes(64), _truncated_zip(), _zip("hello.txt")),
    ],
)
@pytest.mark.parametrize("load", [fileio.load_torch, fileio.load_pickle])
def test_damaged_files_are_one_line(tmp_path, load, content):
    path = tmp_path / "weights"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("model.pth"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "a git-lfs pointer",
        ),
        (b"epoch,loss\n1,2\n", "a text file"),
        ("Größe: 1\n".encode() * 99, "a text file"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n<html><body>", "a web page"),
        (gzip.compress(b"x" * 100), "compressed by gzip"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(100), "a JPEG image"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "a PNG image"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
        (b"\x93NUMPY\x01\x00" + bytes(100), "one numpy array"),
        (_zip("conv1.weight.npy"), "an archive of numpy arrays"),
        (_zip("model.pth"), "a zip archive of other files: unpack it"),
        (_zip("folder/model.pth"), "a zip archive of other files: unpack it"),
        (_tar(), "a tar archive: unpack it"),
    ],
)
def test_what_people_take_for_weights_is_named(tmp_path, content, reason):
    path = tmp_path / "weights"
    path.write_bytes(content)
    load = fileio.load_torch if fileio.format_of(path) == "torch" else fileio.load_pickle
    with pytest.raises(DataError, match=rf"weights: this is {reason}") as caught:
        load(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("content", [_zip("model.pth")[:-100], _truncated_zip()])
def test_what_is_cut_off_is_called_that(tmp_path, content):
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(DataError, match=r"damaged \(cut off: copied or downloaded in part\?"):
        fileio.load_torch(tmp_path / "weights")


def test_missing_files_and_folders_are_named(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for load in (fileio.load_torch, fileio.load_pickle):
        with pytest.raises(DataError, match="does not exist"):
            load(tmp_path / "none.pth")
        with pytest.raises(DataError, match="is a folder"):
            load(tmp_path)
        with pytest.raises(DataError, match="is a pipe"):
            load(pipe)
    with pytest.raises(UserError, match="cannot write"):
        (tmp_path / "file").write_text("")
        fileio.atomic_write_text(tmp_path / "file" / "inside", "x")


def test_the_state_hash_sees_names_values_shapes_and_types():
    state = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    same = {"b": torch.ones(1), "a": torch.zeros(2, 3)}
    assert fileio.sha256_state(state) == fileio.sha256_state(same)
    for other in (
        {"a": torch.zeros(3, 2), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3), "c": torch.ones(1)},
        {"a": torch.zeros(2, 3), "b": torch.ones(1) * 2},
        {"a": torch.zeros(2, 3), "b": torch.ones(1).double()},
    ):
        assert fileio.sha256_state(state) != fileio.sha256_state(other)
