"""What a pre-training run consists of, and what happens before and after each step.

N images per step of all processes, n of this one, P crop size in pixels, W processes.
"""

import dataclasses
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from moco.common import distributed
from moco.common.cfgnode import cfg_sha256, flatten
from moco.common.errors import DataError, UserError
from moco.common.files import atomic_write_text
from moco.common.progress import Progress
from moco.common.registry import lookup
from moco.common.run import RunFolder, RunRecord, provenance, write_record
from moco.data.augment import Augmentation, apply_colors
from moco.data.images import Images, check_present, labeled_sets, open_images
from moco.data.shards import find_shards
from moco.data.views import Batch, Item, Position, StepSampler, Views
from moco.engine.checkpoint import load_backbone
from moco.engine.saver import Saver
from moco.engine.schedule import LearningRate
from moco.engine.training import (
    MetricsLog,
    StepLog,
    autocast,
    batch_loader,
    extensions,
    print_notes,
    read_ahead,
    set_up_torch,
)
from moco.knn import KnnInput, default_sizes, evaluate
from moco.modeling.encoder import EncoderSpec, build_encoder
from moco.modeling.mechanisms import MECHANISMS
from moco.modeling.mechanisms.base import Dictionary, KeyBatch, Mechanism
from moco.modeling.shuffle_bn import Pass, exchange_plan, items_of_step, shuffle_plan
from moco.pretraining.config import PLACES_AND_SPEED, check_processes, pick_device, scale_to_batch
from moco.pretraining.initial_weights import InitialWeights, Start, load_weights, resumed_start
from moco.pretraining.state import checkpoint_content, encoder_content, restore

INDEX_NAME = "shards.json"  # how many images each tar shard holds


class StepValues(NamedTuple):
    """Of one step, over all processes: loss, accuracy of the pretext task 0..100, a stop signal."""

    loss: float
    accuracy: float
    stop: int | None


