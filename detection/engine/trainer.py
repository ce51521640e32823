"""Fine-tuning and evaluation of a detector: the training loop of both engines.

Under the same SEED a run on the CPU is bitwise identical to Detectron2's DefaultTrainer without
data-loader workers, on one process or several: initial weights, batches, sampled regions and
learning rates come from the same random streams. Evaluation and PreciseBN do not advance these
streams, so that they do not change the training.

Deviation: with workers Detectron2 samples each image's augmentation from the random stream of the
worker that reads it. Here any number of workers gives the batches without workers.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from fvcore.nn.precise_bn import get_bn_modules, update_bn_stats
from torch import Tensor, nn

from detection.config.engines import find_engine
from detection.data.pipeline import TrainingData
from detection.data.random_state import State, private_random, restore_random, seed_all
from detection.data.records import records_forgotten
from detection.data.sample import Sample
from detection.datasets.doctor import command as doctor_command
from detection.datasets.files import resumable
from detection.engine.box_features import score_backbone
from detection.engine.checkpoint import (
    FINAL,
    last_checkpoint,
    read_checkpoint,
    restore,
    save_checkpoint,
)
from detection.engine.evaluate import draw_predictions, evaluate
from detection.engine.job import Job, counting, import_modules, set_iterations
from detection.engine.log import (
    continue_log,
    is_evaluated,
    is_kept,
    log_file,
    log_step,
    open_log,
    recent_values,
)
from detection.engine.per_image import run_per_image
from detection.engine.solver import build_schedule, clip_gradients, set_learning_rate
from detection.engine.start import frozen_digest, write_start
from detection.engine.weights import (
    EngineResult,
    load_converted,
    load_trained,
    read_trained,
)
from detection.evaluation.metrics import LOGME, canonical
from detection.modeling.backbones import backbone_type
from detection.modeling.norms import with_process_norms
from detection.modeling.optimizer import build_optimizer
from moco.common import distributed
from moco.common.errors import DataError, NumericError
from moco.common.progress import Progress
from moco.engine.checkpoint import OF_DETECTRON2, Found, resume_run
from moco.engine.device import LossScaler, autocast
from moco.engine.stop import StopRequest, exit_after_save

logger = logging.getLogger(__name__)


def work(job: Job, stop: StopRequest) -> EngineResult:
    """Run one process's share of a job; the metrics are complete on the main process only."""
    start, engine = time.perf_counter(), find_engine(job.engine)
    loggers = ("detection", "fvcore", *engine.loggers)
    with log_file(Path(job.cfg.OUTPUT_DIR) / "log.txt", loggers):
        logger.info("config:\n%s", job.cfg.dump())
        import_modules(job.imports)
        engine.provide_datasets(job.cfg)
        cfg = with_process_norms(job.cfg, distributed.world_size())
        torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
        seed_all(cfg.SEED + distributed.rank())
        model = engine.build_model(cfg)
        distributed.broadcast_from_main(model)
        iterations, coverage, score = 0, None, {}
        if job.eval_only:
            load_trained(model, read_trained(cfg.MODEL.WEIGHTS), cfg.MODEL.WEIGHTS)
            metrics = evaluate(model, cfg, engine)
        else:
            kind = backbone_type(cfg.MODEL.BACKBONE.NAME)
            coverage = load_converted(model, job.weights.model, kind) if job.weights else None
            per_image = None
            if cfg.MODEL.BACKBONE.PER_IMAGE:
                per_image = run_per_image(model, cfg, job.engine)
            if cfg.TEST.LOGME:
                score = {LOGME: score_backbone(cfg, engine, model, per_image)}
            iterations = cfg.SOLVER.MAX_ITER
            trainer = Trainer(cfg, job.engine, model, stop)
            with closing(trainer.log), counting(lambda: trainer.done):
                metrics = trainer.train(trainer.resume() if job.resume else None)
        metrics = canonical(metrics) | score
        if (augmented := engine.augmented(cfg, model)) is not None:
            found = canonical(evaluate(augmented, cfg, engine, "inference_TTA"))
            metrics |= {name.replace("/", "_TTA/", 1): value for name, value in found.items()}
        if job.visualize and distributed.is_main():
            images = draw_predictions(model, cfg, engine, job.visualize)
            logger.info("wrote predictions on images into %s", images)
        frozen = None if job.eval_only else frozen_digest(model)
        return EngineResult(metrics, iterations, time.perf_counter() - start, coverage, frozen)


