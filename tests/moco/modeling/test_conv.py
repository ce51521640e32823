"""The weight gradient of a convolution as a matrix product."""

import pytest
import torch
from torch import nn

from moco.modeling import conv
from moco.modeling.conv import Conv2d

LAST = torch.channels_last


@pytest.fixture
def products(monkeypatch):
    """Record the calls of the convolution with the other gradient."""
    calls, apply = [], conv._Convolution.apply
    monkeypatch.setattr(conv._Convolution, "apply", lambda *a: calls.append(a) or apply(*a))
    return calls


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_are_those_of_torch(k, stride, products):
    torch.manual_seed(0)
    ours = Conv2d(24, 40, k, stride, k // 2, bias=False).to(memory_format=LAST)
    exact = nn.Conv2d(24, 40, k, stride, k // 2, bias=False).double()
    exact.load_state_dict(ours.state_dict())
    x = torch.randn(2, 24, 3, 2).contiguous(memory_format=LAST).requires_grad_()
    wide = x.detach().double().requires_grad_()
    output, expected = ours(x), exact(wide)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    expected.backward(gradient.double())
    assert bool(products) is ((k, stride) != (1, 1))  # 960 weights for 12 pixels
    pairs = (output, expected), (x.grad, wide.grad), (ours.weight.grad, exact.weight.grad)
    for found, wanted in pairs:
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert ours.weight.grad.stride() == ours.weight.stride()
    assert x.grad.is_contiguous(memory_format=LAST)


def test_images_need_no_gradient(products):
    layer = Conv2d(3, 200, 3, padding=1, bias=False).to(memory_format=LAST)
    layer(torch.randn(1, 3, 2, 2).contiguous(memory_format=LAST)).sum().backward()
    assert products and layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "change",
    [None, "many pixels", "other layout", "double", "frozen", "without gradient", "groups", "bf16"],
)
def test_otherwise_it_is_torchs(change, products):
    groups, side = 4 if change == "groups" else 1, 40 if change == "many pixels" else 2
    layer = Conv2d(64, 64, 3, padding=1, bias=False, groups=groups).to(memory_format=LAST)
    layer.requires_grad_(change != "frozen")
    x = torch.randn(1, 64, side, side)
    if change != "other layout":
        x = x.contiguous(memory_format=LAST)
    if change == "double":
        layer, x = layer.double(), x.double()
    with (
        torch.set_grad_enabled(change != "without gradient"),
        torch.autocast("cpu", torch.bfloat16, enabled=change == "bf16"),
    ):
        output = layer(x)
    assert bool(products) == (change is None)
    assert output.dtype == {"bf16": torch.bfloat16, "double": torch.float64}.get(change, x.dtype)