class PretrainRun:
    """Model, optimizer, data and bookkeeping of one run.

    Args:
        cfg, folder, resume, other_processes, extend, weights: see `moco.pretrain.pretrain`.

    Attributes:
        step: number of steps done when the run was opened.
        total_steps, steps_per_epoch: of the whole run.
        shown: values for the progress bar.
    """

    def __init__(
        self,
        cfg: CfgNode,
        folder: RunFolder,
        resume: str | None,
        other_processes: bool = False,
        extend: bool = False,
        weights: InitialWeights | None = None,
    ) -> None:
        self.cfg, self.folder = cfg, folder
        self.device = pick_device(cfg.DEVICE)
        set_up_torch(cfg.NUM_THREADS, cfg.DETERMINISTIC)
        self._rank, self._world = distributed.rank(), distributed.world_size()
        check_processes(cfg, self._world)
        self.batch_size: int = cfg.SOLVER.BATCH_SIZE
        self._n = self.batch_size // self._world
        self.images = _open_images(cfg, folder.path)
        self.steps_per_epoch = len(self.images) // self.batch_size
        scaled = scale_to_batch(cfg)
        self.total_steps: int = scaled.max_iters or cfg.SOLVER.MAX_EPOCHS * self.steps_per_epoch
        self._notes = [*scaled.notes, *_notes(cfg, len(self.images))]
        if distributed.is_main():
            print(_batch_line(cfg, self._world), flush=True)
        print_notes(self._notes)
        _check_milestones(cfg, self.steps_per_epoch, self.total_steps)
        self._knn_input = _knn_input(cfg)
        self._aug = augmentation_from(cfg)
        self._learning_rate = LearningRate(
            base=scaled.base_lr,
            kind=cfg.SOLVER.SCHEDULE,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            milestones_epochs=cfg.SOLVER.MILESTONES_EPOCHS,
            gamma=cfg.SOLVER.GAMMA,
            per_epoch=cfg.SOLVER.LR_UPDATE == "epoch",
            warmup_iters=scaled.warmup_iters,
            decay_every_iters=scaled.decay_every_iters,
        )
        torch.manual_seed(cfg.SEED)
        self.model, self._spec = _build(cfg, len(self.images), self._world)
        self._layout = torch.channels_last if cfg.SOLVER.CHANNELS_LAST else torch.contiguous_format
        self.model.to(self.device).to(memory_format=self._layout).train()
        if cfg.SOLVER.COMPILE:
            for name, encoder in self.model.named_children():
                if name.startswith("encoder_"):
                    encoder.compile()
        self._parallel = distributed.data_parallel(self.model)
        self.optimizer = torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=scaled.base_lr,
            momentum=cfg.SOLVER.MOMENTUM,
            weight_decay=cfg.SOLVER.WEIGHT_DECAY,
        )
        self._scaler = torch.amp.GradScaler(
            self.device.type, enabled=cfg.SOLVER.PRECISION == "fp16"
        )
        self._passes = _passes(cfg, self.model)
        self.step, self._seconds_before = 0, 0.0
        main_folder = folder if distributed.is_main() else None
        self._metrics = MetricsLog(main_folder, self.steps_per_epoch, cfg.LOG.TENSORBOARD)
        self._log = StepLog(
            self._metrics,
            cfg.LOG.EVERY_ITERS,
            self.total_steps,
            self.batch_size,
            "pretext_accuracy",
        )
        self._saver = Saver(
            folder.path, self.steps_per_epoch, self.total_steps, cfg, self.model, self._content
        )
        self._weights, self._start = weights, Start()
        self._extensions: list[str] = []
        if resume is None:
            self._saver.start_anew()
        else:
            self._restore(resume, other_processes, extend)
        if self.step == 0 and weights is not None:
            self._start = load_weights(self.model, weights, cfg.AUG.MEAN, cfg.AUG.STD)
            print_notes(self._start.notes)
        if distributed.is_main():
            atomic_write_text(folder.path / "config.yaml", cfg.dump())
        self._sampler = StepSampler(
            self.images, self.batch_size, cfg.SEED, self.step, self.total_steps, self._pick
        )
        self._bad_images: set[str] = set()
        # Of the step at hand: what its update needs.
        self._dictionaries: list[Dictionary] = []
        self._queries: list[Tensor] = []
        self._images = torch.empty(0, dtype=torch.long)
        self.shown: dict[str, str] = {}
        self._opened = time.monotonic()

    def progress(self) -> Progress:
        """Counts images over the whole run."""
        total, done = self.total_steps * self.batch_size, self.step * self.batch_size
        return Progress(total, "pre-train", "img", initial=done, silent=not distributed.is_main())

    def batches(self) -> Iterator[Batch]:
        """This process's items of each remaining step, read ahead by the workers."""
        data = self.cfg.DATA
        views = Views(
            self.images,
            self._aug,
            self.cfg.SEED,
            skip_bad=data.BAD_IMAGES == "skip",
            cache_bytes=(data.CACHE_MIB << 20) // max(1, data.NUM_WORKERS),
        )
        for batch in read_ahead(batch_loader(views, self._sampler, data, self.device)):
            self._count_bad_images(batch)
            yield batch

    def set_learning_rate(self, step: int) -> float:
        """The learning rate of this step, set in the optimizer."""
        lr = self._learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def forward_backward(self, batch: Batch, step: int, received: int | None) -> StepValues:
        """Gradients of the step's loss, pass by pass and part by part of the batch.

        Args:
            received: a signal that asks this process to stop, or None.

        Raises:
            NumericError: the loss is not finite, on any process.
        """
        self.optimizer.zero_grad()
        parts, passes = self.cfg.SOLVER.ACCUMULATE, len(self._passes)
        size = self._n // parts
        self._images = torch.tensor([index for _, index in self._sampler.positions(step)])
        total = torch.zeros(2, device=self.device)  # loss, accuracy
        self._dictionaries, self._queries = [], []
        for number, (x_q, x_k, plan) in enumerate(self._views(batch, step)):
            with self._autocast():
                keys = KeyBatch(x_k, plan, self._images, step, parts)
                dictionary = self.model.dictionary(keys)
            queries = []
            for part in range(parts):
                rows = slice(part * size, (part + 1) * size)
                last = number + 1 == passes and part + 1 == parts
                with self._gradients_stay_here(not last):
                    with self._autocast():
                        out = self._parallel(x_q[rows], dictionary.rows(rows))
                    self._scaler.scale(out.loss / parts).backward()
                queries.append(out.queries)
                total += torch.stack([out.loss.detach(), out.accuracy / passes]) / parts
            self._dictionaries.append(dictionary)
            self._queries.append(torch.cat(queries))
        # One exchange of three numbers: with it a loss that is not finite, or a signal, is known
        # to every process before the weights change.
        report = torch.cat([total, total.new_tensor([float(received or 0)])])
        loss, accuracy, signals = distributed.mean_over_ranks(report).tolist()
        self._saver.check_loss(loss, step)
        stop = (received or signal.SIGTERM) if signals else None
        return StepValues(loss, accuracy, stop)

    def update(self) -> None:
        """The optimizer's step, then the mechanism's: key encoder, queue or bank."""
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.model.update(self._dictionaries, self._queries, self._images)

    def log(self, values: StepValues, lr: float, step: int) -> None:
        """See `moco.engine.training.StepLog`."""
        self.shown = {"loss": f"{values.loss:.3f}"}
        self._log.add(step, values.loss, values.accuracy, lr)

    def save_if_due(self, step: int, stop_signal: int | None) -> None:
        """See `moco.engine.saver.Saver.save_if_due`."""
        self._saver.save_if_due(step, stop_signal)

    def evaluate_if_missed(self) -> None:
        """The kNN of the epoch after which the run was stopped, if that came before it."""
        if self.step and self._last_evaluated() < self.step:
            self.evaluate_if_due(self.step - 1)

    def evaluate_if_due(self, step: int) -> None:
        """The kNN monitor, every KNN.EVERY_EPOCHS epochs; `finish` has the last one."""
        epoch, into_epoch = divmod(step + 1, self.steps_per_epoch)
        every = self.cfg.KNN.EVERY_EPOCHS
        if every and into_epoch == 0 and epoch % every == 0 and step + 1 != self.total_steps:
            self._evaluate(step + 1)

    def finish(self) -> Path:
        """The last evaluation and run.json; returns the last checkpoint."""
        if self._last_evaluated() != self.total_steps:
            self._evaluate(self.total_steps)
        if distributed.is_main():
            self._write_record()
        self._metrics.close()
        distributed.barrier()
        return self._saver.last_checkpoint()

    def _last_evaluated(self) -> int:
        """After how many steps the last kNN was logged; all processes call it together."""
        return distributed.highest(self._metrics.last().get("knn/top1", (0, 0.0))[0])

    def _write_record(self) -> None:
        last = self._metrics.last()
        names = {
            "pretrain/loss": "loss",
            "pretrain/accuracy": "pretext_accuracy",
            "knn/top1": "knn/top1",
        }
        notes = [*self._notes, *self._start.notes, *self._extensions]
        if self._bad_images:
            notes.append(f"{len(self._bad_images)} images could not be decoded, replaced")
        record = RunRecord(
            kind="pretrain",
            status="done",
            task=f"pretrain_{self._spec.name}_{self.cfg.MOCO.MECHANISM}",
            engine="moco",
            init=self._start.init,
            weights_sha256=self._start.weights_sha256,
            weights_source=self._start.weights_source,
            seed=self.cfg.SEED,
            config_sha256=cfg_sha256(self.cfg, exclude=("SEED", *PLACES_AND_SPEED)),
            config=flatten(self.cfg),
            provenance={**provenance(), "processes": self._world},
            iterations=self.total_steps,
            seconds=self._seconds(),
            metrics={name: last[key][1] for name, key in names.items() if key in last},
            coverage=self._start.coverage,
            notes=notes,
        )
        write_record(self.folder.path, record)

    def _pick(self, step: int, positions: list[Position]) -> list[Item]:
        """What this process loads for a step."""
        plans: list[Tensor | None] = [None] * len(self._passes)
        if self._world == 1 or self.cfg.MOCO.SHUFFLE_BY == "index":
            plans = [self._plan(step, number) for number in range(len(plans))]
        return items_of_step(positions, self._passes, plans, self._rank, self._world)

    def _plan(self, step: int, number: int) -> Tensor | None:
        """In which order the keys of one pass go through BN; None: as the queries."""
        if not self.cfg.MOCO.SHUFFLE_BN or self._passes[number].key_view is None:
            return None
        splits, seed = self.cfg.MOCO.BN_SPLITS, self.cfg.SEED
        return shuffle_plan(self.batch_size, splits, seed, step, number)

    def _views(self, batch: Batch, step: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """For each pass queries and keys (n, 3, P, P) on the device, normalized, and the plan."""
        pixels, params = batch.pixels.to(self.device, non_blocking=True), batch.params
        plans = [self._plan(step, number) for number in range(len(self._passes))]
        if self._world > 1 and self.cfg.MOCO.SHUFFLE_BY == "all_to_all":
            pixels, params = self._exchange(pixels, plans), self._exchange(params, plans)
        x = apply_colors(pixels, params, self._aug, self.cfg.AUG.MEAN, self.cfg.AUG.STD)
        x = x.contiguous(memory_format=self._layout)
        if not self.model.needs_key_view:
            return [(part, x[:0], None) for part in x.split(self._n)]
        parts = iter(x.split(self._n))
        return [(next(parts), next(parts), plan) for plan in plans]

    def _exchange(self, rows: Tensor, plans: list[Tensor | None]) -> Tensor:
        """Key rows to the processes that encode them (MOCO.SHUFFLE_BY all_to_all)."""
        parts = list(rows.split(self._n))
        for number, plan in enumerate(plans):
            if plan is not None:
                keys = 2 * number + 1  # each pass: queries, then keys
                exchange = exchange_plan(plan, self._rank, self._world)
                parts[keys] = distributed.exchange_rows(parts[keys], *exchange)
        return torch.cat(parts)

    def _autocast(self) -> AbstractContextManager[None]:
        return autocast(self.device, self.cfg.SOLVER.PRECISION)

    def _gradients_stay_here(self, stay: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged once per step, with the last part's backward pass."""
        if stay and isinstance(self._parallel, torch.nn.parallel.DistributedDataParallel):
            return self._parallel.no_sync()
        return nullcontext()

    def _content(self, done: int) -> dict[str, object]:
        """The content of a checkpoint; all processes call it together."""
        return checkpoint_content(
            self.cfg,
            self.model,
            self._spec,
            self.optimizer,
            self._scaler,
            done=done,
            epoch=done // self.steps_per_epoch,
            num_images=len(self.images),
            seconds=self._seconds(),
        ) | {
            "step_log": self._log.state_dict(),
            "start": dataclasses.asdict(self._start),
            "extensions": self._extensions,
        }

    def _restore(self, resume: str, other_processes: bool, extend: bool) -> None:
        found = restore(
            resume,
            self.folder.path,
            self.cfg,
            self.model,
            self.optimizer,
            self._scaler,
            num_images=len(self.images),
            other_processes=other_processes,
            extend=extend,
        )
        distributed.agree(found[1]["step"] if found else 0, "the checkpoint to resume from")
        if found is None:
            if extend:
                raise UserError(f"--extend: {self.folder.path} holds no checkpoint")
            return
        path, state = found
        self._start = resumed_start(path, state, self._weights)
        self._extensions = extensions(path, state, self._learning_rate, self.cfg, extend)
        self.step, self._seconds_before = state["step"], state["seconds"]
        self._log.resume(path, state)
        self._saver.resume_from(path, state)
        self._metrics.drop_after(self.step)
        if distributed.is_main():
            print(f"resuming from {path} after step {self.step} of {self.total_steps}", flush=True)
        print_notes(self._extensions)

    def _evaluate(self, done: int) -> None:
        """kNN with the query encoder as it is after `done` steps, if there is data for it."""
        if self._knn_input is None:
            return
        started = time.monotonic()
        backbone = load_backbone(encoder_content(self.model, self._spec))
        root, workers = self.cfg.DATA.KNN_ROOT, self.cfg.DATA.NUM_WORKERS
        k, t = self.cfg.KNN.K, self.cfg.KNN.T
        result = evaluate(backbone, root, self._knn_input, k, t, self.device, workers)
        self._metrics.write(done, {"knn/top1": result.top1})
        if distributed.is_main():
            print(f"after step {done}: {result}", flush=True)
        self._log.pause(time.monotonic() - started)  # the speed logged is that of training

    def _count_bad_images(self, batch: Batch) -> None:
        for reason in batch.bad:
            if reason not in self._bad_images and batch.complete:
                print(f"warning: {reason}; another image takes its place", flush=True)
            self._bad_images.add(reason)
        if not batch.complete:
            raise DataError(f"{batch.bad[0]} (DATA.BAD_IMAGES skip replaces bad images)")
        limit = self.cfg.DATA.MAX_BAD_FRACTION
        if len(self._bad_images) > limit * len(self.images):
            raise DataError(
                f"{len(self._bad_images)} of {len(self.images)} images are bad, more than "
                f"DATA.MAX_BAD_FRACTION {limit}; the last: {batch.bad[-1]}"
            )

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._opened


def _open_images(cfg: CfgNode, folder: Path) -> Images:
    check_present(cfg.DATA.ROOT)
    # The main process writes the index of shards, the others read it.
    in_turn = distributed.main_first() if find_shards(cfg.DATA.ROOT) else nullcontext()
    with in_turn:
        images = open_images(cfg.DATA.ROOT, folder / INDEX_NAME, cfg.DATA.SHARD_WINDOW)
    distributed.agree(len(images), f"number of images in {cfg.DATA.ROOT}")
    if len(images) < cfg.SOLVER.BATCH_SIZE:
        raise DataError(
            f"{cfg.DATA.ROOT}: {len(images)} images are less than one batch of "
            f"{cfg.SOLVER.BATCH_SIZE}; add images, or lower SOLVER.BATCH_SIZE and BASE_LR with it"
        )
    return images


def _build(cfg: CfgNode, num_images: int, world_size: int) -> tuple[Mechanism, EncoderSpec]:
    """The mechanism with encoders whose BN has this process's share of the groups."""
    moco = cfg.MOCO
    spec = EncoderSpec(cfg.MODEL.ARCH, cfg.MODEL.STEM, cfg.MODEL.WIDTH)
    splits = moco.BN_SPLITS // (world_size * cfg.SOLVER.ACCUMULATE)
    encoder = build_encoder(spec, moco.DIM, moco.MLP, splits)
    build = lookup(MECHANISMS, moco.MECHANISM, "MOCO.MECHANISM")
    return build(cfg, encoder, num_images), spec


def _passes(cfg: CfgNode, model: Mechanism) -> tuple[Pass, ...]:
    """Which views are compared; a symmetric loss takes each as query and as key."""
    if not model.needs_key_view:
        return (Pass(0, None),)
    return (Pass(0, 1), Pass(1, 0)) if cfg.MOCO.SYMMETRIC else (Pass(0, 1),)


def _batch_line(cfg: CfgNode, world_size: int) -> str:
    N, G, parts = cfg.SOLVER.BATCH_SIZE, cfg.MOCO.BN_SPLITS, cfg.SOLVER.ACCUMULATE
    line = f"batch {N}: {world_size} process{'es' if world_size > 1 else ''} x {N // world_size}"
    if parts > 1:
        line += f" in {parts} parts"
    return f"{line}; BN in {G} groups of {N // G}"


def _notes(cfg: CfgNode, num_images: int) -> list[str]:
    """What is allowed and yet likely to disappoint."""
    if cfg.MOCO.MECHANISM == "end_to_end" or cfg.MOCO.K <= num_images:
        return []
    return [
        f"MOCO.K {cfg.MOCO.K} exceeds the {num_images} images: a query meets keys of its own "
        "image, and they count as negatives; a smaller K or more images teach more"
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
    labeled_sets(cfg.DATA.KNN_ROOT)
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
