"""Several gloo processes on this machine: collectives, and mechanisms equal to one process."""

import json
import os
from pathlib import Path

import pytest
import torch

from moco.common import distributed
from moco.common.errors import UserError
from moco.engine.checkpoint import list_checkpoints, load_checkpoint
from moco.modeling.archs import EncoderSpec, ViTSpec
from moco.modeling.encoder import build_encoder
from moco.modeling.mechanisms.end_to_end import EndToEnd
from moco.modeling.mechanisms.memory_bank import MemoryBank
from moco.modeling.mechanisms.moco_v3 import MoCoV3
from moco.modeling.mechanisms.momentum_queue import MomentumQueue
from moco.modeling.shuffle_bn import exchange_plan, shuffle_plan
from tests.moco.commands import pretrain as main
from tests.oracles.connection import gloo_threads
from tests.oracles.processes import run_on
from tests.oracles.traffic import received
from tests.oracles.training import train_step

pytestmark = pytest.mark.slow  # starts processes

N, G, M, STEPS = 16, 4, 30, 4  # 4 groups of 4, on 1, 2 or 4 processes
MECHANISMS = (
    "queue", "queue_unshuffled", "end_to_end", "two_encoders", "bank", "bank_nce", "moco_v3",
    "moco_v3_vit",
)  # fmt: skip


