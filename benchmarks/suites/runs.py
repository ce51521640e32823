"""Run of a suite: command, state and log of one process, which has a folder.

No number is read from a log. Files of a run:

run.json      the run's record, written last: the run is done when its status is `done`
suite.log     output of its processes
.claim        lock of the process that computes the run, with the id and host of the process
failed.json   why the run failed; no table has a failed run
"""

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from benchmarks.suites import forkserver, locks
from benchmarks.suites.checks import Findings, check, command_keys
from benchmarks.suites.locks import Lock
from benchmarks.suites.suite import (
    DETECTION,
    DETECTRON2,
    EMBEDDED,
    GRID_POINT,
    RunSpec,
)
from convert.read import find_file
from detection.config.engines import detectron2_installed
from moco.common import pretrained
from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import RANDOM, quote
from moco.common.errors import UserError, printable
from moco.common.files import atomic_write_json, open_file, read_text
from moco.common.pretrained import LocalWeights
from moco.common.run import METRICS_NAME, RECORD_NAME, RunRecord, read_record
from moco.engine.checkpoint import read_pointer

LOG_NAME, LOCK_NAME, FAILED_NAME = "suite.log", ".claim", "failed.json"
DONE, RUNNING, FAILED, STOPPED, WAITING = "done", "running", "failed", "interrupted", "waiting"
QUEUED = "queued"  # a job of a cluster that has not started
CHECKPOINT = "checkpoint"  # field of a lock: the newest checkpoint when the process started
STARTS = "starts"  # field of a lock: number of jobs started from the same checkpoint
MAX_INTERRUPTIONS = 3  # consecutive interruptions without a new checkpoint, after which a run fails
# Placeholders in the command of a run on several machines; each machine replaces them.
RANK, HOST, PORT = "<rank>", "<host>", "<port>"
TAIL_BYTES = 1 << 18  # more than the longest line, with the AP of each of a thousand classes
PER_IMAGE, CACHE_DIR = "MODEL.BACKBONE.PER_IMAGE", "MODEL.BACKBONE.CACHE_DIR"
_T = TypeVar("_T")
PLOTTED_IMAGES = 4  # images with plotted predictions, for the report
_DETECTION = {DETECTION: "detection.train_net", GRID_POINT: "benchmarks.suites.grid_point"}
_SIGNALS = "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"  # by default the last two would kill torchrun


@dataclass(frozen=True)
class State:
    """State of a run.

    Attributes:
        kind: `done`, `running`, `failed`, `interrupted` (to be resumed), `waiting` or `queued`.
        iteration: The last logged iteration.
        text: Reason of a failure, or the process that computes the run.
        seconds: Seconds since the process of a running run started, or those of a finished run; 0
            if the record has only the seconds of the last process.
        began_at: Iteration at which the process started.
        foreign: Whether the folder holds another run, which cannot be resumed.
    """

    kind: str
    iteration: float = 0.0
    text: str = ""
    seconds: float = 0.0
    began_at: float = 0.0
    foreign: bool = False

    @property
    def settled(self) -> bool:
        """True if the run is over: done or failed."""
        return self.kind in (DONE, FAILED)

    def retried(self, retry_failed: bool) -> Self:
        """Return the state with which a runner begins: a failed run may be one to continue."""
        is_repeated = self.kind == FAILED and retry_failed and not self.foreign
        return replace(self, kind=STOPPED) if is_repeated else self


