"""What every training loop here needs around its steps.

Log lines, reading ahead, saving when it is due, and finding what to resume.
"""

import atexit
import json
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moco import distributed
from moco.cfgnode import flatten
from moco.command import AUTO
from moco.errors import DataError, NumericError, UserError, kill_children
from moco.fileio import atomic_write_text
from moco.run import METRICS_NAME, RunFolder
from moco.stop import ignore_stop_signals, leave

if TYPE_CHECKING:
    import torch
    from fvcore.common.config import CfgNode

T = TypeVar("T")


def as_it_is(batch: Any) -> Any:
    """A collate function for data sets that make whole batches."""
    return batch


def set_up_torch(num_threads: int, deterministic: bool) -> None:
    """Threads (0: torch's choice), and whether kernels have to give the same bits each time."""
    import torch

    if deterministic:  # what cuBLAS asks for, before its first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if num_threads:
        torch.set_num_threads(num_threads)
    torch.backends.cudnn.benchmark = not deterministic
    torch.use_deterministic_algorithms(deterministic)


def batch_loader(dataset: Any, batch_sampler: Any, data: "CfgNode", device: "torch.device") -> Any:
    """A loader for a data set that makes whole batches.

    Args:
        data: the keys under DATA. device: where the batches go.
    """
    import torch

    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=data.NUM_WORKERS,
        collate_fn=as_it_is,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_stop_signals,
        timeout=data.WORKER_TIMEOUT_SECONDS if data.NUM_WORKERS else 0,
    )


def autocast(device: "torch.device", precision: str) -> AbstractContextManager[None]:
    """What SOLVER.PRECISION asks for: nothing (fp32), or products in bf16 or fp16."""
    import torch

    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")


def read_ahead(loader: Iterable[T]) -> Iterator[T]:
    """The loader's batches.

    Raises:
        DataError: one of its processes died or hangs.
    """
    # The processes ignore SIGTERM, with which multiprocessing would end, and then await, those that
    # an error has left behind. What is registered last is called first.
    atexit.unregister(kill_children)
    atexit.register(kill_children)
    try:
        yield from loader
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        if "DataLoader worker" not in reason and "DataLoader timed out" not in reason:
            raise
        raise DataError(
            f"a process that reads pictures died or hangs ({reason}); out of memory or of "
            "/dev/shm, or a slow disk? Lower DATA.NUM_WORKERS or DATA.CACHE_MIB, or raise "
            "DATA.WORKER_TIMEOUT_SECONDS, then --resume"
        ) from error


@dataclass(frozen=True)
class Saver:
    """Saves a run's state after the steps that are due, and leaves when a stop was asked for.

    Attributes:
        folder: of the run.
        steps_per_epoch, total_steps: of the whole run.
        every: the keys under CHECKPOINT.
        stop_at: SOLVER.STOP_AT_ITERS.
        content: what to save after so many steps; all processes call it together.
    """

    folder: Path
    steps_per_epoch: int
    total_steps: int
    every: "CfgNode"
    stop_at: int
    content: Callable[[int], Mapping[str, Any]]

    def last_checkpoint(self) -> Path:
        """What the last step saves, also where another machine's folder holds it."""
        from moco.checkpoint import checkpoint_name

        return self.folder / checkpoint_name(math.ceil(self.total_steps / self.steps_per_epoch) - 1)

    def save_if_due(self, step: int, stop_signal: int | None) -> None:
        """Save after this step if the schedule, the end, or a stop asks for it.

        Raises:
            Preempted, KeyboardInterrupt: saved, and this was the last step before stopping.
        """
        from moco.checkpoint import checkpoint_name, remove_old_checkpoints, save_checkpoint

        done, every = step + 1, self.every
        finished = done == self.total_steps
        epoch, into_epoch = divmod(done, self.steps_per_epoch)
        stop = not finished and (stop_signal is not None or done == self.stop_at)
        due = into_epoch == 0 and epoch % every.EVERY_EPOCHS == 0
        due |= every.EVERY_ITERS > 0 and done % every.EVERY_ITERS == 0
        if not (finished or stop or due):
            return
        if finished or into_epoch == 0:
            name = checkpoint_name(math.ceil(done / self.steps_per_epoch) - 1)
        else:
            name = checkpoint_name(epoch, done)
        content = self.content(done)
        if distributed.is_main():
            save_checkpoint(self.folder / name, content)
            remove_old_checkpoints(self.folder, every.KEEP, every.MILESTONE_EPOCHS)
        if stop:
            distributed.barrier()  # no process ends before the file is there
            # Where the schedule stops the run, as where another process was asked.
            number = signal.SIGTERM if stop_signal is None else stop_signal
            leave(number, f"step {done} of {self.total_steps}", self.folder / name)


