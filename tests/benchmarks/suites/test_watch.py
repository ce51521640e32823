"""`moco-transfer watch`: checkpoints that appear, grow and vanish while it looks, and its ends."""

import json
import signal
from pathlib import Path

import pytest
import torch

from benchmarks import run_suite, watch
from benchmarks.suites import suite_file
from benchmarks.suites.runs import Programs
from benchmarks.suites.tables import TablesSoFar
from moco.common.errors import UserError
from tests.benchmarks.suites.fake_trainer import FakePrograms
from tests.benchmarks.suites.lab import Lab
from tests.oracles.resnets import make_resnet


class Watched(Lab):
    """Folder of a pre-training, and the command that watches it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, inits=("random",), trials=1)
        self.runs = path / "mine"
        self.runs.mkdir()
        self.more: list[str] = ["--poll-seconds", "0.1"]

    def arguments(self, *more: str) -> list[str]:
        _, *rest = super().arguments()
        task = ["--task", str(self.path / "task.yaml"), "--seeds", "1"]
        return [str(self.runs), *task, *rest, *self.more, *more]

    def argv(self, delay: float, *more: str) -> list[str]:
        return [each.replace("--suite", "--watch") for each in super().argv(delay, *more)]

    def save(self, epoch: int, text: str = "weights") -> Path:
        path = self.runs / f"checkpoint_{epoch:04d}.pth.tar"
        path.write_text(f"{text} {epoch}")
        return path

    def watch(self, monkeypatch: pytest.MonkeyPatch, *looks, more: tuple[str, ...] = ()) -> int:
        """Watch in this process, and call one of `looks` after each look at the folder."""
        left = list(looks)

        def between(seconds: float) -> None:
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        monkeypatch.setattr(watch, "sleep", between)
        monkeypatch.setattr(TablesSoFar, "update", lambda *seen: None)
        return watch.main(self.arguments(*more), FakePrograms(self.journal, 0.0))

    def done(self) -> list[str]:
        """Return the inits of the finished runs, in the order in which they finished."""
        return [name.split("/")[1] for event, name, _ in self.events() if event == "done"]


@pytest.fixture
def lab(tmp_path: Path, quick: None) -> Watched:
    return Watched(tmp_path)


def nothing() -> None:
    """Let a poll pass."""


@pytest.mark.slow
def test_a_checkpoint_appears_while_it_watches(lab, monkeypatch, capsys):
    first = lab.save(9)
    line = {"iteration": 40, "epoch": 9.0, "knn/top1": 30.0}
    (lab.runs / "metrics.json").write_text(f"{json.dumps(line)}\n{{}}\n")

    def appears() -> None:
        assert sorted(lab.done()) == ["mine-epoch0009", "random"]
        lab.save(19, "a part")
        lab.save(29).rename(lab.runs / ".tmp-29")  # as our own saver writes it
        first.unlink()  # the pre-training keeps its newest checkpoints only

    def grows() -> None:
        lab.save(19, "the whole of it")

    def unchanged() -> None:
        assert len(lab.done()) == 2, "a checkpoint that still grows is not evaluated"

    looks = [nothing, appears, grows, unchanged, nothing, lambda: pytest.fail("it continues")]
    assert lab.watch(monkeypatch, *looks, more=("--until-epoch", "19")) == 0
    lab.assert_once(runs=3)
    assert lab.done()[2] == "mine-epoch0019"
    copy = lab.out / "inits" / "mine-epoch0019.pth.tar"
    assert copy.read_text() == "the whole of it 19"
    assert json.loads((lab.out / "inits" / "mine.knn.json").read_text()) == line
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"watching {lab.runs}/checkpoint_????.pth.tar"
    assert said[-1] == f"watched {lab.runs}/checkpoint_????.pth.tar until epoch 19: 2 checkpoints"
    page = (lab.out / "tables" / "table.md").read_text()
    assert "## Along pre-training: task" in page and "| mine | 19 |" in page


@pytest.mark.slow
def test_it_resumes_after_an_interruption(lab):
    lab.save(9)
    with lab.held_runner(runs=2) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 85
    [error] = [line for line in lab.log().splitlines() if line.startswith("error")]
    assert "stopped by SIGINT" in error and "Traceback" not in lab.log()
    lab.save(9).unlink()  # it continues from its copy
    lab.save(19)
    lab.release()
    with lab.start("--until-epoch", "15") as process:
        assert process.wait(120) == 0, lab.log()
    lab.assert_once(runs=3)
    assert lab.count("resume").total() == 2


@pytest.mark.slow
def test_a_failed_run_does_not_end_it(lab, monkeypatch, capsys):
    lab.runs = lab.runs.rename(lab.path / "bad")
    lab.save(1)
    monkeypatch.setattr(run_suite, "write_tables", lambda *arguments: [])
    with pytest.raises(run_suite.SuiteFailed, match=r"\d of 3 runs failed"):
        more = ("--until-epoch", "2", "--retry-failed")
        lab.watch(monkeypatch, nothing, lambda: lab.save(2), nothing, more=more)
    assert "warning: 1 of 2 runs failed" in capsys.readouterr().out


def test_a_file_that_is_no_checkpoint_does_not_end_it(lab, monkeypatch, capsys):
    """Truncated, of no epoch, of an epoch that another file has: it says so once and continues."""
    monkeypatch.setattr(suite_file.forkserver, "call", lambda function, *rest: function(*rest))
    asked: list[list[str]] = []
    monkeypatch.setattr(watch, "run", lambda suite, folder, args, programs: asked.append(args.init))
    lab.runs = lab.path / "mine/*.pth*"
    folder = lab.path / "mine"
    broken = folder / "epoch1.pth"
    broken.write_text("broken")

    def more() -> None:
        (folder / "best.pth").write_text("weights of no epoch")
        (folder / "epoch2.pth").write_text("weights")

    def twice() -> None:
        (folder / "a_copy_of_epoch2.pth").write_text("weights, again")

    def whole() -> None:
        assert [len(each) for each in asked] == [2]
        broken.write_text("weights, whole")

    looks = [nothing, more, nothing, twice, nothing, nothing, whole, nothing, nothing]
    assert lab.watch(monkeypatch, *looks) == 130
    assert [[each.partition("=")[0] for each in inits] for inits in asked] == [
        ["random", "mine-epoch0002"],
        ["random", "mine-epoch0001", "mine-epoch0002"],
    ]
    assert asked[1][2].endswith("/epoch2.pth")
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == 3
    for line, words in zip(
        warnings,
        ("epoch1.pth: not a torch", "best.pth records no epoch", "a_copy_of_epoch2.pth: is of ep"),
        strict=True,
    ):
        assert line.startswith("warning: left out: ") and words in line


@pytest.mark.slow
def test_a_truncated_checkpoint_is_unreadable(tmp_path):
    """The real programs read the weights in a process of their own."""
    whole, part, text = (tmp_path / f"epoch{i}.pth" for i in range(3))
    torch.save(make_resnet(18, base=64).state_dict(), whole)
    part.write_bytes(whole.read_bytes()[:-1000])
    text.write_text("no weights")
    found = Programs().unreadable([whole, part, text])
    assert found.keys() == {part, text}
    assert "cut off" in found[part] and "a text file" in found[text]


def test_a_checkpoint_that_vanishes_before_its_copy_is_left_out(lab, monkeypatch, capsys):
    path, calls = lab.save(9), []

    def run(*arguments) -> None:
        calls.append(1)
        path.unlink()
        run_suite.run(*arguments)

    monkeypatch.setattr(watch, "run", run)
    monkeypatch.setattr(suite_file.forkserver, "call", lambda function, *rest: function(*rest))
    assert lab.watch(monkeypatch, nothing, nothing) == 130
    [warning] = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert f"{path} was deleted before it was copied" in warning and calls == [1]


def test_an_error_that_is_not_of_a_vanished_file_ends_it(lab, monkeypatch):
    lab.save(9)
    monkeypatch.setattr(suite_file.forkserver, "call", lambda function, *rest: function(*rest))
    with pytest.raises(UserError, match="--baseline x: no such init"):
        lab.watch(monkeypatch, nothing, nothing, more=("--baseline", "x"))


def test_ctrl_c_while_it_waits_is_one_line(lab, monkeypatch, capsys):
    assert lab.watch(monkeypatch, nothing) == 130
    pattern = f"{lab.runs}/checkpoint_????.pth.tar"
    last = f"stopped watching {pattern}; the same command continues"
    assert capsys.readouterr().out.splitlines() == [f"watching {pattern}", last]


@pytest.mark.parametrize(
    ("place", "more", "words"),
    [
        ("{}/mine", ["--poll-seconds", "0"], "--poll-seconds: got 0.0, expected"),
        ("{}/mine", ["--dry-run"], r"mine/checkpoint_\?+.pth.tar: no file has such a name"),
        ("a b={}/mine", [], "name: got 'a b'"),
        ("{}/mine", ["--task", "nothing"], "nothing"),
    ],
)
def test_refusals(lab, place, more, words):
    _, *rest = lab.arguments(*more)
    with pytest.raises(UserError, match=words):
        watch.main([place.format(lab.path), *rest], FakePrograms(lab.journal))


def test_a_pattern_with_an_equals_sign_has_no_name(lab, monkeypatch, capsys):
    """As Lightning calls its checkpoints."""
    _, *rest = lab.arguments("--dry-run")
    monkeypatch.chdir(lab.runs)
    Path("epoch=1.ckpt").write_bytes(b"")
    watch.main(["epoch=*.ckpt", *rest], FakePrograms(lab.journal))
    assert capsys.readouterr().out.startswith("watching epoch=*.ckpt\n")
