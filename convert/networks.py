"""Find the layout of a file, every ResNet in it, and the one that is meant.

The layout is a row of convert/layouts.py. Beside its networks a file may have others: any ResNet
under torchvision's or Detectron2's names, at any prefix and up to PLAIN_DEPTH keys deep. A file in
which two could be meant is refused with their names, which `--encoder` takes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from convert.families import keymap
from convert.files import describe, is_converted, is_state, names
from convert.layouts import INNER_WRAPPERS, LAYOUTS, WRAPPERS, Layout, Network
from convert.lookalikes import SUPPORTED, other_network, refuse_detector
from moco.common.errors import DataError, UserError, shown
from moco.common.unpickler import Inert

# A dict of tensors that no row of the table names.
PLAIN = "state dict"
PLAIN_DETECTRON2 = "Detectron2's names"
PLAIN_DEPTH = 3
SINGLE = "single"
_PLAIN_LAYOUTS = tuple(
    Layout(name, {}, keymap.PLAIN_DROPPED, first=first, rename=rename)
    for name, first, rename in (
        (PLAIN, ("conv1.weight", "layer1.0.conv1.weight"), keymap.keep_torchvision),
        (PLAIN_DETECTRON2, ("stem.conv1.weight", "res2.0.conv1.weight"), keymap.from_detectron2),
        # The first stage is number 2, 3 or 4; the later ones have higher numbers in all.
        (PLAIN, ("0.weight", "2.0.conv1.weight"), keymap.from_lightly),
        (PLAIN, ("0.weight", "3.0.conv1.weight"), keymap.from_unpooled),
        (PLAIN, ("0.weight", "4.0.conv1.weight"), keymap.from_numbered),
    )
)
_START = re.compile("(?:" + "|".join(map(re.escape, WRAPPERS)) + ")*")
_INNER = re.compile(r"(?:^|(?<=\.))(?:" + "|".join(map(re.escape, INNER_WRAPPERS)) + ")")
# Words in the name of a network that is the moving average of another.
_AVERAGE_WORDS = {"ema", "modelema", "swa", "average", "averaged", "avg", "polyak"}
_MAX_NAME = 200  # as much as an input contract keeps


@dataclasses.dataclass(frozen=True)
class Choice:
    """The network to take out of a file.

    Attributes:
        layout: whose names and rules it has.
        name: its own, as `--encoder` takes it.
        networks: every network of the file by its name, this one included.
        note: why it was taken, where that is not the layout's usual network.
    """

    layout: Layout
    name: str
    networks: Mapping[str, Network]
    note: str = ""

    @property
    def network(self) -> Network:
        return self.networks[self.name]


def unwrapped(key: Any) -> str:
    """A key without the wrappers that training put around its network; "" for what is no text."""
    if not isinstance(key, str):
        return ""
    key = _INNER.sub("", key)
    found = _START.match(key)
    return key[found.end() :] if found else key


def at(raw: Any, path: Iterable[str]) -> Any:
    """What is at a path of keys, or None."""
    for key in path:
        if not isinstance(raw, Mapping):
            return None
        raw = raw.get(key)
    return raw


def states(raw: Any, depth: int = PLAIN_DEPTH) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every dict of tensors in a file with its path, not deeper than `depth` keys.

    What an object of some class holds is no part of a file's networks.
    """
    if isinstance(raw, Inert) or not isinstance(raw, Mapping):
        return
    if is_state(raw):
        yield (), raw
    if depth:
        for key, value in raw.items():
            if isinstance(key, str):
                for path, state in states(value, depth - 1):
                    yield (key, *path), state


