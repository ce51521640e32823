"""The gradient of RoIAlign in bf16 against torchvision's in fp32."""

import pytest
import torch
from torchvision import ops

from detection.modeling import roi_align as module
from detection.modeling.roi_align import roi_align


def regions(number):
    """Boxes (R, 5) on two images of 320 x 240 px; some leave them, one is a point."""
    corner = torch.rand(number, 2) * torch.tensor([330.0, 250.0]) - 20
    boxes = torch.cat([corner, corner + 2 + torch.rand(number, 2) * 200], dim=1)
    boxes[0, 2:] = boxes[0, :2]
    return torch.cat([torch.arange(number)[:, None] % 2, boxes], dim=1)


@pytest.mark.parametrize("sampling_ratio", [0, 2])
@pytest.mark.parametrize("size", [(15, 20), (120, 160)])
def test_gradient(size, sampling_ratio, monkeypatch):
    """On a map for the products, in several chunks, and on one that is too large for them."""
    monkeypatch.setattr(module, "CHUNK_REGIONS", 9)
    torch.manual_seed(0)
    given, rois, scale = torch.randn(2, 8, *size).bfloat16(), regions(40), size[0] / 240
    found = given.clone().requires_grad_()
    expected = given.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        pooled = roi_align(found, rois, 7, scale, sampling_ratio)
    reference = ops.roi_align(expected, rois, 7, scale, sampling_ratio, aligned=True)
    assert (type(pooled.grad_fn).__name__ == "_RoIAlignBackward") is (size == (15, 20))
    assert torch.equal(pooled, reference.bfloat16()) or size == (120, 160)
    grad = torch.randn_like(pooled)
    pooled.backward(grad)
    reference.backward(grad.float())
    assert found.grad.dtype == torch.bfloat16
    error = (found.grad.float() - expected.grad).norm() / expected.grad.norm()
    assert error < (0.005 if size == (15, 20) else 0.2)


def test_no_regions():
    features = torch.randn(2, 8, 15, 20).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        pooled = roi_align(features, torch.zeros(0, 5), 7, 0.1, 0)
    assert pooled.shape == (0, 8, 7, 7)
