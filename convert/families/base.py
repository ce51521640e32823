"""Interface and registry of backbone families.

Sources name tensors in several ways; the converter uses the family's own names internally and
Detectron2's names in converted files.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import translate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from moco.common.errors import DataError, UserError, format_value
from moco.common.keys import Key, Keys, Range, Role, half_open_interval
from moco.modeling import soundness
from moco.modeling.soundness import Triple

if TYPE_CHECKING:
    from torch import Tensor, nn


STRIDES = {"res2": 4, "res3": 8, "res4": 16, "res5": 32}  # of the maps under an FPN
# Family of input contracts that name none.
DEFAULT_FAMILY = "resnet"

# Source names of plain state dicts, by their naming scheme.
PLAIN = "state dict"
PLAIN_DETECTRON2 = "Detectron2's names"
HUGGING_FACE = "huggingface/transformers"
TIMM = "timm"  # the family of all networks of timm
# Name of the naming scheme that most projects use.
USUAL = "usual"

_NUMBER = re.compile(r"(\d+)", re.ASCII)
# The inverse mapping would write block "01" as "1".
_INDEX = re.compile(r"0|[1-9]\d{0,3}", re.ASCII)
_MAX_PIECES = 2 * 6 + 1  # no table has a name with more numbers; bounds time on hostile files
# Rule -> patterns of Detectron2's names that no source fills. Only a BatchNorm with momentum None
# uses the counter, and neither engine has one.
LEFT_AT_INIT = {"batch counter": "*.num_batches_tracked"}


class OtherNetworkError(DataError):
    """Network of no family, or with tensors that networks of its family do not have."""


@dataclasses.dataclass(frozen=True)
class Architecture(abc.ABC):
    """Architecture of one network of a family, saved in the input contract.

    Integers are 1..65536, or 0 if that is a field's default; floats are between 0 and 1. `str`
    gives a readable name, e.g. "ResNet-50".

    Raises:
        UserError: If a value is out of its range.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), int(field.default != 0)
            whole = type(value) is int and least <= value <= 2**16
            is_valid, expected = {
                "int": (whole, f"an integer, {least}..65536"),
                "bool": (type(value) is bool, "true or false"),
                "float": (type(value) is float and 0 < value < 1, "a number between 0 and 1"),
                "str": (isinstance(value, str), "a text"),
            }.get(str(field.type), (True, ""))
            if not is_valid:
                raise UserError(f"{field.name}: got {format_value(value)}, expected {expected}")

    @abc.abstractmethod
    def d2_keys(self) -> dict[str, Any]:
        """Return Detectron2's configuration keys that describe the network."""

    @abc.abstractmethod
    def details(self) -> str:
        """Describe properties that change the features but are not in the name."""

    @abc.abstractmethod
    def task_key(self) -> tuple[str, str]:
        """Return the key by which task files differ, and a format for its value.

        The format names the network in messages, e.g. "ResNet-{}".
        """

    @abc.abstractmethod
    def example_task(self) -> tuple[str, dict[str, Any], str]:
        """Return an example task that fine-tunes a detector.

        Returns:
            The path of the task file, the keys of `d2_keys` that distinguish the network of the
            task from others, and the arguments that locate the data.
        """

    def keys_to_set(self) -> dict[str, Any]:
        """Return the keys that adapt the example task to this network."""
        (_, keys, _), own = self.example_task(), self.d2_keys()
        return {key: own[key] for key, value in keys.items() if own[key] != value}

    def lost_options(self) -> list[str]:
        """Return the converter's options that restore what a plain state dict does not record."""
        return []

    def in_torchvision(self) -> str:
        """Return why torchvision has no such network, or "" if it has one."""
        return f"torchvision names the tensors of a {self} differently"


