import copy

import pytest
import torch
from fvcore.common.config import CfgNode
from torch import nn
from torch.func import functional_call

from moco.modeling import archs
from moco.modeling.archs import EncoderSpec, ViTArch, ViTSpec
from moco.modeling.encoder import build_encoder
from moco.modeling.mechanisms import MECHANISMS
from moco.modeling.mechanisms.base import KeyBatch, Passes
from moco.modeling.mechanisms.moco_v3 import MoCoV3, cosine_momentum
from tests.oracles.moco_v3 import MoCoV3Oracle

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
STEPS, N = 4, 5


@pytest.fixture
def specs(monkeypatch):
    """Return a ResNet and a vision transformer that take milliseconds."""
    monkeypatch.setitem(archs.VITS, "vit_nano", ViTArch(8, 2, 2, patch_size=4))
    return {"resnet": EncoderSpec("resnet10", "stride2", 0.125), "vit": ViTSpec("vit_nano", 8)}


def make_model(spec, vit):
    torch.manual_seed(0)
    encoder = build_encoder(spec, 6, mlp=False)
    return MoCoV3(encoder, 6, 12, 0.9, 0.5, 3 if vit else 2, predictor_norm=vit).double()


def symmetric_step(model, optimizer, x1, x2, progress):
    """Run both passes of a step and return the loss."""
    optimizer.zero_grad()
    total, dictionaries, queries = 0.0, [], []
    for x_q, x_k in ((x1, x2), (x2, x1)):
        dictionary = model.dictionary(KeyBatch(x_k, None, torch.arange(N), 0))
        out = model(x_q, dictionary)
        out.loss.backward()
        total += out.loss.item()
        dictionaries.append(dictionary)
        queries.append(out.queries)
    optimizer.step()
    model.update(Passes(dictionaries, queries, torch.arange(N), progress))
    return total


@pytest.mark.parametrize("kind", ["resnet", "vit"])
def test_follows_the_slow_transcription(specs, kind):
    model = make_model(specs[kind], kind == "vit")
    networks = [copy.deepcopy(model.encoder_q) for _ in range(2)]
    predictor = copy.deepcopy(model.predictor)
    encode = [lambda p, x, net=net: functional_call(net, p, (x,)) for net in networks]
    oracle = MoCoV3Oracle(
        (encode[0], encode[1]),
        lambda p, x: functional_call(predictor, p, (x,)),
        {name: p.detach() for name, p in model.encoder_q.named_parameters() if p.requires_grad},
        {name: p.detach() for name, p in model.predictor.named_parameters()},
        m=0.9,
        tau=0.5,
        steps=STEPS,
        **SGD,
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **SGD)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x1, x2 = torch.randn(2, N, 3, 8, 8, dtype=torch.float64, generator=generator)
        loss = symmetric_step(model, optimizer, x1, x2, (step + 1) / STEPS)
        assert loss == pytest.approx(oracle.step(x1, x2), rel=1e-9)
    assert all(p.grad is None for p in model.encoder_k.parameters())
    for module, params in (
        (model.encoder_q, oracle.encoder.params),
        (model.encoder_k, oracle.k_params),
        (model.predictor, oracle.predictor.params),
    ):
        mine = dict(module.named_parameters())
        assert params.keys() <= mine.keys() and len(params) >= 4
        for name, p in params.items():
            torch.testing.assert_close(mine[name].detach(), p, rtol=0, atol=1e-9)


def test_momentum_rises_to_1_by_half_a_cosine():
    """adjust_moco_momentum of the official main_moco.py."""
    got = [cosine_momentum(0.99, progress) for progress in (0, 0.25, 0.5, 1)]
    assert got == pytest.approx([0.99, 0.99146447, 0.995, 1.0])


@pytest.mark.parametrize(
    ("arch", "linears", "norms", "predictor"),
    [
        ("resnet50", ["fc.0", "fc.3"], {"fc.1": True, "fc.4": False}, 4),
        ("vit_base", ["head.0", "head.3", "head.6"], {"head.1": True, "head.7": False}, 5),
    ],
)
def test_heads_are_the_official_ones(arch, linears, norms, predictor):
    """builder.py: no biases, the last norm without scale; a ResNet's predictor has none."""
    moco = {"DIM": 256, "MLP_DIM": 4096, "M": 0.99, "T": 1.0}
    cfg = CfgNode({"MOCO": moco, "MODEL": {"ARCH": arch}})
    spec = EncoderSpec(arch) if arch.startswith("resnet") else ViTSpec(arch)
    with torch.device("meta"):
        model = MECHANISMS.get("moco_v3")(cfg, build_encoder(spec, 8, mlp=False), 10)
    modules = dict(model.encoder_q.named_modules())
    assert [n for n in modules if n.startswith(("fc.", "head.")) and
            isinstance(modules[n], nn.Linear)] == linears  # fmt: skip
    assert all(modules[name].bias is None for name in linears)
    assert modules[linears[0]].weight.shape == (4096, spec.feature_dim)
    assert modules[linears[-1]].weight.shape == (256, 4096)
    assert {name: modules[name].affine for name in norms} == norms
    assert len(model.predictor) == predictor
    assert isinstance(model.predictor[-1], nn.Linear) == (predictor == 4)
