"""From an opened file to checked tensors in Detectron2's names and their contract, in memory."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from convert import keymap, verify
from convert.contract import InputContract
from convert.files import is_converted
from convert.sources import Given, Recognised, from_contract, recognise
from convert.verify import Converted
from moco.errors import UserError
from moco.fileio import sha256_file
from moco.soundness import check_trained

# torchvision's files carry the start of their sha256 in their names: resnet50-11ad3fa6.pth. Only
# the whole file tells V2 from V1; their tensors have the same names and shapes.
TORCHVISION_V2 = "11ad3fa6"


def fine_tune_command(contract: InputContract, path: Path) -> str:
    """The command that fine-tunes a small detector from a converted file."""
    task = "R_50_C4_24k" if contract.depth >= 50 else "R_18_C4_small"
    return (
        f"python detection/train_net.py --config-file configs/voc/faster_rcnn_{task}.yaml "
        f"MODEL.WEIGHTS {shlex.quote(str(path))}"
    )


def translate(src: Path, raw: Any, given: Given) -> tuple[Recognised, Converted]:
    """Recognise, translate, give a contract, and check every tensor.

    Args:
        src: the file, for its sha256 and for messages.
        raw: what `read_file` returned for it; a converted file keeps what its contract says.
        given: what to take instead of what the file or its layout says.

    Raises UserError or DataError, in one line.
    """
    sha256 = sha256_file(src)
    source_sha256 = sha256
    if is_converted(raw):
        earlier = verify.read_converted(src, raw)
        source_sha256 = earlier.contract.source_sha256
        found = from_contract(earlier.model, earlier.contract, str(src), given)
    else:
        found = recognise(raw, str(src), given)
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