@dataclass(frozen=True)
class Run:
    """Training or other process of a suite, with its folder.

    Attributes:
        name: Unique name in a plan.
        title: Human-readable name.
        folder: Folder of the files of the run.
        argv: Command that starts or resumes the run: the interpreter, `-m`, a module, arguments.
        speed_key: Task, engine and number of GPUs; runs of one key take equally long per iteration.
        gpus: Number of GPUs; 0: on the CPU.
        iterations: Iterations of the whole run; 0 if not known yet.
        seconds_per_iteration: Stated speed, or None.
        after: Names of the runs on which the run depends.
        product: File or folder that the run makes in one step; None if it writes a record.
        expected: Name → value of the fields of the record that are known in advance.
        in_grid: Whether the run is a point of a grid, which is in no table and may diverge.
    """

    name: str
    title: str
    folder: Path
    argv: Sequence[str]
    speed_key: tuple[str, str, int] = ("", "", 0)
    gpus: int = 0
    iterations: int = 0
    seconds_per_iteration: float | None = None
    after: tuple[str, ...] = ()
    product: Path | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)
    in_grid: bool = False

    @property
    def log(self) -> Path:
        """Path of the log to which the processes of the run append."""
        return self.folder / LOG_NAME

    @property
    def lock(self) -> Path:
        """Path of the file that the process of the run locks."""
        return self.folder / LOCK_NAME

    def iteration(self) -> float:
        """Read the iteration of the last complete line of `metrics.json`; 0 if there is none."""
        try:
            with open_file(self.folder / METRICS_NAME) as file:
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
        """Return the finished share of the iterations, 0..1; 0 if their number is unknown."""
        return min(state.iteration / self.iterations, 1.0) if self.iterations else 0.0

    def checkpoint(self) -> str:
        """Return the name of the newest checkpoint; empty before the first.

        A new name is progress. A new line in `metrics.json` is not: iterations after the newest
        checkpoint are repeated, and a checkpoint may be newer than the last line.
        """
        return read_pointer(self.folder)

    def record(self) -> RunRecord | None:
        """Read the record, or return None if there is none."""
        path = self.folder / RECORD_NAME
        return read_record(path) if path.is_file() else None

    def state(self, *, locked: bool = False) -> State:
        """Read the state from the files of the run; write nothing.

        Args:
            locked: Whether the caller holds the lock, so that no other process computes the run.
        """
        iteration = self.iteration()
        remedy = f"remove {self.folder}, and the same command computes it again"
        if self.product is not None and self.product.exists():
            return State(DONE)
        try:
            record = self.record()
        except UserError as error:
            return State(FAILED, iteration, f"{error}; {remedy}", foreign=True)
        if record is not None and (record.status == "done" or (self.in_grid and record.diverged)):
            for name, value in self.expected.items():
                if (got := getattr(record, name)) != value:
                    text = f"{self.folder / RECORD_NAME} is not of this run: "
                    text += f"{name} is {got}, expected {value}; {remedy}"
                    return State(FAILED, text=text, foreign=True)
            began = locks.read_holder(self.lock)
            resumed = began.get(CHECKPOINT) or began.get("iteration")
            # The record of a resumed detection run has only the seconds of the last process.
            partial = record.kind == "detection" and resumed
            return State(DONE, record.iterations, seconds=0.0 if partial else record.seconds)
        if not locked and locks.is_held(self.lock):
            holder = locks.read_holder(self.lock)
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
        """Write into the lock which process computes the run, and from which checkpoint."""
        at = {"iteration": self.iteration(), CHECKPOINT: self.checkpoint()}
        lock.write(holder_info() | at | more)

    def has_progressed(self) -> bool:
        """Return whether a checkpoint was written since the process started."""
        return self.checkpoint() != locks.read_holder(self.lock).get(CHECKPOINT, "")

    def note_start(self, where: str = "") -> int:
        """Log the start of a process, and return the offset at which the output begins."""
        with open_file(self.log, "a", encoding="utf-8") as file:
            now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            file.write(f"--- {now}{where}: {quote(*self.argv)}\n")
        return self.log.stat().st_size

    def fail(self, error: str, exit_code: int) -> None:
        """Write `failed.json`; the caller holds the lock."""
        utc = datetime.now(UTC).isoformat(timespec="microseconds")
        content = {"error": error, "exit_code": exit_code, "utc": utc}
        atomic_write_json(self.folder / FAILED_NAME, content)

    def failure(self) -> dict[str, Any]:
        """Read `failed.json`; empty without a failure. The time `utc` identifies a failure."""
        return read_json(self.folder / FAILED_NAME)

    def forget_failure(self) -> None:
        """Remove the traces of a failure before the run is repeated; the caller holds the lock."""
        (self.folder / FAILED_NAME).unlink(missing_ok=True)
        record = self.record()
        if record is not None and record.status != "done":
            (self.folder / RECORD_NAME).unlink()


def holder_info() -> dict[str, Any]:
    """Return host, id and time of this process, the holder of a lock."""
    now = datetime.now(UTC)
    return {
        "host": socket.gethostname(),
        "runner": os.getpid(),
        "utc": now.strftime("%Y-%m-%d %H:%M UTC"),
        "time": now.timestamp(),
    }


