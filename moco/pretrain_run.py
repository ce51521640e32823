"""What a pre-training run consists of, and what happens before and after each step.

N batch, P crop size in pixels.
"""

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from moco.augment import Augmentation, apply_colors, normalize
from moco.cfgnode import cfg_sha256, flatten
from moco.checkpoint import (
    FORMAT,
    PREFIX,
    checkpoint_name,
    list_checkpoints,
    load_backbone,
    load_checkpoint,
    newest_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)
from moco.config import PLACES_AND_SPEED, pick_device
from moco.data import Batch, StepSampler, TwoViews, find_images
from moco.encoder import EncoderSpec, build_encoder
from moco.errors import DataError, NumericError, Preempted, UserError
from moco.fileio import atomic_write_text
from moco.knn import KnnInput, default_sizes, evaluate, labelled_sets
from moco.mechanisms.momentum_queue import MomentumQueue, StepOutput
from moco.progress import Progress
from moco.run import METRICS_NAME, RunFolder, RunRecord, provenance, write_record
from moco.schedule import LearningRate
from moco.shuffle_bn import shuffle_plan


class PretrainRun:
    """Model, optimiser, data and bookkeeping of one run.

    Args:
        cfg, folder, resume: see :func:`moco.pretrain.pretrain`.

    Attributes:
        step: number of steps done when the run was opened.
        total_steps, steps_per_epoch: of the whole run.
        shown: values for the progress bar.
    """

    def __init__(self, cfg: CfgNode, folder: RunFolder, resume: str | None) -> None:
        self.cfg, self.folder = cfg, folder
        self.device = pick_device(cfg.DEVICE)
        if cfg.NUM_THREADS:
            torch.set_num_threads(cfg.NUM_THREADS)
        torch.backends.cudnn.benchmark = True
        self.batch_size: int = cfg.SOLVER.BATCH_SIZE
        self.images = _find_images(cfg)
        self._notes = _notes(cfg, len(self.images))
        for note in self._notes:
            print(f"note: {note}", flush=True)
        self.steps_per_epoch = len(self.images) // self.batch_size
        self.total_steps: int = cfg.SOLVER.MAX_ITERS or cfg.SOLVER.MAX_EPOCHS * self.steps_per_epoch
        _check_milestones(cfg, self.steps_per_epoch, self.total_steps)
        self._knn_input = _knn_input(cfg)
        self._aug = augmentation_from(cfg)
        self._learning_rate = LearningRate(
            base=cfg.SOLVER.BASE_LR,
            kind=cfg.SOLVER.SCHEDULE,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            milestones_epochs=cfg.SOLVER.MILESTONES_EPOCHS,
            gamma=cfg.SOLVER.GAMMA,
            per_epoch=cfg.SOLVER.LR_UPDATE == "epoch",
            warmup_iters=cfg.SOLVER.WARMUP_ITERS,
        )
        torch.manual_seed(cfg.SEED)
        self._spec = EncoderSpec(cfg.MODEL.ARCH, cfg.MODEL.STEM, cfg.MODEL.WIDTH)
        encoder = build_encoder(self._spec, cfg.MOCO.DIM, cfg.MOCO.MLP, cfg.MOCO.BN_SPLITS)
        model = MomentumQueue(encoder, cfg.MOCO.DIM, cfg.MOCO.K, cfg.MOCO.M, cfg.MOCO.T)
        self._layout = torch.channels_last if cfg.SOLVER.CHANNELS_LAST else torch.contiguous_format
        self.model: MomentumQueue = model.to(self.device).to(memory_format=self._layout).train()
        self.optimizer = torch.optim.SGD(
            self.model.encoder_q.parameters(),
            lr=cfg.SOLVER.BASE_LR,
            momentum=cfg.SOLVER.MOMENTUM,
            weight_decay=cfg.SOLVER.WEIGHT_DECAY,
        )
        self.step, self._seconds_before = 0, 0.0
        if resume is None:
            # With --overwrite: a later --resume must not find the earlier run's.
            for path in list_checkpoints(folder.path):
                path.unlink()
        else:
            self._restore(resume)
        atomic_write_text(folder.path / "config.yaml", cfg.dump())
        self._bad_images: set[str] = set()
        self._since_log: list[tuple[float, float]] = []  # loss and accuracy of each step
        self.shown: dict[str, str] = {}
        self._tensorboard = _tensorboard(folder.path) if cfg.LOG.TENSORBOARD else None
        self._opened = self._logged = time.monotonic()

    def progress(self) -> Progress:
        """Counts pictures over the whole run."""
        total, done = self.total_steps * self.batch_size, self.step * self.batch_size
        return Progress(total, "pre-train", "img", initial=done)

    def batches(self) -> Iterator[Batch]:
        """One batch per remaining step, read ahead by the workers."""
        data, solver = self.cfg.DATA, self.cfg.SOLVER
        processes = max(1, data.NUM_WORKERS)
        dataset = TwoViews(
            self.images,
            self._aug,
            self.cfg.SEED,
            skip_bad=data.BAD_IMAGES == "skip",
            cache_bytes=(data.CACHE_MIB << 20) // processes,
        )
        sampler = StepSampler(
            len(dataset), solver.BATCH_SIZE, self.cfg.SEED, self.step, self.total_steps
        )
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=data.NUM_WORKERS,
            collate_fn=_as_it_is,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_stop_signals,
        )
        try:
            for batch in loader:
                self._count_bad_images(batch)
                yield batch
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"a process that reads pictures died ({str(error).splitlines()[0]}); out of "
                "memory or of /dev/shm? Lower DATA.NUM_WORKERS or DATA.CACHE_MIB, then --resume"
            ) from error

    def set_learning_rate(self, step: int) -> float:
        """The learning rate of this step, set in the optimiser."""
        lr = self._learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def views(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Query and key pictures (N, 3, P, P) float32 on the device, normalised."""
        pixels = batch.pixels.to(self.device, non_blocking=True).flatten(0, 1)  # (2N, 3, P, P)
        x = apply_colors(pixels, batch.params.flatten(0, 1), self._aug)
        x = normalize(x, self.cfg.AUG.MEAN, self.cfg.AUG.STD).contiguous(memory_format=self._layout)
        x_q, x_k = x.chunk(2)
        return x_q, x_k

    def forward(self, x_q: Tensor, x_k: Tensor, step: int) -> StepOutput:
        """Loss and keys, in the configured precision, keys shuffled by this step's plan."""
        plan = None
        if self.cfg.MOCO.SHUFFLE_BN:
            splits = self.cfg.MOCO.BN_SPLITS
            plan = shuffle_plan(self.batch_size, splits, self.cfg.SEED, step).to(self.device)
        bf16 = self.cfg.SOLVER.PRECISION == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return self.model(x_q, x_k, plan)

    def check_finite(self, loss: Tensor, step: int) -> None:
        """Stop before a loss that is not a number reaches weights or queue."""
        value = loss.item()
        if not math.isfinite(value):
            saved = list_checkpoints(self.folder.path)
            last = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint yet"
            raise NumericError(
                f"loss is {value} at step {step}; {last}; "
                "lower SOLVER.BASE_LR or add SOLVER.WARMUP_ITERS"
            )

    def log(self, out: StepOutput, lr: float, step: int) -> None:
        """Every LOG.EVERY_ITERS steps: means since the last line, to metrics.json."""
        self._since_log.append((out.loss.item(), out.accuracy.item()))
        self.shown = {"loss": f"{self._since_log[-1][0]:.3f}"}
        if (step + 1) % self.cfg.LOG.EVERY_ITERS and step + 1 != self.total_steps:
            return
        now = time.monotonic()
        steps = len(self._since_log)
        loss, accuracy = (sum(column) / steps for column in zip(*self._since_log, strict=True))
        self._write_metrics(
            step + 1,
            {
                "loss": loss,
                "pretext_accuracy": accuracy,
                "lr": lr,
                "images_per_second": steps * self.batch_size / (now - self._logged),
            },
        )
        self._since_log.clear()
        self._logged = now

    def save_if_due(self, step: int, received: int | None) -> None:
        """Save after this step if the schedule, the end, or a stop asks for it.

        Args:
            received: a signal that asks to stop after this step, or None.

        Raises:
            Preempted, KeyboardInterrupt: saved, and this was the last step before stopping.
        """
        done, every = step + 1, self.cfg.CHECKPOINT
        finished = done == self.total_steps
        epoch, into_epoch = divmod(done, self.steps_per_epoch)
        stop = not finished and (received is not None or done == self.cfg.SOLVER.STOP_AT_ITERS)
        due = into_epoch == 0 and epoch % every.EVERY_EPOCHS == 0
        due |= every.EVERY_ITERS > 0 and done % every.EVERY_ITERS == 0
        if not (finished or stop or due):
            return
        if finished or into_epoch == 0:
            name = checkpoint_name(math.ceil(done / self.steps_per_epoch) - 1)
        else:
            name = checkpoint_name(epoch, done)
        save_checkpoint(self.folder.path / name, self._state(done))
        remove_old_checkpoints(self.folder.path, every.KEEP, every.MILESTONE_EPOCHS)
        if stop:
            message = (
                f"stopped after step {done} of {self.total_steps} and saved "
                f"{self.folder.path / name}; run the same command with --resume to go on"
            )
            if received == signal.SIGINT:
                print(message, flush=True)
                raise KeyboardInterrupt
            raise Preempted(message)

    def evaluate_if_due(self, step: int) -> None:
        """The kNN monitor, every KNN.EVERY_EPOCHS epochs; :meth:`finish` has the last one."""
        epoch, into_epoch = divmod(step + 1, self.steps_per_epoch)
        every = self.cfg.KNN.EVERY_EPOCHS
        if every and into_epoch == 0 and epoch % every == 0 and step + 1 != self.total_steps:
            self._evaluate(step + 1)

    def finish(self) -> Path:
        """The last evaluation and run.json; returns the last checkpoint."""
        last = _last_values(self.folder.path / METRICS_NAME)
        if last.get("knn/top1", (0, 0.0))[0] != self.total_steps:
            self._evaluate(self.total_steps)
            last = _last_values(self.folder.path / METRICS_NAME)
        names = {
            "pretrain/loss": "loss",
            "pretrain/accuracy": "pretext_accuracy",
            "knn/top1": "knn/top1",
        }
        notes = list(self._notes)
        if self._bad_images:
            notes.append(f"{len(self._bad_images)} pictures could not be decoded, replaced")
        record = RunRecord(
            kind="pretrain",
            status="done",
            task=f"pretrain_{self.cfg.MODEL.ARCH}",
            engine="moco",
            init="random",
            weights_sha256=None,
            weights_source=None,
            seed=self.cfg.SEED,
            config_sha256=cfg_sha256(self.cfg, exclude=("SEED", *PLACES_AND_SPEED)),
            config=flatten(self.cfg),
            provenance=provenance(),
            iterations=self.total_steps,
            seconds=self._seconds(),
            metrics={name: last[key][1] for name, key in names.items() if key in last},
            notes=notes,
        )
        write_record(self.folder.path, record)
        if self._tensorboard:
            self._tensorboard.close()
        return list_checkpoints(self.folder.path)[-1]

    def _state(self, done: int) -> dict[str, Any]:
        """The content of a checkpoint; moco/checkpoint.py describes it."""
        model = {f"{PREFIX}{name}": value for name, value in self.model.state_dict().items()}
        return {
            "epoch": done // self.steps_per_epoch,
            "arch": self._spec.arch,
            "state_dict": model,
            "optimizer": self.optimizer.state_dict(),
            "format": FORMAT,
            "encoder": {
                **self._spec.to_dict(),
                "dim": self.cfg.MOCO.DIM,
                "mlp": self.cfg.MOCO.MLP,
            },
            "input": {
                "channel_order": "RGB",
                "mean": list(self.cfg.AUG.MEAN),
                "std": list(self.cfg.AUG.STD),
            },
            "step": done,
            "seed": self.cfg.SEED,
            "num_images": len(self.images),
            "seconds": self._seconds(),
            "config": flatten(self.cfg),
        }

    def _restore(self, resume: str) -> None:
        """Everything that the next step depends on: weights, queue, optimiser, step.

        Order, views and BN shuffle are functions of seed and step, so there is no state of a
        random number generator to restore.
        """
        if resume == "auto":
            found = newest_checkpoint(self.folder.path)
            if found is None:
                print(f"no checkpoint in {self.folder.path}: starting anew", flush=True)
                return
            path, state, warnings = found
            for warning in warnings:
                print(f"warning: {warning}", flush=True)
        else:
            path, state = Path(resume), load_checkpoint(resume)
        self._check_same_run(path, state)
        weights = {name.removeprefix(PREFIX): value for name, value in state["state_dict"].items()}
        try:
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"{path}: does not fit this model ({reason})") from error
        self.step, self._seconds_before = state["step"], state["seconds"]
        _drop_metrics_after(self.folder.path / METRICS_NAME, self.step)
        print(f"resuming from {path} after step {self.step} of {self.total_steps}", flush=True)

    def _check_same_run(self, path: Path, state: dict[str, Any]) -> None:
        mine, theirs = flatten(self.cfg), dict(state["config"])
        for key in sorted(mine.keys() | theirs.keys()):
            if any(key == place or key.startswith(f"{place}.") for place in PLACES_AND_SPEED):
                continue
            if _plain(mine.get(key)) != _plain(theirs.get(key)):
                raise UserError(
                    f"{path}: was trained with {key} {theirs.get(key)!r}, this run has "
                    f"{mine.get(key)!r}; set the same, or start anew in another OUTPUT_DIR"
                )
        if state["num_images"] != len(self.images):
            raise DataError(
                f"{self.cfg.DATA.ROOT}: holds {len(self.images)} pictures, the run in {path} was "
                f"started with {state['num_images']}; give the same data or start anew"
            )

    def _evaluate(self, done: int) -> None:
        """kNN with the query encoder as it is after ``done`` steps, if there is data for it."""
        if self._knn_input is None:
            return
        backbone = load_backbone(self._state(done))
        root, workers = self.cfg.DATA.KNN_ROOT, self.cfg.DATA.NUM_WORKERS
        k, t = self.cfg.KNN.K, self.cfg.KNN.T
        result = evaluate(backbone, root, self._knn_input, k, t, self.device, workers)
        self._write_metrics(done, {"knn/top1": result.top1})
        print(f"after step {done}: {result}", flush=True)
        self._logged = time.monotonic()

    def _count_bad_images(self, batch: Batch) -> None:
        for reason in batch.bad:
            if reason not in self._bad_images and batch.complete:
                print(f"warning: {reason}; another picture takes its place", flush=True)
            self._bad_images.add(reason)
        if not batch.complete:
            raise DataError(f"{batch.bad[0]} (DATA.BAD_IMAGES skip replaces bad pictures)")
        limit = self.cfg.DATA.MAX_BAD_FRACTION
        if len(self._bad_images) > limit * len(self.images):
            raise DataError(
                f"{len(self._bad_images)} of {len(self.images)} pictures are bad, more than "
                f"DATA.MAX_BAD_FRACTION {limit}; the last: {batch.bad[-1]}"
            )

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._opened

    def _write_metrics(self, done: int, values: dict[str, float]) -> None:
        self.folder.log({"iteration": done, "epoch": done / self.steps_per_epoch, **values})
        if self._tensorboard:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, done)


