"""Captions and notes of tables and rows: settings, uncertainty, provenance, missing numbers."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from benchmarks.report.aggregate import CONFIDENCE, Row, Table, row_of
from benchmarks.report.records import FinishedRun
from benchmarks.report.significance import POWER, Significance
from benchmarks.report.style import MISSING, format_gap, format_plus_minus, format_seeds
from detection.config.keys import at_edge, tuned_axes, tuned_values
from detection.evaluation.metrics import has_matches, titles
from detection.modeling.backbones import frozen_random
from moco.common.command import RANDOM
from moco.common.errors import first_few, plural

AT_EDGE = "at the edge"  # of the grid
EPOCHS = "SOLVER.MAX_EPOCHS"  # length of classification runs; detection counts iterations


def heading(table: Table, tables: Sequence[Table]) -> str:
    """Return the title of a table, with dataset and engine if others of that title differ in it."""
    same = [other for other in tables if other.title == table.title]
    text = table.title
    if len({other.tested_on for other in same}) > 1:
        text += f" on {', '.join(table.tested_on)}"
    if len({other.engine for other in same}) > 1:
        text += f", {table.engine} engine"
    return text


def setting(table: Table) -> str:
    """Format the setting of a table: `embedded engine, 300 iterations, tested on voc_2007_test`."""
    config = table.runs[0].record.config
    parts = [table.task] if table.title != table.task else []
    parts.append(f"{table.engine} engine")
    if table.iterations:
        epochs = f" ({config[EPOCHS]} epochs)" if EPOCHS in config else ""
        parts.append(f"{table.iterations} iterations{epochs}")
    if table.tested_on:
        metric = f" ({name})" if (name := voc_metric(table)) else ""
        parts.append(f"tested on {', '.join(table.tested_on)}{metric}")
    return ", ".join(parts)


def voc_metric(table: Table) -> str:
    """Return the name of VOC's metric if a table's AP is by it, `VOC07, 11-point`, else ""."""
    record = table.runs[0].record
    if not any(name.startswith("bbox/AP50-") for name in record.metrics):
        return ""
    published = any(name.startswith("voc_2012_") for name in table.tested_on)
    year = 2012 if published else record.config.get("DATASETS.VOC_YEAR", 2007)
    return "VOC12, area under the curve" if year == 2012 else "VOC07, 11-point"


def seeds(table: Table) -> str:
    """Return the kind of seeds that the trials of a row differ in."""
    kind = table.runs[0].record.kind
    return "seeds of the linear classifier" if kind == "linear" else "fine-tuning seeds"


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
    text = f"these runs show no difference to {table.baseline}: no p-value (of "
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
        same = [e for e in found if e.same and e.same[1] < 1 - CONFIDENCE]
        equal = [f"{each.row.init} {names[each.metric]}" for each in same]
        parts.append(f"shown to be within ±{table.margin:g}: {first_few(equal) or 'none'}")
    return f"different from {table.baseline}: {'; '.join(filter(None, parts))}"


def test_name(table: Table) -> str:
    """Return the name of the test of a table's gaps."""
    return "the t-test of equal seeds, over all looks" if table.looks else "Welch's test"


def how_sure(table: Table, found: Sequence[Significance], proof: Sequence[str]) -> str:
    """Return one line on what the differences rest on: the test, its reach, the compared records.

    With the bootstrap, it includes the gaps of the first metric over runs and test images.

    Args:
        table: Table of the tests.
        found: Tests of all gaps that have an interval.
        proof: Lines that say whether only the weights differ.
    """
    if found:
        text = f"{test_name(table)}, p < {1 - CONFIDENCE:.2f} after Holm's correction for "
        text += f"{plural(len(found), 'gap')}, over {_covered(table)} only"
        if not any(each.significant for each in found) and (reach := _reach(table, found)):
            text += f"; {reach}"
        if table.looks:
            taken = [f"{row} {len(e.looks)}" for row, e in table.looks.comparisons.items()]
            text += f"; looks taken, of {table.looks.plan.looks}: {first_few(taken)}"
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


def reachable(table: Table) -> list[str]:
    """Return notes on test splits on which perfect predictions score less than 100."""
    found: dict[str, list[str]] = {}
    for run in table.runs:
        scored = run.record.reachable or {}
        if faults := scored.get("faults"):
            shown = [
                f"{title} {scored['highest'][metric]:.1f}"
                for metric, title in zip(table.metrics, titles(table.metrics), strict=True)
                if metric in scored.get("highest", {})
            ]
            text = f"{', '.join(shown)} ({'; '.join(faults)})"
            found.setdefault(text, []).append(str(run.folder))
    of_some = len(found) > 1 or sum(map(len, found.values())) < len(table.runs)
    return [
        f"perfect predictions reach {text}" + (f" in {first_few(folders, 3)}" if of_some else "")
        for text, folders in found.items()
    ]


