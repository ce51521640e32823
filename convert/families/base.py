"""What the converter has to know of a backbone family, and the registry of families.

A family is registered as a function of its name that returns a `Family`. Sources name their
tensors in several ways; inside the converter a tensor has the family's own name, in a converted
file Detectron2's.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from fvcore.common.registry import Registry

from moco.common.errors import DataError, UserError, shown
from moco.common.registry import lookup
from moco.modeling import soundness
from moco.modeling.soundness import Triple

if TYPE_CHECKING:
    from torch import Tensor, nn

FAMILIES = Registry("backbone families")
# The family of input contracts that name none.
DEFAULT_FAMILY = "resnet"

# What a plain state dict is called as a source, by whose names its tensors have.
PLAIN = "state dict"
PLAIN_DETECTRON2 = "Detectron2's names"
# The scheme that most projects have.
USUAL = "usual"

_NUMBER = re.compile(r"(\d+)", re.ASCII)
# "01" would be read as block 1 and could not be read back.
_INDEX = re.compile(r"0|[1-9]\d{0,3}", re.ASCII)
_MAX_PIECES = 2 * 6 + 1  # no table has a name of more numbers; a file may, to take hours
# Rule -> patterns of Detectron2's names that no source fills. The counter only matters to a
# BatchNorm with momentum None, which neither engine uses.
LEFT_AT_INIT = {"batch counter": "*.num_batches_tracked"}


@dataclasses.dataclass(frozen=True)
class Architecture(abc.ABC):
    """One network of a family; its fields are saved in the input contract.

    Whole numbers are 1..65536, also 0 where that is what a field starts with; other numbers are
    between 0 and 1. Raises UserError when a value is out of its range. As a text: for people, e.g.
    "ResNet-50".
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), int(field.default != 0)
            whole = type(value) is int and least <= value <= 2**16
            is_valid, expected = {
                "int": (whole, f"a whole number, {least}..65536"),
                "bool": (type(value) is bool, "true or false"),
                "float": (type(value) is float and 0 < value < 1, "a number between 0 and 1"),
                "str": (isinstance(value, str), "a text"),
            }.get(str(field.type), (True, ""))
            if not is_valid:
                raise UserError(f"{field.name}: got {shown(value)}, expected {expected}")

    @abc.abstractmethod
    def d2_keys(self) -> dict[str, Any]:
        """Detectron2's keys that describe it."""

    @abc.abstractmethod
    def details(self) -> str:
        """For people: what else a user of its weights has to know."""

    @abc.abstractmethod
    def task_key(self) -> tuple[str, str]:
        """The key whose value a task file is made for, and what the network of a value is called,
        e.g. "ResNet-{}"."""

    @abc.abstractmethod
    def example_task(self) -> tuple[str, dict[str, Any], str]:
        """A task file that fine-tunes a detector, the keys of `d2_keys` that it sets, and
        arguments for its data."""

    def lost_options(self) -> list[str]:
        """Options of the converter that say again what a plain state dict does not."""
        return []

    def in_torchvision(self) -> str:
        """Why torchvision has no such network; "": it has."""
        return f"torchvision has other names for the tensors of a {self}"


class Names:
    """A table of names that is read both ways.

    Args:
        pairs: another's name, and the family's own. A "*" in both is one and the same number, as of
            a block; a "?" in the other's is any number. Own names that end in "#0", "#1", … are
            parts of one tensor. Of several names for one tensor messages have the first.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._own: dict[str, str] = {}
        self._theirs: dict[str, list[str]] = {}
        for theirs, own in pairs:
            self._own[theirs] = own
            self._theirs.setdefault(own, []).append(theirs)

    def own(self, name: str) -> str | None:
        """Return the family's name of a tensor, or None for what the table does not have."""
        return _look_up(name, self._own.get)

    def theirs(self, name: str) -> str | None:
        """Return the other's name of a tensor; of one in parts theirs, with " + " between them."""
        return _look_up(name, self._parts)

    def _parts(self, own: str) -> str | None:
        parts = [self._theirs[own][0]] if own in self._theirs else []
        while found := self._theirs.get(f"{own}#{len(parts)}"):
            parts.append(found[0])
        return " + ".join(parts) or None


