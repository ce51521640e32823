"""Effects of the keys of a run: mechanism, symmetric loss, momentum, shuffle, precision."""

import math

import pytest
import torch

from moco.common.errors import NumericError, Preempted
from moco.common.files import sha256_state
from moco.common.run import RECORD_NAME, read_record
from moco.data.images import open_images
from moco.data.views import Views
from moco.modeling.mechanisms.momentum_queue import MomentumQueue
from moco.modeling.shuffle_bn import Pass
from tests.moco.classification.classify_runs import write_labeled
from tests.moco.commands import pretrain as main
from tests.oracles.training import metrics, newest

BANK = {"MOCO__MECHANISM": "memory_bank"}
V3 = {"MOCO__MECHANISM": "moco_v3", "MOCO__K": 8, "MOCO__BN_SPLITS": 1, "MOCO__SYMMETRIC": True}
V3 |= {"MOCO__MLP_DIM": 32, "AUG__KIND": "v3", "SOLVER__SCHEDULE": "warmup_cosine"}
VIT = {"MODEL__ARCH": "vit_micro", "MODEL__STEM": "imagenet", "MODEL__WIDTH": 1}
VIT |= {"MODEL__FREEZE_PATCH_EMBED": True, "SOLVER__OPTIMIZER": "adamw", "SOLVER__BASE_LR": 0.001}


@pytest.fixture
def train(opts, tmp_path):
    """Return `train(folder, KEY=value)`, which gives the last checkpoint and the losses."""

    def run(folder, *flags, **changes):
        main([*flags, *opts(folder, LOG__EVERY_ITERS=1, **changes)])
        return newest(tmp_path / folder), [line["loss"] for line in metrics(tmp_path / folder)]

    return run


@pytest.fixture
def forwards(monkeypatch):
    """Record `(model, x_q)` of each forward pass with a queue."""
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
    assert [line["lr"] for line in metrics(tmp_path / "scaled")] == pytest.approx(warm_up + decayed)


def test_skipped_files_of_training_and_knn_images_are_recorded(opts, tmp_path):
    data = write_labeled(tmp_path / "data")
    for split in ("train", "val"):
        (data / split / "red" / "more.heic").write_bytes(b"other")
    run = opts("run", SOLVER__MAX_ITERS=1, DATA__KNN_ROOT=data, KNN__K=2)
    main([*run, "DATA.ROOT", str(data / "train")])
    notes = read_record(tmp_path / "run" / RECORD_NAME).notes
    left = "left out by suffix: 1 file (.heic 1)"
    expected = [f"{data / split}: {left}" for split in ("train", "val")]
    assert [note for note in notes if "left out" in note] == expected


def test_symmetric_loss_is_the_sum_of_both_ways(train, monkeypatch):
    one_step = {"SOLVER__MAX_ITERS": 1, "MOCO__SHUFFLE_BN": False}
    _, (forth,) = train("forth", **one_step)
    state, (both,) = train("both", MOCO__SYMMETRIC=True, **one_step)
    assert state["state_dict"]["module.queue_ptr"].item() == 16  # 2 N keys
    monkeypatch.setattr("moco.pretraining.run.Pass", lambda query, key: Pass(1, 0))
    _, (back,) = train("back", **one_step)
    assert both == pytest.approx(forth + back, rel=1e-6)
    assert forth != back


def test_memory_bank_reads_one_view_and_keeps_one_entry_per_image(train, monkeypatch):
    requested, whole_batch = [], Views.__getitems__

    def spy(self, items):
        requested.extend(items)
        return whole_batch(self, items)

    monkeypatch.setattr(Views, "__getitems__", spy)
    state, _ = train("bank", SOLVER__MAX_ITERS=1, **BANK)
    assert len(requested) == 8 and {view for _, _, view in requested} == {0}
    assert state["state_dict"]["module.bank"].shape == (26, 16)


