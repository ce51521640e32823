"""End-to-end and memory bank (the paper's Fig. 2a and b), written slowly: loops, no shared code.

As algorithm1.py for MoCo: the only thing in common with moco/ is the encoder network.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Params = dict[str, Tensor]
Forward = Callable[[Params, Tensor], Tensor]


class Sgd:
    """SGD with momentum and weight decay on a dictionary of parameters."""

    def __init__(self, params: Params, lr: float, momentum: float, weight_decay: float) -> None:
        self.params = {name: p.clone() for name, p in params.items()}
        self.velocity = {name: torch.zeros_like(p) for name, p in params.items()}
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def leaves(self) -> Params:
        return {name: p.clone().requires_grad_(True) for name, p in self.params.items()}

    def step(self, leaves: Params) -> None:
        for name, leaf in leaves.items():
            gradient = leaf.grad + self.weight_decay * self.params[name]
            self.velocity[name] = self.momentum * self.velocity[name] + gradient
            self.params[name] = self.params[name] - self.lr * self.velocity[name]


def unit(v: Tensor) -> Tensor:
    return v / (v * v).sum() ** 0.5


class EndToEndOracle:
    """f_q and f_k with a gradient each; `shared`: one set of parameters, both gradients."""

    def __init__(
        self,
        forward_q: Forward,
        forward_k: Forward,
        params: Params,
        t: float,
        shared: bool,
        **sgd: float,
    ) -> None:
        self.forward_q, self.forward_k, self.t = forward_q, forward_k, t
        self.q = Sgd(params, **sgd)
        self.k = self.q if shared else Sgd(params, **sgd)

    def step(self, x_q: Tensor, x_k: Tensor) -> float:
        leaves_q = self.q.leaves()
        leaves_k = leaves_q if self.k is self.q else self.k.leaves()
        queries = [unit(v) for v in self.forward_q(leaves_q, x_q)]
        keys = [unit(v) for v in self.forward_k(leaves_k, x_k)]
        losses = []
        for i, q in enumerate(queries):
            positive = torch.exp((q * keys[i]).sum() / self.t)
            negatives = [
                torch.exp((q * key).sum() / self.t) for j, key in enumerate(keys) if j != i
            ]
            assert len(negatives) == len(keys) - 1  # K - 1 of them
            losses.append(-torch.log(positive / (positive + sum(negatives))))
        loss = sum(losses) / len(losses)
        loss.backward()
        self.q.step(leaves_q)
        if self.k is not self.q:
            self.k.step(leaves_k)
        return float(loss.detach())


class MemoryBankOracle:
    """One vector per image; InfoNCE, or InstDisc's NCE with its constant from the first batch."""

    def __init__(
        self,
        forward: Forward,
        params: Params,
        bank: Sequence[Tensor],
        bank_momentum: float,
        t: float,
        nce: bool,
        **sgd: float,
    ) -> None:
        self.forward, self.bank = forward, [v.clone() for v in bank]
        self.bank_momentum, self.t, self.nce = bank_momentum, t, nce
        self.sgd, self.z = Sgd(params, **sgd), 0.0

    def step(self, x_q: Tensor, images: Sequence[int], drawn: Sequence[int]) -> float:
        leaves = self.sgd.leaves()
        queries = [unit(v) for v in self.forward(leaves, x_q)]
        similarities = [
            [torch.exp((q * self.bank[j]).sum() / self.t) for j in (i, *drawn)]
            for q, i in zip(queries, images, strict=True)
        ]
        if self.nce and self.z == 0:
            flat = [float(s.detach()) for row in similarities for s in row]
            self.z = sum(flat) / len(flat) * len(self.bank)
        losses = []
        for row in similarities:
            if self.nce:
                noise = len(drawn) / len(self.bank)  # K times the uniform distribution
                p = [s / self.z for s in row]
                loss = -torch.log(p[0] / (p[0] + noise))
                for other in p[1:]:
                    loss = loss - torch.log(1 - other / (other + noise))
            else:
                loss = -torch.log(row[0] / sum(row))
            losses.append(loss)
        total = sum(losses) / len(losses)
        total.backward()
        self.sgd.step(leaves)
        m = self.bank_momentum
        for q, i in zip(queries, images, strict=True):
            self.bank[i] = unit(m * self.bank[i] + (1 - m) * q.detach())
        return float(total.detach())
