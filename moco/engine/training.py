"""A network in training: what differs between the trainings that `moco.engine.loop` runs.

n images of a step on this process.
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
from moco.common.cfgcheck import check_milestones
from moco.common.errors import DataError, plural, say
from moco.common.registry import lookup
from moco.data.images import Images
from moco.data.views import Batch, Item, Position, Views, positions_of_steps
from moco.engine.device import autocast, pick_device, with_speed
from moco.engine.loader import batch_loader
from moco.engine.optim import OPTIMIZERS
from moco.engine.schedule import LearningRate, Length, check_warmup
from moco.modeling.archs import Spec
from moco.modeling.encoder import contiguous_last_stages


@dataclass(frozen=True)
class Plan:
    """What this process loads for a step; a training adds what it has to know of the step."""

    step: int  # from 0
    items: list[Item]  # of the batch, in order


@dataclass(frozen=True)
class Step:
    """What a forward and backward pass gives; a training adds what its update needs."""

    loss: Tensor  # () of this process's images
    accuracy: Tensor  # () on them, 0..100


class Evaluation(NamedTuple):
    """Metrics by their names in metrics.json, and a sentence about them."""

    metrics: dict[str, float]
    text: str


P = TypeVar("P", bound=Plan)
S = TypeVar("S", bound=Step)


class Training(ABC, Generic[P, S]):
    """A network in training: model, optimizer, data and step.

    Args:
        solver: the keys under SOLVER for the batch of the run. model: with new weights, on the CPU.
        max_iters: length of the run; 0: SOLVER.MAX_EPOCHS.

    Raises:
        DataError: less than a batch of images. UserError: milestones, or a warm-up, after the end.
    """

    kind: str  # of the run record
    checkpoint_format: str  # see `moco.engine.checkpoint`
    verb: str  # for the progress display
    may_change: tuple[str, ...]  # keys that a resumed run may change
    not_protocol: tuple[str, ...]  # keys that the hash of the protocol leaves out
    defaults: CfgNode  # of all keys
    accuracy_name: str  # of a step's accuracy in metrics.json
    evaluated: str  # a metric that each evaluation gives
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
        self.cfg = self.asked = cfg
        self.spec, self.images = spec, images
        self.device = pick_device(cfg.DEVICE)
        self.batch_size: int = cfg.SOLVER.BATCH_SIZE
        self.n = self.batch_size // distributed.world_size()
        distributed.agree(len(images), f"number of images in {cfg.DATA.ROOT}")
        if len(images) < self.batch_size:
            raise DataError(
                f"{cfg.DATA.ROOT}: {plural(len(images), 'image')}: less than one batch of "
                f"{self.batch_size}; add images, or lower SOLVER.BATCH_SIZE and BASE_LR with it"
            )
        # Deviation: the incomplete last batch of an epoch is left out; the next epoch has others.
        self.steps_per_epoch = len(images) // self.batch_size
        if distributed.is_main():
            say(f"images: {self.image_facts()['number']} below {self.image_facts()['folder']}")
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
        self.notes: list[str] = []  # what a reader of the result has to know
        self.skipped_steps = 0  # of fp16, where a gradient overflowed

    def image_facts(self) -> dict[str, Any]:
        """Return the number of training images and the folder that all of them are below."""
        ends = [self.images.name(index) for index in (0, len(self.images) - 1)]
        return {"number": len(self.images), "folder": os.path.commonpath(ends)}

    def set_speed(self, begun: Mapping[str, Any]) -> None:
        """Precision and memory layout; where a key leaves them open, as the resumed run began.

        Args:
            begun: the keys in the checkpoint; empty for a new run.
        """
        cfg = with_speed(self.asked, self.device, begun)
        if begun and cfg == self.cfg:
            return
        self.cfg = cfg
        self.layout = torch.channels_last if cfg.SOLVER.CHANNELS_LAST else torch.contiguous_format
        self.model.to(memory_format=self.layout)
        eager_cpu = self.device.type == "cpu" and not cfg.SOLVER.COMPILE
        if cfg.SOLVER.CHANNELS_LAST and eager_cpu and cfg.SOLVER.PRECISION != "fp32":
            contiguous_last_stages(self.model, self.spec, self.n, cfg.AUG.CROP_PX)
        # Only parameters with a gradient are exchanged, so nothing of a frozen network.
        self.parallel = distributed.data_parallel(self.model)
        fp16 = cfg.SOLVER.PRECISION == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=fp16)
        if distributed.is_main() and cfg is not self.asked:
            layout = ", channels_last" if cfg.SOLVER.CHANNELS_LAST else ""
            print(f"precision {cfg.SOLVER.PRECISION}{layout}", flush=True)

    @abstractmethod
    def plan(self, step: int, positions: list[Position]) -> P:
        """This process's part of a step, given what all processes together see."""

    @abstractmethod
    def views(self) -> Views:
        """The dataset of the items."""

    @abstractmethod
    def forward_backward(self, batch: Batch, plan: P) -> S:
        """Gradients of a step's loss."""

    @abstractmethod
    def evaluate(self) -> Evaluation | None:
        """The network as it is now; None where there is nothing to evaluate on."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Fields of the run record that only this training knows."""

    def start(self) -> None:
        """Called once before the first step of a run, not of a resumed one."""

    def update(self, step: S) -> None:
        """The optimizer's step; that of fp16 is skipped where a gradient is not finite."""
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped_steps += self.scaler.get_scale() < scale

    def end_epoch(self) -> None:
        """Called when an epoch or the run is done, before anything is saved."""

    def state_dict(self) -> dict[str, Any]:
        """Further keys of a checkpoint; all processes call it together."""
        return {}

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        """Check and continue from what `state_dict` gave."""

    def gathered_state(self) -> dict[str, Tensor]:
        """The model's state of all processes together; they call it together."""
        return dict(self.model.state_dict())

    def load_gathered_state(self, state: dict[str, Tensor]) -> None:
        """This process's part of what `gathered_state` returned."""
        self.model.load_state_dict(state)

    def batches(self, start: int) -> Iterator[tuple[P, Batch]]:
        """Plan and batch of each step from `start` on, read ahead by data-loader workers."""
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
        """Memory for decoded images in each process that decodes."""
        cache: int = (self.cfg.DATA.CACHE_MIB << 20) // max(1, self.cfg.DATA.NUM_WORKERS)
        return cache

    def autocast(self) -> AbstractContextManager[None]:
        return autocast(self.device, self.cfg.SOLVER.PRECISION)


def print_notes(notes: list[str]) -> None:
    """What a reader of the result has to know; on the main process."""
    if distributed.is_main():
        for note in notes:
            say(f"note: {note}")
