"""Tests of gaps: paired t-test over equal seeds, Holm's correction, power and equivalence.

They complement Welch's test (benchmarks/report/table.py). All of them are over the seeds of the
runs; none covers the variation due to pre-training or the choice of test images. The grids and
captions of the tests are here, too.

* Welch's test: B. L. Welch, Biometrika 34 (1947) 28. Its power: the mean of the noncentral t over
  its degrees of freedom, `welch_power`; scipy has the pooled test's only (`scipy.stats.nct`).
* Correction: S. Holm, Scand. J. Stat. 6 (1979) 65.
* Equivalence, two one-sided tests: D. J. Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987) 657.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from benchmarks.report.isolation import differences
from benchmarks.report.style import (
    MAX_RUNS,
    MISSING,
    UNTESTED,
    format_gap,
    format_interval,
    format_p,
    format_runs,
)
from benchmarks.report.table import (
    CONFIDENCE,
    Cell,
    Gap,
    Grid,
    Resamples,
    Row,
    Table,
    TextCell,
    evidence,
    format_plus_minus,
    gap_name,
    seeds,
    varies,
)
from detection.evaluation.metrics import has_matches, titles
from moco.common.command import RANDOM
from moco.common.errors import first_few, plural

POWER = 0.8  # Cohen's convention
LEVEL = 0.05
_Key = TypeVar("_Key")


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

    @property
    def equivalent(self) -> bool:
        """True if the gap is shown to be within the margin."""
        return self.same is not None and self.same[1] < 1 - CONFIDENCE


def significance(table: Table) -> list[Significance]:
    """Test every gap that has an interval, in the order of rows and metrics."""
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
        why = unpaired_reason(row, base, metric)
        if not why and (pair := paired(a, b, table.looks)):
            pairs[i] = pair
        if table.margin is not None:
            same[i] = min(1.0, table.looks * equivalence(a, b, table.margin))
        found.append((row, metric, min(a.n, b.n), why, pooled_std([a, b]), abs(gap.value)))
    welch_holm, same_holm = holm(welch), holm(same)
    paired_holm = holm({i: p for i, (*_, p) in pairs.items()})
    rejected = {i for i, p in welch_holm.items() if p < 1 - CONFIDENCE}
    levels = {i: holm_level(welch, i) / table.looks for i in welch}
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


def holm(p_values: Mapping[_Key, float]) -> dict[_Key, float]:
    """Correct p-values by Holm's step-down method, which controls the family-wise error rate."""
    corrected: dict[_Key, float] = {}
    highest = 0.0
    for rank, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[key]))
        corrected[key] = highest
    return corrected


def holm_level(p_values: Mapping[_Key, float], key: _Key) -> float:
    """Return the level below which `holm` rejects `key` at 0.05, given the other p-values.

    It is 0.05 / m for m gaps of which no other is significant, and 0.05 if all others are.
    """
    left = len(p_values)
    for p in sorted(p for other, p in p_values.items() if other != key):
        if left * p >= LEVEL:
            break
        left -= 1
    return LEVEL / left


def unpaired_reason(row: Row, base: Row, metric: str) -> str:
    """Return why two rows of a table cannot be compared seed by seed, or "" if they can.

    Runs of equal seeds must differ only in the weights (benchmarks/report/isolation.py).
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


def paired(a: Cell, b: Cell, looks: int = 1) -> tuple[float, float, float] | None:
    """Compute the 95% interval of the mean of `a` minus `b` and the p-value of the paired t-test.

    Both are corrected for a number of looks, as in `gap`.

    Returns:
        Lower end, upper end and p-value, or None for a single pair or equal differences.
    """
    differences = [x - y for x, y in zip(a.values, b.values, strict=True)]
    if len(differences) < 2 or not varies(differences):
        return None
    from scipy import stats

    test = stats.ttest_rel(a.values, b.values)
    interval = test.confidence_interval(1 - (1 - CONFIDENCE) / looks)
    return float(interval.low), float(interval.high), min(1.0, looks * float(test.pvalue))


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


def gap_grids(table: Table, found: Sequence[Significance]) -> list[Grid]:
    """Return the grids of a table's gaps that have at least one row.

    Args:
        table: Table that the gaps belong to.
        found: Tests of all gaps that have an interval.
    """
    grids = [*table.grids, _welch(table), _corrected(table, found)]
    grids += [_resampled(table, table.resamples)] if table.resamples else []
    return [grid for grid in grids if grid.rows]


def _welch(table: Table) -> Grid:
    """Return the grid of gaps, with Welch's intervals: a line per row other than the baseline."""
    tested = any(gap and not gap.untested for row in table.rows for gap in row.gaps.values())
    how = f"95% interval over {seeds(table)}, Welch's test" if tested else UNTESTED
    rows = [
        [gap_name(table, row.init), *map(evidence, row.gaps.values())]
        for row in table.rows
        if any(row.gaps.values())
    ]
    return Grid(f"Gap to {table.baseline}, {how}", ["", *titles(table.metrics)], rows)


