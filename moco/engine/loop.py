"""Training loop of pre-training and classification: step, log, save, stop, evaluate, record."""

import signal
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moco.common import distributed
from moco.common.async_copy import AsyncScalars
from moco.common.cfgnode import flatten
from moco.common.errors import DataError, UserError, echo, plural
from moco.common.files import atomic_write_text
from moco.common.keys import Role, names_of
from moco.common.progress import Progress
from moco.common.run import (
    RunFolder,
    RunRecord,
    metrics_lines,
    provenance,
    write_record,
)
from moco.engine.checkpoint import PREFIX, Found, load_checkpoint, resume_run
from moco.engine.config import protocol_sha256
from moco.engine.keys import FORMER, RESUMABLE
from moco.engine.loggers import StepLog, select_values
from moco.engine.saver import Saver
from moco.engine.stop import stop_signals
from moco.engine.training import Step, Training, print_notes
from moco.modeling.synced_bn import mean_statistics, set_statistics

LENGTH = ("SOLVER.MAX_EPOCHS", "SOLVER.MAX_ITERS")  # what --extend may change


def train(
    training: Training[Any, Any],
    folder: RunFolder,
    resume: str | None = None,
    extend: bool = False,
    other_processes: bool | None = None,
) -> Path:
    """Train, save and evaluate; return the path of the last checkpoint.

    Args:
        training: Newly built training.
        folder: Open and locked folder of the run.
        resume: None to start from scratch, `"auto"` for the newest checkpoint in the folder (from
            scratch if there is none), or the path of a checkpoint.
        extend: Allow the checkpoint's run to be shorter.
        other_processes: Allow another number of processes; None if the command has no such option.

    Raises:
        UserError: If the checkpoint is of a different run.
        DataError: If an image or checkpoint cannot be read.
        NumericError: If the loss or a weight is not finite. After these errors the newest
            checkpoint is unchanged.
        Preempted: After SIGTERM or SOLVER.STOP_AT_ITERS; the last step was saved.
        KeyboardInterrupt: After SIGINT; the last step was saved.
    """
    state = _TrainingState(training, folder)
    state.begin(resume, extend, other_processes)
    size = training.batch_size
    with closing(state.metrics):
        total, done = training.total_steps * size, state.step * size
        reports = _Reports(state)
        bar = Progress(total, training.verb, "img", done, silent=not distributed.is_main())
        with bar, stop_signals() as stop:
            if state.step and state.last_evaluated() < state.step:
                state.evaluate_if_due(state.step)  # the run was stopped before this evaluation
            for plan, batch in training.batches(state.step):
                lr = training.rate(plan.step)
                for group in training.optimizer.param_groups:
                    group["lr"] = lr
                training.optimizer.zero_grad()
                step = training.forward_backward(batch, plan)
                report = _over_processes(step, stop.received)
                training.update(step)
                reports.add(plan.step, report, lr)
                bar.update(size, **reports.shown, **state.shown)
                epoch_ends = (plan.step + 1) % training.steps_per_epoch == 0
                if epoch_ends or reports.stop or state.saver.is_due(plan.step):
                    reports.read()
                if epoch_ends:
                    training.end_epoch()
                stop_signal = (stop.received or signal.SIGTERM) if reports.stop else None
                state.saver.save_if_due(plan.step, stop_signal)
                state.evaluate_if_due(plan.step + 1)
        return state.finish()


def _over_processes(step: Step, received: int | None) -> Tensor:
    """Return the means of loss, accuracy and received signal number over all processes, (3,)."""
    number = step.loss.new_full((), float(received or 0))
    report = torch.stack([step.loss.detach(), step.accuracy, number])
    return distributed.mean_over_ranks(report)


