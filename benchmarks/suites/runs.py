"""A run: one process to bring to its end, in a folder of its own. Nothing is read from logs.

run.json      by the run itself, last: it is done when this says so
suite.log     what its processes printed
.claim        locked by whoever computes it, with who that is
failed.json   why it failed; no number comes from such a run
"""

import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.suites import locks
from benchmarks.suites.keep import newest_name
from benchmarks.suites.locks import Lock
from moco.common.errors import UserError
from moco.common.files import atomic_write_json
from moco.common.run import METRICS_NAME, RECORD_NAME, RunRecord, read_record

LOG_NAME, LOCK_NAME, FAILED_NAME = "suite.log", ".claim", "failed.json"
DONE, RUNNING, FAILED, STOPPED, WAITING = "done", "running", "failed", "interrupted", "waiting"
QUEUED = "queued"  # a job of a cluster that has not begun
CHECKPOINT = "checkpoint"  # in a lock: the newest checkpoint when the process began
STARTS = "starts"  # in a lock: how often a job was begun from the same checkpoint
MAX_FRUITLESS = 3  # interruptions in a row without a new checkpoint
TAIL_BYTES = 1 << 18  # the AP of each of a thousand classes fits on one line


@dataclass(frozen=True)
class State:
    """How far a run is.

    Attributes:
        kind: `done`, `running`, `failed`, `interrupted` (to be continued), `waiting` or `queued`.
        iteration: the last one that it has logged.
        text: why it failed, or who computes it.
        seconds: since its process started, for a running one; of the whole run for a done one, 0
            where its record has those of its last process alone.
        began_at: the iteration that its process started at.
        foreign: it failed because its folder holds another run, from which nothing resumes.
    """

    kind: str
    iteration: float = 0.0
    text: str = ""
    seconds: float = 0.0
    began_at: float = 0.0
    foreign: bool = False

    @property
    def settled(self) -> bool:
        return self.kind in (DONE, FAILED)


