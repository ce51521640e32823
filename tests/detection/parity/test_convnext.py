"""Stages under an FPN: freezing and drop path."""

import pytest
import torch
from torchvision.ops import StochasticDepth

from detection.embedded.model import build_model
from tests.detection.parity.test_model import CONVNEXT, CONVNEXT_V2, SWIN_CASCADE
from tests.oracles import tiny_detector as tiny


@pytest.mark.parametrize(
    ("keys", "parts"),
    [(CONVNEXT_V2, ("stem", "stages.0")), (SWIN_CASCADE, ("patch_embed", "layers.0"))],
    ids=["convnext", "swin"],
)
def test_the_first_parts_are_frozen(keys, parts):
    model = build_model(tiny.task(keys))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    parts = tuple(f"backbone.bottom_up.{part}." for part in parts)
    assert frozen == {name for name in model.state_dict() if name.startswith(parts)}


def test_drop_path_follows_the_seed_and_is_off_in_evaluation():
    torch.manual_seed(0)
    model = build_model(tiny.task(CONVNEXT))
    network, x = model.backbone.bottom_up, torch.randn(4, 3, 64, 64)
    rates = [round(m.p, 6) for m in network.modules() if isinstance(m, StochasticDepth)]
    assert rates == [0, 0.1, 0.2, 0.3, 0.4, 0.5]

    def run(seed):
        torch.manual_seed(seed)
        return network(x)["res5"]

    with torch.no_grad():
        assert torch.equal(run(1), run(1))
        assert not torch.equal(run(1), run(2))
        network.eval()
        assert torch.equal(run(1), run(2))
