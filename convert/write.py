"""Output formats of a conversion.

| tensor names | .pth | .pkl | .safetensors |
|---|---|---|---|
| Detectron2's, with the contract | yes | yes: numpy arrays | yes: the contract in the metadata |
| torchvision's, a plain state dict | yes | no | yes |

Plain Detectron2 loads the `.pth` and `.pkl`; this project loads all three.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.contract import IMAGENET_MEAN, IMAGENET_STD, InputContract, format_numbers
from convert.read import CONVERSION, read_file, to_tensor
from moco.common.errors import UserError
from moco.common.files import atomic_torch_save, atomic_write, open_file, write_error

if TYPE_CHECKING:
    from torch import Tensor

    from convert.verify import Converted

SUFFIXES = {
    "detectron2": (".pth", ".pkl", ".safetensors"),
    "torchvision": (".pth", ".safetensors"),
}
AUTHOR = "moco-transfer"


def write(path: Path, converted: Converted, to: str, sha256: str = "") -> None:
    """Write tensors to a new file in the format of its extension.

    Args:
        path: Output file.
        converted: Tensors and input contract.
        to: Naming scheme, "detectron2" or "torchvision".
        sha256: SHA-256 of the source; a `.pth` with Detectron2's names then records the source, the
            origin and the notes of the conversion, so that runs from the file report them.

    Raises:
        UserError: If torchvision has no such network, or the file cannot be written.
    """
    model, contract = converted.model, converted.contract
    if to == "torchvision":
        if problem := contract.architecture.in_torchvision():
            raise UserError(f"--to torchvision: {problem}")
        original = contract.family.from_detectron2
        state = {original(key) or key: value for key, value in model.items()}
        if path.suffix == ".pth":
            atomic_torch_save(path, state)
        else:
            _write_safetensors(path, state, {})
        return
    # The keys of the official converter's .pkl and the contract. "matching_heuristics" lets
    # Detectron2's DetectionCheckpointer match names by suffix.
    metadata: dict[str, Any] = {
        "__author__": AUTHOR,
        "matching_heuristics": True,
        "contract": contract.to_dict(),
    }
    if path.suffix == ".pth":
        if sha256:
            texts = {"origin": [*converted.origin], "notes": [*converted.notes]}
            metadata[CONVERSION] = {"sha256": sha256, **texts}
        atomic_torch_save(path, {"model": model, **metadata})
    elif path.suffix == ".safetensors":
        header = {"__author__": AUTHOR, "contract": json.dumps(metadata["contract"])}
        _write_safetensors(path, model, header)
    else:
        content = {"model": {k: v.numpy() for k, v in model.items()}, **metadata}
        atomic_write(path, lambda file: pickle.dump(content, file, protocol=4))


def read_back(path: Path, contract: InputContract, to: str) -> Converted:
    """Read the output of `write` back, in Detectron2's names.

    Args:
        path: File to read.
        contract: Input contract, which files in torchvision's names do not hold.
        to: Naming scheme, "detectron2" or "torchvision".

    Raises:
        DataError: If it is unreadable or unsound.
    """
    from convert import verify

    if to == "detectron2":
        return verify.read_converted(path)
    state = {
        contract.family.to_detectron2(key) or key: to_tensor(key, value, str(path))
        for key, value in read_file(path).items()
    }
    verify.check_model(state, contract, str(path))
    return verify.Converted(state, contract)


def lost_options(contract: InputContract) -> list[str]:
    """Return the converter's options that restore what a plain state dict does not record."""
    pixels, options = contract.pixels, []
    if pixels.channel_order != "RGB":
        options.append(f"--channel-order {pixels.channel_order}")
    for name, values, usual in (
        ("mean", pixels.mean, IMAGENET_MEAN),
        ("std", pixels.std, IMAGENET_STD),
    ):
        if values != usual:
            options.append(f"--{name} {format_numbers(values).strip('[]').replace(',', '')}")
    return options + contract.architecture.lost_options()


def _write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    storages: set[int] = set()
    own = {}
    for key, value in tensors.items():
        # safetensors refuses tensors that share memory.
        address = value.untyped_storage().data_ptr()
        own[key] = value.clone() if address in storages else value
        storages.add(address)
    try:
        # Loaders of other packages require "format".
        save_file(own, path, {"format": "pt", **metadata})
        with open_file(path) as file:
            os.fsync(file.fileno())
    except Exception as error:  # safetensors does not document its exceptions
        written = path.stat().st_size if path.exists() else 0
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise write_error(path, OSError(reason[:200]), written) from error
