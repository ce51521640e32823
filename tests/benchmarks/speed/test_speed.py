"""The reference computes what ours computes; the command runs. No test looks at a time."""

import contextlib
import copy
import io
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from benchmarks.speed import __main__ as command
from benchmarks.speed import convert, detection, pretrain, reference, scaling
from benchmarks.speed.measure import interleaved
from benchmarks.speed.report import (
    HEAD,
    Row,
    at_least,
    at_most,
    faster,
    markdown,
    text,
    with_section,
)
from benchmarks.speed.shuffle import received_bytes
from moco.common.errors import UserError
from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.modeling.loss import info_nce
from moco.modeling.mechanisms.base import KeyBatch
from moco.modeling.mechanisms.momentum_queue import MomentumQueue
from moco.modeling.shuffle_bn import shuffle_plan

C, K, M, T, LR = 6, 12, 0.9, 0.2, 0.1


def small_encoder():
    torch.manual_seed(0)
    return build_encoder(EncoderSpec("resnet10", "stride2", 0.125), C, mlp=False).double()


def views(step, N=4):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2, N, 3, 8, 8, dtype=torch.float64, generator=generator)
    return x[0], x[1], torch.randperm(N, generator=generator)


def test_the_reference_step_trains_as_ours():
    """Losses, queries' gradients and weights, keys' weights one update later, queue."""
    ours = MomentumQueue(small_encoder(), C, K, M, T).double()
    official = reference.Step(small_encoder(), ours.queue.clone(), M, T, LR)
    sgd = {"momentum": 0.9, "weight_decay": 1e-4}
    optimizer = torch.optim.SGD(ours.encoder_q.parameters(), LR, **sgd)
    for step in range(5):
        x_q, x_k, plan = views(step)
        images = torch.arange(4)
        before = copy.deepcopy(ours.encoder_k)
        dictionary = ours.dictionary(KeyBatch(x_k[plan], plan, images, step))
        out = ours(x_q, dictionary)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        ours.update([dictionary], [out.queries], images)
        assert official(x_q, x_k, plan).item() == pytest.approx(out.loss.item(), rel=1e-10)
        for mine, theirs in ((ours.encoder_q, official.encoder_q), (before, official.encoder_k)):
            for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
                if a.grad is not None:
                    torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10)
        torch.testing.assert_close(ours.queue, official.queue, rtol=0, atol=1e-10)
        assert torch.equal(ours.queue_ptr, official.pointer)


def test_the_measured_step_is_the_trained_one():
    """OurStep against the reference, in float32, in another memory layout."""
    torch.manual_seed(0)
    encoder = build_encoder(EncoderSpec("resnet10", "stride2", 0.125), pretrain.DIM, mlp=False)
    ours = pretrain.OurStep(copy.deepcopy(encoder), 8, None)
    settings = (pretrain.M, pretrain.T, pretrain.LR)
    official = reference.Step(encoder, ours.model.queue.clone(), *settings)
    for step in range(2):
        x_q, x_k, plan = views(step)
        loss = ours(x_q.float(), x_k.float(), plan)
        assert official(x_q.float(), x_k.float(), plan).item() == pytest.approx(
            loss.item(), rel=1e-4
        )
        torch.testing.assert_close(ours.model.queue, official.queue, rtol=0, atol=1e-4)


def test_the_reference_loss_is_ours():
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(5, C, dtype=torch.float64), dim=1) for _ in range(2))
    k[:2] = q[:2]
    queue = F.normalize(torch.randn(C, 20, dtype=torch.float64), dim=0)
    results = []
    for loss in (reference.loss_and_accuracy, info_nce):
        wanting = q.clone().requires_grad_()
        value, accuracy, *_ = loss(wanting, k, queue, T)
        value.backward()
        results.append((value.detach(), accuracy, wanting.grad))
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_the_reference_momentum_update_by_hand():
    q, k = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for layer, value in ((q, 1.0), (k, 3.0)):
        for p in layer.parameters():
            p.data.fill_(value)
    reference.momentum_update(k, q, 0.75)
    assert [p.item() for p in k.parameters()] == [2.5, 2.5]
    assert [p.item() for p in q.parameters()] == [1, 1]


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


