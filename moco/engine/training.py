"""Base class of the trainings that `moco.engine.loop` runs.

n images per step of this process.
"""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from moco.common import distributed
from moco.common.errors import DataError, echo, lookup, plural
from moco.common.keys import Keys
from moco.data.images import Images
from moco.data.views import Batch, Item, Position, Views, positions_of_steps
from moco.engine.config import check_milestones
from moco.engine.device import (
    LossScaler,
    auto_precision,
    autocast,
    has_fast_bf16,
    pick_device,
    slow_bf16_warning,
)
from moco.engine.loader import batch_loader
from moco.engine.solver import OPTIMIZERS, LearningRate, Length, check_warmup
from moco.modeling.archs import Spec
from moco.modeling.encoder import contiguous_last_stages


@dataclass(frozen=True)
class StepPlan:
    """Items that this process loads for a step; subclasses add further inputs of the step."""

    step: int  # from 0
    items: list[Item]  # of the batch, in order


@dataclass(frozen=True)
class Step:
    """Result of a forward and backward pass; subclasses add inputs of the update."""

    loss: Tensor  # (), over the images of this process
    accuracy: Tensor  # () in 0..100, on the same images


class Evaluation(NamedTuple):
    """Metrics by their names in metrics.json, and a text that summarizes them."""

    metrics: dict[str, float]
    text: str


P = TypeVar("P", bound=StepPlan)
S = TypeVar("S", bound=Step)


class Training(ABC, Generic[P, S]):
    """A network in training: model, optimizer, data and step.

    Args:
        cfg: Configuration of the run.
        solver: Keys under SOLVER for the batch size of the run.
        spec: Architecture of the backbone.
        model: Model with initial weights, on the CPU.
        images: Training images.
        max_iters: Length of the run in steps; 0 for SOLVER.MAX_EPOCHS.

    Raises:
        DataError: If there is less than one batch of images.
        UserError: If a milestone or the end of the warm-up is after the end of the run.
    """

    kind: str  # of the run record
    checkpoint_format: str  # see `moco.engine.checkpoint`
    verb: str  # label of the progress bar
    config_keys: Keys  # table of moco/engine/keys.py
    defaults: CfgNode  # defaults of all keys
    accuracy_name: str  # name of a step's accuracy in metrics.json
    evaluated: str  # name of a metric of each evaluation
    evaluate_every_epochs: int  # 0: only at the end
    recorded: Mapping[str, str]  # names in run.json → in metrics.json

    def __init__(
        self,
        cfg: CfgNode,
        solver: CfgNode,
        spec: Spec,
        model: nn.Module,
        images: Images,
        max_iters: int = 0,
    ) -> None:
        self.cfg = self._requested = cfg
        self.spec, self.images = spec, images
        self.device = pick_device(cfg.DEVICE)
        self.batch_size: int = cfg.SOLVER.BATCH_SIZE
        self.n = self.batch_size // distributed.world_size()
        distributed.check_equal(len(images), f"number of images in {cfg.DATA.ROOT}")
        if len(images) < self.batch_size:
            raise DataError(
                f"{cfg.DATA.ROOT}: has {plural(len(images), 'image')}, less than one batch of "
                f"{self.batch_size}; add images, or lower SOLVER.BATCH_SIZE and BASE_LR with it"
            )
        # Deviation: the incomplete last batch of an epoch is left out; the next epoch has others.
        self.steps_per_epoch = len(images) // self.batch_size
        if distributed.is_main():
            echo(f"images: {self.image_facts()['number']} below {self.image_facts()['folder']}")
        self.total_steps: int = max_iters or cfg.SOLVER.MAX_EPOCHS * self.steps_per_epoch
        check_milestones(cfg, self.total_steps / self.steps_per_epoch)
        length = Length(self.total_steps, self.steps_per_epoch)
        check_warmup(solver, length)
        self.rate = LearningRate(solver, length)
        self.model = model.to(self.device)
        self.set_speed({})
        trained = [p for p in self.model.parameters() if p.requires_grad]
        build = lookup(OPTIMIZERS, solver.OPTIMIZER, "SOLVER.OPTIMIZER")
        self.optimizer: torch.optim.Optimizer = build(trained, solver)
        self.notes: list[str] = []  # facts that a reader of the result needs

    def image_facts(self) -> dict[str, Any]:
        """Return the number of training images and their common parent folder."""
        ends = [self.images.name(index) for index in (0, len(self.images) - 1)]
        return {"number": len(self.images), "folder": os.path.commonpath(ends)}

    def set_speed(self, resumed: Mapping[str, Any]) -> None:
        """Set precision and memory layout; a resumed run keeps those that were chosen for it.

        Args:
            resumed: Keys in the checkpoint; empty for a new run.
        """
        cfg = resolve_speed(self._requested, self.device, resumed)
        if resumed and cfg == self.cfg:
            return
        self.cfg = cfg
        self.layout = torch.channels_last if cfg.SOLVER.CHANNELS_LAST else torch.contiguous_format
        self.model.to(memory_format=self.layout)
        eager_cpu = self.device.type == "cpu" and not cfg.SOLVER.COMPILE
        if cfg.SOLVER.CHANNELS_LAST and eager_cpu and cfg.SOLVER.PRECISION != "fp32":
            contiguous_last_stages(self.model, self.spec, self.n, cfg.AUG.CROP_PX)
        # Only gradients are exchanged, so a frozen network needs no communication.
        self.parallel = distributed.data_parallel(self.model)
        self.scaler = LossScaler(self.device, cfg.SOLVER.PRECISION)
        if distributed.is_main() and cfg is not self._requested:
            layout = ", channels_last" if cfg.SOLVER.CHANNELS_LAST else ""
            print(f"precision {cfg.SOLVER.PRECISION}{layout}", flush=True)

    @abstractmethod
    def plan(self, step: int, positions: list[Position]) -> P:
        """Return this process's part of a step from the positions of all processes."""

    @abstractmethod
    def views(self) -> Views:
        """Return the dataset of the items."""

    @abstractmethod
    def forward_backward(self, batch: Batch, plan: P) -> S:
        """Compute the loss of a step and its gradients."""

    @abstractmethod
    def evaluate(self) -> Evaluation | None:
        """Evaluate the current network; return None if there is no dataset for it."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the fields of the run record that depend on the kind of training."""

    def start(self) -> None:
        """Prepare the first step of a new run; not called when a run is resumed."""

    def update(self, step: S) -> None:
        """Take an optimizer step; fp16 skips it if a gradient is not finite."""
        self.scaler.take_step(self.optimizer)

    def end_epoch(self) -> None:
        """Finish an epoch or the run, before anything is saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return further entries of a checkpoint; all processes call it together."""
        return {}

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        """Check and restore the entries returned by `state_dict`."""

    def gathered_state(self) -> dict[str, Tensor]:
        """Return the model's state gathered from all processes, which call it together."""
        return dict(self.model.state_dict())

    def load_gathered_state(self, state: dict[str, Tensor]) -> None:
        """Load this process's part of the state returned by `gathered_state`."""
        self.model.load_state_dict(state)

    def batches(self, start: int) -> Iterator[tuple[P, Batch]]:
        """Yield plan and batch of each step from `start` on, prefetched by data-loader workers."""
        waiting: deque[P] = deque()

        def plans() -> Iterator[list[Item]]:
            seed, stop = self.cfg.SEED, self.total_steps
            steps = positions_of_steps(self.images, self.batch_size, seed, start, stop)
            for step, positions in enumerate(steps, start):
                waiting.append(self.plan(step, positions))
                yield waiting[-1].items

        data = self.cfg.DATA
        how = self.device, data.NUM_WORKERS, data.WORKER_TIMEOUT_SECONDS
        for batch in batch_loader(self.views(), plans(), *how):
            yield waiting.popleft(), batch

    def cache_bytes(self) -> int:
        """Return the bytes that each decoding process may use to cache decoded images."""
        cache: int = (self.cfg.DATA.CACHE_MIB << 20) // max(1, self.cfg.DATA.NUM_WORKERS)
        return cache

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of SOLVER.PRECISION on the training's device."""
        return autocast(self.device, self.cfg.SOLVER.PRECISION)


