"""Conversion in memory: from an opened file to checked tensors and their input contract.

A network that no family has is read as a network of timm. timm's own loader renames the tensors of
many projects; tensors of other projects have timm's shapes in order. A network of torchvision is
compared with torchvision's own, which is run.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convert import verify
from convert.contract import Overrides, Pixels
from convert.families.base import TIMM, OtherNetworkError, families, scale_to_255
from convert.families.timm import (
    ARGUMENTS,
    OPTION,
    format_arguments,
    in_timm,
    parse_arguments,
    pixels_note,
    requested_architecture,
)
from convert.families.timm_index import (
    EFFICIENTNET_PYTORCH,
    candidate_networks,
    fitting_networks_hint,
    index,
    is_plain,
    without_counters,
)
from convert.find import UnknownLayoutError
from convert.metadata import NEXT_TO_IT, read_sidecar, recorded_arguments, recorded_names
from convert.modeling.timm_network import compare_named_networks, meta_tensors, rename_with_timm
from convert.read import (
    Entry,
    digests,
    flatten,
    get_nested,
    is_array,
    is_converted,
    object_messages,
    to_tensor,
)
from convert.recognize import Recognition, from_contract, recognize
from convert.source_module import check_module
from moco.common.errors import DataError, UserError, format_value
from moco.common.files import named_objects
from moco.common.unpickler import OpaqueObject

# Start of the SHA-256 of torchvision's V2 weights, as in resnet50-11ad3fa6.pth. Tensors of V1 and
# V2 have the same names and shapes, so only the hash tells them apart.
TORCHVISION_V2 = "11ad3fa6"
# Types of networks in transformers' configurations -> timm's names of the same networks. timm has
# no converter for transformers' names of the tensors.
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
) -> Recognition:
    """Recognize a checkpoint, and check all tensors in Detectron2's names against the contract.

    Args:
        src: File, for its SHA-256 and for messages.
        raw: Contents of `src` as `read_file` returned them; a converted file keeps its contract.
        overrides: Options that take precedence over the file and its project.
        objects: Names of objects that `read_file` collected.
        hashes: Result of `convert.read.digests`, if already known.

    Raises:
        UserError: If an option is needed or does not fit.
        DataError: If the checkpoint is unknown or damaged.
    """
    hashes = hashes or digests(src)
    is_ours = isinstance(get_nested(raw, ("format",)), str) or is_converted(raw)
    if is_ours and overrides.family:
        raise UserError(f"--as timm: {src} is a file of this project, not one of timm's networks")
    if not is_ours and (overrides.family or OPTION.name in overrides.options):
        return _translate_as_timm(src, raw, overrides, objects, hashes)
    try:
        return _translate(src, raw, overrides, objects, hashes)
    except DataError as error:
        if is_ours:
            raise DataError(str(error)) from error
        return _fall_back_to_timm(error, src, raw, overrides, objects, hashes)


def _translate_as_timm(src: Path, raw: Any, overrides: Overrides, *details: Any) -> Recognition:
    """Translate a file as the timm network that an option or the file names.

    Arguments of `timm.create_model` are those that the file records, unless an option gives others.

    Raises:
        UserError: If neither option nor file names a network of timm.
        DataError: If the file has another network.
    """
    where, options = str(src), dict(overrides.options)
    sidecar = read_sidecar(src)
    names = recorded_names(raw, sidecar.arch if sidecar else None, tags=True)
    recorded = {place: name for place, name in names.items() if in_timm(name)}
    if OPTION.name not in options:
        if not recorded:
            raise UserError(
                f"--as timm: {where} names no network of timm; give {OPTION.flag} with its name",
                option=OPTION.name,
            )
        options[OPTION.name] = next(iter(recorded.values()))
    given = str(options[OPTION.name]).partition(".")[0]
    if ARGUMENTS.name in options:
        options[ARGUMENTS.name] = format_arguments(
            parse_arguments(options[ARGUMENTS.name], ARGUMENTS.flag)
        )
    arguments = recorded_arguments(raw, sidecar)
    for place, name in recorded.items():
        if name.partition(".")[0] != given:
            continue  # `check_names` refuses it
        own = format_arguments(arguments.get(place, {}))
        if options.setdefault(ARGUMENTS.name, own) != own:
            raise UserError(
                f"{ARGUMENTS.flag} {options[ARGUMENTS.name]}: {where} says in {place} that its "
                f"network was built with {own or 'none'}; give its state dict alone if that is "
                "wrong"
            )
    overrides = dataclasses.replace(overrides, options=options)
    entries = flatten(raw, where)
    alike = find_torchvision_network(entries, where)
    fitting = [
        each for each in (alike.candidates if alike else ()) if each.partition(":")[0] == given
    ]
    if alike and fitting:
        alike = dataclasses.replace(alike, candidates=tuple(fitting))
        return _translate_torchvision(alike, entries, src, raw, overrides, *details)
    notes, assumed = [_network_note(given)], []
    try:
        found = _translate(src, raw, overrides, *details)
    except OtherNetworkError:
        its = requested_architecture(options)
        renamed = rename_to_timm(entries, raw, its.name, its.arguments, where)
        if renamed is None:
            raise
        found = _translate(src, renamed.raw, overrides, *details)
        notes.append(renamed.note)
        if renamed.is_assumed:
            assumed.append(f"that these are its tensors: {renamed.note}")
    return dataclasses.replace(
        found,
        assumed=", ".join([*assumed, *filter(None, [found.assumed])]),
        notes=[*notes, *found.notes],
    )


def _network_note(name: str) -> str:
    """Return the note that timm's own network is the backbone, instead of another family's."""
    note = "the backbone is timm's own network, every block as timm computes it"
    plain = [f.name for f in families() if f.name != TIMM and is_plain(name, f)]
    windows = "without ViTDet's windows, " if plain == ["vit"] else ""
    return note + (f", {windows}instead of the family {plain[0]}'s" if plain else "")


def _fall_back_to_timm(
    error: DataError, src: Path, raw: Any, overrides: Overrides, *details: Any
) -> Recognition:
    """Fall back to the timm network that the file names.

    Args:
        error: Reason why no family has the network.
        src: File, for messages and the record next to it.
        raw: Contents of the file.
        overrides: Options of the conversion.
        details: Further arguments of `_translate`.

    Raises:
        DataError: `error` with the reason why timm's network does not fit or, if the file names
            none, with the names of timm's networks that have these tensors.
    """
    where = str(src)
    if isinstance(error, OtherNetworkError) and (text := describe_mistaken_file(raw)):
        raise DataError(f"{where}: {text}") from error
    sidecar = read_sidecar(src)
    names = recorded_names(raw, sidecar.arch if sidecar else None, tags=True)
    known = [(place, name) for place, name in names.items() if in_timm(name)]
    if not known:
        if not isinstance(error, OtherNetworkError):
            raise error
        entries = flatten(raw, where)
        if alike := find_torchvision_network(entries, where):
            return _translate_torchvision(alike, entries, src, raw, overrides, *details)
        shapes = {e.name: tuple(e.value.shape) for e in entries if e.name and is_array(e.value)}
        fitting = fitting_networks_hint(shapes, OPTION.flag)
        if sidecar and (kind := sidecar.facts.get("model_type")):
            timms = TYPES_IN_TIMM.get(kind) if isinstance(kind, str) else None
            what = (
                f"; timm has it as {timms} with other tensor names: give timm's file"
                if timms
                else ""
            )
            fitting = f"; {NEXT_TO_IT} describes a {format_value(kind)}{what}{fitting}"
        if not fitting:
            raise
        if isinstance(error, UnknownLayoutError):
            raise OtherNetworkError(f"{error.what}{fitting}") from error
        raise type(error)(f"{error}{fitting}") from error
    place, name = known[0]
    options = {**overrides.options, OPTION.name: name}
    try:
        found = _translate_as_timm(
            src, raw, dataclasses.replace(overrides, options=options), *details
        )
    except UserError as reason:
        what = error.what if isinstance(error, UnknownLayoutError) else str(error)
        text = f"{what}; {place} names {name}"
        if not any(is_plain(name.partition(".")[0], family) for family in families()):
            text += f", but {str(reason).removeprefix(f'{where}: ')}"
        elif not isinstance(error, OtherNetworkError):
            text = str(error)  # the file of a network that its family has is damaged
        raise DataError(text) from error
    note = f"{place} names {name}, which no family but timm has: as with {OPTION.flag} {name}"
    found.notes.insert(0, note)
    return found


def _translate_torchvision(
    alike: TorchvisionNetwork,
    entries: Sequence[Entry],
    src: Path,
    raw: Any,
    overrides: Overrides,
    *rest: Any,
) -> Recognition:
    """Translate a network of torchvision as the network of timm with the same maps.

    Raises:
        DataError: If timm has no such network.
    """
    for candidate in alike.candidates:
        names = alike.map_names(candidate)
        name, _, arguments = candidate.partition(":")
        options = {**overrides.options, OPTION.name: name, ARGUMENTS.name: arguments}
        found = _translate(
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
        of_timm = pixels_note(scheme.metadata["pixels of"])
        contract = dataclasses.replace(
            found.contract,
            source="torchvision",
            pixels=overrides.pixels(alike.pixels(), str(src)),
        )
        return dataclasses.replace(
            alike.named(found, names),
            contract=contract,
            assumed=f"torchvision's {alike.name}, with the pixels of its published weights",
            notes=[note, *(other for other in found.notes if other != of_timm)],
        )
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
) -> Recognition:
    where = str(src)
    sha256, parts = hashes
    if is_converted(raw):
        earlier = verify.read_converted(src, raw)
        found = from_contract(earlier.model, earlier.contract, where, overrides)
    else:
        found = recognize(raw, where, overrides, sha256, lambda: read_sidecar(src), parts)
    notes, warnings = object_messages(objects)
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
    # Before `check_model`, which would report the zero scales of an untrained network as unsound.
    folded = found.contract.bn_folded
    found.warnings.extend(family.check_trained(found.state, where, found.named, folded=folded))
    verify.check_model(
        found.model,
        found.contract,
        where,
        lambda key: found.named(family.from_detectron2(key) or key),
    )
    if found.unclear_names:
        found.notes.extend(
            compare_named_networks(
                found.unclear_names,
                found.arguments,
                family,
                found.original or found.source_network(),
                found.tokens,
                overrides.options,
                where,
            )
        )
    return found


_MAX_NETWORKS = 8  # prefixes that are tried


@dataclasses.dataclass(frozen=True)
class TorchvisionNetwork:
    """Network of torchvision in a file.

    Attributes:
        name: Name of torchvision's network.
        prefix: Prefix of the tensors in the flattened file.
        candidates: Networks of timm that may have the same maps, see `Index.torchvision`, possibly
            with an argument, e.g. "efficientnet_b5:bn_eps=0.001".
    """

    name: str
    prefix: str
    candidates: tuple[str, ...]

    def build(self) -> nn.Module:
        """Build torchvision's network with random weights."""
        from torchvision.models import get_model

        net: nn.Module = get_model(self.name, weights=None)
        return net

    def pixels(self) -> Pixels:
        """Return the normalization of torchvision's published weights."""
        from torchvision.models import get_model_weights

        transform = next(iter(get_model_weights(self.name))).transforms()
        return Pixels(scale_to_255(transform.mean), scale_to_255(transform.std), "RGB")

    def map_names(self, candidate: str) -> dict[str, str]:
        """Map the names of tensors to those of one of the candidates."""
        from convert.modeling.reference import on_meta_device

        try:
            with on_meta_device():
                own = without_counters(self.build().state_dict())
        except NotImplementedError:  # RegNets compute with tensors while they are built
            own = without_counters(self.build().state_dict())
        name, _, arguments = candidate.partition(":")
        usual = without_counters(meta_tensors(name, arguments))
        numbered = {
            name: torch.tensor(float(i)).expand(value.shape)
            for i, (name, value) in enumerate(own.items())
        }
        if renamed := rename_with_timm(name, arguments, numbered):
            return {[*own][int(value.flatten()[0])]: new for new, value in renamed.items()}
        return dict(zip(own, usual, strict=True))

    def renamed(
        self, raw: Any, entries: Sequence[Entry], names: Mapping[str, str], where: str
    ) -> Any:
        """Return the contents of the file, with timm's names for the tensors of this network.

        Raises:
            DataError: If a value is not a dense tensor.
        """
        path: list[Any] = []
        changed: dict[Any, tuple[str, Any]] = {}
        for entry in entries:
            if new := names.get(self._short(entry)):
                *path, key = entry.keys
                changed[key] = new, to_tensor(key, entry.value, where)
        return _renamed(raw, path, changed)

    def check(
        self,
        found: Recognition,
        entries: Sequence[Entry],
        names: Mapping[str, str],
        where: str,
    ) -> str:
        """Compare the maps of a candidate with those of torchvision's own network.

        Args:
            found: This network, recognized as the candidate.
            entries: All values of the file.
            names: Names of the tensors in torchvision -> names in the candidate.
            where: Name of the file, for messages.

        Returns:
            Description of the modules of torchvision's network that gave the maps.

        Raises:
            DataError: If torchvision's network has other maps.
        """
        net = self.build()
        own = net.state_dict()
        values = {self._short(entry): entry for entry in entries}
        own.update(  # the dict has the version of the modules, too
            {
                name: to_tensor(name, values[name].value, where).to(own[name].dtype)
                for name in names
                if name in values and values[name].value.shape == own[name].shape  # else a head
            }
        )
        net.load_state_dict(own)
        check = check_module(net, _named(found, names, ""), Overrides(), where)
        if not check.verified:
            raise DataError(f"{where}: {check.text}")
        return check.text

    def named(self, found: Recognition, names: Mapping[str, str]) -> Recognition:
        """Return the network with the names of tensors in the file, for messages."""
        return _named(found, names, self.prefix.rpartition("/")[2])

    def _short(self, entry: Entry) -> str:
        return entry.name.removeprefix(self.prefix) if entry.name.startswith(self.prefix) else ""


