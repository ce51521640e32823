"""What is said of tables and rows in words: settings, uncertainty, provenance, what is missing."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from benchmarks.report.aggregate import CONFIDENCE, Row, Table, row_of
from benchmarks.report.records import FinishedRun
from benchmarks.report.significance import Significance
from benchmarks.report.style import MISSING, format_seeds
from detection.config.keys import at_edge, tuned_axes, tuned_values
from detection.evaluation.metrics import has_matches, titles
from detection.modeling.backbones import frozen_random
from moco.common.command import RANDOM
from moco.common.errors import first_few, plural

EPOCHS = "SOLVER.MAX_EPOCHS"  # of classification; detection counts iterations


def heading(table: Table, tables: Sequence[Table]) -> str:
    """The title, with its dataset and engine where another table has the same."""
    same = [other for other in tables if other.title == table.title]
    text = table.title
    if len({other.tested_on for other in same}) > 1:
        text += f" on {', '.join(table.tested_on)}"
    if len({other.engine for other in same}) > 1:
        text += f", {table.engine} engine"
    return text


def setting(table: Table) -> str:
    """`embedded engine, 300 iterations, tested on voc_2007_test`."""
    config = table.runs[0].record.config
    parts = [table.task] if table.title != table.task else []
    parts.append(f"{table.engine} engine")
    if table.iterations:
        epochs = f" ({config[EPOCHS]} epochs)" if EPOCHS in config else ""
        parts.append(f"{table.iterations} iterations{epochs}")
    if table.tested_on:
        parts.append(f"tested on {', '.join(table.tested_on)}")
    return ", ".join(parts)


def seeds(table: Table) -> str:
    """Which seeds the trials of a row differ in."""
    kind = table.runs[0].record.kind
    return "seeds of the linear classifier" if kind == "linear" else "fine-tuning seeds"


def uncertainty(table: Table) -> str:
    """One sentence: what standard deviations, intervals and p-values are over, and what not."""
    several = [f"{row.init} ({row.n} files of weights)" for row in table.rows if row.several]
    others = [row.init for row in table.rows if not row.several and row.init != RANDOM]
    lacks = [] if several else ["pre-training (one file of weights per row)"]
    if several and others:
        lacks = [f"pre-training of {', '.join(others)} (one file of weights each)"]
    none = table.runs[0].record.kind == "detection" and not has_matches(table.metrics)
    images = "test images (of this metric there are no match records)" if none else "test images"
    resampled = bool(table.resamples and table.resamples.gaps)
    these = "those over test images are for these very models, not for other seeds"
    bootstrap = f"; of the bootstrap, {these}" if resampled else ""
    if all(row.n == 1 for row in table.rows):
        unknown = [seeds(table), *lacks, *([] if resampled else [images])]
        known = f"no uncertainty is known, of {', '.join(unknown[:-1])} or {unknown[-1]}"
        return f"each row is one run: {known}{bootstrap}"
    over = seeds(table)
    if several:
        over += f" and, of {', '.join(several)}, pre-training, each file as the mean of its runs"
    text = f"standard deviations, intervals and p-values are over {over} only"
    text += f", not over {' or '.join([*lacks, images])}"
    return text + bootstrap


def nothing_shown(table: Table, found: Sequence[Significance]) -> list[str]:
    """Where no gap of a table is significant once corrected: that, and which gaps would have been.

    `found`: of every gap that has an interval.
    """
    if not found or min(each.holm for each in found) < 1 - CONFIDENCE:
        return []
    metric = found[0].metric
    known = [each for each in found if each.metric == metric and each.smallest is not None]
    text = f"these runs show no difference to {table.baseline}: no p-value (of "
    text += f"{plural(len(found), 'gap')}) is below {1 - CONFIDENCE:.2f} after Holm's correction"
    if known:
        title = titles(table.metrics)[table.metrics.index(metric)]
        text += (
            f"; {_span([str(e.n) for e in sorted(known, key=lambda e: e.n)])} runs per row find "
        )
        sizes = sorted(each.smallest for each in known if each.smallest is not None)
        text += f"gaps of {_span([f'{size:.1f}' for size in sizes])} {title} 80% of the time, "
        text += "corrected as these are"
    return [text]


def _span(ordered: Sequence[str]) -> str:
    """`3 to 5`, or `3`."""
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1])))


def reachable(table: Table) -> list[str]:
    """Say where perfect predictions would not score 100 on the test split, and why."""
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


def never_trained(table: Table) -> list[str]:
    """Say which layers of the random row were never trained."""
    configs = [run.record.config for row in table.rows if row.init == RANDOM for run in row.runs]
    notes = dict.fromkeys(note for config in configs for note in frozen_random(config))
    return [f"{RANDOM}: {note}" for note in notes]


def tuned(table: Table) -> list[str]:
    """What was chosen for each row of a tuned task, and from which grid."""
    grid = table.runs[0].record.config.get("SOLVER.TUNED", "")
    if not grid:
        return []
    chosen = [
        f"{row.init} "
        + _by_seed(row, lambda run: ", ".join(tuned_values(run.record.config).values()))
        for row in table.rows
    ]
    found = [
        f"chosen for each row on held-out training images, by one run of each point of {grid}: "
        f"{'; '.join(chosen)}; the rows of the untuned task are in a table of their own"
    ]
    edges = [
        f"{row.init} {_by_seed(row, _edges)}" for row in table.rows if any(map(_edges, row.runs))
    ]
    where = "at the edge of the grid, beyond which a better value may be"
    return [*found, f"{where}: {'; '.join(edges)}"] if edges else found


def _edges(run: FinishedRun) -> str:
    """`SOLVER.BASE_LR 0.04`: the chosen values that are at an edge of the grid."""
    axes, values = tuned_axes(run.record.config), tuned_values(run.record.config)
    with suppress(ValueError):  # of a record that somebody wrote by hand
        return ", ".join(f"{key} {values[key]}" for key in axes if at_edge(values[key], axes[key]))
    return ""


def facts(row: Row) -> list[tuple[str, str]]:
    """Provenance of a row's numbers, as (name, text); what differs is listed by seed."""
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
        ("notes", _by_seed(row, lambda run: "; ".join(run.record.notes))),
    ]