class StopRequest:
    """Set by a signal handler, read after each step."""

    received: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: now
        self.received = number


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """While open, SIGTERM and SIGINT ask for a stop instead of ending the process."""
    stop = StopRequest()
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _find_images(cfg: CfgNode) -> list[Path]:
    if not cfg.DATA.ROOT:
        raise UserError("DATA.ROOT is not set; add DATA.ROOT and the folder of your pictures")
    images = find_images(cfg.DATA.ROOT)
    if len(images) < cfg.SOLVER.BATCH_SIZE:
        raise DataError(
            f"{cfg.DATA.ROOT}: {len(images)} pictures are less than one batch of "
            f"{cfg.SOLVER.BATCH_SIZE}; add pictures, or lower SOLVER.BATCH_SIZE and BASE_LR with it"
        )
    return images


def _notes(cfg: CfgNode, num_images: int) -> list[str]:
    """What is allowed and yet likely to disappoint."""
    if cfg.MOCO.K <= num_images:
        return []
    return [
        f"MOCO.K {cfg.MOCO.K} exceeds the {num_images} pictures: the queue holds keys of a query's "
        "own picture, and they count as negatives; a smaller K or more pictures teach more"
    ]


def _check_milestones(cfg: CfgNode, steps_per_epoch: int, total_steps: int) -> None:
    """With MAX_ITERS, only the data tell whether a milestone lies within the run."""
    milestones = cfg.SOLVER.MILESTONES_EPOCHS
    if cfg.SOLVER.SCHEDULE != "step" or not milestones:
        return
    last = milestones[-1] * steps_per_epoch
    if last >= total_steps:
        raise UserError(
            f"SOLVER.MILESTONES_EPOCHS: {milestones[-1]} epochs are {last} steps here and the run "
            f"has {total_steps}; lower it, set () for none, or set SOLVER.SCHEDULE cosine"
        )


