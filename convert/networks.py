"""Find the layout of a file, every network in it, and the one that is meant.

The layout is one of convert/layouts/. Beside its networks a file may have others: a backbone of
any family under its own or Detectron2's names, at any prefix and up to PLAIN_DEPTH keys deep. A
file in which two could be meant is refused with their names, which `--encoder` takes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from convert.families.base import Family, Scheme, families, first_rule
from convert.files import Entry, at, describe, is_converted, names, unwrapped
from convert.layouts import LAYOUTS
from convert.layouts.base import PLAIN_DROPPED, TOP_DROPPED, Layout
from convert.lookalikes import other_network, refuse_detector, supported
from moco.common.errors import DataError, UserError, shown

PLAIN_DEPTH = 3
SINGLE = "single"
# Words in the name of a network that is the moving average of another.
_AVERAGE_WORDS = {"ema", "modelema", "swa", "average", "averaged", "avg", "polyak"}
_MAX_NAME = 200  # as much as an input contract keeps


@dataclasses.dataclass(frozen=True)
class Network:
    """One network of a file.

    Attributes:
        start: of its tensors' names in the flattened file, e.g. "state_dict/encoder_q.".
        family, scheme: whose tensors they are, and how they are named.
        layout: whose rules hold for what is beside it.
    """

    start: str
    family: Family
    scheme: Scheme
    layout: Layout

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the dict that it is in."""
        return tuple(self.start.split("/")[:-1])

    @property
    def prefix(self) -> str:
        """Start of its names in that dict."""
        return self.start.rpartition("/")[2]

    @property
    def directory(self) -> str:
        return self.start[: len(self.start) - len(self.prefix)]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The network to take out of a file.

    Attributes:
        name: its own, as `--encoder` takes it.
        networks: every network of the file by its name, this one included.
        note: why it was taken, where that is not the layout's usual network.
    """

    name: str
    networks: Mapping[str, Network]
    note: str = ""

    @property
    def network(self) -> Network:
        return self.networks[self.name]


def choose_network(raw: Any, entries: Sequence[Entry], encoder: str | None, where: str) -> Choice:
    """The network that is meant: `encoder`, or the only one, or the layout's first.

    Of a model and its moving average the average is taken, as timm and torchvision do.

    Args:
        raw: the file.
        entries: the same, flattened.

    Raises:
        DataError: unknown layout; or several networks, of which any could be meant.
        UserError: no network of that name.
    """
    layout, networks = all_networks(raw, entries, where)
    own = 1 if layout.plain else sum(network.layout is layout for network in networks.values())
    choices = ", ".join(networks)
    default = next(iter(layout.networks or networks))
    note = ""
    if encoder is None and len(networks) > own:
        averages = _averages(networks)
        if len(networks) != 2 or len(averages) != 1:
            raise DataError(
                f"{where}: {len(networks)} networks, and it is ambiguous which is meant; "
                f"give --encoder with one of {choices}{_further(networks.values())}"
            )
        default = averages[0]
        (model,) = networks.keys() - {default}
        note = f"{default} is taken as the moving average of {model}; --encoder {model} takes that"
    elif encoder is None and default not in networks:
        raise DataError(
            f"{where}: no {default} encoder ({layout.networks[default]}*) in this {layout.name} "
            f"checkpoint; --encoder {next(iter(networks))} takes another"
        )
    elif encoder is not None and encoder not in networks:
        have = "one network" if len(networks) == 1 else f"the encoders {choices}"
        raise UserError(f"--encoder {encoder}: {where} is a {layout.name} checkpoint with {have}")
    return Choice(encoder or default, networks, note)


def _further(networks: Iterable[Network]) -> str:
    """What else has to be given for networks of a family, for messages."""
    untold = {network.family.untold for network in networks if not network.layout.says}
    return "".join(f", and {text}" for text in sorted(untold - {""}))


def all_networks(
    raw: Any, entries: Sequence[Entry], where: str
) -> tuple[Layout, dict[str, Network]]:
    """The row of LAYOUTS that a file fits, or one made for a plain state dict; all its networks.

    The layout's own networks come first, by what `--encoder` calls them.

    Raises DataError: nothing known, with what was seen and what it looks like.
    """
    known = [entry.name for entry in entries if entry.name]
    _refuse_known(raw, entries, where)
    layout = next((row for row in LAYOUTS if _fits(row, raw, known)), None)
    plain = _plain_networks(known)
    if layout is not None:
        networks = _present(layout, set(known))
    elif any(key.startswith("res2_0_branch") for key in known):
        raise DataError(
            f"{where}: Caffe2 weights, but not of MSRA's networks ({names(raw)}); how its input is "
            "normalized is not known"
        )
    elif plain:
        scheme = plain[0][1].scheme
        networks = {name: found for name, found in plain if found.scheme is scheme}
        if len(networks) == 1:
            networks = {SINGLE: next(iter(networks.values()))}
        layout = next(iter(networks.values())).layout
    else:
        what = other_network(known)
        seen = f": it looks like {what}" if what else f" ({describe(raw)})"
        raise DataError(f"{where}: unknown layout{seen}; {supported()}")
    for name, network in plain:
        if not _belongs(network, layout, networks.values()):
            while name in networks:
                name += "'"
            networks[name] = network
    return layout, networks


def rule_of(key: Any, layout: Layout) -> str | None:
    """The rule that drops a key beside a network, or None."""
    key = key if isinstance(key, str) else ""
    return first_rule(key, layout.dropped) or first_rule(key, TOP_DROPPED)


def _fits(layout: Layout, raw: Any, known: Sequence[str]) -> bool:
    for path, value in layout.marks.items():
        found = at(raw, path.split("/"))
        if (found is None) if value is ... else (type(found) is not type(value) or found != value):
            return False
    for network in _present(layout, set(known)).values():
        if all(any(n.startswith(network.directory + key) for n in known) for key in layout.has):
            wanted = [network.start + key for key in layout.order]
            return [name for name in known if name in wanted] == wanted
    return False


def _present(layout: Layout, known: set[str]) -> dict[str, Network]:
    """The networks of a layout that a file really has."""
    return {
        choice: Network(start, family, scheme, layout)
        for choice, start in layout.networks.items()
        for family in families()
        if family.name in (layout.families or (family.name,))
        if (scheme := family.schemes.get(layout.scheme)) is not None
        and all(start + key in known for key in scheme.first)
    }


def _plain_networks(known: Iterable[str]) -> list[tuple[str, Network]]:
    """Every network that has one of the families' own schemes of names, by its path and prefix."""
    every, found = sorted(set(known)), []
    within = set(every)
    for family in families():
        for scheme in family.schemes.values():
            first, second = scheme.first
            layout = Layout(scheme.plain, {}, PLAIN_DROPPED, plain=True)
            for name in every if scheme.plain else ():
                start = name.removesuffix(second)
                if (
                    name.endswith(second)
                    and start + first in within
                    and (not start or start[-1] in "./")
                    and start.count("/") <= PLAIN_DEPTH
                    and start + scheme.without not in within
                ):
                    # What is printed has to be what --encoder takes.
                    label = shown(start.strip("./").replace("/", "."), _MAX_NAME)[1:-1]
                    found.append((label or SINGLE, Network(start, family, scheme, layout)))
    return found


