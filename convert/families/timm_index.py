"""timm's networks by the names and shapes of their tensors, for files that name none.

timm_index.txt has a line for each network of timm, see `Row`, and for each network of torchvision
whose tensors have other names. `python -m tests.golden.regenerate_timm_index` writes it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from moco.common.errors import first_few
from moco.common.files import read_text

if TYPE_CHECKING:
    from convert.families.base import Family

FILE = Path(__file__).with_suffix(".txt")
MAPS, NO_MAPS, TORCHVISION = "maps", "-", "torchvision"
Shapes = Mapping[str, tuple[int, ...]]
T = TypeVar("T")

_WORDS = re.compile(r"[a-z]+")
_COUNTER = ".num_batches_tracked"
# Tensors that differ between sizes of the image, and between poolings.
_VARYING = re.compile(
    r"(^|\.)(pos_emb\w*|rel_pos\w*|relative_\w+|attention_bias\w*|rope\w*|freqs\w*)(\.|$)"
    r"|^(fc_)?norm\."
)
# Limits: tensors of a network (timm's largest has 3108), share in a file, keys above the tensors.
_MIN_TENSORS, _MAX_TENSORS, _MIN_PART, _MAX_DEPTH = 40, 5_000, 0.2, 8
_MAX_NAMES = 5  # in a message
# Tensor of efficientnet-pytorch, whose padding is TensorFlow's as in timm's networks with `tf_`.
EFFICIENTNET_PYTORCH = "_conv_stem.weight"


class Digests(NamedTuple):
    """Digests of a network's tensors, see `Row`."""

    exact: str
    loose: str
    order: str


class Row(NamedTuple):
    """Network of timm.

    Attributes:
        exact: Digest of the names and shapes of all tensors but the classifier.
        loose: Digest of the tensors that depend neither on the image's size, the pooling nor the
            head.
        order: Digest of the shapes of all tensors in order, without names or a last linear layer.
        maps: `MAPS` if it has maps for a pyramid, see `convert.modeling.timm_network.network_maps`.
        stands_for: Name of a network with equal tensors and features, often its own.
    """

    exact: str
    loose: str
    order: str
    maps: str
    stands_for: str


@dataclasses.dataclass(frozen=True)
class Index:
    """Networks of one version of timm, and networks of torchvision with other names of tensors.

    Attributes:
        version: timm's version.
        classifiers: Names of timm's classifiers.
        rows: Networks of timm by name.
        torchvision: Exact digest of a network of torchvision -> name, and timm's networks of the
            same tensors in order and the same layers.
    """

    version: str
    classifiers: frozenset[str]
    rows: Mapping[str, Row]
    torchvision: Mapping[str, tuple[str, tuple[str, ...]]]

    def exact(self, shapes: Shapes) -> str:
        """Return the exact digest of tensors."""
        return digests(shapes, self.classifiers).exact

    def named(self, **digests: str) -> list[str]:
        """Return the networks with a digest, one for all of equal features."""
        ((column, digest),) = digests.items()
        rows = (row for row in self.rows.values() if getattr(row, column) == digest)
        return list(dict.fromkeys(row.stands_for for row in rows))

    def twins(self, name: str) -> list[str]:
        """Return the networks with the same tensors as a network, and other features."""
        row = self.rows.get(name)
        if row is None:
            return []
        return [other for other in self.named(exact=row.exact) if other != row.stands_for]


@functools.cache
def index() -> Index:
    """Return the index that is shipped with the converter."""
    version, classifiers, *lines = (line.split() for line in read_text(FILE).splitlines())
    return Index(
        version[-1],
        frozenset(classifiers[2:]),
        {name: Row(*columns) for name, *columns in lines if name != TORCHVISION},
        {
            exact: (name, tuple(others))
            for kind, name, exact, *others in lines
            if kind == TORCHVISION
        },
    )