def find_layout(raw: Any, where: str) -> Layout:
    """The row of LAYOUTS that a file fits, or one made for the ResNets in a plain state dict.

    Raises DataError: nothing known, with what was seen and what it looks like.
    """
    _refuse_known(raw, where)
    for layout in LAYOUTS:
        if _fits(layout, raw):
            return layout
    seen = _key_sets(raw)
    for layout in _PLAIN_LAYOUTS:
        if networks := _resnets(seen, layout):
            one = len(networks) == 1
            networks = {SINGLE: next(iter(networks.values()))} if one else networks
            return dataclasses.replace(layout, networks=networks)
    for _, keys in seen:
        if what := other_network(keys):
            raise DataError(f"{where}: unknown layout: it looks like {what}; {SUPPORTED}")
    raise DataError(f"{where}: unknown layout ({describe(raw)}); {SUPPORTED}")


def choose_network(raw: Any, encoder: str | None, where: str) -> Choice:
    """The network that is meant: `encoder`, or the only one, or the layout's first.

    Of a model and its moving average the average is taken, as timm and torchvision do.

    Raises:
        DataError: unknown layout; or several networks, of which any could be meant.
        UserError: no network of that name.
    """
    layout, networks, owners = _all_networks(raw, where)
    plain = layout.name in (PLAIN, PLAIN_DETECTRON2)
    own = sum(owner is layout for owner in owners.values())
    choices = ", ".join(networks)
    default = next(iter(layout.networks))
    note = ""
    if encoder is None and len(networks) > (1 if plain else own):
        averages = _averages(networks)
        if len(networks) != 2 or len(averages) != 1:
            raise DataError(
                f"{where}: {len(networks)} networks, and it is ambiguous which is meant; "
                f"give --encoder with one of {choices}"
            )
        default = averages[0]
        (model,) = networks.keys() - {default}
        note = f"{default} is taken as the moving average of {model}; --encoder {model} takes that"
    elif encoder is None and default not in networks:
        first = next(iter(networks))
        raise DataError(
            f"{where}: no {default} encoder ({layout.networks[default].prefix}*) in this "
            f"{layout.name} checkpoint; --encoder {first} takes what is there"
        )
    elif encoder is not None and encoder not in networks:
        have = "one network" if len(networks) == 1 else f"the encoders {choices}"
        raise UserError(f"--encoder {encoder}: {where} is a {layout.name} checkpoint with {have}")
    name = encoder or default
    return Choice(owners[name], name, networks, note)


def network_names(raw: Any, where: str) -> list[str]:
    """Every name that `--encoder` takes for a file, the layout's own first; raises DataError."""
    return list(_all_networks(raw, where)[1])


def _all_networks(raw: Any, where: str) -> tuple[Layout, dict[str, Network], dict[str, Layout]]:
    """The layout; every network of the file by its name; and whose names each has."""
    layout = find_layout(raw, where)
    networks = _present(layout, raw)
    owners = dict.fromkeys(networks, layout)
    seen = _key_sets(raw)
    for scheme in _PLAIN_LAYOUTS:
        for name, network in _resnets(seen, scheme).items():
            if not _belongs(network, layout, networks.values()):
                while name in networks:
                    name += "'"
                networks[name], owners[name] = network, scheme
    return layout, networks, owners


def _key_sets(raw: Any) -> list[tuple[tuple[str, ...], set[str]]]:
    return [(path, {unwrapped(key) for key in state}) for path, state in states(raw)]


def _resnets(
    seen: Iterable[tuple[tuple[str, ...], set[str]]], layout: Layout
) -> dict[str, Network]:
    """Every network of a file that has a layout's names, by its path and prefix."""
    first, second = layout.first
    found: dict[str, Network] = {}
    for path, keys in seen:
        for key in sorted(keys):
            prefix = key.removesuffix(second)
            if not key.endswith(second) or prefix + first not in keys:
                continue
            if prefix and not prefix.endswith("."):
                continue
            if prefix + "attnpool.positional_embedding" in keys:
                continue  # CLIP's has these names, too
            name = ".".join([*path, prefix.removesuffix(".")]).strip(".")
            # What is printed has to be what --encoder takes.
            name = shown(name, _MAX_NAME)[1:-1] if name else SINGLE
            found.setdefault(name, Network(prefix, path))
    return found