def find_checkpoint(resume: str, folder: Path, form: str) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from: its path and content; None where there is none.

    Args:
        resume: ``"auto"`` for the newest one in ``folder``, or a path.
        form: a format of :mod:`moco.checkpoint`.

    Raises:
        DataError: damaged.
    """
    from moco.checkpoint import load_checkpoint, newest_checkpoint

    if resume != AUTO:
        return Path(resume), load_checkpoint(resume, form)
    found = newest_checkpoint(folder, form)
    if distributed.is_main():
        if found is None:
            print(f"no checkpoint in {folder}: starting anew", flush=True)
        for warning in found[2] if found else ():
            print(f"warning: {warning}", flush=True)
    return found[:2] if found else None


def check_same_run(
    path: Path, state: Mapping[str, Any], cfg: "CfgNode", num_images: int, places: Sequence[str]
) -> None:
    """Whether a checkpoint was made by a run with these keys and as many pictures.

    Args:
        places: keys that may differ.

    Raises:
        UserError: with other keys. DataError: with other data.
    """
    mine, theirs = flatten(cfg), dict(state["config"])
    for key in sorted(mine.keys() | theirs.keys()):
        if any(key == place or key.startswith(f"{place}.") for place in places):
            continue
        if key not in mine or key not in theirs:
            raise UserError(
                f"{path}: was written by another version of this project, in which {key} is "
                f"{'missing' if key in mine else 'known'}; go on with that version, or start anew"
            )
        if _plain(mine.get(key)) != _plain(theirs.get(key)):
            raise UserError(
                f"{path}: was trained with {key} {theirs.get(key)!r}, this run has "
                f"{mine.get(key)!r}; set the same, or start anew in another OUTPUT_DIR"
            )
    if state["num_images"] != num_images:
        raise DataError(
            f"{cfg.DATA.ROOT}: holds {num_images} pictures, the run in {path} was "
            f"started with {state['num_images']}; give the same data or start anew"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def check_finite(loss: float, step: int, folder: Path) -> None:
    """Stop before a loss that is not a number reaches the weights.

    Raises:
        NumericError: naming the step and the last good checkpoint in ``folder``.
    """
    if math.isfinite(loss):
        return
    from moco.checkpoint import list_checkpoints

    saved = list_checkpoints(folder)
    last = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint yet"
    raise NumericError(
        f"loss is {loss} at step {step}; {last}; lower SOLVER.BASE_LR or add SOLVER.WARMUP_ITERS"
    )


class MetricsLog:
    """metrics.json and, if wanted, the same numbers as event files.

    Args:
        folder: of the run; None: another process writes.
        steps_per_epoch: to tell the epoch of a step.
        tensorboard: write event files where tensorboard is installed.
    """

    def __init__(self, folder: RunFolder | None, steps_per_epoch: int, tensorboard: bool) -> None:
        self._folder, self._steps_per_epoch = folder, steps_per_epoch
        self._events = _event_files(folder.path) if folder and tensorboard else None

    def write(self, done: int, values: dict[str, float]) -> None:
        """One line for the state after ``done`` steps."""
        if self._folder is None:
            return
        self._folder.log({"iteration": done, "epoch": done / self._steps_per_epoch, **values})
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(name, value, done)

    def last(self) -> dict[str, tuple[int, float]]:
        """For each name the last line's iteration and value."""
        last: dict[str, tuple[int, float]] = {}
        if self._folder is not None and (self._folder.path / METRICS_NAME).exists():
            for line in (self._folder.path / METRICS_NAME).read_text().splitlines():
                values = json.loads(line)
                last |= {name: (values["iteration"], value) for name, value in values.items()}
        return last

    def drop_after(self, step: int) -> None:
        """Remove lines of steps that will be done again, and a line cut off by a crash."""
        if self._folder is None or not (self._folder.path / METRICS_NAME).exists():
            return
        path, kept = self._folder.path / METRICS_NAME, []
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["iteration"] <= step:
                    kept.append(line)
            except ValueError:
                continue
        atomic_write_text(path, "".join(f"{line}\n" for line in kept))

    def close(self) -> None:
        """Write what the event files have not written yet."""
        if self._events:
            self._events.close()


def _event_files(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("LOG.TENSORBOARD: tensorboard is not installed; metrics.json has the same numbers")
        return None
    return SummaryWriter(str(folder))
