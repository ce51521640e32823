"""Training and evaluation on Detectron2, on one process or several, on GPU or CPU."""

import dataclasses
import gc
import json
import logging
import math
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.engine import (
    DefaultTrainer,
    HookBase,
    SimpleTrainer,
    TrainerBase,
    create_ddp_model,
    launch,
)
from detectron2.engine.hooks import PreciseBN
from detectron2.evaluation import DatasetEvaluator
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng
from detectron2.utils.logger import setup_logger
from torch import nn

from convert.verify import Converted
from detection.d2.checkpoint import SafeCheckpointer, check_checkpoint
from detection.d2.config import with_builder, with_process_norms
from detection.d2.data import (
    build_evaluator,
    build_test_loader,
    build_train_loader,
    draw_predictions,
    register,
)
from detection.d2.precise_bn import RankEqualPreciseBN
from detection.datasets import cache_clear
from detection.metrics import HEADLINE
from detection.weights import (
    Coverage,
    EngineResult,
    load_converted,
    load_trained,
    read_trained,
)
from moco.errors import DataError, NumericError, UserError
from moco.fileio import atomic_write_json, atomic_write_text
from moco.progress import Progress
from moco.run import RunFolder

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Processes:
    """How many processes train together, as Detectron2's launch takes it."""

    num_gpus: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    dist_url: str = "auto"

    @property
    def world_size(self) -> int:
        return self.num_gpus * self.num_machines


def run(
    cfg: CfgNode,
    *,
    weights: Converted | None,
    folder: RunFolder | None,
    resume: bool,
    eval_only: bool,
    visualize: int = 0,
    processes: Processes = Processes(),
) -> EngineResult:
    """Train and evaluate, or only evaluate, the task in ``cfg`` (see detection/task.py).

    Args:
        cfg: fits ``processes``, see :func:`check_processes`.
        weights: the converted backbone, None for a random one and for evaluation.
        visualize: draw the predictions on so many test pictures.
        folder: locked output folder; None on machines other than the first.
        eval_only: evaluate the trained model that MODEL.WEIGHTS names.

    Raises:
        UserError: what does not fit; NumericError: a loss that is not finite.
    """
    if processes.world_size == 1:
        return _work(cfg, weights, resume, eval_only, visualize)
    with TemporaryDirectory(prefix="detection-") as scratch:
        outcome = Path(scratch) / "outcome.json"
        if cfg.MODEL.DEVICE == "cpu":
            # Else every process would be given a GPU of its own, as far as there are any.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            launch(
                _worker,
                processes.num_gpus,
                processes.num_machines,
                processes.machine_rank,
                processes.dist_url,
                args=(cfg, weights, resume, eval_only, visualize, str(outcome)),
            )
        except Exception:
            # The message of the process that failed first is worth more than the launcher's.
            if not outcome.is_file():
                raise
        if outcome.is_file():
            return _read_outcome(outcome)
    # The main process, and so the result, is on the first machine.
    return EngineResult({}, 0 if eval_only else cfg.SOLVER.MAX_ITER, 0.0, None)


def check_processes(cfg: CfgNode, processes: Processes, *, eval_only: bool = False) -> None:
    """Raise UserError where Detectron2 would answer with an assertion in every process."""
    available = torch.cuda.device_count()
    if cfg.MODEL.DEVICE != "cpu" and processes.num_gpus > available:
        raise UserError(f"--num-gpus {processes.num_gpus}: this machine has {available}")
    if not 0 <= processes.machine_rank < processes.num_machines or processes.num_gpus < 1:
        raise UserError(
            f"--num-gpus {processes.num_gpus} --num-machines {processes.num_machines} "
            f"--machine-rank {processes.machine_rank}: expected at least one of each, and a rank "
            "below the number of machines"
        )
    if processes.num_machines > 1 and processes.dist_url == "auto":
        raise UserError("--num-machines needs --dist-url tcp://<first machine>:<port>")
    if processes.world_size > 1 and ":" in cfg.MODEL.DEVICE:
        raise UserError(
            f"MODEL.DEVICE {cfg.MODEL.DEVICE} is one GPU for {processes.world_size} processes; "
            "set it to cuda"
        )
    if not eval_only and cfg.SOLVER.IMS_PER_BATCH % processes.world_size:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {cfg.SOLVER.IMS_PER_BATCH} cannot be divided among "
            f"{processes.world_size} processes; SOLVER.REFERENCE_WORLD_SIZE scales it to them"
        )


