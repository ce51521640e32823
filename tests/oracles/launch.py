"""Pre-training in several processes, one of which fails after a chosen step.

As a program: `moco.pretrain` with the fault that the variable FAULT describes. `run_ranks` starts
processes without torchrun, from the server of processes.py.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.oracles.processes import processes, server, variables_of

ROOT = Path(__file__).resolve().parents[2]
FAULT = "MOCO_TEST_FAULT"
SECONDS = 300  # until a run that does not end is killed


@dataclass(frozen=True)
class Fault:
    """What happens in process `rank` when `step` (from 1) is done, or NAN in its loss.

    Attributes:
        signal: sent to this process, or to its parent if `to_parent`; 0 for none.
        nan: what the loss of that step is multiplied by.
        hold: after that step, all processes continue only when they get a signal to stop.
    """

    rank: int
    step: int
    signal: int = 0
    to_parent: bool = False
    nan: float | None = None
    hold: bool = False


@dataclass(frozen=True)
class Done:
    """How a run ended: exit code (of each process without torchrun) and output."""

    codes: list[int]
    err: str
    out: str


def torchrun(words: Sequence[str], fault: Fault | None = None, *flags: str) -> Done:
    """`torchrun --nproc-per-node 2 moco.pretrain`, to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", *flags, str(Path(__file__).resolve()), *words]
    variables = {"PYTHONPATH": str(ROOT), FAULT: json.dumps(asdict(fault)) if fault else ""}
    how = {"capture_output": True, "text": True, "timeout": SECONDS, "start_new_session": True}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, **how)
    return Done([done.returncode], done.stderr, done.stdout)


def run_ranks(world: int, words: Sequence[str], tmp: Path, fault: Fault | None = None) -> Done:
    """`python -m moco.pretrain` in `world` connected processes."""
    context = server()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        variables = variables_of(rank, world, port)
        variables[FAULT] = json.dumps(asdict(fault)) if fault else ""
        said = str(tmp / f"rank{rank}")
        ranks.append(context.Process(target=_rank, args=(variables, list(words), said)))
        ranks[-1].start()
    for process in ranks:
        process.join(SECONDS)
        process.kill()
        process.join()
    err, out = ("".join((tmp / f"rank{r}.{s}").read_text() for r in range(world)) for s in "eo")
    return Done([process.exitcode or 0 for process in ranks], err, out)


def kill_while_saving(folder: Path, call: int) -> int:
    """A process that saves checkpoints in a loop, and old ones' removal; killed on its way.

    Args:
        call: before which call, from 1, that opens, moves, flushes or removes a file there.

    Returns:
        The last step that it reported as saved, 0 if none.
    """
    context = server()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_save_until_killed, args=(str(folder), sender, call))
    process.start()
    sender.close()
    saved = 0
    with contextlib.suppress(EOFError):
        while True:
            saved = receiver.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return saved


def processes_of(text: str) -> list[int]:
    """Running processes whose command line holds `text`, e.g. an output folder."""
    found = {number for number, stat, line in processes() if text in line and stat[0] != "Z"}
    return sorted(found - {os.getpid()})


def _save_until_killed(
    folder: str, sender: "multiprocessing.connection.Connection", call: int
) -> None:
    calls, fsync = itertools.count(1), os.fsync

    def count() -> None:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event in ("open", "os.rename", "os.remove") and str(args[0]).startswith(folder):
            count()

    sys.addaudithook(hook)
    os.fsync = lambda handle: (count(), fsync(handle))[1]  # type: ignore[assignment]
    while True:
        sender.send(save_and_remove(folder))


def save_and_remove(folder: str | Path) -> int:
    """Continue from the newest checkpoint by a step, save it, and remove old ones; the step."""
    import torch

    from moco.engine import checkpoint

    found = checkpoint.newest_checkpoint(folder)
    step = found[1]["step"] + 1 if found else 1
    state: dict[str, object] = {
        **{key: {} for key in ("optimizer", "encoder", "input", "config")},
        **{"epoch": 0, "arch": "none", "format": checkpoint.FORMAT, "step": step, "seconds": 0.0},
        **{"seed": 0, "num_images": 1, "state_dict": {"x": torch.full((200_000,), step)}},
    }
    checkpoint.save_checkpoint(Path(folder, checkpoint.checkpoint_name(0, step)), state)
    checkpoint.remove_old_checkpoints(folder, keep=2, milestone_epochs=0)
    return step


def _rank(variables: dict[str, str], words: list[str], said: str) -> None:
    multiprocessing.set_start_method("fork", force=True)  # for DataLoader, as without a server
    os.environ.update(variables)
    for number, name in ((1, "o"), (2, "e")):
        os.dup2(os.open(f"{said}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.argv[1:] = words
    _pretrain()


def _pretrain() -> None:
    """The command with the fault built in."""
    from moco import pretrain
    from moco.common.errors import run_cli

    if os.environ.get(FAULT) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        _build_in(Fault(**json.loads(os.environ[FAULT])))
    run_cli(pretrain.main)


def _build_in(fault: Fault) -> None:
    from moco.engine.metrics import MetricsLog
    from moco.modeling.mechanisms.momentum_queue import MomentumQueue
    from tests.oracles.stopping import hold_at

    mine = int(os.environ["RANK"]) == fault.rank

    original: Any = MetricsLog.add

    def add(self: MetricsLog, step: int, *values: float) -> None:
        original(self, step, *values)
        if mine and step + 1 == fault.step and fault.signal:
            os.kill(os.getppid() if fault.to_parent else os.getpid(), fault.signal)

    MetricsLog.add = add  # type: ignore[method-assign,assignment]
    if fault.hold:
        hold_at(fault.step + 1)
    if mine and fault.nan is not None:
        calls, forward = itertools.count(1), MomentumQueue.forward

        def poisoned(self: MomentumQueue, *args: Any) -> Any:
            out = forward(self, *args)
            return out._replace(loss=out.loss * fault.nan) if next(calls) == fault.step else out

        MomentumQueue.forward = poisoned  # type: ignore[method-assign]


if __name__ == "__main__":
    import moco.pretraining.run  # noqa: F401  before they meet
    from tests.oracles.processes import meet

    meet()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _pretrain()
