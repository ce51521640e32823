"""Networks under other names than timm's, read as the timm network of the same tensors.

timm's own loader renames the tensors of many projects. Of others, the tensors have timm's shapes in
order. Whether a network of torchvision is the one of timm is tried: torchvision's own is run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convert.contract import Overrides, Pixels
from convert.families.timm_index import (
    EFFICIENTNET_PYTORCH,
    index,
    networks_in,
    without_counters,
)
from convert.modeling.timm_network import renamed_by_timm, usual_names
from convert.read import Entry, is_array, to_tensor
from convert.recognize import Recognized
from convert.recorded import to_255
from convert.source_module import check_module
from moco.common.errors import DataError, shown

_MAX_NETWORKS = 8  # prefixes that are tried


@dataclasses.dataclass(frozen=True)
class InOrder:
    """Network of torchvision in a file.

    Attributes:
        name: Name of torchvision's network.
        start: Prefix of its tensors in the flattened file.
        candidates: Networks of timm that may have its maps, see `Index.torchvision`, possibly with
            an argument, e.g. "efficientnet_b5:bn_eps=0.001".
    """

    name: str
    start: str
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
        return Pixels(to_255(transform.mean), to_255(transform.std), "RGB")

    def names(self, candidate: str) -> dict[str, str]:
        """Return the map from its names of tensors to those of one of the candidates."""
        try:
            with torch.device("meta"):
                own = without_counters(self.build().state_dict())
        except NotImplementedError:  # RegNets compute with tensors while they are built
            own = without_counters(self.build().state_dict())
        name, _, arguments = candidate.partition(":")
        usual = without_counters(usual_names(name, arguments))
        numbered = {
            name: torch.tensor(float(i)).expand(value.shape)
            for i, (name, value) in enumerate(own.items())
        }
        if renamed := renamed_by_timm(name, arguments, numbered):
            return {[*own][int(value.flatten()[0])]: new for new, value in renamed.items()}
        return dict(zip(own, usual, strict=True))

    def renamed(
        self, raw: Any, entries: Sequence[Entry], names: Mapping[str, str], where: str
    ) -> Any:
        """Return the contents of the file with timm's names of this network's tensors.

        Raises:
            DataError: If one of them is not a dense tensor.
        """
        path: list[Any] = []
        changed: dict[Any, tuple[str, Any]] = {}
        for entry in entries:
            if new := names.get(self._short(entry)):
                *path, key = entry.keys
                changed[key] = new, to_tensor(key, entry.value, where)
        return _renamed(raw, path, changed)

    def check(
        self, found: Recognized, entries: Sequence[Entry], names: Mapping[str, str], where: str
    ) -> str:
        """Compare the maps of one of the candidates with those of torchvision's own network.

        Args:
            found: This network, recognized as the candidate.
            entries: All values of the file.
            names: Names of its tensors -> the candidate's.
            where: Name of the file, for messages.

        Returns:
            The modules of torchvision's network that gave the maps, as text.

        Raises:
            DataError: If it has other maps.
        """
        net = self.build()
        own = net.state_dict()
        values = {self._short(entry): entry for entry in entries}
        own.update(  # its version is in this dict
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

    def named(self, found: Recognized, names: Mapping[str, str]) -> Recognized:
        """Return the network with the names of its tensors in the file, for messages."""
        return _named(found, names, self.start.rpartition("/")[2])

    def _short(self, entry: Entry) -> str:
        return entry.name.removeprefix(self.start) if entry.name.startswith(self.start) else ""


def _named(found: Recognized, names: Mapping[str, str], prefix: str) -> Recognized:
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
    """File whose network has timm's names of tensors.

    Attributes:
        raw: Its contents.
        note: How the tensors got these names, as text.
        is_assumed: True if only the shapes say so.
    """

    raw: Any
    note: str
    is_assumed: bool


def under_other_names(
    entries: Sequence[Entry], raw: Any, name: str, arguments: str, where: str
) -> Renamed | None:
    """Return a file with the tensors of a network of timm under other names, or None.

    Args:
        entries: All values of the file.
        raw: Contents of the file.
        name: timm's name of the network.
        arguments: Arguments of `timm.create_model` as text.
        where: Name of the file, for messages.

    Raises:
        DataError: If a tensor is not dense, or the names are those of code with another padding.
    """
    arrays = {e.name: e for e in entries if e.name and is_array(e.value)}
    shapes = {key: tuple(entry.value.shape) for key, entry in arrays.items()}
    usual = without_counters(usual_names(name, arguments))
    for start, network in itertools.islice(networks_in(shapes), _MAX_NETWORKS):
        path, prefix = arrays[start + next(iter(network))].keys[:-1], start.rpartition("/")[2]
        tensors = {
            key: to_tensor(key, arrays[start + key].value, where)
            for key in network
            if arrays[start + key].keys[:-1] == path
        }
        made = renamed_by_timm(name, arguments, tensors)
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
    """Return timm's names of tensors that have its shapes in order, but for a classifier; or {}."""
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
    """Return the contents of a file with other tensors in place of those that have a prefix."""
    if path:
        return {**raw, path[0]: _replaced(raw[path[0]], path[1:], prefix, tensors)}
    kept = {k: v for k, v in raw.items() if not str(k).startswith(prefix) or not is_array(v)}
    return {**kept, **tensors}


def of_torchvision(entries: Sequence[Entry], where: str) -> InOrder | None:
    """Return the network of torchvision in a file, or None if there is none.

    Raises:
        DataError: If there are several.
    """
    its, found = index(), []
    shapes = {e.name: tuple(e.value.shape) for e in entries if e.name and is_array(e.value)}
    for start, network in networks_in(shapes):
        if row := its.torchvision.get(its.exact(network)):
            name, candidates = row
            found.append(InOrder(name, start, candidates))
    if len(found) > 1:
        names = ", ".join(shown(network.start.rstrip("./")) for network in found[:3])
        raise DataError(
            f"{where}: {len(found)} networks of torchvision ({found[0].name}), e.g. in {names}; "
            "give a file with one of them"
        )
    return found[0] if found else None
