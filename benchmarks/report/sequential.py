"""Group-sequential comparison of two rows: seeds are added until a gap is decided.

After each look at n pairs of runs of equal seeds, the gap is tested by the one-sample t-test of its
n differences. Testing again after each seed at p < 0.05 would call equal rows different in far
more than 5% of all cases. Here the error is spent over the looks by the function of Lan and DeMets
that approximates O'Brien and Fleming's boundaries,

    alpha(t) = 2 - 2 Phi(z(1 - alpha / 2) / sqrt(t)) for one side, t = n / (largest n),

and the boundary of each look is the nominal p-value at which that much is spent. The usual
boundaries are those of normal variables; with two degrees of freedom at the first look, they spend
5.7% instead of 5%. So they are computed for t statistics, exactly: u_n = sum(x) / sqrt(n sum(x^2)),
which t_n is a function of, is a Markov chain without an effect, because the direction of x_1..x_n
is independent of its length:

    u_(n+1) = (sqrt(n) u_n + r) / sqrt((n + 1) (1 + r^2)),   r = x_(n+1) / |x_1..n| ~ t_n / sqrt(n).

The test needs normal differences, but neither equal variances nor independent rows.

* The boundaries: K. K. G. Lan and D. L. DeMets, Biometrika 70 (1983) 659; P. C. O'Brien and T. R.
  Fleming, Biometrics 35 (1979) 549. Exact ones of sequential t-tests: C. Jennison and B. W.
  Turnbull, Biometrika 78 (1991) 133.
* The interval, which has 95% coverage at every look: C. Jennison and B. W. Turnbull, J. R. Stat.
  Soc. B 51 (1989) 305.
* The p-value, which is the smallest level whose boundaries were crossed: Q. Liu and K. M. Anderson,
  J. Am. Stat. Assoc. 103 (2008) 1621. Holm's correction of them: W. Maurer and F. Bretz, Stat.
  Biopharm. Res. 5 (2013) 311.
* Equivalence by two one-sided tests at 5%, each with boundaries of its own: D. J. Schuirmann, J.
  Pharmacokinet. Biopharm. 15 (1987) 657.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from moco.common.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL = 0.05
FIRST_SEEDS, MOST_SEEDS, MARGIN = 3, 9, 0.5
LIMIT_SEEDS = 50  # the transition of each look is kept in memory
GAP, SAME = "gap", "same"
ROUNDING = 1e-9  # points; a smaller standard deviation is rounding error
_CELLS, _RANGE = 300, 7.0  # cells of the chain's state, as a standard normal variable
_SMALLEST = 1e-9  # p-value
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class SeedPlan:
    """Plan of the looks, which is fixed before the first one.

    Attributes:
        baseline: Row that the others are compared with.
        rows: The other rows, over whose number Holm's method corrects.
        first: Number of seeds at the first look.
        most: Number of seeds at the last look.
        margin: Largest gap, in points, that counts as equivalence.
    """

    baseline: str
    rows: tuple[str, ...]
    first: int = FIRST_SEEDS
    most: int = MOST_SEEDS
    margin: float = MARGIN

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            UserError: If there is nothing to compare, or a number is out of range.
        """
        if not self.rows or self.baseline in self.rows:
            raise UserError("--until-decided: expected a baseline and at least one other row")
        if not 2 <= self.first < self.most <= LIMIT_SEEDS:
            raise UserError(
                f"--until-decided: got looks from {self.first} to {self.most} seeds (--trials, "
                f"--max-seeds), expected at least 2 to at most {LIMIT_SEEDS}, the first below the "
                "last"
            )
        if not 0 < self.margin <= 100:
            raise UserError(f"--margin {self.margin}: expected points above 0 to 100")

    @property
    def looks(self) -> int:
        """Largest number of looks."""
        return self.most - self.first + 1

    @classmethod
    def parse(cls, content: Any, where: str) -> "SeedPlan | None":
        """Make a plan of the untrusted value of `until_decided` in `suite.json`.

        Raises:
            UserError: If it is neither a plan nor None.
        """
        if content is None:
            return None
        kinds: dict[str, Any] = {
            "baseline": str,
            "rows": list,
            "first": int,
            "most": int,
            "margin": (int, float),
        }
        fits = isinstance(content, dict) and content.keys() == kinds.keys()
        if not fits or not all(isinstance(content[key], kind) for key, kind in kinds.items()):
            raise UserError(f"{where}: until_decided: expected {', '.join(kinds)}")
        return cls(**{**content, "rows": tuple(map(str, content["rows"]))})


