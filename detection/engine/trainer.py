"""Fine-tuning and evaluation of a detector: the one loop.

Under the same SEED and without workers a run is bitwise identical to Detectron2's DefaultTrainer
on the CPU, on one process or several: initial weights, batches, sampled regions and learning rates
come from the same random streams. Evaluation and PreciseBN leave these as they were, so they do not
change the training.
"""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from fvcore.common.config import CfgNode
from fvcore.nn.precise_bn import update_bn_stats
from torch import Tensor, nn

from detection.config.engines import find_engine
from detection.data.pipeline import TrainingData
from detection.data.random_state import State, private_random, restore_random
from detection.data.records import records_forgotten
from detection.data.sample import Sample
from detection.datasets.doctor import command as doctor_command
from detection.datasets.images import resumable
from detection.engine.checkpoint import load_checkpoint, save_checkpoint
from detection.engine.evaluate import draw_predictions, evaluate
from detection.engine.job import Job
from detection.engine.log import StepLog, log_file
from detection.engine.precise_bn import combine_statistics, count_values
from detection.engine.resuming import (
    check_finite,
    counting,
    diverged,
    due,
    evaluation_is_missing,
    last_checkpoint,
    resume_from,
)
from detection.engine.solver import build_schedule, clip_gradients, set_learning_rate
from detection.engine.start import StartFile, frozen_digest, head_digests
from detection.engine.weights import (
    Coverage,
    EngineResult,
    load_converted,
    load_trained,
    read_trained,
)
from detection.modeling.backbones import backbone_type
from detection.modeling.norms import with_process_norms
from detection.modeling.optimizer import build_optimizer
from moco.common import distributed
from moco.common.errors import DataError
from moco.common.progress import Progress
from moco.engine.device import autocast
from moco.engine.stop import StopRequest, leave

logger = logging.getLogger(__name__)


def work(job: Job, stop: StopRequest) -> EngineResult:
    """One process's share; the metrics are complete on the main process only."""
    start = time.perf_counter()
    with log_file(Path(job.cfg.OUTPUT_DIR) / "log.txt"):
        logger.info("config:\n%s", job.cfg.dump())
        cfg = with_process_norms(job.cfg, job.processes.world_size)
        torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
        torch.manual_seed(cfg.SEED + distributed.rank())
        model = find_engine(job.engine).build_model(cfg)
        distributed.copy_from_main(model)
        iterations, coverage = 0, None
        if job.eval_only:
            load_trained(model, read_trained(cfg.MODEL.WEIGHTS), cfg.MODEL.WEIGHTS)
            metrics = evaluate(model, cfg)
        else:
            kind = backbone_type(cfg.MODEL.BACKBONE.NAME)
            coverage = load_converted(model, job.weights.model, kind) if job.weights else None
            iterations = cfg.SOLVER.MAX_ITER
            trainer = Trainer(cfg, model, stop, coverage)
            with closing(trainer.log), counting(lambda: trainer.done):
                metrics = trainer.train(trainer.resume() if job.resume else None)
        if job.visualize and distributed.is_main():
            images = draw_predictions(model, cfg, job.visualize)
            logger.info("wrote predictions on images into %s", images)
        frozen = None if job.eval_only else frozen_digest(model)
        return EngineResult(metrics, iterations, time.perf_counter() - start, coverage, frozen)


