"""The collective calls of a pre-training on several processes, on the CPU or on pretended GPUs."""

import re
from contextlib import nullcontext
from pathlib import Path

Call = tuple[str, str, list[str]]


def collectives(folder: Path, device: str, mechanism: str) -> list[Call]:
    """Pre-train; return function, name and devices of each collective call of this process."""
    # Imported when the variables tell which GPU is this process's.
    from tests.oracles import pretend_cuda, pretend_driver
    from tests.oracles.device_cases import pretrain

    if device == "cuda":
        pretend_driver.install()
    keys: dict[str, object] = {"MOCO.MECHANISM": mechanism, "MOCO.SHUFFLE_BY": "all_to_all"}
    if mechanism == "moco_v3":
        keys |= {"MOCO.K": 4, "MOCO.BN_SPLITS": 1, "MOCO.SHUFFLE_BN": False}
    with nullcontext() if device == "cuda" else pretend_cuda.Operations():
        pretrain(folder, **keys)(f"{device} {mechanism}", 3, DEVICE=device)
    return [
        (re.sub(r":\d+", "", place), name, devices)
        for place, name, devices in pretend_cuda.collectives
    ]
