"""Stop signals on the real Detectron2: saved, left, and resumed bitwise identically."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from detection.config.trained import read_start
from detection.engine import resuming
from detection.train_net import main
from moco.common.errors import Preempted
from moco.common.files import load_torch
from moco.common.run import RunRecord, read_record
from tests.oracles import small_tasks
from tests.oracles.launch import processes_of
from tests.oracles.stopping import SECONDS, TRAIN_NET, children, held, nobody_left, start, wait_for

pytestmark = [
    pytest.mark.detectron2,
    pytest.mark.slow,
    pytest.mark.race,
    pytest.mark.usefixtures("detectron2"),
]

SCHEDULE = {
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,  # a quarter; the task's file says 64
    "SOLVER.PRECISION": "fp32",  # the task's file says auto
    "SOLVER.MAX_ITER": 6,
    "SOLVER.STEPS": (5,),
    "SOLVER.CHECKPOINT_PERIOD": 100,  # so that nothing is saved but for a stop and the end
    "TEST.EVAL_PERIOD": 3,
    # An image that waits for a partner has been sampled before.
    "INPUT.MIN_SIZE_TRAIN": (64, 80, 96),
}
NOT_OF_THE_TRAINING = ("time", "eta_seconds")


@pytest.fixture(scope="module")
def arguments(small_config, small_options, narrow_r18_file):
    """The command line of the small task."""

    def build(folder: Path, *opts: object, flags: tuple[str, ...] = (), workers: int = 0):
        values = SCHEDULE | {"MODEL.WEIGHTS": narrow_r18_file, "DATALOADER.NUM_WORKERS": workers}
        values |= {"OUTPUT_DIR": folder}
        argv = ["--config-file", small_config, "--engine", "detectron2", *flags, *small_options]
        return argv + [str(x) for pair in values.items() for x in pair] + [str(x) for x in opts]

    return build


@pytest.fixture(scope="module")
def straight(arguments, tmp_path_factory):
    """Number of data-loader workers → the folder of an uninterrupted run, each run once."""
    folders: dict[int, Path] = {}

    def get(workers: int) -> Path:
        if workers not in folders:
            folders[workers] = tmp_path_factory.mktemp("straight") / "run"
            with every_iteration():
                assert main(arguments(folders[workers], workers=workers)) == 0
        return folders[workers]

    return get


@contextmanager
def every_iteration() -> Iterator[pytest.MonkeyPatch]:
    """A line of metrics at every iteration, instead of 20, while open."""
    from detectron2.engine.hooks import PeriodicWriter

    init = PeriodicWriter.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PeriodicWriter, "__init__", lambda self, writers, period: init(self, writers, 1)
        )
        patch.setattr(resuming, "WRITE_EVERY_ITERS", 1)
        yield patch


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Iteration → what all lines about it say of the training and of its evaluation."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.json").read_text().splitlines():
        values = json.loads(line)
        known = found.setdefault(values.pop("iteration"), {})
        for name, value in values.items():
            if not name.endswith(NOT_OF_THE_TRAINING):
                # A value of an iteration is written once, or again as it was.
                assert repr(known.setdefault(name, value)) == repr(value), name
    return found


def assert_same(got: Path, expected: Path) -> None:
    """Weights, momentum, schedule, random streams, metrics of all iterations, the record."""
    a, b = (load_torch(folder / "model_final.pth") for folder in (got, expected))
    assert same(a, b)
    lines, wanted = metrics(got), metrics(expected)
    # As text: what was not measured is NaN, which equals nothing. A run that stops writes a line.
    texts = [json.dumps({i: x[i] for i in wanted}, sort_keys=True) for x in (lines, wanted)]
    assert texts[0] == texts[1]
    mine, other = (comparable(read_record(folder / "run.json")) for folder in (got, expected))
    assert mine == other


def comparable(record: RunRecord) -> dict[str, object]:
    content = record.to_dict() if hasattr(record, "to_dict") else dict(vars(record))
    config = {k: v for k, v in content.pop("config").items() if k != "OUTPUT_DIR"}
    # What it was run with and how long it took; the time is part of the run's name, too.
    for key in ("seconds", "provenance", "created", "run_id"):
        content.pop(key, None)
    return content | {"config": config}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        keys = {key for key in a.keys() | b.keys() if not str(key).endswith(NOT_OF_THE_TRAINING)}
        return all(key in a and key in b and same(a[key], b[key]) for key in keys)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def signal_in(patch: pytest.MonkeyPatch, owner: type, name: str, call: int, *numbers: int) -> None:
    """Send this process the signals when the method is called for the `call`-th time, from 0."""
    original: Callable[..., object] = getattr(owner, name)
    calls = iter(range(10**6))

    def method(*args: object, **kwargs: object) -> object:
        if next(calls) == call:
            for number in numbers:
                os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    patch.setattr(owner, name, method)


def owner_of(name: str) -> tuple[type, str]:
    from detectron2.engine import DefaultTrainer

    from detection.d2.log import EvaluationHook
    from detection.d2.precise_bn import RankEqualPreciseBN

    return {
        "build": (DefaultTrainer, "register_hooks"),
        "step": (DefaultTrainer, "run_step"),
        "precise BN": (RankEqualPreciseBN, "after_step"),
        "evaluation": (EvaluationHook, "evaluate"),
    }[name]


@pytest.mark.parametrize(
    ("where", "call", "after", "workers"),
    [
        ("build", 0, 0, 0),  # before the first iteration
        ("step", 1, 1, 0),
        ("step", 2, 2, 0),  # an evaluation is due after it
        ("precise BN", 2, 2, 0),
        ("evaluation", 0, 3, 0),  # the evaluation is finished, and one more iteration
        ("step", 3, 3, 2),
    ],
)
def test_stopped_and_resumed_bitwise_identically(
    where, call, after, workers, arguments, straight, tmp_path
):
    folder = tmp_path / "run"
    before = signal.getsignal(signal.SIGTERM)
    expected = rf"^stopped after iteration {after} and saved .*model_000000{after}\.pth; .*--resume"
    with every_iteration() as patch, pytest.raises(Preempted, match=expected) as caught:
        signal_in(patch, *owner_of(where), call, signal.SIGTERM)
        main(arguments(folder, workers=workers))
    assert caught.value.exit_code == 85
    assert signal.getsignal(signal.SIGTERM) == before
    assert (folder / "last_checkpoint").read_text() == f"model_000000{after}.pth"
    assert not (folder / "run.json").exists() and not (folder / "model_final.pth").exists()
    assert "Exception during training" not in (folder / "log.txt").read_text()
    torch.manual_seed(99)
    with every_iteration():
        assert main(arguments(folder, flags=("--resume",), workers=workers)) == 0
    assert_same(folder, straight(workers))
    assert read_start(folder) == read_start(straight(workers)) is not None


@pytest.fixture(scope="module")
def periodic(arguments, tmp_path_factory):
    """The folder of a run with a checkpoint after every iteration."""
    folder = tmp_path_factory.mktemp("periodic") / "run"
    assert main(arguments(folder, "SOLVER.CHECKPOINT_PERIOD", 1)) == 0
    return folder


def test_what_was_compared(straight, periodic):
    """The bits above depend on all that a checkpoint holds."""
    held = [load_torch(periodic / f"model_{i:07d}.pth")["standing"] for i in range(6)]
    data = [state["ranks"][0]["data"] for state in held]
    # Images of other shapes wait with the streams that their size was sampled from.
    assert data[3]["waiting"] and data[3]["done"] > 8
    lines = metrics(straight(0))
    assert [i for i, line in lines.items() if "bbox/AP" in line] == [2, 5]
    assert len({lines[i]["total_loss"] for i in range(6)}) > 3  # medians of all before
    # data-loader workers sample from other streams, and their number does not matter.
    assert metrics(straight(2))[5]["total_loss"] != lines[5]["total_loss"]


@pytest.mark.parametrize("iteration", [2, 3])
def test_from_a_periodic_checkpoint(iteration, arguments, straight, periodic, tmp_path):
    """After a kill; the first is of before an evaluation, which is done later."""
    name = f"model_{iteration:07d}.pth"
    for file in (name, "config.yaml"):
        (tmp_path / file).write_bytes((periodic / file).read_bytes())
    (tmp_path / "last_checkpoint").write_text(name)
    assert main(arguments(tmp_path, "SOLVER.CHECKPOINT_PERIOD", 1, flags=("--resume",))) == 0
    assert same(*(load_torch(f / "model_final.pth") for f in (tmp_path, straight(0))))


def test_from_a_periodic_checkpoint_in_bf16(arguments, straight, tmp_path):
    """`auto` is what the run was begun in, also on another processor."""
    begun, again = tmp_path / "begun", tmp_path / "again"
    assert main(arguments(begun, "SOLVER.PRECISION", "bf16", "SOLVER.CHECKPOINT_PERIOD", 3)) == 0
    again.mkdir()
    for file in ("model_0000002.pth", "config.yaml"):
        (again / file).write_bytes((begun / file).read_bytes())
    (again / "last_checkpoint").write_text("model_0000002.pth")
    keys = ("SOLVER.PRECISION", "auto", "SOLVER.CHECKPOINT_PERIOD", 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moco.engine.device.has_fast_bf16", lambda device: False)
        assert main(arguments(again, *keys, flags=("--resume",))) == 0
    resumed, whole, fp32 = (
        load_torch(folder / "model_final.pth") for folder in (again, begun, straight(0))
    )
    assert same(resumed, whole) and not same(whole["model"], fp32["model"])
    assert read_record(again / "run.json").config["SOLVER.PRECISION"] == "bf16"


def test_from_a_periodic_checkpoint_of_adamw(arguments, tmp_path):
    """Its moments and step, the rate of every layer, and the place on the cosine."""
    keys = ("SOLVER.OPTIMIZER", "AdamW", "SOLVER.LR_DECAY", 0.8, "SOLVER.BASE_LR", 1e-3)
    keys += ("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", "SOLVER.CHECKPOINT_PERIOD", 3)
    begun, again = tmp_path / "begun", tmp_path / "again"
    assert main(arguments(begun, *keys)) == 0
    again.mkdir()
    for file in ("model_0000002.pth", "config.yaml"):
        (again / file).write_bytes((begun / file).read_bytes())
    (again / "last_checkpoint").write_text("model_0000002.pth")
    assert main(arguments(again, *keys, flags=("--resume",))) == 0
    resumed, whole = (load_torch(folder / "model_final.pth") for folder in (again, begun))
    assert same(resumed, whole)
    state = whole["trainer"]["_trainer"]["optimizer"]
    assert all(float(one["step"]) == 6 for one in state["state"].values())
    assert len({group["initial_lr"] for group in state["param_groups"]}) == 6


def test_an_older_checkpoint_replaces_what_came_after_it(arguments, straight, tmp_path, capsys):
    folder, often = tmp_path / "run", ("SOLVER.CHECKPOINT_PERIOD", 2)
    with every_iteration():
        assert main(arguments(folder, *often)) == 0
    (folder / "last_checkpoint").write_text("model_0000001.pth")
    with every_iteration() as patch, pytest.raises(Preempted):
        signal_in(patch, *owner_of("step"), 2, signal.SIGTERM)
        main(arguments(folder, *often, flags=("--resume",)))
    assert (folder / "last_checkpoint").read_text() == "model_0000004.pth"
    aside = folder / "superseded_1"
    names = ["earlier_run.json", "model_0000003.pth", "model_0000005.pth", "model_final.pth"]
    assert sorted(path.name for path in aside.iterdir()) == names
    assert str(aside) in capsys.readouterr().out
    with every_iteration():
        assert main(arguments(folder, *often, flags=("--resume",))) == 0
    iterations = [json.loads(x)["iteration"] for x in (folder / "metrics.json").open()]
    # Each once, and each evaluation.
    assert sorted(iterations) == [0, 1, 2, 2, 3, 4, 5, 5]
    assert metrics(folder) == metrics(straight(0))


def test_a_stop_between_two_lines_leaves_none(arguments, tmp_path):
    """Detectron2 writes one when a training ends, whatever the reason."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Preempted):
        signal_in(patch, *owner_of("step"), 3, signal.SIGTERM)
        main(arguments(tmp_path / "run"))
    assert main(arguments(tmp_path / "run", flags=("--resume",))) == 0
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.json").open()]
    assert [line["iteration"] for line in lines if "total_loss" in line] == [5]


