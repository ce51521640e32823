"""What a classification run consists of, and what happens before and after each step.

N images per step of all processes, n of this one, P crop size in pixels, C classes, W processes,
B numbers in the running statistics of all BN layers.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from moco.classification.classify import Protocol
from moco.classification.config import NOT_PROTOCOL, PLACES_AND_SPEED, learning_rate
from moco.classification.data import CenterBatches, Centers, crop_and_flip, open_labeled
from moco.classification.weights import Weights
from moco.common import distributed
from moco.common.cfgnode import cfg_sha256, flatten
from moco.common.errors import DataError, UserError
from moco.common.files import atomic_write_text, sha256_state
from moco.common.progress import Progress
from moco.common.run import RunFolder, RunRecord, provenance, write_record
from moco.data.augment import apply_colors, normalize
from moco.data.images import LabeledSets, check_present
from moco.data.views import Batch, Item, Position, StepSampler, Views
from moco.engine.checkpoint import CLASSIFIER_FORMAT, PREFIX
from moco.engine.saver import Saver
from moco.engine.schedule import LearningRate
from moco.engine.training import (
    MetricsLog,
    StepLog,
    autocast,
    batch_loader,
    check_same_run,
    extensions,
    find_checkpoint,
    print_notes,
    read_ahead,
    set_up_torch,
)
from moco.knn import default_sizes
from moco.modeling.encoder import ResNet, build_backbone
from moco.pretraining.config import pick_device
from moco.pretraining.state import named_statistics, running_statistics

HEAD = "fc."
TOP = 5


class StepValues(NamedTuple):
    """Of one step, over all processes: loss, training accuracy 0..100, a stop signal."""

    loss: float
    accuracy: float
    stop: int | None


class Accuracy(NamedTuple):
    """1-crop accuracy, 0..100."""

    top1: float
    top5: float


class ClassifyRun:
    """Model, optimizer, data and bookkeeping of one run.

    Args:
        cfg, protocol, weights, folder, resume, extend: see
        `moco.classification.classify.classify`.

    Attributes:
        step: number of steps done when the run was opened.
        total_steps, steps_per_epoch: of the whole run.
        shown: values for the progress bar.
    """

    def __init__(
        self,
        cfg: CfgNode,
        protocol: Protocol,
        weights: Weights,
        folder: RunFolder,
        resume: str | None,
        extend: bool = False,
    ) -> None:
        self.cfg, self._protocol, self._weights, self._folder = cfg, protocol, weights, folder
        self._device = pick_device(cfg.DEVICE)
        set_up_torch(cfg.NUM_THREADS, cfg.DETERMINISTIC)
        self._rank, self._world = distributed.rank(), distributed.world_size()
        self.batch_size: int = cfg.SOLVER.BATCH_SIZE
        self._n = self.batch_size // self._world
        self._sets = _open_sets(cfg)
        # Deviation: the incomplete last batch of an epoch is left out; the next epoch has others.
        self.steps_per_epoch = len(self._sets.train) // self.batch_size
        self.total_steps: int = cfg.SOLVER.MAX_EPOCHS * self.steps_per_epoch
        self._crops = default_sizes(cfg.EVAL.CROP_PX, cfg.EVAL.RESIZE_PX, cfg.AUG.CROP_PX)
        if self._crops[0] < self._crops[1]:
            raise UserError(
                f"EVAL.RESIZE_PX: got {self._crops[0]}, expected at least the crop's "
                f"{self._crops[1]} px"
            )
        base_lr = learning_rate(cfg, weights.state is None)
        self._notes = _notes(cfg, self._world, base_lr, protocol.frozen)
        self._learning_rate = LearningRate(
            base=base_lr,
            kind=cfg.SOLVER.SCHEDULE,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            milestones_epochs=cfg.SOLVER.MILESTONES_EPOCHS,
            gamma=cfg.SOLVER.GAMMA,
            per_epoch=cfg.SOLVER.LR_UPDATE == "epoch",
            warmup_iters=cfg.SOLVER.WARMUP_ITERS,
        )
        torch.manual_seed(cfg.SEED)
        self.model = build_classifier(weights, len(self._sets.classes), protocol)
        self._layout = torch.channels_last if cfg.SOLVER.CHANNELS_LAST else torch.contiguous_format
        self.model.to(self._device).to(memory_format=self._layout)
        self._frozen = fingerprint(self.model) if protocol.frozen else {}
        if cfg.SOLVER.COMPILE:
            self.model.compile()
        # Of a frozen network nothing is exchanged: only parameters with a gradient are.
        self._parallel = distributed.data_parallel(self.model)
        self._optimizer = torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=base_lr,
            momentum=cfg.SOLVER.MOMENTUM,
            weight_decay=cfg.SOLVER.WEIGHT_DECAY,
        )
        self._scaler = torch.amp.GradScaler(
            self._device.type, enabled=cfg.SOLVER.PRECISION == "fp16"
        )
        self.step, self._seconds_before = 0, 0.0
        main_folder = folder if distributed.is_main() else None
        self._metrics = MetricsLog(main_folder, self.steps_per_epoch, cfg.LOG.TENSORBOARD)
        self._log = StepLog(
            self._metrics, cfg.LOG.EVERY_ITERS, self.total_steps, self.batch_size, "train/top1"
        )
        self._saver = Saver(
            folder.path, self.steps_per_epoch, self.total_steps, cfg, self.model, self._content
        )
        self._extensions: list[str] = []
        if resume is None:
            self._saver.start_anew()
        else:
            self._restore(resume, extend)
        if distributed.is_main():
            atomic_write_text(folder.path / "config.yaml", cfg.dump())
            print(self._opening(base_lr), flush=True)
        print_notes((*self._notes, *self._extensions))
        self._sampler = StepSampler(
            self._sets.train, self.batch_size, cfg.SEED, self.step, self.total_steps, self._pick
        )
        self._train_labels = torch.tensor(self._sets.train_labels)
        self.shown: dict[str, str] = {}
        self._opened = time.monotonic()

    def progress(self) -> Progress:
        """Counts images over the whole run."""
        total, done = self.total_steps * self.batch_size, self.step * self.batch_size
        silent = not distributed.is_main()
        return Progress(total, self._protocol.kind, "img", initial=done, silent=silent)

    def batches(self) -> Iterator[Batch]:
        """This process's crops of each remaining step, read ahead by the workers.

        Raises:
            DataError: an image that cannot be decoded, naming it. (None takes its place, because
                it would have another label.)
        """
        data = self.cfg.DATA
        cache_bytes = (data.CACHE_MIB << 20) // max(1, data.NUM_WORKERS)
        views = Views(
            self._sets.train, crop_and_flip(self.cfg), self.cfg.SEED, cache_bytes=cache_bytes
        )
        for batch in read_ahead(self._loader(views, batch_sampler=self._sampler)):
            if not batch.complete:
                raise DataError(batch.bad[0])
            yield batch

    def set_learning_rate(self, step: int) -> float:
        """The learning rate of this step, set in the optimizer."""
        lr = self._learning_rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def forward_backward(self, batch: Batch, step: int, received: int | None) -> StepValues:
        """Gradients of the mean cross-entropy of all processes' images.

        Args:
            received: a signal that asks this process to stop, or None.

        Raises:
            NumericError: the loss is not finite, on any process.
        """
        self.model.train(not self._protocol.frozen)
        self._optimizer.zero_grad()
        mine = [index for _, index, _ in self._pick(step, self._sampler.positions(step))]
        labels = self._train_labels[mine].to(self._device, non_blocking=True)  # (n,)
        pixels = batch.pixels.to(self._device, non_blocking=True)
        x = apply_colors(pixels, batch.params, crop_and_flip(self.cfg), *self._mean_std())
        with self._autocast():
            logits = self._parallel(x.contiguous(memory_format=self._layout))  # (n, C)
        loss = F.cross_entropy(logits.float(), labels)
        self._scaler.scale(loss).backward()
        right = (logits.argmax(dim=1) == labels).float().mean()
        # One exchange of three numbers: with it a loss that is not finite, or a signal, is known
        # to every process before the weights change.
        report = torch.stack([loss.detach(), 100 * right, loss.new_tensor(float(received or 0))])
        value, accuracy, signals = distributed.mean_over_ranks(report).tolist()
        self._saver.check_loss(value, step)
        stop = (received or signal.SIGTERM) if signals else None
        return StepValues(value, accuracy, stop)

    def update(self) -> None:
        """The optimizer's step."""
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def log(self, values: StepValues, lr: float, step: int) -> None:
        """See `moco.engine.training.StepLog`."""
        self.shown |= {"loss": f"{values.loss:.3f}"}
        self._log.add(step, values.loss, values.accuracy, lr)

    def check_frozen_if_due(self, step: int) -> None:
        """After each epoch: that a frozen network is what it was.

        Raises:
            AssertionError: naming the tensor that changed.
        """
        if self._protocol.frozen and (step + 1) % self.steps_per_epoch == 0:
            require_unchanged(self.model, self._frozen)

    def save_if_due(self, step: int, stop_signal: int | None) -> None:
        """See `moco.engine.saver.Saver.save_if_due`."""
        self._saver.save_if_due(step, stop_signal)

    def evaluate_if_missed(self) -> None:
        """The evaluation of the epoch after which the run was stopped, if that came before it."""
        if self.step and self._last_evaluated() < self.step:
            self.evaluate_if_due(self.step - 1)

    def evaluate_if_due(self, step: int) -> None:
        """Every EVAL.EVERY_EPOCHS epochs; `finish` has the last one."""
        epoch, into_epoch = divmod(step + 1, self.steps_per_epoch)
        every = self.cfg.EVAL.EVERY_EPOCHS
        if every and into_epoch == 0 and epoch % every == 0 and step + 1 != self.total_steps:
            self._evaluate(step + 1)

    def finish(self) -> Path:
        """The last evaluation and run.json; returns the last checkpoint."""
        if self._protocol.frozen:
            require_unchanged(self.model, self._frozen)
        if self._last_evaluated() != self.total_steps:
            self._evaluate(self.total_steps)
        if distributed.is_main():
            self._write_record()
        self._metrics.close()
        distributed.barrier()
        return self._saver.last_checkpoint()

    def _last_evaluated(self) -> int:
        """After how many steps the last accuracy was logged; all processes call it together."""
        last = self._metrics.last().get(f"{self._protocol.kind}/top1", (0, 0.0))[0]
        return distributed.highest(last)

    def _evaluate(self, done: int) -> None:
        started = time.monotonic()
        own = running_statistics(self.model)
        self._load_statistics(self._mean_statistics(own))  # all processes evaluate one network
        accuracy = self._accuracy()
        self._load_statistics(own)
        kind = self._protocol.kind
        self._metrics.write(done, {f"{kind}/top1": accuracy.top1, f"{kind}/top5": accuracy.top5})
        self.shown["top1"] = f"{accuracy.top1:.1f}"
        if distributed.is_main():
            print(
                f"after epoch {done // self.steps_per_epoch} of {self.cfg.SOLVER.MAX_EPOCHS}: "
                f"top-1 {accuracy.top1:.2f}%, top-5 {accuracy.top5:.2f}% of "
                f"{len(self._sets.val)} validation images",
                flush=True,
            )
        self._log.pause(time.monotonic() - started)  # the speed logged is that of training

    def _accuracy(self) -> Accuracy:
        """Of all validation images, each counted once; the processes share them."""
        resize_px, crop_px = self._crops
        mine = range(self._rank, len(self._sets.val), self._world)
        chunks = [list(mine[i : i + self._n]) for i in range(0, len(mine), self._n)]
        crops = CenterBatches(self._sets.val, resize_px, crop_px)
        labels = torch.tensor(self._sets.val_labels)
        right = torch.zeros(2, dtype=torch.long, device=self._device)
        top = min(TOP, len(self._sets.classes))
        bad = None
        self.model.eval()
        loader: Iterator[Centers] = read_ahead(self._loader(crops, batch_sampler=chunks))
        with torch.inference_mode():
            for indices, batch in zip(chunks, loader, strict=True):
                bad = bad or batch.bad
                if bad:
                    continue
                x = normalize(batch.pixels.to(self._device).float() / 255, *self._mean_std())
                with self._autocast():
                    logits = self.model(x.contiguous(memory_format=self._layout))
                best = logits.topk(top, dim=1).indices  # (n, top)
                hits = best == labels[indices].to(self._device)[:, None]
                right += torch.stack([hits[:, 0].sum(), hits.any(dim=1).sum()])
        if distributed.highest(int(bad is not None)):
            raise DataError(bad or "another process found an image that cannot be decoded")
        top1, top5 = distributed.sum_over_ranks(right).tolist()
        return Accuracy(100 * top1 / len(self._sets.val), 100 * top5 / len(self._sets.val))

    def _loader(self, dataset: Any, batch_sampler: Any) -> Any:
        return batch_loader(dataset, batch_sampler, self.cfg.DATA, self._device)

    def _pick(self, step: int, positions: list[Position]) -> list[Item]:
        """This process's part of a step."""
        first = self._rank * self._n
        return [(epoch, index, 0) for epoch, index in positions[first : first + self._n]]

    def _mean_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return tuple(self.cfg.AUG.MEAN), tuple(self.cfg.AUG.STD)

    def _autocast(self) -> Any:
        return autocast(self._device, self.cfg.SOLVER.PRECISION)

    def _mean_statistics(self, own: Tensor) -> Tensor:
        """(B,) over the processes; a frozen network's are the same on all, to the bit."""
        return own if self._protocol.frozen else distributed.gather_rows(own[None]).mean(dim=0)

    def _load_statistics(self, flat: Tensor) -> None:
        if not self._protocol.frozen:
            self.model.load_state_dict(named_statistics(self.model, flat), strict=False)

    def _content(self, done: int) -> dict[str, Any]:
        """The content of a checkpoint; all processes call it together.

        The running statistics in `state_dict` are the mean over the processes; each process's
        own, which it goes on with, are in `statistics`.
        """
        own = running_statistics(self.model)
        state = dict(self.model.state_dict())
        state |= named_statistics(self.model, self._mean_statistics(own))
        weights = self._weights
        return {
            "epoch": done // self.steps_per_epoch,
            "arch": weights.spec.arch,
            "state_dict": {f"{PREFIX}{name}": value for name, value in state.items()},
            "optimizer": self._optimizer.state_dict(),
            "format": CLASSIFIER_FORMAT,
            "encoder": weights.spec.to_dict(),
            "input": {
                "channel_order": "RGB",
                "mean": list(self.cfg.AUG.MEAN),
                "std": list(self.cfg.AUG.STD),
            },
            "step": done,
            "seed": self.cfg.SEED,
            "num_images": len(self._sets.train),
            "seconds": self._seconds(),
            "config": flatten(self.cfg),
            "processes": self._world,
            "statistics": distributed.gather_rows(own[None]),  # (W, B)
            "scaler": self._scaler.state_dict(),
            "classes": self._sets.classes,
            "kind": self._protocol.kind,
            "weights_sha256": weights.sha256,
            "step_log": self._log.state_dict(),
            "extensions": self._extensions,
        }

    def _restore(self, resume: str, extend: bool) -> None:
        found = find_checkpoint(resume, self._folder.path, CLASSIFIER_FORMAT)
        distributed.agree(found[1]["step"] if found else 0, "the checkpoint to resume from")
        if found is None:
            if extend:
                raise UserError(f"--extend: {self._folder.path} holds no checkpoint")
            return
        path, state = found
        check_same_run(path, state, self.cfg, len(self._sets.train), PLACES_AND_SPEED, extend)
        for what, mine in (
            ("kind", self._protocol.kind),
            ("weights_sha256", self._weights.sha256),
            ("classes", self._sets.classes),
            ("processes", self._world),
        ):
            if state.get(what) != mine:
                shown = "others" if what == "classes" else f"{state.get(what)!r}, not {mine!r}"
                raise UserError(
                    f"{path}: was trained with {what} {shown}; "
                    "give the same, or start from scratch in another OUTPUT_DIR"
                )
        weights = {name.removeprefix(PREFIX): v for name, v in state["state_dict"].items()}
        try:
            self.model.load_state_dict(weights)
            self._load_statistics(state["statistics"][self._rank])
            self._optimizer.load_state_dict(state["optimizer"])
            self._scaler.load_state_dict(state["scaler"])
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"{path}: does not fit this model ({reason})") from error
        if self._protocol.frozen:
            require_unchanged(self.model, self._frozen)
        self._extensions = extensions(path, state, self._learning_rate, self.cfg, extend)
        self.step, self._seconds_before = state["step"], state["seconds"]
        self._log.resume(path, state)
        self._saver.resume_from(path, state)
        self._metrics.drop_after(self.step)
        if distributed.is_main():
            print(f"resuming from {path} after step {self.step} of {self.total_steps}", flush=True)

    def _opening(self, base_lr: float) -> str:
        weights, sets = self._weights, self._sets
        return (
            f"{self._task()}, init {weights.init} ({weights.source or 'random weights'}): "
            f"{len(sets.train)} images, {len(sets.classes)} classes; learning rate {base_lr:g}"
        )

    def _task(self) -> str:
        return f"{self.cfg.TASK or self._protocol.kind}_{self._weights.spec.name}"

    def _write_record(self) -> None:
        last = self._metrics.last()
        names = [f"{self._protocol.kind}/{name}" for name in ("top1", "top5")]
        record = RunRecord(
            kind=self._protocol.kind,
            status="done",
            task=self._task(),
            engine="moco",
            init=self._weights.init,
            weights_sha256=self._weights.sha256,
            weights_source=self._weights.source,
            seed=self.cfg.SEED,
            config_sha256=cfg_sha256(self.cfg, exclude=NOT_PROTOCOL),
            config=flatten(self.cfg),
            provenance={**provenance(), "processes": self._world},
            iterations=self.total_steps,
            seconds=self._seconds(),
            metrics={name: last[name][1] for name in names},
            notes=[
                f"{len(self._sets.classes)} classes, {len(self._sets.val)} validation images",
                *self._notes,
                *self._extensions,
            ],
        )
        write_record(self._folder.path, record)

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._opened


