"""Training and evaluation on Detectron2, on one process or several, on GPU or CPU."""

import logging
import math
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.engine import (
    AMPTrainer,
    DefaultTrainer,
    HookBase,
    SimpleTrainer,
    TrainerBase,
    create_ddp_model,
    launch,
)
from detectron2.engine.hooks import EvalHook, PeriodicCheckpointer, PreciseBN
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.solver.build import maybe_add_gradient_clipping
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventWriter, JSONWriter, TensorboardXWriter
from detectron2.utils.logger import setup_logger
from torch import nn

from convert.verify import Converted
from detection.d2.bf16 import replace_roi_align, widen_sync_bn
from detection.d2.catalog import import_modules, offer
from detection.d2.checkpoint import SafeCheckpointer, check_checkpoint
from detection.d2.config import with_builder
from detection.d2.data import (
    build_evaluator,
    build_test_loader,
    build_train_loader,
    plot_predictions,
    register,
)
from detection.d2.log import EvaluationHook, MetricsWriter, ProgressHook
from detection.d2.precise_bn import RankEqualPreciseBN
from detection.d2.state import (
    STATE_KEY,
    CheckpointHook,
    EndedError,
    StoppedError,
    usable_state,
)
from detection.data.random_state import private_random
from detection.data.records import records_forgotten
from detection.datasets.doctor import command as doctor_command
from detection.datasets.images import resumable
from detection.engine.job import Job
from detection.engine.launch import report, run_job
from detection.engine.resuming import (
    check_finite,
    counting,
    diverged,
    due,
    last_checkpoint,
    resume_from,
)
from detection.engine.start import StartFile, frozen_digest, head_digests
from detection.engine.weights import (
    Coverage,
    EngineResult,
    load_converted,
    load_trained,
    read_trained,
)
from detection.evaluation.metrics import HEADLINE
from detection.modeling.backbones import backbone_type
from detection.modeling.focal_loss import compile_focal_loss
from detection.modeling.memory_format import set_memory_format
from detection.modeling.norms import with_process_norms
from detection.modeling.optimizer import build_optimizer
from moco.common import distributed
from moco.common.errors import DataError, NumericError
from moco.common.run import RunFolder
from moco.engine.device import autocast
from moco.engine.metrics import Metrics
from moco.engine.stop import StopRequest, leave

logger = logging.getLogger(__name__)


def run(job: Job) -> EngineResult:
    """Train and evaluate, or only evaluate; see `detection.engine.launch.run_job`."""
    return run_job(job, _work, _launch)


def _launch(job: Job, outcome: Path) -> None:
    of = job.processes
    where = of.num_gpus, of.num_machines, of.machine_rank, of.dist_url
    launch(_in_process, *where, args=(job, outcome))


def _in_process(job: Job, outcome: Path) -> None:
    """What Detectron2's launch runs in each process."""
    report(job, _work, outcome, rank=comm.get_rank(), local_rank=comm.get_local_rank())
    _disconnect()


