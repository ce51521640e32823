"""Speed benchmarks: the reference implementation equals ours, and the quick suites run."""

import copy
import json
from collections import Counter

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.speed import __main__ as command
from benchmarks.speed import branches, detection, gpu, peers, pretrain, reference
from benchmarks.speed.measure import ROOT, Row, measurement
from moco.common import distributed
from moco.common.errors import UserError
from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.modeling.shuffle_bn import exchange_plan, shuffle_plan, unshuffle
from tests.oracles import traffic
from tests.oracles.processes import run_on


def test_the_measured_step_trains_as_the_reference(monkeypatch):
    """Losses, queries' gradients and weights, keys' weights one update later, queue."""
    for name, value in (("DIM", 6), ("M", 0.9), ("T", 0.2), ("LR", 0.1)):
        monkeypatch.setattr(pretrain, name, value)
    torch.manual_seed(0)
    spec = EncoderSpec("resnet10", "stride2", 0.125)
    encoder = build_encoder(spec, pretrain.DIM, mlp=False).double()
    ours = pretrain.OurStep(copy.deepcopy(encoder), 12)
    model = ours.model.double()
    constants = pretrain.M, pretrain.T, pretrain.LR
    official = reference.Step(encoder, model.queue.clone(), *constants)
    for _ in range(5):
        x_q, x_k = torch.randn(2, 4, 3, 8, 8, dtype=torch.float64)
        plan = torch.randperm(4)
        before = copy.deepcopy(model.encoder_k)
        loss = ours(x_q, x_k, plan)
        assert official(x_q, x_k, plan).item() == pytest.approx(loss.item(), rel=1e-10)
        for mine, theirs in ((model.encoder_q, official.encoder_q), (before, official.encoder_k)):
            for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
                if a.grad is not None:
                    torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10)
        torch.testing.assert_close(model.queue, official.queue, rtol=0, atol=1e-10)
        assert torch.equal(model.queue_ptr, official.pointer)


def shuffled_keys(
    encoder: nn.Module, x_k: Tensor, plan: Tensor, buffers: list[Tensor], received: Counter[str]
) -> Tensor:
    """Compute the official code's keys (N, C) of one step on W processes, in the queries' order.

    Args:
        encoder: Key encoder.
        x_k: Key views (n, 3, H, W) of this process, float32.
        plan: Permutation (N,) of the first process.
        buffers: Tensors that DistributedDataParallel sends from the first process before each
            forward pass: queue, pointer, running statistics.
        received: Counter of the bytes that reach this process, by kind.
    """
    rank, W = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name, tensors in (("buffers", buffers), ("permutation", [plan])):
        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0)
            received[name] += tensor.nbytes if rank else 0
    images = _all_gather(x_k, "images", received)
    k = encoder(images[plan.view(W, -1)[rank]])
    k = _all_gather(k, "keys", received)[torch.argsort(plan).view(W, -1)[rank]]
    return _all_gather(k, "keys", received)


def _all_gather(x: Tensor, name: str, received: Counter[str]) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, x.contiguous())
    received[name] += (len(parts) - 1) * x.nbytes
    return torch.cat(parts)


def encode_keys(n: int, P: int, dim: int, K: int) -> tuple[dict[str, int], dict[str, bool]]:
    """Return by way of shuffling the received bytes, and whether the keys are the official ones."""
    rank, W = distributed.rank(), distributed.world_size()
    torch.manual_seed(0)
    encoder = nn.Sequential(  # with BN, keys depend on their batch
        nn.Conv2d(3, 8, 7, stride=4),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, dim),
    )
    crops = torch.randint(0, 256, (W * n, 3, P, P), dtype=torch.uint8)
    queue, plan = torch.randn(dim, K), shuffle_plan(W * n, W, seed=0, step=0)
    mine = slice(rank * n, (rank + 1) * n)
    buffers = [queue, torch.zeros(1, dtype=torch.long), *encoder.buffers()]
    received: Counter[str] = Counter()
    with torch.no_grad():
        expected = shuffled_keys(
            copy.deepcopy(encoder), crops[mine] / 255, plan.clone(), buffers, received
        )
        found, equal = {"official": received.total()}, {}
        for way in ("index", "all_to_all"):
            with traffic.received() as counts:
                if way == "index":
                    x = crops[plan[mine]]  # the loader makes the views in this order
                else:
                    x = distributed.exchange_rows(crops[mine], *exchange_plan(plan, rank, W))
                keys = distributed.gather_rows(copy.deepcopy(encoder)(x / 255))
            equal[way] = torch.equal(unshuffle(keys, plan), expected)
            found[way] = counts.total()
    return found, equal