@dataclass(frozen=True)
class Look:
    """One look at a comparison.

    Attributes:
        seeds: Number of seeds of both rows.
        gap: Mean difference, in points.
        low: Lower end of the 95% interval that accounts for all looks.
        high: Upper end of that interval.
        nominal: P-value of the t-test, which ignores the other looks.
        boundary: Nominal p-value that decides this look at 5%, before Holm's correction.
        p_value: P-value that accounts for this and earlier looks.
        same_nominal: The larger nominal p-value of the two tests of equivalence.
        same_boundary: As `boundary`, of these tests.
        same_p: As `p_value`, of these tests.
    """

    seeds: int
    gap: float
    low: float
    high: float
    nominal: float
    boundary: float
    p_value: float
    same_nominal: float
    same_boundary: float
    same_p: float


@dataclass
class Comparison:
    """Looks at one row.

    Attributes:
        looks: Looks that were taken, in order.
        seeds: Number of seeds that both rows have, from seed 0 on.
        decided: `GAP`, `SAME`, or "" while neither is shown.
        holm: Last `p_value` after Holm's correction over the rows.
        same_holm: Last `same_p` after that correction.
    """

    looks: list[Look] = field(default_factory=list)
    seeds: int = 0
    decided: str = ""
    holm: float = 1.0
    same_holm: float = 1.0


@dataclass(frozen=True)
class Looks:
    """Looks at a table's gaps.

    Attributes:
        plan: Plan that was fixed before them.
        metric: The metric that was tested.
        comparisons: Row → its looks; empty if the table has another baseline.
    """

    plan: SeedPlan
    metric: str
    comparisons: Mapping[str, Comparison]


def compare(plan: SeedPlan, values: Mapping[str, Mapping[int, float]]) -> dict[str, Comparison]:
    """Take every look that the runs allow, in order, and return the rows' comparisons.

    A look at n seeds needs the runs of seeds 0 to n - 1 of both rows. As the looks depend on the
    runs alone, a suite that continues takes the same ones, and a table repeats them.

    Args:
        plan: Plan of the looks.
        values: Row → seed → metric in points.
    """
    base = values.get(plan.baseline, {})
    pairs = {row: _pairs(values.get(row, {}), base) for row in plan.rows}
    found = {row: Comparison(seeds=len(pairs[row])) for row in plan.rows}
    for seeds in range(plan.first, plan.most + 1):
        for row, each in found.items():
            if not each.decided and seeds <= each.seeds:
                each.looks.append(_look(pairs[row][:seeds], plan, each.looks))
        last = {row: each.looks[-1] if each.looks else None for row, each in found.items()}
        different = holm({row: look.p_value if look else 1.0 for row, look in last.items()})
        same = holm({row: look.same_p if look else 1.0 for row, look in last.items()})
        for row, each in found.items():
            each.holm, each.same_holm = different[row], same[row]
            if not each.decided:
                each.decided = GAP if each.holm < LEVEL else SAME if each.same_holm < LEVEL else ""
    return found


