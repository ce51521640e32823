"""Find every network in a file by its structure, then choose the one to convert.

A network starts at a prefix, in any dict, under which there are both tensors that identify a naming
scheme (`Scheme.first`). A row of convert/projects.py gives each network a role. A file with several
candidates is refused; the message lists their names, which `--encoder` takes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from convert.families.base import Family, OtherNetworkError, Scheme, families, first_rule
from convert.projects import AVERAGES, DROPPED, PROJECTS, Project
from convert.read import (
    Entry,
    describe,
    format_keys,
    get_nested,
    is_array,
    is_converted,
    strip_wrappers,
)
from moco.common.command import program
from moco.common.errors import DataError, UserError, format_value

SINGLE = "single"
MAX_PREFIX_KEYS = 3  # keys above a network of an unknown project
MAX_NETWORKS = 32
# Words in names of networks that are moving averages of others.
_AVERAGE_WORDS = {"ema", "modelema", "swa", "average", "averaged", "avg", "polyak", "shadow"}
_MAX_NAME = 200  # limit of the input contract
# Keys of whole detectors; torchvision's and DETR's wrap their backbone as `body`.
_DETECTRON2 = re.compile(
    r"proposal_generator\.|roi_heads\.|sem_seg_head\.|backbone\.(stem|bottom_up)\."
)
_OTHERS = re.compile(
    r"(?:^|\.)(backbone\.((0\.)?body|conv_encoder)|(rpn|bbox|roi|decode|mask)_head)\."
)


class UnknownLayoutError(OtherNetworkError):
    """File without a network in known names; the message ends with the supported networks.

    Attributes:
        what: The message without the supported networks.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; {supported_networks()}")
        self.what = what


@dataclasses.dataclass(frozen=True)
class Network:
    """Network in a file.

    Attributes:
        prefix: Prefix of the tensors in the flattened file, e.g. "state_dict/encoder_q.".
        keys: Keys of the dicts that contain it, outermost first, as they are in the file.
        family: Family of its tensors.
        scheme: Their naming scheme.
    """

    prefix: str
    keys: tuple[Any, ...]
    family: Family
    scheme: Scheme

    @property
    def inner_prefix(self) -> str:
        """Prefix of the tensors in the innermost dict."""
        return self.prefix.rpartition("/")[2]

    @property
    def directory(self) -> str:
        """Prefix of all values of the innermost dict, in the flattened file."""
        return self.prefix[: len(self.prefix) - len(self.inner_prefix)]


