"""Bootstrap intervals of gaps, over the test images and over seeds and test images.

AP is recomputed from the runs' match records (detection/evaluation/matches.py) on test sets that
are sampled from the test images with replacement. All runs use the same samples (paired bootstrap:
Everingham et al., "The PASCAL Visual Object Classes Challenge: A Retrospective", 2015, section 3.5;
Efron and Tibshirani, "An Introduction to the Bootstrap").

Shapes: B resamples, I images, D detections of a class, N true positives among them, T IoU
thresholds, R recall levels.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report.records import MATCHES_NAME, FinishedRun
from benchmarks.report.stats import holm, unpaired_reason
from benchmarks.report.table import CONFIDENCE, Resampled, Resamples, Row, Table
from detection.evaluation import coco, voc
from detection.evaluation.matches import (
    COCO,
    LVIS,
    THRESHOLDS,
    VOC,
    Matches,
    MatchFile,
    parse_matches,
)
from detection.evaluation.metrics import has_matches
from moco.common.errors import DataError, UserError

SEED = 0  # fixed, so that reports of the same runs are equal
SAME_AP = 2e-6  # records have AP rounded to 1e-6
METRICS = {"AP": slice(None), "AP50": slice(0, 1), "AP75": slice(5, 6)}  # name → thresholds
_CHUNK_NUMBERS = 4_000_000  # maximum number of elements of an intermediate array

Array = NDArray[np.float64]
Ints = NDArray[np.integer]


@dataclass(frozen=True)
class RowSamples:
    """Metrics of a row on resampled test images.

    Attributes:
        images: Ids of all test images.
        values: Metric → (n, B) for the row's n runs, or the means of its n pre-trainings.
    """

    images: tuple[str, ...]
    values: dict[str, Array]


def over_images(table: Table, number: int) -> Resamples:
    """Compute bootstrap intervals of the gaps of all rows to the baseline.

    Args:
        table: Table whose runs have match records; rows without them are listed as missing.
        number: Number of resamples, raised to what `number_for` requires.
    """
    base = table.base
    if base is None or not has_matches(table.metrics):
        return Resamples(number, {}, {})
    number = number_for(sum(gap is not None for r in table.rows for gap in r.gaps.values()), number)
    samples: dict[str, RowSamples] = {}
    missing = {}
    for row in (base, *(row for row in table.rows if row is not base)):
        try:
            samples[row.init] = found = row_samples(row, table.metrics, number)
        except UserError as error:
            missing[row.init] = str(error)
            continue
        if base.init in samples and found.images != samples[base.init].images:
            missing[row.init] = "other test images than the baseline's"
    images, both, bounds = {}, {}, {}
    for row, metric in itertools.product(table.rows, table.metrics):
        gap, pair = row.gaps[metric], [samples.get(each.init) for each in (row, base)]
        if gap is None or {row.init, base.init} & missing.keys():
            continue
        values = [own.values[metric] for own in pair if own and metric in own.values]
        if len(values) == 2:
            a, b = values
            differences = a.mean(axis=0) - b.mean(axis=0)
            if (found_images := image_interval(differences)) is None:
                continue
            images[row.init, metric] = found_images
            bounds[row.init, metric] = not (differences <= 0).any() or not (differences >= 0).any()
            pairs = not unpaired_reason(row, base, metric)
            if interval := two_level(a, b, gap.value, paired=pairs):
                both[row.init, metric] = interval
    holm_images, holm_both = (holm({k: v[2] for k, v in p.items()}) for p in (images, both))
    gaps = {
        key: Resampled(
            (*found, holm_images[key]),
            (*both[key], holm_both[key]) if key in both else None,
            bool(bounds[key]),
        )
        for key, found in images.items()
    }
    return Resamples(number, gaps, missing)


def number_for(gaps: int, number: int) -> int:
    """Return `number`, or more if Holm's correction of this many gaps needs more resamples."""
    return max(number, math.ceil(2 * gaps / (1 - CONFIDENCE)))


def row_samples(row: Row, metrics: Sequence[str], number: int) -> RowSamples:
    """Compute the metrics of a row on the resampled test images.

    Raises:
        UserError: If a run has no match records, or its match records are of another evaluation.
    """
    units = [[_run_samples(run, metrics, number) for run in unit] for unit in row.units]
    runs = [samples for unit in units for samples in unit]
    if len({samples.images for samples in runs}) > 1:
        raise UserError("its runs were not tested on the same images")
    values = {
        name: np.stack([np.mean([own.values[name] for own in unit], axis=0) for unit in units])
        for name in runs[0].values
        if all(name in samples.values for samples in runs)
    }
    return RowSamples(runs[0].images, values)


