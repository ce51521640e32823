"""Recognition of the backbone and its input contract in an opened file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from convert.contract import FOLDED, InputContract, Overrides, Pixels, format_numbers
from convert.extract import extract_backbone, fill_statistics, join_parts, to_float32
from convert.facts import TRANSFORMERS, check_facts
from convert.families.base import (
    PLAIN_DETECTRON2,
    Adapted,
    Family,
    Hints,
    Scheme,
    first_rule,
)
from convert.families.timm import check_names, named_pixels
from convert.families.timm_index import other_networks
from convert.find import Choice, choose_network
from convert.metadata import (
    CheckpointMetadata,
    check_kind,
    generic_record,
    recorded_arguments,
    recorded_names,
)
from convert.modeling.timm_network import named_facts
from convert.projects import Project
from convert.read import flatten, get_nested, is_array, to_tensor
from convert.verify import Converted
from moco.common.errors import DataError, UserError
from moco.modeling.soundness import Triple

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Recognition:
    """Backbone of a recognized checkpoint, and metadata of the file.

    Attributes:
        contract: Input contract.
        state: Tensors of the backbone, by the family's names.
        encoders: All choices of --encoder for this file.
        named: Map from the family's names to those in the file, also for missing tensors.
        dropped: Rule -> number of entries of the file.
        filled: Number of tensors in `state` that are not in the file: folded BN statistics.
        tokens: Dropped tensors that contribute to the source's features, see `Family.tokens`.
        compared: Architecture and tensors of the network that the features are compared with, or
            None for those of `contract` and `state`.
        original: Tensors and architecture before requested changes, or None for converted files.
        epoch: Number of epochs finished, or None.
        keys: Keys of the nested dicts that contain the network, outermost first.
        unclear_names: Names whose networks in timm have to be compared, by the place of the record.
        arguments: Arguments with which timm built these networks, by the same places.
        reference: Description of the network that the features are compared with.
        assumed: Properties that neither tensors nor a name determine, as text, or "".
        assumed_pixels: Part of `assumed` about the pixels.
        configuration: Facts of transformers' configuration about the network; empty without one.
        head: Description of the head.
        notes, warnings: Messages for the report.
    """

    contract: InputContract
    state: dict[str, Tensor]
    encoders: tuple[str, ...]
    named: Callable[[str], str]
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    filled: int = 0
    tokens: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    compared: tuple[Any, Mapping[str, Tensor]] | None = None
    original: tuple[Mapping[str, Tensor], Any] | None = None
    epoch: int | None = None
    keys: tuple[str, ...] = ()
    unclear_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    arguments: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    reference: str = ""
    assumed: str = ""
    assumed_pixels: str = ""
    configuration: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    head: str = "already converted"
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def model(self) -> dict[str, Tensor]:
        """Tensors of the backbone, by Detectron2's names."""
        to_detectron2 = self.contract.family.to_detectron2
        return {to_detectron2(key) or key: value for key, value in self.state.items()}

    @property
    def converted(self) -> Converted:
        """Converted weights, with the notes and warnings for results."""
        return Converted(self.model, self.contract, (*self.notes, *self.warnings))

    def source_network(self) -> tuple[Mapping[str, Tensor], Any]:
        """Return tensors and architecture of the network that the features are compared with."""
        architecture, state = self.compared or (self.contract.architecture, self.state)
        return state, architecture

    def effect_of_tokens(self) -> list[str]:
        """Return a note on how much the features change without the tokens; empty without any."""
        if not self.tokens:
            return []
        state, architecture = self.source_network()
        return [self.contract.family.effect_of_tokens(architecture, state, self.tokens)]

    @property
    def is_verified(self) -> bool:
        """True if nothing but the pixels is assumed: no other network has these tensors."""
        return self.assumed == self.assumed_pixels


