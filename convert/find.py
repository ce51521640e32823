"""Find every network in a file by its structure, then the one that is meant by its name.

A network begins where the two tensors are by which a family's scheme of names is known
(`Scheme.first`), at any prefix and in any dict. A row of convert/projects.py says which role each
has. A file in which two could be meant is refused with their names, which `--encoder` takes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from convert.families.base import Family, Scheme, families, first_rule
from convert.projects import AVERAGES, DROPPED, PROJECTS, Project
from convert.read import Entry, at, describe, is_array, is_converted, names, unwrapped
from moco.common.command import program
from moco.common.errors import DataError, UserError, shown

SINGLE = "single"
MAX_DEPTH = 3  # keys above a network that no row knows
MAX_NETWORKS = 32
# Words in the name of a network that is the moving average of another.
_AVERAGE_WORDS = {"ema", "modelema", "swa", "average", "averaged", "avg", "polyak"}
_MAX_NAME = 200  # as much as an input contract keeps
# Keys of whole detectors: torchvision's and DETR's wrap their backbone as `body`.
_DETECTRON2 = re.compile(
    r"proposal_generator\.|roi_heads\.|sem_seg_head\.|backbone\.(stem|bottom_up)\."
)
_OTHERS = re.compile(r"(?:^|\.)(backbone\.(0\.)?body|(rpn|bbox|roi|decode|mask)_head)\.")


@dataclasses.dataclass(frozen=True)
class Network:
    """One network of a file.

    Attributes:
        start: of its tensors' names in the flattened file, e.g. "state_dict/encoder_q.".
        family, scheme: whose tensors they are, and how they are named.
    """

    start: str
    family: Family
    scheme: Scheme

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the dicts that it is in, the outermost first."""
        return tuple(self.start.split("/")[:-1])

    @property
    def prefix(self) -> str:
        """Start of its names in the innermost dict."""
        return self.start.rpartition("/")[2]

    @property
    def directory(self) -> str:
        """Start of all names in that dict."""
        return self.start[: len(self.start) - len(self.prefix)]


