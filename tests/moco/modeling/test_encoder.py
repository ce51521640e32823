import copy

import pytest
import torch
import torchvision
from torchvision.models.resnet import Bottleneck, ResNet

from moco.modeling.encoder import EncoderSpec, build_backbone, build_encoder, contiguous_last_stages


@pytest.mark.parametrize(
    "arch", ["resnet18", "resnet34", "resnet50", "resnet101", "resnext50_32x8d"]
)
def test_is_torchvisions_network(arch):
    if arch.startswith("resnext"):
        theirs = ResNet(Bottleneck, [3, 4, 6, 3], num_classes=7, groups=32, width_per_group=8)
    else:
        theirs = getattr(torchvision.models, arch)(num_classes=7)
    ours = build_encoder(EncoderSpec(arch), 7, mlp=False).eval()
    assert isinstance(ours, ResNet)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 40, 40)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs.eval()(x))


def test_initial_weights_are_torchvisions():
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18()
    ours = build_backbone(EncoderSpec("resnet18"))
    for a, b in zip(ours.children(), theirs.children(), strict=True):
        if not isinstance(b, torch.nn.Linear):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                assert p.std(correction=0).item() == pytest.approx(
                    q.std(correction=0).item(), rel=0.2
                )


@pytest.mark.parametrize("stem, stride", [("imagenet", 32), ("stride2", 16), ("cifar", 8)])
def test_strides_of_the_stems(stem, stride):
    backbone = build_backbone(EncoderSpec("resnet10", stem, 0.125))
    sizes = []
    backbone.layer4.register_forward_hook(lambda m, i, out: sizes.append(out.shape[-1]))
    assert backbone(torch.randn(2, 3, 64, 64)).shape == (2, 64)
    assert sizes == [64 // stride]
    assert [len(getattr(backbone, f"layer{i}")) for i in (1, 2, 3, 4)] == [1, 1, 1, 1]


def test_width_multiplies_every_channel_count():
    narrow = build_backbone(EncoderSpec("resnet50", "imagenet", 0.375))
    wide = build_backbone(EncoderSpec("resnet50"))
    for (name, a), b in zip(narrow.named_parameters(), wide.parameters(), strict=True):
        assert a.shape[0] == b.shape[0] * 0.375, name
    assert EncoderSpec("resnet50", width=0.375).feature_dim == 768


@pytest.mark.parametrize(
    "arch, width, millions",
    [("resnet50", 1, 24), ("resnet50", 2, 94), ("resnet50", 4, 375), ("resnext50_32x8d", 1, 46)],
)
def test_parameters_of_the_papers_networks(arch, width, millions):
    """Table 1 counts the backbone's parameters in whole millions."""
    with torch.device("meta"):
        backbone = build_backbone(EncoderSpec(arch, width=float(width)))
    assert round(sum(p.numel() for p in backbone.parameters()) / 1e6) == millions


def test_mlp_head_has_the_features_width():
    encoder = build_encoder(EncoderSpec("resnet10", "cifar", 0.125), 5, mlp=True)
    assert encoder.fc[0].weight.shape == (64, 64)
    assert encoder.fc[2].weight.shape == (5, 64)


@pytest.mark.parametrize("arch", ["resnet10", "resnet50"])
def test_a_last_stage_of_small_maps_is_contiguous_and_computes_the_same(arch):
    torch.manual_seed(0)
    N, spec = 4, EncoderSpec(arch, "stride2", 0.125)
    plain = build_encoder(spec, 8, mlp=False, bn_splits=2).double()
    plain.to(memory_format=torch.channels_last)
    ours, large = copy.deepcopy(plain), copy.deepcopy(plain)
    contiguous_last_stages(ours, spec, N, 32)
    contiguous_last_stages(large, spec, 64 * N, 256)
    kernels = [network.layer4[0].conv2.weight for network in (plain, ours, large)]
    assert [kernel.is_contiguous() for kernel in kernels] == [False, True, False]
    x = torch.randn(N, 3, 32, 32).double().contiguous(memory_format=torch.channels_last)
    outputs = [network(x) for network in (plain, ours)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
        assert b.grad.stride() == b.stride()
