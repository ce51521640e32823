"""Evidence from the run records that two rows of a table differ in their weights only.

All rows of a table share the engine, the protocol (the hash of the data and of every key but seed,
weights, folders and devices) and the length. This module compares what else affects a result: the
first batch of each seed, devices, versions, code, hardware and tuned values.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report.records import TASK_KEYS
from benchmarks.report.style import format_seeds
from benchmarks.report.table import Row, Table
from detection.config.keys import DATA_KEY, tuned_axes, tuned_values
from moco.common.errors import first_few
from moco.common.keys import Role, names_of
from moco.common.run import RunRecord

# Keys that affect which random numbers a seed yields, or the rounding of the results.
SAMPLING = (
    *("DEVICE", "DATA.NUM_WORKERS", "MODEL.DEVICE", "DATALOADER.NUM_WORKERS"),
    *("MODEL.CHANNELS_LAST", "SOLVER.REFERENCE_WORLD_SIZE"),
)
NO_EFFECT = ("python",)  # packages whose version does not change results
SHORT = 4  # digits of a hash in a line, whose other digits are on the page of runs


@dataclass(frozen=True)
class Isolation:
    """Comparison of the records of a row and the baseline.

    Attributes:
        row: Name of the row.
        base: Name of the baseline.
        summary: The proof in short, empty if anything differs or is not recorded.
        proof: Descriptions of what is equal, empty if anything differs or is not recorded.
        differs: Descriptions of what differs or is not recorded.
        tuned: Description of the values tuned for each row on one grid, empty if they are equal.
        places: Descriptions of the code and hardware that differ. Two equal machines, or a commit
            between two runs, are legitimate; they are named.
    """

    row: str
    base: str
    summary: str
    proof: tuple[str, ...]
    differs: tuple[str, ...]
    tuned: str = ""
    places: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"only the weights of {self.row} and {self.base}"
        what += " and what was tuned for each" if self.tuned else ""
        what += f", and {', '.join(self.places)}," if self.places else ""
        found = "; ".join([*filter(None, [self.tuned]), *(self.differs or self.proof)])
        return f"{'not shown that ' if self.differs else ''}{what} differ: {found}"

    @property
    def short(self) -> str:
        """The comparison in a few words, without the names of the rows."""
        what = f"only the weights{' and what was tuned' if self.tuned else ''}"
        what += f", and {first_few(self.places, 2)}, differ" if self.places else " differ"
        if self.differs:
            return f"not shown that {what}: {first_few(self.differs, 1)}"
        return f"{what} ({self.summary})"


def shortened(found: Sequence[Isolation]) -> list[str]:
    """Group rows with the same short comparison; return one line per group.

    The full comparisons are on the page of runs.
    """
    groups: dict[str, list[str]] = {}
    for each in found:
        groups.setdefault(each.short, []).append(each.row)
    if len(groups) == 1:
        return [*groups]
    return [f"{first_few(names)}: {text}" for text, names in groups.items()]


def isolation(table: Table) -> list[Isolation]:
    """Compare every other row of a table with the baseline."""
    base = table.base
    return [_compare(row, base) for row in table.rows if base and row is not base]


def _compare(row: Row, base: Row) -> Isolation:
    of_seed = {run.record.seed: run.record for run in base.runs}
    seeds = {run.record.seed for run in row.runs}
    pairs = [(r.record, of_seed[r.record.seed]) for r in row.runs if r.record.seed in of_seed]
    differs = [f"only one of them has seed {seed}" for seed in sorted(seeds ^ of_seed.keys())]
    differs += differences(pairs)
    tuned, places = _tuned(row, base), tuple(_by_seed(pairs, _places))
    if differs or not pairs:
        return Isolation(row.init, base.init, "", (), tuple(differs), tuned, places)
    first = pairs[0][0]
    contract = [
        f"{key} {x!r} / {y!r}"
        for key in names_of(TASK_KEYS, Role.WEIGHTS)
        if (x := first.config.get(key)) != (y := pairs[0][1].config.get(key))
    ]
    batches = _hash([_first_batch(a) for a, _ in pairs])
    data = first.config.get(DATA_KEY)  # in the hash of the configuration
    proof = [
        f"equal configuration{' and data' if data else ''} (sha256 {first.config_sha256[:10]})",
        f"equal first batch (sha256 {batches}), devices and data-loader workers in "
        f"{format_seeds([str(seed) for seed in sorted(seeds)])}",
    ]
    proof += [f"the weights' own input contract: {', '.join(contract)}"] if contract else []
    summary = f"config {first.config_sha256[:SHORT]}…, "
    summary += f"data {str(data)[:SHORT]}…, " if data else ""
    summary += f"first batch {batches[:SHORT]}…"
    for state, names in _recorded(pairs).items():
        summary += f", {_listed(names)} {state}"
    return Isolation(row.init, base.init, summary, tuple(proof), (), tuned, places)


def _recorded(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> dict[str, list[str]]:
    """Return which of versions, code and hardware are `equal`, and which are `not recorded`."""
    found: dict[str, list[str]] = {}
    for name, parts in _COMPARED.items():
        of_pairs = [[[_made(r)[part] for part in parts] for r in pair] for pair in pairs]
        if any(None in values for pair in of_pairs for values in pair):
            found.setdefault("not recorded", []).append(name)
        elif all(mine == theirs for mine, theirs in of_pairs):
            found.setdefault("equal", []).append(name)
    return found


def _listed(names: Sequence[str]) -> str:
    """Join names: `versions, code and hardware`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


