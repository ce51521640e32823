"""From an opened file to checked tensors in Detectron2's names and their contract, in memory."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from convert import verify
from convert.contract import IMAGENET_MEAN, IMAGENET_STD, InputContract
from convert.families import keymap
from convert.files import about_objects, is_converted
from convert.sources import Given, Recognized, from_contract, recognize
from convert.targets import lost_options
from convert.verify import Converted
from moco.common.errors import UserError
from moco.common.files import sha256_file
from moco.modeling.archs import EncoderSpec
from moco.modeling.soundness import check_trained

# torchvision's files carry the start of their sha256 in their names: resnet50-11ad3fa6.pth. Only
# the whole file tells V2 from V1; their tensors have the same names and shapes.
TORCHVISION_V2 = "11ad3fa6"


ROOT = Path(__file__).resolve().parent.parent
# A task for each kind of block, what its file sets of the network, and the data it has to be told.
_SMALL = ("R_18_C4_small", {"DEPTH": 18, "RES2_OUT_CHANNELS": 64}, "DATASETS.VOC_DIR path/to/voc ")
_PAPER = ("R_50_C4_24k", {"DEPTH": 50}, "")


def script(path: str) -> str:
    """The command that runs a file of this project from the current folder."""
    return f"python {_here(path)}"


def fine_tune_command(contract: InputContract, path: Path) -> str:
    """The whole command that fine-tunes a small detector from a converted file."""
    task, settings, data = _PAPER if contract.depth >= 50 else _SMALL
    keys = contract.d2_keys()
    others = "".join(
        f"{key} {keys[key]} "
        for name, value in settings.items()
        if keys[key := f"MODEL.RESNETS.{name}"] != value
    )
    config = _here(f"configs/voc/faster_rcnn_{task}.yaml")
    return (
        f"{script('detection/train_net.py')} --config-file {config} {data}"
        f"MODEL.WEIGHTS {shlex.quote(str(path))} {others}OUTPUT_DIR {_run_folder(path)}"
    )


def classify_command(contract: InputContract, path: Path) -> str:
    """The command that classifies with torchvision's names, or converts them where it cannot."""
    file = shlex.quote(str(path))
    stem = "" if contract.stem == "imagenet" else contract.stem
    readable = contract.channel_order == "RGB" and not contract.stride_in_1x1
    try:
        EncoderSpec.of_shape(
            contract.stem,
            contract.depth,
            contract.num_groups,
            contract.width_per_group,
            contract.stem_out_channels,
        )
    except UserError:
        readable = False
    if not readable:
        options = " ".join(lost_options(contract))
        return f"{script('convert/convert_to_d2.py')} {file} weights.pth {options}".rstrip()
    keys = f"MODEL.STEM {stem} " if stem else ""
    for key, values, usual in (
        ("MEAN", contract.pixel_mean, IMAGENET_MEAN),
        ("STD", contract.pixel_std, IMAGENET_STD),
    ):
        if values != usual:
            numbers = ",".join(f"{value / 255:.6g}" for value in values)
            keys += f"AUG.{key} '({numbers})' "
    return (
        f"python -m moco.linear --config-file {_here('configs/imagenet/linear.yaml')} "
        f"--checkpoint {file} {keys}DATA.ROOT path/to/imagenet OUTPUT_DIR {_run_folder(path)}"
    )


def _here(path: str) -> str:
    """A path in this project as the current folder sees it."""
    return path if Path.cwd() == ROOT else shlex.quote(str(ROOT / path))


def _run_folder(path: Path) -> str:
    return shlex.quote(f"runs/{path.stem}_0")


def translate(
    src: Path, raw: Any, given: Given, objects: Collection[str] = ()
) -> tuple[Recognized, Converted]:
    """Recognize, translate, give a contract, and check every tensor.

    Args:
        src: the file, for its sha256 and for messages.
        raw: what `read_file` returned for it; a converted file keeps what its contract says.
        given: what to take instead of what the file or its layout says.
        objects: names that `read_file` gave for it.

    Raises UserError or DataError, in one line.
    """
    sha256 = sha256_file(src)
    source_sha256 = sha256
    if is_converted(raw):
        earlier = verify.read_converted(src, raw)
        source_sha256 = earlier.contract.source_sha256
        found = from_contract(earlier.model, earlier.contract, str(src), given)
    else:
        found = recognize(raw, str(src), given)
    for known, new in zip((found.notes, found.warnings), about_objects(objects), strict=True):
        known.extend(new)
    if sha256.startswith(TORCHVISION_V2):
        found.warnings.append(
            "these are torchvision's IMAGENET1K_V2 weights, another recipe than any baseline of "
            "the paper's time; IMAGENET1K_V1 is resnet50-0676ba61.pth"
        )
    order = given.channel_order or found.channel_order
    reverse = order != found.channel_order
    for name in ("mean", "std", "channel_order", "stride_in_1x1"):
        if getattr(given, name) is not None:
            found.notes.append(f"{name.replace('_', ' ')} is the command line's, not the source's")
    try:
        contract = InputContract(
            pixel_mean=given.mean or (found.mean[::-1] if reverse else found.mean),
            pixel_std=given.std or (found.std[::-1] if reverse else found.std),
            channel_order=order,
            stride_in_1x1=found.stride_in_1x1,
            source=found.source,
            source_sha256=source_sha256,
            encoder=found.encoder,
            **found.shape,
        )
    except UserError as error:
        raise UserError(f"{src}: {error}") from error
    model = {keymap.to_detectron2(key) or key: value for key, value in found.state.items()}
    # Before the numbers: a network that starts with scales of zero is called untrained.
    found.warnings.extend(
        check_trained(found.state, str(src), found.named, folded=contract.bn_folded)
    )
    verify.check_model(
        model, contract, str(src), lambda key: found.named(keymap.from_detectron2(key) or key)
    )
    return found, Converted(model, contract, (*found.notes, *found.warnings))