def resolve_speed(cfg: CfgNode, device: torch.device, resumed: Mapping[str, Any]) -> CfgNode:
    """Replace `auto` and None by a precision and a memory layout.

    Args:
        cfg: Configuration with the requested SOLVER.PRECISION and SOLVER.CHANNELS_LAST.
        device: Device of the training.
        resumed: Keys of the run to resume, whose values are kept; empty for a new run.
    """
    requested, main = (cfg.SOLVER.PRECISION, cfg.SOLVER.CHANNELS_LAST), distributed.is_main()
    # All processes make the same choice, even if their processors differ.
    fast = not distributed.max_over_ranks(int(not has_fast_bf16(device)))
    if requested[0] == "bf16" and not (fast or resumed) and main:
        print(f"warning: {slow_bf16_warning('a processor here')}", flush=True)
    if "auto" not in requested and None not in requested:
        return cfg
    cfg = cfg.clone()
    cfg.defrost()
    if cfg.SOLVER.PRECISION == "auto":
        cfg.SOLVER.PRECISION = chosen = auto_precision(fast, resumed)
        if main and resumed and chosen != auto_precision(fast, {}):
            slower = "" if fast else ", although this processor has no instructions for bf16"
            print(f"warning: SOLVER.PRECISION stays {chosen}, as the run began{slower}", flush=True)
    if cfg.SOLVER.CHANNELS_LAST is None:
        faster = device.type == "cpu" or cfg.SOLVER.PRECISION != "fp32"
        cfg.SOLVER.CHANNELS_LAST = bool(resumed.get("SOLVER.CHANNELS_LAST", faster))
    cfg.freeze()
    return cfg


def print_notes(notes: list[str]) -> None:
    """Print notes on the main process."""
    if distributed.is_main():
        for note in notes:
            echo(f"note: {note}")