def test_deterministic_kernels_and_the_window_of_shards(train, monkeypatch):
    windows = []
    monkeypatch.setattr(
        "moco.pretraining.run.open_images",
        lambda *args: windows.append(args[2]) or open_images(*args),
    )
    try:
        train("run", DETERMINISTIC=True, DATA__SHARD_WINDOW=5, SOLVER__MAX_ITERS=1)
        assert torch.are_deterministic_algorithms_enabled() and windows == [5]
    finally:
        torch.use_deterministic_algorithms(False)


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


@pytest.mark.parametrize(("last", "precision"), [(True, "fp32"), (False, "fp32"), (True, "bf16")])
def test_channels_last_is_the_layout_of_images_and_weights(train, forwards, last, precision):
    train("run", SOLVER__CHANNELS_LAST=last, SOLVER__PRECISION=precision, SOLVER__MAX_ITERS=1)
    ((model, x_q),) = forwards
    kernels = {n: p for n, p in model.named_parameters() if p.ndim == 4 and p.shape[-1] > 1}
    if precision == "bf16":
        late = {name: kernels.pop(name) for name in list(kernels) if ".layer4." in name}
        assert late and all(x.is_contiguous() for x in late.values())  # tiny maps
    assert kernels
    for tensor in (x_q, *kernels.values()):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == last


@pytest.mark.parametrize("on", [True, False])
def test_each_encoder_is_compiled_by_its_key(train, forwards, monkeypatch, on):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    train("run", SOLVER__COMPILE=on, SOLVER__MAX_ITERS=1)
    ((model, _),) = forwards
    assert compiled == ([model.encoder_q, model.encoder_k] if on else [])


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ({}, [{"MOCO__SHUFFLE_BN": False}, {"MOCO__T": 0.07}, {"SEED": 1}]),
        (BANK, [{"MOCO__LOSS": "nce"}, {"SEED": 1}]),
    ],
)
def test_keys_change_the_loss_of_the_first_step(train, base, changes):
    runs = enumerate([{}, *changes])
    losses = [train(f"{n}", SOLVER__MAX_ITERS=1, **base | keys)[1][0] for n, keys in runs]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize(
    ("keys", "equal"),
    [
        ({"MOCO__M": 0.0}, True),
        ({"MOCO__M": 0.5}, False),
        ({"MOCO__MECHANISM": "end_to_end", "MOCO__K": 8, "MOCO__SHARED_ENCODER": True}, True),
        ({"MOCO__MECHANISM": "end_to_end", "MOCO__K": 8, "MOCO__SHARED_ENCODER": False}, False),
    ],
)
def test_when_the_key_encoder_is_the_query_encoder(train, keys, equal):
    weights = train("run", SOLVER__MAX_ITERS=1, **keys)[0]["state_dict"]
    q = weights["module.encoder_q.conv1.weight"]
    assert torch.equal(q, weights["module.encoder_k.conv1.weight"]) == equal


def test_the_patch_projection_stays_and_the_momentum_rises(train):
    """Frozen weights are not decayed either; with m = 1 at the end, key encoders do not change."""
    start, _ = train("start", **{**VIT, **V3, "SOLVER__BASE_LR": 0, "SOLVER__MAX_ITERS": 1})
    state, _ = train("run", SOLVER__MAX_ITERS=3, SOLVER__WEIGHT_DECAY=0.5, **VIT | V3)
    first, last = ({n.removeprefix("module."): x for n, x in s["state_dict"].items()}
                   for s in (start, state))  # fmt: skip
    for name in ("patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed"):
        for encoder in "qk":
            whole = f"encoder_{encoder}.{name}"
            assert torch.equal(first[whole], last[whole]), whole
    moved = "blocks.0.attn.qkv.weight"
    assert not torch.equal(first[f"encoder_q.{moved}"], last[f"encoder_q.{moved}"])
    assert {name.split(".")[0] for name in last} == {"encoder_q", "encoder_k", "predictor"}
    once, _ = train("once", SOLVER__MAX_ITERS=1, MOCO__M=0.0, **VIT | V3)
    weights = once["state_dict"]
    key, query = (weights[f"module.encoder_{e}.{moved}"] for e in "kq")
    assert torch.equal(key, first[f"encoder_k.{moved}"]) and not torch.equal(key, query)