def _named(found: Recognition, names: Mapping[str, str], prefix: str) -> Recognition:
    original = {new: prefix + old for old, new in names.items()}
    return dataclasses.replace(
        found, named=lambda key: original.get(name := found.named(key), name)
    )


def _renamed(raw: Any, path: Sequence[Any], changed: Mapping[Any, tuple[str, Any]]) -> Any:
    if path:
        return {**raw, path[0]: _renamed(raw[path[0]], path[1:], changed)}
    return dict(changed.get(key, (key, value)) for key, value in raw.items())


@dataclasses.dataclass(frozen=True)
class Renamed:
    """File in which the tensors of a network were renamed to timm's names.

    Attributes:
        raw: Contents of the file.
        note: Note on the origin of the names.
        is_assumed: True if only the shapes of the tensors justify the names.
    """

    raw: Any
    note: str
    is_assumed: bool


def rename_to_timm(
    entries: Sequence[Entry], raw: Any, name: str, arguments: str, where: str
) -> Renamed | None:
    """Rename the tensors of a network of timm that has other names in a file.

    Args:
        entries: All values of the file.
        raw: Contents of the file.
        name: timm's name of the network.
        arguments: Arguments of `timm.create_model` as text.
        where: Name of the file, for messages.

    Returns:
        The file with timm's names, or None if no network in it fits.

    Raises:
        DataError: If a tensor is not dense, or the names are those of code with another padding.
    """
    arrays = {e.name: e for e in entries if e.name and is_array(e.value)}
    shapes = {key: tuple(entry.value.shape) for key, entry in arrays.items()}
    usual = without_counters(meta_tensors(name, arguments))
    for start, network in itertools.islice(candidate_networks(shapes), _MAX_NETWORKS):
        path, prefix = arrays[start + next(iter(network))].keys[:-1], start.rpartition("/")[2]
        tensors = {
            key: to_tensor(key, arrays[start + key].value, where)
            for key in network
            if arrays[start + key].keys[:-1] == path
        }
        made = rename_with_timm(name, arguments, tensors)
        if made is not None:
            text = f"timm's own loader renamed its {len(tensors)} tensors"
            return Renamed(_replaced(raw, path, prefix, made), text, is_assumed=False)
        if names := _by_order(without_counters(tensors), usual):
            if EFFICIENTNET_PYTORCH in tensors and not name.startswith("tf_"):
                raise DataError(
                    f"{where}: its names are those of efficientnet-pytorch, whose padding is "
                    f"TensorFlow's, as in timm's networks that begin with tf_, and {name} has "
                    "another one"
                )
            made = {new: tensors[old] for old, new in names.items()}
            text = f"its {len(names)} tensors have, in order, the shapes of timm's {name}"
            return Renamed(_replaced(raw, path, prefix, made), text, is_assumed=True)
    return None


