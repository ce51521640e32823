"""The reference computes what ours computes; the command runs. No test looks at a time."""

import contextlib
import copy
import io
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks.speed import __main__ as command
from benchmarks.speed import (
    convert,
    detection,
    finetune,
    precision,
    pretrain,
    reference,
    scaling,
    startup,
)
from benchmarks.speed import input as input_pipeline
from benchmarks.speed import step as steps
from benchmarks.speed.collectives import GATHER, SUM, Collective
from benchmarks.speed.measure import Setting, interleaved
from benchmarks.speed.results import Result, page, suites
from benchmarks.speed.shuffle import received_bytes
from moco.common.errors import UserError
from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.modeling.shuffle_bn import shuffle_plan

WHOLE_STEP = "1 s, the whole step of ResNet-50 in bf16"


def test_the_measured_step_trains_as_the_reference(monkeypatch):
    """Losses, queries' gradients and weights, keys' weights one update later, queue."""
    for name, value in (("DIM", 6), ("M", 0.9), ("T", 0.2), ("LR", 0.1)):
        monkeypatch.setattr(steps, name, value)
    torch.manual_seed(0)
    spec = EncoderSpec("resnet10", "stride2", 0.125)
    encoder = build_encoder(spec, steps.DIM, mlp=False).double()
    ours = steps.OurStep(copy.deepcopy(encoder), 12)
    model = ours.model.double()
    official = reference.Step(encoder, model.queue.clone(), steps.M, steps.T, steps.LR)
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


