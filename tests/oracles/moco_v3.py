"""MoCo v3's Algorithm 1 (arXiv 2104.02057), transcribed slowly: loops, lists, no shared code.

As algorithm1.py for MoCo: the only thing in common with moco/ are the networks.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.oracles.mechanisms import Sgd, unit

Params = dict[str, Tensor]
Forward = Callable[[Params, Tensor], Tensor]


class MoCoV3Oracle:
    """f_q is backbone, projection and prediction; f_k backbone and projection.

    Args:
        encode: `(params, x) -> (N, C)`, backbone and projection head with given parameters.
        predict: the same of the prediction head.
        encoder, predictor: their initial parameters.
        m, tau: momentum at the start, temperature.
        steps: of the whole run.
        sgd: lr, momentum, weight_decay.
    """

    def __init__(
        self,
        encode: tuple[Forward, Forward],
        predict: Forward,
        encoder: Params,
        predictor: Params,
        m: float,
        tau: float,
        steps: int,
        **sgd: float,
    ) -> None:
        self.encode_q, self.encode_k = encode
        self.predict, self.m, self.tau, self.steps = predict, m, tau, steps
        self.encoder, self.predictor = Sgd(encoder, **sgd), Sgd(predictor, **sgd)
        self.k_params = {name: p.clone() for name, p in encoder.items()}
        self.done = 0

    def step(self, x1: Tensor, x2: Tensor) -> float:
        """Train on one minibatch of two views and return the loss."""
        base, head = self.encoder.leaves(), self.predictor.leaves()
        q1 = self.predict(head, self.encode_q(base, x1))
        q2 = self.predict(head, self.encode_q(base, x2))
        with torch.no_grad():
            k1 = self.encode_k(self.k_params, x1)
            k2 = self.encode_k(self.k_params, x2)
        loss = self._ctr(q1, k2) + self._ctr(q2, k1)  # symmetrized
        loss.backward()
        self.encoder.step(base)
        self.predictor.step(head)
        self.done += 1
        cosine = math.cos(math.pi * self.done / self.steps)
        m = 1.0 - (1.0 - self.m) * (cosine + 1.0) / 2.0
        for name, p in self.k_params.items():
            self.k_params[name] = m * p + (1.0 - m) * self.encoder.params[name]
        return float(loss.detach())

    def _ctr(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Cross-entropy of q k^T / tau with the diagonal as labels, times 2 tau."""
        losses = []
        for i, q in enumerate(queries):
            similar = [torch.exp((unit(q) * unit(k)).sum() / self.tau) for k in keys]
            losses.append(-torch.log(similar[i] / sum(similar)))
        return 2 * self.tau * sum(losses) / len(losses)
