"""LARS (arXiv 1708.03888): SGD with layer-wise learning rates, for large batches.

For a parameter w of more than one dimension with gradient g, learning rate λ, momentum m, weight
decay β and trust coefficient η:

    u = g + β w
    r = η |w| / |u|        (1 where |w| or |u| is 0)
    v = m v + r u
    w = w - λ v

Biases and the scales and shifts of norms, which have one dimension, are updated with u = g and
r = 1, which is SGD with momentum and no weight decay.

Deviation: in Algorithm 1 of arXiv 1708.03888, r is η |w| / (|g| + β |w|) and λ is part of
the momentum buffer. The form here is that of the linear classifiers of MoCo v3, SimSiam and later
work: a change of the learning rate acts at once.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling with momentum.

    Args:
        parameters: Parameters to optimize.
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
        """Update all parameters that have a gradient; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            self._update([w for w in group["params"] if w.grad is not None], group)

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters that have a gradient, with one fused operation for all of them."""
        updates: dict[Tensor, Tensor] = {w: w.grad for w in weights if w.grad is not None}
        if scaled := [w for w in weights if w.ndim > 1]:
            gradients = [updates[w] for w in scaled]
            decayed = torch._foreach_add(gradients, scaled, alpha=group["weight_decay"])
            w_norm, u_norm = (torch.stack(torch._foreach_norm(x)) for x in (scaled, decayed))
            ratio = group["trust_coefficient"] * w_norm / u_norm
            ratio = torch.where((w_norm > 0) & (u_norm > 0), ratio, 1.0)
            updates |= zip(scaled, torch._foreach_mul(decayed, ratio.unbind()), strict=True)
        if not weights:
            return
        for w in weights:
            if "momentum_buffer" not in self.state[w]:
                self.state[w]["momentum_buffer"] = torch.zeros_like(w)
        momenta = [self.state[w]["momentum_buffer"] for w in weights]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, list(updates.values()))
        torch._foreach_add_(weights, momenta, alpha=-group["lr"])