def build_classifier(weights: Weights, num_classes: int, protocol: Protocol) -> ResNet:
    """The network with a new fully-connected layer `fc`: images (N, 3, H, W) → logits (N, C).

    With a frozen protocol, only `fc` has gradients.
    """
    model = build_backbone(weights.spec)
    if weights.state is not None:
        model.load_state_dict(_with_counters(weights.state, model))
    model.requires_grad_(not protocol.frozen)
    head = nn.Linear(weights.spec.feature_dim, num_classes)
    if protocol.head_std is not None:
        nn.init.normal_(head.weight, std=protocol.head_std)
        nn.init.zeros_(head.bias)
    model.fc = head  # type: ignore[assignment]
    return model


def fingerprint(model: nn.Module) -> dict[str, str]:
    """A hash of each parameter and buffer but the classifier's."""
    return {
        name: sha256_state({name: tensor})
        for name, tensor in model.state_dict().items()
        if not name.startswith(HEAD)
    }


def require_unchanged(model: nn.Module, before: dict[str, str]) -> None:
    """Check, bit for bit, that a frozen network still has the `fingerprint` `before`.

    Raises:
        AssertionError: naming the tensors that differ.
    """
    now = fingerprint(model)
    changed = sorted({name for name, _ in now.items() ^ before.items()})
    if changed:
        raise AssertionError(
            f"the frozen network changed during linear classification: {', '.join(changed[:5])}"
            + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        )


