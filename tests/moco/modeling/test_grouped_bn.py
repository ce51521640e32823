import copy

import pytest
import torch
from torch import nn

from moco.modeling.conv import Conv2d
from moco.modeling.grouped_bn import GroupedBatchNorm2d


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_equals_batch_norm_on_each_group(memory_format):
    torch.manual_seed(0)
    G, x = 3, torch.randn(6, 4, 5, 5).to(memory_format=memory_format)
    plain = nn.BatchNorm2d(4)
    nn.init.uniform_(plain.weight)
    nn.init.uniform_(plain.bias)
    grouped = GroupedBatchNorm2d(4, G)
    grouped.load_state_dict(plain.state_dict())
    copies = [copy.deepcopy(plain) for _ in range(G)]
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = torch.cat([bn(part) for bn, part in zip(copies, a.chunk(G), strict=True)])
    got = grouped(b)
    torch.testing.assert_close(got, expected)
    assert got.is_contiguous(memory_format=memory_format)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    torch.testing.assert_close(b.grad, a.grad)
    assert b.grad.is_contiguous(memory_format=memory_format)
    for name in ("weight", "bias"):
        summed = sum(getattr(bn, name).grad for bn in copies)
        torch.testing.assert_close(getattr(grouped, name).grad, summed)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(bn, name) for bn in copies]).mean(0)
        torch.testing.assert_close(getattr(grouped, name), mean)
    assert grouped.num_batches_tracked == 1


def test_state_and_evaluation_are_batch_norms():
    grouped, plain = GroupedBatchNorm2d(4, 2), nn.BatchNorm2d(4)
    grouped(torch.randn(4, 4, 3, 3))
    assert grouped.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(grouped.state_dict())
    x = torch.randn(3, 4, 3, 3)  # 3 is no multiple of 2: evaluation knows no groups
    torch.testing.assert_close(grouped.eval()(x), plain.eval()(x))


def test_gradients_equal_finite_differences():
    torch.manual_seed(0)
    grouped = GroupedBatchNorm2d(2, 2).double()
    x = torch.randn(4, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(grouped, (x,))


def test_bfloat16_images_with_float32_parameters():
    """Under autocast, the statistics stay float32."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5, 5).bfloat16().requires_grad_()
    grouped, plain = GroupedBatchNorm2d(4, 3), nn.BatchNorm2d(4)
    y = grouped(x)
    y.float().square().sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert grouped.running_mean.dtype == grouped.weight.grad.dtype == torch.float32
    expected = torch.cat([plain(part) for part in x.detach().chunk(3)])
    torch.testing.assert_close(y.detach(), expected)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(AssertionError, match="5 images in 2 groups"):
        GroupedBatchNorm2d(3, 2)(torch.randn(5, 3, 2, 2))


@pytest.mark.slow
def test_compiled_it_is_the_same():
    """A compiler sees other operations (SOLVER.COMPILE), which give the same numbers."""
    torch.manual_seed(0)
    # The convolution has enough weights for its own gradient, which a compiler does not get.
    plain = nn.Sequential(Conv2d(3, 200, 3, bias=False), GroupedBatchNorm2d(200, 2), nn.ReLU())
    plain.to(memory_format=torch.channels_last)
    compiled = copy.deepcopy(plain)
    compiled.compile()
    for _ in range(2):
        x = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        outputs = [network(x) for network in (plain, compiled)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.square().sum().backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value)
