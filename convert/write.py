"""The formats that a conversion can write, and reading them back.

| names of tensors | .pth | .pkl | .safetensors |
|---|---|---|---|
| Detectron2's, with the contract | yes | yes: numpy arrays | yes: the contract in the metadata |
| torchvision's, a plain state dict | yes | no | yes |

Plain Detectron2 loads its `.pth` and `.pkl`; this project loads all three.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.contract import IMAGENET_MEAN, IMAGENET_STD, InputContract, numbers
from convert.read import read_file, to_tensor
from moco.common.errors import UserError
from moco.common.files import atomic_torch_save, atomic_write, cannot_write

if TYPE_CHECKING:
    from torch import Tensor

    from convert.prove import Converted

SUFFIXES = {
    "detectron2": (".pth", ".pkl", ".safetensors"),
    "torchvision": (".pth", ".safetensors"),
}
AUTHOR = "moco-transfer"


def write(path: Path, converted: Converted, to: str) -> None:
    """Write tensors to a new file in the format of its ending, with `to`'s names.

    Raises UserError: torchvision has no such network, or the file cannot be written.
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
    # The same four keys as the official converter's .pkl, and the contract; Detectron2's
    # DetectionCheckpointer matches names by their endings because of "matching_heuristics".
    beside: dict[str, Any] = {
        "__author__": AUTHOR,
        "matching_heuristics": True,
        "contract": contract.to_dict(),
    }
    if path.suffix == ".pth":
        atomic_torch_save(path, {"model": model, **beside})
    elif path.suffix == ".safetensors":
        texts = {"__author__": AUTHOR, "contract": json.dumps(beside["contract"])}
        _write_safetensors(path, model, texts)
    else:
        content = {"model": {k: v.numpy() for k, v in model.items()}, **beside}
        atomic_write(path, lambda file: pickle.dump(content, file, protocol=4))


def read_back(path: Path, contract: InputContract, to: str) -> Converted:
    """What `write` wrote, in Detectron2's names; torchvision's files have no contract of their own.

    Raises DataError: unreadable or unsound.
    """
    from convert import prove

    if to == "detectron2":
        return prove.read_converted(path)
    state = {
        contract.family.to_detectron2(key) or key: to_tensor(key, value, str(path))
        for key, value in read_file(path).items()
    }
    prove.check_model(state, contract, str(path))
    return prove.Converted(state, contract)


def lost_options(contract: InputContract) -> list[str]:
    """Options of the converter that say again what a plain state dict does not say."""
    pixels, options = contract.pixels, []
    if pixels.channel_order != "RGB":
        options.append(f"--channel-order {pixels.channel_order}")
    for name, values, usual in (
        ("mean", pixels.mean, IMAGENET_MEAN),
        ("std", pixels.std, IMAGENET_STD),
    ):
        if values != usual:
            options.append(f"--{name} {numbers(values).strip('[]').replace(',', '')}")
    return options + contract.architecture.lost_options()


def _write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    storages: set[int] = set()
    own = {}
    for key, value in tensors.items():
        # The package refuses tensors that share memory.
        address = value.untyped_storage().data_ptr()
        own[key] = value.clone() if address in storages else value
        storages.add(address)
    try:
        # "format" is what the loaders of other packages ask for.
        save_file(own, path, {"format": "pt", **metadata})
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except Exception as error:  # the package has no documented kinds
        written = path.stat().st_size if path.exists() else 0
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise cannot_write(path, OSError(reason[:200]), written) from error
