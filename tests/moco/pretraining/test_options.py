"""What the keys of a run change: mechanism, symmetric loss, momentum, shuffle, precision."""

import json

import pytest
import torch

from moco.common.files import sha256_state
from moco.data.images import open_images
from moco.engine.checkpoint import list_checkpoints, load_checkpoint
from moco.modeling.mechanisms.memory_bank import MemoryBank
from moco.modeling.mechanisms.momentum_queue import MomentumQueue
from moco.modeling.shuffle_bn import Pass
from moco.pretrain import main


@pytest.fixture
def train(images, tiny, tmp_path):
    """`train(folder, KEY=value)`: the last checkpoint's content and the losses of a tiny run."""

    def run(folder, *flags, **changes):
        opts = tiny(DATA__ROOT=images, OUTPUT_DIR=tmp_path / folder, LOG__EVERY_ITERS=1, **changes)
        main([*flags, *opts])
        losses = logged(tmp_path / folder, "loss")
        return load_checkpoint(list_checkpoints(tmp_path / folder)[-1]), losses

    return run


def logged(folder, name):
    """The values of each step in metrics.json."""
    lines = (folder / "metrics.json").read_text().splitlines()
    return [json.loads(line)[name] for line in lines]


@pytest.fixture
def forwards(monkeypatch):
    """`(model, x_q)` of each forward pass with a queue."""
    seen, forward = [], MomentumQueue.forward

    def spy(self, x_q, dictionary):
        seen.append((self, x_q))
        return forward(self, x_q, dictionary)

    monkeypatch.setattr(MomentumQueue, "forward", spy)
    return seen


def test_rate_and_durations_given_for_a_reference_batch_are_scaled(train, tmp_path):
    """A quarter of the batch: a quarter of the rate, four times the steps, warm-up and decay."""
    train(
        "scaled",
        SOLVER__REFERENCE_BATCH_SIZE=32,
        SOLVER__BASE_LR=0.4,
        SOLVER__MAX_ITERS=3,
        SOLVER__WARMUP_ITERS=1,
        SOLVER__SCHEDULE="exponential",
        SOLVER__GAMMA=0.5,
        SOLVER__DECAY_EVERY_ITERS=1,
    )
    warm_up, decayed = [0.025, 0.05, 0.075, 0.1], [0.05] * 4 + [0.025] * 4
    assert logged(tmp_path / "scaled", "lr") == pytest.approx(warm_up + decayed)


def test_symmetric_loss_is_the_sum_of_both_ways(train, monkeypatch):
    one_step = {"SOLVER__MAX_ITERS": 1, "MOCO__SHUFFLE_BN": False}
    _, (forth,) = train("forth", **one_step)
    state, (both,) = train("both", MOCO__SYMMETRIC=True, **one_step)
    assert state["state_dict"]["module.queue_ptr"].item() == 16  # 2 N keys
    monkeypatch.setattr("moco.pretraining.run._passes", lambda cfg, model: (Pass(1, 0),))
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


def test_memory_bank_reads_one_view_and_keeps_one_entry_per_image(train, monkeypatch):
    asked = []
    from moco.data.views import Views

    whole_batch = Views.__getitems__
    monkeypatch.setattr(
        Views,
        "__getitems__",
        lambda self, items: (asked.extend(items), whole_batch(self, items))[1],
    )
    state, _ = train("bank", MOCO__MECHANISM="memory_bank", SOLVER__MAX_ITERS=1)
    assert len(asked) == 8 and {view for _, _, view in asked} == {0}
    assert state["state_dict"]["module.bank"].shape == (26, 16)


@pytest.mark.slow
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


def test_nce_is_another_loss_than_info_nce(train):
    keys = {"MOCO__MECHANISM": "memory_bank", "SOLVER__MAX_ITERS": 1}
    state, (nce,) = train("nce", MOCO__LOSS="nce", **keys)
    other, (info_nce,) = train("info_nce", **keys)
    assert nce != info_nce
    assert state["state_dict"]["module.Z"] > 0 and other["state_dict"]["module.Z"] == 0


def test_an_entry_of_the_bank_moves_by_its_momentum(train):
    """From the same start to the same query: the more momentum, the less it moves."""
    keys = {"MOCO__MECHANISM": "memory_bank", "SOLVER__MAX_ITERS": 1}
    banks = [
        train(f"bank{m}", MOCO__BANK_MOMENTUM=m, **keys)[0]["state_dict"]["module.bank"]
        for m in (0.0, 0.5, 0.9)
    ]
    moved = (banks[0] != banks[1]).any(dim=1)
    assert moved.sum() == 8
    query, half, most = (bank[moved] for bank in banks)
    assert ((query * half).sum(dim=1) > (query * most).sum(dim=1)).all()


def test_the_seed_draws_the_negatives_of_the_bank(train, monkeypatch):
    drawn, entries = [], MemoryBank._entries
    monkeypatch.setattr(
        MemoryBank,
        "_entries",
        lambda self, images: (drawn.append(images[-20:].tolist()), entries(self, images))[1],
    )
    for seed in (0, 1):
        train(f"seed{seed}", MOCO__MECHANISM="memory_bank", SEED=seed, SOLVER__MAX_ITERS=1)
    assert len(drawn) == 2 and drawn[0] != drawn[1]


@pytest.mark.parametrize("shared", [True, False])
def test_end_to_end_has_one_encoder_or_two(train, shared):
    keys = {"MOCO__MECHANISM": "end_to_end", "MOCO__K": 8, "SOLVER__MAX_ITERS": 1}
    weights = train("run", MOCO__SHARED_ENCODER=shared, **keys)[0]["state_dict"]
    q = weights["module.encoder_q.conv1.weight"]
    k = weights.get("module.encoder_k.conv1.weight", q)
    assert torch.equal(q, k) == shared


@pytest.mark.parametrize("last", [True, False])
def test_channels_last_is_the_layout_of_images_and_weights(train, forwards, last):
    train("run", SOLVER__CHANNELS_LAST=last, SOLVER__MAX_ITERS=1)
    ((model, x_q),) = forwards
    kernels = [p for p in model.parameters() if p.ndim == 4 and p.shape[-1] > 1]
    assert kernels
    for tensor in (x_q, *kernels):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == last


@pytest.mark.parametrize("on", [True, False])
def test_each_encoder_is_compiled_where_asked(train, forwards, monkeypatch, on):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    train("run", SOLVER__COMPILE=on, SOLVER__MAX_ITERS=1)
    ((model, _),) = forwards
    assert compiled == ([model.encoder_q, model.encoder_k] if on else [])


def test_the_window_of_shards_reaches_the_images(train, monkeypatch):
    windows = []

    def spy(root, index_file, window):
        windows.append(window)
        return open_images(root, index_file, window)

    monkeypatch.setattr("moco.pretraining.run.open_images", spy)
    train("run", DATA__SHARD_WINDOW=5, SOLVER__MAX_ITERS=1)
    assert windows == [5]