def _look_up(name: str, find: Callable[[str], str | None]) -> str | None:
    """Find a name, or it with one number as "*" and perhaps another as "?"."""
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
    """One way in which files name a family's tensors.

    Attributes:
        first: two tensors that show that the network is in a file.
        rename: a name in the file -> the family's own; None: no part of the backbone. Names that
            end in "#0", "#1", … are parts of one tensor, in that order along its first dimension.
        original: the inverse of `rename`, for messages.
        own: how names of the backbone's parts begin. If `rename` does not know such a name, the
            network is another one.
        plain: what a plain state dict with these names is called; "": it is not recognized.
        without: a tensor beside `first` that only another network has, in a plain state dict.
        says: what its code says of its networks, in the words of a family's `recognize`.
        dropped: rules beside those of the family.
        is_owners: whether the names are those of the reference implementation's own class.
        mean, std: of RGB pixels 0..255, where the names are of one network alone.
    """

    first: tuple[str, str]
    rename: Callable[[str], str | None]
    own: re.Pattern[str]
    original: Callable[[str], str] = str
    plain: str = ""
    without: str = "\0"
    says: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_owners: bool = False
    mean: Triple | None = None
    std: Triple | None = None


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of the converter for what a family's tensors cannot tell.

    Attributes:
        name: of what it says, e.g. "stride_in_1x1"; the option is --stride-in-1x1.
        choices: text on the command line -> value; None: a whole number, or a text.
        is_text: whether it is a text.
        help: for the command line.
        convention: needed for weights whose convention nobody noted; may change converted ones.
        fixed: a field of the architecture that may not change in converted ones.
    """

    name: str
    choices: Mapping[str, Any] | None
    help: str
    convention: bool = False
    fixed: bool = False
    is_text: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


@dataclasses.dataclass(frozen=True)
class Hints:
    """What is known of a network beside its tensors, and what a family has to say about it.

    Attributes:
        where: the file's name, for messages.
        named: what the family's names are called in the file.
        notes, warnings: for people; a family appends to them.
        arch: as the file records it; None: it does not.
        says: what the file, else its project, says, in the family's words.
        asked: what the family's options say.
        dropped: rule -> number of entries of the file; tokens: as `Family.tokens`, by their names.
        assumed_pixels: the project whose usual pixels are assumed; "": they are known.
    """

    where: str = "the file"
    named: Callable[[str], str] = str
    notes: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    arch: Any = None
    says: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tokens: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    assumed_pixels: str = ""

    def name(self, key: str) -> str:
        """What a tensor of the family is called in the file, for messages: escaped and cut."""
        return shown(self.named(key), 200)

    def shape(
        self, state: Mapping[str, Tensor], key: str, count: int, otherwise: str
    ) -> tuple[int, ...]:
        """The shape of a tensor that a family must have, of `count` dimensions.

        Args:
            otherwise: what a file without the tensor is, for messages.

        Raises:
            DataError: it is missing, empty, or has another number of dimensions.
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
    """A backbone after changes that its user requested.

    Attributes:
        architecture, state: the backbone's.
        changes: what was changed and by which rule, for people.
        proof: architecture and state of the network that its features are compared with.
    """

    architecture: Any
    state: dict[str, Tensor]
    changes: tuple[str, ...]
    proof: tuple[Any, Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Pyramid:
    """A family's network under an FPN, as both engines register it.

    Attributes:
        network: () -> its class; an instance has `strides` and `stage_channels` of its features
            "res2" to "res5", which are of strides 4 to 32, and their `size_divisibility`.
        arguments: (the family's keys, MODEL.BACKBONE.FREEZE_AT) -> those of the class. Raises
            UserError for values out of their range.
        num_parts: how many parts of it FREEZE_AT can hold fixed.
    """

    network: Callable[[], type[Any]]
    arguments: Callable[[Any, int], dict[str, Any]]
    num_parts: int


@dataclasses.dataclass(frozen=True)
class Family:
    """A backbone family.

    Attributes:
        networks: which it has, for messages.
        architecture: its class of `Architecture`.
        schemes: how its tensors are named, by the name that convert/projects.py uses.
        named_by: the option that names a network of this family, whose files alone tell nothing;
            `named_scheme`: its value -> how that network's tensors are named.
        dropped: rule -> patterns of names inside a network that are no part of the backbone.
        heads: a head's tensor -> what a report calls the head; "": there is none.
        to_detectron2, from_detectron2: the family's names and Detectron2's; None for unknown ones.
        recognize: (tensors by the family's names, hints) -> architecture, from the shapes. Raises
            DataError: not this family, or not what the file says; UserError: options that do not
            fit.
        build: the backbone as Detectron2 has it, with all features; random weights. It returns the
            features of an image by name, and its `strides` are theirs.
        reference: the reference implementation, which shares no code with `build`'s and has the
            family's names; `owner`: whose it is, for people.
        features: its modules whose outputs are the features -> Detectron2's names of those.
        keys: of a detector's configuration, with their defaults; all begin with `section`.
        not_protocol: those of them that belong to the weights, or change no result.
        pyramid: its network under an FPN; None: the engines have detectors of their own for it.
        options: of the converter, for this family alone.
        lookalikes: other networks that people take for this family: what one is, and two of its
            keys after one prefix.
        obstacles: what only other networks have, for people -> patterns of its names.
        check_trained: as `moco.modeling.soundness.check_trained`.
        in_own_shape: (the family's name, a file's tensor) -> the same numbers in the family's
            shape, where sources have them in several.
        image_size: height and width, px, of the image that proves a conversion.
        tokens: rules of `dropped` whose tensors take part in the source's features.
        effect: (architecture, state, the tensors of `tokens`) -> by how much features change
            without them, for people.
        assumes: what no tensor tells and the reference implementation has, for people.
        untold: which option a file without a name of its network needs, for people; "": none.
        pixels: which others than ImageNet's are usual, for people; "": none.
        words: of which a name of such a network has one; plain_names: those of a plain one, which
            has no other.
        in_timm: modules of timm's networks of this family -> Detectron2's names of the features.
        source_features: (architecture, state, the tensors of `tokens`, an image) -> `in_timm`, and
            the features, where these depend on the tokens.
        adapt: (architecture, state, values of the family's options, file's name) -> the backbone
            after the changes that these request. Raises UserError where they do not fit.
    """

    name: str
    networks: str
    architecture: type[Any]
    schemes: Mapping[str, Scheme]
    dropped: Mapping[str, str]
    heads: Mapping[str, str]
    to_detectron2: Callable[[str], str | None]
    from_detectron2: Callable[[str], str | None]
    recognize: Callable[[Mapping[str, Tensor], Hints], Any]
    build: Callable[[Any], nn.Module]
    reference: Callable[[Any], nn.Module]
    owner: str
    features: Mapping[str, str]
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    not_protocol: tuple[str, ...] = ()
    pyramid: Pyramid | None = None
    named_by: str = ""
    named_scheme: Callable[[str], Scheme] | None = None
    options: tuple[Option, ...] = ()
    lookalikes: tuple[tuple[str, str, str], ...] = ()
    obstacles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    check_trained: Callable[..., list[str]] = soundness.check_trained
    in_own_shape: Callable[[str, Tensor], Tensor] = lambda name, value: value
    image_size: Callable[[Any], tuple[int, int]] = lambda architecture: soundness.IMAGE_SIZE_PX
    tokens: tuple[str, ...] = ()
    effect: Callable[[Any, Mapping[str, Tensor], Mapping[str, Tensor]], str] | None = None
    assumes: str = ""
    untold: str = ""
    pixels: str = ""
    words: tuple[str, ...] = ()
    plain_names: frozenset[str] = frozenset()
    in_timm: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source_features: Callable[..., tuple[dict[str, str], dict[str, Tensor]]] | None = None
    adapt: Callable[[Any, dict[str, Tensor], Mapping[str, Any], str], Adapted] = (
        lambda architecture, state, asked, where: Adapted(
            architecture, state, (), (architecture, state)
        )
    )

    @property
    def section(self) -> str:
        """Return how its keys begin."""
        return f"MODEL.{self.name.upper()}."

    def schemes_of(self, asked: Mapping[str, Any]) -> Mapping[str, Scheme]:
        """Return how its tensors are named under values of the options."""
        if self.named_scheme and self.named_by in asked:
            return {self.named_by: self.named_scheme(asked[self.named_by])}
        return self.schemes

    def check_options(self, names: Collection[str], where: str) -> None:
        """Raise UserError for options of another family; `names`: those that were given."""
        own = {option.name: option.flag for option in self.options}
        for name in names:
            if name not in own:
                raise UserError(
                    f"--{name.replace('_', '-')}: {where} has another kind of network, whose "
                    f"options are {', '.join(own.values()) or 'none'}"
                )

    def with_options(self, architecture: Any, asked: Mapping[str, Any], where: str) -> Any:
        """A converted architecture under values of the options; raises UserError for one that
        converted weights cannot change."""
        for option in (option for option in self.options if option.name in asked):
            value, converted = asked[option.name], getattr(architecture, option.name, None)
            if option.convention:
                architecture = dataclasses.replace(architecture, **{option.name: value})
            elif option.fixed and value != converted:
                raise UserError(
                    f"{option.flag} {value}: {where} was converted with {option.name} {converted}"
                )
        return architecture

    def __reduce__(self) -> tuple[Callable[[str], Family], tuple[str]]:
        """Another process that is handed a contract looks its family up."""
        return family_named, (self.name,)


def family_named(name: str) -> Family:
    """A registered family; raises UserError."""
    family: Family = lookup(FAMILIES, name, "family")()
    return family


def families() -> list[Family]:
    """Every registered family."""
    return [make() for _, make in FAMILIES]


def later(name: str) -> Callable[..., Any]:
    """Return what calls "module:function" and imports the module then, as it may import torch."""
    return lambda *args: pkgutil.resolve_name(name)(*args)


def check_layer_norms(
    state: Mapping[str, Tensor],
    where: str,
    named: Callable[[str], str] = str,
    *,
    pattern: str,
    **_: Any,
) -> list[str]:
    """Raise DataError where every LayerNorm is as initialization left it, at scale 1 and shift 0.

    `pattern`: of the names of their scales. Returns no warnings.
    """
    norms = [key.removesuffix(".weight") for key in state if re.search(pattern, key)]
    if all(
        bool((state[f"{norm}.weight"] == 1).all())
        and f"{norm}.bias" in state
        and not bool(state[f"{norm}.bias"].any())
        for norm in norms
    ):
        raise DataError(
            f"{where}: all {len(norms)} layer norms have the scale and shift of initialization: "
            "this network was never trained"
        )
    return []


def stochastic_depth(p: float) -> nn.Module:
    """Leave a residual branch of an image out of training with probability `p`, 0 to 1."""
    import torch

    # Imported here, for it takes longer than torch; and computes while it is, so not on meta, where
    # shapes alone are asked for.
    with torch.device("cpu"):
        from torchvision.ops import StochasticDepth
    return StochasticDepth(p, "row")


def first_rule(key: str, rules: Mapping[str, str]) -> str | None:
    """Name of the first of `rules` (name -> patterns between spaces) that a key falls under."""
    return next((rule for rule, patterns in rules.items() if _matcher(patterns)(key)), None)


@functools.cache
def _matcher(patterns: str) -> Callable[[str], Any]:
    return re.compile("|".join(map(translate, patterns.split()))).match