def recognize(
    raw: Any,
    where: str,
    overrides: Overrides | None = None,
    sha256: str = "unknown",
    read_config: Callable[[], CheckpointMetadata | None] = lambda: None,
    parts: Mapping[str, str] = MappingProxyType({}),
) -> Recognition:
    """Find the networks of an opened checkpoint and extract the backbone of the chosen one.

    Args:
        raw: Contents of the file as `read_file` returned them.
        where: Name of the file, for messages.
        overrides: Options that take precedence over the file and its project.
        sha256: SHA-256 of the file.
        read_config: Function that reads the configuration next to the file.
        parts: SHA-256 of each file by name, if the checkpoint consists of several.

    Raises:
        DataError: If no network is known, or keys, shapes or metadata disagree.
        UserError: If `overrides` do not fit this checkpoint.
    """
    overrides = overrides or Overrides()
    entries = flatten(raw, where)
    choice = choose_network(raw, entries, overrides.encoder, where, overrides.options)
    network, project = choice.network, choice.project
    network.family.check_options(overrides.options, where)
    notes = [note for note in (project.note, choice.note) if note]
    warnings: list[str] = []
    missing = overrides.missing_convention(network.family)
    recorded, names, arguments = _recorded(project, raw, missing, where, read_config)
    unclear = check_names(names, arguments, network.family, overrides.options, where)
    arch = recorded.arch or get_nested(raw, ("arch",))
    mean, std = _named_pixels(network.scheme, (where, str(arch)), notes)
    is_open = project.is_unknown or project.any_network
    has_no_role = project.is_unknown and bool(choice.found.roles)
    if is_open and not has_no_role and not (recorded.mean or mean):
        mean, std = named_pixels(recorded_names(raw, recorded.arch, tags=True), notes)
    _check_convention(choice, overrides, where, warnings, bool(recorded.mean or mean))
    extracted = extract_backbone(choice, entries, where, overrides.encoder is not None)
    notes += extracted.notes
    warnings += extracted.warnings
    backbone, keys = join_parts(extracted.backbone, where, notes)
    own = network.scheme.reshape_tensor
    dims = {name: value.dim() for name, value in backbone.items()}
    backbone = {name: own(name, value) for name, value in backbone.items()}
    reshaped = [name for name, value in backbone.items() if value.dim() != dims[name]]
    in_file = _names_in_file(choice, keys)
    filled = fill_statistics(backbone, notes) if project.name.endswith(FOLDED) else 0
    if recorded.note:
        notes.append(recorded.note)
    to_float32(backbone, in_file, warnings)
    tokens = {
        new: own(new, to_tensor(e.keys[-1], e.value, where)).float()
        for new, e in extracted.tokens.items()
        if 0 not in e.value.shape  # registers of a network that has none
    }
    tag = recorded.metadata.get("tag", "")
    facts = named_facts(names, arguments, tag) if network.family.tokens else {}
    metadata = {**network.scheme.metadata, **facts, "reshaped": reshaped}
    hints = Hints(
        where=where,
        named=in_file,
        notes=notes,
        warnings=warnings,
        arch=arch,
        metadata={**metadata, **project.metadata, **recorded.metadata},
        recorded=recorded.metadata,
        requested=overrides.options,
        dropped=extracted.dropped,
        tokens=tokens,
        assumed_pixels="" if recorded.mean or overrides.mean is not None else project.name,
    )
    check_kind(recorded, network.family, where)
    backbone = network.family.complete(backbone, hints)
    for name in tokens.keys() & backbone.keys():
        del extracted.dropped[first_rule(name, network.family.dropped)]
    architecture = network.family.recognize(backbone, hints)
    if recorded.kind:
        of_network = network.family.name, architecture, backbone
        check_facts(recorded.kind, recorded.facts, of_network, f"{where}: {recorded.file}")
    adapted = network.family.adapt(architecture, backbone, overrides.options, where)
    notes += [f"changed as requested: {change}" for change in adapted.changes]
    pixels = Pixels(
        recorded.mean or mean or project.mean,
        recorded.std or std or project.std,
        recorded.channel_order or project.channel_order,
    )
    inside = {
        entry.name.removeprefix(network.prefix): tuple(entry.value.shape)
        for entry in entries
        if entry.name.startswith(network.prefix) and is_array(entry.value)
    }
    mapped = {name: tuple(value.shape) for name, value in backbone.items()}
    twins = other_networks(network.family, overrides.options, inside, mapped)
    unknown_pixels = ""
    if not (recorded.mean or overrides.mean or mean) and (
        project.is_unknown or project.any_network
    ):
        unknown_pixels = f"mean {format_numbers(pixels.mean)}, std {format_numbers(pixels.std)}"
    source = _changed(project.name.replace("MSRA", recorded.owner or "MSRA"), adapted)
    every = {entry.name for entry in entries}
    heads = (text for key, text in network.family.heads.items() if network.prefix + key in every)
    epoch = get_nested(raw, project.epoch.split("/"))
    return Recognition(
        contract=InputContract(
            overrides.pixels(pixels, where),
            network.family,
            adapted.architecture,
            source,
            sha256,
            choice.name,
            parts,
        ),
        state=adapted.state,
        encoders=tuple(choice.found.networks),
        named=in_file,
        dropped=dict(extracted.dropped),
        filled=filled,
        tokens=tokens,
        compared=adapted.compared,
        original=(backbone, architecture),
        epoch=epoch + project.epoch_offset if type(epoch) is int else None,
        keys=network.keys,
        unclear_names=unclear,
        arguments=arguments,
        reference=_reference(
            network.family, has_reference_names=network.scheme.has_reference_names
        ),
        assumed=_assumed(choice, names, hints, adapted.architecture, unknown_pixels, twins),
        assumed_pixels=unknown_pixels,
        configuration=recorded.facts if recorded.kind == TRANSFORMERS else {},
        head=next(heads, network.family.heads[""]),
        notes=notes,
        warnings=warnings,
    )