@dataclasses.dataclass(frozen=True)
class FoundNetworks:
    """All networks of a file.

    Attributes:
        project: Project that wrote the file; without a row that fits, a project without roles,
            named after the naming scheme of the first network.
        roles: Roles of the project -> prefixes of their networks; a file may lack some.
        networks: Networks by name, those with roles first.
        aliases: Prefixes that repeat the tensors of a network -> name of that network.
    """

    project: Project
    roles: Mapping[str, str]
    networks: Mapping[str, Network]
    aliases: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Network to convert.

    Attributes:
        name: Name of the network, as `--encoder` takes it.
        found: All networks of the file.
        project: Project of this network; `FoundNetworks.project` unless it has no role there.
        note: Reason for the choice if it is not the project's usual network.
    """

    name: str
    found: FoundNetworks
    project: Project
    note: str = ""

    @property
    def network(self) -> Network:
        """The chosen network."""
        return self.found.networks[self.name]


def choose_network(
    raw: Any,
    entries: Sequence[Entry],
    encoder: str | None,
    where: str,
    requested: Mapping[str, Any] | None = None,
) -> Choice:
    """Return the network to convert: `encoder`, the only one, or the project's first role.

    If the file has a model and its moving average, the average is chosen, as timm and torchvision
    do.

    Args:
        raw: Contents of the file.
        entries: The same, flattened.
        encoder: Name of the requested network, or None.
        where: Name of the file, for messages.
        requested: Values of the families' options, some of which name a network.

    Raises:
        DataError: If no network is recognized, or the choice is ambiguous.
        UserError: If there is no network of that name.
    """
    if encoder is None:
        _refuse_detector(raw, entries, where, requested or {})
    found = all_networks(raw, entries, where, requested)
    project, roles, networks = found.project, found.roles, found.networks
    encoder = _name_of(encoder, networks)
    choices, default, note = ", ".join(networks), next(iter(roles or networks)), ""
    has_others = len(networks) > (1 if project.is_unknown else len(roles.keys() & networks.keys()))
    if encoder is None and has_others:
        averages = _averages(networks, raw)
        if len(networks) != 2 or len(averages) != 1:
            options = {n.family.required_option for n in networks.values() if not project.metadata}
            further = "".join(f", and {text}" for text in sorted(options - {""}))
            raise DataError(
                f"{where}: {len(networks)} networks, and it is ambiguous which to convert; "
                f"give --encoder with one of {choices}{further}",
                option="encoder",
            )
        default = averages[0]
        (model,) = networks.keys() - {default}
        note = f"{default} was chosen as the moving average of {model}, see --encoder {model}"
    elif encoder is None and default not in networks:
        raise DataError(
            f"{where}: no {default} encoder ({roles[default]}*) in this {project.name} "
            f"checkpoint; --encoder {next(iter(networks))} selects another"
        )
    elif encoder is not None and encoder not in networks:
        have = f"the encoders {choices}"
        if len(networks) == 1:
            prefix = _name(next(iter(networks.values())))
            have = "a single network" + (f", {prefix}" if prefix else "")
        raise UserError(f"--encoder {encoder}: {where} is a {project.name} checkpoint with {have}")
    name = encoder or default
    if roles and name not in roles:
        project = Project(networks[name].scheme.plain)
    return Choice(name, found, project, note)


def _name(network: Network) -> str:
    """Return the name of a network without a role, as messages and `--encoder` have it."""
    return format_value(network.prefix.strip("./").replace("/", "."), _MAX_NAME)[1:-1]


def _name_of(encoder: str | None, networks: Mapping[str, Network]) -> str | None:
    """Return the name of the network that `encoder` names, in full or by the end of a prefix."""
    if encoder is None or encoder in networks:
        return encoder
    fitting = [n for n, each in networks.items() if f".{_name(each)}".endswith(f".{encoder}")]
    return fitting[0] if len(fitting) == 1 else encoder


def _refuse_detector(
    raw: Any, entries: Sequence[Entry], where: str, requested: Mapping[str, Any]
) -> None:
    """Raise DataError for a whole detector or segmentation network that is not Detectron2's."""
    known = {entry.name: entry.keys for entry in entries if entry.name}
    if is_converted(raw) or not any(_OTHERS.search(name.rpartition("/")[2]) for name in known):
        return
    found = [_name(network) for network in find_networks(known, requested).values()]
    advice = f", or give --encoder {found[0]} for the network in it" if found and found[0] else ""
    raise DataError(
        f"{where}: a whole detector or segmentation network of torchvision, DETR or MMDetection, "
        "not a pre-trained backbone; give the weights that its training started from" + advice
    )


def all_networks(
    raw: Any, entries: Sequence[Entry], where: str, requested: Mapping[str, Any] | None = None
) -> FoundNetworks:
    """Return the project of a file and every network in it.

    Args:
        raw: Contents of the file.
        entries: The same, flattened.
        where: Name of the file, for messages.
        requested: Values of the families' options, some of which name a network.

    Raises:
        DataError: If no network is recognized; the message describes the contents.
    """
    known = {entry.name: entry.keys for entry in entries if entry.name}
    _refuse_known(raw, where)
    found, every = find_networks(known, requested or {}), [*known]
    if len(found) > MAX_NETWORKS:
        raise DataError(f"{where}: {len(found)} networks, expected at most {MAX_NETWORKS}")
    for project in PROJECTS:
        if (roles := _roles(project, raw, every, found)) is not None:
            break
    else:
        project, roles = _unknown_project(found, every, raw, where, requested or {}), {}
    networks = {role: found[start] for role, start in roles.items() if start in found}
    values = {entry.name: entry.value for entry in entries}
    starts = {network.prefix for network in networks.values()}
    others = [] if project.is_ours else [n for start, n in found.items() if start not in starts]
    if project.is_unknown:
        others = [network for network in others if _is_plain(network)]
    aliases: dict[str, str] = {}
    # Networks under a dropped key are parts of others, unless the file has no other network.
    kept = [network for network in others if not _is_dropped(network, project)]
    for network in kept or ([] if networks else others[:1]):
        start = network.prefix
        same = (name for name, n in networks.items() if _is_same(network, n, values))
        if first := next(same, None):
            aliases[start] = first
            continue
        name = _name(network) or SINGLE
        while name in networks:
            name += "'"
        networks[name] = network
    if project.is_unknown and len(networks) == 1:
        networks = {SINGLE: next(iter(networks.values()))}
        aliases = dict.fromkeys(aliases, SINGLE)
    return FoundNetworks(project, roles, networks, aliases)


