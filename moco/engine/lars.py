"""LARS (arXiv 1708.03888): SGD whose rate is scaled by layer, for large batches.

For a parameter w of more than one dimension with gradient g, learning rate λ, momentum m, weight
decay β and trust coefficient η:

    u = g + β w
    r = η |w| / |u|        (1 where |w| or |u| is 0)
    v = m v + r u
    w = w - λ v

Biases and the scales and shifts of norms, which have one dimension, are updated by u = g and r = 1,
so by SGD with momentum and no weight decay.

Deviation from Algorithm 1 of arXiv 1708.03888: there r is η |w| / (|g| + β |w|) and λ is part of
the momentum buffer. The form here is that of the linear classifiers of MoCo v3, SimSiam and their
successors: a changed learning rate acts at once.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling with momentum.

    Args:
        lr: λ >= 0.
        momentum: m, 0 <= m < 1.
        weight_decay: β >= 0.
        trust_coefficient: η > 0.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                update = w.grad
                if w.ndim > 1:
                    update = update.add(w, alpha=group["weight_decay"])
                    w_norm, u_norm = w.norm(), update.norm()
                    ratio = group["trust_coefficient"] * w_norm / u_norm
                    update = update * torch.where((w_norm > 0) & (u_norm > 0), ratio, 1.0)
                state = self.state[w]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(w)
                v = state["momentum_buffer"]
                v.mul_(group["momentum"]).add_(update)
                w.add_(v, alpha=-group["lr"])
