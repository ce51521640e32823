"""Tests beside Welch's: paired over equal seeds, Holm's correction, power, equivalence.

Tables mark a gap by Welch's test alone (benchmarks/report/aggregate.py). All of these are about the
seeds of the runs; none knows how pre-training or other test images vary.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from benchmarks.report.aggregate import CONFIDENCE, Cell, Row, Table, varies
from benchmarks.report.isolation import differences
from benchmarks.report.style import MAX_RUNS
from moco.common.errors import first_few

POWER = 0.8  # Cohen's convention
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Significance:
    """Of one gap that has Welch's interval; each `holm` is over all gaps of the table.

    Attributes:
        n: runs of the row or of the baseline, whichever has fewer.
        holm: Welch's p-value, corrected.
        paired: both ends of the interval over pairs of equal seeds, p-value, and this corrected.
        unpaired: why there are no pairs; empty where there are.
        smallest: points; the gap that `n` runs per row find with power 0.8, corrected as the
            smallest p-value is; None of two runs, whose standard deviation says too little.
        runs: per row, that find the measured gap so; infinity: more than `MAX_RUNS`; None the same.
        same: p-value of the claim that the gap is within the table's margin, and this corrected.
    """

    row: Row
    metric: str
    n: int
    holm: float
    paired: tuple[float, float, float, float] | None
    unpaired: str
    smallest: float | None
    runs: float | None
    same: tuple[float, float] | None


def significance(table: Table) -> list[Significance]:
    """Of every gap that has an interval, in the order of rows and metrics."""
    base = table.base
    if base is None:
        return []
    found: list[tuple[Row, str, int, str, float, float]] = []
    welch: dict[int, float] = {}
    pairs: dict[int, tuple[float, float, float]] = {}
    same: dict[int, float] = {}
    for row, metric in itertools.product(table.rows, table.metrics):
        gap, a, b, i = row.gaps[metric], row.cells[metric], base.cells[metric], len(found)
        if gap is None or gap.p_value is None or a is None or b is None:
            continue
        welch[i] = gap.p_value
        why = unpaired(row, base, metric)
        if not why and (pair := paired(a, b)):
            pairs[i] = pair
        if table.margin is not None:
            same[i] = equivalence(a, b, table.margin)
        found.append((row, metric, min(a.n, b.n), why, pooled_std([a, b]), abs(gap.value)))
    welch_holm, same_holm = holm(welch), holm(same)
    paired_holm = holm({i: p for i, (*_, p) in pairs.items()})
    level = (1 - CONFIDENCE) / max(len(found), 1)
    return [
        Significance(
            row,
            metric,
            n,
            welch_holm[i],
            paired=(*pairs[i], paired_holm[i]) if i in pairs else None,
            unpaired=why or ("" if i in pairs else "the differences do not vary"),
            smallest=smallest_gap(n, level) * std if n > 2 else None,
            runs=runs_needed(gap / std, level) if n > 2 else None,
            same=(same[i], same_holm[i]) if i in same else None,
        )
        for i, (row, metric, n, why, std, gap) in enumerate(found)
    ]


def unpaired(row: Row, base: Row, metric: str) -> str:
    """Why two rows of a table cannot be compared seed by seed; empty where they can.

    They can where a seed stands for one initial head and one order of the data in both rows
    (benchmarks/report/isolation.py).
    """
    if row.several or base.several:
        return "several pre-trainings: the mean of each is one value"
    a, b = ({run.record.seed: run.record for run in each.runs} for each in (row, base))
    if a.keys() != b.keys():
        seeds = [", ".join(map(str, sorted(each))) for each in (a, b)]
        return f"seeds {seeds[0]} / {seeds[1]}"
    if differing := differences([(a[seed], b[seed]) for seed in sorted(a)]):
        return first_few(differing, 2)
    numbers = [run.record.metrics.get(metric) for each in (row, base) for run in each.runs]
    return "a run has no number" if None in numbers else ""


def paired(a: Cell, b: Cell) -> tuple[float, float, float] | None:
    """95% interval of the mean of `a` minus `b` seed by seed, and the p-value of the paired t-test.

    None of one pair, and where all differences are equal.
    """
    differences = [x - y for x, y in zip(a.values, b.values, strict=True)]
    if len(differences) < 2 or not varies(differences):
        return None
    from scipy import stats

    test = stats.ttest_rel(a.values, b.values)
    interval = test.confidence_interval(CONFIDENCE)
    return float(interval.low), float(interval.high), float(test.pvalue)


def holm(p_values: Mapping[_Key, float]) -> dict[_Key, float]:
    """Holm's step-down correction: to call what is below 0.05 real errs in 5% of all families."""
    corrected: dict[_Key, float] = {}
    highest = 0.0
    for rank, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[key]))
        corrected[key] = highest
    return corrected


