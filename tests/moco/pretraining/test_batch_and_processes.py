"""What a batch, its BN groups and the number of processes allow, and what the log says of it."""

import pytest

from moco.common.errors import UserError
from moco.pretraining.config import check_processes, load_pretrain_cfg, scale_to_batch


def cfg(**keys):
    pairs = [(key.replace("__", "."), str(value)) for key, value in keys.items()]
    return load_pretrain_cfg(None, [word for pair in pairs for word in pair])


def test_linear_rule():
    """Half the batch: half the rate, twice the steps; and what is not equivalent is said."""
    scaled = scale_to_batch(
        cfg(
            SOLVER__BATCH_SIZE=128,
            SOLVER__REFERENCE_BATCH_SIZE=256,
            SOLVER__BASE_LR=0.03,
            SOLVER__MAX_ITERS=1000,
            SOLVER__WARMUP_ITERS=10,
            SOLVER__DECAY_EVERY_ITERS=50,
        )
    )
    assert scaled.base_lr == pytest.approx(0.015)
    assert (scaled.max_iters, scaled.warmup_iters, scaled.decay_every_iters) == (2000, 20, 100)
    rate, rest = scaled.notes
    assert "a batch of 128 instead of 256: learning rate 0.015 instead of 0.03" in rate
    assert "not equivalent to a batch of 256: BN statistics over 16 images a group" in rest
    assert "the queue holds 512 steps instead of 256" in rest
    assert "m 0.999 is applied every 128 images instead of every 256" in rest


@pytest.mark.parametrize("reference", [0, 64])
def test_nothing_to_scale(reference):
    scaled = scale_to_batch(
        cfg(SOLVER__BATCH_SIZE=64, SOLVER__REFERENCE_BATCH_SIZE=reference, SOLVER__MAX_ITERS=7)
    )
    assert (scaled.base_lr, scaled.max_iters, scaled.notes) == (0.03, 7, ())


@pytest.mark.parametrize(
    "keys, world_size, message",
    [
        ({"SOLVER__BATCH_SIZE": 256}, 3, "SOLVER.BATCH_SIZE: got 256, .* multiple of the 3 proc"),
        ({"MOCO__BN_SPLITS": 1}, 2, "MOCO.BN_SPLITS: got 1, expected a multiple of the 2 proces"),
        ({"SOLVER__ACCUMULATE": 3}, 1, "MOCO.BN_SPLITS: got 8, .* 1 processes x 3 parts"),
        ({"SOLVER__ACCUMULATE": 4}, 4, "MOCO.BN_SPLITS: got 8, .* 4 processes x 4 parts"),
    ],
)
def test_what_cannot_be_divided(keys, world_size, message):
    with pytest.raises(UserError, match=message):
        check_processes(cfg(**keys), world_size)


@pytest.mark.parametrize("world_size, parts", [(1, 1), (8, 1), (2, 4), (1, 8)])
def test_what_can_be_divided(world_size, parts):
    check_processes(cfg(SOLVER__ACCUMULATE=parts), world_size)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"MOCO__K": 255}, r"MOCO.K: got 255, expected at least SOLVER.BATCH_SIZE \(256\)"),
        ({"MOCO__K": 511, "MOCO__SYMMETRIC": True}, r"at least 2 x SOLVER.BATCH_SIZE \(512\)"),
        ({"MOCO__MECHANISM": "end_to_end"}, r"MOCO.K: got 65536, expected SOLVER.BATCH_SIZE"),
        (
            {"MOCO__MECHANISM": "end_to_end", "MOCO__K": 256, "SOLVER__ACCUMULATE": 2},
            "SOLVER.ACCUMULATE: got 2, expected 1: end_to_end",
        ),
        ({"MOCO__LOSS": "nce"}, "MOCO.LOSS: nce is for MOCO.MECHANISM memory_bank"),
        (
            {"MOCO__MECHANISM": "memory_bank", "MOCO__SYMMETRIC": True},
            "MOCO.SYMMETRIC: memory_bank encodes no keys",
        ),
        (
            {"MOCO__MECHANISM": "simclr"},
            "MOCO.MECHANISM: got 'simclr'.*end_to_end, memory_bank, momentum_queue",
        ),
        ({"MOCO__BANK_MOMENTUM": 1}, "MOCO.BANK_MOMENTUM: got 1.0, expected 0 <= momentum < 1"),
        ({"MOCO__M": 1}, "MOCO.M: got 1.0, expected 0 <= m < 1"),
    ],
)
def test_what_a_mechanism_needs(keys, message):
    with pytest.raises(UserError, match=message):
        cfg(**keys)


def test_a_queue_shorter_than_the_batch_is_no_matter_without_a_queue():
    cfg(MOCO__MECHANISM="memory_bank", MOCO__K=10)
