"""Untrusted files: claimed sizes beyond the file, random damage, and readers in the source.

Payloads that try to run code are in tests/convert/test_payloads.py and
tests/moco/pretraining/test_reliability.py (TestPayloads).
"""

import io
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convert.read import read_file
from moco.common.errors import DataError
from moco.common.files import detect_format, load_pickle, load_safetensors, load_torch
from tests.oracles.bombs import bombs
from tests.oracles.payloads import saved, zip_of

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("moco", "convert", "detection", "benchmarks", "moco_transfer")
LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
# These describe something inert that takes no memory, or that is nothing but a number to this
# reader, or are in a part of a zip that is never read.
HARMLESS = {
    "bytearray of a size", "list of a range", "array of a size", "copies of bytes", "empty sets",
    "an object that contains itself", "a path of many parts", "LONG_BINPUT", "PUT", "two pickles",
    "a key of a million letters", "copies of a state", "torch.Tensor of sizes", "a meta tensor",
    "torch.FloatTensor of sizes", "torch.Tensor by NEWOBJ", "legacy, many of sparse_tensor",
    "a nested name of a dtype", "legacy, many of qtensor", "legacy, many of meta_tensor_no_storage",
    "a set made of them", "a set of numbers of one hash", "sets of one list", "FRAME",
    "a list of 30 MB", "one part by many names",
}  # fmt: skip
KIB = "int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
PEAK = f"print({KIB})"
# Read every file named on stdin, once for both commands; print the result.
READ_ALL = f"""
import signal, sys
from convert import inspect_file as inspection
from convert.convert_to_d2 import convert_in_memory
from convert.read import read_file
from moco.common.errors import (DataError, UserError)
import convert.translate, torchvision, safetensors
imports = {KIB}
for path in map(str.strip, sys.stdin):
    signal.alarm(60)  # ends the process; the slowest takes five
    print(path, file=sys.stderr)
    try:
        objects = set()
        raw = read_file(path, objects)
        inspection.read_file = lambda path, found: found.update(objects) or raw
        for command in (inspection.inspect_file, lambda path: convert_in_memory(path, raw)):
            try: command(path)
            except UserError as error: assert len(str(error)) < 5000 and str(error).isprintable()
    except DataError as error:
        line = str(error)
        assert line.startswith(path) and len(line) < 500 and line.isprintable(), line
        assert 'not fit into memory' not in line, line
        print(line)
    else: print('read')
print({KIB} - imports)
"""