def _notes(cfg: CfgNode, world_size: int, base_lr: float, frozen: bool) -> list[str]:
    """What several processes or a batch that is not the recipe's change."""
    N, reference = cfg.SOLVER.BATCH_SIZE, cfg.SOLVER.REFERENCE_BATCH_SIZE
    scaled = reference not in (0, N)
    if world_size == 1 and not scaled:
        return []
    n = N // world_size
    note = f"batch {N}: {world_size} process{'es' if world_size > 1 else ''} x {n}"
    if not frozen:
        note += f"; BN over {n} images each"
    if scaled:
        note += (
            f"; learning rate {base_lr:g} instead of {base_lr * reference / N:g}, scaled from a "
            f"batch of {reference} (SOLVER.REFERENCE_BATCH_SIZE 0 turns it off)"
        )
    return [note]


def _with_counters(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Files of torch before 0.4.1 have no batch counters: they start at 0."""
    counters = {k: v for k, v in model.state_dict().items() if k.endswith(".num_batches_tracked")}
    return counters | state


def _open_sets(cfg: CfgNode) -> LabeledSets:
    check_present(cfg.DATA.ROOT, labeled=True)
    sets = open_labeled(cfg.DATA.ROOT)
    for name, size in (("train", len(sets.train)), ("val", len(sets.val))):
        distributed.agree(size, f"number of {name} images in {cfg.DATA.ROOT}")
    if len(sets.train) < cfg.SOLVER.BATCH_SIZE:
        raise DataError(
            f"{cfg.DATA.ROOT}: {len(sets.train)} images are less than one batch of "
            f"{cfg.SOLVER.BATCH_SIZE}; add images, or lower SOLVER.BATCH_SIZE and the learning "
            "rate with it"
        )
    return sets