@dataclasses.dataclass(frozen=True)
class Found:
    """The networks of a file.

    Attributes:
        project: whose file it is; one without roles, named after the names of the first network's
            tensors, where no row fits.
        roles: that project's, and where their networks start; a file may lack some.
        networks: every network by its name, those with roles first.
        second_names: starts under which the file has the tensors of a network again -> its name.
    """

    project: Project
    roles: Mapping[str, str]
    networks: Mapping[str, Network]
    second_names: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The network to take out of a file.

    Attributes:
        name: its own, as `--encoder` takes it.
        project: as `Found.project`, but of this network.
        note: why it was taken, where that is not the project's usual network.
    """

    name: str
    found: Found
    project: Project
    note: str = ""

    @property
    def network(self) -> Network:
        """The network itself."""
        return self.found.networks[self.name]


def choose_network(
    raw: Any,
    entries: Sequence[Entry],
    encoder: str | None,
    where: str,
    asked: Mapping[str, Any] | None = None,
) -> Choice:
    """Return the network that is meant: `encoder`, the only one, or the project's first role.

    Of a model and its moving average the average is taken, as timm and torchvision do.

    Args:
        raw: the file.
        entries: the same, flattened.
        asked: values of the families' options, of which some name a network.

    Raises:
        DataError: nothing known; or several networks, of which any could be meant.
        UserError: no network of that name.
    """
    found = all_networks(raw, entries, where, asked)
    project, roles, networks = found.project, found.roles, found.networks
    choices, default, note = ", ".join(networks), next(iter(roles or networks)), ""
    has_others = len(networks) > (1 if project.is_nobody else len(roles.keys() & networks.keys()))
    if encoder is None and has_others:
        averages = _averages(networks, raw)
        if len(networks) != 2 or len(averages) != 1:
            untold = {network.family.untold for network in networks.values() if not project.says}
            further = "".join(f", and {text}" for text in sorted(untold - {""}))
            raise DataError(
                f"{where}: {len(networks)} networks, and it is ambiguous which is meant; "
                f"give --encoder with one of {choices}{further}"
            )
        default = averages[0]
        (model,) = networks.keys() - {default}
        note = f"{default} is taken as the moving average of {model}; --encoder {model} takes that"
    elif encoder is None and default not in networks:
        raise DataError(
            f"{where}: no {default} encoder ({roles[default]}*) in this {project.name} "
            f"checkpoint; --encoder {next(iter(networks))} takes another"
        )
    elif encoder is not None and encoder not in networks:
        have = "one network" if len(networks) == 1 else f"the encoders {choices}"
        raise UserError(f"--encoder {encoder}: {where} is a {project.name} checkpoint with {have}")
    name = encoder or default
    if roles and name not in roles:
        project = Project(networks[name].scheme.plain)
    return Choice(name, found, project, note)


def all_networks(
    raw: Any, entries: Sequence[Entry], where: str, asked: Mapping[str, Any] | None = None
) -> Found:
    """Return whose file it is and every network in it.

    Raises:
        DataError: nothing known, with what was seen and what it looks like.
    """
    known = [entry.name for entry in entries if entry.name]
    _refuse_known(raw, known, where)
    found = find_networks(known, asked or {})
    if len(found) > MAX_NETWORKS:
        raise DataError(f"{where}: {len(found)} networks, more than any checkpoint has")
    for project in PROJECTS:
        if (roles := _roles(project, raw, known, found)) is not None:
            break
    else:
        project, roles = _nobody(found, known, raw, where, asked or {}), {}
    networks = {role: found[start] for role, start in roles.items() if start in found}
    values = {entry.name: entry.value for entry in entries}
    starts = {network.start for network in networks.values()}
    others = [] if project.is_ours else [n for start, n in found.items() if start not in starts]
    if project.is_nobody:
        others = [network for network in others if _is_plain(network)]
    second_names: dict[str, str] = {}
    # What a rule drops is a part of another network, unless it is all that there is.
    kept = [network for network in others if not _is_dropped(network, project)]
    for network in kept or ([] if networks else others[:1]):
        start = network.start
        same = (name for name, n in networks.items() if _is_same(network, n, values))
        if first := next(same, None):
            second_names[start] = first
            continue
        # What is printed has to be what --encoder takes.
        name = shown(start.strip("./").replace("/", "."), _MAX_NAME)[1:-1] or SINGLE
        while name in networks:
            name += "'"
        networks[name] = network
    if project.is_nobody and len(networks) == 1:
        networks = {SINGLE: next(iter(networks.values()))}
        second_names = dict.fromkeys(second_names, SINGLE)
    return Found(project, roles, networks, second_names)


def find_networks(known: Iterable[str], asked: Mapping[str, Any]) -> dict[str, Network]:
    """Return the networks by the start of their names: where both of a scheme's first tensors are.

    Of the schemes that fit one start the first one counts. Networks that an option names are
    looked for alone.
    """
    every, found = set(known), dict[str, Network]()
    all_families = families()
    named = [family for family in all_families if family.named_by in asked]
    for family in named or all_families:
        for scheme in family.schemes_of(asked).values():
            first, second = scheme.first
            for name in sorted(name for name in every if name.endswith(second)):
                start = name.removesuffix(second)
                is_start = not start or start[-1] in "./"
                if is_start and start + first in every and start + scheme.without not in every:
                    found.setdefault(start, Network(start, family, scheme))
    return found


def rule_of(key: Any, project: Project) -> str | None:
    """Return the rule that drops a key beside a network, or None."""
    key = key if isinstance(key, str) else ""
    return first_rule(key, DROPPED) or first_rule(key, project.own)


def _roles(
    project: Project, raw: Any, known: Sequence[str], found: Mapping[str, Network]
) -> Mapping[str, str] | None:
    """Return a project's roles and where their networks start; None: the file is not its own."""
    for path, value in project.marks.items():
        got = at(raw, path.split("/"))
        if (got is None) if value is ... else (type(got) is not type(value) or got != value):
            return None
    fitting = {
        start
        for start, network in found.items()
        if (not project.families or network.family.name in project.families)
        and (not project.schemes or network.scheme in _schemes(network, project))
    }
    sets = [_starts(roles, fitting) for roles in project.roles]
    whole = (roles for roles in sets if roles and fitting >= {*roles.values()})
    partly = (roles for roles in sets if fitting & {*roles.values()})
    roles = next(whole, None) or next(partly, None)
    if not roles:
        return None
    network = found[next(start for start in roles.values() if start in fitting)]
    for words in project.has:
        starts = tuple(network.directory + word for word in words.split())
        if not any(name.startswith(starts) for name in known):
            return None
    wanted = [network.start + key for key in project.order]
    return roles if [name for name in known if name in wanted] == wanted else None


def _schemes(network: Network, project: Project) -> list[Scheme]:
    its = network.family.schemes
    return [its[name] for name in project.schemes if name in its]


def _starts(roles: Mapping[str, str], fitting: set[str]) -> dict[str, str]:
    """Roles with what "*" stands for; empty where that is not one network."""
    starts = {}
    for role, start in roles.items():
        if start.endswith("*"):
            several = [one for one in fitting if one.startswith(start[:-1])]
            if len(several) != 1:
                return {}
            (start,) = several
        starts[role] = start
    return starts


