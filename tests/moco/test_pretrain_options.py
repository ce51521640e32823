"""What the keys of a run change: mechanism, symmetric loss, momentum, shuffle, precision."""

import json

import pytest
import torch

from moco.checkpoint import list_checkpoints, load_checkpoint
from moco.fileio import sha256_state
from moco.pretrain import main
from moco.shuffle_bn import Pass


@pytest.fixture
def train(pictures, tiny, tmp_path):
    """``train(folder, KEY=value)``: the last checkpoint's content and the losses of a tiny run."""

    def run(folder, *flags, **changes):
        opts = tiny(
            DATA__ROOT=pictures, OUTPUT_DIR=tmp_path / folder, LOG__EVERY_ITERS=1, **changes
        )
        main([*flags, *opts])
        lines = (tmp_path / folder / "metrics.json").read_text().splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        return load_checkpoint(list_checkpoints(tmp_path / folder)[-1]), losses

    return run


def test_symmetric_loss_is_the_sum_of_both_ways(train, monkeypatch):
    one_step = {"SOLVER__MAX_ITERS": 1, "MOCO__SHUFFLE_BN": False}
    _, (forth,) = train("forth", **one_step)
    state, (both,) = train("both", MOCO__SYMMETRIC=True, **one_step)
    assert state["state_dict"]["module.queue_ptr"].item() == 16  # 2 N keys
    monkeypatch.setattr("moco.pretrain_run._passes", lambda cfg, model: (Pass(1, 0),))
    _, (back,) = train("back", **one_step)
    assert both == pytest.approx(forth + back, rel=1e-6)
    assert forth != back


def test_without_momentum_the_key_encoder_is_the_query_encoder(train):
    weights = train("m0", MOCO__M=0.0, SOLVER__MAX_ITERS=2)[0]["state_dict"]
    q, k = weights["module.encoder_q.conv1.weight"], weights["module.encoder_k.conv1.weight"]
    assert torch.equal(q, k)


def test_shuffling_can_be_turned_off(train):
    on, off = train("on", SOLVER__MAX_ITERS=2), train("off", MOCO__SHUFFLE_BN=False)
    assert on[1][0] != off[1][0]


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_heads(train, head):
    state, _ = train(head, MOCO__MLP=head == "mlp", SOLVER__MAX_ITERS=1)
    names = {name for name in state["state_dict"] if ".encoder_q.fc." in name}
    last = "fc.2" if head == "mlp" else "fc"
    assert f"module.encoder_q.{last}.weight" in names and len(names) == (4 if head == "mlp" else 2)


def test_a_lower_temperature_is_another_loss(train):
    assert (
        train("t1", MOCO__T=0.07, SOLVER__MAX_ITERS=1)[1]
        != train("t2", MOCO__T=0.2, SOLVER__MAX_ITERS=1)[1]
    )


@pytest.mark.parametrize("mechanism", ["end_to_end", "memory_bank"])
def test_other_mechanisms_resume_to_the_same_bits(train, mechanism):
    keys = {"MOCO__MECHANISM": mechanism}
    if mechanism == "end_to_end":
        keys["MOCO__K"] = 8
    straight, losses = train("straight", **keys)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    with pytest.raises(Exception, match="stopped after step 4"):
        train("stopped", SOLVER__STOP_AT_ITERS=4, **keys)
    resumed, _ = train("stopped", "--resume", **keys)
    assert sha256_state(resumed["state_dict"]) == sha256_state(straight["state_dict"])


def test_memory_bank_reads_one_view_and_keeps_one_entry_per_picture(train, monkeypatch):
    asked = []
    from moco.data import Views

    whole_batch = Views.__getitems__
    monkeypatch.setattr(
        Views,
        "__getitems__",
        lambda self, items: (asked.extend(items), whole_batch(self, items))[1],
    )
    state, _ = train("bank", MOCO__MECHANISM="memory_bank", SOLVER__MAX_ITERS=1)
    assert len(asked) == 8 and {view for _, _, view in asked} == {0}
    assert state["state_dict"]["module.bank"].shape == (26, 16)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(train, precision):
    """Close to fp32 in the first steps, and fp16's loss scale survives a resume."""
    exact = train("fp32", SOLVER__MAX_ITERS=2)[1]
    straight, losses = train(precision, SOLVER__PRECISION=precision)
    assert losses[0] != exact[0] and losses[0] == pytest.approx(exact[0], rel=0.02)
    assert bool(straight["scaler"]) == (precision == "fp16")
    with pytest.raises(Exception, match="stopped after step 4"):
        train("stopped", SOLVER__PRECISION=precision, SOLVER__STOP_AT_ITERS=4)
    resumed, _ = train("stopped", "--resume", SOLVER__PRECISION=precision)
    assert sha256_state(resumed["state_dict"]) == sha256_state(straight["state_dict"])
    assert resumed["scaler"] == straight["scaler"]


def test_deterministic_kernels_are_asked_for(train):
    try:
        train("deterministic", DETERMINISTIC=True, SOLVER__MAX_ITERS=1)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
