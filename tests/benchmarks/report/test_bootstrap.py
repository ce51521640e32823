"""The bootstrap over images: against images that are repeated, scipy, and simulated error rates."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from benchmarks.report import bootstrap
from benchmarks.report.bootstrap import average_precision, image_counts, resample, two_level
from benchmarks.report.records import collect
from benchmarks.report.report import make_tables
from benchmarks.report.stats import gap_grids, holm, how_sure, significance, uncertainty
from detection.evaluation.matches import Matches, MatchFile, join, write_matches
from detection.evaluation.metrics import MATCHES_NAME
from tests.benchmarks.report.fake_runs import write_run

METRICS = ("coco", "lvis", "voc_2007", "voc_2012")


def matches(random, images=40, classes=4, objects=100, per_image=12, quality=0.6, truth=0):
    """Make match records of a detector that finds a share `quality` of the objects.

    The last class has no objects.
    """
    where, parts = np.random.default_rng(truth), []
    owners, of_class = where.integers(0, images, objects), where.integers(0, classes - 1, objects)
    for c in range(classes):
        mine = owners[of_class == c]
        iou = random.beta(5, 2, len(mine)) * (random.random(len(mine)) < quality)
        wrong = random.integers(0, images, images * per_image // classes)
        at = np.concatenate([mine[iou > 0], wrong])
        iou = np.concatenate([iou[iou > 0], np.zeros(len(wrong))])
        scores = np.sort(random.random(len(at)) * (iou + 0.3))[::-1]
        order = random.permutation(len(at)) if c == 0 else np.argsort(-iou - random.random(len(at)))
        true = iou[order][:, None] > np.arange(0.5, 0.99, 0.05)
        ignored = ~true & (random.random((len(at), 1)) < 0.1)
        part = {"images": at[order], "scores": scores, "true": true, "ignored": ignored}
        parts.append({**part, "object_images": mine})
    return join(parts)


def repeated(found, counts):
    """Repeat every image as often as it counts."""
    times, objects = counts[found.images], counts[found.object_images]
    arrays = {
        n: np.repeat(getattr(found, n), times, axis=0)
        for n in ("classes", "images", "scores", "true", "ignored")
    }
    more = {n: np.repeat(getattr(found, n), objects) for n in ("object_classes", "object_images")}
    return Matches(**arrays, **more)


@pytest.mark.parametrize("metric", METRICS)
def test_resampled_is_ap_of_repeated_images(metric, monkeypatch):
    random = np.random.default_rng(0)
    monkeypatch.setattr(bootstrap, "_CHUNK_NUMBERS", 500)  # several parts
    for size in ({}, {"images": 5, "objects": 4, "classes": 3}):
        found = matches(random, **size)
        images = size.get("images", 40)
        counts = np.vstack([np.ones(images, int), image_counts(images, 30)])
        sampled = resample(metric, found, counts)
        for i, own in enumerate(counts):
            expected = average_precision(metric, repeated(found, own))
            for name, value in expected.items():
                assert sampled[name][i] == pytest.approx(value, abs=1e-10, nan_ok=True), (i, name)
        assert size or 0 < sampled["AP50"][0] < 100


def test_against_pycocotools_with_repeated_images(tmp_path):
    """An image that counts twice is two images with the same objects and detections."""
    from detection.evaluation.coco import COCOEvaluator
    from detection.evaluation.matches import parse_matches
    from tests.oracles.tiny_instances import answers, coco_annotations, coco_split

    content = coco_annotations(0, classes=4, keypoints=0)
    split = coco_split(tmp_path / "a.json", content)
    predictions = answers(split, content, 0)
    random = np.random.default_rng(0)
    for prediction in predictions:  # no ties, which images in another order would break
        prediction["scores"] = random.random(len(prediction["scores"])).astype(np.float32)
    ids = sorted(record["image_id"] for record in split.records)
    counts = image_counts(len(ids), 2)

    def evaluated(times, folder):
        images, annotations, found = [], [], []
        for k in range(max(times.values())):
            for image in content["images"]:
                if times[image["id"]] > k:
                    images.append({**image, "id": image["id"] + 1000 * k})
            for each in content["annotations"]:
                if times[each["image_id"]] > k:
                    new = {"id": len(annotations) + 1, "image_id": each["image_id"] + 1000 * k}
                    annotations.append({**each, **new})
            for record, prediction in zip(split.records, predictions, strict=True):
                if times[record["image_id"]] > k:
                    found.append(({"image_id": record["image_id"] + 1000 * k}, prediction))
        path = tmp_path / f"{folder}.json"
        path.write_text(json.dumps({**content, "images": images, "annotations": annotations}))
        contiguous = split.metadata["thing_dataset_id_to_contiguous_id"]
        own = {mine: given for given, mine in contiguous.items()}
        result = COCOEvaluator("x", str(path), own, split.classes, ["bbox"], tmp_path / folder)
        for pair in found:
            result.add(*pair)
        return result.evaluate()

    evaluated(dict.fromkeys(ids, 1), "all")
    stored = parse_matches((tmp_path / "all" / MATCHES_NAME).read_bytes(), MATCHES_NAME)
    sampled = resample("coco", stored.kinds["bbox"], counts)
    for i, own in enumerate(counts):
        metrics = evaluated(dict(zip(ids, own.tolist(), strict=True)), f"{i}")
        for name in ("AP", "AP50", "AP75"):
            assert sampled[name][i] == pytest.approx(metrics[f"bbox/{name}"], abs=1e-9)


def test_interval_of_images_against_scipy():
    """For a mean over images, scipy's bootstrap computes the same interval."""
    values = np.random.default_rng(1).normal(0.4, 1, 60)
    gaps = (image_counts(60, 4000) * values).mean(axis=1)
    low, high, p = bootstrap.image_interval(gaps)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=4000, method="percentile", rng=0)
    interval = theirs.confidence_interval
    assert (low, high) == pytest.approx((interval.low, interval.high), abs=0.03)
    assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.02)