def digests(shapes: Shapes, classifiers: Iterable[str]) -> Digests:
    """Return the digests of tensors, see `Row`; `classifiers` are names of linear layers."""
    heads = {f"{name}.{tensor}" for name in classifiers for tensor in ("weight", "bias")}
    parts = {name.partition(".")[0] for name in classifiers}
    every = without_counters(shapes)
    exact = {key: shape for key, shape in every.items() if key not in heads}
    loose = {key: shape for key, shape in exact.items()
             if key.partition(".")[0] not in parts and not _VARYING.search(key)}  # fmt: skip
    order = [*every.values()]
    if [len(shape) for shape in order[-2:]] == [2, 1]:
        order = order[:-2]
    return Digests(
        _digest(f"{key} {shape}" for key, shape in sorted(exact.items()))[:10],
        _digest(f"{key} {shape}" for key, shape in sorted(loose.items()))[:8],
        _digest(map(str, order))[:8],
    )


def without_counters(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors without the counters of batch norms, which not every file has."""
    return {name: each for name, each in tensors.items() if not name.endswith(_COUNTER)}


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).hexdigest()


def candidate_networks(shapes: Shapes) -> Iterator[tuple[str, Shapes]]:
    """Yield prefixes of possible networks in a file, and the tensors without the prefix."""
    ends = ((key, itertools.islice(re.finditer(r"[./]", key), _MAX_DEPTH)) for key in shapes)
    starts = collections.Counter(key[: end.end()] for key, those in ends for end in those)
    for start, number in [("", len(shapes)), *starts.items()]:
        if max(_MIN_TENSORS, _MIN_PART * len(shapes)) <= number <= _MAX_TENSORS:
            inside = {k.removeprefix(start): v for k, v in shapes.items() if k.startswith(start)}
            yield start, inside


def fitting_networks_hint(shapes: Shapes, flag: str) -> str:
    """Return a hint that names timm's networks with the tensors of a file, or "".

    Args:
        shapes: Shapes of the tensors in a file by name, as `convert.read.Entry` has them.
        flag: Option that names a network of timm.
    """
    its = index()
    found = [digests(network, its.classifiers) for _, network in candidate_networks(shapes)]
    give = f"give {flag} with the name of its network"
    for column, like, advice in (
        ("exact", "are those of {}", f"; {give}"),
        ("order", "have, in order, the shapes of {}", f"; {give}"),
        ("loose", "are like those of {}", f", but its size or pooling differs; {give}"),
    ):
        names = [name for each in found for name in its.named(**{column: getattr(each, column)})]
        if any(re.split("[./]", key)[-2:] == EFFICIENTNET_PYTORCH.split(".") for key in shapes):
            names = [name for name in names if name.startswith("tf_")]
        served = sorted({name for name in names if its.rows[name].maps == MAPS})
        if served:
            twins = ", whose features differ" if served[1:] and column != "loose" else ""
            return f"; its tensors {like.format(format_names(served))}{twins}{advice}"
        if names:
            text = like.format(format_names(sorted({*names})))
            return f"; its tensors {text}, without maps for a pyramid"
    return ""


def format_names(names: list[str]) -> str:
    """Format names of the index for a message, with its version if another timm is installed."""
    version, installed = index().version, metadata.version("timm")
    other = f" (of timm {version}; {installed} is installed)" if installed != version else ""
    return f"timm's {first_few(names, _MAX_NAMES)}{other}"


def is_plain(name: str, family: Family) -> bool:
    """Return whether a recorded name is that of a plain network of a family."""
    return set(_WORDS.findall(name)) <= family.plain_names


def other_networks(family: Family, requested: Mapping[str, Any], *every: Shapes) -> str:
    """Describe timm's networks of other features that have the same tensors, or return "".

    Args:
        family: Family of the recognized network.
        requested: Values of the family's options.
        every: Shapes of the network's tensors by the names in the file, and by the family's.
    """
    its = index()
    if family.named_by in requested:
        name = str(requested[family.named_by]).partition(".")[0]
        twins = its.twins(name)
        others = (
            f", which could also be {format_names(twins)}, whose features differ" if twins else ""
        )
        return f"that it is timm's {name}{others}"
    named = {name for shapes in every for name in its.named(exact=its.exact(shapes))}
    twins = sorted(name for name in named if not is_plain(name, family))
    if len(named) < 2 or any(o.in_timm for o in family.options if o.name in requested):
        return ""
    which = "may be any of" if len(twins) == len(named) else "could also be"
    return f"{which} {format_names(twins)}, whose features differ"