def _by_order(tensors: Mapping[str, Tensor], usual: Mapping[str, Tensor]) -> dict[str, str]:
    """Return timm's names of tensors with timm's shapes in order, classifiers apart, or {}."""
    if len(usual) - len(tensors) not in (0, 2) or tensors.keys() <= usual.keys():
        return {}
    pairs = zip(tensors.items(), usual.items(), strict=False)  # a classifier may be missing
    for i, ((old, value), (new, other)) in enumerate(pairs):
        is_classifier = i >= len(usual) - 2 and value.shape[1:] == other.shape[1:]
        is_same = value.shape == other.shape or is_classifier
        if not is_same or old.rpartition(".")[2] != new.rpartition(".")[2]:
            return {}
    return dict(zip(tensors, usual, strict=False))


def _replaced(raw: Any, path: Sequence[Any], prefix: str, tensors: Mapping[str, Tensor]) -> Any:
    """Replace the tensors under a prefix in the contents of a file."""
    if path:
        return {**raw, path[0]: _replaced(raw[path[0]], path[1:], prefix, tensors)}
    kept = {k: v for k, v in raw.items() if not str(k).startswith(prefix) or not is_array(v)}
    return {**kept, **tensors}


def find_torchvision_network(entries: Sequence[Entry], where: str) -> TorchvisionNetwork | None:
    """Return the network of torchvision in a file, or None.

    Raises:
        DataError: If the file has several.
    """
    its, found = index(), []
    shapes = {e.name: tuple(e.value.shape) for e in entries if e.name and is_array(e.value)}
    for start, network in candidate_networks(shapes):
        if row := its.torchvision.get(its.exact(network)):
            name, candidates = row
            found.append(TorchvisionNetwork(name, start, candidates))
    if len(found) > 1:
        names = ", ".join(format_value(network.prefix.rstrip("./")) for network in found[:3])
        raise DataError(
            f"{where}: {len(found)} networks of torchvision ({found[0].name}), e.g. in {names}; "
            "give a file with one of them"
        )
    return found[0] if found else None


