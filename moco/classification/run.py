"""Model, data, step and evaluation of linear classification and fine-tuning.

`moco.engine.loop.train` runs the training loop. N images per step of all processes, n images of
this process, P crop size in pixels, C classes.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from moco.classification.config import Protocol, default_cfg, scale_to_batch
from moco.common import distributed
from moco.common.async_copy import to_device_async
from moco.common.errors import DataError, UserError, plural
from moco.common.files import PathLike, sha256_state
from moco.common.run import DIGITS
from moco.data.augment import Augmentation, apply_colors
from moco.data.images import LabeledSets, describe_images, read_labeled_sets
from moco.data.inaturalist import find_inaturalist, read_inaturalist
from moco.data.views import Batch, Position, Views, positions_of_steps
from moco.engine.checkpoint import CLASSIFIER_FORMAT
from moco.engine.device import set_up_torch
from moco.engine.evaluation import CenterCrop, iterate_outputs
from moco.engine.keys import CLASSIFICATION
from moco.engine.training import Evaluation, Step, StepPlan, Training, print_notes
from moco.engine.weights import InitialWeights
from moco.modeling.encoder import HEADS, Encoder, build_backbone, load_backbone, set_head
from moco.modeling.synced_bn import mean_statistics

TOP = 5


@dataclass(frozen=True)
class ClassifyStepPlan(StepPlan):
    """Input of one classification step."""

    labels: Tensor  # (n,) labels of this process's images


class Classification(Training[ClassifyStepPlan, Step]):
    """Training run of a classifier, ready for its first step or to be resumed.

    Args:
        cfg: Configuration of the run, filled in by `with_weights`.
        protocol: Linear classification or fine-tuning.
        weights: Pre-trained weights or random initialization that the run starts from.
    """

    checkpoint_format = CLASSIFIER_FORMAT
    config_keys = CLASSIFICATION
    defaults = default_cfg({})
    accuracy_name = "train/top1"

    def __init__(self, cfg: CfgNode, protocol: Protocol, weights: InitialWeights) -> None:
        set_up_torch(cfg.NUM_THREADS, cfg.DETERMINISTIC)
        self._sets = sets = open_labeled_sets(cfg.DATA.ROOT)
        distributed.check_equal(len(sets.val), f"number of val images in {cfg.DATA.ROOT}")
        crops, aug = (cfg.EVAL.CROP_PX, cfg.EVAL.RESIZE_PX, cfg.AUG.CROP_PX), cfg.AUG
        self._crop = CenterCrop.sized(*crops, aug.MEAN, aug.STD)
        weights.spec.check_image(aug.CROP_PX, "AUG.CROP_PX")
        weights.spec.check_image(self._crop.crop_px, "EVAL.CROP_PX")
        solver = scale_to_batch(cfg, random=weights.state is None)
        torch.manual_seed(cfg.SEED)
        model = build_classifier(weights, len(sets.classes), protocol)
        if cfg.SOLVER.COMPILE:
            model.compile()
        super().__init__(cfg, solver, weights.spec, model, sets.train)
        self.model: Encoder
        self.kind = self.verb = protocol.kind
        self._metrics = tuple(f"{self.kind}/{name}" for name in ("top1", "top5"))
        self.evaluated, self.recorded = self._metrics[0], {name: name for name in self._metrics}
        self.evaluate_every_epochs = cfg.EVAL.EVERY_EPOCHS
        self._protocol, self._weights, self._aug = protocol, weights, crop_and_flip(cfg)
        self._labels, self._val_labels = map(torch.tensor, (sets.train_labels, sets.val_labels))
        self._frozen = fingerprint(self.model) if protocol.frozen else {}
        self.task = f"{cfg.TASK or self.kind}_{self.spec.name}"
        self.notes = _notes(cfg, solver.BASE_LR, protocol.frozen)
        self.notes += [*describe_images(sets.train), *describe_images(sets.val)]
        if distributed.is_main():
            init = f"init {weights.init} ({weights.source or 'random weights'})"
            data = f"{len(sets.train)} images, {len(sets.classes)} classes"
            print(f"{self.task}, {init}: {data}; learning rate {solver.BASE_LR:g}", flush=True)
        print_notes(self.notes)

    def views(self) -> Views:
        """Return the dataset of augmented crops."""
        return Views(self.images, self._aug, self.cfg.SEED, cache_bytes=self.cache_bytes())

    def plan(self, step: int, positions: list[Position]) -> ClassifyStepPlan:
        """Plan the items and labels of this process in a step."""
        mine = positions[distributed.rank() * self.n :][: self.n]
        labels = self._labels[[index for _, index in mine]]
        return ClassifyStepPlan(step, [(epoch, index, 0) for epoch, index in mine], labels)

    def forward_backward(self, batch: Batch, plan: ClassifyStepPlan) -> Step:
        """Compute the gradients of the mean cross-entropy."""
        if not batch.complete:  # a replacement would have another label
            raise DataError(batch.bad[0])
        self.model.train(not self._protocol.frozen)
        labels = to_device_async(plan.labels, self.device)  # (n,)
        pixels = batch.pixels.to(self.device, non_blocking=True)
        x = apply_colors(pixels, batch.params, self._aug, self.cfg.AUG.MEAN, self.cfg.AUG.STD)
        with self.autocast():
            logits = self.parallel(x.contiguous(memory_format=self.layout))  # (n, C)
        loss = F.cross_entropy(logits.float(), labels)
        self.scaler.scale(loss).backward()
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return Step(loss.detach(), 100 * accuracy)

    def end_epoch(self) -> None:
        """Check that a frozen network has not changed."""
        if self._protocol.frozen:
            require_unchanged(self.model, self._frozen)

    def evaluate(self) -> Evaluation:
        """Compute the 1-crop accuracy on all validation images, divided among the processes."""
        size = len(self._sets.val)
        mine = range(distributed.rank(), size, distributed.world_size())
        hits = torch.zeros(2, dtype=torch.long, device=self.device)  # top-1, top-5
        top = min(TOP, len(self._sets.classes))

        def logits(x: Tensor) -> Tensor:
            with self.autocast():
                return self.model(x.contiguous(memory_format=self.layout))

        self.model.eval()
        data = self.cfg.DATA
        loading = self.device, data.NUM_WORKERS, data.WORKER_TIMEOUT_SECONDS, "evaluate"
        batches = iterate_outputs(logits, self._sets.val, self._crop, mine, self.n, *loading)
        with mean_statistics(self.model):  # all processes evaluate the same network
            for indices, scores in batches:
                labels = to_device_async(self._val_labels[indices], self.device)[:, None]
                best = scores.topk(top, dim=1).indices == labels  # (n, top)
                hits += torch.stack([best[:, 0].sum(), best.any(dim=1).sum()])
        top1, top5 = (100 * hit / size for hit in distributed.sum_over_ranks(hits).tolist())
        return Evaluation(
            dict(zip(self._metrics, (top1, top5), strict=True)),
            f"top-1 {top1:.2f}%, top-5 {top5:.2f}% of {size} validation images",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return protocol, weights and classes, which a resumed run must share."""
        sha256, classes = self._weights.sha256, self._sets.classes
        return {"kind": self.kind, "weights_sha256": sha256, "classes": classes}

    def resume(self, path: Path, state: Any) -> None:
        """Check that a checkpoint has the protocol, weights and classes of this run."""
        for name, got in self.state_dict().items():
            expected = state.get(name)
            if got != expected:
                detail = "" if name == "classes" else f" (got {got!r}, expected {expected!r})"
                raise UserError(
                    f"{path}: was trained with other {name}{detail}; use the same, or start from "
                    "scratch in another OUTPUT_DIR"
                )

    def record(self) -> dict[str, Any]:
        """Return task, initialization, notes, and a digest of the first batch."""
        weights, sets = self._weights, self._sets
        size = f"{len(sets.classes)} classes, {len(sets.val)} validation images"
        return {
            "task": self.task,
            "init": weights.init,
            "weights_sha256": weights.sha256,
            "weights_source": weights.source,
            "notes": [size, *weights.notes, *self.notes],
            "start": {"batches": [self._first_batch()]},
        }

    def _first_batch(self) -> str:
        """Hash the positions and labels of the first batch; the seed determines the views."""
        [at] = positions_of_steps(self.images, self.batch_size, self.cfg.SEED, 0, 1)
        text = f"{at} {self._labels[[i for _, i in at]].tolist()}"
        return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def build_classifier(weights: InitialWeights, num_classes: int, protocol: Protocol) -> Encoder:
    """Build the network with a new fully-connected layer: images (N, 3, H, W) → logits (N, C).

    If the protocol is frozen, only the new layer requires gradients.
    """
    if weights.state is None:
        model = build_backbone(weights.spec)
    else:
        model = load_backbone(weights.spec, weights.state)
    model.requires_grad_(not protocol.frozen)
    head = nn.Linear(weights.spec.feature_dim, num_classes)
    if protocol.head_std is not None:
        nn.init.normal_(head.weight, std=protocol.head_std)
        nn.init.zeros_(head.bias)
    set_head(model, head)
    return model


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Hash every parameter and buffer except those of the classifier."""
    return {
        name: sha256_state({name: tensor})
        for name, tensor in model.state_dict().items()
        if not name.startswith(HEADS)
    }


def require_unchanged(model: nn.Module, before: dict[str, str]) -> None:
    """Assert that a frozen network still has the fingerprint `before`."""
    changed = sorted({name for name, _ in fingerprint(model).items() ^ before.items()})
    assert not changed, f"the frozen network changed during training: {', '.join(changed[:5])}"


def _notes(cfg: CfgNode, base_lr: float, frozen: bool) -> list[str]:
    """Return a note on the effects of several processes or another batch size, if any."""
    N, reference = cfg.SOLVER.BATCH_SIZE, cfg.SOLVER.REFERENCE_BATCH_SIZE
    W, scaled = distributed.world_size(), reference not in (0, N)
    if W == 1 and not scaled:
        return []
    note = f"batch {N}: {plural(W, 'process')} x {N // W}"
    if not frozen:
        note += f"; BN over {N // W} images each"
    if scaled:
        note += (
            f"; learning rate {base_lr:g} instead of {base_lr * reference / N:g}, scaled from a "
            f"batch of {reference} (SOLVER.REFERENCE_BATCH_SIZE 0 turns it off)"
        )
    return [note]


def open_labeled_sets(root: PathLike) -> LabeledSets:
    """Read iNaturalist 2018 in the published layout, or any dataset of `read_labeled_sets`.

    Raises:
        DataError: If files are missing or damaged, or there are no images.
    """
    folder = find_inaturalist(root)
    return read_inaturalist(folder) if folder else read_labeled_sets(root)


def crop_and_flip(cfg: CfgNode) -> Augmentation:
    """Return the augmentation from the keys under AUG: random crop and flip, no colors."""
    return Augmentation(
        gray_first=False,
        crop_px=cfg.AUG.CROP_PX,
        crop_scale=tuple(cfg.AUG.CROP_SCALE),
        crop_ratio=tuple(cfg.AUG.CROP_RATIO),
        flip_prob=cfg.AUG.FLIP_PROB,
        jitter_prob=0.0,
        jitter=(0.0, 0.0, 0.0, 0.0),
        gray_prob=0.0,
        blur_prob=0.0,
        blur_sigma_px=(0.1, 2.0),
    )