def _knn_input(cfg: CfgNode) -> KnnInput | None:
    """What the monitor needs, checked before training; None where it is off."""
    if not cfg.DATA.KNN_ROOT:
        return None
    labelled_sets(cfg.DATA.KNN_ROOT)
    resize, crop = default_sizes(cfg.KNN.CROP_PX, cfg.KNN.RESIZE_PX, cfg.AUG.CROP_PX)
    return KnnInput(resize, crop, tuple(cfg.AUG.MEAN), tuple(cfg.AUG.STD))


def augmentation_from(cfg: CfgNode) -> Augmentation:
    """The keys under AUG."""
    aug = cfg.AUG
    return Augmentation(
        gray_first=aug.KIND == "v1",
        crop_px=aug.CROP_PX,
        crop_scale=tuple(aug.CROP_SCALE),
        crop_ratio=tuple(aug.CROP_RATIO),
        flip_prob=aug.FLIP_PROB,
        jitter_prob=aug.JITTER_PROB,
        jitter=(aug.BRIGHTNESS, aug.CONTRAST, aug.SATURATION, aug.HUE),
        gray_prob=aug.GRAY_PROB,
        blur_prob=aug.BLUR_PROB,
        blur_sigma_px=tuple(aug.BLUR_SIGMA_PX),
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _ignore_stop_signals(worker: int) -> None:
    """A terminal or scheduler signals the whole group; the training process ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _drop_metrics_after(path: Path, step: int) -> None:
    """Remove lines of steps that will be done again, and a line cut off by a crash."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["iteration"] <= step:
                kept.append(line)
        except ValueError:
            continue
    atomic_write_text(path, "".join(f"{line}\n" for line in kept))


def _last_values(path: Path) -> dict[str, tuple[int, float]]:
    """For each name in metrics.json the last line's iteration and value."""
    last: dict[str, tuple[int, float]] = {}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        last |= {name: (values["iteration"], value) for name, value in values.items()}
    return last


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("LOG.TENSORBOARD: tensorboard is not installed; metrics.json has the same numbers")
        return None
    return SummaryWriter(str(folder))
