"""Files that would run code if they were unpickled."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

Q = "module.encoder_q."


class Payload:
    """Writes a file when it is unpickled: by REDUCE, or hidden in an argument or a state."""

    def __init__(self, marker: Path, how: str) -> None:
        self.marker, self.how = marker, how

    def __reduce__(self) -> Any:
        touch = (os.open, (str(self.marker), os.O_CREAT | os.O_WRONLY))
        if self.how == "reduce":
            return touch
        if self.how == "eval":
            return eval, (f"open({str(self.marker)!r}, 'w')",)
        inner = Payload(self.marker, "reduce")
        if self.how == "argument":
            return OrderedDict, ([("a", inner)],)
        return OrderedDict, (), {"state": inner}


HOWS = ["reduce", "eval", "argument", "state"]


def as_pickle(payload: Any, path: Path, protocol: int) -> None:
    path.write_bytes(pickle.dumps({"state_dict": {Q + "conv1.weight": payload}}, protocol))


def as_zip(payload: Any, path: Path, protocol: int) -> None:
    torch.save({"state_dict": {Q + "conv1.weight": payload}}, path, pickle_protocol=protocol)


def as_legacy(payload: Any, path: Path, protocol: int) -> None:
    torch.save(
        {"state_dict": {Q + "conv1.weight": payload}},
        path,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=False,
    )


def as_tar(payload: Any, path: Path, protocol: int) -> None:
    # torch/serialization.py, legacy_load: what torch wrote before version 0.1.10.
    path.write_bytes(tar_of(dict.fromkeys(TAR_PARTS, pickle.dumps(payload, protocol))))


WRITERS = (as_pickle, as_zip, as_legacy, as_tar)
TAR_PARTS = ("sys_info", "storages", "tensors", "pickle")


def tar_of(parts: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def zip_of(parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip file in torch.save's layout, of parts like `data.pkl` and `data/0`."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/version", "3\n")  # torch asks for it
        for name, content in parts.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def checkpoint(**changes: Any) -> dict[str, Any]:
    """facebookresearch/moco's four keys, with others or other values."""
    state = {Q + "conv1.weight": torch.zeros(8, 3, 7, 7), Q + "layer1.0.conv1.weight": None}
    return {"epoch": 200, "arch": "resnet18", "state_dict": state, "optimizer": {}, **changes}


def saved(value: Any, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, pickle_protocol=protocol)
    return file.getvalue()


