"""Tests of gaps: paired t-test over equal seeds, Holm's correction, power and equivalence.

They complement Welch's test (benchmarks/report/aggregate.py). All of them are over the seeds of the
runs; none covers the variation due to pre-training or the choice of test images.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.report.aggregate import CONFIDENCE, Cell, Row, Table, varies
from benchmarks.report.isolation import differences
from benchmarks.report.sequential import Looks, holm, holm_level
from benchmarks.report.style import MAX_RUNS
from moco.common.errors import first_few

POWER = 0.8  # Cohen's convention


@dataclass(frozen=True)
class Significance:
    """Tests of one gap that has a Welch interval. P-values are corrected over all gaps of a table.

    Attributes:
        row: Row of the gap.
        metric: Metric of the gap.
        n: Number of runs of the row or the baseline, whichever is smaller.
        holm: Welch's p-value after Holm's correction.
        paired: Ends of the 95% interval over pairs of equal seeds, p-value, corrected p-value; None
            if the runs are not pairs.
        unpaired: Reason why the runs are not pairs, empty if they are.
        smallest: Gap in points that `n` runs per row detect with power 0.8 at the level of
            `holm_level`, by which the gap itself is judged. None for two runs, which give too poor
            an estimate of the standard deviation.
        runs: Number of runs per row that detect the measured gap with that power, infinity if it
            exceeds `MAX_RUNS`. None for two runs, and for a significant gap.
        same: P-value of equivalence within the table's margin, and its corrected p-value; None
            without a margin.
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

    @property
    def significant(self) -> bool:
        """True if the corrected p-value is below 0.05: the criterion of bold gaps."""
        return self.holm < 1 - CONFIDENCE


def significance(table: Table) -> list[Significance]:
    """Test every gap that has an interval, in the order of rows and metrics."""
    base = table.base
    if base is None:
        return []
    if table.looks is not None:
        return _of_looks(table, table.looks)
    found: list[tuple[Row, str, int, str, float, float]] = []
    welch: dict[int, float] = {}
    pairs: dict[int, tuple[float, float, float]] = {}
    same: dict[int, float] = {}
    for row, metric in itertools.product(table.rows, table.metrics):
        gap, a, b, i = row.gaps[metric], row.cells[metric], base.cells[metric], len(found)
        if gap is None or gap.p_value is None or a is None or b is None:
            continue
        welch[i] = gap.p_value
        why = unpaired_reason(row, base, metric)
        if not why and (pair := paired(a, b)):
            pairs[i] = pair
        if table.margin is not None:
            same[i] = equivalence(a, b, table.margin)
        found.append((row, metric, min(a.n, b.n), why, pooled_std([a, b]), abs(gap.value)))
    welch_holm, same_holm = holm(welch), holm(same)
    paired_holm = holm({i: p for i, (*_, p) in pairs.items()})
    rejected = {i for i, p in welch_holm.items() if p < 1 - CONFIDENCE}
    levels = {i: holm_level(welch, i) for i in welch}
    return [
        Significance(
            row,
            metric,
            n,
            welch_holm[i],
            paired=(*pairs[i], paired_holm[i]) if i in pairs else None,
            unpaired=why or ("" if i in pairs else "the differences do not vary"),
            smallest=smallest_gap(n, levels[i]) * std if n > 2 else None,
            runs=runs_needed(gap / std, levels[i]) if n > 2 and i not in rejected else None,
            same=(same[i], same_holm[i]) if i in same else None,
        )
        for i, (row, metric, n, why, std, gap) in enumerate(found)
    ]


def _of_looks(table: Table, looks: Looks) -> list[Significance]:
    """Return the tests of a table whose seeds were added until its gaps were decided.

    They are of one metric; its p-values account for the looks.
    """
    return [
        Significance(
            row,
            looks.metric,
            found.looks[-1].seeds,
            found.holm,
            paired=None,
            unpaired="",
            smallest=None,
            runs=None,
            same=(found.looks[-1].same_p, found.same_holm),
        )
        for row in table.rows
        if (found := looks.comparisons.get(row.init)) and found.looks
    ]


