import copy

import pytest
import torch
from torch.func import functional_call

from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.modeling.mechanisms.base import KeyBatch
from moco.modeling.mechanisms.end_to_end import EndToEnd
from moco.modeling.shuffle_bn import shuffle_plan
from tests.oracles.mechanisms import EndToEndOracle
from tests.oracles.training import train_step

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
SPEC = EncoderSpec("resnet10", "stride2", 0.125)


def make_model(shared, bn_splits=1):
    torch.manual_seed(0)
    return EndToEnd(build_encoder(SPEC, 6, False, bn_splits), T=0.2, shared=shared).double()


def views(step, N):
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(N, 3, 8, 8, dtype=torch.float64, generator=generator) for _ in range(2))


@pytest.mark.parametrize("shared", [True, False])
def test_follows_the_slow_transcription(shared):
    model = make_model(shared)
    networks = [copy.deepcopy(model.encoder_q) for _ in range(2)]
    oracle = EndToEndOracle(
        *[lambda params, x, net=net: functional_call(net, params, (x,)) for net in networks],
        {name: p.detach() for name, p in model.encoder_q.named_parameters()},
        t=0.2,
        shared=shared,
        **SGD,
    )
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(4):
        x_q, x_k = views(step, 5)
        out = train_step(model, optimizer, x_q, x_k)
        assert out.loss.item() == pytest.approx(oracle.step(x_q, x_k), rel=1e-10)
    for encoder, params in ((model.encoder_q, oracle.q.params), (model.encoder_k, oracle.k.params)):
        for name, p in encoder.named_parameters():
            torch.testing.assert_close(p.detach(), params[name], rtol=0, atol=1e-10)
    same = torch.equal(model.encoder_q.conv1.weight, model.encoder_k.conv1.weight)
    assert same == shared


def test_shuffling_changes_what_a_key_is_normalized_with_and_nothing_else():
    x_q, x_k = views(0, 6)
    plan = shuffle_plan(6, 3, seed=1, step=0)

    def loss(model, plan):
        shuffled = x_k if plan is None else x_k[plan]
        dictionary = model.dictionary(KeyBatch(shuffled, plan, torch.arange(6), 0))
        return model(x_q, dictionary).loss.item()

    assert loss(make_model(True), None) == pytest.approx(loss(make_model(True), plan))
    in_groups = [loss(make_model(True, bn_splits=3), p) for p in (None, plan)]
    assert abs(in_groups[0] - in_groups[1]) > 1e-3