def warnings(table: Table) -> list[str]:
    """Return the warnings that the runs recorded, each once."""
    return list(dict.fromkeys(text for run in table.runs for text in run.record.warnings))


def never_trained(table: Table) -> list[str]:
    """Return notes on layers of the `random` row that stayed at their random initialization."""
    configs = [run.record.config for row in table.rows if row.init == RANDOM for run in row.runs]
    notes = dict.fromkeys(note for config in configs for note in frozen_random(config))
    return [f"{RANDOM}: {note}" for note in notes]


def tuned(table: Table) -> list[str]:
    """Return the note on the grid from which the values of each row were chosen, if they were."""
    grid = table.runs[0].record.config.get("SOLVER.TUNED", "")
    if not grid:
        return []
    text = "chosen for each row on held-out training images, by one run of each point of "
    return [f"{text}{grid}; {AT_EDGE}: a better value may lie outside the grid"]


def tuned_keys(table: Table) -> list[str]:
    """Return the keys of the grid from which the values of each row were chosen."""
    return [*tuned_axes(table.runs[0].record.config)]


def tuned_value(row: Row, key: str) -> str:
    """Format the value of a key that tuning chose for a row: `0.04 (at the edge)`."""
    return _by_seed(row, lambda run: _tuned_value(run, key))


def _tuned_value(run: FinishedRun, key: str) -> str:
    value = tuned_values(run.record.config).get(key, MISSING)
    with suppress(ValueError, LookupError):  # a record edited by hand may hold anything
        edge = at_edge(value, tuned_axes(run.record.config)[key])
        return f"{value} ({AT_EDGE if edge else 'inside'})"
    return value


def facts(row: Row) -> list[tuple[str, str]]:
    """Return the provenance of a row as (name, text) pairs; differing texts are listed by seed."""
    seconds = sum(run.record.seconds for run in row.runs)
    return [
        ("weights' sha256", _by_seed(row, _weights)),
        ("weights made from", _by_seed(row, lambda run: run.record.weights_source or "")),
        ("label", _by_seed(row, lambda run: run.label)),
        ("seeds", ", ".join(map(trial, row.runs))),
        ("config's sha256", _by_seed(row, lambda run: run.record.config_sha256)),
        ("versions", _by_seed(row, lambda run: run.versions)),
        ("hardware", _by_seed(row, lambda run: run.hardware)),
        ("time", f"{seconds:.0f} s in {plural(len(row.runs), 'run')}"),
        ("notes", _by_seed(row, lambda r: "; ".join((*r.record.notes, *r.record.warnings)))),
    ]


def _weights(run: FinishedRun) -> str:
    random = run.record.init == RANDOM
    return run.record.weights_sha256 or ("none: random" if random else "none")


def trial(run: FinishedRun) -> str:
    """Return the seed of a run and, if its row has several, the number of the pre-training."""
    number = row_of(run.record.init)[1]
    return f"{run.record.seed} of pre-training {number}" if number else str(run.record.seed)


def _by_seed(row: Row, text: Callable[[FinishedRun], str]) -> str:
    """Return the text that all runs of a row share, or each text with its seeds."""
    seeds: dict[str, list[str]] = {}
    for run in row.runs:
        seeds.setdefault(text(run) or MISSING, []).append(trial(run))
    if len(seeds) == 1:
        return next(iter(seeds))
    return " / ".join(f"{text} ({format_seeds(of)})" for text, of in seeds.items())


def missing_numbers(row: Row, metrics: Sequence[str]) -> list[str]:
    """Return a note for each number that a run of the row lacks.

    Metrics that no run of the row reports, not even as null, get no note.
    """
    found = []
    for metric, title in zip(metrics, titles(metrics), strict=True):
        if not any(metric in run.record.metrics for run in row.runs):
            continue
        for record in (run.record for run in row.runs if run.record.metrics.get(metric) is None):
            reason = "not a number" if metric in record.metrics else "not reported"
            found.append(f"{record.init}, seed {record.seed}: no {title} ({reason})")
        cell = row.cells.get(metric)
        if cell is not None and cell.n < row.n:
            found.append(
                f"{row.init}: {title} is the mean of {cell.n} of {row.n} "
                f"{'pre-trainings' if row.several else 'runs'}, and its gap excludes the others, "
                "which may be the worst"
            )
    return found


def versions(runs: Sequence[FinishedRun]) -> str:
    """Format the packages whose version differs between runs: `torch (2.4.0 / 2.5.1)`."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for package, version in (run.record.provenance.get("versions") or {}).items():
            found.setdefault(package, set()).add(str(version))
    return ", ".join(f"{p} ({' / '.join(sorted(v))})" for p, v in found.items() if len(v) > 1)