class Trainer:
    """State of a run: model, optimizer, schedule, log.

    Args:
        cfg: Configuration of the task, with the norms for this number of processes.
        engine: Name of the engine that built the model.
        model: Model with its initial weights.
        stop: Stop request of this process.
    """

    def __init__(
        self,
        cfg: CfgNode,
        engine: str,
        model: nn.Module,
        stop: StopRequest,
    ) -> None:
        self.cfg, self.model, self.stop = cfg, model, stop
        self.engine, self.engine_name = find_engine(engine), engine
        self.parallel = distributed.data_parallel(model)
        self.device = torch.device(cfg.MODEL.DEVICE)
        self.folder = Path(cfg.OUTPUT_DIR)
        self.max_iter: int = cfg.SOLVER.MAX_ITER
        self.done = 0  # Number of iterations.
        self.saved = -1  # The iteration of the newest checkpoint.
        self.optimizer = build_optimizer(cfg, model)
        self.schedule = build_schedule(cfg.SOLVER)
        self.scaler = LossScaler(self.device, cfg.SOLVER.PRECISION)
        self.log = open_log(self.folder if distributed.is_main() else None)

    def resume(self) -> State | None:
        """Load the last checkpoint of OUTPUT_DIR; without one, start from scratch.

        Returns:
            The random state to continue with; None for that of a new training.
        """
        random = None

        def restore_found(found: Found | None) -> Path | None:
            nonlocal random
            if found is None:
                logger.warning("%s has no checkpoint; starting at iteration 0", self.folder)
                return None
            path, state = found
            random = restore(path, state, self.model, self.optimizer, self.engine_name)
            self.done, self.saved = state["step"], state["iteration"]
            self.scaler.load_state_dict(state["scaler"])
            self.scaler.skipped = state["skipped"]
            continue_log(self.log, state["recent"], self.done)
            logger.info("continuing at iteration %d, after %s", self.done, path)
            return path

        resume_run(
            self.folder,
            read_checkpoint,
            restore_found,
            self.max_iter,
            pattern=OF_DETECTRON2,
            is_kept=lambda line, done: is_kept(line, done, self.max_iter),
        )
        return random

    def train(self, random: State | None = None) -> dict[str, float]:
        """Train to the end, and return the last evaluation's metrics on the main process, else {}.

        After a stop request, all processes stop together at the end of the current iteration.

        Args:
            random: Random state that `resume` returned.
        """
        cfg, engine, metrics = self.cfg, self.engine, None
        self.log.open(cfg)
        self.model.train()
        start, period = self.done, cfg.TEST.EVAL_PERIOD
        # The run was stopped or killed before the evaluation.
        missing = start > 0 and due(start, period) and not is_evaluated(self.folder, start)
        if start < self.max_iter and distributed.max_over_ranks(distributed.is_main() and missing):
            self.evaluate(start - 1)
        self.data = TrainingData(cfg, engine.mapper(cfg, training=True), engine.open_url)
        silent = not distributed.is_main()
        with (
            records_forgotten(num_workers := cfg.DATALOADER.NUM_WORKERS),
            closing(self.data.batches(num_workers, skip=start)) as batches,
            Progress(self.max_iter, "fine-tune", initial=start, silent=silent) as progress,
        ):
            if random is not None:  # Creating the batches has advanced the random state.
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
                number = distributed.max_over_ranks(self.stop.received or 0)
                if number and not last:
                    exit_after_save(number, f"iteration {iteration}", self.save(iteration))
        return self.evaluate(self.max_iter - 1) if metrics is None else metrics

    def step(self, iteration: int, batches: Iterator[list[Sample]]) -> float:
        """Run one iteration: fetch, forward, loss, backward, step, log. Return the total loss."""
        start, solver = time.perf_counter(), self.cfg.SOLVER
        batch = self.fetch(iteration, batches)
        data_time = time.perf_counter() - start
        factor = self.schedule(iteration / self.max_iter)
        set_learning_rate(self.optimizer, factor)
        with self.engine.step_scope(iteration) as scalars:
            losses = self.forward(iteration, batch)
            values = self.finite(iteration, losses)
            self.optimizer.zero_grad()
            loss: Any = sum(losses.values())
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            clip_gradients(solver, self.optimizer)
            self.scaler.take_step(self.optimizer)
        slowest = distributed.max_over_ranks(round(data_time * 1e6)) / 1e6
        values |= {"data_time": slowest, "rank_data_time": data_time}
        values["time"] = time.perf_counter() - start
        log_step(self.log, iteration, self.max_iter, values, scalars, solver.BASE_LR * factor)
        return values["total_loss"]

    def fetch(self, iteration: int, batches: Iterator[list[Sample]]) -> Any:
        """Return the next batch in the model's input format."""
        try:
            samples = next(batches)
        except DataError as error:
            raise self.unreadable(iteration - 1, error) from error
        if iteration == 0 and distributed.is_main():
            write_start(self.folder, self.model, samples)
        return self.engine.to_model(samples)

    def forward(self, iteration: int, batch: Any) -> dict[str, Tensor]:
        """Return the model's losses."""
        try:
            with autocast(self.device, self.cfg.SOLVER.PRECISION):
                losses = self.parallel(batch)
        except FloatingPointError as error:
            raise diverged(self.cfg, iteration, str(error)) from error
        return losses if isinstance(losses, dict) else {"total_loss": losses}

    def finite(self, iteration: int, losses: dict[str, Tensor]) -> dict[str, float]:
        """Return the losses and their sum, averaged over the ranks; raise if one is not finite."""
        own = torch.stack(list(losses.values())).detach().double().cpu()
        numbers = distributed.mean_over_ranks(own).tolist()
        values = dict(zip(losses, numbers, strict=True))
        bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise diverged(self.cfg, iteration, ", ".join(bad))
        return {"total_loss": sum(numbers), **values}

    def unreadable(self, iteration: int, error: DataError) -> DataError:
        """Save the state after `iteration`, the last one done, and return an error that names it.

        All processes have to call it. Reading since then has not advanced the saved random streams.
        """
        if iteration > self.saved:
            self.save(iteration)
        return DataError(resumable(error, last_checkpoint(self.folder), doctor_command(self.cfg)))

    def precise_bn(self, iteration: int, num_iters: int) -> None:
        """Recompute the batch norm statistics, as Detectron2's PreciseBN hook does.

        Deviation: this always uses the first images in training order. Detectron2 continues after
        the images of the previous estimate, which a resumed run does not know. Also, all ranks get
        the statistics of all images; in Detectron2 each rank keeps those of its own images
        (facebookresearch/detectron2#5398), so that the ranks evaluate different networks.
        """
        silent, engine = not distributed.is_main(), self.engine
        with private_random(), count_values(self.model) as counts, engine.step_scope(iteration):
            batches = self.data.batches_again()
            with Progress(num_iters, "precise BN", unit="batch", silent=silent) as progress:
                try:
                    update_bn_stats(self.model, self._counted(batches, progress), num_iters)
                except FloatingPointError as error:
                    raise diverged(self.cfg, iteration, str(error)) from error
        combine_statistics(counts)

    def _counted(self, batches: Iterator[list[Sample]], progress: Progress) -> Iterator[Any]:
        for batch in batches:
            yield self.engine.to_model(batch)
            progress.update(1)

    def save(self, iteration: int) -> Path:
        """Write the state after `iteration` and return its path.

        Raises:
            NumericError: If a weight is not finite, or fp16 skipped most steps.
        """
        check_finite(self.cfg, self.model, iteration)
        done = iteration + 1
        self.scaler.check(done, self.max_iter)
        is_last = done == self.max_iter
        path = self.folder / (FINAL if is_last else f"model_{iteration:07d}.pth")
        save_checkpoint(
            path,
            self.model,
            self.optimizer,
            iteration,
            engine=self.engine_name,
            scaler=self.scaler.state_dict(),
            skipped=self.scaler.skipped,
            recent=recent_values(self.log),
        )
        logger.info("saved %s", path)
        self.saved = iteration
        return path

    def evaluate(self, iteration: int) -> dict[str, float]:
        """Evaluate on DATASETS.TEST, write the metrics to metrics.json, and return them.

        Deviation: they are written immediately, at the last iteration done. Detectron2 writes the
        newest metrics every 20 iterations, and the last ones at the iteration after the last.
        """
        try:
            with private_random():
                metrics = evaluate(self.model, self.cfg, self.engine)
        except DataError as error:
            raise self.unreadable(iteration, error) from error
        self.log.write(iteration, metrics)
        return metrics