def find_networks(
    known: Mapping[str, tuple[Any, ...]], requested: Mapping[str, Any]
) -> dict[str, Network]:
    """Return networks by prefix: wherever both tensors of a scheme's `first` are.

    If several schemes fit a prefix, the first one is used. If an option names a network, only the
    family of that option is searched.

    Args:
        known: Names of the entries -> keys in the file.
        requested: Values of the families' options.
    """
    every, found = set(known), dict[str, Network]()
    all_families = families()
    named = [family for family in all_families if family.named_by in requested]
    for family in named or all_families:
        for scheme in family.schemes_of(requested).values():
            first, second = scheme.first
            for name in sorted(name for name in every if name.endswith(second)):
                start = name.removesuffix(second)
                is_start = not start or start[-1] in "./"
                if is_start and start + first in every and start + scheme.without not in every:
                    found.setdefault(start, Network(start, known[name][:-1], family, scheme))
    return found


def rule_of(key: Any, project: Project) -> str | None:
    """Return the rule that drops a key outside a network, or None."""
    key = key if isinstance(key, str) else ""
    return first_rule(key, DROPPED) or first_rule(key, project.own)


def _roles(
    project: Project, raw: Any, known: Sequence[str], found: Mapping[str, Network]
) -> Mapping[str, str] | None:
    """Return a project's roles and the prefixes of their networks, or None if no role fits."""
    for path, value in project.marks.items():
        got = get_nested(raw, path.split("/"))
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
    wanted = [network.prefix + key for key in project.order]
    return roles if [name for name in known if name in wanted] == wanted else None


def _schemes(network: Network, project: Project) -> list[Scheme]:
    schemes = network.family.schemes
    return [schemes[name] for name in project.schemes if name in schemes]


def _starts(roles: Mapping[str, str], fitting: set[str]) -> dict[str, str]:
    """Return the roles with "*" resolved, or {} unless it stands for exactly one network."""
    starts = {}
    for role, start in roles.items():
        if start.endswith("*"):
            several = [one for one in fitting if one.startswith(start[:-1])]
            if len(several) != 1:
                return {}
            (start,) = several
        starts[role] = start
    return starts


def _unknown_project(
    found: Mapping[str, Network],
    known: Sequence[str],
    raw: Any,
    where: str,
    requested: Mapping[str, Any],
) -> Project:
    """Return a project without roles, named after the scheme of the first network.

    Raises:
        DataError: If there is no network; the message describes the contents.
    """
    plain = [network for network in found.values() if _is_plain(network)]
    if plain:
        return Project(plain[0].scheme.plain)
    for family in (family for family in families() if family.named_by in requested):
        (scheme,) = family.schemes_of(requested).values()
        raise OtherNetworkError(
            f"{where}: not a {requested[family.named_by]} in {scheme.plain}'s names; missing: "
            f"{' or '.join(scheme.first)}"
        )
    if any(key.startswith("res2_0_branch") for key in known):
        raise DataError(
            f"{where}: Caffe2 weights, but not of MSRA's networks ({format_keys(raw)}), so their "
            "pixel normalization is unknown"
        )
    what = _other_network(known)
    seen = f": it looks like {what}" if what else f" ({describe(raw)})"
    if what or not isinstance(raw, Mapping):
        raise OtherNetworkError(f"{where}: unknown layout{seen}")
    raise UnknownLayoutError(f"{where}: unknown layout{seen}")


