"""Fine-tune a detector and evaluate it: the embedded engine's `run`.

Under the same SEED and without workers a run equals Detectron2's DefaultTrainer bit for bit on
the CPU: initial weights, batches, sampled regions and learning rates come from the same random
streams. Evaluation and PreciseBN draw from a copy of them, so they do not change the training.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import torch
from fvcore.common.config import CfgNode
from fvcore.nn.precise_bn import update_bn_stats
from torch import Tensor

from convert.verify import Converted
from detection.datasets import read_split
from detection.datasets.base import Split
from detection.embedded.build import build_model
from detection.embedded.checkpoint import (
    FINAL,
    RandomState,
    last_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from detection.embedded.evaluate import draw_predictions, evaluate
from detection.embedded.log import StepLog, log_file
from detection.embedded.model import Model, Sample
from detection.embedded.pipeline import build_training
from detection.embedded.solver import (
    clip_gradients,
    parameter_groups,
    set_learning_rate,
    warmup_multistep,
)
from detection.weights import EngineResult, load_converted, load_trained, read_trained
from moco.errors import NumericError
from moco.progress import Progress
from moco.run import RunFolder
from moco.stop import StopRequest, leave, stop_signals

logger = logging.getLogger(__name__)


def run(
    cfg: CfgNode,
    *,
    weights: Converted | None,
    folder: RunFolder,
    resume: bool,
    eval_only: bool,
    visualize: int = 0,
) -> EngineResult:
    """Train (unless `eval_only`) and evaluate; see detection/train_net.py.

    Args:
        cfg: from detection.task.load_task, which has checked it; SEED is not negative.
        weights: a converted backbone, or None for a random start.
        folder: the run's folder; gets log.txt, metrics.json, model_*.pth, last_checkpoint and
            inference/.
        resume: continue from the folder's last checkpoint, if there is one.
        eval_only: evaluate the trained model MODEL.WEIGHTS instead.
        visualize: draw the predictions on so many test pictures.

    Raises:
        UserError: a key that cannot be honoured, weights that do not fit. DataError: a picture
            that cannot be read. NumericError: a loss that is not finite. Preempted,
            KeyboardInterrupt: a signal asked to stop, and the state is saved.
    """
    start = time.perf_counter()
    with log_file(folder.path / "log.txt"):
        logger.info("config:\n%s", cfg.dump())
        torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
        torch.manual_seed(cfg.SEED)
        model = build_model(cfg)
        if eval_only:
            load_trained(model, read_trained(cfg.MODEL.WEIGHTS), cfg.MODEL.WEIGHTS)
            metrics = evaluate(model, _test_split(cfg), cfg, folder.path / "inference")
            _draw(model, cfg, folder, visualize)
            return EngineResult(metrics, 0, time.perf_counter() - start, None)
        coverage = None if weights is None else load_converted(model, weights.model)
        with stop_signals() as stop, closing(Trainer(cfg, model, folder, stop)) as trainer:
            if resume:
                trainer.resume()
            metrics = trainer.train()
        _draw(model, cfg, folder, visualize)
    return EngineResult(metrics, cfg.SOLVER.MAX_ITER, time.perf_counter() - start, coverage)


class Trainer:
    """Owns what a run needs from iteration to iteration: model, optimizer, schedule, log."""

    def __init__(self, cfg: CfgNode, model: Model, folder: RunFolder, stop: StopRequest) -> None:
        solver = cfg.SOLVER
        self.cfg, self.model, self.stop = cfg, model, stop
        self.folder: Path = folder.path
        self.device = cfg.MODEL.DEVICE.split(":")[0]
        self.max_iter: int = solver.MAX_ITER
        self.next_iteration = 0
        self.optimizer = torch.optim.SGD(
            parameter_groups(
                model,
                base_lr=solver.BASE_LR,
                weight_decay=solver.WEIGHT_DECAY,
                weight_decay_norm=solver.WEIGHT_DECAY_NORM,
                weight_decay_bias=solver.WEIGHT_DECAY_BIAS,
                bias_lr_factor=solver.BIAS_LR_FACTOR,
            ),
            lr=solver.BASE_LR,
            momentum=solver.MOMENTUM,
            nesterov=solver.NESTEROV,
            foreach=True,
        )
        self.schedule = warmup_multistep(
            steps=solver.STEPS,
            gamma=solver.GAMMA,
            max_iter=solver.MAX_ITER,
            warmup_iters=solver.WARMUP_ITERS,
            warmup_factor=solver.WARMUP_FACTOR,
            warmup_method=solver.WARMUP_METHOD,
        )
        self.random: RandomState | None = None  # of a checkpoint, to be taken up by `train`
        clip = solver.CLIP_GRADIENTS
        self.clip = (clip.CLIP_TYPE, clip.CLIP_VALUE, clip.NORM_TYPE) if clip.ENABLED else None
        self.mixed_precision = solver.AMP.ENABLED
        if self.mixed_precision:
            model.to(memory_format=torch.channels_last)  # bfloat16 convolutions are faster in it
        self.log = StepLog(folder, solver.MAX_ITER)

    def resume(self) -> None:
        """Take up the folder's last checkpoint; without one, start from the beginning."""
        path = last_checkpoint(self.folder)
        if path is None:
            logger.warning("%s holds no checkpoint; starting at iteration 0", self.folder)
            return
        standing = load_checkpoint(path, self.model, self.optimizer)
        self.next_iteration, self.random = standing.next_iteration, standing.random
        logger.info("continuing at iteration %d, after %s", self.next_iteration, path)

    def train(self) -> dict[str, float]:
        """Train to the end and return the last evaluation's metrics.

        Raises:
            NumericError, DataError: see `run`; the last checkpoint stays.
            Preempted, KeyboardInterrupt: asked to stop; the iteration at hand is done and saved.
        """
        cfg, metrics = self.cfg, None
        self.model.train()
        batches = build_training(cfg, cfg.DATALOADER.NUM_WORKERS, skip=self.next_iteration)
        if self.random is not None:  # after the line above, which drew from it
            self.random.restore()
        progress = Progress(self.max_iter, "fine-tune", initial=self.next_iteration)
        with closing(batches), progress:
            for iteration in range(self.next_iteration, self.max_iter):
                loss = self.step(iteration, batches)
                progress.update(1, loss=f"{loss:.3f}")
                done = iteration + 1
                evaluation_due = done == self.max_iter or _due(done, cfg.TEST.EVAL_PERIOD)
                if evaluation_due and cfg.TEST.PRECISE_BN.ENABLED:
                    self.precise_bn(cfg.TEST.PRECISE_BN.NUM_ITER, done)
                if done == self.max_iter:
                    self.save(iteration, FINAL)
                elif _due(done, cfg.SOLVER.CHECKPOINT_PERIOD):
                    self.save(iteration)
                if evaluation_due:
                    metrics = self.evaluate(iteration)
                number = self.stop.received
                if number is not None and done < self.max_iter:
                    leave(number, f"iteration {iteration}", self.save(iteration))
        return self.evaluate(self.max_iter - 1) if metrics is None else metrics

    def step(self, iteration: int, batches: Iterator[list[Sample]]) -> float:
        """One iteration: fetch, forward, loss, backward, step, log. Returns the total loss."""
        start = time.perf_counter()
        samples = next(batches)
        data_time = time.perf_counter() - start
        factor = self.schedule(iteration / self.max_iter)
        set_learning_rate(self.optimizer, factor)
        try:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed_precision):
                losses = self.model(samples)
        except FloatingPointError as error:
            raise self.diverged(iteration, str(error)) from error
        values = self.finite(iteration, losses)
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        if self.clip is not None:
            clip_gradients(self.optimizer, *self.clip)
        self.optimizer.step()
        values |= {"time": time.perf_counter() - start, "data_time": data_time}
        self.log.step(iteration, values, lr=self.cfg.SOLVER.BASE_LR * factor)
        return values["total_loss"]

    def finite(self, iteration: int, losses: dict[str, Tensor]) -> dict[str, float]:
        """The losses and their sum as numbers, fetched from the device at once.

        Raises:
            NumericError: one is not finite.
        """
        numbers = torch.stack(list(losses.values())).detach().tolist()
        values = dict(zip(losses, numbers, strict=True))
        bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise self.diverged(iteration, ", ".join(bad))
        return {"total_loss": sum(numbers), **values}

    def diverged(self, iteration: int, what: str) -> NumericError:
        last = last_checkpoint(self.folder)
        kept = "no checkpoint was written yet" if last is None else f"the last checkpoint is {last}"
        return NumericError(
            f"iteration {iteration}: {what}; {kept}; lower SOLVER.BASE_LR "
            f"({self.cfg.SOLVER.BASE_LR}) or raise SOLVER.WARMUP_ITERS"
        )

    def precise_bn(self, num_iters: int, done: int) -> None:
        """Replace the running averages of batch norm by averages over `num_iters` batches.

        As Detectron2's PreciseBN hook, over the first pictures of the training's order.

        Args:
            done: iterations trained so far.
        """
        with _private_random():
            batches = build_training(self.cfg, num_workers=0, drawn=done)
            with Progress(num_iters, "precise BN", unit="batch") as progress:
                update_bn_stats(self.model, _counted(batches, progress), num_iters)

    def save(self, iteration: int, name: str | None = None) -> Path:
        """Write a checkpoint of the state after `iteration`; returns its path.

        Raises:
            NumericError: a weight is not finite, so that the checkpoint before stays the last.
        """
        for parameter_name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise self.diverged(iteration, f"{parameter_name} is not finite")
        path = save_checkpoint(
            self.folder,
            name or f"model_{iteration:07d}.pth",
            model=self.model,
            optimizer=self.optimizer,
            iteration=iteration,
        )
        logger.info("saved %s", path)
        return path

    def evaluate(self, iteration: int) -> dict[str, float]:
        """Metrics of DATASETS.TEST in canonical names; also written to metrics.json."""
        with _private_random():
            metrics = evaluate(
                self.model, _test_split(self.cfg), self.cfg, self.folder / "inference"
            )
        self.log.write(iteration, metrics)
        return metrics

    def close(self) -> None:
        self.log.close()


def _test_split(cfg: CfgNode) -> Split:
    return read_split(cfg.DATASETS.TEST[0], cfg)


def _draw(model: Model, cfg: CfgNode, folder: RunFolder, number: int) -> None:
    if number:
        path = draw_predictions(model, _test_split(cfg), cfg, folder.path / "inference", number)
        logger.info("drew predictions into %s", path)


def _due(done: int, period: int) -> bool:
    return period > 0 and done % period == 0


def _private_random() -> AbstractContextManager[None]:
    """What is drawn inside does not advance torch's streams."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


def _counted(batches: Iterator[list[Sample]], progress: Progress) -> Iterator[list[Sample]]:
    for batch in batches:
        yield batch
        progress.update(1)
