"""Two folders of results → what changed between them, per task, initialization and metric.

Pure. What is compared was made at two times, on two machines or by two versions; a difference of
means has Welch's 95% interval. Where the two were not made by one protocol or of the same weights,
that is said beside the difference: then it compares more than two makings of the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.report.aggregate import Cell, Gap, Row, Table, gap, listed_differences
from benchmarks.report.escape import csv_text, markdown, terminal
from benchmarks.report.tables import MINUS, MISSING, format_cell, format_evidence, setting
from detection.evaluation.metrics import titles

Key = tuple[str, tuple[str, ...], str]  # task, tested on, engine


@dataclass(frozen=True)
class Change:
    """One row that both sides have.

    Attributes:
        pairs: metric → the two cells; None where a side has no number.
        gaps: metric → second minus first.
        doubts: what else differs between the two than the day: protocol, length, weights.
    """

    init: str
    pairs: dict[str, tuple[Cell | None, Cell | None]]
    gaps: dict[str, Gap | None]
    doubts: tuple[str, ...]
    sizes: tuple[int, int]
    same: bool  # the same seeds with the same numbers


@dataclass(frozen=True)
class Difference:
    """Of one task on one engine; an init that one side lacks is only named."""

    task: str
    setting: str
    metrics: tuple[str, ...]
    changes: tuple[Change, ...]
    vanished: tuple[str, ...]
    appeared: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Tasks that both sides have, and the names of those that one lacks."""

    both: tuple[Difference, ...]
    vanished: tuple[str, ...]
    appeared: tuple[str, ...]


def compare(first: Sequence[Table], second: Sequence[Table]) -> Comparison:
    """What changed from `first` to `second`; tables of one task, dataset and engine meet."""
    a, b = ({_key(table): table for table in tables} for tables in (first, second))
    both = tuple(_difference(a[key], b[key]) for key in a if key in b)
    vanished = tuple(_named(table) for key, table in a.items() if key not in b)
    return Comparison(both, vanished, tuple(_named(t) for key, t in b.items() if key not in a))


def to_text(comparison: Comparison, names: tuple[str, str]) -> str:
    """For a terminal."""
    from tabulate import tabulate

    def shown(heads: list[str], lines: list[list[str]]) -> str:
        return tabulate(lines, headers=heads, disable_numparse=True)

    return _document(comparison, names, "", shown, terminal)


def to_markdown(comparison: Comparison, names: tuple[str, str]) -> str:
    """The same as a document."""

    def shown(heads: list[str], lines: list[list[str]]) -> str:
        return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *lines))

    return f"# Difference of results\n\n{_document(comparison, names, '## ', shown, markdown)}\n"


def to_csv(comparison: Comparison) -> str:
    """One line per task, initialization and metric that both sides have."""
    heads = ["task", "setting", "init", "metric", "n_a", "mean_a", "n_b", "mean_b"]
    lines = [[*heads, "difference", "low", "high", "p_value", "doubts"]]
    for table in comparison.both:
        for change in table.changes:
            for metric in table.metrics:
                sides = [
                    text
                    for cell in change.pairs[metric]
                    for text in (("0", "") if cell is None else (str(cell.n), f"{cell.mean:.6g}"))
                ]
                found = change.gaps[metric]
                numbers: list[float | None] = [None] * 4
                if found is not None:
                    numbers = [found.value, found.low, found.high, found.p_value]
                lines.append(
                    [
                        *(table.task, table.setting, change.init, metric, *sides),
                        *("" if number is None else f"{number:.6g}" for number in numbers),
                        "; ".join(change.doubts),
                    ]
                )
    return csv_text(lines)


def _key(table: Table) -> Key:
    return table.task, table.tested_on, table.engine


def _named(table: Table) -> str:
    return f"{table.task}: {setting(table)}"


def _difference(a: Table, b: Table) -> Difference:
    rows_a, rows_b = ({row.init: row for row in table.rows} for table in (a, b))
    metrics = tuple(dict.fromkeys((*a.metrics, *b.metrics)))
    shared = [_change(rows_a[init], rows_b[init], metrics) for init in rows_a if init in rows_b]
    return Difference(
        task=a.task,
        setting=setting(a) if setting(a) == setting(b) else f"{setting(a)} → {setting(b)}",
        metrics=metrics,
        changes=tuple(shared),
        vanished=tuple(init for init in rows_a if init not in rows_b),
        appeared=tuple(init for init in rows_b if init not in rows_a),
    )


def _change(a: Row, b: Row, metrics: Sequence[str]) -> Change:
    pairs = {metric: (a.cells.get(metric), b.cells.get(metric)) for metric in metrics}
    gaps = {
        metric: gap(later, earlier) if earlier is not None and later is not None else None
        for metric, (earlier, later) in pairs.items()
    }
    numbers = [{run.record.seed: run.record.metrics for run in row.runs} for row in (a, b)]
    return Change(
        init=a.init,
        pairs=pairs,
        gaps=gaps,
        doubts=tuple(_doubts(a, b)),
        sizes=(a.n, b.n),
        same=numbers[0] == numbers[1],
    )


def _doubts(a: Row, b: Row) -> list[str]:
    first, second = a.runs[0].record, b.runs[0].record
    found = []
    if first.config_sha256 != second.config_sha256:
        found.append(f"protocols differ in {listed_differences([a.runs, b.runs])}")
    if first.iterations != second.iterations:
        found.append(f"iterations: {first.iterations} / {second.iterations}")
    if first.weights_sha256 != second.weights_sha256:
        named = [(record.weights_sha256 or "none")[:8] for record in (first, second)]
        found.append(f"weights: {' / '.join(named)}")
    return found


def _document(
    comparison: Comparison,
    names: tuple[str, str],
    mark: str,
    shown: Callable[[list[str], list[list[str]]], str],
    escaped: Callable[[str], str],
) -> str:
    between = "\n\n" if mark else "\n"
    blocks = [f"A: {escaped(names[0])}{between}B: {escaped(names[1])}"]
    for table in comparison.both:
        blocks.append(mark + escaped(f"{table.task}: {table.setting}"))
        lines = []
        for change in table.changes:
            for metric, title in zip(table.metrics, titles(table.metrics), strict=True):
                cells = zip(change.pairs[metric], change.sizes, strict=True)
                texts = [_told(cell, n) for cell, n in cells]
                said = "same numbers" if change.same else format_evidence(change.gaps[metric])
                lines.append([escaped(change.init), title, *texts, said])
        if lines:
            blocks.append(shown(["pre-train", "", "A", "B", f"B {MINUS} A"], lines))
        doubts = [
            f"not comparable, {change.init}: {doubt}"
            for change in table.changes
            for doubt in change.doubts
        ]
        doubts += [f"only in A: {init}" for init in table.vanished]
        doubts += [f"only in B: {init}" for init in table.appeared]
        blocks += ["\n".join(f"- {escaped(text)}" for text in doubts)] if doubts else []
    for name, tasks in (("A", comparison.vanished), ("B", comparison.appeared)):
        blocks += [f"only in {name}: {escaped(task)}" for task in tasks]
    return "\n\n".join(blocks)


def _told(cell: Cell | None, n: int) -> str:
    if cell is None:
        return MISSING
    return f"{format_cell(cell, cell.n)} (n = {cell.n}{'' if cell.n == n else f' of {n}'})"
