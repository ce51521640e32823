"""torchvision's networks that no family has, read as the timm network of the same tensors in order.

Both libraries have an EfficientNet, MNASNet and MobileNetV2, whose tensors have the same shapes in
order, but other names. Whether they are the same network is tried: torchvision's own is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from convert.contract import Overrides, Pixels
from convert.families.timm_index import index, networks_in, without_counters
from convert.read import Entry, is_array, to_tensor
from convert.recognize import Recognized
from convert.recorded import to_255
from convert.source_module import check_module
from moco.common.errors import DataError, shown


@dataclasses.dataclass(frozen=True)
class InOrder:
    """Network of torchvision in a file.

    Attributes:
        name: Name of torchvision's network.
        start: Prefix of its tensors in the flattened file.
        candidates: Networks of timm that may have its maps, see `Index.torchvision`.
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
        from convert.modeling.timm_features import usual_names

        with torch.device("meta"):
            own = self.build().state_dict()
        return dict(
            zip(without_counters(own), without_counters(usual_names(candidate)), strict=True)
        )

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
