"""Pre-training by a contrastive mechanism: its model, data, step and evaluation.

`moco.engine.loop.train` has the loop. N images per step of all processes, n of this one, P crop
size in pixels, W processes.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from moco.common import distributed
from moco.common.errors import DataError
from moco.common.registry import lookup
from moco.common.run import RunFolder
from moco.data.augment import Augmentation, apply_colors
from moco.data.images import Images, check_present, labeled_sets, open_images
from moco.data.shards import find_shards
from moco.data.views import Batch, Position, Views
from moco.engine.checkpoint import FORMAT
from moco.engine.config import ADDED_KEYS
from moco.engine.device import set_up_torch
from moco.engine.evaluation import CenterCrop
from moco.engine.knn import evaluate
from moco.engine.statistics import mean_statistics
from moco.engine.training import Evaluation, Plan, Step, Training, print_notes
from moco.engine.weights import InitialWeights
from moco.modeling.encoder import EncoderSpec, build_encoder, load_backbone
from moco.modeling.mechanisms import MECHANISMS
from moco.modeling.mechanisms.base import Dictionary, KeyBatch, Mechanism
from moco.modeling.shuffle_bn import Pass, exchange_plan, items_of_step, shuffle_plan
from moco.pretraining.config import (
    MAY_CHANGE,
    NOT_PROTOCOL,
    check_processes,
    scale_to_batch,
)
from moco.pretraining.initial_weights import Start, load_weights, resumed_start

INDEX_NAME = "shards.json"  # how many images each tar shard holds


@dataclass(frozen=True)
class PretrainPlan(Plan):
    """Of a step.

    Attributes:
        images: (N,) numbers of all processes' images.
        shuffles: for each pass the order (N,) in which keys go through BN; None: as the queries.
    """

    images: Tensor
    shuffles: list[Tensor | None]


@dataclass(frozen=True)
class PretrainStep(Step):
    """Of a step what the mechanism's update needs, see `Mechanism.update`."""

    dictionaries: list[Dictionary]
    queries: list[Tensor]
    images: Tensor


