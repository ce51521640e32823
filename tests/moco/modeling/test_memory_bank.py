import copy

import numpy as np
import pytest
import torch
from torch.func import functional_call

from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.modeling.mechanisms.base import KeyBatch
from moco.modeling.mechanisms.memory_bank import MemoryBank
from tests.oracles.mechanisms import MemoryBankOracle
from tests.oracles.training import train_step

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
SPEC = EncoderSpec("resnet10", "stride2", 0.125)
M = 11


def make_model(K=7, momentum=0.5, loss="info_nce", num_images=M):
    torch.manual_seed(0)
    encoder = build_encoder(SPEC, 6, mlp=False)
    return MemoryBank(encoder, 6, num_images, K, momentum, 0.2, loss, seed=3).double()


def batch(step, N=4):
    generator = torch.Generator().manual_seed(step)
    x_q = torch.randn(N, 3, 8, 8, dtype=torch.float64, generator=generator)
    return x_q, torch.randperm(M, generator=generator)[:N].tolist()


@pytest.mark.parametrize("loss", ["info_nce", "nce"])
def test_follows_the_slow_transcription(loss):
    model = make_model(loss=loss)
    network = copy.deepcopy(model.encoder_q)
    oracle = MemoryBankOracle(
        lambda params, x: functional_call(network, params, (x,)),
        {name: p.detach() for name, p in model.encoder_q.named_parameters()},
        list(model.bank.clone()),
        bank_momentum=0.5,
        t=0.2,
        nce=loss == "nce",
        **SGD,
    )
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(5):
        x_q, images = batch(step)
        sampled = sampled_by(model, images, step)
        out = train_step(model, optimizer, x_q, x_q[:0], images=images, step=step)
        assert out.loss.item() == pytest.approx(oracle.step(x_q, images, sampled), rel=1e-10)
        torch.testing.assert_close(model.bank, torch.stack(oracle.bank), rtol=0, atol=1e-10)
    for name, p in model.encoder_q.named_parameters():
        torch.testing.assert_close(p.detach(), oracle.sgd.params[name], rtol=0, atol=1e-10)


def sampled_by(model, images, step):
    """Return the entries that are the negatives of a step, found by their values."""
    nothing = torch.empty(0, 3, 8, 8)
    negatives = model.dictionary(KeyBatch(nothing, None, torch.tensor(images), step)).negatives
    found = (negatives.T[:, None] - model.bank[None]).abs().sum(dim=2).argmin(dim=1)
    torch.testing.assert_close(model.bank[found].T, negatives)
    return found.tolist()


def test_negatives_are_sampled_uniformly_and_independently_in_each_step():
    model = make_model(K=2200)
    counts = np.bincount(sampled_by(model, [0], 0), minlength=M)
    assert counts.min() > 150 and counts.max() < 250  # 200 expected, standard deviation 13.5
    model = make_model()
    first, again, next_step = (sampled_by(model, [0], step) for step in (0, 0, 1))
    assert first == again != next_step


def test_only_the_entries_of_the_batch_move_and_stay_unit_vectors():
    model = make_model(momentum=0.9)
    before = model.bank.clone()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    x_q, images = batch(0)
    train_step(model, optimizer, x_q, x_q[:0], images=images)
    moved = (model.bank - before).abs().sum(dim=1) > 0
    assert moved.nonzero()[:, 0].tolist() == sorted(images)
    torch.testing.assert_close(model.bank.norm(dim=1), torch.ones(M, dtype=torch.float64))