def equivalence(a: Cell, b: Cell, margin: float) -> float:
    """P-value of two one-sided Welch tests (TOST): low where the gap is within ±`margin` points."""
    from scipy import stats

    p_values = [
        stats.ttest_ind([x + by for x in a.values], b.values, equal_var=False, alternative=side)[1]
        for by, side in ((margin, "greater"), (-margin, "less"))
    ]
    return float(max(p_values))


def pooled_std(cells: Sequence[Cell | None]) -> float:
    """Of one run, from rows with means of their own; 0 where no row has two runs that differ."""
    known = [(cell.n - 1, cell.std**2) for cell in cells if cell and cell.std is not None]
    squares = sum(n * variance for n, variance in known)
    return math.sqrt(squares / sum(n for n, _ in known)) if squares else 0.0


@cache
def smallest_gap(n: int, level: float = 1 - CONFIDENCE) -> float:
    """Return the gap that Welch's test finds with power 0.8, in standard deviations.

    Args:
        n: runs per row, 2 or more.
        level: below which its p-value has to be; of m gaps the smallest has 0.05 / m to be below,
            for Holm's correction to call it real.
    """
    low, high = 0.0, _normal_gap(n, level)
    while welch_power(high, n, level) < POWER:
        low, high = high, 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if welch_power(middle, n, level) < POWER else (low, middle)
    return high


def runs_needed(gap: float, level: float = 1 - CONFIDENCE) -> float:
    """Runs per row by which Welch's test finds a gap, in standard deviations, with power 0.8."""
    if _normal_gap(MAX_RUNS, level) > gap:
        return math.inf
    n = max(2, math.ceil(2 * (_normal_gap(2, level) / gap) ** 2))
    while welch_power(gap, n, level) < POWER:  # the normal distribution asks for fewer
        n += 1
    return n


def welch_power(gap: float, n: int, level: float = 1 - CONFIDENCE) -> float:
    """Probability that Welch's test finds a gap of this many standard deviations at p < `level`.

    With equal numbers of runs its statistic is the pooled one, and its degrees of freedom depend on
    the share that one row has of the two variances. The two are independent: this is the mean over
    both, on a grid of quantiles.
    """
    import numpy as np
    from scipy import special  # its stats take three times as long to import

    at = (np.arange(200) + 0.5) / 200
    share = special.betaincinv((n - 1) / 2, (n - 1) / 2, at)
    critical = special.stdtrit((n - 1) / (share**2 + (1 - share) ** 2), 1 - level / 2)
    limits = np.outer(critical, np.sqrt(2 * special.gammaincinv(n - 1, at) / (2 * n - 2)))
    shift = gap * math.sqrt(n / 2)
    return float((special.ndtr(shift - limits) + special.ndtr(-limits - shift)).mean())


def _normal_gap(n: int, level: float) -> float:
    """`smallest_gap` with a known standard deviation."""
    normal = statistics.NormalDist()
    return (normal.inv_cdf(1 - level / 2) + normal.inv_cdf(POWER)) * math.sqrt(2 / n)
