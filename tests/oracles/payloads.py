"""Files that would run code if they were unpickled."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

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
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "storages", "tensors", "pickle"):
            content = pickle.dumps(payload, protocol)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


WRITERS = (as_pickle, as_zip, as_legacy, as_tar)
