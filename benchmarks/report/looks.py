"""Tables of suites that added seeds until each gap was decided (benchmarks/report/sequential.py).

The looks are repeated from the records and the suite's plan, so every report of the same runs has
the same ones. Only the first of the headline metrics, AP, was tested, and only its gaps have
intervals and p-values.
"""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.report.aggregate import Gap, Row, Table
from benchmarks.report.cells import Grid, TextCell, gap_name
from benchmarks.report.sequential import GAP, SAME, Comparison, Look, Looks, compare
from benchmarks.report.style import MISSING, format_gap, format_interval, format_p
from detection.evaluation.metrics import headline_names, titles
from moco.common.errors import UserError, plural

NOT_TESTED = "seeds were added for the gap of another metric or baseline"
OTHER_BASELINE = (
    "seeds were added until each gap to {} was decided: gaps to another row are not tested"
)


def with_looks(table: Table) -> Table:
    """Return a table whose tests account for the looks; unchanged if there was no plan of looks.

    Raises:
        UserError: If its runs are of several plans, or of one and of none.
    """
    plan = table.runs[0].plan
    if others := [run.folder for run in table.runs if run.plan != plan]:
        raise UserError(
            f"{table.title}: {table.runs[0].folder} and {others[0]} cannot be in one table, as "
            "seeds were added to one of them until its gap was decided (--until-decided); give the "
            "folder of each suite alone"
        )
    if plan is None:
        return table
    metric, comparisons = headline_names(table.metrics)[0], {}
    if table.baseline == plan.baseline:
        comparisons = compare(plan, {row.init: _values(row, metric) for row in table.rows})
    rows = []
    for row in table.rows:
        gaps = {name: gap and _untested(gap) for name, gap in row.gaps.items()}
        found, gap = comparisons.get(row.init), gaps[metric]
        if gap is not None and found and found.looks:
            last = found.looks[-1]
            tested = replace(gap, low=last.low, high=last.high, p_value=last.p_value, untested="")
            gaps[metric] = replace(tested, value=last.gap)
        rows.append(replace(row, gaps=gaps))
    looks = Looks(plan, metric, comparisons)
    return replace(table, rows=tuple(rows), margin=plan.margin, looks=looks)


def _untested(gap: Gap) -> Gap:
    return replace(gap, low=None, high=None, p_value=None, untested=NOT_TESTED)


def _values(row: Row, metric: str) -> dict[int, float]:
    numbers = {run.record.seed: run.record.metrics.get(metric) for run in row.runs}
    return {seed: number for seed, number in numbers.items() if number is not None}


def looks_grid(table: Table) -> Grid:
    """Return the grid of a table's comparisons: evidence, seeds, looks, and what decided."""
    assert table.looks is not None
    title = _title(table, table.looks.metric)
    head = ["", f"gap ({title}), 95% interval", "p-value"]
    head += [f"within ±{table.looks.plan.margin:g}", "seeds", "looks", "decided"]
    rows = []
    for row, found in table.looks.comparisons.items():
        looks = f"{len(found.looks)} of {table.looks.plan.looks}"
        if not found.looks:
            cells = [TextCell(MISSING)] * 3 + [TextCell(str(found.seeds), found.seeds)]
        else:
            last = found.looks[-1]
            interval = format_interval(last.low, last.high)
            cells = [
                TextCell(f"{format_gap(last.gap)} {interval}", last.gap),
                TextCell(format_p(last.p_value, found.holm), last.p_value),
                TextCell(format_p(last.same_p, found.same_holm), last.same_p),
                TextCell(str(last.seeds), last.seeds),
            ]
        cells += [TextCell(looks, len(found.looks)), TextCell(why(found, table))]
        rows.append([gap_name(table, row), *cells])
    return Grid(
        f"Gap to {table.baseline}, by equal seeds, with O'Brien-Fleming boundaries over the looks",
        head,
        rows,
    )


def why(found: Comparison, table: Table) -> str:
    """Return by which boundary, before Holm's correction, a comparison was decided, or why not."""
    assert table.looks is not None
    plan = table.looks.plan
    if not found.looks:
        return f"no: a look takes {plan.first} seeds of both rows"
    last = found.looks[-1]
    at = f"at look {len(found.looks)}: nominal p"
    if found.decided == GAP:
        return f"a gap {at} {last.nominal:.2g}, boundary {last.boundary:.2g}"
    if found.decided == SAME:
        what = f"within ±{plan.margin:g} {at}"
        return f"{what} {last.same_nominal:.2g}, boundary {last.same_boundary:.2g}"
    if last.seeds == plan.most:
        return f"no: {plan.most} seeds are the maximum"
    return f"not yet: seed {last.seeds} comes next"


def _title(table: Table, metric: str) -> str:
    return titles(table.metrics)[table.metrics.index(metric)]


def looks_notes(table: Table) -> list[str]:
    """Return the note that the tests account for looks, or none if there were none."""
    if table.looks is None:
        return []
    plan = table.looks.plan
    if not table.looks.comparisons:
        return [OTHER_BASELINE.format(plan.baseline)]
    title = _title(table, table.looks.metric)
    text = (
        f"seeds were added until each gap to {plan.baseline} was decided, from {plan.first} to at "
    )
    text += f"most {plural(plan.most, 'seed')}; intervals and p-values of {title} account for the "
    text += f"{plural(plan.looks, 'possible look')}, Holm's correction is over "
    text += f"{plural(len(plan.rows), 'row')}, and other metrics were not tested"
    return [text]


def looks_lines(tables: Sequence[Table]) -> list[list[object]]:
    """Return a line of CSV per look; `LOOKS_HEAD` names the columns."""
    return [
        [table.task, table.engine, row, table.looks.metric, number, *_numbers(look)]
        for table in tables
        if table.looks is not None
        for row, found in table.looks.comparisons.items()
        for number, look in enumerate(found.looks, 1)
    ]


LOOKS_HEAD = [
    *("task", "engine", "init", "metric", "look", "seeds", "gap", "low", "high"),
    *("nominal_p", "boundary_p", "p_value", "same_nominal_p", "same_boundary_p", "same_p"),
]


def _numbers(look: Look) -> list[float]:
    return [
        *(look.seeds, look.gap, look.low, look.high, look.nominal, look.boundary, look.p_value),
        *(look.same_nominal, look.same_boundary, look.same_p),
    ]