class Trainer(DefaultTrainer):
    """Detectron2's trainer with this project's evaluators, progress and atomic checkpoints."""

    checkpointer: DetectionCheckpointer
    checkpoint_hook: CheckpointHook
    writers: list[EventWriter]
    build_evaluator = staticmethod(build_evaluator)
    build_train_loader = staticmethod(build_train_loader)
    build_test_loader = staticmethod(build_test_loader)

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        model: nn.Module = super().build_model(cfg)
        set_memory_format(model, cfg)
        if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
            compile_focal_loss(cfg.MODEL.DEVICE)
        if cfg.SOLVER.PRECISION == "bf16":
            replace_roi_align(model)
            widen_sync_bn(model)
        return model

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        """Detectron2's own where it has one: SGD with the same learning rate in all layers."""
        if cfg.SOLVER.OPTIMIZER == "SGD" and cfg.SOLVER.LR_DECAY == 1.0:
            optimizer: torch.optim.Optimizer = super().build_optimizer(cfg, model)
            return optimizer
        return maybe_add_gradient_clipping(cfg, build_optimizer(cfg, model))

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module, evaluators: Any = None) -> Any:
        with private_random():
            return super().test(cfg, model, evaluators)

    def run_step(self) -> None:
        try:
            super().run_step()
        except DataError as error:
            self.iter -= 1  # the last one that was done, also to the hooks that come after training
            self._leave_unreadable(error)
        except FloatingPointError as error:
            raise EndedError(diverged(self.cfg, self.iter, str(error))) from error

    def after_step(self) -> None:
        done = self.iter + 1
        try:
            if due(done, self.cfg.TEST.EVAL_PERIOD) or done == self.max_iter:
                check_finite(self.cfg, self._trainer.model, self.iter)
            super().after_step()
        except DataError as error:
            self._leave_unreadable(error)
        except NumericError as error:
            raise EndedError(error) from error
        except FloatingPointError as error:  # in PreciseBN
            raise EndedError(diverged(self.cfg, self.iter, str(error))) from error

    def _leave_unreadable(self, error: DataError) -> NoReturn:
        """Save what was trained; on all ranks."""
        self.checkpoint_hook.save_unreadable(self.iter)
        last, doctor = last_checkpoint(Path(self.cfg.OUTPUT_DIR)), doctor_command(self.cfg)
        raise EndedError(DataError(resumable(error, last, doctor))) from error

    def build_writers(self) -> list[EventWriter]:
        """Detectron2's, with `MetricsWriter` in place of its own and tensorboard where chosen."""
        metrics = Metrics(RunFolder(self.cfg.OUTPUT_DIR, owner=False))
        others = self.cfg.clone()
        others.defrost()
        others.LOG.LOGGERS = tuple(n for n in self.cfg.LOG.LOGGERS if n != "tensorboard")
        metrics.open(others)
        replaced: tuple[type[EventWriter], ...] = (JSONWriter,)
        if "tensorboard" not in self.cfg.LOG.LOGGERS:
            replaced = (JSONWriter, TensorboardXWriter)
        kept = [w for w in super().build_writers() if not isinstance(w, replaced)]
        self.writers = [*kept, MetricsWriter(metrics)]
        return self.writers

    def build_hooks(self) -> list[HookBase]:
        """Detectron2's, with `CheckpointHook` on every rank in place of its own."""
        # Here and not in __init__, because the hooks below take hold of it.
        self.checkpointer = SafeCheckpointer(
            self.checkpointer.model, self.cfg.OUTPUT_DIR, trainer=weakref.proxy(self)
        )
        self.writers = []  # but on the main process
        hooks, inner = [], None
        for hook in super().build_hooks():
            if isinstance(hook, PeriodicCheckpointer):
                inner = hook  # on the main process; just before the evaluation
                continue
            if isinstance(hook, EvalHook):
                periods = self.cfg.SOLVER.CHECKPOINT_PERIOD, self.cfg.TEST.EVAL_PERIOD
                hook = EvaluationHook(hook._func, periods[1], self.writers)
                self.checkpoint_hook = CheckpointHook(inner, hook, *periods)
                hooks.append(self.checkpoint_hook)
            if isinstance(hook, PreciseBN):
                hook = RankEqualPreciseBN(hook, self.model, self.cfg.TEST.EVAL_PERIOD)
            hooks.append(hook)
        if comm.is_main_process():
            hooks.insert(-1, ProgressHook())
        return hooks


class Bf16Trainer(SimpleTrainer):
    """Detectron2's inner loop with the forward pass in bf16, on a CPU or a GPU.

    AMPTrainer needs a GPU, because it scales the gradients of fp16; those of bf16 need no scaling.
    """

    def run_step(self) -> None:
        model = self.model
        device, forward = next(model.parameters()).device, model.forward

        def in_bf16(batch: Any) -> Any:
            with autocast(device, "bf16"):
                return forward(batch)

        model.forward = in_bf16  # while the backward pass, in the same step, is not to be in it
        try:
            super().run_step()
        finally:
            del model.forward


class CustomTrainer(Trainer):
    """The same in bf16, and on several processes without GPU, where DDP takes no device ids.

    `DefaultTrainer.__init__` has no hook for these two; this is the rest of it.
    """

    def __init__(self, cfg: CfgNode) -> None:
        TrainerBase.__init__(self)
        cfg = DefaultTrainer.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        loader = self.build_train_loader(cfg)
        ids = {"device_ids": None} if cfg.MODEL.DEVICE == "cpu" else {}
        model = create_ddp_model(model, broadcast_buffers=False, **ids)
        self._trainer = inner_loop(cfg)(model, loader, optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = SafeCheckpointer(model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self))
        self.start_iter, self.max_iter, self.cfg = 0, cfg.SOLVER.MAX_ITER, cfg
        self.register_hooks(self.build_hooks())


def inner_loop(cfg: CfgNode) -> type[SimpleTrainer]:
    """For SOLVER.PRECISION."""
    loops = {"fp32": SimpleTrainer, "bf16": Bf16Trainer, "fp16": AMPTrainer}
    return loops[cfg.SOLVER.PRECISION]


def _work(job: Job, stop: StopRequest) -> EngineResult:
    """One process's share; the metrics are complete on the main process only."""
    start, cfg = time.monotonic(), job.cfg
    _set_up(cfg)
    import_modules(job.imports)
    offer(cfg)
    register(cfg, (*(() if job.eval_only else cfg.DATASETS.TRAIN), *cfg.DATASETS.TEST))
    cfg = with_builder(with_process_norms(cfg, comm.get_world_size()))
    coverage, iterations = None, 0
    if job.eval_only:
        model = Trainer.build_model(cfg)
        load_trained(model, read_trained(cfg.MODEL.WEIGHTS), cfg.MODEL.WEIGHTS)
        metrics = _canonical(flatten_results_dict(Trainer.test(cfg, model)))
    else:
        model, metrics, coverage, iterations = _train(cfg, job.weights, job.resume, stop)
    if cfg.TEST.AUG.ENABLED:
        metrics |= _augmented(cfg, model)
    if job.visualize and comm.is_main_process():
        logger.info("plotted predictions into %s", plot_predictions(cfg, model, job.visualize))
    frozen = None if job.eval_only else frozen_digest(model)
    return EngineResult(metrics, iterations, time.monotonic() - start, coverage, frozen)