def test_the_number_of_data_loader_workers_does_not_matter(arguments, straight, tmp_path):
    with every_iteration():
        assert main(arguments(tmp_path / "run", workers=1)) == 0
    assert metrics(tmp_path / "run") == metrics(straight(2))


def test_a_run_after_its_last_iteration_ends_as_usual(arguments, straight, tmp_path):
    """Told in that iteration, and again in the evaluation after it."""
    with every_iteration() as patch:
        signal_in(patch, *owner_of("step"), 5, signal.SIGTERM)
        signal_in(patch, *owner_of("evaluation"), 1, signal.SIGTERM)
        assert main(arguments(tmp_path / "run")) == 0
    assert_same(tmp_path / "run", straight(0))


def test_ctrl_c_saves_and_once_more_leaves_at_once(arguments, tmp_path, capsys):
    """SIGTERM and its like are the same however often they come."""
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        signal_in(patch, *owner_of("step"), 1, signal.SIGINT)
        main(arguments(folder))
    assert f"saved {folder}/model_0000001.pth; run the same command" in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        signal_in(patch, *owner_of("step"), 1, signal.SIGINT, signal.SIGINT)
        main(arguments(folder, flags=("--resume",)))
    assert "saved" not in capsys.readouterr().out
    assert (folder / "last_checkpoint").read_text() == "model_0000001.pth"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Preempted, match="iteration 2 and"):
        signal_in(patch, *owner_of("step"), 0, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1)
        main(arguments(folder, flags=("--resume",)))