def due(done: int, period: int) -> bool:
    """Return whether an action is due after `done` iterations; period 0: only at the end."""
    return period > 0 and done % period == 0


def check_finite(cfg: CfgNode, model: nn.Module, iteration: int) -> None:
    """Raise NumericError if a tensor of the model is not finite, before it is used or saved."""
    for name, value in getattr(model, "module", model).state_dict().items():  # DDP has a module.
        if not torch.isfinite(value).all():
            raise diverged(cfg, iteration, f"{name} is not finite")


def diverged(cfg: CfgNode, iteration: int, what: str) -> NumericError:
    """Return the error for a loss or weight that is not finite, which `what` describes."""
    last = last_checkpoint(Path(cfg.OUTPUT_DIR))
    kept = f"the last checkpoint is {last}" if last else ""
    error = NumericError(
        f"iteration {iteration}: {what}; {kept or 'no checkpoint was written yet'}; lower "
        f"SOLVER.BASE_LR ({cfg.SOLVER.BASE_LR}) or raise SOLVER.WARMUP_ITERS"
    )
    set_iterations(error, iteration)
    return error


@contextmanager
def count_values(model: nn.Module) -> Iterator[dict[nn.Module, int]]:
    """Count the values per channel that pass through each BN layer in training mode."""
    counts: dict[nn.Module, int] = dict.fromkeys(get_bn_modules(model), 0)

    def count(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        counts[layer] += inputs[0].numel() // inputs[0].shape[1]

    handles = [layer.register_forward_pre_hook(count) for layer in counts]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def combine_statistics(counts: Mapping[nn.Module, int]) -> None:
    """Set the statistics of each layer to mean and variance over the values of all ranks.

    With n_r values of mean m_r and variance v_r on rank r: m = sum n_r m_r / n, and
    v = sum n_r (v_r + m_r^2) / n - m^2. In double precision, because v is a difference.

    Args:
        counts: n_r by layer, the same layers in the same order on every rank.
    """
    if distributed.world_size() == 1:
        return
    for layer, count in counts.items():
        running_mean, running_var = (
            layer.get_buffer("running_mean"),
            layer.get_buffer("running_var"),
        )
        mean, var = running_mean.double(), running_var.double()
        channels = mean.numel()
        sums = torch.cat([mean * count, (var + mean**2) * count, mean.new_tensor([count])])
        sums = distributed.sum_over_ranks(sums)
        total = sums[-1]
        if total == 0:
            continue  # A layer that no rank used keeps the statistics of the training.
        mean = sums[:channels] / total
        var = sums[channels:-1] / total - mean**2
        running_mean.copy_(mean)
        running_var.copy_(var)
