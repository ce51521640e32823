"""From an opened file to checked tensors in Detectron2's names and their contract, in memory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from convert import named, timm_files, verify
from convert.beside import read_beside
from convert.files import about_objects, is_converted
from convert.sources import Given, Recognized, from_contract, recognize
from convert.verify import Converted
from moco.common.files import sha256_file

# torchvision's files carry the start of their sha256 in their names: resnet50-11ad3fa6.pth. Only
# the whole file tells V2 from V1; their tensors have the same names and shapes.
TORCHVISION_V2 = "11ad3fa6"


def translate(
    src: Path, raw: Any, given: Given, objects: Collection[str] = (), sha256: str = ""
) -> tuple[Recognized, Converted]:
    """Recognize, translate, give a contract, and check every tensor.

    Args:
        src: the file, for its sha256 and for messages.
        raw: what `read_file` returned for it; a converted file keeps what its contract says.
        given: what to take instead of what the file or its layout says.
        objects: names that `read_file` gave for it.
        sha256: its hash, where it is known already.

    Raises UserError or DataError, in one line.
    """
    where = str(src)
    sha256 = sha256 or sha256_file(src)
    if is_converted(raw):
        earlier = verify.read_converted(src, raw)
        found = from_contract(earlier.model, earlier.contract, where, given)
    elif given.timm_model is not None:
        found = timm_files.recognize(raw, where, given, sha256)
    else:
        found = recognize(raw, where, given, sha256, lambda: read_beside(src))
    notes, warnings = about_objects(objects)
    found.notes.extend(notes)
    found.warnings.extend(warnings)
    if sha256.startswith(TORCHVISION_V2):
        found.warnings.append(
            "these are torchvision's IMAGENET1K_V2 weights, another recipe than any baseline of "
            "the paper's time; IMAGENET1K_V1 is resnet50-0676ba61.pth"
        )
    family = found.contract.family
    said = [name for name in ("mean", "std", "channel_order") if getattr(given, name) is not None]
    said += [o.name for o in family.options if o.convention and o.name in given.options]
    for name in said:
        found.notes.append(f"{name.replace('_', ' ')} is the command line's, not the source's")
    model = {family.to_detectron2(key) or key: value for key, value in found.state.items()}
    # Before the numbers: a network that starts with scales of zero is called untrained.
    folded = found.contract.bn_folded
    found.warnings.extend(family.check_trained(found.state, where, found.named, folded=folded))
    verify.check_model(
        model, found.contract, where, lambda key: found.named(family.from_detectron2(key) or key)
    )
    source = found.source_network()
    found.notes.extend(
        named.compare_with_timm(found.unclear_names, family, source, found.tokens, where)
    )
    return found, Converted(model, found.contract, (*found.notes, *found.warnings))