@pytest.mark.slow
def test_shuffled_keys_and_bytes_of_two_processes_by_hand():
    """Two images of 8 x 8 pixels on each, keys of 4 numbers, a queue of 16."""
    found = run_on(2, encode_keys, 2, 8, 4, 16)
    assert [equal for _, equal in found] == [{"index": True, "all_to_all": True}] * 2
    received = {way: sum(each[way] for each, _ in found) / 2 for way in found[0][0]}
    image, keys = 3 * 8 * 8, 2 * 4 * 4
    statistics = 4 * (8 + 8) + 8  # BN's means and variances, and its counter
    sent_by_first = 4 * 16 * 4 + 8 + statistics + 8 * 4  # queue, pointer, BN, permutation
    assert received["official"] == 2 * image * 4 + 2 * keys + sent_by_first / 2
    assert received["index"] == keys
    plan = shuffle_plan(4, 2, seed=0, step=0).view(2, 2)
    moved = sum(int((plan[rank] // 2 != rank).sum()) for rank in range(2))
    assert moved and received["all_to_all"] == keys + moved / 2 * image


@pytest.mark.parametrize(
    "argv, what",
    [
        (["pretrain", "--goals", "loss,momentum,grouped_bn"], "BN in 8 groups"),
        pytest.param(["pretrain", "--goals", "step"], "resnet18", marks=pytest.mark.slow),
        (["input", "--images", "."], "1 files, in the mean 64 x 48 px"),
    ],
)
def test_command_runs(argv, what, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 48), (200, 100, 50)).save("a.jpg")
    command.main([*argv, "--quick", "--output", "speed.md"])
    shown, written = capsys.readouterr().out, (tmp_path / "speed.md").read_text()
    assert what in shown and what in written and "revision" in written
    goals = f" {argv[2]}" if "--goals" in argv else ""
    assert written.strip().startswith(f"<!-- {argv[0]}{goals} -->")


def test_gpu_checks_run_on_the_cpu(tmp_path):
    checks = branches.checks("cpu", tmp_path)
    quick = [name for name in checks if "loss" not in name]  # the others start commands
    assert len(quick) == 2 and all(checks[name][1]() == 0.0 for name in quick)


@pytest.mark.slow
def test_torchvisions_loop_trains(tmp_path):
    """On the pretended GPU or in fp16 on a CPU it would take minutes."""
    split = detection.Generated("compared", tmp_path, 4, (64, 48)).read()
    numbers = len(split.classes), 2, 48, 4, 0  # batch, pixels, regions, workers
    step = peers.TorchvisionStep(split.records, *numbers, "cpu", amp=False)
    before = {name: x.clone() for name, x in step._model.named_parameters()}
    assert all(0 < step() < 100 for _ in range(2))
    after = dict(step._model.named_parameters())
    assert all(not torch.equal(after[name], x) for name, x in before.items() if "bbox" in name)


@pytest.mark.parametrize(
    ("row", "value", "met", "measured"),
    [
        (Row("a", 2.0, 6.0, goal=3), 3.0, True, "3 x"),
        (Row("a", 4.0, 3.0, goal=0.8, kind="floor"), 0.75, False, "75.0% of its speed"),
        (Row("a", 3.0, 4.0, goal=0.8, kind="share"), 0.75, True, "0.750 of it"),
        (Row("a", 0.5, 0.0, goal=0.1, kind="error", unit=""), 0.5, False, "5.0e-01"),
        (Row("a", 2.0, 6.0, noise=0.25), 3.0, None, "3 x (25.0%)"),
    ],
)
def test_a_row_is_compared_with_its_goal(row, value, met, measured):
    assert (row.value, row.met, row.cells()[3]) == (value, met, measured)


def test_a_published_command_names_no_folder_of_the_machine(tmp_path):
    words = ["cached", "--images", str(tmp_path / "raccoon"), "--output", "docs/rank.md"]
    found = measurement([], words, rounds=1, seconds=2.0)
    assert found["command"] == ("moco-transfer speed cached --images raccoon --output docs/rank.md")


def test_traffic_counts_what_operations_read_and_write():
    x, y = torch.ones(4, 5), torch.ones(5)
    with gpu.Traffic() as traffic:
        (x.T.T + y).sum()  # reads 80 and 20 bytes, writes 80; reads 80, writes 4
    assert traffic.bytes == 264


def test_a_case_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    def fails(setting):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(pretrain.CASES, "momentum", fails)
    file = tmp_path / "speed.json"
    argv = ["pretrain", "--quick", "--goals", "momentum,grouped_bn", "--json", str(file)]
    with pytest.raises(UserError, match="failed, see above: momentum"):
        command.main(argv)
    assert "no such kernel" in capsys.readouterr().err
    assert len(json.loads(file.read_text())["rows"]) == 2


@pytest.mark.parametrize("file", sorted((ROOT / "results" / "speed").glob("*.json")), ids=str)
def test_a_measured_file_is_consistent_and_in_the_page(file):
    page = (ROOT / "docs" / "speed.md").read_text()
    for found in json.loads(file.read_text()):
        assert found["rows"] and f"GPU {found['hardware']['gpus'][0]}" in page
        for line in found["rows"]:
            row = Row(**{name: line[name] for name in Row._fields})
            assert (row.value, row.met) == (line["value"], line["met"])
            assert all(cell in page for cell in row.cells())