# torch.optim.Optimizer.state_dict.
_OPTIMIZER = {"state", "param_groups"}
# Names of tensors -> description, with "{}" for the first name, and remedy.
_TENSORS = (
    # peft, tuners/lora/layer.py; kohya's and diffusers' older files.
    (
        re.compile(r"(^|[._])lora_(A|B|up|down|embedding_[AB]|magnitude_vector)\b"),
        "a LoRA adapter ({}), which changes a network that it does not hold: merge it into that "
        "network, with peft's merge_and_unload(), and give the state_dict() of the result",
    ),
    # torch/nn/utils/weight_norm.py; torch/nn/utils/parametrize.py.
    (
        re.compile(r"\.weight_(g|v)$|(^|\.)parametrizations\."),
        "a network whose weights are split by weight_norm or another parametrization ({}): join "
        "them with torch.nn.utils.remove_weight_norm, or parametrize.remove_parametrizations, and "
        "give its state_dict()",
    ),
    # bitsandbytes, nn/modules.py; GPTQ and AWQ; torch.ao.nn.quantized.
    (
        re.compile(
            r"\.(SCB|weight_format|absmax|quant_map|quant_state\..*|qweight|qzeros|g_idx"
            r"|zero_point|_packed_params(\..*)?)$"
        ),
        "quantized weights ({}), which do not hold the values of the network: give the "
        "floating-point weights that they were made from",
    ),
)


