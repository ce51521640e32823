"""What is given instead of a checkpoint: a run folder; by mistake other networks or detectors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from convert.families.base import families
from moco.common.command import program
from moco.common.errors import DataError

# Keys of whole detectors: torchvision's and DETR's wrap their backbone as `body`.
_DETECTRON2 = re.compile(
    r"proposal_generator\.|roi_heads\.|sem_seg_head\.|backbone\.(stem|bottom_up)\."
)
_OTHERS = re.compile(r"(?:^|\.)(backbone\.(0\.)?body|(rpn|bbox|roi|decode|mask)_head)\.")
_INDEX = re.compile(rb'\s*\{.*"weight_map"', re.DOTALL)


def other_network(keys: Collection[str]) -> str | None:
    """What the owner of these names of a flattened file is called that no family has, or None."""
    keys = {key.replace("/", ".") for key in keys}
    known = [row for family in families() for row in family.lookalikes]
    for what, first, second in known:
        prefixes = {key.removesuffix(first) for key in keys if f".{key}".endswith(f".{first}")}
        if any(prefix + second in keys for prefix in prefixes):
            return what
    return None


def supported() -> str:
    """The networks that are converted, for messages."""
    networks = ", ".join(family.networks for family in families())
    return (
        f"supported are {networks}; docs/guides/converting.md has the known ones, and one with "
        "torchvision's or Detectron2's names under any one prefix is known, too"
    )


def refuse_detector(top: Iterable[str], every: Iterable[str], where: str) -> None:
    """Raise DataError for a whole detector or segmentation network.

    Args:
        top: keys at the top of the file and under "model", where Detectron2 has them.
        every: keys of all its dicts of tensors.
    """
    if any(_OTHERS.search(key) for key in every):
        raise DataError(
            f"{where}: a whole detector or segmentation network of torchvision, DETR or "
            "MMDetection, not a pre-trained backbone, and this project evaluates only Detectron2's "
            "and its own; give the weights that its training started from"
        )
    if any(_DETECTRON2.match(key) for key in top):
        raise DataError(
            f"{where}: a detection model, not a pre-trained backbone; "
            f"give it to {program('train', 'detection/train_net.py')} as MODEL.WEIGHTS with "
            "--eval-only"
        )


def source_file(path: Path) -> Path:
    """The file itself, or the last checkpoint of a run folder of this project.

    Raises DataError: a folder without one, or the JSON that names the files of sharded weights.
    """
    if path.is_dir():
        from moco.engine.checkpoint import last_checkpoint

        return last_checkpoint(path)
    if not path.is_file():
        return path  # the reader names the reason
    with open(path, "rb") as file:
        start = file.read(1 << 16)
    if _INDEX.match(start):
        raise DataError(
            f"{path}: the index of sharded weights, which holds no tensors; save the network as "
            "one file, e.g. by save_pretrained(max_shard_size='10GB')"
        )
    return path