def _train(
    cfg: CfgNode, weights: Converted | None, resume: bool, stop: StopRequest
) -> tuple[nn.Module, dict[str, float], Coverage | None, int]:
    """The model, metrics, coverage of the weights, and number of iterations."""
    folder, content = Path(cfg.OUTPUT_DIR), {}
    path = last_checkpoint(folder) if resume else None
    if path is not None:
        content = check_checkpoint(path)
    elif resume:
        logger.info("--resume: no checkpoint in %s yet, starting from scratch", folder)
    comm.synchronize()  # all have read it
    if resume and comm.is_main_process():  # before the trainer opens metrics.json
        resume_from(folder, path, content.get("iteration", -1) + 1, cfg.SOLVER.MAX_ITER)
    comm.synchronize()
    spread = comm.get_world_size() > 1 and cfg.MODEL.DEVICE == "cpu"
    custom = spread or cfg.SOLVER.PRECISION == "bf16"
    trainer = (CustomTrainer if custom else Trainer)(cfg)
    model: nn.Module = trainer.checkpointer.model
    kind = backbone_type(cfg.MODEL.BACKBONE.NAME)
    coverage = None if weights is None else load_converted(model, weights.model, kind)
    head, frozen = head_digests(model, coverage), frozen_digest(model)
    if path is not None:
        state = usable_state(content.get(STATE_KEY), path, trainer._trainer.data_loader)
        trainer.checkpoint_hook.resumed = state
        trainer.resume_or_load(resume=True)
        logger.info("resuming after iteration %d", trainer.start_iter)
    del content
    main_folder = folder if comm.is_main_process() else None
    trainer._trainer.data_loader.observe = StartFile(
        main_folder, head, frozen, trainer.start_iter
    ).add
    trainer.checkpoint_hook.stop = stop
    try:
        with records_forgotten(), counting(lambda: trainer.checkpoint_hook.done):
            trainer.train()
    except StoppedError as stopped:
        saved = Path(cfg.OUTPUT_DIR) / f"{stopped.name}.pth"
        leave(stopped.number, f"iteration {stopped.iteration}", saved)
    except EndedError as ended:
        raise ended.error from ended
    latest = trainer.storage.latest()
    metrics = _canonical({name: value for name, (value, _) in latest.items()})
    return model, metrics, coverage, trainer.max_iter


def _augmented(cfg: CfgNode, model: nn.Module) -> dict[str, float]:
    """Metrics with test-time augmentation, `bbox_TTA/AP` and so on, as Detectron2 names them."""
    evaluator = build_evaluator(cfg, cfg.DATASETS.TEST[0], "inference_TTA")
    results = Trainer.test(cfg, GeneralizedRCNNWithTTA(cfg, model), [evaluator])
    metrics = _canonical(flatten_results_dict(results))
    return {name.replace("/", "_TTA/", 1): value for name, value in metrics.items()}


def _canonical(results: Mapping[str, float]) -> dict[str, float]:
    """The metrics among everything that the trainer's storage holds."""
    metrics = {}
    for name, value in results.items():
        # DensePose's AP is that of the geodesic point similarity (the paper's AP^dp); -1 times 100
        # is written where there was nothing to measure.
        name = name.replace("densepose_gps/", "densepose/")
        if name.split("/")[0] in HEADLINE:
            metrics[name] = math.nan if value == -100 else value
    return metrics


def _set_up(cfg: CfgNode) -> None:
    """Logs, seed and kernels, as Detectron2's `default_setup` (without its config.yaml)."""
    rank = comm.get_rank()
    for name in ("fvcore", "detectron2", "detection"):
        logging.getLogger(name).handlers.clear()
        setup_logger(cfg.OUTPUT_DIR, distributed_rank=rank, name=name)
    logger.info("process %d of %d\n%s", rank, comm.get_world_size(), collect_env_info())
    logger.info("config:\n%s", cfg.dump())
    # A different stream in every process, all of them fixed by the seed.
    seed_all_rng(cfg.SEED + rank)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK


def _disconnect() -> None:
    """Let go of the groups of processes that Detectron2 keeps for ever, and end them."""
    comm._LOCAL_PROCESS_GROUP = None
    comm._get_global_gloo_group.cache_clear()
    distributed.disconnect()
