"""Training and evaluation on Detectron2, on one process or several, on GPU or CPU."""

import dataclasses
import gc
import json
import logging
import math
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
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
from detectron2.engine.hooks import EvalHook, PeriodicCheckpointer, PreciseBN
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
from detection.d2.random_state import private_random
from detection.d2.standing import KEY as STANDING
from detection.d2.standing import CheckpointHook, StoppedError, usable
from detection.datasets import cache_clear
from detection.metrics import HEADLINE
from detection.weights import (
    Coverage,
    EngineResult,
    load_converted,
    load_trained,
    read_trained,
)
from moco import distributed
from moco.errors import DataError, NumericError, Preempted, UserError, kill_children
from moco.fileio import atomic_write_json, atomic_write_text
from moco.progress import Progress
from moco.run import RunFolder
from moco.stop import StopRequest, end, leave, stop_signals

logger = logging.getLogger(__name__)
_STOP_MARK = "stop"  # beside the outcome; the signal that the first process has got


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

    A stop signal (moco/stop.py) is answered after the iteration at hand by all processes together:
    one that comes earlier waits for it; one that comes during PreciseBN or an evaluation waits for
    their end, and for one more iteration if it came during the evaluation. An evaluation that is
    due after the last iteration before a stop is made up for by ``resume``. Before the processes
    are up there is nothing to save, and the run just ends; likewise an evaluation alone.

    Raises:
        UserError: what does not fit; NumericError: a loss that is not finite.
        Preempted, KeyboardInterrupt: a signal asked to stop, and the state is saved.
    """
    if processes.world_size == 1:
        with _stop_signals(StopRequest(), eval_only) as stop:
            return _work(cfg, weights, resume, eval_only, visualize, stop)
    with TemporaryDirectory(prefix="detection-") as scratch:
        outcome = Path(scratch) / "outcome.json"
        if cfg.MODEL.DEVICE == "cpu":
            # Else every process would be given a GPU of its own, as far as there are any.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        with _stop_signals(_ParentStop(outcome), eval_only) as stop:
            try:
                _launch(processes, (cfg, weights, resume, eval_only, visualize, str(outcome)))
                if outcome.is_file():
                    return _read_outcome(outcome)
            except Preempted as error:
                end(stop.received or signal.SIGTERM, str(error))
            except Exception as error:
                # The message of the process that failed first is worth more than the launcher's.
                if outcome.is_file():
                    return _read_outcome(outcome)
                if stop.received is None:
                    raise
                end(  # told to stop while they were still starting, which ended them
                    stop.received,
                    f"stopped, and nothing was saved since the last checkpoint ({error}); run the "
                    "same command with --resume to go on",
                )
    # The main process, and so the result, is on the first machine.
    return EngineResult({}, 0 if eval_only else cfg.SOLVER.MAX_ITER, 0.0, None)


def _launch(processes: Processes, args: tuple[Any, ...]) -> None:
    """``_worker`` in every process of this machine, to its end."""
    try:
        launch(
            _worker,
            processes.num_gpus,
            processes.num_machines,
            processes.machine_rank,
            processes.dist_url,
            args=args,
        )
    except KeyboardInterrupt:  # asked twice: now
        kill_children()
        raise


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
    checkpoint_hook: CheckpointHook

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module, evaluators: Any = None) -> Any:
        with private_random():
            return super().test(cfg, model, evaluators)

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
        """Detectron2's, with :class:`CheckpointHook` on every rank in place of its own."""
        # Here and not in __init__, because the hooks below take hold of it.
        self.checkpointer = SafeCheckpointer(
            self.checkpointer.model, self.cfg.OUTPUT_DIR, trainer=weakref.proxy(self)
        )
        hooks, inner = [], None
        for hook in super().build_hooks():
            if isinstance(hook, PeriodicCheckpointer):
                inner = hook  # on the main process; just before the evaluation
                continue
            if isinstance(hook, EvalHook):
                periods = self.cfg.SOLVER.CHECKPOINT_PERIOD, self.cfg.TEST.EVAL_PERIOD
                self.checkpoint_hook = CheckpointHook(inner, hook, *periods)
                hooks.append(self.checkpoint_hook)
            hooks.append(self._rank_equal(hook))
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
    cfg: CfgNode,
    weights: Converted | None,
    resume: bool,
    eval_only: bool,
    visualize: int,
    stop: StopRequest,
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
        model, metrics, coverage, iterations = _train(cfg, weights, resume, stop)
    if visualize and comm.is_main_process():
        logger.info("drew predictions into %s", draw_predictions(cfg, model, visualize))
    return EngineResult(metrics, iterations, time.monotonic() - start, coverage)