def from_contract(
    model: Mapping[str, Tensor], contract: InputContract, where: str, overrides: Overrides
) -> Recognition:
    """Return the backbone of a converted file, e.g. to write it in another format.

    Args:
        model: Tensors by Detectron2's names.
        contract: Their input contract.
        where: Name of the file, for messages.
        overrides: Options that take precedence over the contract.

    Raises:
        UserError: If `overrides` contradict the contract's network.
    """
    family = contract.family
    if overrides.encoder not in (None, contract.encoder):
        raise UserError(
            f"--encoder {overrides.encoder}: {where} was converted with encoder {contract.encoder}"
        )
    family.check_options(overrides.options, where)
    architecture = family.with_options(contract.architecture, overrides.options, where)
    state = {family.from_detectron2(key) or key: value for key, value in model.items()}
    adapted = family.adapt(architecture, state, overrides.options, where)
    return Recognition(
        contract=dataclasses.replace(
            contract,
            pixels=overrides.pixels(contract.pixels, where),
            architecture=adapted.architecture,
            source=_changed(contract.source, adapted),
        ),
        state=adapted.state,
        encoders=(contract.encoder,),
        named=lambda name: family.to_detectron2(name) or name,
        compared=adapted.compared,
        reference=_reference(family, has_reference_names=False),
        notes=[f"changed as requested: {change}" for change in adapted.changes],
    )


def _named_pixels(
    scheme: Scheme, names: Collection[str], notes: list[str]
) -> tuple[Triple | None, Triple | None]:
    """Return mean and std of a scheme, or of a word in the file's names, with a note."""
    for word, (mean, std) in scheme.named_pixels.items():
        if any(word in name.rpartition("/")[2].lower() for name in names):
            notes.append(f"mean and std are those of {word}, which is in the file's name")
            return mean, std
    return scheme.mean, scheme.std


def _changed(source: str, adapted: Adapted) -> str:
    """Return the name of a source with the changes in its backbone."""
    return f"{source} ({'; '.join(adapted.changes)})" if adapted.changes else source


def _names_in_file(choice: Choice, keys: Mapping[str, str]) -> Callable[[str], str]:
    """Return the map from the family's names to those in the file, also for missing tensors."""
    network, scheme = choice.network, choice.network.scheme
    first = keys.get(scheme.rename(scheme.first[0]) or "", "")
    start = first.removesuffix(scheme.first[0]) if first else network.inner_prefix
    shortcut = any(".shortcut." in key for key in keys.values())

    def named(name: str) -> str:
        original = start + scheme.original(name)
        if shortcut:
            original = original.replace(".downsample.", ".shortcut.")
        return keys.get(name, original)

    return named


