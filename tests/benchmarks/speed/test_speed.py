"""The reference computes what ours computes; the command runs. No test looks at a time."""

import copy
import logging
from collections import Counter
from itertools import count

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.speed import __main__ as command
from benchmarks.speed import measure, pretrain, reference
from benchmarks.speed.measure import Timing, compare, insert, interleaved, row
from moco.common import distributed
from moco.common.errors import UserError
from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.modeling.shuffle_bn import exchange_plan, shuffle_plan, unshuffle
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


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_the_reference_loader_makes_two_normalized_views(tmp_path, kind):
    (tmp_path / "0").mkdir()
    for i in range(3):
        Image.new("RGB", (40, 30), (128, 128, 128)).save(tmp_path / "0" / f"{i}.jpg")
    batches = [x for x, _ in reference.loader(str(tmp_path), kind, batch=2)]
    assert [view.shape for view in batches[0]] == [(2, 3, 224, 224)] * 2
    assert len(batches) == 2
    names = [type(t).__name__ for t in reference.transform(kind).transforms]
    first = ["RandomResizedCrop", "RandomGrayscale", "ColorJitter"]
    if kind == "v2":
        first = ["RandomResizedCrop", "RandomApply", "RandomGrayscale", "RandomApply"]
    assert names == [*first, "RandomHorizontalFlip", "ToTensor", "Normalize"]


def shuffled_keys(
    encoder: nn.Module, x_k: Tensor, plan: Tensor, buffers: list[Tensor], received: Counter[str]
) -> Tensor:
    """The official code's keys (N, C) of one step on W processes, in the order of the queries.

    Args:
        x_k: this process's key views (n, 3, H, W) float32.
        plan: (N,) the first process's permutation.
        buffers: what DistributedDataParallel sends from the first process before each forward
            pass: queue, pointer, running statistics.
        received: bytes that reach this process, by what they are.
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
    """Bytes that reach this process for one step's keys by way, and whether they are official."""
    rank, W = distributed.rank(), distributed.world_size()
    torch.manual_seed(0)
    encoder = nn.Sequential(  # BN, so that keys depend on their neighbors
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
            distributed.bytes_received.clear()
            if way == "index":
                x = crops[plan[mine]]  # the loader's part: these are the views it makes
            else:
                x = distributed.exchange_rows(crops[mine], *exchange_plan(plan, rank, W))
            keys = distributed.gather_rows(copy.deepcopy(encoder)(x / 255))
            equal[way] = torch.equal(unshuffle(keys, plan), expected)
            found[way] = distributed.bytes_received.total()
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


@pytest.mark.slow
def test_the_recipes_keys_take_a_five_hundredth_of_the_official_bytes():
    """32 images of 224 px on each of two processes, keys of 128 numbers, a queue of 65536."""
    found = [received for received, _ in run_on(2, encode_keys, 32, 224, 128, 65536)]
    official, ours = (sum(each[way] for each in found) for way in ("official", "index"))
    assert official >= 500 * ours


def test_sides_are_timed_in_turn(monkeypatch):
    calls, clock = [], count()
    monkeypatch.setattr(measure.time, "process_time", lambda: next(clock))
    sides = interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, 2)
    assert calls == [*"ababab"]  # the first ones are not timed
    assert sides == {"a": Timing(1, 0.0), "b": Timing(1, 0.0)}


@pytest.mark.parametrize(
    "given, cells",
    [
        ({"ours": 1e-3, "goal": 3.0}, ("1 ms", "3 ms, them", "3 x", ">= 3 x", "yes")),
        ({"ours": 1.01e-3, "goal": 3.0}, ("1.01 ms", "3 ms, them", "2.97 x", ">= 3 x", "no")),
        ({"ours": 1e-3}, ("1 ms", "3 ms, them", "3 x", "", "-")),
        (
            {"ours": 3e-3, "goal": 1.0, "kind": "share", "unit": "MiB"},
            ("0.003 MiB", "0.003 MiB, them", "1.000 of it", "<= 1", "yes"),
        ),
        (
            {"ours": 2e-6, "goal": 1e-6, "kind": "error", "unit": ""},
            ("2.0e-06", "3.0e-03, them", "2.0e-06", "<= 1e-06", "no"),
        ),
    ],
)
def test_a_row_says_whether_its_goal_is_met(given, cells):
    assert row("it", reference=3e-3, against="them", **given) == ("it", *cells)


def test_the_noise_is_that_of_the_noisier_side():
    sides = {"ours": Timing(1.0, 0.5), "official code": Timing(2.0, 0.1)}
    assert compare("it", sides)[3] == "2 x (50.0%)"


def test_a_later_measurement_takes_the_place_of_its_part_alone():
    page = insert("prose\n<!-- a -->\nold\n<!-- end of a -->\nmore\n", "a", "new")
    assert page == "prose\n<!-- a -->\n\nnew\n\n<!-- end of a -->\nmore\n"
    page = insert(page, "a b", "other")  # appended
    assert insert(page, "a", "new") == page and page.endswith("other\n\n<!-- end of a b -->\n")


@pytest.mark.parametrize(
    "argv, what",
    [
        (["pretrain", "--goals", "loss,momentum,grouped_bn"], "BN in 8 groups"),
        pytest.param(["pretrain", "--goals", "step"], "resnet18", marks=pytest.mark.slow),
        pytest.param(["input"], "4 files, in the mean 640 x 480 px", marks=pytest.mark.slow),
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


@pytest.mark.slow
@pytest.mark.detectron2
def test_command_measures_detection(detectron2, capsys, monkeypatch):
    # `DefaultTrainer` gives its logger a handler that writes to what capsys closes afterwards.
    monkeypatch.setattr(logging.getLogger("detectron2"), "handlers", [])
    monkeypatch.setattr("detection.config.engines.detectron2_installed", lambda: True)
    command.main(["detection", "--quick"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    for what, number in (("first batch", 1), ("memory", 1), ("training iteration", 4)):
        assert sum(line.startswith(f"| {what}") for line in rows) == number
    mib = [float(line.split("|")[2].split()[0]) for line in rows if "memory" in line]
    assert all(100 < each < 2000 for each in mib)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["pretrain", "--goals", "loss,C2"], "--goals: got 'C2', choices are loss, step, "),
        (["pretrain", "--rounds", "4"], "--rounds: got 4"),
        (["gpu"], "no GPU here"),
        (["detection"], "needs Detectron2"),
    ],
)
def test_mistakes_on_the_command_line(argv, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("detection.config.engines.detectron2_installed", lambda: False)
    with pytest.raises(UserError, match=message):
        command.main(argv)
