"""Conversion in memory: from an opened file to checked tensors and their input contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from convert import prove
from convert.contract import Overrides
from convert.families.base import TIMM, OtherNetworkError, families
from convert.families.timm import (
    ARGUMENTS,
    OPTION,
    architecture_of,
    note_of_pixels,
)
from convert.families.timm_arguments import as_text, from_text
from convert.families.timm_index import names_that_fit
from convert.find import UnknownLayoutError
from convert.folders import digests
from convert.in_order import InOrder, of_torchvision, under_other_names
from convert.mistaken import mistaken
from convert.prove import Converted
from convert.read import Entry, about_objects, at, flatten, is_array, is_converted
from convert.recognize import Recognized, from_contract, recognize
from convert.recorded import NEXT_TO_IT, read_sidecar, recorded_arguments, recorded_names
from moco.common.errors import DataError, UserError, shown

# Start of the SHA-256 of torchvision's V2 weights, as in resnet50-11ad3fa6.pth. Tensors of V1 and
# V2 have the same names and shapes, so only the hash tells them apart.
TORCHVISION_V2 = "11ad3fa6"
# Types of networks in transformers' configurations -> timm's names of the same networks. No
# converter of timm takes the names of their tensors in transformers.
TYPES_IN_TIMM = {
    **{"aimv2": "aimv2_*", "aimv2_vision_model": "aimv2_*", "beit": "beit*", "bit": "resnetv2_*"},
    **{"deit": "deit_*distilled*", "efficientformer": "efficientformer_*"},
    **{"efficientnet": "tf_efficientnet_*", "focalnet": "focalnet_*", "hiera": "hiera_*"},
    **{"internvl_vision": "vit_intern*", "mobilenet_v2": "mobilenetv2_*"},
    **{"mobilevit": "mobilevit_*", "mobilevitv2": "mobilevitv2_*", "poolformer": "poolformer_*"},
    **{"pvt_v2": "pvt_v2_*", "regnet": "regnet*", "sam_vision_model": "samvit_*"},
    **{"sam": "samvit_*", "swiftformer": "swiftformer_*", "swinv2": "swinv2_*"},
}


def translate(
    src: Path,
    raw: Any,
    overrides: Overrides,
    objects: Collection[str] = (),
    hashes: tuple[str, dict[str, str]] | None = None,
) -> tuple[Recognized, Converted]:
    """Recognize a checkpoint, map it to Detectron2's names with a contract, and check every tensor.

    Args:
        src: File, for its SHA-256 and for messages.
        raw: Contents of `src` as `read_file` returned them; a converted file keeps its contract.
        overrides: Options that take precedence over the file and its project.
        objects: Names of objects that `read_file` collected.
        hashes: Result of `convert.folders.digests`, if it is known already.

    Raises:
        UserError: If an option is needed or does not fit.
        DataError: If the checkpoint is unknown or damaged.
    """
    hashes = hashes or digests(src)
    is_ours = isinstance(at(raw, ("format",)), str) or is_converted(raw)
    if is_ours and overrides.family:
        raise UserError(f"--as timm: {src} is a file of this project, not one of timm's networks")
    if not is_ours and (overrides.family or OPTION.name in overrides.options):
        return _as_timm(src, raw, overrides, objects, hashes)
    try:
        return _translate(src, raw, overrides, objects, hashes)
    except DataError as error:
        if is_ours:
            raise DataError(str(error)) from error
        return _through_timm(error, src, raw, overrides, objects, hashes)


def _as_timm(
    src: Path, raw: Any, overrides: Overrides, *details: Any
) -> tuple[Recognized, Converted]:
    """Convert a file as the network of timm that an option or its record names.

    Arguments with which that was built are the file's, unless they are given.

    Raises:
        UserError: If neither names one.
        DataError: If it is not that network.
    """
    where, options = str(src), dict(overrides.options)
    sidecar = read_sidecar(src)
    names = recorded_names(raw, sidecar.arch if sidecar else None, tags=True)
    recorded = {place: name for place, name in names.items() if prove.in_timm(name)}
    if OPTION.name not in options:
        if not recorded:
            raise UserError(
                f"--as timm: {where} names no network of timm; give {OPTION.flag} with its name",
                option=OPTION.name,
            )
        options[OPTION.name] = next(iter(recorded.values()))
    given = str(options[OPTION.name]).partition(".")[0]
    if ARGUMENTS.name in options:
        options[ARGUMENTS.name] = as_text(from_text(options[ARGUMENTS.name], ARGUMENTS.flag))
    arguments = recorded_arguments(raw, sidecar)
    for place, name in recorded.items():
        if name.partition(".")[0] != given:
            continue  # `prove.check_names` refuses it
        own = as_text(arguments.get(place, {}))
        if options.setdefault(ARGUMENTS.name, own) != own:
            raise UserError(
                f"{ARGUMENTS.flag} {options[ARGUMENTS.name]}: {where} says in {place} that its "
                f"network was built with {own or 'none'}; give its state dict alone if that is "
                "wrong"
            )
    overrides = dataclasses.replace(overrides, options=options)
    entries = flatten(raw, where)
    alike = of_torchvision(entries, where)
    fitting = [
        each for each in (alike.candidates if alike else ()) if each.partition(":")[0] == given
    ]
    if alike and fitting:
        alike = dataclasses.replace(alike, candidates=tuple(fitting))
        return _in_order(alike, entries, src, raw, overrides, *details)
    notes, assumed = [_path_of(given)], []
    try:
        found, converted = _translate(src, raw, overrides, *details)
    except OtherNetworkError:
        its = architecture_of(options)
        renamed = under_other_names(entries, raw, its.name, its.arguments, where)
        if renamed is None:
            raise
        found, converted = _translate(src, renamed.raw, overrides, *details)
        notes.append(renamed.note)
        if renamed.is_assumed:
            assumed.append(f"that these are its tensors: {renamed.note}")
    found = dataclasses.replace(
        found,
        assumed=", ".join([*assumed, *filter(None, [found.assumed])]),
        notes=[*notes, *found.notes],
    )
    return found, Converted(converted.model, converted.contract, (*found.notes, *found.warnings))


def _path_of(name: str) -> str:
    """Describe that timm's own network is the backbone, and what differs from another family's."""
    note = "the backbone is timm's own network, every block as timm computes it"
    plain = [f.name for f in families() if f.name != TIMM and prove.is_plain(name, f)]
    windows = "without ViTDet's windows, " if plain == ["vit"] else ""
    return note + (f", {windows}instead of the family {plain[0]}'s" if plain else "")


def _through_timm(
    error: DataError, src: Path, raw: Any, overrides: Overrides, *details: Any
) -> tuple[Recognized, Converted]:
    """Convert a network that no other family has, because of `error`, as timm's of its name.

    Raises:
        DataError: The error, with the reason why timm's network does not do or, if the file names
            none, with the names of timm's networks that have its tensors.
    """
    where = str(src)
    if isinstance(error, OtherNetworkError) and (text := mistaken(raw)):
        raise DataError(f"{where}: {text}") from error
    sidecar = read_sidecar(src)
    names = recorded_names(raw, sidecar.arch if sidecar else None, tags=True)
    in_timm = [(place, name) for place, name in names.items() if prove.in_timm(name)]
    if not in_timm:
        if not isinstance(error, OtherNetworkError):
            raise error
        entries = flatten(raw, where)
        if alike := of_torchvision(entries, where):
            return _in_order(alike, entries, src, raw, overrides, *details)
        shapes = {e.name: tuple(e.value.shape) for e in entries if e.name and is_array(e.value)}
        fitting = names_that_fit(shapes, OPTION.flag)
        if sidecar and (kind := sidecar.facts.get("model_type")):
            timms = TYPES_IN_TIMM.get(kind) if isinstance(kind, str) else None
            what = (
                f", which timm has as {timms}, under other names: give timm's file" if timms else ""
            )
            fitting = f"; {NEXT_TO_IT} is of a {shown(kind)}{what}{fitting}"
        if fitting and isinstance(error, UnknownLayoutError):
            raise OtherNetworkError(f"{error.what}{fitting}") from error
        raise type(error)(f"{error}{fitting}") from error
    place, name = in_timm[0]
    options = {**overrides.options, OPTION.name: name}
    try:
        found, converted = _as_timm(
            src, raw, dataclasses.replace(overrides, options=options), *details
        )
    except UserError as reason:
        what = error.what if isinstance(error, UnknownLayoutError) else str(error)
        text = f"{what}; {place} names {name}"
        if not any(prove.is_plain(name.partition(".")[0], family) for family in families()):
            text += f", but {str(reason).removeprefix(f'{where}: ')}"
        elif not isinstance(error, OtherNetworkError):
            text = str(error)  # the file of a network that its family has is damaged
        raise DataError(text) from error
    note = f"{place} names {name}, which no family but timm has: as with {OPTION.flag} {name}"
    found.notes.insert(0, note)
    return found, dataclasses.replace(converted, notes=(note, *converted.notes))


def _in_order(
    alike: InOrder, entries: Sequence[Entry], src: Path, raw: Any, overrides: Overrides, *rest: Any
) -> tuple[Recognized, Converted]:
    """Convert a network of torchvision as the one of timm that has its maps.

    Raises:
        DataError: If none has them.
    """
    for candidate in alike.candidates:
        names = alike.names(candidate)
        name, _, arguments = candidate.partition(":")
        options = {**overrides.options, OPTION.name: name, ARGUMENTS.name: arguments}
        found, converted = _translate(
            src,
            alike.renamed(raw, entries, names, str(src)),
            dataclasses.replace(overrides, options=options),
            *rest,
        )
        try:
            compared = alike.check(found, entries, names, str(src))
        except DataError:
            continue  # e.g. other activations
        note = (
            f"its tensors are those of torchvision's {alike.name}, and have the shapes of timm's "
            f"{candidate} in order, which the backbone is; torchvision's network: {compared}"
        )
        (scheme,) = found.contract.family.schemes_of(options).values()
        of_timm = note_of_pixels(scheme.metadata["pixels of"])
        contract = dataclasses.replace(
            found.contract,
            source="torchvision",
            pixels=overrides.pixels(alike.pixels(), str(src)),
        )
        found = dataclasses.replace(
            alike.named(found, names),
            contract=contract,
            assumed=f"torchvision's {alike.name}, with the pixels of its published weights",
            notes=[note, *(other for other in found.notes if other != of_timm)],
        )
        return found, Converted(converted.model, contract, (*found.notes, *found.warnings))
    raise DataError(
        f"{src}: torchvision's {alike.name} by the names and shapes of its tensors, which is not "
        "supported: no family here has its maps, and no network of timm by their order"
    )


def _translate(
    src: Path,
    raw: Any,
    overrides: Overrides,
    objects: Collection[str],
    hashes: tuple[str, dict[str, str]],
) -> tuple[Recognized, Converted]:
    where = str(src)
    sha256, parts = hashes
    if is_converted(raw):
        earlier = prove.read_converted(src, raw)
        found = from_contract(earlier.model, earlier.contract, where, overrides)
    else:
        found = recognize(raw, where, overrides, sha256, lambda: read_sidecar(src), parts)
    notes, warnings = about_objects(objects)
    found.notes.extend(notes)
    found.warnings.extend(warnings)
    if sha256.startswith(TORCHVISION_V2):
        found.warnings.append(
            "these are torchvision's IMAGENET1K_V2 weights, whose recipe is newer than the paper's "
            "baselines; IMAGENET1K_V1 is resnet50-0676ba61.pth"
        )
    family = found.contract.family
    overridden = [
        name for name in ("mean", "std", "channel_order") if getattr(overrides, name) is not None
    ]
    overridden += [o.name for o in family.options if o.convention and o.name in overrides.options]
    for name in overridden:
        found.notes.append(f"{name.replace('_', ' ')} was set by an option, not by the source")
    model = {family.to_detectron2(key) or key: value for key, value in found.state.items()}
    # Before `check_model`, which would report the zero scales of an untrained network as unsound.
    folded = found.contract.bn_folded
    found.warnings.extend(family.check_trained(found.state, where, found.named, folded=folded))
    prove.check_model(
        model, found.contract, where, lambda key: found.named(family.from_detectron2(key) or key)
    )
    source = found.original or found.source_network()
    found.notes.extend(
        prove.compare_with_timm(
            found.unclear_names,
            found.arguments,
            family,
            source,
            found.tokens,
            overrides.options,
            where,
        )
    )
    return found, Converted(model, found.contract, (*found.notes, *found.warnings))