class Call:
    """Pickled as a call of `function`, with an optional state."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.value = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.value


POINTER = (0x4141414141414141).to_bytes(8, "little")


# Of `corpus`: what this Python, or torch, does not run, but another might.
ASLEEP = {
    "TorchScript",
    "NEWOBJ",
    "NEWOBJ_EX",
    "EXT1",
    "getattr of a known class",
    "reconstructor",
    "functools",
    "array of objects",
    "forged dtype",
    "scalar of objects",
    "array of objects in a torch file",
}


def corpus(marker: Path) -> dict[str, bytes]:
    """Name → content of files that would write `marker`, or crash the process, where unpickled.

    By every writer with every way of hiding it, every protocol among them; then by places in a
    checkpoint, by opcode, and by what is no plain array.
    """
    payload = Payload(marker, "reduce")
    files: dict[str, bytes] = {}
    scratch = marker.parent / "payload"
    for i, write in enumerate(WRITERS):
        for j, how in enumerate(HOWS):
            protocol = (i + j) % 6
            write(Payload(marker, how), scratch, protocol)
            files[f"{write.__name__} {how}, protocol {protocol}"] = scratch.read_bytes()
    scratch.unlink()

    # Where checkpoints hold more than tensors.
    namespace = argparse.Namespace(arch="resnet18", out=payload)
    files |= {
        "hyper_parameters": saved({"hyper_parameters": {"lr": payload}, "state_dict": {}}),
        "Namespace's state": saved(checkpoint(args=namespace)),
        "Namespace's arguments": saved(checkpoint(args=Call(argparse.Namespace, payload))),
        "optimizer": saved(checkpoint(optimizer={"param_groups": [{"lr": payload}]})),
        "metadata of a state dict": saved(
            checkpoint(state_dict=Call(OrderedDict, state={"_metadata": {"": payload}}))
        ),
        "a key": saved(checkpoint(args={(1, payload): 2})),
        "hook of a tensor": saved(
            Call(torch._utils._rebuild_parameter, torch.ones(1), True, payload)
        ),
        "a tensor's bytes": pickle.dumps(
            {"w": Call(torch.storage._load_from_bytes, pickle.dumps(payload))}
        ),
        "CIFAR-10": pickle.dumps(
            {b"data": payload, b"labels": [0], b"filenames": [b"a"]}, protocol=2
        ),
        "Caffe2": pickle.dumps({"blobs": {"conv1_w": payload}}, protocol=2),
        "Detectron2": pickle.dumps({"model": {"stem.conv1.weight": payload}}, protocol=4),
        "legacy machine": _legacy_with(payload),
        "tar, pickle alone": tar_of(
            {
                "storages": pickle.dumps(0, 2) + pickle.dumps([], 2),
                "tensors": pickle.dumps(0, 2),
                "pickle": pickle.dumps(payload, 2),
            }
        ),
        "byteorder": zip_of({"data.pkl": pickle.dumps(payload, 2), "byteorder": b"little"}),
        "TorchScript": zip_of(
            {"data.pkl": b"}.", "constants.pkl": pickle.dumps(payload), "code/x.py": b"import os"}
        ),
    }
    try:
        from omegaconf import OmegaConf
        from omegaconf.nodes import AnyNode
    except ImportError:
        pass
    else:
        config = OmegaConf.create({"a": 1})
        node = AnyNode(1)
        node.__dict__["_val"] = payload
        config.__dict__["_content"]["a"] = node
        files["omegaconf node"] = saved(checkpoint(hyper_parameters=config))

    # By opcode.
    command = f"touch {marker}".encode()
    text = b"\x8c" + bytes([len(command)]) + command
    files |= {
        "INST": b"(S'" + command + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + command + b"'\no.",
        "GLOBAL": b"cos\nsystem\n(S'" + command + b"'\ntR.",
        "GLOBAL, posix": b"cposix\nsystem\n(S'" + command + b"'\ntR.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text + b"\x85R.",
        "STACK_GLOBAL, dotted": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93" + text + b"\x85R.",
        "NEWOBJ": b"\x80\x04\x8c\x0asubprocess\x8c\x05Popen\x93]\x8c\x02sha\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04\x8c\x0asubprocess\x8c\x05Popen\x93]\x8c\x02sha\x85}\x92.",
        "EXT1": b"\x80\x02\x82\x01.",
        "getattr": b"c__builtin__\ngetattr\n(c__builtin__\n__import__\n(S'os'\ntRS'system'\ntR(S'"
        + command
        + b"'\ntR.",
        "getattr of a known class": (
            b"c__builtin__\ngetattr\n(c__builtin__\ngetattr\n(cargparse\nNamespace\nS'__init__'\ntR"
            b"S'__globals__'\ntR."
        ),
        "reconstructor": b"ccopy_reg\n_reconstructor\n(cos\nsystem\nc__builtin__\nobject\nNtR.",
        "eval behind a memo": b"c__builtin__\neval\np0\n0g0\n(S'open(\""
        + str(marker).encode()
        + b'", "w")\'\ntR.',
        "a state with a call": b"cargparse\nNamespace\n)R(S'a'\ncos\nsystem\n(S'"
        + command
        + b"'\ntRdb.",
        "functools": b"cfunctools\npartial\n(cos\nsystem\nS'" + command + b"'\ntR.",
    }

    # Arrays that would make bytes of the file into pointers.
    objects = np.dtype("O")
    reconstruct = np.zeros(1).__reduce__()[0]
    forged = (3, "|", None, ("a",), {"a": (objects, 0)}, 8, 1, 27)
    files |= {
        "array of objects": pickle.dumps(
            {
                "w": Call(
                    reconstruct, np.ndarray, (0,), b"b", state=(1, (1,), objects, False, POINTER)
                )
            }
        ),
        "forged dtype": pickle.dumps(
            {"w": Call(np.dtype, "V8", False, True, state=forged)}, protocol=2
        ),
        "scalar of objects": pickle.dumps(
            {"w": Call(np.float32(1).__reduce__()[0], objects, POINTER)}, protocol=2
        ),
        "array of objects in a torch file": saved(
            checkpoint(x=Call(np.zeros(1).__reduce_ex__(5)[0], POINTER, objects, (1,), "C"))
        ),
    }
    return files


def harmless(marker: Path) -> dict[str, bytes]:
    """Return the pickles where nothing unpickles them: as text and as the bytes of a tensor."""
    from safetensors.torch import save

    pickled = pickle.dumps(Payload(marker, "reduce"), 0)
    data = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    parts = {"data.pkl": b"\x80\x02}.", "comment": pickled, ".data/serialization_id": pickled}
    return {
        "safetensors metadata": save({"w": torch.ones(1)}, {"a": pickled.decode()}),
        "safetensors contract": save({"w": torch.ones(1)}, {"contract": pickled.decode()}),
        "a tensor": saved({"state_dict": {Q + "conv1.weight": data}}),
        "other entries of a zip": zip_of(parts),
        "another byte order": zip_of({"data.pkl": b"\x80\x02}.", "byteorder": pickled}),
    }


def _legacy_with(payload: Any) -> bytes:
    """Return a legacy file with the payload in its record of the machine, a pickle, too."""
    file = io.BytesIO()
    values: list[Any] = [torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": payload}, {}, []]
    for value in values:
        pickle.dump(value, file, protocol=2)
    return file.getvalue()