def interrupted_error(why: str = "") -> str:
    """Return the error of a run that was interrupted `MAX_INTERRUPTIONS` times without progress."""
    text = f"it was interrupted {MAX_INTERRUPTIONS} times without a new checkpoint in between"
    return f"{text}; {why}" if why else text


def why_failed(run: Run, code: int, log_start: int) -> str:
    """Return why a run failed: the last `error:` line of the process, or else the last line.

    Args:
        run: Run whose process has ended.
        code: Exit code of the process; negative: the signal that killed it.
        log_start: Offset in the log at which the output of the process begins.
    """
    if code < 0:
        return f"it was killed by signal {-code} ({signal.Signals(-code).name})"
    if code == 0:
        return (
            "it ended without a record" if run.product is None else "it ended without its product"
        )
    with open_file(run.log) as file:
        file.seek(log_start)
        text = file.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1].removeprefix("error: ").strip()


def read_json(path: Path) -> dict[str, Any]:
    """Read a mapping from a JSON file; empty if there is no file.

    Raises:
        UserError: If the file is damaged.
    """
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping, got {type(content).__name__}")
    return content


class SuiteFailed(UserError):
    """Failure of some runs of a suite whose other runs have finished."""

    exit_code = 1


def raise_failures(runs: Sequence[Run], states: Mapping[str, State], retried: bool) -> None:
    """Print the runs that failed or were cancelled; raise SuiteFailed if there are any."""
    failed = [each for each in runs if states[each.name].kind == FAILED]
    cancelled = [each for each in runs if not states[each.name].settled]
    for what, which in (("failed", failed), ("cancelled", cancelled)):
        for each in which:
            print(f"{what}: {each.title}: {printable(states[each.name].text)}", file=sys.stderr)
    if failed:
        raise SuiteFailed(
            f"{len(failed)} of {len(runs)} runs failed and are in no number; fix the causes named "
            f"above, then repeat the command{'' if retried else ' with --retry-failed'}"
        )
    if cancelled:
        raise SuiteFailed(
            f"the jobs of {len(cancelled)} of {len(runs)} runs were cancelled; the same command "
            "submits them again, and they resume from their checkpoints"
        )


