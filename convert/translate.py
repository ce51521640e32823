"""From an opened file to checked tensors in Detectron2's names and their contract, in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert import prove
from convert.contract import FOLDED, Given, InputContract, Pixels, numbers
from convert.families.base import PLAIN_DETECTRON2, Adapted, Family, Hints
from convert.find import Choice, choose_network
from convert.projects import Project
from convert.prove import Converted
from convert.read import about_objects, at, digest, flatten, is_converted, to_tensor
from convert.recorded import Recorded, anyones_record, read_beside, recorded_names
from convert.take import fill_statistics, join, take, to_float32
from moco.common.errors import DataError, UserError

if TYPE_CHECKING:
    from torch import Tensor

# torchvision's files carry the start of their sha256 in their names: resnet50-11ad3fa6.pth. Only
# the whole file tells V2 from V1; their tensors have the same names and shapes.
TORCHVISION_V2 = "11ad3fa6"


@dataclasses.dataclass(frozen=True)
class Recognized:
    """The backbone of a recognized checkpoint and what the file says about it.

    Attributes:
        contract: where the backbone comes from, what it is, and how it sees pixels.
        state: its tensors, by the family's names.
        encoders: every choice of --encoder that this file has.
        named: what the family's names are called in the file, also those of missing tensors.
        dropped: rule -> number of entries of the file.
        filled: tensors of `state` that are not in the file: folded BN statistics, 0 and 1.
        tokens: what the family calls so: dropped, but a part of the source's features.
        proof: architecture and tensors of the network that the features are compared with; None:
            the contract's and `state`.
        epoch: epochs finished.
        keys: of the nested dicts that its network is in, outermost first.
        unclear_names: where the network is named -> a name that timm alone can explain.
        reference: the network that the features are compared with, for people.
        assumed: what neither tensors nor a name tell, for people; "": nothing.
        head, notes, warnings: for people.
    """

    contract: InputContract
    state: dict[str, Tensor]
    encoders: tuple[str, ...]
    named: Callable[[str], str]
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    filled: int = 0
    tokens: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    proof: tuple[Any, Mapping[str, Tensor]] | None = None
    epoch: int | None = None
    keys: tuple[str, ...] = ()
    unclear_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reference: str = ""
    assumed: str = ""
    head: str = "already converted"
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def source_network(self) -> tuple[Mapping[str, Tensor], Any]:
        """Tensors and architecture of the network that the features are compared with."""
        architecture, state = self.proof or (self.contract.architecture, self.state)
        return state, architecture

    def effect_of_tokens(self) -> list[str]:
        """Say by how much the features change without the tokens; empty without any."""
        effect, (state, architecture) = self.contract.family.effect, self.source_network()
        return [effect(architecture, state, self.tokens)] if effect and self.tokens else []


def translate(
    src: Path, raw: Any, given: Given, objects: Collection[str] = (), sha256: str = ""
) -> tuple[Recognized, Converted]:
    """Recognize, translate, give a contract, and check every tensor.

    Args:
        src: the file, for its sha256 and for messages.
        raw: what `read_file` returned for it; a converted file keeps what its contract says.
        given: what to take instead of what the file or its project says.
        objects: names that `read_file` gave for it.
        sha256: its hash, where it is known already.

    Raises UserError or DataError, in one line.
    """
    where = str(src)
    sha256 = sha256 or digest(src)
    if is_converted(raw):
        earlier = prove.read_converted(src, raw)
        found = from_contract(earlier.model, earlier.contract, where, given)
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
    prove.check_model(
        model, found.contract, where, lambda key: found.named(family.from_detectron2(key) or key)
    )
    source = found.source_network()
    found.notes.extend(
        prove.compare_with_timm(found.unclear_names, family, source, found.tokens, where)
    )
    return found, Converted(model, found.contract, (*found.notes, *found.warnings))


def recognize(
    raw: Any,
    where: str,
    given: Given | None = None,
    sha256: str = "unknown",
    beside: Callable[[], Recorded | None] = lambda: None,
) -> Recognized:
    """Find the networks of an opened checkpoint and take the backbone of the one that is meant.

    Args:
        raw: what `read_file` returned.
        where: the file's name, for error messages.
        given: what to take instead of what the file or its project says.
        sha256: of the file.
        beside: reads the configuration beside it, for names that come with one.

    Raises:
        DataError: no known network, or damaged: keys, shapes, or records that disagree.
        UserError: `given` does not fit this checkpoint.
    """
    given = given or Given()
    entries = flatten(raw, where)
    choice = choose_network(raw, entries, given.encoder, where, given.options)
    network, project = choice.network, choice.project
    network.family.check_options(given.options, where)
    notes = [note for note in (project.note, choice.note) if note]
    warnings: list[str] = []
    missing = given.missing_convention(network.family)
    recorded, names = _recorded(project, raw, missing, where, beside)
    unclear = prove.check_names(names, network.family, where)
    _check_convention(choice, given, where, warnings, recorded.mean is not None)
    taken = take(choice, entries, where, given.encoder is not None)
    notes += taken.notes
    warnings += taken.warnings
    backbone, keys = join(taken.backbone, where, notes)
    own = network.family.in_own_shape
    backbone = {name: own(name, value) for name, value in backbone.items()}
    in_file = _names_in_file(choice, keys)
    filled = fill_statistics(backbone, notes) if project.name.endswith(FOLDED) else 0
    if recorded.note:
        notes.append(recorded.note)
    to_float32(backbone, in_file, warnings)
    tokens = {new: to_tensor(e.keys[-1], e.value, where).float() for new, e in taken.tokens.items()}
    said = {"timm": prove.heads_in_timm(names)} if "pos_embed" in backbone else {}
    said |= network.scheme.says
    hints = Hints(
        where=where,
        named=in_file,
        notes=notes,
        warnings=warnings,
        arch=recorded.arch or at(raw, ("arch",)),
        says={**said, **project.says, **recorded.says},
        asked=given.options,
        dropped=taken.dropped,
        tokens=tokens,
        assumed_pixels="" if recorded.mean or given.mean is not None else project.name,
    )
    architecture = network.family.recognize(backbone, hints)
    adapted = network.family.adapt(architecture, backbone, given.options, where)
    notes += [f"changed as requested: {change}" for change in adapted.changes]
    pixels = Pixels(
        recorded.mean or network.scheme.mean or project.mean,
        recorded.std or network.scheme.std or project.std,
        recorded.channel_order or project.channel_order,
    )
    source = _changed(project.name.replace("MSRA", recorded.owner or "MSRA"), adapted)
    every = {entry.name for entry in entries}
    heads = (text for key, text in network.family.heads.items() if network.start + key in every)
    epoch = at(raw, project.epoch.split("/"))
    return Recognized(
        contract=InputContract(
            given.pixels(pixels, where),
            network.family,
            adapted.architecture,
            source,
            sha256,
            choice.name,
        ),
        state=adapted.state,
        encoders=tuple(choice.found.networks),
        named=in_file,
        dropped=dict(taken.dropped),
        filled=filled,
        tokens=tokens,
        proof=adapted.proof,
        epoch=epoch + project.epoch_offset if type(epoch) is int else None,
        keys=network.keys,
        unclear_names=unclear,
        reference=_reference(network.family, is_owners=network.scheme.is_owners),
        assumed=_assumed(choice, names, hints, adapted.architecture, recorded, pixels, given),
        head=next(heads, network.family.heads[""]),
        notes=notes,
        warnings=warnings,
    )


def from_contract(
    model: Mapping[str, Tensor], contract: InputContract, where: str, given: Given
) -> Recognized:
    """The backbone of a converted file (Detectron2's names), to be written in another format.

    Raises UserError: `given` contradicts what the contract says about the network.
    """
    family = contract.family
    if given.encoder not in (None, contract.encoder):
        raise UserError(
            f"--encoder {given.encoder}: {where} was converted with encoder {contract.encoder}"
        )
    family.check_options(given.options, where)
    architecture = family.with_options(contract.architecture, given.options, where)
    state = {family.from_detectron2(key) or key: value for key, value in model.items()}
    adapted = family.adapt(architecture, state, given.options, where)
    return Recognized(
        contract=dataclasses.replace(
            contract,
            pixels=given.pixels(contract.pixels, where),
            architecture=adapted.architecture,
            source=_changed(contract.source, adapted),
        ),
        state=adapted.state,
        encoders=(contract.encoder,),
        named=lambda name: family.to_detectron2(name) or name,
        proof=adapted.proof,
        reference=_reference(family, is_owners=False),
        notes=[f"changed as requested: {change}" for change in adapted.changes],
    )


def _changed(source: str, adapted: Adapted) -> str:
    """Return a source's name, and what was changed in its backbone."""
    return f"{source} ({'; '.join(adapted.changes)})" if adapted.changes else source


def _names_in_file(choice: Choice, keys: Mapping[str, str]) -> Callable[[str], str]:
    """Return what a file calls the family's names; of a missing tensor, what it would."""
    network, scheme = choice.network, choice.network.scheme
    first = keys.get(scheme.rename(scheme.first[0]) or "", "")
    start = first.removesuffix(scheme.first[0]) if first else network.prefix
    shortcut = any(".shortcut." in key for key in keys.values())

    def named(name: str) -> str:
        original = start + scheme.original(name)
        if shortcut:
            original = original.replace(".downsample.", ".shortcut.")
        return keys.get(name, original)

    return named


def _check_convention(
    choice: Choice, given: Given, where: str, warnings: list[str], has_pixels: bool
) -> None:
    """Warn, or raise DataError, where nothing says how the network sees pixels."""
    family, project = choice.network.family, choice.project
    missing = given.missing_convention(family)
    if project.name == PLAIN_DETECTRON2 and missing:
        raise DataError(
            f"{where}: a network in Detectron2's names without an input contract, and BGR and RGB, "
            f"1x1 and 3x3 strides are all usual there; give {' '.join(missing)} as its "
            "training had them, or convert the checkpoint that it was made from"
        )
    usual = family.pixels
    varied = project.any_network and usual
    known = has_pixels or choice.network.scheme.mean is not None
    if given.missing_pixels() and not known and (project.is_nobody or varied):
        others = f"as torchvision's networks have them; else give {' '.join(missing[:3])}"
        warnings.append(
            "the file does not say how its pixels were normalized: ImageNet's RGB mean and std are "
            f"assumed, {f'and {usual}' if usual else others}"
        )


def _recorded(
    project: Project,
    raw: Any,
    missing: Sequence[str],
    where: str,
    beside: Callable[[], Recorded | None],
) -> tuple[Recorded, dict[str, str]]:
    """Return what the file says of its network, and where it names it.

    Args:
        missing: options of the network's convention that are not given.
        beside: reads the configuration beside the file.

    Raises:
        DataError: it is damaged, or another than the project's where these options are needed.
    """
    try:
        read = anyones_record if project.is_nobody else project.recorded
        said = read(raw) if read and isinstance(raw, Mapping) else Recorded()
        its = beside() if project.is_nobody or project.any_network else None
        if its is not None and not said.mean:
            said = its
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if said.other and missing:
        raise DataError(
            f"{where}: its configuration says {', '.join(said.other)}, which is not the "
            f"convention of {project.name}; give {' '.join(missing)} as its training had them"
        )
    return said, {} if project.is_ours else recorded_names(raw, its.arch if its else None)


def _reference(family: Family, *, is_owners: bool) -> str:
    """Return whose network the features are compared with, and how it got its tensors."""
    names = "their own names" if is_owners else "this project's map of names"
    return f"{family.owner}, filled by {names}"


def _assumed(
    choice: Choice,
    names: Mapping[str, str],
    hints: Hints,
    architecture: Any,
    said: Recorded,
    pixels: Pixels,
    given: Given,
) -> str:
    """Return what a file of unknown origin does not tell and the proof takes for granted."""
    project, family = choice.project, choice.network.family
    if not (project.is_nobody or project.any_network):
        return ""
    named_so = any(word in name for name in names.values() for word in family.words)
    known = named_so or "hidden_act" in said.says
    parts = [] if known or not family.assumes else [family.assumes]
    eps = getattr(architecture, "layer_norm_eps", None)
    if eps is not None and not named_so and "layer_norm_eps" not in hints.says:
        parts.append(f"eps {eps:g}")
    if not (said.mean or given.mean or choice.network.scheme.mean):
        parts.append(f"mean {numbers(pixels.mean)}, std {numbers(pixels.std)}")
    return ", ".join(parts)