def _corrected(table: Table, found: Sequence[Significance]) -> Grid:
    """Return the grid of the tests of `significance`."""
    columns = {
        "": [gap_name(table, each.row.init, each.metric) for each in found],
        f"Holm ({plural(len(found), 'gap')})": [
            TextCell(format_p(each.holm), each.holm) for each in found
        ],
        "paired by seed": [
            _interval(each.paired, f"not possible: {each.unpaired}") for each in found
        ],
    }
    if any(each.smallest is not None for each in found):
        columns[f"smallest gap found {POWER:.0%} of the time"] = [
            TextCell(MISSING if each.smallest is None else f"{each.smallest:.2f}", each.smallest)
            for each in found
        ]
    if any(each.runs is not None for each in found):
        columns["runs needed for this gap"] = [_runs(each) for each in found]
    if table.margin is not None:
        columns[f"within ±{table.margin:g}"] = [
            TextCell(format_p(*each.same), each.same[0]) for each in found if each.same
        ]
    title = "The same gaps: corrected for their number, and paired"
    return Grid(title, [*columns], [*zip(*columns.values(), strict=True)], folded=True)


def _runs(each: Significance) -> TextCell:
    if each.runs is None:
        return TextCell(MISSING)
    return TextCell(format_runs(each.runs, each.n), min(each.runs, MAX_RUNS + 1))


def _resampled(table: Table, resamples: Resamples) -> Grid:
    """Return the grid of both bootstraps, the one over runs and images first."""
    gaps = {row.init: row.gaps for row in table.rows}
    rows = [
        [
            gap_name(table, init, metric),
            _plus_minus(gaps[init][metric], each.both),
            _interval(each.images, "", each.bound),
        ]
        for (init, metric), each in resamples.gaps.items()
    ]
    runs = "pre-trainings" if any(row.several for row in table.rows) else "seeds"
    many = f"{resamples.number} bootstrap resamples, the same of every row"
    head = ["", f"over {runs} and images: the recommended ±"]
    head += ["over test images (these very models, not other seeds)"]
    return Grid(f"The same gaps with other test images: {many}", head, rows)


def _plus_minus(gap: Gap | None, numbers: tuple[float, float, float, float] | None) -> TextCell:
    """Format a gap with half of its symmetric interval, its p-value and corrected p-value."""
    if gap is None or numbers is None:
        return TextCell("not known: n = 1")
    p, corrected = numbers[2:]
    return TextCell(f"{format_plus_minus(gap, numbers)}, {format_p(p, corrected)}", p)


def _interval(
    numbers: tuple[float, float, float, float] | None, otherwise: str, bound: bool = False
) -> TextCell:
    """Format an interval with its p-value and corrected p-value, or `otherwise` if it is None."""
    if numbers is None:
        return TextCell(otherwise)
    low, high, p, corrected = numbers
    return TextCell(f"{format_interval(low, high)}, {format_p(p, corrected, bound)}", p)


def uncertainty(table: Table) -> str:
    """Describe which sources of variation the standard deviations, intervals and p-values cover."""
    several = any(row.several for row in table.rows)
    others = [row.init for row in table.rows if not row.several and row.init != RANDOM]
    lacks = [] if several else ["pre-training (one file of weights per row)"]
    if several and others:
        lacks = [f"pre-training of {', '.join(others)} (one file of weights each)"]
    none = table.runs[0].record.kind == "detection" and not has_matches(table.metrics)
    images = "test images (this metric has no match records)" if none else "test images"
    resampled = bool(table.resamples and table.resamples.gaps)
    these = "those over test images hold for these models, not for other seeds"
    bootstrap = f"; of the bootstrap, {these}" if resampled else ""
    if all(row.n == 1 for row in table.rows):
        unknown = [seeds(table), *lacks, *([] if resampled else [images])]
        known = f"no uncertainty is known, of {', '.join(unknown[:-1])} or {unknown[-1]}"
        return f"each row is one run: {known}{bootstrap}"
    text = f"standard deviations, intervals and p-values are over {_covered(table)} only"
    text += f", not over {' or '.join([*lacks, images])}"
    return text + bootstrap


