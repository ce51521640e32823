"""Style of tables and figures: number formats, marks and colors."""

import math
import re
from collections.abc import Sequence

from benchmarks.report.aggregate import Cell, Gap
from moco.common.command import RANDOM

MISSING = "–"
MINUS = "−"
FEW_MARK = "†"  # on n: fewer trials than the paper averages
UNVERIFIED_MARK = "‡"  # on a published number: not checked against its source
UNTESTED = "no test"
MAX_RUNS = 1000  # per row; a gap that needs more is negligible
STRONG_FROM = 0.5  # points; the paper prints gaps from here on in green

GREEN = "#39b54a"  # the paper's "Highlight"
GRAY = "#8a8a8a"  # random initialization
GRID_COLOR = "#e6e6e6"
# Okabe and Ito's color-blind safe palette.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Boxes of the ground truth, of correct and of wrong predictions.
TRUTH, RIGHT, WRONG = PALETTE[5], PALETTE[2], PALETTE[1]

_TITLE = re.compile(r"AP(\d*)(?:\^(\w+))?")


def colors(names: Sequence[str]) -> dict[str, str]:
    """Map names to colors: gray for `random`, the palette in order for the others."""
    others = [name for name in names if name != RANDOM]
    palette = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(others)}
    return {RANDOM: GRAY, **palette}


def format_cell(cell: Cell | None, n_of_row: int) -> str:
    """Format a cell: `26.5 ± 1.2`, `26.5` for one trial; `(n = 2 of 3)` if numbers are missing."""
    if cell is None:
        return MISSING
    text = f"{cell.mean:.1f}" if cell.std is None else f"{cell.mean:.1f} ± {cell.std:.1f}"
    return text if cell.n == n_of_row else f"{text} (n = {cell.n} of {n_of_row})"


def legend(gaps: Sequence[Gap], baseline: str | None, test: str) -> str:
    """Return the legend of a table's cells, the same in every format.

    Args:
        gaps: All gaps of the table.
        baseline: Name of the row that they refer to.
        test: Name of the test of the gaps.
    """
    text = "underlined: best of its column"
    if gaps:
        text += f"; in brackets: gap to {baseline}"
    if any(not gap.untested for gap in gaps):
        text += f"; bold: p < 0.05 in {test} after Holm's correction for all gaps of the table"
        text += f"; green, where there is color: bold and at least +{STRONG_FROM}"
    if reasons := dict.fromkeys(gap.untested for gap in gaps if gap.untested):
        text += f"; {UNTESTED}: {', or '.join(reasons)}"
    return text


def format_gap(value: float) -> str:
    """Format a gap, rounded to one decimal: `+18.4` or `−0.3`."""
    return f"{'' if round(value, 1) < 0 else '+'}{_signed(value)}"


def is_strong(value: float) -> bool:
    """Check whether the rounded gap is at least +0.5."""
    return round(value, 1) >= STRONG_FROM


def format_evidence(gap: Gap | None) -> str:
    """Format a gap with its 95% interval and p-value: `+18.4 [15.0, 21.8], p = 0.002`."""
    if gap is None:
        return MISSING
    if gap.low is None or gap.high is None or gap.p_value is None:
        return f"{format_gap(gap.printed)} ({UNTESTED}: {gap.untested})"
    interval = format_interval(gap.low, gap.high)
    return f"{format_gap(gap.printed)} {interval}, {format_p(gap.p_value)}"


def format_interval(low: float, high: float) -> str:
    """Format an interval: `[−1.0, 21.8]`."""
    return f"[{_signed(low)}, {_signed(high)}]"


def format_plus_minus(gap: Gap, interval: Sequence[float]) -> str:
    """Format a gap with half of an interval that is symmetric about it: `+1.4 ± 1.7`."""
    return f"{format_gap(gap.printed)} ± {(interval[1] - interval[0]) / 2:.1f}"


def _signed(value: float) -> str:
    """Format a number to one decimal, without a negative zero."""
    return f"{round(value, 1) + 0.0:.1f}".replace("-", MINUS)


def format_p(value: float, holm: float | None = None, bound: bool = False) -> str:
    """Format a p-value: `p = 0.002`, or `p ≤ 0.002` if it is a bound; then `Holm p = 0.006`."""
    if value < 0.001:
        text = "p < 0.001"
    else:
        text = f"p ≤ {math.ceil(1000 * value) / 1000:.3f}" if bound else f"p = {value:.3f}"
    return text if holm is None else f"{text}, Holm {format_p(holm, bound=bound)}"


def format_seeds(seeds: Sequence[str]) -> str:
    """Format a list of seeds: `seed 0`, or `seeds 0, 1`."""
    word = "seed" if len(seeds) == 1 else "seeds"
    return f"{word} {', '.join(seeds)}"


def format_runs(needed: float, n: int) -> str:
    """Format a number of runs per row and how many more than `n` these are: `8 (3 more)`."""
    if needed > MAX_RUNS:
        return f"over {MAX_RUNS}"
    return f"{needed:.0f} ({needed - n:.0f} more)" if needed > n else f"{needed:.0f}"


def title_parts(title: str) -> tuple[str, str, str]:
    """Split a column head into name, subscript and superscript: `AP50^bb` is AP, 50 and bb."""
    parts = _TITLE.fullmatch(title)
    return ("AP", parts[1], parts[2] or "") if parts else (title, "", "")