def test_two_levels_without_images_are_welchs_and_the_paired_test():
    a, b = np.array([10.0, 12.0, 14.0, 11.0, 13.0]), np.array([12.5, 13.0, 17.5, 12.0, 16.0])
    alone = [np.repeat(x[:, None], 40_000, axis=1) for x in (b, a)]
    low, high, p = two_level(*alone, float(b.mean() - a.mean()), paired=False)
    welch = stats.ttest_ind(b, a, equal_var=False)
    assert p == pytest.approx(welch.pvalue, rel=0.05)
    assert (low, high) == pytest.approx((welch.confidence_interval(0.95)), rel=0.02)
    low, high, p = two_level(*alone, float(b.mean() - a.mean()), paired=True)
    pairs = stats.ttest_rel(b, a)
    assert p == pytest.approx(pairs.pvalue, rel=0.05)
    assert two_level(alone[0][:1], alone[1], 1.0, paired=False) is None
    assert two_level(np.ones((3, 9)), np.ones((3, 9)), 0.0, paired=False) is None


@pytest.mark.slow
def test_simulated_error_rates_over_images():
    """Two detectors of equal quality on the same images differ in about 5% of all test sets."""
    found, better = [], []
    counts = image_counts(150, 300)
    for i in range(150):
        random = np.random.default_rng(i)
        size = {"images": 150, "classes": 3, "objects": 300, "per_image": 6, "truth": i}
        a, b, c = (
            resample("voc_2012", matches(random, **size, quality=q), counts)["AP50"]
            for q in (0.6, 0.6, 0.8)
        )
        found.append(bootstrap.image_interval(a - b)[2] < 0.05)
        better.append(bootstrap.image_interval(c - b)[2] < 0.05)
    assert 0.01 < np.mean(found) < 0.10  # two standard errors of 150 trials
    assert np.mean(better) > 0.8


def test_simulated_error_rates_over_runs_and_images():
    """Three runs per row; images alone call two equal methods different far too often."""
    random, n, images = np.random.default_rng(0), 3, 100
    counts = image_counts(images, 200)
    alone, both = [], []
    for _ in range(400):
        shared = random.normal(size=images)  # how hard an image is
        runs = random.normal(size=(2, n, 1)) * 0.15 + shared + random.normal(size=(2, n, images))
        a, b = (counts @ row.T / images for row in runs)
        gap = float(runs[0].mean() - runs[1].mean())
        alone.append(bootstrap.image_interval((a - b).mean(axis=1))[2] < 0.05)
        both.append(two_level(a.T, b.T, gap, paired=False)[2] < 0.05)
    assert np.mean(alone) > 0.15 and np.mean(both) < 0.07


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
def test_a_thousand_resamples_of_5000_images_in_a_minute(metric):
    """A quarter of them is timed, with at least as many objects as COCO and VOC have."""
    random = np.random.default_rng(0)
    size = {
        "coco": (81, 36_000),
        "lvis": (1204, 60_000),
        "voc_2007": (21, 12_000),
        "voc_2012": (21, 12_000),
    }[metric]
    found = matches(random, 5000, *size, per_image=100)
    start = time.process_time()
    resample(metric, found, image_counts(5000, 250))
    assert time.process_time() - start < 60 / 4


def write_matched(root, init, seed, quality, wrong=0.0, stored=True):
    """Write a run with match records; `wrong` is added to its recorded AP50."""
    found = matches(np.random.default_rng(seed), quality=quality)
    metrics = {f"bbox/{n}": round(v, 6) for n, v in average_precision("coco", found).items()}
    metrics["bbox/AP50"] += wrong
    sha256 = None if init == "random" else init.encode().hex().ljust(64, "0")
    own = {"init": init, "seed": seed, "metrics": metrics, "weights_sha256": sha256}
    folder = write_run(root / f"{init}{seed}", task="t", **own)
    if stored:
        images = tuple(map(str, range(40)))
        write_matches(folder / "inference", MatchFile("coco", images, {"bbox": found}))
    return folder


