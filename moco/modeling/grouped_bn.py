"""Batch normalization in groups, which reproduces the BN statistics of several GPUs (sec. 3.3).

N batch size, C channels, H W size of a map in pixels, G groups.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """`BatchNorm2d` that computes batch statistics over each of `num_groups` parts of the batch.

    The first N/G images form the first group, and so on. Parameters and buffers have the names
    and shapes of `BatchNorm2d`, to which this layer is equivalent in evaluation mode and with one
    group. `python -m benchmarks.speed pretrain` compares their speed.

    The running statistics are the mean over the groups of those that each group would give.
    Deviation: the official code keeps the statistics of the first GPU; the mean has the same
    expectation and less noise.

    Args:
        num_features: Number of channels C.
        num_groups: Number of groups G, a divisor of the batch size.
    """

    def __init__(self, num_features: int, num_groups: int) -> None:
        super().__init__(num_features)
        self.num_groups = num_groups

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (N, C, H, W), in training mode group by group."""
        if not self.training or self.num_groups == 1:
            return super().forward(input)
        G = self.num_groups
        assert input.shape[0] % G == 0, f"{input.shape[0]} images in {G} groups"
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        means = self.running_mean.expand(G, -1).clone()  # (G, C)
        variances = self.running_var.expand(G, -1).clone()
        if torch.compiler.is_compiling():
            output = self._normalize_traceable(input, means, variances)
        else:
            output = _NormalizeGroups.apply(
                input, self.weight, self.bias, means, variances, self.momentum, self.eps
            )
        with torch.no_grad():
            self.running_mean.copy_(means.mean(dim=0))
            self.running_var.copy_(variances.mean(dim=0))
            self.num_batches_tracked.add_(1)
        return output

    def _normalize_traceable(self, input: Tensor, means: Tensor, variances: Tensor) -> Tensor:
        """Normalize each group with operations that a compiler can fuse with adjacent ones."""
        assert self.momentum is not None
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        groups = x.unflatten(0, (self.num_groups, -1))  # (G, N/G, C, H, W)
        variance, mean = torch.var_mean(groups, dim=(1, 3, 4), correction=0, keepdim=True)
        normal = (groups - mean) * torch.rsqrt(variance + self.eps)
        shape = (1, 1, -1, 1, 1)
        output = normal * self.weight.view(shape) + self.bias.view(shape)
        with torch.no_grad():
            values = groups[0].numel() // groups.shape[2]
            unbiased = variance.detach().flatten(1) * (values / (values - 1))
            means.lerp_(mean.detach().flatten(1), self.momentum)
            variances.lerp_(unbiased, self.momentum)
        return output.flatten(0, 1).to(input.dtype)


class _NormalizeGroups(torch.autograd.Function):
    """Batch normalization of one group after another, written into one tensor.

    With autograd alone, splitting and concatenating the groups would copy every activation and
    gradient once more. A single batch normalization of (N/G, G C, H, W) would need a copy as well,
    to rearrange the memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        means: Tensor,
        variances: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Normalize (N, C, H, W) and update the running statistics (G, C) in place."""
        G = len(means)
        output = torch.empty_like(x)
        batch_means, batch_scales = torch.empty_like(means), torch.empty_like(variances)
        groups = (t.chunk(G) for t in (x, output))
        statistics = (means, variances, batch_means, batch_scales)
        for part, out, mean, var, *saved in zip(*groups, *statistics, strict=True):
            torch.native_batch_norm(
                part, weight, bias, mean, var, True, momentum, eps, out=(out, *saved)
            )
        ctx.save_for_backward(x, weight, batch_means, batch_scales)
        ctx.eps = eps
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, batch_means, batch_scales = ctx.saved_tensors
        G = len(batch_means)
        x_gradient = torch.empty_like(x)
        weight_gradients, bias_gradients = (torch.empty_like(batch_means) for _ in range(2))
        for part, part_gradient, mean, scale, out, weight_out, bias_out in zip(
            x.chunk(G),
            gradient.chunk(G),
            batch_means,
            batch_scales,
            x_gradient.chunk(G),
            weight_gradients,
            bias_gradients,
            strict=True,
        ):
            results = torch.ops.aten.native_batch_norm_backward(
                part_gradient,
                part,
                weight,
                None,
                None,
                mean,
                scale,
                True,
                ctx.eps,
                (True, True, True),
            )
            for target, result in zip((out, weight_out, bias_out), results, strict=True):
                target.copy_(result)
        return x_gradient, weight_gradients.sum(0), bias_gradients.sum(0), None, None, None, None
