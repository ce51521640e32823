"""Model, data, step and evaluation of contrastive pre-training.

`moco.engine.loop.train` runs the training loop. N images per step of all processes, n images of
this process, P crop size in pixels, W processes.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from moco.common import distributed
from moco.common.command import RANDOM
from moco.common.errors import DataError, UserError, echo, lookup, plural
from moco.common.run import RunFolder
from moco.data.augment import Augmentation, apply_colors
from moco.data.images import Images, LabeledSets, describe_images, open_images, read_labeled_sets
from moco.data.shards import find_shards
from moco.data.views import Batch, Position, Views
from moco.engine.checkpoint import FORMAT
from moco.engine.device import set_up_torch
from moco.engine.evaluation import CenterCrop
from moco.engine.keys import PRETRAIN
from moco.engine.knn import evaluate
from moco.engine.training import Evaluation, Step, StepPlan, Training, print_notes
from moco.engine.weights import InitialWeights
from moco.modeling.archs import Spec, build_spec
from moco.modeling.encoder import (
    COUNTER,
    HEADS,
    build_encoder,
    load_backbone,
    zero_init_residual,
)
from moco.modeling.mechanisms import MECHANISMS
from moco.modeling.mechanisms.base import KeyBatch, Mechanism, Passes
from moco.modeling.shuffle_bn import Pass, exchange_plan, items_of_step, shuffle_plan
from moco.modeling.synced_bn import mean_statistics
from moco.modeling.vit import ViT
from moco.pretraining.config import default_cfg, scale_to_batch

QUERY, KEY, QUEUE = "encoder_q.", "encoder_k.", {"queue", "queue_ptr"}
PREDICTOR, HEAD = "predictor.", tuple(QUERY + head for head in HEADS)
COLLAPSED = 1e-4  # largest standard deviation over the dimensions of queries of unit length
INDEX_NAME = "shards.json"  # index with the number of images of each tar shard


@dataclass(frozen=True)
class Initialization:
    """Initialization of a run, as stored in the run record and in checkpoints."""

    init: str = RANDOM
    weights_sha256: str | None = None
    weights_source: str | None = None
    coverage: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PretrainStepPlan(StepPlan):
    """Input of one pre-training step."""

    images: Tensor  # (N,) indices of the images of all processes
    shuffles: list[Tensor | None]  # order of the keys in each pass, see `_shuffle`


@dataclass(frozen=True)
class PretrainStep(Step):
    """Result of one pre-training step."""

    passes: Passes


class Pretraining(Training[PretrainStepPlan, PretrainStep]):
    """Pre-training run, ready for its first step or to be resumed.

    Args:
        cfg: Configuration of the run.
        folder: Folder of the run, which also stores the index of the shards.
        weights: Weights of MODEL.WEIGHTS, from which a new run starts; None to start from scratch.
    """

    kind = "pretrain"
    checkpoint_format = FORMAT
    verb = "pre-train"
    config_keys = PRETRAIN
    defaults = default_cfg()
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
        moco, knn, aug = cfg.MOCO, cfg.KNN, cfg.AUG
        self.notes = [*scaling, *describe_images(images)]
        if moco.MECHANISM in ("momentum_queue", "memory_bank") and moco.K > len(images):
            self.notes.append(
                f"MOCO.K {moco.K} exceeds the {len(images)} images, so the negatives of a query "
                "include keys of its own image; use a smaller K or more images"
            )
        if distributed.is_main():
            N, G, parts = self.batch_size, moco.BN_SPLITS, cfg.SOLVER.ACCUMULATE
            share = f"{plural(world, 'process')} x {self.n}"
            in_parts = f" in {parts} parts" if parts > 1 else ""
            print(f"batch {N}: {share}{in_parts}; BN in {G} groups of {N // G}", flush=True)
        self.evaluate_every_epochs = knn.EVERY_EPOCHS
        self._knn: tuple[LabeledSets, CenterCrop] | None = None
        if cfg.DATA.KNN_ROOT:  # opened here so that errors are raised before training
            sets = read_labeled_sets(cfg.DATA.KNN_ROOT)
            knn_notes = [*describe_images(sets.train), *describe_images(sets.val)]
            self.notes += [note for note in knn_notes if note not in self.notes]
            crops = knn.CROP_PX, knn.RESIZE_PX, aug.CROP_PX
            self._knn = sets, CenterCrop.sized(*crops, aug.MEAN, aug.STD)
        print_notes(self.notes)
        self._aug, self._second = augmentations_from(cfg)
        self._passes: list[Pass] = [Pass(0, 1 if model.needs_key_view else None)]
        if moco.SYMMETRIC:  # a second pass with query and key swapped
            self._passes.append(Pass(1, 0))
        self._bad_images: set[str] = set()
        self._queries: Tensor | None = None  # (n, C) of the last step
        self._collapsed: list[str] = []
        self._weights, self._start = weights, Initialization()

    def start(self) -> None:
        """Load the initial weights of a new run."""
        if self._weights is not None:
            self._weights.spec.check_image(self.cfg.AUG.CROP_PX, "AUG.CROP_PX")
            mean, std = self.cfg.AUG.MEAN, self.cfg.AUG.STD
            self._start = load_weights(self.model, self._weights, mean, std)
            print_notes(self._start.notes)

    def views(self) -> Views:
        """Return the dataset of augmented views."""
        skip_bad = self.cfg.DATA.BAD_IMAGES == "skip"
        seed, cache = self.cfg.SEED, self.cache_bytes()
        return Views(self.images, self._aug, seed, skip_bad, cache, self._second)

    def plan(self, step: int, positions: list[Position]) -> PretrainStepPlan:
        """Plan the items of this process in a step, with keys shuffled by index if configured."""
        rank, world = distributed.rank(), distributed.world_size()
        shuffles = [self._shuffle(step, number) for number in range(len(self._passes))]
        by_index = world == 1 or self.cfg.MOCO.SHUFFLE_BY == "index"
        loaded = shuffles if by_index else [None] * len(shuffles)
        items = items_of_step(positions, self._passes, loaded, rank, world)
        return PretrainStepPlan(step, items, torch.tensor([i for _, i in positions]), shuffles)

    def forward_backward(self, batch: Batch, plan: PretrainStepPlan) -> PretrainStep:
        """Accumulate the gradients of the loss over the passes and the parts of the batch."""
        self._count_bad_images(batch)
        parts, passes = self.cfg.SOLVER.ACCUMULATE, len(self._passes)
        size = self.n // parts
        total = torch.zeros(2, device=self.device)  # loss, accuracy
        dictionaries, queries = [], []
        for number, (x_q, x_k) in enumerate(self._pixels(batch, plan)):
            with self.autocast():
                keys = KeyBatch(x_k, plan.shuffles[number], plan.images, plan.step, parts)
                dictionary = self.model.dictionary(keys)
            pass_queries = []
            for part in range(parts):
                rows = slice(part * size, (part + 1) * size)
                last = number + 1 == passes and part + 1 == parts
                # Gradients are all-reduced once per step, in the last backward pass.
                exchange: AbstractContextManager[None] = nullcontext()
                if isinstance(self.parallel, DistributedDataParallel) and not last:
                    exchange = self.parallel.no_sync()
                with exchange:
                    with self.autocast():
                        out = self.parallel(x_q[rows], dictionary.rows(rows))
                    self.scaler.scale(out.loss / parts).backward()
                pass_queries.append(out.queries)
                total += torch.stack([out.loss.detach(), out.accuracy / passes]) / parts
            dictionaries.append(dictionary)
            queries.append(torch.cat(pass_queries))
        self._queries = queries[0]
        progress = (plan.step + 1) / self.total_steps
        done = Passes(dictionaries, queries, plan.images, progress)
        return PretrainStep(total[0], total[1], done)

    def end_epoch(self) -> None:
        """Print and record a note if all features of a batch are equal for the first time."""
        if self._queries is None or len(self._queries) < 2 or self._collapsed:
            return
        deviation = float(self._queries.float().std(dim=0).max())
        if deviation < COLLAPSED:
            self._collapsed = [
                f"collapsed: the features of a batch have a standard deviation of "
                f"{deviation:.1g}, so they do not distinguish the images"
            ]
            print_notes(self._collapsed)

    def update(self, step: PretrainStep) -> None:
        """Step the optimizer, then update the mechanism's key encoder, queue or bank."""
        super().update(step)
        self.model.update(step.passes)

    def evaluate(self) -> Evaluation | None:
        """Evaluate the query encoder by kNN, if DATA.KNN_ROOT is set."""
        if self._knn is None:
            return None
        with mean_statistics(self.model):
            backbone = load_backbone(self.spec, self.model.encoder_q.state_dict())
        knn, data = self.cfg.KNN, self.cfg.DATA
        result = evaluate(backbone, *self._knn, knn.K, knn.T, self.device, data.NUM_WORKERS)
        return Evaluation({self.evaluated: result.top1}, str(result))

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint's entries: specification of the encoder, initialization."""
        moco = self.cfg.MOCO
        return {
            "encoder": {**asdict(self.spec), "dim": moco.DIM, "mlp": moco.MLP},
            "start": asdict(self._start),
        }

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        """Restore the initialization of the run and check that MODEL.WEIGHTS agrees."""
        try:
            self._start = Initialization(**state["start"])
        except (KeyError, TypeError) as error:
            raise DataError(f"{path}: a malformed 'start'") from error
        expected = self._start.weights_sha256
        got = self._weights.sha256 if self._weights else None
        if got != expected:
            raise UserError(
                f"{path}: MODEL.WEIGHTS has sha256 {got}, but the run started from weights of "
                f"sha256 {expected}; use those, or set another OUTPUT_DIR"
            )

    def gathered_state(self) -> dict[str, Tensor]:
        """Return the state of the mechanism, gathered from all processes."""
        return self.model.gathered_state()

    def load_gathered_state(self, state: dict[str, Tensor]) -> None:
        """Load this process's part of a gathered state into the mechanism."""
        self.model.load_gathered_state(state)

    def record(self) -> dict[str, Any]:
        """Return task, initialization and notes."""
        notes = [*self.notes, *self._start.notes, *self._collapsed]
        if self._bad_images:
            W, replaced = distributed.world_size(), plural(len(self._bad_images), "image")
            own = f"process {distributed.rank()} of {W} " if W > 1 else ""
            notes.append(f"{own}replaced {replaced} that could not be decoded")
        task = f"pretrain_{self.spec.name}_{self.cfg.MOCO.MECHANISM}"
        return {**asdict(self._start), "task": task, "notes": notes}

    def _shuffle(self, step: int, number: int) -> Tensor | None:
        """Return the order (N,) in which BN sees the keys of a pass; None for no shuffling."""
        if not self.cfg.MOCO.SHUFFLE_BN or self._passes[number].key_view is None:
            return None
        splits, seed = self.cfg.MOCO.BN_SPLITS, self.cfg.SEED
        return shuffle_plan(self.batch_size, splits, seed, step, number)

    def _pixels(self, batch: Batch, plan: PretrainStepPlan) -> list[tuple[Tensor, Tensor]]:
        """Return the normalized query and key views (n, 3, P, P) of each pass, on the device."""
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
        """Send key rows to the processes that encode them (MOCO.SHUFFLE_BY all_to_all)."""
        parts = list(rows.split(self.n))
        for number, plan in enumerate(shuffles):
            if plan is not None:
                keys = 2 * number + 1  # a pass has its queries first, then its keys
                exchange = exchange_plan(plan, distributed.rank(), distributed.world_size())
                parts[keys] = distributed.exchange_rows(parts[keys], *exchange)
        return torch.cat(parts)

    def _count_bad_images(self, batch: Batch) -> None:
        for reason in batch.bad:
            if reason not in self._bad_images and batch.complete:
                echo(f"warning: {reason}; another image takes its place")
            self._bad_images.add(reason)
        if not batch.complete:
            raise DataError(f"{batch.bad[0]} (DATA.BAD_IMAGES skip replaces bad images)")
        limit = self.cfg.DATA.MAX_BAD_FRACTION
        if len(self._bad_images) > limit * len(self.images):
            raise DataError(
                f"{len(self._bad_images)} of {len(self.images)} images are bad, more than "
                f"DATA.MAX_BAD_FRACTION {limit}; the last: {batch.bad[-1]}"
            )


