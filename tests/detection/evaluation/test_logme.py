"""LogME against the maximum of the evidence that scipy finds from the marginal likelihood."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import multivariate_normal, ortho_group

from detection.evaluation.logme import logme


def samples(n: int, d: int, classes: int, *, gap: float = 1.0, rank: int = 0, spread: float = 0.0):
    """Make features (N, D) and labels; `spread` is that of the features' logarithmic scales."""
    rng = np.random.default_rng(n + d)
    labels = np.arange(n) % classes
    features = rng.normal(size=(n, d)) + gap * rng.normal(size=(classes, d))[labels]
    if rank:
        features = features[:, :rank] @ rng.normal(size=(rank, d))
    return features * np.exp(spread * rng.normal(size=d)) + 0.5, labels


def highest_evidence(features, labels) -> float:
    """Maximize log N(y; 0, I / beta + F F^T / alpha) over alpha and beta for each class."""
    n, found = len(features), []

    def loss(logs, y):
        alpha, beta = np.exp(logs)
        covariance = np.eye(n) / beta + features @ features.T / alpha
        try:
            return -multivariate_normal.logpdf(y, np.zeros(n), covariance)
        except np.linalg.LinAlgError:  # singular in double precision
            return np.inf

    for label in sorted(set(labels)):
        y = (labels == label).astype(float)
        starts = [(a, b) for a in (-6.0, 0.0, 6.0) for b in (0.0, 4.0)]
        ends = [minimize(loss, at, (y,), "Nelder-Mead", bounds=[(-14, 14)] * 2) for at in starts]
        found.append(-min(end.fun for end in ends) / n)
    return float(np.mean(found))


@pytest.mark.parametrize(
    "made",
    [
        {"n": 40, "d": 6, "classes": 2},
        {"n": 45, "d": 6, "classes": 3, "gap": 0.2},
        {"n": 20, "d": 60, "classes": 2, "gap": 0.3},
        {"n": 40, "d": 12, "classes": 2, "rank": 4},
        {"n": 24, "d": 24, "classes": 4},
        {"n": 50, "d": 8, "classes": 2, "spread": 2.0},
    ],
    ids=str,
)
def test_it_is_the_highest_evidence(made):
    features, labels = samples(**made)
    assert logme(features, labels) == pytest.approx(highest_evidence(features, labels), abs=2e-5)


@pytest.mark.parametrize("d", [6, 60])
def test_it_depends_on_neither_unit_nor_rotation_nor_names(d):
    features, labels = samples(30, d, 3)
    expected = logme(features, labels)
    turned = features @ ortho_group.rvs(d, random_state=0)
    assert logme(1000 * turned, 7 - 2 * labels) == pytest.approx(expected, abs=1e-7)
    assert logme(features.astype(np.float32), labels) == pytest.approx(expected, abs=1e-5)


def test_better_features_score_higher():
    scores = [logme(*samples(60, 10, 2, gap=gap)) for gap in (0.0, 0.5, 1.0, 2.0)]
    assert scores == sorted(scores) and scores[-1] - scores[0] > 0.5


def test_a_local_maximum_is_not_the_end():
    """From t of the features' mean scale, the fixed point ends far below the maximum."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 2, 60)
    weak = labels[:, None] + 0.01 * rng.normal(size=(60, 1))
    features = np.concatenate([10 * rng.normal(size=(60, 5)), weak], axis=1)
    assert logme(features, labels) == pytest.approx(highest_evidence(features, labels), abs=1e-3)
