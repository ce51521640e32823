"""Small files whose content takes far more memory or time than their size."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.oracles.payloads import Call, saved, zip_of

HUGE = 2**62
LONG = 10**12
MANY = 1_200_000  # opcodes


def bombs() -> dict[str, bytes]:
    """Name → content. Read without care, most take gigabytes, hours, or the process with them."""
    return dict([*_pickles(), *_tensors(), *_zips(), *_legacy(), *_joined(), *_safetensors()])


def png_bomb(side_px: int = 20_000) -> bytes:
    """Return a PNG of one bit per pixel: 400 megapixels in 49 KB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        content = kind + data
        return struct.pack(">I", len(data)) + content + struct.pack(">I", zlib.crc32(content))

    header = struct.pack(">IIBBBBB", side_px, side_px, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(side_px * (1 + side_px // 8)), 9)
    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _pickles() -> Iterator[tuple[str, bytes]]:
    for name, value in (
        ("bytearray of a size", Call(bytearray, LONG)),
        ("bytes of a size", Call(bytes, LONG)),
        ("list of a range", Call(list, range(LONG))),
        ("array of a size", Call(np.ndarray, (LONG,))),
        ("shape without data", _array((LONG,), b"")),
    ):
        yield name, pickle.dumps({"w": value}, protocol=2)
    yield "BINBYTES8", b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b"x."
    yield "BINUNICODE8", b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x."
    yield "BYTEARRAY8", b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x."
    yield "LONG4", b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x."
    yield "LONG4, negative", b"\x80\x02\x8b" + struct.pack("<i", -1) + b"x."
    yield (
        "a number of a million bytes",
        b"\x80\x02\x8b" + struct.pack("<i", 10**6) + b"x" * 10**6 + b".",
    )
    yield "LONG of many digits", b"L" + b"9" * 10**6 + b"L\n."
    yield "FRAME", b"\x80\x04\x95" + struct.pack("<Q", HUGE) + b"}."
    # An unpickler with an array for its memo allocates 64 GB.
    yield "LONG_BINPUT", b"}r" + struct.pack("<I", 2**32 - 1) + b"."
    yield "PUT", b"}p4294967295\n."
    yield "nested lists", b"]" * 200_000 + b"a" * 199_999 + b"."
    yield "nested tuples", b")" + b"\x85" * 200_000 + b"."
    yield "a nested key", b"})" + b"\x85" * 200_000 + b"Ns."
    nested = b")" + b"\x85" * 200_000
    yield "a nested name of a dtype", b"cnumpy\ndtype\n" + nested + b"\x89\x88\x87R."
    yield "a nested encoding", b"c_codecs\nencode\n" + _text("a") + nested + b"\x86R."
    yield "a key of 2**60 parts", b"})" + b"2\x86" * 60 + b"Ns."
    yield "a list of 2**60 parts", b")" + b"2\x86" * 60 + b"."
    yield "a list that contains itself", b"]q\x00h\x00a."
    yield (
        "an object that contains itself",
        b"cargparse\nNamespace\n)Rq\x00}X\x01\x00\x00\x00ah\x00sb.",
    )
    yield "marks", b"(" * 200_000 + b"."
    yield "empty sets", b"\x80\x04" + b"\x8f" * MANY + b"."
    ints = b"](" + b"K\x01" * 100_000 + b"e"
    again = b"h\x00h\x01R" * (MANY // 5)
    yield "sets of one list", b"cbuiltins\nset\nq\x00" + ints + b"\x85q\x01" + again + b"."
    data = b"B" + struct.pack("<I", 10**7) + bytes(10**7)
    yield "copies of bytes", b"cbuiltins\nbytearray\nq\x00" + data + b"\x85q\x01" + again + b"."
    items = b"}(" + b"".join(b"M" + struct.pack("<H", i) + b"N" for i in range(60_000)) + b"u"
    namespace = b"cargparse\nNamespace\nq\x00" + items + b"q\x01"
    yield "copies of a state", namespace + b"h\x00)Rh\x01b" * (MANY // 5) + b"."
    path = b"X" + struct.pack("<I", 10**7) + b"a/" * (10**7 // 2)
    yield from _quadratic()
    yield "a path of many parts", b"cpathlib\nPosixPath\n" + path + b"\x85R."


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(value: int) -> bytes:
    encoded = pickle.encode_long(value)
    return b"\x8b" + struct.pack("<i", len(encoded)) + encoded


def _quadratic() -> Iterator[tuple[str, bytes]]:
    """Return pickles that take hours, or the square of their size, to read or to walk through."""

    def keys(some: Iterator[bytes], end: bytes = b"u") -> bytes:
        return b"\x80\x04}(" + b"".join(key + b"N" for key in some) + end + b"."

    # Python's hash of a number is its remainder by 2**61 - 1, and that of a tuple is no secret.
    same = 2**61 - 1
    yield "numbers of one hash", keys(_number(same * i) for i in range(1, 60_000))
    put = b"".join(b"p%d\n" % (same * i) for i in range(60_000))
    yield "places of one hash", b"N" + put + b"."
    one = b"".join(_number(same * i) for i in range(1, 60_000))
    yield "a set of numbers of one hash", b"\x80\x04\x8f(" + one + b"\x90."
    yield "a set made of them", b"\x80\x04cbuiltins\nset\n](" + one + b"e\x85R."
    pairs = b"".join(_number(same * i) + b"N\x86" for i in range(1, 60_000))
    yield "pairs of them", b"\x80\x04ccollections\nOrderedDict\n](" + pairs + b"e\x85R."
    yield "tuples as keys", keys(_number(same * i) + b"\x85" for i in range(1, 60_000))
    yield "floats as keys", keys(b"G" + struct.pack(">d", i + 0.5) for i in range(60_000))
    text = _text("a" * 10**6)
    yield "a key of a million letters", keys(iter([text]))
    rows = b"(" + text + b"\x94" + b"h\x00" * 63 + b"t\x94" + b"0(" + b"h\x01" * 64 + b"t"
    yield "a key of four billion letters", b"\x80\x04}(" + rows + b"Nu."
    for bits in (4000, 160_000):
        shape = b"(K\x01(" + _number(1 << bits) + b"\x94" + b"h\x00" * 100_000 + b"t"
        dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00f4\x89\x88\x87R"
        start = (
            b"\x80\x04cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
        )
        yield f"{bits} bits in a shape", start + shape + dtype + b"\x89C\x04aaaatb."
    shape = b"(" + b"M\xff\xff" * 100_000 + b"t"
    yield "a shape of many sizes", start + b"(K\x01" + shape + dtype + b"\x89C\x04aaaatb."
    buffer = b"\x80\x04cnumpy.core.numeric\n_frombuffer\n(C\x04aaaa" + dtype
    yield "a buffer of many sizes", buffer + shape + b"X\x01\x00\x00\x00CtR."
    yield "a buffer of many axes", buffer + b"K\x01\x85X\x01\x00\x00\x00K" + shape + b"tR."
    # float() of it overflows.
    yield "10**400", pickle.dumps({"epoch": 10**400}, 2)
    yield "10**5000", pickle.dumps({"epoch": 10**5000}, 2)


def _array(shape: Any, data: bytes) -> Call:
    reconstruct = np.zeros(1).__reduce__()[0]
    dtype = np.dtype("f4")
    return Call(reconstruct, np.ndarray, (0,), b"b", state=(1, shape, dtype, False, data))


def _view(shape: Any, stride: Any, offset: int = 0, count: int = 4, key: str = "0") -> bytes:
    """Return a pickle of one tensor over the storage `data/0`."""
    file = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    storage = ("storage", None, key, "cpu", count)
    part = pickle.dumps(storage, 2)[2:-1].replace(b"N", b"ctorch\nFloatStorage\n", 1)
    items = b"".join(pickle.dumps(v, 2)[2:-1] for v in (offset, shape, stride, False, None))
    return file + part + b"Q" + items + b"tR."


def _tensors() -> Iterator[tuple[str, bytes]]:
    for name, args in {
        "more elements than the storage": ((2**40,), (1,)),
        "an expanded tensor": ((2**40,), (0,)),
        "expanded in two": ((2**31, 2**31), (0, 0)),
        "a stride beyond": ((2, 2), (HUGE, 1)),
        "sizes that overflow": ((2**33, 2**33), (1, 1)),
        "a negative stride": ((2,), (-1,)),
        "a negative size": ((-2,), (1,)),
        "sizes that are text": (("a",), (1,)),
        "a thousand dimensions": ((1,) * 1000, (1,) * 1000),
        "an offset beyond": ((1,), (1,), 5),
        "a negative offset": ((1,), (1,), -1),
        "a storage beyond": ((1,), (1,), 0, 2**40),
        "a missing storage": ((1,), (1,), 0, 4, "7"),
    }.items():
        yield name, zip_of({"data.pkl": _view(*args), "data/0": bytes(16)})
    meta = Call(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (HUGE,), (1,), False)
    for name, value in {
        "torch.Tensor of sizes": Call(torch.Tensor, 10**6, 10**6),
        "torch.FloatTensor of sizes": Call(torch.FloatTensor, 10**6, 10**6),
        "a storage of a size": Call(torch.UntypedStorage, LONG),
        "a meta tensor": [meta, meta],
        "torch.Size": Call(torch.Size, (2**70,)),
        "a device": Call(torch.device, "x" * 10**5),
    }.items():
        yield name, saved({"state_dict": {"w": value}})
    new = b"ctorch\nTensor\nJ\x40\x42\x0f\x00J\x40\x42\x0f\x00\x86\x81."
    yield "torch.Tensor by NEWOBJ", zip_of({"data.pkl": b"\x80\x02" + new})


def _zips() -> Iterator[tuple[str, bytes]]:
    good = {"data.pkl": _view((4,), (1,)), "data/0": bytes(16)}
    compressed = {"data.pkl": _view((10**7,), (1,), count=10**7), "data/0": bytes(4 * 10**7)}
    yield "compressed", zip_of(compressed, zipfile.ZIP_DEFLATED)
    content = zip_of(good)
    at = content.rindex(b"PK\x01\x02")
    for name, size in (("a part of 4 GB", 2**32 - 2), ("a part of 1 GB", 2**30)):
        field = struct.pack("<II", size, size)
        yield name, content[: at + 20] + field + content[at + 28 :]
    # The last record of the list, again and again: each says it holds the whole.
    end = content.rindex(b"PK\x05\x06")
    first = content.index(b"PK\x01\x02")
    record = content[at:end]
    for name, count in (("one part by many names", 60_000), ("a list of 30 MB", 600_000)):
        records = content[first:end] + record * count
        tail = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 65535, 65535, len(records), first, 0)
        yield name, content[:first] + records + tail
    tail = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, 2**32 - 2, 0, 0)
    yield "a list of 4 GB", content[:end] + tail
    yield "two pickles", zip_of({**good, "../archive/data.pkl": b"}."})


def _legacy_file(pickled: bytes, keys: Any, rest: bytes) -> bytes:
    start = (torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": True})
    return b"".join(pickle.dumps(v, 2) for v in start) + pickled + pickle.dumps(keys, 2) + rest


def _legacy() -> Iterator[tuple[str, bytes]]:
    def view(count: int, view_of: Any = None) -> bytes:
        identity = pickle.dumps(("storage", None, "0", "cpu", count, view_of), 2)[2:-1]
        identity = identity.replace(b"N", b"ctorch\nFloatStorage\n", 1)
        items = b"".join(pickle.dumps(v, 2)[2:-1] for v in (0, (1,), (1,), False, None))
        return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + identity + b"Q" + items + b"tR."

    four = struct.pack("<q", 4) + bytes(16)
    yield "legacy, a storage beyond", _legacy_file(view(2**40), ["0"], four)
    yield "legacy, another size", _legacy_file(view(4), ["0"], struct.pack("<q", 2**40) + bytes(16))
    yield "legacy, a negative size", _legacy_file(view(-4), ["0"], four)
    yield "legacy, a view beyond", _legacy_file(view(4, ("1", 2, 2**40)), ["0"], four)
    yield "legacy, a missing storage", _legacy_file(view(4), [], b"")
    nested = b"\x80\x02](" + b"(" + _text("a" * 10**6) + b"q\x00" + b"h\x00" * 20_000 + b"l" + b"e."
    start: Any = (torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": True}, [])
    yield "legacy, nested keys", b"".join(pickle.dumps(v, 2) for v in start) + nested
    for name, call in (
        ("sparse_tensor", b"h\x00)R"),
        ("qtensor", b"h\x00)R"),
        ("meta_tensor_no_storage", b"h\x00(ctorch\nfloat32\n))\x89tR"),
    ):
        function = b"\x80\x02ctorch._utils\n_rebuild_" + name.encode() + b"\nq\x00"
        yield (
            f"legacy, many of {name}",
            _legacy_file(function + b"(" + call * 320_000 + b"l.", [], b""),
        )


def _joined() -> Iterator[tuple[str, bytes]]:
    value = {"w": torch.ones(1)}
    legacy = io.BytesIO()
    torch.save(value, legacy, _use_new_zipfile_serialization=False)
    yield "more bytes, zip", saved(value) + b"more"
    yield "more bytes, legacy", legacy.getvalue() + b"more"
    yield "more bytes, pickle", pickle.dumps({"a": 1}, 2) + b"more"


def _safetensors() -> Iterator[tuple[str, bytes]]:
    def file(header: Any, data: bytes = bytes(16)) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    def one(**changes: Any) -> dict[str, Any]:
        return {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}

    yield "safetensors, a header of 2**60", struct.pack("<Q", 2**60) + b"{}"
    yield "safetensors, a header of 40 GB", struct.pack("<Q", 40 * 10**9) + b"{}"
    yield "safetensors, a header of 20 MB", file(b"{" + b" " * 20_000_000 + b"}")
    yield "safetensors, overlapping", file({**one(), "v": one()["w"]})
    yield "safetensors, beyond", file(one(shape=[2**40], data_offsets=[0, 2**42]))
    yield "safetensors, another shape", file(one(shape=[2**40]))
    yield "safetensors, sizes that overflow", file(one(shape=[2**33, 2**33]))
    yield "safetensors, backwards", file(one(data_offsets=[16, 0]))
    many = {f"t{i}": {**one()["w"], "shape": [0], "data_offsets": [0, 0]} for i in range(200_000)}
    yield "safetensors, many empty tensors", file(many, b"")
    yield "safetensors, nested", file(b'{"w":' * 100_000)
    yield "safetensors, no dictionary", file(b"{" + b"[" * 1000)