def collectives():
    r, W = distributed.rank(), distributed.world_size()
    row = torch.full((2, 3), float(r), requires_grad=True)
    gathered = distributed.gather_rows_with_gradient(row)
    ((r + 1) * gathered).sum().backward()
    plan = shuffle_plan(4 * W, 2 * W, seed=0, step=0)
    mine = torch.arange(4 * r, 4 * r + 4, dtype=torch.uint8)[:, None]
    with received() as counts:
        exchanged = distributed.exchange_rows(mine, *exchange_plan(plan, r, W))
    distributed.check_equal(7, "seven")
    with pytest.raises(UserError, match=rf"rank: the processes do not agree \(from 0 to {W - 1}\)"):
        distributed.check_equal(r, "rank")
    return {
        "gathered": gathered[:, 0].tolist(),
        "same": torch.equal(gathered.detach(), distributed.gather_rows(row)),
        "gradient": row.grad[0, 0].item(),
        "exchanged": exchanged[:, 0].tolist(),
        "wanted": plan[4 * r : 4 * r + 4].tolist(),
        "bytes": counts["exchange"],
        "foreign": int((plan[4 * r : 4 * r + 4] // 4 != r).sum()),
        "mean": distributed.mean_over_ranks(torch.tensor(float(r))).item(),
        "highest": distributed.max_over_ranks(10 - r),
    }


@pytest.mark.parametrize("W", [2, 4])
def test_collectives(W):
    for got in run_on(W, collectives):
        assert got["gathered"] == [float(r) for r in range(W) for _ in range(2)] and got["same"]
        assert got["gradient"] == sum(range(1, W + 1))  # summed over all processes' losses
        assert got["exchanged"] == got["wanted"]
        assert got["bytes"] == got["foreign"]  # one byte per row that moves
        assert (got["mean"], got["highest"]) == ((W - 1) / 2, 10)


def test_one_process_returns_its_input():
    x = torch.ones(3, requires_grad=True)
    assert distributed.gather_rows_with_gradient(x) is x
    assert not distributed.gather_rows(x).requires_grad
    assert (distributed.rank(), distributed.world_size(), distributed.max_over_ranks(3)) == (
        0,
        1,
        3,
    )
    model = torch.nn.Linear(1, 1)
    assert distributed.data_parallel(model) is model


def build(name):
    """Build a mechanism with this process's share of the G groups and the same weights."""
    torch.manual_seed(0)
    spec = EncoderSpec("resnet10", "stride2", 0.125)
    if name.startswith("moco_v3"):
        vit = name.endswith("vit")
        together = int(distributed.world_size() == 1)  # 0: BN of all processes' batch
        encoder = build_encoder(ViTSpec("vit_micro", 16) if vit else spec, 8, False, together)
        return MoCoV3(encoder, 8, 16, 0.9, 0.2, 3 if vit else 2, predictor_norm=vit).double()
    encoder = build_encoder(spec, 8, False, G // distributed.world_size())
    if name.startswith("queue"):
        return MomentumQueue(encoder, 8, K=20, m=0.9, T=0.2).double()
    if name.startswith("bank"):
        loss = "nce" if name == "bank_nce" else "info_nce"
        return MemoryBank(encoder, 8, M, 6, 0.5, 0.2, loss).double()
    return EndToEnd(encoder, T=0.2, shared=name == "end_to_end").double()


def train():
    """Train each mechanism; return mean losses and the state after the last step."""
    results = {}
    for name in MECHANISMS:
        model = build(name)
        parallel = distributed.data_parallel(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.02, momentum=0.9)
        losses = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            views = torch.randn(2, N, 3, 16, 16, dtype=torch.float64, generator=generator)
            images = torch.randperm(M, generator=generator)[:N].tolist()
            keys = views[1] if model.needs_key_view else views[1, :0]
            plan = shuffle_plan(N, G, seed=0, step=step)
            if name == "queue_unshuffled" or not model.needs_key_view:
                plan = None
            out = train_step(model, optimizer, views[0], keys, plan, images, step, parallel)
            losses.append(distributed.mean_over_ranks(out.loss).item())
        state = model.gathered_state()
        results[name] = losses, {k: v for k, v in state.items() if "running" not in k}
    return results


def test_processes_train_as_one():
    """Batch, BN groups, shuffle and dictionary are the same, so the results must be equal."""
    one = train()
    for W in (2, 4):
        for several in run_on(W, train):
            for name in MECHANISMS:
                assert several[name][0] == pytest.approx(one[name][0], rel=1e-9), name
                for key, value in one[name][1].items():
                    torch.testing.assert_close(several[name][1][key], value, rtol=0, atol=1e-8)


def batch_companions():
    """Return the images that BN sees together in the two encoders, as observed.

    All pixels of an image have its number as value, so the input shows a group's images.
    """
    model = build("queue")
    seen = {}
    for name in ("encoder_q", "encoder_k"):
        encoder = getattr(model, name)
        encoder.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.update({name: inputs[0][:, 0, 0, 0]})
        )
    x = torch.arange(N, dtype=torch.float64)[:, None, None, None].expand(N, 3, 16, 16)
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.0)
    train_step(model, optimizer, x, x, shuffle_plan(N, G, seed=0, step=0))
    groups = G // distributed.world_size()
    return {
        name: [frozenset(group.int().tolist()) for group in order.chunk(groups)]
        for name, order in seen.items()
    }


@pytest.mark.parametrize("W", [1, 2])
def test_a_key_is_normalized_with_other_images_than_its_query(W):
    of_processes = [batch_companions()] if W == 1 else run_on(W, batch_companions)
    queries, keys = (
        {n: group for one in of_processes for group in one[name] for n in group}
        for name in ("encoder_q", "encoder_k")
    )
    assert queries.keys() == keys.keys() == set(range(N))
    assert all(len(group) == N // G for group in (*queries.values(), *keys.values()))
    assert all(queries[n] != keys[n] for n in range(N))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_of_the_connection_outlives_it(fails):
    """A thread that frees a tensor while the interpreter exits would abort the process."""
    for connected, afterwards in run_on(2, gloo_threads, fails, connect=False, fresh=True):
        assert connected and not afterwards


def command(opts):
    with received() as counts:
        main(opts)
    return dict(counts)


@pytest.fixture(scope="module")
def runs(images, tiny, tmp_path_factory):
    """Run the same training on one process, in parts, and on several processes."""
    folder = tmp_path_factory.mktemp("runs")

    keys = {"BATCH_SIZE": 16, "BASE_LR": 0.01, "MAX_ITERS": 4}
    common = {f"SOLVER__{key}": value for key, value in keys.items()}
    common |= {"LOG__EVERY_ITERS": 1, "MOCO__BN_SPLITS": 4, "AUG__CROP_PX": 32}

    def opts(name, **changes):
        return tiny(DATA__ROOT=images, OUTPUT_DIR=folder / name, **{**common, **changes})

    main(opts("one"))
    main(opts("parts", SOLVER__ACCUMULATE=2))
    # Two passes of two parts: four backward passes per step, one exchange of gradients.
    both_ways = {"MOCO__SYMMETRIC": True, "MOCO__K": 40, "SOLVER__ACCUMULATE": 2}
    main(opts("one_both_ways", **both_ways))
    ways = (2, "index", "index"), (2, "all_to_all", "all_to_all"), (4, "four", "index")
    bytes_of = {
        name: run_on(W, command, opts(name, MOCO__SHUFFLE_BY=by), connect=False)
        for W, name, by in ways
    }
    run_on(2, command, opts("both_ways", **both_ways), connect=False)
    # After one step, before rounding in float32 has changed the sign at any ReLU.
    v3 = {"MOCO__MECHANISM": "moco_v3", "MOCO__K": 16, "MOCO__BN_SPLITS": 1, "AUG__KIND": "v3"}
    v3 |= {"MOCO__SYMMETRIC": True, "MOCO__MLP_DIM": 32, "SOLVER__MAX_ITERS": 1}
    main(opts("one_v3", **v3))
    run_on(2, command, opts("v3", **v3), connect=False)
    return folder, bytes_of


def losses(folder):
    lines = (folder / "metrics.json").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def last_state(folder):
    return load_checkpoint(list_checkpoints(folder)[-1])["state_dict"]


@pytest.mark.parametrize("name", ["parts", "index", "all_to_all", "four", "both_ways", "v3"])
def test_the_command_on_several_processes_or_in_parts_is_one_run(runs, name):
    """Equal up to rounding in float32; moco_v3, whose BN sees the whole batch, also has BN's."""
    folder, _ = runs
    reference = folder / {"both_ways": "one_both_ways", "v3": "one_v3"}.get(name, "one")
    tolerance = 1e-5 if name == "v3" else 1e-4
    assert losses(folder / name) == pytest.approx(losses(reference), abs=tolerance)
    one, other = last_state(reference), last_state(folder / name)
    for key, value in one.items():
        if name in ("parts", "both_ways") and ("running" in key or "tracked" in key):
            continue  # two updates per step from half the groups each, not one from all
        atol = 5e-5 if name == "v3" else 1e-3
        torch.testing.assert_close(other[key], value, rtol=0, atol=atol, msg=key)


def test_both_ways_to_shuffle_are_bitwise_identical_and_the_bytes_that_they_move(runs):
    """Shuffling by index sends only keys, N x C floats per step; all-to-all also 8-bit crops."""
    folder, bytes_of = runs
    index, exchanged = last_state(folder / "index"), last_state(folder / "all_to_all")
    assert all(torch.equal(index[key], exchanged[key]) for key in index)
    steps, n, dim, crop, statistics = 4, 8, 16, 3 * 32 * 32, 1440
    for by_index in bytes_of["index"]:
        assert "exchange" not in by_index
        # Each of the steps ends an epoch, after which the statistics of BN are gathered and saved.
        assert by_index["gather"] == steps * (n * dim + statistics) * 4
    for exchanged in bytes_of["all_to_all"]:
        assert 0 < exchanged["exchange"] <= steps * n * (crop + 8 * 4)
        assert exchanged["exchange"] % (crop + 8 * 4) == 0


def test_only_torchruns_children_follow_their_parent(monkeypatch):
    """A run started by a shell with nohup continues after the shell has exited."""
    monkeypatch.setattr(distributed, "_LAUNCHER", os.getppid() + 1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not distributed.launcher_died()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert distributed.launcher_died()
    monkeypatch.setattr(distributed, "_LAUNCHER", os.getppid())
    assert not distributed.launcher_died()
