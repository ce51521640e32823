"""Pre-training in several processes, one of which fails after a chosen step.

`torchrun ... tests/oracles/launch.py KEY VALUE ...` is `torchrun ... -m moco.pretrain` with the
fault that the variable FAULT describes; `run_ranks` starts processes without torchrun, from
a server that has imported everything, in a tenth of the time.
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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULT = "MOCO_TEST_FAULT"


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
    """How a run ended: exit code (of each process without torchrun), output, seconds."""

    codes: list[int]
    err: str
    out: str
    seconds: float


def torchrun(words: Sequence[str], fault: Fault | None = None, *flags: str) -> Done:
    """`torchrun --nproc-per-node 2 moco.pretrain`, to its end."""
    start = time.monotonic()
    process = start_torchrun(words, fault, *flags)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return Done([process.returncode], err, out, time.monotonic() - start)


def start_torchrun(
    words: Sequence[str], fault: Fault | None = None, *flags: str
) -> "subprocess.Popen[str]":
    """The same, not waited for."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", *flags, str(Path(__file__).resolve()), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if fault:
        environment[FAULT] = json.dumps(asdict(fault))
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_ranks(
    world: int, words: Sequence[str], tmp: Path, fault: Fault | None = None, timeout: float = 300
) -> Done:
    """`python -m moco.pretrain` in `world` connected processes."""
    context = _server()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    variables = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            FAULT: json.dumps(asdict(fault)) if fault else "",
        }
        for rank in range(world)
    ]
    ranks = [
        context.Process(target=_rank, args=(variable, list(words), str(tmp / f"rank{rank}")))
        for rank, variable in enumerate(variables)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(max(0.0, start + timeout - time.monotonic()))
        if rank.is_alive():
            rank.kill()
            rank.join()
    said = ["".join((tmp / f"rank{r}.{s}").read_text() for r in range(world)) for s in ("e", "o")]
    return Done([rank.exitcode or 0 for rank in ranks], *said, time.monotonic() - start)


def kill_while_saving(folder: Path, call: int) -> int:
    """A process that saves checkpoints in a loop, and old ones' removal; killed on its way.

    Args:
        call: before which call, from 1, that opens, moves, flushes or removes a file there.

    Returns:
        The last step that it reported as saved, 0 if none.
    """
    context = _server()
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
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if text.encode() in (entry / "cmdline").read_bytes() and state != "Z":
                    found.append(int(entry.name))
    return found


def _server() -> "multiprocessing.context.ForkServerContext":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moco.pretraining.run", "torch.nn.parallel"])
    return context


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

    from moco.engine.checkpoint import (
        FORMAT,
        checkpoint_name,
        newest_checkpoint,
        remove_old_checkpoints,
        save_checkpoint,
    )

    found = newest_checkpoint(folder)
    step = found[1]["step"] + 1 if found else 1
    state: dict[str, object] = {
        **{key: {} for key in ("optimizer", "encoder", "input", "config")},
        **{"epoch": 0, "arch": "none", "format": FORMAT, "step": step, "seconds": 0.0},
        **{"seed": 0, "num_images": 1, "state_dict": {"x": torch.full((200_000,), step)}},
    }
    save_checkpoint(Path(folder, checkpoint_name(0, step)), state)
    remove_old_checkpoints(folder, keep=2, milestone_epochs=0)
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
    from moco.modeling.mechanisms.base import Mechanism
    from moco.pretraining.run import Pretraining
    from tests.oracles.stopping import hold_at

    mine = int(os.environ["RANK"]) == fault.rank

    def add(self: MetricsLog, step: int, *values: float) -> None:
        original(self, step, *values)
        if mine and step + 1 == fault.step and fault.signal:
            os.kill(os.getppid() if fault.to_parent else os.getpid(), fault.signal)

    original: Callable[..., None] = MetricsLog.add
    MetricsLog.add = add  # type: ignore[method-assign,assignment]
    if fault.hold:
        hold_at(fault.step + 1)
    if mine and fault.nan is not None:
        calls = iter(range(10**9))

        def poison(module: Mechanism, args: object, out: tuple[object, ...]) -> object:
            now = next(calls) + 1 == fault.step
            return out._replace(loss=out.loss * fault.nan) if now else out  # type: ignore

        build = Pretraining.__init__

        def poisoned(self: Pretraining, *args: object) -> None:
            build(self, *args)  # type: ignore[arg-type]
            self.model.register_forward_hook(poison)

        Pretraining.__init__ = poisoned  # type: ignore[method-assign]


if __name__ == "__main__":
    import moco.pretraining.run  # noqa: F401  before they meet
    from tests.oracles.processes import meet

    meet()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _pretrain()