def _belongs(network: Network, layout: Layout, known: Iterable[Network]) -> bool:
    """Whether a network is one of a layout's, or of what the layout has a rule for."""
    if layout.is_own:
        return True
    starts = {*layout.networks.values(), *(other.start for other in known)}
    if network.start in starts:
        return True
    if any(network.directory == start[: start.rfind("/") + 1] for start in starts):
        return first_rule(network.prefix + network.scheme.first[1], layout.dropped) is not None
    return any(rule_of(key, layout) is not None for key in network.keys)


def _averages(found: Iterable[str]) -> list[str]:
    """Which of these names have a part, not common to all, that says it is an average."""
    parts = {name: set(name.lower().split(".")) for name in found}
    common = set.intersection(*parts.values())
    return [
        name
        for name, own in parts.items()
        if any(_AVERAGE_WORDS & set(re.split(r"[\W_]+", part)) for part in own - common)
    ]


def _refuse_known(raw: Any, entries: Iterable[Entry], where: str) -> None:
    """Files that are often given by mistake get their own message."""
    if not isinstance(raw, Mapping):
        return
    if not is_converted(raw):
        inside = raw.get("model")
        top = [*raw, *(inside if isinstance(inside, Mapping) else ())]
        every = (entry.name.rpartition("/")[2] for entry in entries)
        refuse_detector(map(unwrapped, top), every, where)
    if isinstance(raw.get("blobs"), Mapping):
        raise DataError(
            f"{where}: a detection model of Detectron (Caffe2), not a pre-trained backbone; this "
            "project does not read those"
        )
    version = raw.get("format")
    formats = {layout.marks.get("format") for layout in LAYOUTS}
    if isinstance(version, str) and version.startswith("moco-transfer") and version not in formats:
        raise DataError(f"{where}: format {shown(version)} is not known to this version")