def load_weights(
    model: Mechanism, weights: InitialWeights, mean: tuple[float, ...], std: tuple[float, ...]
) -> Initialization:
    """Load the weights of a file into a newly built mechanism with the same network.

    The head is loaded if the shapes agree; the key encoder and the prediction head if the head is
    loaded; the queue if the key encoder is loaded, because the keys in a queue are meaningful only
    together with the encoder that computed them. A key encoder that is not in the file starts as a
    copy of the query encoder.
    """
    assert weights.state is not None
    state = model.state_dict()
    source = {**weights.extra, **{QUERY + name: x for name, x in weights.state.items()}}
    source = {name: x for name, x in source.items() if not name.endswith(COUNTER)}
    names = {name for name in state if not name.endswith(COUNTER)}
    query, key = ({name for name in names if name.startswith(start)} for start in (QUERY, KEY))
    head = {name for name in query if name.startswith(HEAD)}
    predictor = {name for name in names if name.startswith(PREDICTOR)}

    def fits(wanted: set[str]) -> bool:
        shapes = {name: source[name].shape for name in wanted & source.keys()}
        return bool(wanted) and shapes == {name: state[name].shape for name in wanted}

    has_head = fits(head) and not any(n.startswith(HEAD) for n in source.keys() - head)
    has_key = model.has_key_encoder and has_head and fits(key)
    has_queue = has_key and fits(QUEUE & names)
    has_predictor = has_head and fits(predictor)
    parts = ((has_head, head), (has_key, key), (has_queue, QUEUE), (has_predictor, predictor))
    taken = (query - head).union(*(part for has, part in parts if has))
    loaded = {name: source[name] for name in taken}
    missing = [] if has_head else ["the head"]
    if predictor and not has_predictor:
        missing.append("the prediction head")
    if "queue" in state and not has_queue:
        missing.append("the queue")
    if model.has_key_encoder and not has_key:
        missing.append("the key encoder (a copy of the query encoder)")
        for name, own in {**state, **loaded}.items():
            if name.startswith(QUERY):
                loaded[KEY + name.removeprefix(QUERY)] = own.clone()
    model.load_state_dict(loaded, strict=False)
    notes = list(weights.notes)
    if missing:
        notes.append(f"MODEL.WEIGHTS: not loaded from the file: {', '.join(missing)}")
    pixels = zip((*weights.mean, *weights.std), (*mean, *std), strict=True)
    if any(abs(theirs - ours) > 1e-3 for theirs, ours in pixels):
        notes.append(
            f"MODEL.WEIGHTS: trained on pixels of mean {weights.mean} and std {weights.std}, but "
            "this run normalizes by AUG.MEAN and AUG.STD"
        )
    coverage = {"loaded": len(loaded), "left_at_init": sorted(names - loaded.keys())}
    return Initialization(weights.init, weights.sha256, weights.source, coverage, notes)