@pytest.mark.slow
def test_bytes_of_two_processes_by_hand(tmp_path):
    """Two processes of two images of 8 x 8 pixels, keys of 4 numbers, a queue of 16."""
    found = received_bytes(2, 2, 8, 4, 16, tmp_path)
    assert found.equal == {"official": True, "index": True, "all_to_all": True}
    image, keys = 3 * 8 * 8, 2 * 4 * 4
    statistics = 4 * (8 + 8) + 8  # BN's means and variances, and its counter
    sent_by_first = 4 * 16 * 4 + 8 + statistics + 8 * 4  # queue, pointer, BN, permutation
    assert found.bytes["official"] == 2 * image * 4 + 2 * keys + sent_by_first / 2
    assert found.bytes["index"] == keys
    assert scaling.received(Collective(GATHER, 2 * keys), 2) == found.bytes["index"]
    plan = shuffle_plan(4, 2, seed=0, step=0).view(2, 2)
    moved = sum(int((plan[rank] // 2 != rank).sum()) for rank in range(2))
    assert moved and found.bytes["all_to_all"] == keys + moved / 2 * image


def test_a_collective_by_hand():
    """8 processes in two machines: 1 s fixed, 2 s a hop, 3 s between machines; 4 bytes/s."""
    link = scaling.Link(100.0, 4.0, (1.0, 2.0, 3.0), None, per_machine=4)
    assert scaling.received(Collective(SUM, 800), 8) == 1400
    # A ring of sums goes round twice: 14 hops, 2 of them between the machines.
    assert link.time(Collective(SUM, 800), 8) == 1 + 12 * 2 + 2 * 3 + 1400 / 4
    assert link.time(Collective(GATHER, 800), 8) == 1 + 6 * 2 + 1 * 3 + 700 / 4
    assert link.time(Collective(SUM, 800), 4) == 1 + 6 * 2 + 1200 / 100  # one machine
    assert link.time(Collective(SUM, 800), 1) == 0
    crowded = link._replace(cores=2)
    assert crowded.time(Collective(SUM, 800), 4) == 2 * link.time(Collective(SUM, 800), 4)
    tree = link._replace(tree_seconds=(0.0, 0.5, 0.5), tree_share=1.0)
    assert tree.time(Collective(SUM, 8), 8) == 2 * (3 * 0.5 + 1 * 0.5) + 2 * 8 / 4


def test_a_step_hides_the_gradients_behind_the_backward_pass():
    link = scaling.Link(1.0, math.inf, (0.0, 0.0, 0.0), None)
    step = scaling.Step([Collective(SUM, 6)], [Collective(GATHER, 4)])  # 6 s and 2 s of 2 processes
    assert step.seconds(20.0, link, 2) == 20 + 2
    assert step.seconds(4.0, link, 2) == 4 + (6 - 2) + 2


def test_the_local_link_is_found_from_its_times():
    times = {nbytes: 2 * 3e-4 + nbytes / 5e8 for nbytes in (4096, 65536, 1 << 20)}
    link = scaling.local_link(times)
    assert link.seconds[1] == pytest.approx(3e-4)
    assert link.bytes_per_second == pytest.approx(5e8)
    assert link._replace(cores=9).time(Collective(SUM, 4096), 2) == pytest.approx(times[4096])


def test_papers_goal_of_scaling():
    compute = 64 / scaling.A100.images_per_second
    step = scaling.pretraining_step(scaling.resnet50(), 64, 64)
    assert compute / step.seconds(compute, scaling.A100.link, 64) >= 0.9


@pytest.mark.slow
def test_counted_collectives_are_those_on_paper(tmp_path):
    """Two processes; `differs` says that their number or bytes are others."""
    torch.set_num_threads(1)
    counted, step = scaling.pretraining_runs(Setting(tmp_path, 1, True), (2,))[2]
    assert scaling.totals(counted.collectives) == scaling.totals(step.all)
    assert len(counted.seconds) == len(counted.collectives) and min(counted.seconds) > 0


def test_interleaved_times_each_side_in_turn():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "ab"}
    clock = iter(range(10**6))
    assert interleaved(contenders, 2, timer=lambda: next(clock)) == {"a": 1, "b": 1}
    assert [*"abab"] == [x for x, before in zip(calls, ["", *calls], strict=False) if x != before]


@pytest.mark.parametrize(
    "goal, ours, reference, cells, met",
    [
        ("views", 0.001, 0.003, ("1 ms", "3 ms, official code", "3.00 x as fast", ">= 3 x"), True),
        ("views", 1.0, 2.9, ("1 s", "2.9 s, official code", "2.90 x as fast", ">= 3 x"), False),
        ("lightly loss", 1.0, 2.9, ("1 s", "2.9 s, lightly", "2.90 x as fast", ""), None),
        (
            *("step_bf16 rate", 54, 100),
            *(("54 GFLOP/s", "100 GFLOP/s, matmul in bf16", "54% of it", ">= 55%"), False),
        ),
        ("shuffle", 1, 500, ("1 MiB", "500 MiB, official code", "500 x less", ">= 500 x"), True),
        ("shuffle", 1, 499, ("1 MiB", "499 MiB, official code", "499 x less", ">= 500 x"), False),
        ("overhead", 0.03, 1.0, ("30 ms", WHOLE_STEP, "3.0% of it", "<= 3%"), True),
        ("overhead", 0.031, 1.0, ("31 ms", WHOLE_STEP, "3.1% of it", "<= 3%"), False),
        (
            *("loss fp32 error", 2e-6, 1e-3),
            *(("2.0e-06", "1.0e-03, official code", "2.0e-06", "<= 1e-06"), False),
        ),
        ("training", 1.004, 1.0, ("1 s", "1 s, Detectron2", "1.004 of it", "<= 1.00"), True),
        ("training", 1.006, 1.0, ("1.01 s", "1 s, Detectron2", "1.006 of it", "<= 1.00"), False),
        ("training", None, None, ("", "Detectron2", "", "<= 1.00"), None),
        ("memory", 0.0, 2.0, ("0 MiB", "2 MiB, the file", "0.000 of it", "<= 3.00"), True),
        ("estimate 64", 99, 33, ("99 %", "33 %, official code", "3.0 x", ""), None),
    ],
)
def test_a_row_says_whether_its_goal_is_met(goal, ours, reference, cells, met):
    row = Result(goal, ours, reference)
    assert row.met is met and row.cells()[1:5] == cells
    assert row.cells()[5] == {True: "yes", False: "no", None: "-"}[met]


def test_a_wrong_side_meets_nothing_however_fast():
    row = Result("evaluation voc", 1.0, 100.0, differs=True)
    assert row.met is False and "results DIFFER" in row.cells()[0]


def test_noise_beside_the_fastest_rounds():
    row = detection.with_noise(
        "training", {"ours": [2.0, 1.5, 1.0], "reference": [1.1, 1.0, 2]}, "x"
    )
    assert (row.ours, row.reference, row.noise) == (1.0, 1.0, 0.5)
    assert row.cells()[3] == "1.000 of it (50.0%)"


def test_the_page_is_rendered_from_its_data():
    docs = Path(__file__).parents[3] / "docs"
    content = json.loads((docs / "speed.json").read_text())
    assert set(content) <= set(suites())
    assert (docs / "speed.md").read_text() == page(content)
    assert not any(of["quick"] for of in content.values())


def test_estimates_and_what_was_not_measured_are_apart():
    rows = [("momentum", 1.0, 3.0), ("estimate 64", 99.0, 33.0), ("gpu_colors", None, None)]
    results = [{"goal": goal, "ours": a, "reference": b} for goal, a, b in rows]
    table = {"title": "Hours", "headers": ["images"], "rows": [["all of them"]]}
    suite = {"facts": [], "quick": False, "results": results, "tables": [table]}
    measured, estimated, hours, missing = re.split(
        "^### .*$", page({"pretrain": suite}), flags=re.M
    )
    text = measured + estimated + hours + missing
    parts = ((measured, "momentum"), (estimated, "64 GPUs"), (hours, "all of them"))
    for part, what in (*parts, (missing, "needs a GPU")):
        assert what in part and text.count(what) == 1


def test_every_goal_has_its_measurement_and_every_row_its_goal():
    for suite in (
        pretrain,
        precision,
        input_pipeline,
        convert,
        detection,
        finetune,
        startup,
        scaling,
    ):
        specs = suites()[suite.__name__.rpartition(".")[2]]["goals"]
        measured = {key.split()[0] for key in specs} - {"lightly", "hotcoco", "communication"}
        assert measured == set(suite.GOALS)
        assert all(key.islower() for key in specs), "a page's reader knows no codes"


@pytest.mark.parametrize(
    "suite, names",
    [
        ("pretrain", "loss,momentum,grouped_bn,gpu_momentum"),
        ("input", "views_without_colors,decoding"),
        pytest.param("input", "views", marks=pytest.mark.slow),
        pytest.param("pretrain", "step_bf16,step_fp32,overhead", marks=pytest.mark.slow),
    ],
)
def test_command_runs(suite, names, tmp_path, capsys, monkeypatch):
    for name in {"lightly", *(name for name in sys.modules if name.startswith("lightly."))}:
        monkeypatch.setitem(sys.modules, name, None)  # not installed
    output = tmp_path / "speed.md"
    command.main([suite, "--quick", "--goals", names, "--output", str(output)])
    shown, written = capsys.readouterr().out, output.read_text()
    for key, spec in suites()[suite]["goals"].items():
        if key.split()[0] in names.split(","):
            assert spec["what"][:30] in shown and f"| {spec['what']}" in written
    assert (suite == "input") == ("4 files, in the mean 640 x 480 px" in written)
    assert ("needs the extra `speed`" in written) == bool({"loss", "views"} & set(names.split(",")))
    assert "smoke test" in written


def test_a_later_measurement_takes_the_place_of_its_section_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.speed.measure.installed", lambda: False)  # of Detectron2
    output = tmp_path / "speed.md"
    for suite, goal in (
        ("convert", "with_detectron2"),
        ("pretrain", "gpu_step"),
        ("pretrain", "gpu_momentum"),
    ):
        command.main([suite, "--quick", "--goals", goal, "--output", str(output)])
    titles = [line for line in output.read_text().splitlines() if line.startswith("#")]
    assert [title for title in titles if "###" not in title] == [
        *("# Speed", "## Pre-training", "## Conversion")
    ]
    assert "momentum update" in output.read_text() and "bandwidth" not in output.read_text()


def test_command_measures_conversions(tmp_path, capsys, monkeypatch):
    """The programs of its processes run here, because each import of torch takes seconds."""

    def run(flag, program, source, target):
        assert flag == "-c"
        monkeypatch.setattr(sys, "argv", ["-c", source, target])
        monkeypatch.setitem(sys.modules, "detectron2", None)
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(program, {})
        assert Path(target).stat().st_size > 100_000
        return shown.getvalue()

    monkeypatch.setattr(convert, "run_python", run)
    monkeypatch.setattr(convert, "children_seconds", convert.time.monotonic)
    output = tmp_path / "speed.md"
    command.main(["convert", "--quick", "--goals", "torchvision,memory", "--output", str(output)])
    assert "convert and verify" in capsys.readouterr().out
    assert output.read_text().count("| memory to convert") == 6


def test_own_images(tmp_path):
    (tmp_path / "mine").mkdir()
    Image.new("RGB", (64, 48), (200, 100, 50)).save(tmp_path / "mine" / "a.jpg")
    output = tmp_path / "speed.md"
    command.main(
        [
            "input",
            "--quick",
            "--goals",
            "views_without_colors",
            "--images",
            str(tmp_path),
            "--output",
            str(output),
        ]
    )
    assert "1 files, in the mean 64 x 48 px" in output.read_text()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["pretrain", "--goals", "loss,C2"], "--goals: got 'C2', choices are loss, "),
        (["convert", "--goals", "moco,views"], "--goals: got 'views', choices are torchvision, "),
        (["pretrain", "--rounds", "4"], "--rounds: got 4"),
        (["pretrain", "--goals", "loss", "--output", "speed.md"], "--output .* whole section"),
    ],
)
def test_mistakes_on_the_command_line(argv, message):
    with pytest.raises(UserError, match=message):
        command.main(argv)
