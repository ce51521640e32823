"""Atomic writing of files, and the hash of a state dict."""

import subprocess
import sys

import pytest
import torch

from moco.common import files as fileio
from moco.common.errors import UserError


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


def test_a_file_where_a_folder_is_meant_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        fileio.atomic_write_text(tmp_path / "file" / "inside", "x")


def test_the_state_hash_covers_names_values_shapes_and_types():
    zeros, ones = torch.zeros(2, 3), torch.ones(1)
    same = [{"a": zeros, "b": ones}, {"b": ones.clone(), "a": zeros.clone()}]
    others = [
        {"a": torch.zeros(3, 2), "b": ones},
        {"a": zeros, "c": ones},
        {"a": zeros, "b": ones * 2},
        {"a": zeros, "b": ones.double()},
    ]
    hashes = [fileio.sha256_state(state) for state in (*same, *others)]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 1 + len(others)