def describe_mistaken_file(raw: Any) -> str:
    """Describe a file that holds something else than the weights of a network, with a remedy.

    Args:
        raw: Contents of a refused file.

    Returns:
        The text of a message, or "" for other files.
    """
    if isinstance(raw, Mapping) and not isinstance(raw, OpaqueObject) and set(raw) == _OPTIMIZER:
        return (
            "the state of an optimizer alone, without a network: give the checkpoint that has the "
            "model's state_dict()"
        )
    if found := _describe_module(raw):
        return found
    keys = [str(e.keys[-1]) for e in flatten(raw, "") if e.keys] if _is_dict(raw) else []
    return next(filter(None, (_describe_tensors(keys, *row) for row in _TENSORS)), "")


def _describe_tensors(keys: Collection[str], pattern: re.Pattern[str], text: str) -> str:
    first = next((key for key in keys if pattern.search(key)), None)
    return "" if first is None else text.format(format_value(first))


def _describe_module(raw: Any) -> str:
    """Describe a module that was saved as an object, with the name of its class, or return ""."""
    holders = {
        "": raw,
        **({f" in {format_value(k, 30)}": raw[k] for k in raw} if _is_dict(raw) else {}),
    }
    for place, value in holders.items():
        if isinstance(value, OpaqueObject) and not is_array(value) and "_modules" in value:
            return (
                f"a whole module{place}, of the class {named_objects([value.name])}, whose code is "
                "not run here: where the file is trusted, load it in its own project and "
                "torch.save its state_dict()"
            )
    return ""


def _is_dict(raw: Any) -> bool:
    return isinstance(raw, Mapping) and not isinstance(raw, OpaqueObject)