# What is compared under a name: keys of `_made`.
_COMPARED = {
    "versions": ("versions",),
    "code": ("code",),
    "hardware": ("processor", "threads", "GPUs"),
}


def _made(record: RunRecord) -> dict[str, Any]:
    """Return versions, code and hardware of a run; None for facts that the record lacks."""
    made = record.provenance
    hardware, project = made.get("hardware") or {}, made.get("project") or {}
    gpus = hardware.get("gpus")
    return {
        "versions": made.get("versions") or None,
        "code": project.get("source_sha256"),
        "processor": hardware.get("cpu"),
        "threads": hardware.get("cpu_threads"),
        "GPUs": None if gpus is None else ", ".join(map(str, gpus)) or "none",
    }


def _places(a: RunRecord, b: RunRecord) -> Iterator[str]:
    """Name the code and the hardware in which two runs differ, if both record them."""
    mine, theirs = _made(a), _made(b)
    for name in (*_COMPARED["code"], *_COMPARED["hardware"]):
        if None not in (x := mine[name], y := theirs[name]) and x != y:
            if name == "code":
                x, y = (f"{str(sha256)[:SHORT]}…" for sha256 in (x, y))
            yield f"{name} {x} / {y}"


def _tuned(row: Row, base: Row) -> str:
    """Format differing tuned values: `tuned SOLVER.BASE_LR 0.02 against 0.01, of the same …`."""
    axes = tuned_axes(base.runs[0].record.config)

    def chosen(of: Row, key: str) -> str:
        return " / ".join(dict.fromkeys(tuned_values(r.record.config)[key] for r in of.runs))

    pairs = [(key, chosen(row, key), chosen(base, key)) for key in axes]
    texts = [f"{key} {mine} against {theirs}" for key, mine, theirs in pairs if mine != theirs]
    number = math.prod(map(len, axes.values()))
    return f"tuned {', '.join(texts)}, of the same {number} candidates" if texts else ""


def differences(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> list[str]:
    """List facts other than the weights that differ in pairs of runs or are not recorded.

    Args:
        pairs: Records of runs of one protocol, with equal seeds in each pair.
    """
    return _by_seed(pairs, _differences)


def _by_seed(
    pairs: Sequence[tuple[RunRecord, RunRecord]],
    compare: Callable[[RunRecord, RunRecord], Iterable[str]],
) -> list[str]:
    seeds: dict[str, list[str]] = {}
    for a, b in pairs:
        for text in compare(a, b):
            seeds.setdefault(text, []).append(str(a.seed))
    return [f"{text} ({format_seeds(of)})" for text, of in seeds.items()]


def _differences(a: RunRecord, b: RunRecord) -> Iterator[str]:
    mine, theirs = _sampling(a), _sampling(b)
    for name in dict.fromkeys((*mine, *theirs)):
        if (x := mine.get(name)) != (y := theirs.get(name)):
            yield f"{name} {x!r} / {y!r}"
    first = _first_batch(a), _first_batch(b)
    if None in first:
        yield "no digest of the first batch"
    elif first[0] != first[1]:
        yield "first batch"


def _first_batch(record: RunRecord) -> str | None:
    """Return the digest of the first batch; earlier records have eight."""
    batches = (record.start or {}).get("batches") or [None]
    return batches[0]


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:10]


def _sampling(record: RunRecord) -> dict[str, Any]:
    gpus = (record.provenance.get("hardware") or {}).get("gpus") or ()
    versions = record.provenance.get("versions") or {}
    return {
        **{key: record.config.get(key) for key in SAMPLING},
        "number of GPUs": len(gpus),
        **{name: version for name, version in versions.items() if name not in NO_EFFECT},
    }