class Trainer(DefaultTrainer):
    """Detectron2's trainer with this project's evaluators, progress and atomic checkpoints."""

    checkpointer: DetectionCheckpointer

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        return build_evaluator(cfg, dataset_name)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        return build_train_loader(cfg)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        return build_test_loader(cfg, dataset_name)

    def build_hooks(self) -> list[HookBase]:
        # Here and not in __init__, because the hooks below take hold of it.
        self.checkpointer = SafeCheckpointer(
            self.checkpointer.model, self.cfg.OUTPUT_DIR, trainer=weakref.proxy(self)
        )
        hooks = [self._rank_equal(hook) for hook in super().build_hooks()]
        if comm.is_main_process():
            hooks.insert(-1, ProgressHook())
        return hooks

    def _rank_equal(self, hook: HookBase) -> HookBase:
        if isinstance(hook, PreciseBN):
            return RankEqualPreciseBN(hook, self.model, self.cfg.TEST.EVAL_PERIOD)
        return hook


class CpuTrainer(Trainer):
    """The same on several processes without GPU, where DDP must not be given device ids.

    ``DefaultTrainer.__init__`` has no hook for that one argument; this is the rest of it.
    """

    def __init__(self, cfg: CfgNode) -> None:
        TrainerBase.__init__(self)
        cfg = DefaultTrainer.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        loader = self.build_train_loader(cfg)
        model = create_ddp_model(model, broadcast_buffers=False, device_ids=None)
        self._trainer = SimpleTrainer(model, loader, optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = SafeCheckpointer(model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self))
        self.start_iter, self.max_iter, self.cfg = 0, cfg.SOLVER.MAX_ITER, cfg
        self.register_hooks(self.build_hooks())


class ProgressHook(HookBase):
    """Iterations done, speed and time left."""

    def before_train(self) -> None:
        self._progress = Progress(
            self.trainer.max_iter, "fine-tune", unit="it", initial=self.trainer.start_iter
        )
        self._progress.__enter__()

    def after_step(self) -> None:
        self._progress.update()

    def after_train(self) -> None:
        self._progress.__exit__(None, None, None)