class Programs:
    """Programs of this project, which tests replace by small ones.

    Only child processes import torch. benchmarks/suites/checks.py documents the checks.
    """

    def not_downloaded(self, weights: Mapping[str, str]) -> dict[str, str]:
        """Return init → description of the download, for inits that need one."""
        needed = _map_inits(pretrained.describe_download, weights)
        return {init: what for init, what in needed.items() if what}

    def locate(self, weights: Mapping[str, str]) -> dict[str, LocalWeights | None]:
        """Find or download the file of each init; None stands for random initialization.

        Raises:
            UserError: If weights cannot be downloaded, or are in a folder without any.
        """
        files = {init: text for init, text in weights.items() if text != RANDOM}
        found = _map_inits(find_file, files)
        return {init: found.get(init) for init in weights}

    def choose_engines(self, wanted: str) -> tuple[str, ...]:
        """Return the detection engines for `auto`, `detectron2`, `embedded` or `each`.

        Only `check` imports Detectron2, which takes longer than the rest of a dry run.

        Raises:
            UserError: If Detectron2 is needed and not installed.
        """
        if wanted == EMBEDDED or (wanted == "auto" and not detectron2_installed()):
            return (EMBEDDED,)
        if not detectron2_installed():
            raise UserError(
                f"--engine {wanted}: Detectron2 is not installed; install it as README.md "
                "describes, or use --engine embedded"
            )
        return (DETECTRON2, EMBEDDED) if wanted == "each" else (DETECTRON2,)

    def unreadable(self, files: Sequence[Path]) -> dict[Path, str]:
        """Return unreadable file → reason."""
        return forkserver.call(_unreadable, list(files)) if files else {}

    def check(self, specs: Sequence[RunSpec], on_gpus: bool, scored: Sequence[str]) -> Findings:
        """Check the runs in a child process, see benchmarks/suites/checks.py."""
        return forkserver.call(check, list(specs), on_gpus, list(scored))

    def convert(self, specs: Sequence[RunSpec], folder: Path) -> list[str]:
        """Convert the weights of detection runs once for all of them, in a child process.

        Args:
            specs: Runs with the paths of the weights.
            folder: Folder of the converted files.

        Returns:
            The weights of each run.
        """
        return forkserver.call(_convert, list(specs), folder)

    def command(self, spec: RunSpec, folder: Path, machines: int = 1) -> list[str]:
        """Return the command that starts or resumes a run.

        The command for several machines has placeholders that each machine replaces, see `RANK`.

        Args:
            spec: Run with the paths of the weights and of the task file.
            folder: Folder of the run.
            machines: Number of machines of the run.
        """
        keys = [*command_keys(spec), "OUTPUT_DIR", str(folder), "SEED", str(spec.seed)]
        if spec.program in _DETECTION:
            gpus = max(spec.gpus // machines, 1)
            flags = ["--engine", spec.engine, "--resume", "--num-gpus", str(gpus)]
            if machines > 1:
                flags += ["--num-machines", str(machines), "--machine-rank", RANK]
                flags += ["--dist-url", f"tcp://{HOST}:{PORT}"]
            if spec.seed == 0 and not spec.in_grid:  # the report shows images of one trial
                flags += ["--visualize", str(PLOTTED_IMAGES)]
            program = ["-m", _DETECTION[spec.program], *flags, "--config-file", str(spec.config)]
            return [sys.executable, *program, *keys, "MODEL.WEIGHTS", spec.weights]
        launcher = []
        if spec.gpus > 1:
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={spec.gpus // machines}"]
            if machines > 1:
                launcher += [f"--nnodes={machines}", f"--node-rank={RANK}"]
                launcher += [f"--master-addr={HOST}", f"--master-port={PORT}"]
            else:
                launcher += ["--standalone"]
            launcher += [f"--signals-to-handle={_SIGNALS}"]
        program = ["-m", "benchmarks", spec.program, "--config-file", str(spec.config)]
        program += ["--resume=auto", "--checkpoint", spec.weights]
        if spec.weights != RANDOM:
            program += ["--init", spec.init]
        return [sys.executable, *launcher, *program, *keys]


def shared_cache(specs: Sequence[RunSpec], folder: Path) -> dict[str, list[str]]:
    """Return name → arguments of the runs that cache the maps of their backbones in `folder`.

    These are the runs of frozen backbones that compute image by image, unless their task names a
    folder.
    """
    tasks = {spec.config for spec in specs if spec.program in _DETECTION}
    files = {config: flatten(read_yaml(config)) for config in tasks}
    found = {}
    for spec in specs:
        keys = {**files.get(spec.config, {}), **dict(spec.overrides)}
        if str(keys.get(PER_IMAGE)) == "True" and not keys.get(CACHE_DIR):
            found[spec.name] = [CACHE_DIR, str(folder)]
    return found


def _convert(specs: Sequence[RunSpec], folder: Path) -> list[str]:
    from detection.config.task import weights_options
    from detection.config.weights import convert_once

    known: dict[tuple[str, str, str], str] = {}  # the trials differ in the seed only
    for spec in specs:
        key = (spec.task, spec.engine, spec.init)
        if spec.program not in _DETECTION:  # a classification needs more than the backbone
            known[key] = spec.weights
        elif key not in known:
            opts = [*command_keys(spec), "MODEL.WEIGHTS", spec.weights]
            options = weights_options(str(spec.config), opts, spec.engine)
            known[key] = convert_once(spec.weights, folder, spec.weights_sha256, **options)
    return [known[spec.task, spec.engine, spec.init] for spec in specs]


def _unreadable(files: Sequence[Path]) -> dict[Path, str]:
    from detection.config.weights import read_weights

    found = {}
    for file in files:
        try:
            read_weights(str(file))
        except UserError as error:
            found[file] = str(error)
        except Exception as error:  # a damaged file may raise anything
            found[file] = f"{file}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found


def _map_inits(function: Callable[[str], _T], weights: Mapping[str, str]) -> dict[str, _T]:
    """Return init → result of `function` for the weights.

    If weights need timm, and with it torch, a child process computes all of them.
    """
    apart = any(text.startswith("timm://") for text in weights.values())
    texts = list(weights.values())
    found = forkserver.call(_map_texts, function, texts) if apart else _map_texts(function, texts)
    return dict(zip(weights, found, strict=True))


def _map_texts(function: Callable[[str], _T], texts: Sequence[str]) -> list[_T]:
    return [function(text) for text in texts]
