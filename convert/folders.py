"""Files of weights in folders of the Hugging Face Hub, of training frameworks, and of this project.

Every folder is read through one file in it. That of a checkpoint in several files names the others
(moco/common/sharded.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from moco.common.command import quoted
from moco.common.errors import DataError, first_few, shown
from moco.common.files import PathLike, open_file, sha256_file
from moco.common.pretrained import HUB_FILES, LocalWeights, locate
from moco.common.sharded import METADATA, PART_NAME, files_of

# Files that hold the network of a folder, the first one that exists. Lightning's ModelCheckpoint
# writes the last of them; accelerate/utils/fsdp_utils.py, save_fsdp_model, those in between.
FILES = (
    *HUB_FILES,
    METADATA,
    "pytorch_model_fsdp.bin",
    f"pytorch_model_fsdp_0/{METADATA}",
    "last.ckpt",
    "checkpoints/last.ckpt",
)
_STATES = "mp_rank_*_model_states.pt"


def find_file(weights: PathLike) -> LocalWeights:
    """Return the file of weights that an argument names, downloaded if necessary.

    Raises:
        UserError: See `moco.common.pretrained.locate`.
        DataError: See `source_file`.
    """
    located = locate(weights)
    return dataclasses.replace(located, path=source_file(located.path))


def source_file(path: Path) -> Path:
    """Return the path itself, or for a folder the file that holds its network.

    Raises:
        DataError: If the folder has no weights, several networks, or only parts of one.
    """
    if not path.is_dir():
        return path  # `read_file` reports a missing file
    found = next((path / name for name in FILES if (path / name).is_file()), None)
    if found is not None:
        # accelerate/checkpointing.py, save_accelerator_state: further models are numbered.
        others = sorted(path.glob(f"{found.stem}_[1-9]{found.suffix}"))
        if others:
            raise DataError(f"{path}: has several networks; give {found} or {_first(others)}")
        return found
    if (found := _deepspeed(path)) is not None:
        return found
    from moco.engine.checkpoint import list_checkpoints

    if saved := list_checkpoints(path):
        return saved[-1]
    checkpoints = [file for file in sorted(path.glob("*.ckpt")) if file.is_file()]
    if len(checkpoints) == 1:
        return checkpoints[0]
    below = [one for one in sorted(path.iterdir()) if any((one / f).is_file() for f in FILES)]
    if choices := checkpoints or below:
        raise DataError(f"{path}: has several checkpoints; give one, such as {_first(choices)}")
    raise DataError(
        f"{path}: is a folder without weights, such as {first_few(HUB_FILES, 2)}, last.ckpt or "
        "checkpoint_*.pth.tar; give a file"
    )


def _first(paths: list[Path]) -> str:
    return first_few([shown(str(path), 300)[1:-1] for path in paths], 3)


def _deepspeed(folder: Path) -> Path | None:
    """Return the file of a network that DeepSpeed saved in a folder, or None.

    It has a folder for each step, of which `latest` has the name. With ZeRO-3 and tensor
    parallelism the network is in shards, which DeepSpeed's own program joins.

    Raises:
        DataError: If the network is in shards.
    """
    inside = folder
    if (latest := folder / "latest").is_file():
        with open_file(latest, "r", encoding="utf-8", errors="replace") as file:
            name = file.read(300).strip()
        inside = folder / name if PART_NAME.fullmatch(name) else folder
    states = sorted(inside.glob(f"*{_STATES}"))
    if [file.name for file in states] == [_STATES.replace("*", "00")]:
        return states[0]
    if states or list(inside.glob("*_optim_states.pt")):
        words = [folder] if latest.is_file() else [folder.parent, "--tag", folder.name]
        raise DataError(
            f"{folder}: a checkpoint of DeepSpeed in shards; for a folder that you trust, as this "
            f"runs code in it: python -m deepspeed.utils.zero_to_fp32 {quoted(*words)} out; then "
            "give out"
        )
    return None


def digests(path: Path) -> tuple[str, dict[str, str]]:
    """Return the SHA-256 of a file, and of a checkpoint in several files those of all by name.

    The first is then that of the output of `sha256sum` for them.
    """
    if not (files := files_of(path)):
        return sha256_file(path), {}
    each = {file.name: sha256_file(file) for file in files}
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in each.items())
    return hashlib.sha256(lines.encode()).hexdigest(), each
