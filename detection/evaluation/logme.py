"""LogME: how well a linear model of features explains labels, without training.

You et al., "LogME: Practical Assessment of Pre-trained Models for Transfer Learning" (ICML 2021,
arXiv 2102.11005). For the column y of one class (1 in it, else 0), features F (N, D), weights
w ~ N(0, 1/alpha) and noise of variance 1/beta, it is the log evidence

    log p(y | F) = log N(y; 0, I / beta + F F^T / alpha)

at the alpha and beta that maximize it, divided by N and averaged over the classes.

Shapes: N samples, D features, K classes, M nonzero singular values of F.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
STEPS = 30  # of the fixed point
SMALLEST = 1e-10  # squared singular value that counts, relative to the largest
RATIOS = np.logspace(-14, 8, 45)  # of alpha to beta, in means of the squared singular values


def logme(features: Floats, labels: NDArray[Any]) -> float:
    """Return LogME of features (N, D) for labels (N,); higher is better.

    It does not depend on the unit of the features, nor on a rotation of them. Classes without a
    sample are left out.

    Deviation: the paper iterates from alpha = beta = 1, which may end at a local maximum if the
    features differ in scale; here the iteration starts from the best of `RATIOS`. The authors'
    later code (github.com/thuml/LogME) leaves D - M terms with alpha out, which are counted here as
    in the paper; without them scores are far too high if D > N.
    """
    n, d = features.shape
    f = features.astype(np.float64)
    y = (labels[:, None] == np.unique(labels)).astype(np.float64)  # NxK
    # The smaller Gram matrix has the squared singular values, in a tenth of the time of an SVD.
    sigma, vectors = np.linalg.eigh(f.T @ f if n > d else f @ f.T)
    kept = sigma > SMALLEST * sigma[-1]
    sigma, vectors = sigma[kept, None], vectors[:, kept]  # Mx1
    # Squares of y's coordinates on the left singular vectors, MxK, and of what is outside of them.
    x2 = (vectors.T @ f.T @ y) ** 2 / sigma if n > d else (vectors.T @ y) ** 2
    outside = np.maximum((y**2).sum(axis=0) - x2.sum(axis=0), 0.0) * (len(sigma) < n)

    def evidence(t: Floats) -> Floats:
        """Return the evidence of each class at t = alpha / beta and the best beta for it."""
        beta = n / ((x2 * t / (sigma + t)).sum(axis=0) + outside)
        log_det: Floats = np.log1p(sigma / t).sum(axis=0)
        found: Floats = n / 2 * (np.log(beta) - np.log(2 * np.pi) - 1) - log_det / 2
        return found

    ratios = RATIOS * sigma.mean()
    starts = np.stack([evidence(np.full(y.shape[1], ratio)) for ratio in ratios])
    t, best = ratios[starts.argmax(axis=0)], starts.max(axis=0)
    for _ in range(STEPS):  # algorithm 1 of the paper, with the products of F in its eigenbasis
        gamma = (sigma / (sigma + t)).sum(axis=0)
        weights2 = (sigma * x2 / (sigma + t) ** 2).sum(axis=0)  # |m|^2
        errors2 = (x2 * (t / (sigma + t)) ** 2).sum(axis=0) + outside  # |F m - y|^2
        t = np.clip(gamma * errors2 / (weights2 * (n - gamma)), ratios[0], ratios[-1])
        best = np.maximum(best, evidence(t))
    return float((best / n).mean())