def _pairs(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Return the differences of seeds 0, 1, ... up to the first that is missing."""
    both = a.keys() & b.keys()
    return [a[seed] - b[seed] for seed in itertools.takewhile(both.__contains__, itertools.count())]


def _look(differences: Sequence[float], plan: SeedPlan, earlier: Sequence[Look]) -> Look:
    """Test the differences of a look."""
    from scipy import special

    seeds, mean = len(differences), statistics.fmean(differences)
    # Differences that do not vary are no evidence: their standard deviation is not known.
    error = statistics.stdev(differences) / math.sqrt(seeds)
    error = error if error > ROUNDING else math.inf

    def above(value: float) -> float:
        """Return the one-sided p-value of the test that the gap is above a value."""
        return float(special.stdtr(seeds - 1, (value - mean) / error))

    def below(value: float) -> float:
        return float(special.stdtr(seeds - 1, (mean - value) / error))

    nominal = 2 * min(above(0.0), below(0.0))
    same = max(above(-plan.margin), below(plan.margin))
    index = len(earlier)
    boundary, same_boundary = (
        boundaries(plan.first, plan.most, level)[index] for level in (LEVEL / 2, LEVEL)
    )
    width = -float(special.stdtrit(seeds - 1, boundary)) * error
    sides = [*(each.nominal / 2 for each in earlier), nominal / 2]
    sames = [*(each.same_nominal for each in earlier), same]
    return Look(
        seeds=seeds,
        gap=mean,
        low=mean - width,
        high=mean + width,
        nominal=nominal,
        boundary=2 * boundary,
        p_value=min(1.0, 2 * smallest_level(sides, plan.first, plan.most)),
        same_nominal=same,
        same_boundary=same_boundary,
        same_p=smallest_level(sames, plan.first, plan.most),
    )


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


def smallest_level(p_values: Sequence[float], first: int, most: int) -> float:
    """Return the smallest level whose boundaries the one-sided p-values of the looks cross."""

    def crossed(level: float) -> bool:
        return any(p <= b for p, b in zip(p_values, boundaries(first, most, level), strict=False))

    low, high = math.log(_SMALLEST), 0.0
    if not crossed(0.999):
        return 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if crossed(math.exp(middle)) else (middle, high)
    return math.exp(high)


@cache
def boundaries(first: int, most: int, level: float) -> tuple[float, ...]:
    """Compute the one-sided nominal p-value of each look that spends `level` in all.

    Args:
        first: Number of seeds at the first look.
        most: Number of seeds at the last look; there is a look at each number between them.
        level: One-sided level.
    """
    import numpy as np
    from scipy import special

    edges = _edges()
    mass = np.diff(special.ndtr(edges))
    mass[_CELLS // 2 :] = mass[: _CELLS // 2][::-1]  # without cancellation in the tail
    spent, found = 0.0, []
    for seeds in range(first, most + 1):
        if seeds > first:
            mass = mass @ _transition(seeds - 1)
        total = 2 * float(special.ndtr(special.ndtri(level / 2) / math.sqrt(seeds / most)))
        tail = np.append(np.cumsum(mass[::-1])[::-1], 0.0)  # mass above each edge
        at = int(np.searchsorted(-tail, spent - total, side="right")) - 1  # cell of the boundary
        share = (total - spent - tail[at + 1]) / mass[at]
        inside = special.ndtr(-edges[at + 1 :: -1][:2])  # tails of the normal at the cell's ends
        found.append(float(inside[0] + share * (inside[1] - inside[0])))
        mass[at] *= 1 - share
        mass[at + 1 :] = 0.0
        spent = total
    return tuple(found)


@cache
def _edges() -> "NDArray[Any]":
    """Return the edges of the cells; the outer ones reach to infinity."""
    import numpy as np

    edges = np.linspace(-_RANGE, _RANGE, _CELLS + 1)
    edges[0], edges[-1] = -np.inf, np.inf
    return edges


@cache
def _transition(n: int) -> "NDArray[Any]":
    """Compute the probabilities of the cells after n + 1 seeds given the cell after n.

    The state is u_n of the module's docstring, as the standard normal variable of equal quantile.
    """
    import numpy as np
    from scipy import special

    middle = special.ndtri((special.ndtr(_edges()[:-1]) + special.ndtr(_edges()[1:])) / 2)
    middle[_CELLS // 2 :] = -middle[: _CELLS // 2][::-1]
    s = math.sqrt(n) * _cosine(middle, n - 1)[:, None]
    c = math.sqrt(n + 1) * _cosine(_edges(), n)[None]
    upper = _above(s, c, n)
    lower = upper[::-1, ::-1]  # the cells are symmetric, and so is t
    # Differences of the smaller tail, which are exact in both tails.
    return np.where(_edges()[:-1] >= 0, upper[:, :-1] - upper[:, 1:], lower[:, 1:] - lower[:, :-1])


def _cosine(z: "NDArray[Any]", df: int) -> "NDArray[Any]":
    """Convert a standard normal variable to u = t / sqrt(df + t^2) of equal quantile."""
    import numpy as np
    from scipy import special

    t = np.where(z > 0, -1.0, 1.0) * special.stdtrit(df, special.ndtr(-abs(z)))
    return np.where(np.isinf(z), np.sign(z), t / np.sqrt(df + np.where(np.isinf(t), 0, t) ** 2))


def _above(s: "NDArray[Any]", c: "NDArray[Any]", n: int) -> "NDArray[Any]":
    """Return P((s + r) / sqrt(1 + r^2) > c), where r sqrt(n) has Student's t with n."""
    import numpy as np
    from scipy import special

    def root(sign: int, c: "NDArray[Any]") -> "NDArray[Any]":
        return (-s + sign * c * np.sqrt(1 + s**2 - c**2)) / (1 - c**2)

    def tail(r: "NDArray[Any]") -> "NDArray[Any]":
        return special.stdtr(n, -math.sqrt(n) * r)

    # For |c| < 1, the left side exceeds c above one r. Otherwise it does so between two, or outside
    # of them, or never, or always; there is no root then.
    far = (abs(c) >= 1)[0]
    outer = c[:, far]
    with np.errstate(invalid="ignore", divide="ignore"):
        above = tail(root(1, c))
        both = above[:, far] - tail(root(-1, outer))
    exists = (np.sign(s) == np.sign(outer)) & (outer**2 < 1 + s**2)
    above[:, far] = (outer < 0) + np.where(exists, both, 0.0)
    return above