class Names:
    """Bidirectional table of tensor names.

    Args:
        pairs: Pairs of an external name and the family's own. A "*" in both stands for the same
            number, e.g. of a block; a "?" in the external name for any number. Own names ending in
            "#0", "#1", … are parts of one tensor. If a tensor has several external names, messages
            use the first.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._own: dict[str, str] = {}
        self._external: dict[str, list[str]] = {}
        for external, own in pairs:
            self._own[external] = own
            self._external.setdefault(own, []).append(external)

    @property
    def own_names(self) -> Collection[str]:
        """The family's names, with "*" for numbers."""
        return self._external.keys()

    def own(self, name: str) -> str | None:
        """Return the family's name of a tensor, or None if it is not in the table."""
        return _look_up(name, self._own.get)

    def external(self, name: str) -> str | None:
        """Return the external name of a tensor, or those of its parts joined by " + "."""
        return _look_up(name, self._parts)

    def _parts(self, own: str) -> str | None:
        if own in self._external:
            return self._external[own][0]
        parts: list[str] = []
        while found := self._external.get(f"{own}#{len(parts)}"):
            parts.append(found[0])
        return " + ".join(parts) or None


def weights_and_biases(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of weights and biases for pairs of modules.

    "attn.qkv#0" names a part of a module.
    """
    for external, own in names.items():
        module, mark, part = own.partition("#")
        for tensor in ("weight", "bias"):
            yield f"{external}.{tensor}", f"{module}.{tensor}{mark}{part}"


def _look_up(name: str, find: Callable[[str], str | None]) -> str | None:
    """Look up a name as it is, then with one number as "*" and possibly another as "?"."""
    if "*" in name or "?" in name or len(pieces := _NUMBER.split(name)) > _MAX_PIECES:
        return None
    if found := find(name):
        return found
    numbers = [i for i in range(1, len(pieces), 2) if _INDEX.fullmatch(pieces[i])]
    for star, other in itertools.product(numbers, (None, *numbers)):
        wild = {star: "*", **({} if other in (None, star) else {other: "?"})}
        if found := find("".join(wild.get(i, piece) for i, piece in enumerate(pieces))):
            return found.replace("*", pieces[star])
    return None


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Naming scheme of a family's tensors in files.

    Attributes:
        first: Two tensors whose presence identifies the network in a file.
        rename: Map from a name in the file to the family's own, or None if it is not part of the
            backbone. Names that end in "#0", "#1", … are parts of one tensor, concatenated in that
            order along the first dimension.
        original: Inverse of `rename`, for messages.
        own: Pattern of the backbone's names. A name that matches but is unknown to `rename` belongs
            to another network.
        plain: Source name of a plain state dict in this scheme, or "" if none is accepted.
        without: Tensor that only another network has next to `first`, in a plain state dict.
        metadata: Facts of the scheme's code that no tensor holds, by the names that `recognize` of
            the family reads.
        dropped: Drop rules in addition to the family's.
        beside: Drop rules for other parts of such files, e.g. a text tower.
        reshape_tensor: Map from (the family's name, a file's tensor) to the tensor in the family's
            shape, if the scheme uses another one.
        has_reference_names: True if the reference implementation has these names.
        mean, std: Normalization of RGB pixels 0..255, if the scheme belongs to a single network.
        named_pixels: Word in a file's or a recorded name -> mean and std of such a network.
    """

    first: tuple[str, str]
    rename: Callable[[str], str | None]
    own: re.Pattern[str]
    original: Callable[[str], str] = str
    plain: str = ""
    without: str = "\0"
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    beside: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reshape_tensor: Callable[[str, Tensor], Tensor] = lambda name, value: value
    has_reference_names: bool = False
    mean: Triple | None = None
    std: Triple | None = None
    named_pixels: Mapping[str, tuple[Triple, Triple]] = dataclasses.field(default_factory=dict)


def table_scheme(
    names: Names, first: tuple[str, str], own: str, plain: str = PLAIN, **others: Any
) -> Scheme:
    """Return the scheme of a table of names.

    Args:
        names: Table of all tensors.
        first: `Scheme.first`, by the family's names.
        own: Pattern of the backbone's names.
        plain: `Scheme.plain`.
        others: Further fields of `Scheme`.
    """
    patches, block = (names.external(name) or "" for name in first)
    original = lambda name: names.external(name) or name  # noqa: E731  # field of a dataclass
    return Scheme((patches, block), names.own, re.compile(own), original, plain, **others)


@dataclasses.dataclass(frozen=True)
class Option:
    """Option of the converter for a property that a family's tensors do not determine.

    Attributes:
        name: Name of the property, e.g. "stride_in_1x1" for the option --stride-in-1x1.
        choices: Map from arguments of the command line to values, or None for an integer or string.
        is_text: True if the value is a string.
        in_timm: Argument of timm's `create_model` for this property, or "" without one.
        help: Help text of the command line.
        convention: True if the option is required when neither file nor project records the
            convention; the option may also change converted weights.
        fixed: True for a field of the architecture that converted weights cannot change.
    """

    name: str
    choices: Mapping[str, Any] | None
    help: str
    convention: bool = False
    fixed: bool = False
    is_text: bool = False
    in_timm: str = ""

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return f"--{self.name.replace('_', '-')}"


@dataclasses.dataclass(frozen=True)
class Hints:
    """Information about a network apart from its tensors, and messages of its recognition.

    Attributes:
        where: Name of the file, for messages.
        named: Map from the family's names to those in the file.
        notes, warnings: Messages for the report, to which a family appends.
        arch: Name of the architecture that the file records, or None.
        metadata: Facts that the file records or that are known of its project, by the names that
            `recognize` reads.
        recorded: Facts that the file or the configuration next to it records.
        requested: Values of the family's options.
        dropped: Drop rule -> number of entries of the file.
        tokens: Tensors of the rules in `Family.tokens`, by name.
        assumed_pixels: Project whose normalization is assumed, or "" if it is known.
    """

    where: str = "the file"
    named: Callable[[str], str] = str
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    arch: Any = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    recorded: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    requested: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tokens: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    assumed_pixels: str = ""

    def name(self, key: str) -> str:
        """Return a tensor's name in the file for messages, escaped and truncated."""
        return format_value(self.named(key), 200)

    def shape(
        self, state: Mapping[str, Tensor], key: str, count: int, otherwise: str
    ) -> tuple[int, ...]:
        """Return the shape of a required tensor.

        Args:
            state: Tensors by the family's names.
            key: Name of the tensor.
            count: Expected number of dimensions.
            otherwise: What a file without the tensor is, for the message.

        Raises:
            DataError: If it is missing, empty, or has another number of dimensions.
        """
        if key not in state:
            raise DataError(f"{self.where}: {self.name(key)} is missing; {otherwise}")
        dims = tuple(state[key].shape)
        if len(dims) != count or 0 in dims:
            raise DataError(
                f"{self.where}: {self.name(key)} has shape {list(dims)}, expected {count} "
                "dimensions"
            )
        return dims


@dataclasses.dataclass(frozen=True)
class Adapted:
    """Backbone after requested changes.

    Attributes:
        architecture, state: Architecture and tensors of the backbone.
        changes: Descriptions of the changes.
        compared: Architecture and tensors of the network that the features are compared with.
    """

    architecture: Any
    state: dict[str, Tensor]
    changes: tuple[str, ...]
    compared: tuple[Any, Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """Network of a family under an FPN, as both engines register it.

    Attributes:
        network: Function that returns the class of the network. Instances have `strides` and
            `stage_channels` of the features "res2" to "res5", of strides 4 to 32, and a
            `size_divisibility`.
        arguments: Map from (the family's keys, MODEL.BACKBONE) to arguments of the class. Raises
            UserError for values out of their range.
        num_parts: Map from the family's keys to the number of parts that FREEZE_AT can freeze.
        freezes_whole: True if FREEZE_AT -1 freezes the whole network.
        features: Map from the family's keys to the strides of the maps, by name.
        kinds: Suffixes of the builders' names: "" for the network alone, "_fpn" for an FPN over
            four maps, "_sfp" for ViTDet's simple pyramid over one map.
    """

    network: Callable[[], type[Any]]
    arguments: Callable[[Any, Any], dict[str, Any]]
    num_parts: Callable[[Any], int]
    freezes_whole: bool = False
    features: Callable[[Any], Mapping[str, int]] = lambda keys: STRIDES
    kinds: tuple[str, ...] = ("", "_fpn")


class Family(abc.ABC):
    """Backbone family; a subclass states its attributes and is registered by `register`.

    Attributes:
        name: Name in the registry and in input contracts.
        networks: Description of the networks, for messages.
        architecture: Subclass of `Architecture`.
        schemes: Naming schemes of the tensors, by the name that convert/projects.py uses.
        dropped: Drop rule -> patterns of names inside a network that are not part of the backbone.
        heads: Tensor of a head -> its description in a report; "" describes a missing head.
        owner: Project of the reference implementation, for messages.
        features: Modules of `reference`, and of timm's networks, whose outputs are the features ->
            Detectron2's names.
        detectron2: Table of Detectron2's names of tensors.
        norms: Regular expression of the names of the layer norms' scales, or "" for networks with
            batch norm.
        keys: Keys of a detector's configuration; all start with MODEL. and the family's name.
        pyramid: Network under an FPN, or None if the engines have detectors of their own for it.
        named_by: Option that names a network of this family if the tensors do not identify it.
        options: Options of the converter for this family alone.
        lookalikes: Other networks that are often mistaken for this family: a description, and two
            keys under a common prefix.
        obstacles: Description of a part that only other networks have -> patterns of names.
        tokens: Rules of `dropped` whose tensors contribute to the source's features. A backbone may
            have them (`complete`), and a detector may leave them out.
        is_windowed: True if attention is within windows. timm's network then takes images of one
            size and has features with the channels last.
        assumes: Properties of the reference implementation that no tensor determines, as text.
        required_option: Option that a file needs if it does not name its network, as text, or "".
        pixels: Common normalization other than ImageNet's, as text, or "".
        words: Words, one of which is in every name of such a network.
        plain_names: Words of which names of plain networks consist.
        model_types: Types of such networks in transformers' configuration.
    """

    name: str
    networks: str
    architecture: type[Any]
    schemes: Mapping[str, Scheme]
    dropped: Mapping[str, str]
    heads: Mapping[str, str]
    owner: str
    features: Mapping[str, str]
    detectron2: Names
    norms: str = ""
    keys: Keys = MappingProxyType({})
    pyramid: Pyramid | None = None
    named_by: str = ""
    options: tuple[Option, ...] = ()
    lookalikes: tuple[tuple[str, str, str], ...] = ()
    obstacles: Mapping[str, str] = MappingProxyType({})
    tokens: tuple[str, ...] = ()
    is_windowed: bool = False
    assumes: str = ""
    required_option: str = ""
    pixels: str = ""
    words: tuple[str, ...] = ()
    plain_names: frozenset[str] = frozenset()
    model_types: tuple[str, ...] = ()

    @abc.abstractmethod
    def recognize(self, state: Mapping[str, Tensor], hints: Hints) -> Any:
        """Return the architecture of a network, from the shapes of its tensors.

        Args:
            state: Tensors by the family's names.
            hints: Further information about the network.

        Raises:
            DataError: If the tensors are not of this family or contradict the file.
            UserError: If options do not fit.
        """

    @abc.abstractmethod
    def build(self, architecture: Any) -> nn.Module:
        """Build the backbone as in Detectron2, with random weights.

        The module returns all features of an image by name, and has their `strides`.
        """

    @abc.abstractmethod
    def reference(self, architecture: Any) -> nn.Module:
        """Build the reference implementation.

        The module has the family's names and shares no code with the one of `build`.
        """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)  # another process unpickles an object of its own

    def __hash__(self) -> int:
        return hash(type(self))

    def to_detectron2(self, key: str) -> str | None:
        """Return Detectron2's name of one of the family's tensors, or None if it is unknown."""
        return self.detectron2.external(key)

    def from_detectron2(self, key: str) -> str | None:
        """Return the family's name of one of Detectron2's tensors, or None if it is unknown."""
        return self.detectron2.own(key)

    def schemes_of(self, requested: Mapping[str, Any]) -> Mapping[str, Scheme]:
        """Return the naming schemes under values of the options."""
        return self.schemes

    def check_trained(
        self, state: Mapping[str, Tensor], where: str, named: Callable[[str], str], *, folded: bool
    ) -> list[str]:
        """Check that a network was trained, and return warnings.

        Raises:
            DataError: If all norms have their initial values.
        """
        if self.norms:
            return check_layer_norms(state, where, self.norms)
        return soundness.check_trained(state, where, named, folded=folded)

    def complete(self, state: dict[str, Tensor], hints: Hints) -> dict[str, Tensor]:
        """Return all tensors of the backbone; files may lack some or have them in another form."""
        return state

    def image_size(self, architecture: Any) -> tuple[int, int]:
        """Return height and width, in px, of the image that verifies a conversion."""
        return soundness.IMAGE_SIZE_PX

    def source_features(
        self,
        architecture: Any,
        state: Mapping[str, Tensor],
        tokens: Mapping[str, Tensor],
        image: Tensor,
    ) -> tuple[Mapping[str, str], Mapping[str, Tensor]]:
        """Compute the features of the source, with its tokens, by the reference implementation.

        Args:
            architecture: Architecture of the network.
            state: Tensors by the family's names.
            tokens: Tensors of the rules in `tokens`, by name.
            image: Normalized pixels (1, 3, H, W).

        Returns:
            Modules of timm's networks with the names of their features, and the features by name.
        """
        from convert.modeling.reference import reference_features

        return self.features, reference_features(self, architecture, state, image)

    def effect_of_tokens(
        self, architecture: Any, state: Mapping[str, Tensor], tokens: Mapping[str, Tensor]
    ) -> str:
        """Describe how much the features change without the tensors of the rules in `tokens`."""
        return ""

    def tensors_in_timm(
        self, architecture: Any, tensors: dict[str, Tensor], names: Collection[str]
    ) -> dict[str, Tensor]:
        """Return tensors by the names in timm's network, which has the tensors `names`."""
        return tensors

    def adapt(
        self, architecture: Any, state: dict[str, Tensor], requested: Mapping[str, Any], where: str
    ) -> Adapted:
        """Return the backbone after the changes that options request.

        Args:
            architecture: Architecture of the network.
            state: Tensors by the family's names.
            requested: Values of the family's options.
            where: Name of the file, for messages.

        Raises:
            UserError: If the changes do not fit the network.
        """
        return Adapted(architecture, state, (), (architecture, state))

    def resample(
        self, architecture: Any, state: Mapping[str, Tensor], model: Any
    ) -> tuple[Mapping[str, Tensor], str]:
        """Return the tensors for the sizes of images and patches in a detector.

        Args:
            architecture: Architecture of the weights.
            state: Tensors of the weights.
            model: Node MODEL of the detector's configuration.

        Returns:
            The tensors, and a description of the change, or "".

        Raises:
            UserError: If the tensors cannot be resampled.
        """
        return state, ""

    def check_options(self, names: Collection[str], where: str) -> None:
        """Raise UserError if one of the options `names` belongs to another family."""
        own = {option.name: option.flag for option in self.options}
        for name in names:
            if name not in own:
                raise UserError(
                    f"--{name.replace('_', '-')}: {where} has another kind of network, whose "
                    f"options are {', '.join(own.values()) or 'none'}"
                )

    def with_options(self, architecture: Any, requested: Mapping[str, Any], where: str) -> Any:
        """Return the architecture of converted weights with values of the options.

        Raises:
            UserError: If converted weights cannot change an option.
        """
        for option in (option for option in self.options if option.name in requested):
            value, converted = requested[option.name], getattr(architecture, option.name, None)
            if option.convention:
                architecture = dataclasses.replace(architecture, **{option.name: value})
            elif option.fixed and value != converted:
                raise UserError(
                    f"{option.flag} {value}: {where} was converted with {option.name} {converted}"
                )
        return architecture


FAMILIES: dict[str, Family] = {}  # by name
F = TypeVar("F", bound=Family)


def register(family: type[F]) -> type[F]:
    """Register a family under its name; a decorator of the class."""
    FAMILIES[family.name] = family()
    return family


def family_named(name: str) -> Family:
    """Return a registered family; raises UserError for an unknown name."""
    if name not in FAMILIES:
        raise UserError(f"family: got {name!r}, expected one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def families() -> list[Family]:
    """Return all registered families."""
    return [*FAMILIES.values()]


def check_layer_norms(
    state: Mapping[str, Tensor],
    where: str,
    pattern: str,
) -> list[str]:
    """Check that one of the LayerNorms, if there are any, was trained; return no warnings.

    Args:
        state: Tensors by the family's names.
        where: Name of the file, for messages.
        pattern: Regular expression of the names of the scales.

    Raises:
        DataError: If every LayerNorm still has its initial scale 1 and shift 0.
    """
    norms = [key.removesuffix(".weight") for key in state if re.search(pattern, key)]
    if norms and all(
        bool((state[f"{norm}.weight"] == 1).all())
        and f"{norm}.bias" in state
        and not bool(state[f"{norm}.bias"].any())
        for norm in norms
    ):
        raise DataError(
            f"{where}: all {len(norms)} layer norms have their initial scale and shift: "
            "this network was never trained"
        )
    return []


def count_blocks(
    state: Mapping[str, Tensor], hints: Hints, start: str, tensor: str, otherwise: str
) -> int:
    """Return the number of blocks of a stage.

    Args:
        state: Tensors by the family's names.
        hints: Further information about the network.
        start: Prefix of the blocks, before their number.
        tensor: Tensor that every block has.
        otherwise: What a file without one of the blocks is, for the message.

    Raises:
        DataError: If a block is missing between others.
    """
    blocks = {int(key.removeprefix(start).split(".")[0]) for key in state if start in key}
    if missing := sorted(set(range(max(blocks, default=0) + 1)) - blocks):
        name = hints.name(f"{start}{missing[0]}.{tensor}")
        raise DataError(f"{hints.where}: {name} is missing; {otherwise}")
    return len(blocks)


def stochastic_depth(p: float) -> nn.Module:
    """Return a layer that drops a residual branch per image in training with probability `p`."""
    import torch

    # Imported here because it takes longer than torch, and on the CPU because the import computes
    # tensors, which fails on the meta device.
    with torch.device("cpu"):
        from torchvision.ops import StochasticDepth
    return StochasticDepth(p, "row")


def first_rule(key: str, rules: Mapping[str, str]) -> str | None:
    """Return the first of `rules` (name -> patterns separated by spaces) that matches a key."""
    return next((rule for rule, patterns in rules.items() if _matcher(patterns)(key)), None)


@functools.cache
def _matcher(patterns: str) -> Callable[[str], Any]:
    return re.compile("|".join(map(translate, patterns.split()))).match


FEATURES = (*STRIDES,)


def contract_key(
    default: Any, doc: str, check: Range | None = None, *, role: Role = Role.WEIGHTS
) -> Key:
    """Return a key of a detector's configuration that the weights' contract sets."""
    return Key(default, f"{doc} Set by the weights' contract.", check, role=role)


DROP_PATH = Key(
    0.0,
    "Stochastic depth: drop probability of the last block; increases linearly from 0 at the first "
    "block.",
    half_open_interval(0, 1),
)


@dataclasses.dataclass(frozen=True)
class StagedArchitecture(Architecture):
    """Architecture whose fields are the keys of a node of MODEL; tuples have one value per stage.

    Raises:
        UserError: If a value is out of its range.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            if field.type != "tuple[int, ...]":
                continue
            values = getattr(self, field.name)
            four = isinstance(values, list | tuple) and len(values) == len(FEATURES)
            if not four or not all(type(v) is int and 1 <= v <= 2**16 for v in values):
                raise UserError(
                    f"{field.name}: got {format_value(values)}, expected four integers, 1..65536"
                )
            object.__setattr__(self, field.name, tuple(values))

    def d2_keys(self) -> dict[str, Any]:
        """Return the keys of the fields, in the node of `task_key`."""
        node = self.task_key()[0].rpartition(".")[0]
        return {
            f"{node}.{name.upper()}": list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }


def network_arguments(
    architecture: type[StagedArchitecture], node: str
) -> Callable[[Any, Any], dict[str, Any]]:
    """Return `Pyramid.arguments` of a network that takes such an architecture.

    Args:
        architecture: Class of the architecture.
        node: Name of the node of the configuration, e.g. "MODEL.SWIN".
    """

    def arguments(keys: Any, backbone: Any) -> dict[str, Any]:
        fields = {
            field.name: keys[field.name.upper()] for field in dataclasses.fields(architecture)
        }
        try:
            built = architecture(**fields)
        except UserError as error:
            raise UserError(f"{node}: {error}") from error
        return {
            "architecture": built,
            "drop_path": keys.DROP_PATH,
            "output_norms": True,
            "freeze_at": backbone.FREEZE_AT,
        }

    return arguments


def scale_to_255(values: Any) -> Triple:
    """Scale three numbers for pixels 0..1 to pixels 0..255."""
    red, green, blue = (round(float(value) * 255, 6) for value in values)
    return (red, green, blue)