def in_a_process(code, *args, **options):
    """Run a process; return the lines that it prints, and the peak of its memory in MB."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    *lines, kib = done.stdout.splitlines()
    return lines, int(kib) >> 10


@LINUX
@pytest.mark.slow
def test_impossible_sizes_take_no_memory(tmp_path):
    """The process must survive, with less than half a gigabyte of memory besides its imports."""
    files = bombs()
    for i, content in enumerate(files.values()):
        (tmp_path / f"{i:03}").write_bytes(content)
    paths = "\n".join(sorted(map(str, tmp_path.iterdir())))
    lines, peak = in_a_process(READ_ALL, input=paths)
    made = dict(zip(files, lines, strict=True))
    assert {name for name, line in made.items() if line == "read"} == HARMLESS
    assert peak < 500, peak


def test_large_files_and_expanded_tensors_may_be_large(tmp_path):
    """Limits are proportional to the file: 100 MB of a tensor, and a thousand views of it."""
    big = torch.zeros(25_000_000)
    views = [big[i:] for i in range(1000)]
    small = torch.ones(1).expand(1000, 1000)
    torch.save({"state_dict": {"a": big}, "views": views, "small": small}, tmp_path / "x")
    loaded = load_torch(tmp_path / "x")
    assert loaded["state_dict"]["a"].shape == big.shape
    assert loaded["views"][999].untyped_storage().nbytes() == big.numel() * 4
    assert loaded["small"].shape == (1000, 1000)


# The losses of each step, a log, many small tensors.
LONG_RECORDS = f"""
import sys, torch
from moco.common.files import load_torch
for make in (
    lambda: [float(i) for i in range(2_000_000)],
    lambda: [{{'loss': 1.0 * i, 'lr': 0.1 * i, 'epoch': i}} for i in range(110_000)],
    lambda: {{f'layer{{i}}.weight': torch.zeros(1) for i in range(45_000)}},
    lambda: {{i: [i, 2 * i] for i in range(90_000)}},
    lambda: [i % 200 for i in range(2_000_000)],
):
    torch.save({{"value": make()}}, sys.argv[1])
    assert load_torch(sys.argv[1])["value"] == make()
{PEAK}
"""


@LINUX
@pytest.mark.slow
def test_long_records_may_be_long(tmp_path):
    _, peak = in_a_process(LONG_RECORDS, tmp_path / "x")
    assert peak < 1500


def test_memory_that_is_not_there(tmp_path, monkeypatch):
    def fail(*args):
        raise MemoryError

    torch.save({"a": torch.ones(1)}, tmp_path / "x")
    monkeypatch.setattr("moco.common.torch_files._read_zip", fail)
    with pytest.raises(DataError, match=r"does not fit into memory \(\d+ bytes\)"):
        load_torch(tmp_path / "x")


def test_safetensors(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "any.name"
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "e": torch.zeros(0)}
    save_file(tensors, path, metadata={"a": "b"})
    assert detect_format(path) == "safetensors"
    read, metadata = load_safetensors(path)
    assert metadata == {"a": "b"} and sorted(read) == sorted(read_file(path)) == ["e", "n", "w"]
    path.write_bytes(bytes(path.stat().st_size))  # the tensors do not depend on the file
    assert torch.equal(read["w"], torch.arange(6.0).reshape(2, 3)) and read["n"] == 7
    save_file({"w": torch.ones(1)}, path)
    assert load_safetensors(path)[1] == {}


# Random damage.


def _safetensors():
    from safetensors.torch import save

    return save({"w": torch.arange(4.0), "v": torch.ones(2, 2)}, {"a": "b"})


def seeds():
    """Return a small valid file of each format."""
    value = {
        "state_dict": {"w": torch.arange(4.0), "v": torch.ones(2, 2)[:, 0]},
        "epoch": 3,
        "args": {"lr": 0.1, "names": ["a", ("b", None)], "big": 2**70},
        "numpy": np.arange(3, dtype="i4"),
    }
    legacy = io.BytesIO()
    torch.save(value, legacy, _use_new_zipfile_serialization=False)
    plain = {"model": {"w": np.arange(6, dtype="f4").reshape(2, 3)}, "n": np.float64(2)}
    return [
        saved(value),
        zip_of({"data.pkl": pickle.dumps({"a": [1, 2.5, "x"]}, 4), "byteorder": b"little"}),
        legacy.getvalue(),
        _safetensors(),
        *(pickle.dumps(plain, protocol) for protocol in range(6)),
    ]


# The formats have their numbers at the start, and a zip's list at the end.
_PLACES = st.one_of(
    st.integers(0, 300), st.integers(-300, -1), st.integers(0, 10**6), st.integers(0, 10**6)
)
_CHANGES = st.lists(
    st.tuples(_PLACES, st.binary(min_size=1, max_size=8), st.sampled_from(["over", "in", "cut"])),
    min_size=1,
    max_size=6,
)


@st.composite
def mutated(draw):
    content = bytearray(draw(st.sampled_from(seeds())))
    for place, data, how in draw(_CHANGES):
        at = place % max(len(content), 1)
        if how == "over":
            content[at : at + len(data)] = data
        elif how == "in":
            content[at:at] = data
        else:
            del content[at : at + 1 + data[0] ** 2]
    return bytes(content) or b"x"


_FRAGMENTS = [
    *(bytes([code]) for code in (*range(256), *b"}])(t\x85\x86Rb\x81suae")),
    b"K\x01", b"X\x01\x00\x00\x00a", b"\x8c\x01b", b"C\x02ab", b"U\x01x", b"q\x00", b"h\x00",
    *(b"c%s\n%s\n" % tuple(name.rsplit(b" ", 1)) for name in (
        b"argparse Namespace", b"collections OrderedDict", b"__builtin__ set", b"os system",
        b"__builtin__ getattr", b"_codecs encode", b"copy_reg _reconstructor", b"numpy dtype",
        b"numpy ndarray", b"numpy.core.multiarray _reconstruct", b"numpy.core.multiarray scalar",
        b"torch FloatStorage", b"torch._utils _rebuild_tensor_v2",
        b"torch._utils _rebuild_parameter",
    )),
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ",
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4\x89\x88tR",
]  # fmt: skip


@st.composite
def streams(draw):
    """Draw opcodes in any order, as a pickle or as that of a zip."""
    pickled = b"".join(draw(st.lists(st.sampled_from(_FRAGMENTS), min_size=1, max_size=40)))
    if draw(st.booleans()):
        return zip_of({"data.pkl": b"\x80\x02" + pickled + b".", "data/0": bytes(16)})
    return pickled + b"."


def fuzz():
    """Fuzz the readers, in a process of its own because a bug may end it."""
    path = Path(sys.argv[1])

    @settings(
        max_examples=int(sys.argv[2]),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(mutated(), streams()))
    def run(content):
        path.write_bytes(content)
        for read in (read_file, load_torch, load_pickle, load_safetensors):
            try:
                repr(read(path))
            except DataError as error:
                line = str(error)
                assert line.startswith(str(path)) and len(line) < 500 and line.isprintable(), line

    run()


@LINUX
@pytest.mark.slow
def test_chance_finds_nothing_but_documented_errors(tmp_path):
    """Changed headers, cut files, and opcodes in any order; the same ones in every run."""
    code = f"from tests.moco.common.test_security import fuzz; fuzz(); {PEAK}"
    _, peak = in_a_process(code, tmp_path / "x", "800")
    assert peak < 1000


@pytest.mark.slow
def test_truncated_files_and_trailing_bytes_are_errors(tmp_path):
    path = tmp_path / "x"
    for content in seeds():
        path.write_bytes(content)
        read_file(path)
        sizes = range(1, len(content), max(1, len(content) // 60))
        for damaged in (*(content[:size] for size in sizes), content + b"more"):
            path.write_bytes(damaged)
            with pytest.raises(DataError):
                read_file(path)


# ruff's list of banned names (pyproject.toml) covers the other unsafe readers.
UNSAFE = re.compile(
    r"allow_(pickle|unsafe)=(?!False)|weights_only=(?!True)|_module\(.pickle|__import__\("
)


def test_no_source_asks_for_an_unsafe_reader():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > 100
    assert [path for path in paths if UNSAFE.search(path.read_text())] == []