def _check_convention(
    choice: Choice, overrides: Overrides, where: str, warnings: list[str], has_pixels: bool
) -> None:
    """Warn, or raise DataError, if the preprocessing is neither recorded nor known."""
    family, project = choice.network.family, choice.project
    missing = overrides.missing_convention(family)
    if project.name == PLAIN_DETECTRON2 and missing:
        raise DataError(
            f"{where}: a network in Detectron2's names without an input contract, which may be for "
            "BGR or RGB and have its stride in the 1x1 or 3x3 conv; give "
            f"{' '.join(missing)} as its training had them, or convert the original checkpoint",
            option=missing[0],
        )
    usual, named = family.pixels, choice.network.scheme.named_pixels
    for word, (mean, std) in named.items():
        usual = f"networks of {word} have --mean {_spaced(mean)} --std {_spaced(std)}"
    varied = project.any_network and usual
    if overrides.missing_pixels() and not has_pixels and (project.is_unknown or varied):
        others = f"as in torchvision; if they differ, give {' '.join(missing[:3])}"
        warnings.append(
            "the file does not record its pixel normalization: assuming ImageNet's RGB mean and "
            f"std, {f'but {usual}' if usual else others}"
        )


def _spaced(values: Triple) -> str:
    return " ".join(f"{value:g}" for value in values)


_PIXELS = ("mean", "std", "channel_order")


def _recorded(
    project: Project,
    raw: Any,
    missing: Sequence[str],
    where: str,
    read_config: Callable[[], CheckpointMetadata | None],
) -> tuple[CheckpointMetadata, dict[str, str], dict[str, dict[str, Any]]]:
    """Return the metadata of a file, and the names and arguments of its network by place.

    Args:
        project: Project of the file.
        raw: Contents of the file.
        missing: Options of the convention that are not set.
        where: Name of the file, for messages.
        read_config: Function that reads the configuration next to the file.

    Raises:
        DataError: If the metadata is damaged, or differs from the project's convention while
            options are missing.
    """
    try:
        read = generic_record if project.is_unknown else project.recorded
        recorded = read(raw) if read and isinstance(raw, Mapping) else CheckpointMetadata()
        sidecar = read_config() if project.is_unknown or project.any_network else None
        if sidecar is not None:
            own = {n: v for n in _PIXELS if (v := getattr(recorded, n)) is not None}
            recorded = dataclasses.replace(sidecar, **own, other=recorded.other)
        arguments = {} if project.is_ours else recorded_arguments(raw, sidecar)
    except DataError as error:
        raise DataError(f"{where}: {error}", option=error.option) from error
    if recorded.other and missing:
        raise DataError(
            f"{where}: its configuration has {', '.join(recorded.other)}, which is not the "
            f"convention of {project.name}; give {' '.join(missing)} as its training had them",
            option=missing[0],
        )
    arch = sidecar.arch if sidecar else None
    return recorded, {} if project.is_ours else recorded_names(raw, arch), arguments


def _reference(family: Family, *, has_reference_names: bool) -> str:
    """Describe the network that the features are compared with, and the names that filled it."""
    names = "their own names" if has_reference_names else "this project's map of names"
    return f"{family.owner}, filled by {names}"


def _assumed(
    choice: Choice,
    names: Mapping[str, str],
    hints: Hints,
    architecture: Any,
    unknown_pixels: str,
    twins: str,
) -> str:
    """List properties that a file of unknown origin leaves open and verification assumes."""
    project, family = choice.project, choice.network.family
    if not (project.is_unknown or project.any_network):
        return ""
    named_so = any(word in name for name in names.values() for word in family.words)
    # A scheme with an epsilon is that of a single project, whose code determines the rest.
    of_code = "layer_norm_eps" in choice.network.scheme.metadata
    known = named_so or of_code or "hidden_act" in hints.metadata
    parts = [] if known or not family.assumes else [family.assumes]
    stated = {*hints.metadata, *hints.requested}
    if not known and hasattr(architecture, "activation") and "activation" not in stated:
        parts.insert(0, "exact GELU")
    eps = getattr(architecture, "layer_norm_eps", None)
    if eps is not None and not named_so and "layer_norm_eps" not in hints.metadata:
        parts.append(f"eps {eps:g}")
    given = str(hints.requested.get(family.named_by, "")).partition(".")[0]
    if twins and not (known or given in names.values()):
        parts.append(twins)
    return ", ".join([*parts, *([unknown_pixels] if unknown_pixels else [])])