def open_pretraining_images(cfg: CfgNode, folder: Path) -> Images:
    """Open the images of DATA.ROOT."""
    # The main process writes the index of the shards, and the others read it.
    in_turn = distributed.run_main_first() if find_shards(cfg.DATA.ROOT) else nullcontext()
    with in_turn:
        images = open_images(cfg.DATA.ROOT, folder / INDEX_NAME, cfg.DATA.SHARD_WINDOW)
    return images


def _build(cfg: CfgNode, num_images: int, world_size: int) -> tuple[Mechanism, Spec]:
    """Build the mechanism, whose encoders have this process's share of the BN groups."""
    moco, model = cfg.MOCO, cfg.MODEL
    spec = build_spec(model.ARCH, model.STEM, model.WIDTH, cfg.AUG.CROP_PX)
    splits = moco.BN_SPLITS // (world_size * cfg.SOLVER.ACCUMULATE)
    encoder = build_encoder(spec, moco.DIM, moco.MLP, splits)
    if model.ZERO_INIT_RESIDUAL:
        zero_init_residual(encoder)
    if isinstance(encoder, ViT) and model.FREEZE_PATCH_EMBED:
        encoder.patch_embed.requires_grad_(False)
    build = lookup(MECHANISMS, moco.MECHANISM, "MOCO.MECHANISM")
    return build(cfg, encoder, num_images), spec


def augmentations_from(cfg: CfgNode) -> tuple[Augmentation, Augmentation]:
    """Return the augmentations of the first and the second view from the keys under AUG."""
    aug = cfg.AUG
    first = Augmentation(
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
        solarize_prob=aug.SOLARIZE_PROB,
    )
    others = {"blur_prob": aug.BLUR_PROB_2, "solarize_prob": aug.SOLARIZE_PROB_2}
    return first, replace(first, **{name: p for name, p in others.items() if p != -1})
