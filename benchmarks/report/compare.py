"""Two sets of tables → what changed between them, per task, init and metric. Pure.

The two are results of two times, two machines or two versions; a difference of means has Welch's
95% interval, unless they share runs. Beside it is named where the two differ in more: protocol,
length, weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.report.aggregate import Cell, Gap, Row, Table, gap, listed_differences
from benchmarks.report.captions import setting, trial
from benchmarks.report.cells import Shown, evidence
from benchmarks.report.records import Run
from benchmarks.report.style import MISSING, format_cell
from detection.evaluation.metrics import titles


@dataclass(frozen=True)
class Change:
    """One row that both sides have."""

    a: Row
    b: Row
    metrics: tuple[str, ...]

    @property
    def pairs(self) -> dict[str, tuple[Cell | None, Cell | None]]:
        """Metric → the two cells; None where a side has no number."""
        return {name: (self.a.cells.get(name), self.b.cells.get(name)) for name in self.metrics}

    @property
    def gaps(self) -> dict[str, Gap | None]:
        """Metric → second minus first; not tested where the two share runs."""
        found = {metric: gap(b, a) for metric, (a, b) in self.pairs.items()}
        if not self.shared:
            return found
        return {
            metric: each and replace(each, low=None, high=None, p_value=None)
            for metric, each in found.items()
        }

    @property
    def shared(self) -> list[Run]:
        """Runs of the first that the second has, too: equal seeds with equal numbers."""
        theirs = {(r.record.init, r.record.seed): r.record.metrics for r in self.b.runs}
        return [
            run
            for run in self.a.runs
            if theirs.get((run.record.init, run.record.seed)) == run.record.metrics
        ]

    @property
    def same(self) -> bool:
        """Whether both have the same seeds with the same numbers."""
        return len(self.shared) == len(self.a.runs) == len(self.b.runs)

    @property
    def doubts(self) -> list[str]:
        """What else differs between the two: protocol, length, weights."""
        a, b = self.a.runs[0].record, self.b.runs[0].record
        found = []
        if a.config_sha256 != b.config_sha256:
            found.append(f"protocols differ in {listed_differences([self.a.runs, self.b.runs])}")
        if a.iterations != b.iterations:
            found.append(f"iterations: {a.iterations} / {b.iterations}")
        if a.weights_sha256 != b.weights_sha256:
            named = [(record.weights_sha256 or "none")[:8] for record in (a, b)]
            found.append(f"weights: {' / '.join(named)}")
        return found


@dataclass(frozen=True)
class Difference:
    """Of one task on one engine; an init that one side lacks is only named."""

    a: Table
    b: Table

    @property
    def task(self) -> str:
        return self.a.task

    @property
    def setting(self) -> str:
        return " → ".join(dict.fromkeys((setting(self.a), setting(self.b))))

    @property
    def changes(self) -> list[Change]:
        """Of the rows that both have."""
        metrics = tuple(dict.fromkeys((*self.a.metrics, *self.b.metrics)))
        later = {row.init: row for row in self.b.rows}
        return [Change(row, later[row.init], metrics) for row in self.a.rows if row.init in later]

    @property
    def rows(self) -> list[list[Shown]]:
        """Per init and metric: both names, both means and their difference."""
        found = []
        for change in self.changes:
            for title, (metric, (a, b)) in zip(
                titles(change.metrics), change.pairs.items(), strict=True
            ):
                means = (_mean(a, change.a.n), _mean(b, change.b.n))
                result = evidence(change.gaps[metric])
                texts = map(Shown, (change.a.init, title, *means))
                found.append([*texts, Shown("same numbers") if change.same else result])
        return found

    @property
    def notes(self) -> list[str]:
        """What is not comparable or only on one side."""
        a, b = ([row.init for row in table.rows] for table in (self.a, self.b))
        return [
            *(f"not comparable, {c.a.init}: {doubt}" for c in self.changes for doubt in c.doubts),
            *(
                f"{c.a.init}: A and B share seed{'s'[: len(c.shared) > 1]} "
                f"{', '.join(map(trial, c.shared))} with the same numbers, so the difference is "
                "not tested"
                for c in self.changes
                if c.shared and not c.same
            ),
            *(f"only in A: {init}" for init in a if init not in b),
            *(f"only in B: {init}" for init in b if init not in a),
        ]


@dataclass(frozen=True)
class Comparison:
    """Tasks that both sides have, and the names of those that one lacks."""

    both: list[Difference]
    vanished: list[str]
    appeared: list[str]


def compare(first: Sequence[Table], second: Sequence[Table]) -> Comparison:
    """What changed from `first` to `second`; tables of one task, dataset and engine meet."""
    a, b = ({(t.task, t.tested_on, t.engine): t for t in tables} for tables in (first, second))
    return Comparison(
        both=[Difference(a[key], b[key]) for key in a if key in b],
        vanished=[f"{t.task}: {setting(t)}" for key, t in a.items() if key not in b],
        appeared=[f"{t.task}: {setting(t)}" for key, t in b.items() if key not in a],
    )


def _mean(cell: Cell | None, n: int) -> str:
    if cell is None:
        return MISSING
    return f"{format_cell(cell, cell.n)} (n = {cell.n}{'' if cell.n == n else f' of {n}'})"