def _is_plain(network: Network) -> bool:
    return bool(network.scheme.plain) and network.prefix.count("/") <= MAX_PREFIX_KEYS


def _is_dropped(network: Network, project: Project) -> bool:
    keys = (*network.keys, network.inner_prefix + network.scheme.first[1])
    if project.is_unknown and any(map(is_average, network.keys)):
        return False  # e.g. in the state of a callback
    return any(rule_of(key, project) is not None for key in keys)


def is_average(key: Any) -> bool:
    """Return whether a key has a word for moving averages."""
    return bool(_AVERAGE_WORDS & set(re.split(r"[\W_]+", str(key).lower())))


def _is_same(network: Network, other: Network, values: Mapping[str, Any]) -> bool:
    """Return whether two prefixes have equal tensors, e.g. if a module has two names."""
    first = network.scheme.first[0]
    starts = (network.prefix + first, other.prefix + first)
    if network.scheme is not other.scheme or not _is_equal(*map(values.get, starts)):
        return False
    own = {
        name.removeprefix(network.prefix): value
        for name, value in values.items()
        if name.startswith(network.prefix) and network.scheme.rename(name[len(network.prefix) :])
    }
    return all(_is_equal(value, values.get(other.prefix + name)) for name, value in own.items())


def _is_equal(value: Any, other: Any) -> bool:
    both = is_array(value) and is_array(other) and value.shape == other.shape
    return both and bool((value == other).all())


def _averages(found: Mapping[str, Network], raw: Any) -> list[str]:
    """Return the names of networks that are moving averages of others.

    An average is identified by the layout of a known framework, or by a word in its name that not
    all networks have.
    """
    for mark, trained in AVERAGES.items():
        if get_nested(raw, [mark]) is not None and any(
            n.keys[:1] == (trained,) for n in found.values()
        ):
            return [name for name, n in found.items() if n.keys[:1] == ("state_dict",)]
    parts = {name: set(name.lower().split(".")) for name in found}
    common = set.intersection(*parts.values())
    return [name for name, own in parts.items() if any(map(is_average, own - common))]


def _other_network(keys: Iterable[str]) -> str | None:
    """Return the description of the unsupported network with these keys, or None."""
    keys = {key.replace("/", ".") for key in keys}
    for what, first, second in (row for family in families() for row in family.lookalikes):
        prefixes = {key.removesuffix(first) for key in keys if f".{key}".endswith(f".{first}")}
        if any(prefix + second in keys for prefix in prefixes):
            return what
    return None


def supported_networks() -> str:
    """Return the supported networks, for messages."""
    kinds = [family.networks.partition(" (")[0] for family in families()]
    return f"supported are {', '.join(kinds)}; see docs/guides/converting.md"


def _refuse_known(raw: Any, where: str) -> None:
    """Raise DataError with a specific message for files that are often used by mistake."""
    if not isinstance(raw, Mapping):
        return
    if not is_converted(raw):
        inside = raw.get("model")
        top = [*raw, *(inside if isinstance(inside, Mapping) else ())]
        if any(_DETECTRON2.match(strip_wrappers(key)) for key in top):
            raise DataError(
                f"{where}: a detection model, not a pre-trained backbone; "
                f"give it to {program('train')} as MODEL.WEIGHTS with "
                "--eval-only"
            )
    if isinstance(raw.get("blobs"), Mapping):
        raise DataError(
            f"{where}: a detection model of Detectron (Caffe2), not a pre-trained backbone, "
            "which this project does not support"
        )
    version = raw.get("format")
    formats = sorted(project.marks["format"] for project in PROJECTS if project.is_ours)
    if isinstance(version, str) and version.startswith("moco-transfer") and version not in formats:
        raise DataError(
            f"{where}: unsupported format {format_value(version)}; choices are {', '.join(formats)}"
        )