def unpaired_reason(row: Row, base: Row, metric: str) -> str:
    """Return why two rows of a table cannot be compared seed by seed, or "" if they can.

    They can if runs of equal seeds differ in their weights only (benchmarks/report/isolation.py).
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
    """Compute the 95% interval of the mean of `a` minus `b` and the p-value of the paired t-test.

    Returns:
        Lower end, upper end and p-value, or None for a single pair or equal differences.
    """
    differences = [x - y for x, y in zip(a.values, b.values, strict=True)]
    if len(differences) < 2 or not varies(differences):
        return None
    from scipy import stats

    test = stats.ttest_rel(a.values, b.values)
    interval = test.confidence_interval(CONFIDENCE)
    return float(interval.low), float(interval.high), float(test.pvalue)


def equivalence(a: Cell, b: Cell, margin: float) -> float:
    """Return the p-value of equivalence within ±`margin` points by two one-sided Welch tests."""
    from scipy import stats

    p_values = [
        stats.ttest_ind([x + by for x in a.values], b.values, equal_var=False, alternative=side)[1]
        for by, side in ((margin, "greater"), (-margin, "less"))
    ]
    return float(max(p_values))


def pooled_std(cells: Sequence[Cell | None]) -> float:
    """Return the pooled standard deviation of a run, or 0 if no row has two runs that differ."""
    known = [(cell.n - 1, cell.std**2) for cell in cells if cell and cell.std is not None]
    squares = sum(n * variance for n, variance in known)
    return math.sqrt(squares / sum(n for n, _ in known)) if squares else 0.0


@cache
def smallest_gap(n: int, level: float = 1 - CONFIDENCE) -> float:
    """Return the gap, in standard deviations, that Welch's test detects with power 0.8.

    Args:
        n: Number of runs per row, 2 or more.
        level: Significance level, see `holm_level`.
    """
    low, high = 0.0, _normal_gap(n, level)
    while welch_power(high, n, level) < POWER:
        low, high = high, 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if welch_power(middle, n, level) < POWER else (low, middle)
    return high


def runs_needed(gap: float, level: float = 1 - CONFIDENCE) -> float:
    """Return the runs per row with which Welch's test detects a gap with power 0.8.

    Args:
        gap: Gap in standard deviations.
        level: Significance level.

    Returns:
        Number of runs, or infinity if it exceeds `MAX_RUNS`.
    """
    if _normal_gap(MAX_RUNS, level) > gap:
        return math.inf
    n = max(2, math.ceil(2 * (_normal_gap(2, level) / gap) ** 2))
    while welch_power(gap, n, level) < POWER:  # the normal approximation needs fewer runs
        n += 1
    return n


def welch_power(gap: float, n: int, level: float = 1 - CONFIDENCE) -> float:
    """Return the probability that Welch's test finds a gap of `gap` standard deviations.

    With equal numbers of runs its statistic is the pooled one, and its degrees of freedom depend on
    the share of one row in the sum of the variances. The pooled variance and the share are
    independent, so the power is a mean over a grid of quantiles of both.

    Args:
        gap: Gap in standard deviations.
        n: Number of runs per row.
        level: Significance level.
    """
    import numpy as np
    from scipy import special  # scipy.stats takes three times as long to import

    at = (np.arange(200) + 0.5) / 200
    share = special.betaincinv((n - 1) / 2, (n - 1) / 2, at)
    critical = special.stdtrit((n - 1) / (share**2 + (1 - share) ** 2), 1 - level / 2)
    limits = np.outer(critical, np.sqrt(2 * special.gammaincinv(n - 1, at) / (2 * n - 2)))
    shift = gap * math.sqrt(n / 2)
    return float((special.ndtr(shift - limits) + special.ndtr(-limits - shift)).mean())


def _normal_gap(n: int, level: float) -> float:
    """Approximate `smallest_gap` by the test with a known standard deviation."""
    normal = statistics.NormalDist()
    return (normal.inv_cdf(1 - level / 2) + normal.inv_cdf(POWER)) * math.sqrt(2 / n)