def _belongs(network: Network, layout: Layout, known: Iterable[Network]) -> bool:
    """Whether a network is one of a layout's, or of what the layout has a rule for."""
    if isinstance(layout.marks.get("format"), str):
        return True  # the project's own format is versioned
    for other in (*known, *layout.networks.values()):
        if other.at == network.at and other.prefix == network.prefix:
            return True
    if any(other.at == network.at for other in layout.networks.values()):
        start = network.prefix + layout.first[1]
        return keymap.first_rule(start, layout.dropped) is not None
    return any(top_rule(layout, key) is not None for key in network.at)


def top_rule(layout: Layout, key: Any) -> str | None:
    """The rule for a key beside the state dict, or None."""
    for rules in (layout.top, keymap.TOP_DROPPED):
        for rule, keys in rules.items():
            if key in keys:
                return rule
    return None


def _averages(found: Iterable[str]) -> list[str]:
    """Which of these names have a part, not common to all, that says it is an average."""
    parts = {name: set(name.lower().split(".")) for name in found}
    common = set.intersection(*parts.values())
    return [
        name
        for name, own in parts.items()
        if any(_AVERAGE_WORDS & set(re.split(r"[\W_]+", part)) for part in own - common)
    ]


def _present(layout: Layout, raw: Any) -> dict[str, Network]:
    """The networks of a layout that a file really has."""
    found = {}
    for choice, network in layout.networks.items():
        keys = _keys(raw, network)
        if all(network.prefix + key in keys for key in layout.first):
            found[choice] = network
    return found


def _fits(layout: Layout, raw: Any) -> bool:
    if not isinstance(raw, Mapping):
        return False
    for path, value in layout.marks.items():
        found = at(raw, path.split("/"))
        if (found is None) if value is ... else (type(found) is not type(value) or found != value):
            return False
    for network in _present(layout, raw).values():
        keys = _keys(raw, network)
        if all(any(key.startswith(start) for key in keys) for start in layout.has):
            return layout.order is None or _in_order(layout.order, raw, network)
    return False


def _in_order(order: tuple[str, str], raw: Any, network: Network) -> bool:
    """Whether two keys of a network's state dict are there, in this order."""
    wanted = [network.prefix + key for key in order]
    keys = [unwrapped(key) for key in state_at(raw, network.at) or ()]
    return [key for key in keys if key in wanted] == wanted


def _keys(raw: Any, network: Network) -> set[str]:
    return {unwrapped(key) for key in state_at(raw, network.at) or ()}


def state_at(raw: Any, path: tuple[str, ...]) -> Mapping[Any, Any] | None:
    """The dict at a path of keys, or None."""
    state = at(raw, path)
    return state if isinstance(state, Mapping) else None


def _refuse_known(raw: Any, where: str) -> None:
    """Files that are often given by mistake get their own sentence."""
    if not isinstance(raw, Mapping):
        return
    if not is_converted(raw):
        inside = raw.get("model")
        top = [*raw, *(inside if isinstance(inside, Mapping) else ())]
        every = [key for _, state in states(raw) for key in state]
        refuse_detector(map(unwrapped, top), map(unwrapped, every), where)
    if isinstance(raw.get("blobs"), Mapping):
        raise DataError(
            f"{where}: a detection model of Detectron (Caffe2), not a pre-trained backbone; this "
            "project does not read those"
        )
    caffe2 = any(isinstance(key, str) and key.startswith("res2_0_branch") for key in raw)
    if caffe2 and not any(_fits(layout, raw) for layout in LAYOUTS):
        raise DataError(
            f"{where}: Caffe2 weights, but not of MSRA's ResNets ({names(raw)}); how its input is "
            "normalized is not known"
        )
    version = raw.get("format")
    formats = {layout.marks.get("format") for layout in LAYOUTS}
    if isinstance(version, str) and version.startswith("moco-transfer") and version not in formats:
        raise DataError(f"{where}: format {shown(version)} is not known to this version")