def _train(
    cfg: CfgNode, weights: Converted | None, resume: bool, stop: StopRequest
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
        path = trainer.checkpointer.get_checkpoint_file()
        standing = check_checkpoint(path).get(STANDING)
        trainer.checkpoint_hook.resumed = usable(standing, path, trainer._trainer.data_loader)
        trainer.resume_or_load(resume=True)
        logger.info("resuming after iteration %d", trainer.start_iter)
    elif resume:
        logger.info("--resume: no checkpoint in %s yet, starting anew", cfg.OUTPUT_DIR)
    trainer.checkpoint_hook.stop = stop
    try:
        trainer.train()
    except StoppedError as stopped:
        saved = Path(cfg.OUTPUT_DIR) / f"{stopped.name}.pth"
        leave(stopped.number, f"iteration {stopped.iteration}", saved)
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
        with _stop_signals(_WorkerStop(Path(outcome)), eval_only) as stop:
            result = _work(cfg, weights, resume, eval_only, visualize, stop)
    except Preempted as error:
        if comm.get_local_rank() == 0:  # on every machine; it has no message of its own to wait for
            atomic_write_json(outcome, {"preempted": str(error)})
        _disconnect()
        return
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
    _disconnect()


def _disconnect() -> None:
    """Let go of the groups of processes that Detectron2 keeps for ever, and end them."""
    comm._LOCAL_PROCESS_GROUP = None
    comm._get_global_gloo_group.cache_clear()
    distributed.disconnect()


def _stop_signals(stop: StopRequest, eval_only: bool) -> AbstractContextManager[StopRequest]:
    """Signals end an evaluation alone, which has nothing to save, at once."""
    return nullcontext(stop) if eval_only else stop_signals(stop)


class _ParentStop(StopRequest):
    """Of the process that started the others: passes a signal on to them."""

    def __init__(self, outcome: Path) -> None:
        super().__init__()
        self._mark = outcome.with_name(_STOP_MARK)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        super().__call__(number, frame)
        # SIGINT is also what they get when this process dies.
        number = signal.SIGTERM if number == signal.SIGINT else number
        self._mark.write_text(str(int(number)))  # for one that is just being started
        for process in multiprocessing.active_children():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


class _WorkerStop(StopRequest):
    """Of the others."""

    def __init__(self, outcome: Path) -> None:
        super().__init__()
        self._outcome, self._mark = outcome, outcome.with_name(_STOP_MARK)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        parent = multiprocessing.parent_process()
        if number == signal.SIGINT:  # Ctrl-C reaches all processes; the first one passes it on
            if parent is not None and os.getppid() != parent.pid:
                raise KeyboardInterrupt  # it is gone, and with it the lock of the folder
        elif number == signal.SIGTERM and self._outcome.is_file():
            signal.signal(number, signal.SIG_DFL)  # another process failed, and this one is ended
            os.kill(os.getpid(), number)
        else:
            super().__call__(number, frame)

    @property
    def received(self) -> int | None:
        if self._number is None and self._mark.is_file():
            self._number = int(self._mark.read_text())
        return super().received


def _read_outcome(path: Path) -> EngineResult:
    content = json.loads(path.read_text())
    if "preempted" in content:
        raise Preempted(content["preempted"])
    if "error" in content:
        kind = {k.exit_code: k for k in (DataError, NumericError)}.get(
            content["exit_code"], UserError
        )
        raise kind(f"{content['error']} (process {content['rank']})")
    coverage = content.pop("coverage")
    if coverage is not None:
        coverage = Coverage(coverage["loaded"], tuple(coverage["left_at_init"]))
    return EngineResult(**content, coverage=coverage)