class _Reports:
    """Reader of each step's loss, accuracy and stop request, delayed by one step.

    With the delay, the CPU does not wait for the GPU. All processes read the same reports at the
    same steps. A loss that is not finite ends a run one step late, but before anything is saved or
    evaluated.
    """

    def __init__(self, state: "_TrainingState") -> None:
        self._state = state
        self._unread: tuple[int, AsyncScalars, float] | None = None
        self.shown: dict[str, str] = {}  # the last loss, once there is one
        self.stop = False  # whether a process received a signal

    def add(self, step: int, report: Tensor, lr: float) -> None:
        """Read the report of the previous step, and keep that of this step for later."""
        unread = step, AsyncScalars(report), lr
        self.read()
        self._unread = unread

    def read(self) -> None:
        """Read the last report if it has not been read."""
        if self._unread is None:
            return
        (step, report, lr), self._unread = self._unread, None
        loss, accuracy, signals = report.tolist()
        self._state.saver.check_loss(loss, step)
        self._state.log(step + 1, loss, accuracy, lr)
        self.shown = {"loss": f"{loss:.3f}"}
        self.stop |= signals > 0


class _TrainingState:
    """State of a training and its folder: log, checkpoints, evaluations, record."""

    def __init__(self, training: Training[Any, Any], folder: RunFolder) -> None:
        self.training, self.folder = training, folder
        self.metrics = StepLog(
            folder if distributed.is_main() else None,
            smooth=lambda values: sum(values) / len(values),
            extra=lambda done: {"epoch": done / training.steps_per_epoch},
        )
        self.saver = Saver(folder.path, training, self._content)
        self.step, self.seconds_before = 0, 0.0  # done before this process started
        self.extensions: list[str] = []
        self.shown: dict[str, str] = {}
        self.opened = self.logged = time.monotonic()

    def begin(self, resume: str | None, extend: bool, other_processes: bool | None) -> None:
        """Restore the training state from `resume`, or initialize it."""
        if resume is None:
            self.saver.delete_earlier()
        else:
            resume_run(
                self.folder.path,
                read=lambda path: load_checkpoint(path, self.training.checkpoint_format),
                restore=lambda found: self._restore(found, extend, other_processes),
                total=self.training.total_steps,
                source=resume,
            )
        if self.step == 0:
            self.training.start()
        if distributed.is_main():
            atomic_write_text(self.folder.path / "config.yaml", self.training.cfg.dump())
        print_notes(self.extensions)
        self.metrics.open(self.training.cfg)

    def last_evaluated(self) -> int:
        """Return the step of the last logged evaluation; all processes call it together."""
        return distributed.max_over_ranks(
            self._last_values().get(self.training.evaluated, (0, 0.0))[0]
        )

    def log(self, done: int, loss: float, accuracy: float, lr: float) -> None:
        """Log a step; every LOG.EVERY_ITERS steps, write a line with the means and the speed."""
        training = self.training
        self._add(done, loss, accuracy)
        if done % training.cfg.LOG.EVERY_ITERS and done != training.total_steps:
            return
        images, now = len(self.metrics.recent["loss"]) * training.batch_size, time.monotonic()
        speed = images / (now - self.logged)
        self.metrics.write_smoothed(done, {"lr": lr, "images_per_second": speed})
        self.logged = now

    def _add(self, done: int, loss: float, accuracy: float) -> None:
        self.metrics.add(done, {"loss": loss, self.training.accuracy_name: accuracy})

    def evaluate_if_due(self, done: int) -> None:
        """Evaluate every `evaluate_every_epochs` epochs, except at the end of the run."""
        epoch, into_epoch = divmod(done, self.training.steps_per_epoch)
        every = self.training.evaluate_every_epochs
        if every and into_epoch == 0 and epoch % every == 0 and done != self.training.total_steps:
            self._evaluate(done)

    def finish(self) -> Path:
        """Run the last evaluation and write run.json; return the path of the last checkpoint."""
        self.training.end_epoch()
        if self.last_evaluated() != self.training.total_steps:
            self._evaluate(self.training.total_steps)
        print_notes(self._skipped())
        if distributed.is_main():
            self._write_record()
        distributed.barrier()
        return self.saver.path(self.training.total_steps)

    def _evaluate(self, done: int) -> None:
        started = time.monotonic()
        result = self.training.evaluate()
        if result is None:
            return
        self.metrics.write(done, result.metrics)
        self.shown = {"top1": f"{result.metrics[self.training.evaluated]:.1f}"}
        if distributed.is_main():
            print(f"after step {done} of {self.training.total_steps}: {result.text}", flush=True)
        self.logged += time.monotonic() - started  # the logged speed excludes evaluation

    def _skipped(self) -> list[str]:
        number, total = self.training.scaler.skipped, self.training.total_steps
        overflow = f"fp16: {number} of {total} steps were skipped, because a gradient overflowed"
        return [overflow] if number else []

    def _write_record(self) -> None:
        training, cfg, last = self.training, self.training.cfg, self._last_values()
        own = training.record()
        record = RunRecord(
            kind=training.kind,
            status="done",
            engine="moco",
            seed=cfg.SEED,
            config_sha256=protocol_sha256(cfg, training.defaults, training.config_keys),
            config=flatten(cfg),
            provenance={
                **provenance(),
                "processes": distributed.world_size(),
                "images": training.image_facts(),
            },
            iterations=training.total_steps,
            seconds=self._seconds(),
            metrics={name: last[key][1] for name, key in training.recorded.items() if key in last},
            **{**own, "notes": [*own["notes"], *self._skipped(), *self.extensions]},
        )
        write_record(self.folder.path, record)

    def _content(self, done: int) -> dict[str, Any]:
        """Return the content of a checkpoint: everything that the next step depends on.

        All processes call it together and get the same result. Order, views, BN shuffle and sampled
        negatives are functions of seed and step, so no random number generator has to be saved.

        Deviation: the running statistics in `state_dict` are the mean over the processes (the
        official code saves those of the first process). The statistics of each process, with which
        training continues, are in `statistics`.
        """
        training, cfg = self.training, self.training.cfg
        with mean_statistics(training.model) as statistics:
            state = {
                # The model gets its own statistics back before the checkpoint is written.
                f"{PREFIX}{name}": x.clone() if ".running_" in f".{name}" else x
                for name, x in training.gathered_state().items()
            }
        return {
            "epoch": done // training.steps_per_epoch,
            "arch": training.spec.arch,
            "state_dict": state,
            "optimizer": training.optimizer.state_dict(),
            "format": training.checkpoint_format,
            "encoder": asdict(training.spec),
            "input": {"channel_order": "RGB", "mean": [*cfg.AUG.MEAN], "std": [*cfg.AUG.STD]},
            "step": done,
            "seed": cfg.SEED,
            "num_images": len(training.images),
            "seconds": self._seconds(),
            "config": flatten(cfg),
            "processes": distributed.world_size(),
            "statistics": statistics,
            "scaler": training.scaler.state_dict(),
            "skipped_steps": training.scaler.skipped,
            "step_log": {
                # Values of the steps since the last line, so that a resumed run writes the lines
                # of an uninterrupted one.
                "values": list(zip(*map(select_values, self.metrics.recent.values()), strict=True)),
                "seconds": time.monotonic() - self.logged,
            },
            "extensions": self.extensions,
            **training.state_dict(),
        }

    def _restore(
        self, found: Found | None, extend: bool, other_processes: bool | None
    ) -> Path | None:
        training = self.training
        if found is None:
            if distributed.is_main():
                echo(f"no checkpoint in {self.folder.path}: starting from scratch")
            if extend:
                raise UserError(f"--extend: {self.folder.path} holds no checkpoint")
            return None
        path, state = found
        training.set_speed(state["config"])
        check_same_run(path, state, training, extend)
        world = distributed.world_size()
        same_processes = state.get("processes") == world
        if not same_processes and not other_processes:
            instead = "" if other_processes is None else ", or add --other-processes"
            raise UserError(
                f"{path}: was trained by {state.get('processes')} processes, this run has {world}; "
                f"start the same number{instead}"
            )
        weights = {name.removeprefix(PREFIX): x for name, x in state["state_dict"].items()}
        training.resume(path, state)
        try:
            training.load_gathered_state(weights)
            if same_processes:
                set_statistics(training.model, state["statistics"][distributed.rank()])
            training.optimizer.load_state_dict(state["optimizer"])
            training.scaler.load_state_dict(state["scaler"])
            training.scaler.skipped = int(state["skipped_steps"])
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"{path}: does not fit this model ({reason})") from error
        training.end_epoch()
        self.extensions = extension_notes(path, state, training, extend)
        self.step, self.seconds_before = state["step"], state["seconds"]
        self._restore_log(path, state)
        renamed = self.saver.restore(path, state)
        if distributed.is_main():
            echo(f"resuming from {path} after step {self.step} of {training.total_steps}")
        return renamed

    def _restore_log(self, path: Path, state: Mapping[str, Any]) -> None:
        try:
            saved = state["step_log"]
            first = state["step"] - len(saved["values"]) + 1
            for done, (loss, accuracy) in enumerate(saved["values"], first):
                self._add(done, float(loss), float(accuracy))
            self.logged = time.monotonic() - float(saved["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: a malformed 'step_log'") from error

    def _last_values(self) -> dict[str, tuple[int, float]]:
        """Return the last iteration and value of each name in metrics.json."""
        lines = metrics_lines(self.folder.path) if distributed.is_main() else None
        return {
            name: (line["iteration"], value) for line in lines or () for name, value in line.items()
        }

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.opened


def check_same_run(
    path: Path, state: Mapping[str, Any], training: Training[Any, Any], extend: bool
) -> None:
    """Check that a checkpoint belongs to a run with the same keys and number of images.

    Args:
        path: Path of the checkpoint, for messages.
        state: Content of the checkpoint.
        training: Training that resumes from the checkpoint.
        extend: Allow another length of the run.

    Raises:
        UserError: If a key differs that must not change when a run is resumed.
        DataError: If the number of images differs.
    """
    may_change = (*names_of(training.config_keys, Role.PLACE, Role.SPEED), *RESUMABLE, *FORMER)
    if extend:
        may_change += LENGTH
    mine = flatten(training.cfg)
    theirs = {**flatten(training.defaults), **state["config"]}
    for key in sorted(mine.keys() | theirs.keys()):
        if key in may_change:
            continue
        if key not in mine:
            raise UserError(
                f"{path}: was written by another version of this project, which has the key {key}; "
                "use that version, or start from scratch"
            )
        if _plain(mine[key]) != _plain(theirs[key]):
            longer = ", make it longer with --extend" if key in LENGTH else ""
            raise UserError(
                f"{path}: was trained with {key} {theirs[key]!r}, this run has "
                f"{mine[key]!r}; set the same{longer}, or set another OUTPUT_DIR"
            )
    if state["num_images"] != len(training.images):
        raise DataError(
            f"{training.cfg.DATA.ROOT}: has {plural(len(training.images), 'image')}, the run in "
            f"{path} was started with {state['num_images']}; give the same data or start from "
            "scratch"
        )


def extension_notes(
    path: Path, state: Mapping[str, Any], training: Training[Any, Any], extend: bool
) -> list[str]:
    """Return one note for each extension of the run in a checkpoint, including this one.

    Raises:
        UserError: If `extend` is set, but the run is not longer than before.
    """
    notes = [str(note) for note in state.get("extensions", [])]
    step, total, rate = state["step"], training.total_steps, training.rate
    before = state.get("total_steps", step)
    # The same command was repeated: the extended run was interrupted, or is finished.
    if not extend or (total == before and (step < before or notes)):
        return notes
    if total <= before:
        raise UserError(
            f"--extend: {path} is of a run of {before} steps, this one has {total}; "
            f"set a larger {' or '.join(key for key in LENGTH if key in flatten(training.cfg))}"
        )
    note = f"extended from {before} to {total} steps, after step {step}"
    if rate.of_total(before)(step - 1) != rate(step - 1):
        last = state["optimizer"]["param_groups"][0]["lr"]
        note += (
            f"; not equivalent to a run of {total} steps: the schedule of the shorter run ended at "
            f"a learning rate of {last:g}, that of the longer run continues at {rate(step):g}"
        )
    return [*notes, note]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