@pytest.mark.parametrize("mlp", [False, True])
def test_heads_and_blocks_that_start_as_the_identity(train, mlp):
    keys = {"MODEL__ZERO_INIT_RESIDUAL": True, "SOLVER__BASE_LR": 0, "SOLVER__MAX_ITERS": 1}
    state = train("run", MOCO__MLP=mlp, **keys)[0]["state_dict"]
    names = {name for name in state if ".encoder_q.fc." in name}
    last = "fc.2" if mlp else "fc"
    assert f"module.encoder_q.{last}.weight" in names and len(names) == (4 if mlp else 2)
    for encoder in "qk":
        assert not state[f"module.encoder_{encoder}.layer1.0.bn2.weight"].any()
        assert state[f"module.encoder_{encoder}.layer1.0.bn1.weight"].all()


def test_steps_that_fp16_skips(train, tmp_path, capsys):
    """Skipped steps are counted across a stop, noted, and refused if they are most of the run."""
    with pytest.raises(Preempted):
        train("run", SOLVER__STOP_AT_ITERS=4, SOLVER__PRECISION="fp16")
    state, _ = train("run", "--resume", SOLVER__PRECISION="fp16")
    skipped = state["skipped_steps"]
    assert 0 < skipped == math.log2(2**16 / state["scaler"]["scale"])
    note = f"fp16: {skipped} of 8 steps were skipped, because a gradient overflowed"
    assert note in read_record(tmp_path / "run" / RECORD_NAME).notes
    assert f"note: {note}" in capsys.readouterr().out
    with pytest.raises(NumericError, match=r"[78] of 8 steps were skipped, .*; set bf16") as error:
        train("sharp", SOLVER__PRECISION="fp16", MOCO__T=0.001)
    assert error.value.exit_code == 4 and not (tmp_path / "sharp" / RECORD_NAME).exists()


@pytest.fixture
def fast(monkeypatch):
    """Return `fast(bool)`, which sets whether the CPU has instructions for bf16."""
    return lambda has: monkeypatch.setattr("moco.engine.training.has_fast_bf16", lambda device: has)


@pytest.mark.parametrize(("has", "chosen"), [(True, "bf16"), (False, "fp32")])
@pytest.mark.slow
def test_auto_is_recorded_as_its_choice_and_kept_on_another_cpu(
    train, fast, tmp_path, capsys, has, chosen
):
    fast(has)
    state, losses = train("auto", SOLVER__PRECISION="auto")
    assert f"precision {chosen}, channels_last" in capsys.readouterr().out
    for name, precision in (("explicit", chosen), ("other", "fp32" if has else "bf16")):
        same, again = train(name, SOLVER__PRECISION=precision, SOLVER__CHANNELS_LAST=True)
        equal = sha256_state(same["state_dict"]) == sha256_state(state["state_dict"])
        assert equal == (again == losses) == (name == "explicit")
    auto, explicit, other = (
        read_record(tmp_path / name / RECORD_NAME) for name in ("auto", "explicit", "other")
    )
    assert auto.config["SOLVER.PRECISION"] == chosen and auto.config["SOLVER.CHANNELS_LAST"] is True
    assert auto.config_sha256 == explicit.config_sha256 != other.config_sha256
    with pytest.raises(Preempted):
        train("stopped", SOLVER__STOP_AT_ITERS=4, SOLVER__PRECISION="auto")
    fast(not has)
    resumed, again = train("stopped", "--resume", SOLVER__PRECISION="auto")
    assert losses == again and resumed["config"]["SOLVER.PRECISION"] == chosen
    assert sha256_state(resumed["state_dict"]) == sha256_state(state["state_dict"])
    assert "warning: SOLVER.PRECISION" in capsys.readouterr().out
