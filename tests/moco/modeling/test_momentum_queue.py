import copy

import pytest
import torch
from torch.func import functional_call

from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.modeling.mechanisms.base import KeyBatch, Passes, ema_update_
from moco.modeling.mechanisms.momentum_queue import MomentumQueue
from moco.modeling.shuffle_bn import shuffle_plan
from tests.oracles.algorithm1 import Algorithm1
from tests.oracles.training import train_step

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
SPEC = EncoderSpec("resnet10", "stride2", 0.125)


def make_model(K, m=0.9, T=0.2, dim=6, mlp=False, bn_splits=1):
    torch.manual_seed(0)
    return MomentumQueue(build_encoder(SPEC, dim, mlp, bn_splits), dim, K, m, T).double()


def views(step, N):
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(N, 3, 8, 8, dtype=torch.float64, generator=generator) for _ in range(2))


def keys(model, plan, num_chunks=1):
    _, x_k = views(0, 6)
    x_k = x_k if plan is None else x_k[plan]
    return model.dictionary(KeyBatch(x_k, plan, torch.arange(6), 0, num_chunks)).keys


def oldest_first(model):
    return model.queue.roll(-int(model.queue_ptr), dims=1).T


@pytest.mark.parametrize("N, K", [(4, 8), (3, 8), (5, 7), (8, 8)])
def test_follows_algorithm_1_step_by_step(N, K):
    """Losses, queue and parameters agree through several wraps, also if N does not divide K."""
    model = make_model(K, mlp=N == 3)
    networks = [copy.deepcopy(model.encoder_q) for _ in range(2)]
    oracle = Algorithm1(
        *[lambda params, x, net=net: functional_call(net, params, (x,)) for net in networks],
        {name: p.detach() for name, p in model.encoder_q.named_parameters()},
        list(model.queue.T.clone()),
        m=0.9,
        t=0.2,
        **SGD,
    )
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), **SGD)
    for step in range(6):
        x_q, x_k = views(step, N)
        out = train_step(model, optimizer, x_q, x_k)
        assert out.loss.item() == pytest.approx(oracle.step(x_q, x_k), rel=1e-10)
        torch.testing.assert_close(
            oldest_first(model), torch.stack(oracle.queue), rtol=0, atol=1e-10
        )
        for name, p in model.encoder_q.named_parameters():
            torch.testing.assert_close(p.detach(), oracle.q_params[name], rtol=0, atol=1e-10)
        for name, p in model.encoder_k.named_parameters():
            torch.testing.assert_close(p, oracle.k_params[name], rtol=0, atol=1e-10)
    assert int(model.queue_ptr) == 6 * N % K


def test_the_official_order_encodes_the_same(monkeypatch):
    """Updating the key encoder before the next forward pass gives the same losses and queue."""
    ours, official = make_model(12), make_model(12)
    optimizers = [torch.optim.SGD(m.encoder_q.parameters(), **SGD) for m in (ours, official)]
    for step in range(4):
        x_q, x_k = views(step, 4)
        a = train_step(ours, optimizers[0], x_q, x_k)
        # main_moco.py updates in the forward pass, before it encodes the keys.
        ema_update_(official.encoder_k, official.encoder_q, official.m)
        dictionary = official.dictionary(KeyBatch(x_k, None, torch.arange(4), step))
        b = official(x_q, dictionary)
        optimizers[1].zero_grad()
        b.loss.backward()
        optimizers[1].step()
        official.m, m = 1.0, official.m  # the queue alone
        official.update(Passes([dictionary], [b.queries], torch.arange(4), 0.0))
        official.m = m
        assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-10)
        torch.testing.assert_close(ours.queue, official.queue, rtol=0, atol=1e-10)
    lag = next(iter(official.encoder_k.parameters())) - next(iter(ours.encoder_k.parameters()))
    assert lag.abs().max() > 1e-6  # one update behind


def test_key_encoder_gets_no_gradient_and_keeps_its_own_bn_statistics():
    model = make_model(8)
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), **SGD)
    x_q, x_k = views(0, 4)
    train_step(model, optimizer, x_q, 3 * x_k)
    assert all(p.grad is None and not p.requires_grad for p in model.encoder_k.parameters())
    assert all(p.grad is not None for p in model.encoder_q.parameters())
    assert not torch.equal(model.encoder_q.bn1.running_var, model.encoder_k.bn1.running_var)


def test_shuffling_changes_the_groups_of_the_keys_and_not_their_order():
    """BN over the whole batch does not depend on the order, so there the keys are equal."""
    for splits, equal in ((1, True), (3, False)):
        plan = shuffle_plan(6, splits, seed=1, step=0)
        plain, shuffled = (keys(make_model(8, bn_splits=splits), p) for p in (None, plan))
        assert torch.allclose(plain, shuffled, rtol=1e-7, atol=1e-7 if equal else 1e-3) == equal


def test_keys_encoded_in_chunks():
    """Chunks that are the BN groups give the same keys."""
    plan = shuffle_plan(6, 2, seed=1, step=0)
    whole, chunks = make_model(8, bn_splits=2), make_model(8, bn_splits=1)
    torch.testing.assert_close(keys(whole, plan), keys(chunks, plan, num_chunks=2))


def test_state_names_are_the_official_ones():
    names = set(make_model(8, mlp=True).state_dict())
    official = {"encoder_q.conv1.weight", "encoder_k.layer4.0.bn2.running_var"}
    assert {"queue", "queue_ptr"} | official <= names
    heads = {f"encoder_{e}.fc.{i}.{p}" for e in "qk" for i in (0, 2) for p in ("weight", "bias")}
    assert {name for name in names if ".fc." in name} == heads