def _weights(run: FinishedRun) -> str:
    random = run.record.init == RANDOM
    return run.record.weights_sha256 or ("none: random" if random else "none")


def trial(run: FinishedRun) -> str:
    """The seed and, where a row has several, the pre-training."""
    number = row_of(run.record.init)[1]
    return f"{run.record.seed} of pre-training {number}" if number else str(run.record.seed)


def _by_seed(row: Row, text: Callable[[FinishedRun], str]) -> str:
    """The text that all runs of a row have, or each text with the seeds that have it."""
    seeds: dict[str, list[str]] = {}
    for run in row.runs:
        seeds.setdefault(text(run) or MISSING, []).append(trial(run))
    if len(seeds) == 1:
        return next(iter(seeds))
    return " / ".join(f"{text} ({format_seeds(of)})" for text, of in seeds.items())


def missing_numbers(row: Row, metrics: Sequence[str]) -> list[str]:
    """Per metric that some runs of the row have and others have not: which, and why.

    So too where every run has null; where no run was to measure it, the dash says all.
    """
    found = []
    for metric, title in zip(metrics, titles(metrics), strict=True):
        if not any(metric in run.record.metrics for run in row.runs):
            continue
        for record in (run.record for run in row.runs if run.record.metrics.get(metric) is None):
            absent = "null, no reason recorded" if metric in record.metrics else "not reported"
            reasons = (note for note in record.notes if metric in re.split(r"[\s,]+", note))
            reason = next(reasons, absent)
            found.append(f"{record.init}, seed {record.seed}: no {title} ({reason})")
        cell = row.cells.get(metric)
        if cell is not None and cell.n < row.n:
            found.append(
                f"{row.init}: {title} is the mean of {cell.n} of {row.n} "
                f"{'pre-trainings' if row.several else 'runs'}, and its gap leaves out the others, "
                "which may be the worst"
            )
    return found


def versions(runs: Sequence[FinishedRun]) -> str:
    """`torch (2.4.0 / 2.5.1)`: the packages whose version is not the same in all runs."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for package, version in (run.record.provenance.get("versions") or {}).items():
            found.setdefault(package, set()).add(str(version))
    return ", ".join(f"{p} ({' / '.join(sorted(v))})" for p, v in found.items() if len(v) > 1)