class Pretraining(Training[PretrainPlan, PretrainStep]):
    """Pre-training, before its first step or before it is resumed.

    Args:
        cfg: checked keys (`moco.pretraining.config.load_pretrain_cfg`).
        folder: of the run; shards get their index there.
        weights: of MODEL.WEIGHTS, where a new run starts; None: from scratch.

    Raises:
        DataError, UserError: images, keys and processes do not fit each other.
    """

    kind = "pretrain"
    checkpoint_format = FORMAT
    verb = "pre-train"
    may_change = MAY_CHANGE
    not_protocol = NOT_PROTOCOL
    added_keys = ADDED_KEYS
    accuracy_name = "pretext_accuracy"
    evaluated = "knn/top1"
    recorded = {  # noqa: RUF012
        "pretrain/loss": "loss",
        "pretrain/accuracy": "pretext_accuracy",
        "knn/top1": "knn/top1",
    }

    def __init__(
        self, cfg: CfgNode, folder: RunFolder, weights: InitialWeights | None = None
    ) -> None:
        set_up_torch(cfg.NUM_THREADS, cfg.DETERMINISTIC)
        world = distributed.world_size()
        check_processes(cfg, world)
        images = open_pretraining_images(cfg, folder.path)
        solver, scaling = scale_to_batch(cfg)
        torch.manual_seed(cfg.SEED)
        model, spec = _build(cfg, len(images), world)
        if cfg.SOLVER.COMPILE:
            for name, encoder in model.named_children():
                if name.startswith("encoder_"):
                    encoder.compile()
        super().__init__(cfg, solver, spec, model, images, solver.MAX_ITERS)
        self.model: Mechanism
        self.notes = [*scaling, *_notes(cfg, len(images))]
        if distributed.is_main():
            print(_batch_line(cfg, world), flush=True)
        print_notes(self.notes)
        self.evaluate_every_epochs = cfg.KNN.EVERY_EPOCHS
        self._center_crop = _center_crop(cfg)
        self._aug = augmentation_from(cfg)
        self._passes = _passes(cfg, model)
        self._bad_images: set[str] = set()
        self._weights, self._start = weights, Start()

    def start(self) -> None:
        if self._weights is not None:
            mean, std = self.cfg.AUG.MEAN, self.cfg.AUG.STD
            self._start = load_weights(self.model, self._weights, mean, std)
            print_notes(self._start.notes)

    def views(self) -> Views:
        data = self.cfg.DATA
        skip_bad, cache_bytes = data.BAD_IMAGES == "skip", self.cache_bytes()
        return Views(self.images, self._aug, self.cfg.SEED, skip_bad, cache_bytes)

    def plan(self, step: int, positions: list[Position]) -> PretrainPlan:
        rank, world = distributed.rank(), distributed.world_size()
        shuffles = [self._shuffle(step, number) for number in range(len(self._passes))]
        by_index = world == 1 or self.cfg.MOCO.SHUFFLE_BY == "index"
        loaded = shuffles if by_index else [None] * len(shuffles)
        items = items_of_step(positions, self._passes, loaded, rank, world)
        return PretrainPlan(step, items, torch.tensor([i for _, i in positions]), shuffles)

    def forward_backward(self, batch: Batch, plan: PretrainPlan) -> PretrainStep:
        """Gradients of the step's loss, pass by pass and part by part of the batch."""
        self._count_bad_images(batch)
        parts, passes = self.cfg.SOLVER.ACCUMULATE, len(self._passes)
        size = self.n // parts
        total = torch.zeros(2, device=self.device)  # loss, accuracy
        dictionaries, queries = [], []
        for number, (x_q, x_k) in enumerate(self._pixels(batch, plan)):
            with self.autocast():
                keys = KeyBatch(x_k, plan.shuffles[number], plan.images, plan.step, parts)
                dictionary = self.model.dictionary(keys)
            of_pass = []
            for part in range(parts):
                rows = slice(part * size, (part + 1) * size)
                last = number + 1 == passes and part + 1 == parts
                with self._gradients_stay_here(not last):
                    with self.autocast():
                        out = self.parallel(x_q[rows], dictionary.rows(rows))
                    self.scaler.scale(out.loss / parts).backward()
                of_pass.append(out.queries)
                total += torch.stack([out.loss.detach(), out.accuracy / passes]) / parts
            dictionaries.append(dictionary)
            queries.append(torch.cat(of_pass))
        return PretrainStep(total[0], total[1], dictionaries, queries, plan.images)

    def update(self, step: PretrainStep) -> None:
        """The optimizer's step, then the mechanism's: key encoder, queue or bank."""
        super().update(step)
        self.model.update(step.dictionaries, step.queries, step.images)

    def evaluate(self) -> Evaluation | None:
        """kNN with the query encoder, if there is data for it."""
        if self._center_crop is None:
            return None
        with mean_statistics(self.model):
            backbone = load_backbone(self.spec, self.model.encoder_q.state_dict())
        knn, data = self.cfg.KNN, self.cfg.DATA
        crop, workers = self._center_crop, data.NUM_WORKERS
        result = evaluate(backbone, data.KNN_ROOT, crop, knn.K, knn.T, self.device, workers)
        return Evaluation({self.evaluated: result.top1}, str(result))

    def state_dict(self) -> dict[str, Any]:
        moco = self.cfg.MOCO
        return {
            "encoder": {**self.spec.to_dict(), "dim": moco.DIM, "mlp": moco.MLP},
            "start": dataclasses.asdict(self._start),
        }

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        self._start = resumed_start(path, state, self._weights)

    def gathered_state(self) -> dict[str, Tensor]:
        return self.model.gathered_state()

    def load_gathered_state(self, state: dict[str, Tensor]) -> None:
        self.model.load_gathered_state(state)

    def record(self) -> dict[str, Any]:
        start = self._start
        notes = [*self.notes, *start.notes]
        if self._bad_images:
            notes.append(f"{len(self._bad_images)} images could not be decoded, replaced")
        return {
            "task": f"pretrain_{self.spec.name}_{self.cfg.MOCO.MECHANISM}",
            "init": start.init,
            "weights_sha256": start.weights_sha256,
            "weights_source": start.weights_source,
            "coverage": start.coverage,
            "notes": notes,
        }

    def _shuffle(self, step: int, number: int) -> Tensor | None:
        """In which order the keys of one pass go through BN; None: as the queries."""
        if not self.cfg.MOCO.SHUFFLE_BN or self._passes[number].key_view is None:
            return None
        splits, seed = self.cfg.MOCO.BN_SPLITS, self.cfg.SEED
        return shuffle_plan(self.batch_size, splits, seed, step, number)

    def _pixels(self, batch: Batch, plan: PretrainPlan) -> list[tuple[Tensor, Tensor]]:
        """For each pass queries and keys (n, 3, P, P) on the device, normalized."""
        pixels, params = batch.pixels.to(self.device, non_blocking=True), batch.params
        if distributed.world_size() > 1 and self.cfg.MOCO.SHUFFLE_BY == "all_to_all":
            pixels = self._exchange(pixels, plan.shuffles)
            params = self._exchange(params, plan.shuffles)
        x = apply_colors(pixels, params, self._aug, self.cfg.AUG.MEAN, self.cfg.AUG.STD)
        parts = x.contiguous(memory_format=self.layout).split(self.n)
        if not self.model.needs_key_view:
            return [(part, x[:0]) for part in parts]
        return list(zip(parts[0::2], parts[1::2], strict=True))

    def _exchange(self, rows: Tensor, shuffles: list[Tensor | None]) -> Tensor:
        """Key rows to the processes that encode them (MOCO.SHUFFLE_BY all_to_all)."""
        parts = list(rows.split(self.n))
        for number, plan in enumerate(shuffles):
            if plan is not None:
                keys = 2 * number + 1  # each pass: queries, then keys
                exchange = exchange_plan(plan, distributed.rank(), distributed.world_size())
                parts[keys] = distributed.exchange_rows(parts[keys], *exchange)
        return torch.cat(parts)

    def _gradients_stay_here(self, stay: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged once per step, with the last part's backward pass."""
        if stay and isinstance(self.parallel, torch.nn.parallel.DistributedDataParallel):
            return self.parallel.no_sync()
        return nullcontext()

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


def open_pretraining_images(cfg: CfgNode, folder: Path) -> Images:
    """The images of DATA.ROOT.

    Raises:
        DataError: missing or damaged.
    """
    check_present(cfg.DATA.ROOT)
    # The main process writes the index of shards, the others read it.
    in_turn = distributed.main_first() if find_shards(cfg.DATA.ROOT) else nullcontext()
    with in_turn:
        images = open_images(cfg.DATA.ROOT, folder / INDEX_NAME, cfg.DATA.SHARD_WINDOW)
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


def _center_crop(cfg: CfgNode) -> CenterCrop | None:
    """What the kNN monitor needs, checked before training; None where it is off."""
    if not cfg.DATA.KNN_ROOT:
        return None
    labeled_sets(cfg.DATA.KNN_ROOT)
    knn, aug = cfg.KNN, cfg.AUG
    return CenterCrop.sized(knn.CROP_PX, knn.RESIZE_PX, aug.CROP_PX, aug.MEAN, aug.STD)


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