def test_bytes_of_two_processes_by_hand(tmp_path):
    """Two processes of two images of 8 x 8 pixels, keys of 4 numbers, a queue of 16."""
    found = received_bytes(2, 2, 8, 4, 16, tmp_path)
    assert found.equal == {"official": True, "index": True, "all_to_all": True}
    image, keys = 3 * 8 * 8, 2 * 4 * 4
    statistics = 4 * (8 + 8) + 8  # BN's means and variances, and its counter
    sent_by_first = 4 * 16 * 4 + 8 + statistics + 8 * 4  # queue, pointer, BN, permutation
    assert found.bytes["official"] == 2 * image * 4 + 2 * keys + sent_by_first / 2
    assert found.bytes["index"] == keys
    # The formula on paper, but for what only the second process receives.
    model = scaling.Model(0, key_bytes=4 * 4, image_bytes=4 * image, buffer_bytes=0)
    assert scaling.exchanged_bytes(False, 2, 2, model) == found.bytes["index"]
    official = scaling.exchanged_bytes(True, 2, 2, model)
    assert official == found.bytes["official"] - sent_by_first / 2
    plan = shuffle_plan(4, 2, seed=0, step=0).view(2, 2)
    moved = sum(int((plan[rank] // 2 != rank).sum()) for rank in range(2))
    assert moved and found.bytes["all_to_all"] == keys + moved / 2 * image


def test_scaling_by_hand():
    """100 images/s, 1 kB/s: 10 images take 0.1 s, keys 9.. bytes, no gradients."""
    machine = scaling.Machine(100, 1000, latency_seconds=0.0, backward_share=0.5)
    model = scaling.Model(gradient_bytes=0, key_bytes=2, image_bytes=7, buffer_bytes=30)
    assert scaling.exchanged_bytes(False, 2, 10, model) == 20
    assert scaling.exchanged_bytes(True, 2, 10, model) == 70 + 40 + 30
    assert scaling.efficiency(False, 2, 10, machine, model) == pytest.approx(0.1 / 0.12)
    assert scaling.efficiency(True, 2, 10, machine, model) == pytest.approx(0.1 / 0.24)
    # 100 bytes of gradients take 0.1 s beside the backward pass of 0.05 s.
    busy = scaling.Model(gradient_bytes=100, key_bytes=0)
    assert scaling.efficiency(False, 2, 10, machine, busy) == pytest.approx(0.1 / 0.15)


def test_papers_goal_of_scaling():
    machine, model = scaling.Machine(), scaling.Model()
    assert scaling.efficiency(False, 64, 64, machine, model) >= 0.9
    assert scaling.efficiency(True, 64, 16, machine, model) <= 0.3


def test_interleaved_calls_each_side_in_turn():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "ab"}
    assert set(interleaved(contenders, rounds=2)) == {"a", "b"}
    assert "".join(calls) == "ababab"


def test_rows_say_whether_the_goal_is_met():
    assert faster("C1", "x", {"a": 3.0, "b": 1.0}, "a", "b", 3).met is True
    assert faster("C1", "x", {"a": 2.9, "b": 1.0}, "a", "b", 3).met is False
    assert faster("", "x", {"a": 2.9, "b": 1.0}, "a", "b", 0).met is None
    assert [at_most("", "", s, 0.05, "", "").met for s in (0.04, 0.06)] == [True, False]
    assert [at_least("", "", s, 0.55, "", "").met for s in (0.6, 0.5)] == [True, False]


def test_tables_render():
    rows = [Row("C1", "two views", "1 ms", "3 ms", "3.00x", ">= 3x", True), Row("G3", "no GPU")]
    rows.append(Row("C9", "slow", met=False, note="because"))
    assert "| C1     | two views" in text(rows) and text(rows).endswith("C9: because")
    page = markdown("Walking", "\nHow fast.\n", rows, ["a machine"], quick=False)
    assert page.startswith("## Walking\n\nHow fast.\n\n- a machine\n\n| goal")
    assert "- a machine" in page and "| yes   |" in page and page.endswith("- C9: because\n")
    assert "smoke test" not in page and "smoke test" in markdown("", "", rows, [], quick=True)


def test_a_section_takes_the_place_of_its_title_alone():
    page = with_section("", "## B\n\none\n")
    assert page == f"{HEAD}\n## B\n\none\n"
    page = with_section(page, "## A\n\n### not a section\n\ntwo\n")
    assert with_section(page, "## B\n\nthree\n") == page.replace("one", "three")
    assert with_section(page, "## A\n\nfour\n") == f"{HEAD}\n## B\n\none\n\n## A\n\nfour\n"


def test_the_report_has_the_sections_of_all_suites_and_nothing_else():
    page = (Path(__file__).parents[3] / "docs" / "speed.md").read_text()
    titles = [line for line in page.splitlines() if line.startswith("#")]
    suites = (pretrain, convert, detection)
    assert titles == ["# Speed", *(f"## {suite.TITLE}" for suite in suites)]
    assert all(suite.ABOUT.strip() in page for suite in suites)


def test_command_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightly", None)  # not installed
    page = tmp_path / "speed.md"
    goals = "C1,C3,C4,C5,C6,C7,C10,BN,G4"
    command.main(["pretrain", "--quick", "--goals", goals, "--output", str(page)])
    shown = capsys.readouterr().out
    written = page.read_text()
    for goal in goals.split(","):
        assert f"| {goal} " in shown and f"| {goal} " in written
    assert "4 JPEG files, in the mean 500 x 375 pixels" in written
    assert "lightly is not installed" in written
    assert "smoke test" in written


def test_command_measures_conversions(tmp_path, capsys, monkeypatch):
    """The programs of its processes run here, because each import of torch takes seconds."""

    def run(program, source, target):
        monkeypatch.setattr(sys, "argv", ["-c", str(source), str(target)])
        monkeypatch.setitem(sys.modules, "detectron2", None)
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(program, {})
        assert target.stat().st_size > 100_000
        return shown.getvalue()

    monkeypatch.setattr(convert, "_run", run)
    monkeypatch.setattr(convert, "children_seconds", convert.wall_seconds)
    page = tmp_path / "speed.md"
    command.main(["convert", "--quick", "--goals", "V1,V2,V4", "--output", str(page)])
    shown = capsys.readouterr().out
    assert "convert and verify torchvision" in shown
    assert page.read_text().count("| V4") == 6 and "smoke test" in page.read_text()
    assert "of a narrow ResNet-50: torchvision " in page.read_text()


def test_own_images(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    Image.new("RGB", (64, 48), (200, 100, 50)).save(tmp_path / "mine" / "a.jpg")
    page = tmp_path / "speed.md"
    command.main(
        ["pretrain", "--quick", "--goals", "C3", "--images", str(tmp_path), "--output", str(page)]
    )
    assert "1 JPEG files, in the mean 64 x 48 pixels" in page.read_text()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["pretrain", "--goals", "C1,C2"], "--goals: got 'C2', choices are C6, "),
        (["convert", "--goals", "V1,C1"], "--goals: got 'C1', choices are V1, "),
        (["pretrain", "--rounds", "4"], "--rounds: got 4, expected at least 5"),
    ],
)
def test_mistakes_on_the_command_line(argv, message):
    with pytest.raises(UserError, match=message):
        command.main(argv)