@dataclass(frozen=True)
class Run:
    """A process, and its folder.

    Attributes:
        name: unique in a plan; `title`: for people.
        argv: the command that starts or continues it, called when it starts: it may name a file
            that an earlier run makes.
        speed_key: runs with the same task, engine and number of GPUs take equally long per
            iteration.
        gpus: of its group; 0: on the CPU.
        iterations: of the whole run; 0: not known yet.
        seconds_per_iteration: as stated, or None.
        after: names of the runs that must be done before.
        product: the file or folder that it makes in one step, where it writes no record.
        expected: fields of its record by name, where they are known.
    """

    name: str
    title: str
    folder: Path
    argv: Callable[[], Sequence[str]]
    speed_key: tuple[str, str, int] = ("", "", 0)
    gpus: int = 0
    iterations: int = 0
    seconds_per_iteration: float | None = None
    after: tuple[str, ...] = ()
    product: Path | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.folder / LOG_NAME

    @property
    def lock(self) -> Path:
        return self.folder / LOCK_NAME

    def iteration(self) -> float:
        """That of the last whole line of `metrics.json`, 0 while there is none."""
        try:
            with open(self.folder / METRICS_NAME, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(file.tell() - TAIL_BYTES, 0))
                lines = file.read().splitlines()
        except OSError:
            return 0.0
        for line in reversed(lines):
            try:
                return float(json.loads(line)["iteration"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue
        return 0.0

    def fraction(self, state: State) -> float:
        """Share of the iterations that is done, 0..1; 0 where their number is not known."""
        return min(state.iteration / self.iterations, 1.0) if self.iterations else 0.0

    def checkpoint(self) -> str:
        """The name of the newest checkpoint; empty before the first.

        Another name is progress. `metrics.json` is not: what it tells after the newest checkpoint
        is done again, and what it does not tell yet may be saved.
        """
        return newest_name(self.folder)

    def record(self) -> RunRecord | None:
        path = self.folder / RECORD_NAME
        return read_record(path) if path.is_file() else None

    def state(self, *, locked: bool = False) -> State:
        """How far it is; reads only.

        Args:
            locked: the caller holds its lock, so nobody else computes it.
        """
        iteration = self.iteration()
        remedy = f"remove {self.folder}, and the same command computes it again"
        if self.product is not None and self.product.exists():
            return State(DONE)
        try:
            record = self.record()
        except UserError as error:
            return State(FAILED, iteration, f"{error}; {remedy}", foreign=True)
        if record is not None and record.status == "done":
            for name, value in self.expected.items():
                if (got := getattr(record, name)) != value:
                    text = f"{self.folder / RECORD_NAME} is not of this run: "
                    text += f"{name} is {got}, expected {value}; {remedy}"
                    return State(FAILED, text=text, foreign=True)
            began = locks.read(self.lock)
            resumed = began.get(CHECKPOINT) or began.get("iteration")
            # A detection run that was resumed has only its last process's in its record.
            partial = record.kind == "detection" and resumed
            return State(DONE, record.iterations, seconds=0.0 if partial else record.seconds)
        if not locked and locks.held(self.lock):
            holder = locks.read(self.lock)
            return State(
                RUNNING,
                iteration,
                f"on {holder.get('host', '?')} since {holder.get('utc', '?')}",
                max(0.0, time.time() - float(holder.get("time", math.inf))),
                float(holder.get("iteration", 0.0)),
            )
        why = self.failure().get("error", "")
        if record is not None and not why:
            why = record.notes[-1] if record.notes else "no reason recorded"
        if why:
            return State(FAILED, iteration, f"{why}; its log is {self.log}")
        return State(STOPPED if iteration > 0 or self.log.exists() else WAITING, iteration)

    def note_holder(self, lock: Lock, **more: Any) -> None:
        """Say who computes it, for `--status`, and from where."""
        now = datetime.now(UTC)
        content = {
            "host": socket.gethostname(),
            "runner": os.getpid(),
            "utc": now.strftime("%Y-%m-%d %H:%M UTC"),
            "time": now.timestamp(),
            "iteration": self.iteration(),
            CHECKPOINT: self.checkpoint(),
        }
        lock.write(content | more)

    def has_progressed(self) -> bool:
        """Whether there is a newer checkpoint than when its process began."""
        return self.checkpoint() != locks.read(self.lock).get(CHECKPOINT, "")

    def note_start(self, argv: Sequence[str], where: str = "") -> int:
        """A line in the log about the process that starts; where in the log its own lines begin."""
        with open(self.log, "a", encoding="utf-8") as file:
            now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            file.write(f"--- {now}{where}: {' '.join(argv)}\n")
        return self.log.stat().st_size

    def fail(self, error: str, exit_code: int) -> None:
        """Note that it failed; only for who holds its lock."""
        utc = datetime.now(UTC).isoformat(timespec="microseconds")
        content = {"error": error, "exit_code": exit_code, "utc": utc}
        atomic_write_json(self.folder / FAILED_NAME, content)

    def failure(self) -> dict[str, Any]:
        """What `fail` noted; empty if it has not failed. `utc` tells one failure from the next."""
        return read_json(self.folder / FAILED_NAME)

    def forget_failure(self) -> None:
        """Before a failed run is tried again; only for who holds its lock."""
        (self.folder / FAILED_NAME).unlink(missing_ok=True)
        record = self.record()
        if record is not None and record.status != "done":
            (self.folder / RECORD_NAME).unlink()


def fruitless_error(why: str = "") -> str:
    """Of a run that was interrupted `MAX_FRUITLESS` times in vain."""
    text = f"it was interrupted {MAX_FRUITLESS} times without a new checkpoint in between"
    return f"{text}; {why}" if why else text


def why_failed(run: Run, code: int, log_start: int) -> str:
    """What a process's end says about its run: its last `error:` line, else its last line.

    Args:
        log_start: bytes of the log that belong to an earlier process.
    """
    if code < 0:
        return f"it was killed by signal {-code} ({signal.Signals(-code).name})"
    if code == 0:
        return "it ended without a record" if run.product is None else "it made nothing"
    with open(run.log, "rb") as file:
        file.seek(log_start)
        text = file.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1].removeprefix("error: ").strip()


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file that is written atomically; empty if there is none.

    Raises:
        UserError: it is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping, got {type(content).__name__}")
    return content