def _nobody(
    found: Mapping[str, Network],
    known: Sequence[str],
    raw: Any,
    where: str,
    asked: Mapping[str, Any],
) -> Project:
    """Return a row without roles, named after the names of the first network's tensors."""
    plain = [network for network in found.values() if _is_plain(network)]
    if plain:
        return Project(plain[0].scheme.plain)
    for family in (family for family in families() if family.named_by in asked):
        (scheme,) = family.schemes_of(asked).values()
        raise DataError(
            f"{where}: not a {asked[family.named_by]} in {scheme.plain}'s names; missing: "
            f"{' or '.join(scheme.first)}"
        )
    if any(key.startswith("res2_0_branch") for key in known):
        raise DataError(
            f"{where}: Caffe2 weights, but not of MSRA's networks ({names(raw)}); how its input is "
            "normalized is not known"
        )
    what = _other_network(known)
    seen = f": it looks like {what}" if what else f" ({describe(raw)})"
    raise DataError(f"{where}: unknown layout{seen}; {supported()}")


def _is_plain(network: Network) -> bool:
    return bool(network.scheme.plain) and network.start.count("/") <= MAX_DEPTH


def _is_dropped(network: Network, project: Project) -> bool:
    keys = (*network.keys, network.prefix + network.scheme.first[1])
    return any(rule_of(key, project) is not None for key in keys)


def _is_same(network: Network, other: Network, values: Mapping[str, Any]) -> bool:
    """Whether two prefixes have equal tensors, as where a module has two names."""
    first = network.scheme.first[0]
    starts = (network.start + first, other.start + first)
    if network.scheme is not other.scheme or not _is_equal(*map(values.get, starts)):
        return False
    own = {
        name.removeprefix(network.start): value
        for name, value in values.items()
        if name.startswith(network.start) and network.scheme.rename(name[len(network.start) :])
    }
    return all(_is_equal(value, values.get(other.start + name)) for name, value in own.items())


def _is_equal(value: Any, other: Any) -> bool:
    both = is_array(value) and is_array(other) and value.shape == other.shape
    return both and bool((value == other).all())


def _averages(found: Mapping[str, Network], raw: Any) -> list[str]:
    """Return which networks are averages of others.

    A framework's own way to save them says so, else a part of their names that not all have.
    """
    for mark, trained in AVERAGES.items():
        if at(raw, [mark]) is not None and any(n.keys[:1] == (trained,) for n in found.values()):
            return [name for name, n in found.items() if n.keys[:1] == ("state_dict",)]
    parts = {name: set(name.lower().split(".")) for name in found}
    common = set.intersection(*parts.values())
    return [
        name
        for name, own in parts.items()
        if any(_AVERAGE_WORDS & set(re.split(r"[\W_]+", part)) for part in own - common)
    ]


def _other_network(keys: Iterable[str]) -> str | None:
    """Return what the owner of these names of a flattened file is called, or None."""
    keys = {key.replace("/", ".") for key in keys}
    for what, first, second in (row for family in families() for row in family.lookalikes):
        prefixes = {key.removesuffix(first) for key in keys if f".{key}".endswith(f".{first}")}
        if any(prefix + second in keys for prefix in prefixes):
            return what
    return None


def supported() -> str:
    """Return the networks that are converted, for messages."""
    return (
        f"supported are {', '.join(family.networks for family in families())}; "
        "docs/guides/converting.md has the known files, and a network in names of theirs under any "
        "one prefix is known, too"
    )


def _refuse_known(raw: Any, known: Iterable[str], where: str) -> None:
    """Files that are often given by mistake get their own message."""
    if not isinstance(raw, Mapping):
        return
    if not is_converted(raw):
        if any(_OTHERS.search(name.rpartition("/")[2]) for name in known):
            raise DataError(
                f"{where}: a whole detector or segmentation network of torchvision, DETR or "
                "MMDetection, not a pre-trained backbone, and this project evaluates only "
                "Detectron2's and its own; give the weights that its training started from"
            )
        inside = raw.get("model")
        top = [*raw, *(inside if isinstance(inside, Mapping) else ())]
        if any(_DETECTRON2.match(unwrapped(key)) for key in top):
            raise DataError(
                f"{where}: a detection model, not a pre-trained backbone; "
                f"give it to {program('train', 'detection/train_net.py')} as MODEL.WEIGHTS with "
                "--eval-only"
            )
    if isinstance(raw.get("blobs"), Mapping):
        raise DataError(
            f"{where}: a detection model of Detectron (Caffe2), not a pre-trained backbone; this "
            "project does not read those"
        )
    version = raw.get("format")
    formats = {project.marks.get("format") for project in PROJECTS}
    if isinstance(version, str) and version.startswith("moco-transfer") and version not in formats:
        raise DataError(f"{where}: format {shown(version)} is not known to this version")