def _work(
    cfg: CfgNode, weights: Converted | None, resume: bool, eval_only: bool, visualize: int
) -> EngineResult:
    """One process's share; the metrics are complete on the main process only."""
    start = time.monotonic()
    _set_up(cfg)
    register(cfg, cfg.DATASETS.TEST if eval_only else (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
    cfg = with_builder(with_process_norms(cfg, comm.get_world_size()))
    coverage, iterations = None, 0
    if eval_only:
        model = Trainer.build_model(cfg)
        load_trained(model, read_trained(cfg.MODEL.WEIGHTS), cfg.MODEL.WEIGHTS)
        metrics = _canonical(flatten_results_dict(Trainer.test(cfg, model)))
    else:
        model, metrics, coverage, iterations = _train(cfg, weights, resume)
    if visualize and comm.is_main_process():
        logger.info("drew predictions into %s", draw_predictions(cfg, model, visualize))
    return EngineResult(metrics, iterations, time.monotonic() - start, coverage)


def _train(
    cfg: CfgNode, weights: Converted | None, resume: bool
) -> tuple[nn.Module, dict[str, float], Coverage | None, int]:
    """The model, metrics, coverage of the weights, and number of iterations."""
    spread = comm.get_world_size() > 1 and cfg.MODEL.DEVICE == "cpu"
    trainer = (CpuTrainer if spread else Trainer)(cfg)
    model: nn.Module = trainer.checkpointer.model
    # The loaders hold the records in a compact form of their own. Millions of objects less to
    # collect, and to copy into every worker.
    cache_clear()
    gc.collect()
    gc.freeze()
    coverage = None if weights is None else load_converted(model, weights.model)
    if resume and trainer.checkpointer.has_checkpoint():
        check_checkpoint(trainer.checkpointer.get_checkpoint_file())
        trainer.resume_or_load(resume=True)
        logger.info("resuming after iteration %d", trainer.start_iter)
    elif resume:
        logger.info("--resume: no checkpoint in %s yet, starting anew", cfg.OUTPUT_DIR)
    try:
        trainer.train()
    except FloatingPointError as error:
        raise NumericError(
            f"iteration {trainer.iter}: {error}; the last checkpoint is kept, lower SOLVER.BASE_LR "
            "or lengthen SOLVER.WARMUP_ITERS"
        ) from error
    finally:
        gc.unfreeze()
    latest = trainer.storage.latest()
    metrics = _canonical({name: value for name, (value, _) in latest.items()})
    return model, metrics, coverage, trainer.max_iter


def _canonical(results: Mapping[str, float]) -> dict[str, float]:
    """The metrics among everything that the trainer's storage holds."""
    metrics = {}
    for name, value in results.items():
        # DensePose's AP is that of the geodesic point similarity (the paper's AP^dp); -1 times 100
        # stands where there was nothing to measure.
        name = name.replace("densepose_gps/", "densepose/")
        if name.split("/")[0] in HEADLINE:
            metrics[name] = math.nan if value == -100 else value
    return metrics


def _set_up(cfg: CfgNode) -> None:
    """Logs, seed and kernels, as Detectron2's ``default_setup`` (without its config.yaml)."""
    rank = comm.get_rank()
    for name in ("fvcore", "detectron2", "detection"):
        logging.getLogger(name).handlers.clear()
        setup_logger(cfg.OUTPUT_DIR, distributed_rank=rank, name=name)
    logger.info("process %d of %d\n%s", rank, comm.get_world_size(), collect_env_info())
    logger.info("config:\n%s", cfg.dump())
    # A different stream in every process, all of them fixed by the seed.
    seed_all_rng(cfg.SEED + rank)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK


def _worker(
    cfg: CfgNode,
    weights: Converted | None,
    resume: bool,
    eval_only: bool,
    visualize: int,
    outcome: str,
) -> None:
    """``_work`` in a process of its own; the main one leaves its result or error in a file."""
    try:
        result = _work(cfg, weights, resume, eval_only, visualize)
    except UserError as error:
        content = {"error": str(error), "exit_code": error.exit_code, "rank": comm.get_rank()}
        atomic_write_json(outcome, content)
        raise
    except Exception as error:
        logger.exception("process %d failed", comm.get_rank())
        if not Path(outcome).is_file():  # the others fail after the first, because of it
            text = " ".join(f"{type(error).__name__}: {error}".split())
            content = {"error": text, "exit_code": 1, "rank": comm.get_rank()}
            atomic_write_json(outcome, content)
        raise
    if comm.is_main_process():
        fields = dataclasses.asdict(result)
        # JSON as Python writes it: NaN is allowed here, the file is read by the function below.
        atomic_write_text(outcome, json.dumps(fields))


def _read_outcome(path: Path) -> EngineResult:
    content = json.loads(path.read_text())
    if "error" in content:
        kind = {k.exit_code: k for k in (DataError, NumericError)}.get(
            content["exit_code"], UserError
        )
        raise kind(f"{content['error']} (process {content['rank']})")
    coverage = content.pop("coverage")
    if coverage is not None:
        coverage = Coverage(coverage["loaded"], tuple(coverage["left_at_init"]))
    return EngineResult(**content, coverage=coverage)