@pytest.fixture
def folder(tmp_path):
    """Two rows with match records, one without, and one whose records are another evaluation's."""
    for seed in range(2):
        write_matched(tmp_path, "random", seed, 0.3)
        write_matched(tmp_path, "moco", seed, 0.7)
        write_matched(tmp_path, "bare", seed, 0.5, stored=False)
        write_matched(tmp_path, "other", seed, 0.5, wrong=1e-5)
    return tmp_path


def test_gaps_of_a_table(folder):
    [table] = make_tables(collect([folder]), resamples=200)
    rows = {row.init: row for row in table.rows}
    gaps, missing = table.resamples.gaps, table.resamples.missing
    assert set(gaps) == {("moco", f"bbox/{name}") for name in ("AP", "AP50", "AP75")}
    assert set(missing) == {"bare", "other"} and "bbox/AP50" in missing["other"]
    for (init, metric), each in gaps.items():
        assert each.images[0] < rows[init].gaps[metric].value < each.images[1]
        assert each.both[1] - each.both[0] > 0 and each.images[3] >= each.images[2]
    assert gaps["moco", "bbox/AP"].images[2] < 0.05
    holms = sorted(each.images[3] for each in gaps.values())
    assert holms[0] == pytest.approx(3 * min(each.images[2] for each in gaps.values()))


def test_holms_correction_can_reach_every_gap(folder):
    """The p-value of B resamples is 2 / (B + 1) or more: 100 could never show one of 3 gaps."""
    [table] = make_tables(collect([folder]), resamples=100)
    assert table.resamples.number == 360  # 9 gaps x 2 / 0.05
    assert bootstrap.number_for(26, 1000) == 1040 and bootstrap.number_for(25, 1000) == 1000
    lowest = bootstrap.image_interval(np.ones(1040))[2]
    assert max(holm(dict.fromkeys(range(26), lowest)).values()) < 0.05
    assert min(holm(dict.fromkeys(range(26), 2 / 1001)).values()) > 0.05


def test_a_gap_that_no_resample_has_gets_no_interval():
    assert bootstrap.image_interval(np.full(100, np.nan)) is None
    assert bootstrap.image_interval(np.array([np.nan, 1.0]))[:2] == (1.0, 1.0)


def test_a_p_value_that_no_resample_contradicts_is_a_bound(folder):
    [table] = make_tables(collect([folder]), resamples=400)
    [grid] = [g for g in gap_grids(table, significance(table)) if "bootstrap" in g.title]
    assert grid.head[1:] == [
        "over seeds and images: the recommended ±",
        "over test images (these very models, not other seeds)",
    ]
    texts = {row[0].text: row[2].text for row in grid.rows}
    for (init, metric), each in table.resamples.gaps.items():
        text = texts[f"{init} − random, {metric.removeprefix('bbox/')}"]
        assert ("≤" in text) == each.bound == (each.images[2] == 2 / 401)
    assert any(text.endswith("], p ≤ 0.005, Holm p ≤ 0.015") for text in texts.values())
    for row, ((init, metric), each) in zip(grid.rows, table.resamples.gaps.items(), strict=True):
        [gap] = [own.gaps[metric] for own in table.rows if own.init == init]
        half = each.both[1] - gap.value
        assert half == pytest.approx(gap.value - each.both[0]), "± is half of the interval"
        assert row[1].text.startswith(f"{gap.printed:+.1f} ± {half:.1f}, p ".replace("-", "−"))
    sure = how_sure(table, significance(table), [])
    assert "over runs and test images, AP: moco +" in sure and " ± " in sure


def test_rows_that_were_tested_on_other_images(folder):
    for path in folder.glob("moco*/inference"):
        found = matches(np.random.default_rng(int(path.parent.name[-1])), quality=0.7)
        images = tuple(f"other{i}" for i in range(40))
        write_matches(path, MatchFile("coco", images, {"bbox": found}))
    [table] = make_tables(collect([folder]), resamples=100)
    assert not table.resamples.gaps and "test images" in table.resamples.missing["moco"]


def test_metrics_without_match_records_have_no_interval(tmp_path):
    for seed in range(2):  # as of Cityscapes' AP of masks
        write_run(tmp_path / f"{seed}", seed=seed, metrics={"segm/AP": 20.0 + seed})
    [table] = make_tables(collect([tmp_path]), resamples=100)
    assert uncertainty(table).endswith("or test images (this metric has no match records)")
    assert table.resamples.missing == {}
    table = SimpleNamespace(base=SimpleNamespace(init="r"), metrics=["knn/top1"])
    assert bootstrap.over_images(table, 100).missing == {}