def _run_samples(run: FinishedRun, metrics: Sequence[str], number: int) -> RowSamples:
    stored = checked_matches(run, metrics)
    counts = image_counts(len(stored.images), number)
    values: dict[str, Array] = {}
    for kind, matches in stored.kinds.items():
        names = [name for name in METRICS if f"{kind}/{name}" in metrics]
        found = resample(stored.metric, matches, counts) if names else {}
        values |= {f"{kind}/{name}": found[name] for name in names}
    return RowSamples(stored.images, values)


def run_matches(run: FinishedRun) -> MatchFile:
    """Read the match records of a run.

    Raises:
        UserError: If there are no match records, or they are damaged.
    """
    try:
        content = run.read(MATCHES_NAME)
        if content is None:
            raise UserError(f"a run has no match records ({MATCHES_NAME}) in its folder")
        return parse_matches(content, MATCHES_NAME)
    except DataError as error:
        seed = f"seed {run.record.seed}"
        raise UserError(f"the match records of {seed} cannot be read") from error


def checked_matches(run: FinishedRun, metrics: Sequence[str]) -> MatchFile:
    """Read the match records of a run, whose AP must be the recorded one.

    Args:
        run: Run of a detection task.
        metrics: Metrics to compare; the others of `METRICS` are ignored.

    Raises:
        UserError: If the run has no match records, or they cannot be read or give another AP.
    """
    seed, stored = f"seed {run.record.seed}", run_matches(run)
    for kind, matches in stored.kinds.items():
        names = [name for name in METRICS if f"{kind}/{name}" in metrics]
        own = average_precision(stored.metric, matches) if names else {}
        for name in names:
            recorded = run.record.metrics.get(f"{kind}/{name}")
            if recorded is None or not abs(recorded - own[name]) <= SAME_AP:
                raise UserError(f"the match records of {seed} are of another {kind}/{name}")
    return stored


def average_precision(metric: str, matches: Matches) -> dict[str, float]:
    """Compute AP, AP50 and AP75 (0..100) with the evaluators' own code.

    The results equal the recorded metrics up to the rounding of a record.
    """
    if metric in (COCO, LVIS):
        return coco.summarize(matches)
    classes = range(int(max(matches.object_classes, default=-1)) + 1)
    year = int(metric.removeprefix(VOC))
    found = voc.summarize(matches, [f"{c}" for c in classes], year)
    return {name: found[f"bbox/{name}"] for name in METRICS}


def class_precisions(metric: str, matches: Matches) -> dict[int, dict[str, float]]:
    """Return the id of each class with objects → its `average_precision`."""
    found = {}
    for class_id in np.unique(matches.object_classes).tolist():
        mine, objects = matches.of_class(class_id), matches.object_classes == class_id
        own = Matches(
            classes=np.zeros_like(matches.classes[mine]),
            images=matches.images[mine],
            scores=matches.scores[mine],
            true=matches.true[mine],
            ignored=matches.ignored[mine],
            object_classes=np.zeros_like(matches.object_classes[objects]),
            object_images=matches.object_images[objects],
        )
        found[class_id] = average_precision(metric, own)
    return found


@lru_cache(1)
def image_counts(images: int, number: int) -> Ints:
    """Count how often each image is in each resample, (B, I), with a fixed seed for all runs."""
    random = np.random.default_rng(SEED)
    sampled = (random.integers(0, images, images) for _ in range(number))
    return np.stack([np.bincount(own, minlength=images).astype(np.int32) for own in sampled])


