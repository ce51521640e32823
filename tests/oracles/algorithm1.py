"""The paper's Algorithm 1, transcribed line by line and slowly: loops, lists, no shared code.

Kept apart from moco/ on purpose: the only thing the two have in common is the encoder network.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Params = dict[str, Tensor]


class Algorithm1:
    """State of the algorithm: parameters of f_q and f_k, SGD's velocities, the queue.

    Args:
        forward_q, forward_k: `(params, x) -> (N, C)`, the networks with given parameters.
        params: initial parameters of f_q.
        queue: initial keys, the oldest first, each (C,) of unit length.
        m, t: momentum and temperature.
        lr, momentum, weight_decay: of SGD.
    """

    def __init__(
        self,
        forward_q: Callable[[Params, Tensor], Tensor],
        forward_k: Callable[[Params, Tensor], Tensor],
        params: Params,
        queue: list[Tensor],
        m: float,
        t: float,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        self.forward_q, self.forward_k = forward_q, forward_k
        self.q_params = {name: p.clone() for name, p in params.items()}
        self.k_params = {name: p.clone() for name, p in params.items()}  # f_k.params = f_q.params
        self.velocity = {name: torch.zeros_like(p) for name, p in params.items()}
        self.queue = list(queue)
        self.m, self.t = m, t
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def step(self, x_q: Tensor, x_k: Tensor) -> float:
        """Train on one minibatch and return the loss."""
        leaves = {name: p.clone().requires_grad_(True) for name, p in self.q_params.items()}
        queries = self.forward_q(leaves, x_q)  # NxC
        with torch.no_grad():
            encoded = self.forward_k(self.k_params, x_k)  # NxC
        queries = [q / (q * q).sum() ** 0.5 for q in queries]
        keys = [k / (k * k).sum() ** 0.5 for k in encoded]

        losses = []
        for q, k in zip(queries, keys, strict=True):
            positive = torch.exp((q * k).sum() / self.t)
            negatives = [torch.exp((q * key).sum() / self.t) for key in self.queue]
            losses.append(-torch.log(positive / (positive + sum(negatives))))  # eq. 1
        loss = sum(losses) / len(losses)

        loss.backward()
        for name, leaf in leaves.items():  # update(f_q.params)
            gradient = leaf.grad + self.weight_decay * self.q_params[name]
            self.velocity[name] = self.momentum * self.velocity[name] + gradient
            self.q_params[name] = self.q_params[name] - self.lr * self.velocity[name]

        for name in self.k_params:  # f_k.params = m*f_k.params+(1-m)*f_q.params
            self.k_params[name] = self.m * self.k_params[name] + (1 - self.m) * self.q_params[name]

        self.queue = self.queue + keys  # enqueue the current minibatch
        self.queue = self.queue[len(keys) :]  # dequeue the earliest minibatch
        return float(loss.detach())
