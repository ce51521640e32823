"""What every training loop here needs around its steps.

Log lines, reading ahead, and finding what to resume; moco/engine/saver.py saves.
"""

import atexit
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moco.common import distributed
from moco.common.cfgnode import flatten
from moco.common.command import AUTO
from moco.common.errors import DataError, UserError, kill_children
from moco.common.run import METRICS_NAME, RunFolder, drop_metrics
from moco.engine.schedule import LearningRate
from moco.engine.stop import ignore_stop_signals

if TYPE_CHECKING:
    import torch
    from fvcore.common.config import CfgNode

T = TypeVar("T")
LENGTH = ("SOLVER.MAX_EPOCHS", "SOLVER.MAX_ITERS")  # what --extend may change


def as_it_is(batch: Any) -> Any:
    """A collate function for datasets that make whole batches."""
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
    """A loader for a dataset that makes whole batches.

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
            f"a process that reads images died or hangs ({reason}); out of memory or of "
            "/dev/shm, or a slow disk? Lower DATA.NUM_WORKERS or DATA.CACHE_MIB, or raise "
            "DATA.WORKER_TIMEOUT_SECONDS, then --resume"
        ) from error


def find_checkpoint(resume: str, folder: Path, form: str) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from: its path and content; None where there is none.

    Args:
        resume: `"auto"` for the newest one in `folder`, or a path.
        form: a format of `moco.engine.checkpoint`.

    Raises:
        DataError: damaged.
    """
    from moco.engine.checkpoint import load_checkpoint, newest_checkpoint

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
    path: Path,
    state: Mapping[str, Any],
    cfg: "CfgNode",
    num_images: int,
    places: Sequence[str],
    extend: bool = False,
) -> None:
    """Whether a checkpoint was made by a run with these keys and as many images.

    Args:
        places: keys that may differ. extend: so may the length of the run.

    Raises:
        UserError: with other keys. DataError: with other data.
    """
    mine, theirs = flatten(cfg), dict(state["config"])
    places = (*places, *LENGTH) if extend else places
    for key in sorted(mine.keys() | theirs.keys()):
        if any(key == place or key.startswith(f"{place}.") for place in places):
            continue
        if key not in mine or key not in theirs:
            raise UserError(
                f"{path}: was written by another version of this project, in which {key} is "
                f"{'missing' if key in mine else 'known'}; use that version, or start from scratch"
            )
        if _plain(mine.get(key)) != _plain(theirs.get(key)):
            longer = ", make it longer with --extend" if key in LENGTH else ""
            raise UserError(
                f"{path}: was trained with {key} {theirs.get(key)!r}, this run has "
                f"{mine.get(key)!r}; set the same{longer}, or set another OUTPUT_DIR"
            )
    if state["num_images"] != num_images:
        raise DataError(
            f"{cfg.DATA.ROOT}: holds {num_images} images, the run in {path} was "
            f"started with {state['num_images']}; give the same data or start from scratch"
        )


def extensions(
    path: Path, state: Mapping[str, Any], rate: LearningRate, cfg: "CfgNode", extend: bool
) -> list[str]:
    """A note for each time that the run in a checkpoint was made longer.

    Args:
        rate: of the run as it is now, longer if `extend`.

    Raises:
        UserError: a run that is to be extended is not longer than before.
    """
    notes = [str(note) for note in state.get("extensions", [])]
    step = state["step"]
    before = state.get("total_steps", step)
    # The same command again: an extended run was interrupted, or is finished.
    if not extend or (rate.total_steps == before and (step < before or notes)):
        return notes
    if rate.total_steps <= before:
        raise UserError(
            f"--extend: {path} is of a run of {before} steps, and this one has {rate.total_steps}; "
            f"set a larger {' or '.join(key for key in LENGTH if key in flatten(cfg))}"
        )
    note = f"extended from {before} to {rate.total_steps} steps, after step {step}"
    if rate.kind == "cosine":
        last = state["optimizer"]["param_groups"][0]["lr"]
        note += (
            f"; not equivalent to a run of {rate.total_steps} steps: the cosine of the shorter one "
            f"had come down to a learning rate of {last:g}, and the longer one's goes on at "
            f"{rate(step):g}"
        )
    return [*notes, note]


def print_notes(notes: Iterable[str]) -> None:
    """What a reader of the result has to know; on the main process."""
    if distributed.is_main():
        for note in notes:
            print(f"note: {note}", flush=True)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


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
        """One line for the state after `done` steps."""
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
        """See `moco.common.run.drop_metrics`."""
        if self._folder is not None:
            drop_metrics(self._folder.path, step)

    def close(self) -> None:
        """Write what the event files have not written yet."""
        if self._events:
            self._events.close()


class StepLog:
    """A line of metrics.json every so many steps: means over the steps since the last one.

    They travel in the checkpoints, so that a resumed run writes the lines of an uninterrupted one.

    Args:
        metrics: where the lines go. every_iters: LOG.EVERY_ITERS.
        total_steps, batch_size: of the run. accuracy: its name in the lines.
    """

    def __init__(
        self,
        metrics: MetricsLog,
        every_iters: int,
        total_steps: int,
        batch_size: int,
        accuracy: str,
    ) -> None:
        self._metrics, self._accuracy = metrics, accuracy
        self._every, self._total_steps, self._batch_size = every_iters, total_steps, batch_size
        self._values: list[tuple[float, float]] = []
        self._since = time.monotonic()

    def add(self, step: int, loss: float, accuracy: float, lr: float) -> None:
        """The values of a step; writes a line if it is due."""
        self._values.append((loss, accuracy))
        if (step + 1) % self._every and step + 1 != self._total_steps:
            return
        now, steps = time.monotonic(), len(self._values)
        self._metrics.write(
            step + 1,
            {
                "loss": sum(loss for loss, _ in self._values) / steps,
                self._accuracy: sum(accuracy for _, accuracy in self._values) / steps,
                "lr": lr,
                "images_per_second": steps * self._batch_size / (now - self._since),
            },
        )
        self._values.clear()
        self._since = now

    def pause(self, seconds: float) -> None:
        """So much time went into something else than training."""
        self._since += seconds

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._values), "seconds": time.monotonic() - self._since}

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint holds of it; earlier versions saved nothing."""
        if "step_log" not in state:
            return
        try:
            saved = state["step_log"]
            self._values = [(float(loss), float(accuracy)) for loss, accuracy in saved["values"]]
            self._since = time.monotonic() - float(saved["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: a malformed 'step_log'") from error


def _event_files(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("LOG.TENSORBOARD: tensorboard is not installed; metrics.json has the same numbers")
        return None
    return SummaryWriter(str(folder))