def resample(metric: str, matches: Matches, counts: Ints) -> dict[str, Array]:
    """Compute AP, AP50 and AP75 (0..100) on resampled test images.

    Up to rounding, the results equal `average_precision` of a test set in which each image is
    repeated as often as it counts. Precision is evaluated at true positives only, since it
    decreases between two of them. Classes without an object in a resample are left out of its mean.

    Args:
        metric: Metric of the match records: `COCO`, `LVIS` or `VOC` with its year.
        matches: Match records of one run.
        counts: How often each image is in each resample, (B, I).

    Returns:
        Metric → (B,), NaN for resamples without an object.
    """
    recalls = {COCO: coco.RECALLS, LVIS: coco.RECALLS, f"{VOC}2007": voc.RECALL_POINTS}.get(metric)
    B = len(counts)
    total, classes = np.zeros((THRESHOLDS, B)), np.zeros(B)
    of_images = np.ascontiguousarray(counts.T)  # (I, B)
    for class_id in np.unique(matches.object_classes).tolist():
        mine = matches.of_class(class_id)
        owners = matches.object_images[matches.object_classes == class_id]
        size = max(_CHUNK_NUMBERS // max(mine.stop - mine.start, len(owners), 1), 1)
        for start in range(0, B, size):
            part = slice(start, min(start + size, B))
            weights = of_images[:, part]  # (I, b)
            objects = weights[owners].sum(axis=0)  # (b,)
            flags = matches.true[mine], matches.ignored[mine]
            total[:, part] += _class_ap(matches.images[mine], *flags, weights, objects, recalls)
            classes[part] += objects > 0
    with np.errstate(invalid="ignore"):
        per_threshold = 100 * total / classes  # (T, B)
    return {name: per_threshold[which].mean(axis=0) for name, which in METRICS.items()}


def _class_ap(
    images: NDArray[Any],
    true: NDArray[np.bool_],
    ignored: NDArray[np.bool_],
    weights: Ints,
    objects: Ints,
    recalls: Array | None,
) -> Array:
    """Compute the AP (0..1) of one class, (T, b); 0 if it has no object."""
    of_images = weights[images]  # (D, b)
    ranks = np.cumsum(of_images, axis=0, dtype=np.int32)
    found = np.zeros((THRESHOLDS, len(objects)))
    wanted = None if recalls is None else _wanted(recalls, objects)
    for t in range(THRESHOLDS):
        at, out = np.flatnonzero(true[:, t]), np.flatnonzero(ignored[:, t])
        if not len(at):
            continue
        own, seen = of_images[at], ranks[at]  # (N, b)
        if len(out):
            left_out = np.cumsum(of_images[out], axis=0, dtype=np.int32)
            before = np.searchsorted(out, at)
            seen[before > 0] -= left_out[before[before > 0] - 1]
        tp = np.cumsum(own, axis=0, dtype=np.int32)
        precision = tp / np.maximum(seen, 1)
        envelope = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
        if wanted is None:
            found[t] = (own * envelope).sum(axis=0) / np.maximum(objects, 1)
            continue
        # Concatenated over resamples: the envelope where the 1st, 2nd, … object is found.
        steps = np.append(np.repeat(envelope.T.ravel(), own.T.ravel()), 0.0)
        reached = wanted <= tp[-1]  # (R, b)
        places = np.cumsum(tp[-1], dtype=np.int64) - tp[-1] + wanted - 1
        found[t] = np.where(reached, steps[np.where(reached, places, -1)], 0.0).mean(axis=0)
    return found


def _wanted(recalls: Array, objects: Ints) -> Ints:
    """Count the objects that must be found to reach each recall in floating point, (R, b)."""
    number = np.maximum(objects, 1)
    wanted = np.ceil(recalls[:, None] * number).astype(np.int64)
    wanted -= (wanted - 1) / number >= recalls[:, None]
    wanted += wanted / number < recalls[:, None]
    return np.maximum(wanted, 1)


def image_interval(gaps: Array) -> tuple[float, float, float] | None:
    """Compute the percentile 95% interval of a gap over resamples (B,) and its two-sided p-value.

    The p-value is twice the share of resamples on the other side of 0. The result is None if no
    resample has a number, as none of them has an object of any class.
    """
    gaps = gaps[np.isfinite(gaps)]
    if not len(gaps):
        return None
    ends = np.quantile(gaps, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    other = 1 + min(np.count_nonzero(gaps <= 0), np.count_nonzero(gaps >= 0))
    return float(ends[0]), float(ends[1]), min(1.0, 2 * other / (len(gaps) + 1))


def two_level(a: Array, b: Array, gap: float, *, paired: bool) -> tuple[float, float, float] | None:
    """Compute the 95% interval and the p-value of a gap over runs and test images.

    Runs are sampled first, then images: replicate r is a mean of sampled runs, all on the images of
    resample r. Of n runs, n − 1 are sampled, which makes the variance of their mean unbiased (Rao
    and Wu, 1988). Percentiles of so few runs are meaningless, so the interval is the gap ± t times
    the standard deviation of the replicates, with Satterthwaite's degrees of freedom, where only
    the runs have few.

    Args:
        a: Metric of a row's runs on the resamples, (n, B).
        b: Metric of the baseline's runs on the same resamples; its n may differ unless `paired`.
        gap: Difference of the means on the original test images.
        paired: Sample the n runs of both as pairs.

    Returns:
        Lower end, upper end and p-value, or None if a row has a single run or nothing varies.
    """
    from scipy import stats

    if min(len(a), len(b)) < 2:
        return None
    random = np.random.default_rng(SEED)
    parts = [a - b] if paired else [a, -b]
    replicates = np.zeros(a.shape[1])
    variances = []  # of the means over runs, each with its degrees of freedom
    for part in parts:
        n, B = part.shape
        chosen = random.integers(0, n, (n - 1, B))
        replicates += np.take_along_axis(part, chosen, axis=0).mean(axis=0)
        variances.append((part.mean(axis=1).var(ddof=1) / n, n - 1))
    variance = float(np.nanvar(replicates, ddof=1))
    if variance == 0:
        return None
    of_runs = sum(v**2 / degrees for v, degrees in variances)
    freedom = variance**2 / of_runs if of_runs > 0 else math.inf
    error = math.sqrt(variance)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return gap - half, gap + half, float(2 * stats.t.sf(abs(gap) / error, freedom))