@pytest.mark.parametrize("change", ["detectron2's", "readers"])
def test_a_checkpoint_that_does_not_fit_any_longer_is_said(change, arguments, periodic, tmp_path):
    """Resumed as Detectron2 does, with a warning."""
    folder, workers = tmp_path / "run", 0
    folder.mkdir()
    (folder / "config.yaml").write_bytes((periodic / "config.yaml").read_bytes())
    content = load_torch(periodic / "model_0000004.pth")
    if change == "readers":
        workers, reason = 1, "DATALOADER.NUM_WORKERS was 0"
    else:
        del content["standing"]
        reason = "Detectron2 itself, or an earlier version of this project, wrote it"
    torch.save(content, folder / "model_0000004.pth")
    (folder / "last_checkpoint").write_text("model_0000004.pth")
    assert main(arguments(folder, flags=("--resume",), workers=workers)) == 0
    text = (folder / "log.txt").read_text()
    assert f"resumed with other images and random numbers ({reason}" in text
    assert "Starting training from iteration 5" in text


def test_a_checkpoint_of_another_number_of_processes_is_said(monkeypatch):
    from detection.d2 import state

    said = []
    monkeypatch.setattr(state.logger, "warning", lambda *text: said.append(text))
    assert state.usable_state({"ranks": [{"data": {}}] * 2}, "x.pth", None) is None
    assert said[0][1:] == ("x.pth", "2 processes wrote it, now there are 1")


