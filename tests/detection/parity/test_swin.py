"""Swin: Detectron2's own network bit by bit at any size, its initial weights, frozen parts."""

import pytest
import torch

from convert.families.swin import SwinArchitecture
from convert.modeling.swin import Swin
from tests.oracles import tiny_detector as tiny


# Heights and widths: multiples of 32; one window in the last map; odd maps and padded patches.
@pytest.mark.detectron2
@pytest.mark.filterwarnings("ignore::FutureWarning")  # where its Swin imports timm from
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize(
    ("window", "size"), [(7, (224, 448)), (3, (64, 96)), (4, (97, 130)), (2, (75, 41)), (5, (9, 5))]
)
def test_detectron2s_own_network(window, size, qkv_bias, detectron2):
    from detectron2.modeling import SwinTransformer

    a = SwinArchitecture(12, (1, 2, 3, 2), (1, 2, 3, 6), window, qkv_bias)
    nets = []
    for make in (
        lambda: SwinTransformer(
            embed_dim=a.embed_dim,
            depths=a.depths,
            num_heads=a.num_heads,
            window_size=window,
            qkv_bias=qkv_bias,
            drop_path_rate=0.5,
        ),
        lambda: Swin(a, drop_path=0.5, output_norms=True),
    ):
        torch.manual_seed(0)
        nets.append((make(), torch.get_rng_state()))
    (theirs, after), (ours, also) = nets
    assert torch.equal(after, also)
    initial = {k: v for k, v in theirs.state_dict().items() if "position_index" not in k}
    assert list(initial) == list(ours.state_dict())
    tiny.assert_same(initial, ours.state_dict())
    state = tiny.fill(initial, seed=1)
    theirs.load_state_dict(state, strict=False)
    ours.load_state_dict(state)
    x, features = torch.randn(3, 3, *size), []
    for net in (theirs, ours):
        torch.manual_seed(2)
        maps = dict(zip(ours.strides, net.train()(x).values(), strict=True))
        sum((y * y.cos()).sum() for y in maps.values()).backward()
        features.append(maps)
    tiny.assert_same(*features)
    gradients = ({name: p.grad for name, p in net.named_parameters()} for net in (theirs, ours))
    tiny.assert_same(*gradients)