class Trainer:
    """Owns what a run needs from iteration to iteration: model, optimizer, schedule, log."""

    def __init__(
        self, cfg: CfgNode, model: nn.Module, stop: StopRequest, coverage: Coverage | None = None
    ) -> None:
        self.cfg, self.model, self.stop = cfg, model, stop
        self.head, self.frozen = head_digests(model, coverage), frozen_digest(model)
        self.parallel = distributed.data_parallel(model)
        self.device = torch.device(cfg.MODEL.DEVICE)
        self.folder = Path(cfg.OUTPUT_DIR)
        self.max_iter: int = cfg.SOLVER.MAX_ITER
        self.done = 0  # iterations
        self.saved = -1  # the iteration after which the newest checkpoint was written
        self.optimizer = build_optimizer(cfg, model)
        self.schedule = build_schedule(cfg.SOLVER)
        self.log = StepLog(self.folder if distributed.is_main() else None, self.max_iter)
        self.first = StartFile(None, self.head)  # `train` has one that writes

    def resume(self) -> State | None:
        """Load the folder's last checkpoint; without one, start from the beginning.

        Returns:
            The random state to continue with, None for that of a new training.
        """
        path, random = last_checkpoint(self.folder), None
        if path is None:
            logger.warning("%s has no checkpoint; starting at iteration 0", self.folder)
        else:
            self.done, random, recent = load_checkpoint(path, self.model, self.optimizer)
            self.saved = self.done - 1
            self.log.resume(recent)
            logger.info("continuing at iteration %d, after %s", self.done, path)
        distributed.barrier()  # all have read it
        if distributed.is_main():
            resume_from(self.folder, path, self.done, self.max_iter)
        return random

    def train(self, random: State | None = None) -> dict[str, float]:
        """Train to the end and return the last evaluation's metrics, {} but on the main process.

        Asked to stop, all processes do so together, after the iteration at hand. `random` is what
        `resume` returned.
        """
        cfg, metrics = self.cfg, None
        self.log.open(cfg)
        self.model.train()
        start, period = self.done, cfg.TEST.EVAL_PERIOD
        folder = self.folder if distributed.is_main() else None
        self.first = StartFile(folder, self.head, self.frozen, start)
        missing = distributed.is_main() and evaluation_is_missing(self.folder, start, period)
        if start < self.max_iter and distributed.highest(missing):
            self.evaluate(start - 1)
        self.data = TrainingData(cfg)
        silent = not distributed.is_main()
        with (
            records_forgotten(),
            closing(self.data.batches(cfg.DATALOADER.NUM_WORKERS, skip=start)) as batches,
            Progress(self.max_iter, "fine-tune", initial=start, silent=silent) as progress,
        ):
            if random is not None:  # after the batches, which take a number from it
                restore_random(random)
            for iteration in range(start, self.max_iter):
                loss = self.step(iteration, batches)
                progress.update(1, loss=f"{loss:.3f}")
                self.done = done = iteration + 1
                last = done == self.max_iter
                evaluation_due = last or due(done, period)
                if evaluation_due:
                    check_finite(cfg, self.model, iteration)
                if evaluation_due and cfg.TEST.PRECISE_BN.ENABLED:
                    self.precise_bn(iteration, cfg.TEST.PRECISE_BN.NUM_ITER)
                if last or due(done, cfg.SOLVER.CHECKPOINT_PERIOD):
                    self.save(iteration)
                if evaluation_due:
                    metrics = self.evaluate(iteration)
                number = distributed.highest(self.stop.received or 0)
                if number and not last:
                    leave(number, f"iteration {iteration}", self.save(iteration))
        return self.evaluate(self.max_iter - 1) if metrics is None else metrics

    def step(self, iteration: int, batches: Iterator[list[Sample]]) -> float:
        """One iteration: fetch, forward, loss, backward, step, log. Returns the total loss."""
        start, solver = time.perf_counter(), self.cfg.SOLVER
        try:
            samples = next(batches)
        except DataError as error:
            raise self.unreadable(iteration - 1, error) from error
        self.first.add(samples)
        data_time = time.perf_counter() - start
        factor = self.schedule(iteration / self.max_iter)
        set_learning_rate(self.optimizer, factor)
        try:
            with autocast(self.device, solver.PRECISION):
                losses = self.parallel(samples)
        except FloatingPointError as error:
            raise diverged(self.cfg, iteration, str(error)) from error
        values = self.finite(iteration, losses)
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        clip_gradients(solver, self.optimizer)
        self.optimizer.step()
        values |= {"time": time.perf_counter() - start, "data_time": data_time}
        self.log.step(iteration, values, lr=solver.BASE_LR * factor)
        return values["total_loss"]

    def finite(self, iteration: int, losses: dict[str, Tensor]) -> dict[str, float]:
        """The losses and their sum, means over the processes; NumericError if one is not finite."""
        own = torch.stack(list(losses.values())).detach().double().cpu()
        numbers = distributed.mean_over_ranks(own).tolist()
        values = dict(zip(losses, numbers, strict=True))
        bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise diverged(self.cfg, iteration, ", ".join(bad))
        return {"total_loss": sum(numbers), **values}

    def unreadable(self, iteration: int, error: DataError) -> DataError:
        """Save the state after `iteration`, the last one that was done, and say so.

        On all processes; what was read since then used none of the saved random streams.
        """
        if iteration > self.saved:
            self.save(iteration)
        return DataError(resumable(error, last_checkpoint(self.folder), doctor_command(self.cfg)))

    def precise_bn(self, iteration: int, num_iters: int) -> None:
        """As Detectron2's PreciseBN hook, over the first images of the training's order."""
        silent = not distributed.is_main()
        with private_random(), count_values(self.model) as counts:
            batches = self.data.batches(num_workers=0, trained=self.done)
            with Progress(num_iters, "precise BN", unit="batch", silent=silent) as progress:
                try:
                    update_bn_stats(self.model, _counted(batches, progress), num_iters)
                except FloatingPointError as error:
                    raise diverged(self.cfg, iteration, str(error)) from error
        combine_statistics(counts)

    def save(self, iteration: int) -> Path:
        """Write the state after `iteration`, unless a weight is not finite; returns the path."""
        check_finite(self.cfg, self.model, iteration)
        which = "final" if iteration + 1 == self.max_iter else f"{iteration:07d}"
        path = self.folder / f"model_{which}.pth"
        save_checkpoint(path, self.model, self.optimizer, iteration, self.log.recent())
        logger.info("saved %s", path)
        self.saved = iteration
        return path

    def evaluate(self, iteration: int) -> dict[str, float]:
        """Metrics of DATASETS.TEST in canonical names; also written to metrics.json."""
        try:
            with private_random():
                metrics = evaluate(self.model, self.cfg)
        except DataError as error:
            raise self.unreadable(iteration, error) from error
        self.log.write(iteration, metrics)
        return metrics


def _counted(batches: Iterator[list[Sample]], progress: Progress) -> Iterator[list[Sample]]:
    for batch in batches:
        yield batch
        progress.update(1)