LONG = ("SOLVER.MAX_ITER", 14, "SOLVER.STEPS", "(12,)", "SOLVER.CHECKPOINT_PERIOD", 2)
LONG += ("TEST.EVAL_PERIOD", 0)


def test_kill_term_and_resume(arguments, tmp_path):
    """From outside; only the first process is told, and all save after the same iteration."""
    flags = ("--num-gpus", "2")
    folder, whole, out = tmp_path / "run", tmp_path / "whole", tmp_path / "out.txt"
    process = start([*TRAIN_NET, *arguments(folder, *LONG, flags=flags)], out, hold=4)
    wait_for(held(2, out), process, out)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 85, out.read_text()[-2000:]
    said = out.read_text()
    assert "Traceback" not in said
    line = said.splitlines()[-1]
    assert line.startswith("error: stopped after iteration 3 ")
    assert "--resume" in line
    assert said.count("error: stopped after iteration") == 1
    last = (folder / "last_checkpoint").read_text()
    assert f"saved {folder / last}" in line
    content = load_torch(folder / last)
    assert content["iteration"] == 3
    assert len(content["standing"]["ranks"]) == 2
    assert nobody_left(process)
    assert not (folder / "run.json").exists()

    for where, more in ((folder, ("--resume",)), (whole, ())):
        assert main(arguments(where, *LONG, flags=(*flags, *more))) == 0
    # One line of metrics, over all iterations.
    assert_same(folder, whole)