def _covered(table: Table) -> str:
    """Describe what the trials of the rows differ in."""
    several = [f"{row.init} ({row.n} files of weights)" for row in table.rows if row.several]
    if not several:
        return seeds(table)
    return (
        f"{seeds(table)} and, of {', '.join(several)}, pre-training, each file as the mean of its "
        "runs"
    )


def nothing_shown(table: Table, found: Sequence[Significance]) -> list[str]:
    """Return a note if no gap of a table is significant after correction, with the detectable gaps.

    Args:
        table: Table that the gaps belong to.
        found: Tests of all gaps that have an interval.
    """
    if not found or any(each.significant for each in found):
        return []
    text = f"these runs show no difference from {table.baseline}: no p-value (of "
    text += f"{plural(len(found), 'gap')}) is below {1 - CONFIDENCE:.2f} after Holm's correction"
    return [
        f"{text}; {reach}, with the same correction" if (reach := _reach(table, found)) else text
    ]


def _reach(table: Table, found: Sequence[Significance]) -> str:
    """Format the gaps of the first metric that are found with power 0.8, or "" if none is known."""
    metric = found[0].metric
    known = [each for each in found if each.metric == metric and each.smallest is not None]
    if not known:
        return ""
    title = titles(table.metrics)[table.metrics.index(metric)]
    runs = _span([str(each.n) for each in sorted(known, key=lambda each: each.n)])
    sizes = sorted(each.smallest for each in known if each.smallest is not None)
    size = _span([f"{size:.1f}" for size in sizes])
    return f"{runs} runs per row find gaps of {size} {title} {POWER:.0%} of the time"


def different(table: Table, found: Sequence[Significance]) -> str:
    """Return one line on the rows that differ from the baseline, by the criterion of bold gaps.

    Args:
        table: Table with the rows.
        found: Tests of all gaps that have an interval.
    """
    others = [row.init for row in table.rows if row is not table.base]
    if table.base is None or not others:
        return "different: " + ("no other row" if table.base else "no baseline to compare with")
    names = dict(zip(table.metrics, titles(table.metrics), strict=True))
    shown: dict[str, list[str]] = {}
    for each in found:
        if each.significant and (gap := each.row.gaps[each.metric]):
            text = f"{names[each.metric]} {format_gap(gap.printed)}"
            shown.setdefault(each.row.init, []).append(text)
    tested = {each.row.init for each in found}
    parts = [first_few([f"{init} ({', '.join(gaps)})" for init, gaps in shown.items()])]
    for what, inits in (
        ("not shown for", tested - shown.keys()),
        ("not tested:", {*others} - tested),
    ):
        parts += [f"{what} {first_few([o for o in others if o in inits])}"] if inits else []
    if table.margin is not None:
        equal = [f"{each.row.init} {names[each.metric]}" for each in found if each.equivalent]
        parts.append(f"shown to be within ±{table.margin:g}: {first_few(equal) or 'none'}")
    return f"different from {table.baseline}: {'; '.join(filter(None, parts))}"


def how_sure(table: Table, found: Sequence[Significance], proof: Sequence[str]) -> str:
    """Return one line on the evidence for differences: test, detectable gap, compared records.

    With the bootstrap, it includes the gaps of the first metric over runs and test images.

    Args:
        table: Table of the tests.
        found: Tests of all gaps that have an interval.
        proof: Lines that say whether only the weights differ.
    """
    if found:
        text = f"Welch's test, p < {1 - CONFIDENCE:.2f} after Holm's correction for "
        text += f"{plural(len(found), 'gap')}, over {_covered(table)} only"
        if not any(each.significant for each in found) and (reach := _reach(table, found)):
            text += f"; {reach}"
    else:
        reasons = dict.fromkeys(g.untested for row in table.rows for g in row.gaps.values() if g)
        text = f"no test ({', '.join(reasons)})" if reasons else "nothing to test"
    metric = table.metrics[0]
    gaps = table.resamples.gaps if table.resamples else {}
    both = [
        f"{row.init} {format_plus_minus(gap, resampled.both)}"
        for row in table.rows
        if (gap := row.gaps[metric]) and (resampled := gaps.get((row.init, metric)))
        if resampled.both
    ]
    if both:
        text += f"; over runs and test images, {titles(table.metrics)[0]}: {first_few(both)}"
    return f"how sure: {'; '.join([text, *proof])}"


def _span(ordered: Sequence[str]) -> str:
    """Format the range of ordered texts: `3 to 5`, or `3` if first and last are equal."""
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1])))