@pytest.mark.parametrize(
    ("number", "whom", "code"),
    [
        (signal.SIGINT, "all", 130),  # Ctrl-C
        (signal.SIGTERM, "one rank", 85),
        (signal.SIGTERM, "all too early", 85),
        (signal.SIGKILL, "the first process", -signal.SIGKILL),
    ],
)
def test_signals_to_two_processes(number, whom, code, arguments, tmp_path):
    folder, out = tmp_path / "run", tmp_path / "out.txt"
    argv = arguments(folder, *LONG, "SOLVER.MAX_ITER", 500, flags=("--num-gpus", "2"))
    process = start([*TRAIN_NET, *argv], out)
    early = whom == "all too early"
    if early:
        wait_for(lambda: len(children(process.pid)) == 2, process, out)
    else:
        wait_for((folder / "model_0000001.pth").is_file, process, out)
    if whom.startswith("all"):
        os.killpg(process.pid, number)
    else:
        os.kill(children(process.pid)[1] if whom == "one rank" else process.pid, number)
    try:
        assert process.wait(SECONDS) == code, out.read_text()[-2000:]
        assert nobody_left(process)
    finally:
        if processes_of(str(folder)):
            os.killpg(process.pid, signal.SIGKILL)
    said = out.read_text()
    assert not (folder / "run.json").exists()
    if early:
        assert "nothing was saved since the last checkpoint" in said.splitlines()[-1]
        assert not list(folder.glob("*.pth"))
    elif number != signal.SIGKILL:
        assert "Traceback" not in said
        last = load_torch(folder / (folder / "last_checkpoint").read_text())
        assert len(last["standing"]["ranks"]) == 2
        assert f"stopped after iteration {last['iteration']} and saved" in said


@pytest.mark.parametrize("task", ["coco/retinanet_R_50_FPN_90k", "coco/mask_rcnn_ViT_B_FPN_25ep"])
def test_a_killed_task_resumes_with_all_its_state(
    task, narrow_r50_file, data_of, tmp_path, monkeypatch
):
    """RetinaNet's losses are divided by a moving average, which Detectron2's checkpoints lack."""
    from detection.d2.trainer import Trainer

    data_of(task)
    short = {"SOLVER.MAX_ITER": 4, "SOLVER.STEPS": (3,), "SOLVER.CHECKPOINT_PERIOD": 2}
    if "ViT" in task:
        pytest.importorskip("timm")
        short |= {"MODEL.WEIGHTS": "random", "SOLVER.PRECISION": "bf16"}
    opts = [item for pair in short.items() for item in pair]
    straight, out = tmp_path / "straight", tmp_path / "run"
    small_tasks.run(task, narrow_r50_file, straight, "detectron2", *opts)
    step = Trainer.run_step

    def killed(self):
        if self.iter == 3:
            raise KeyboardInterrupt
        step(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "run_step", killed)
        small_tasks.run(task, narrow_r50_file, out, "detectron2", *opts)
    small_tasks.run(task, narrow_r50_file, out, "detectron2", *opts, flags=("--resume",))
    small_tasks.assert_same_run(straight, out)
