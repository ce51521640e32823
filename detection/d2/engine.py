"""Detectron2 engine; implements `detection.config.engines.Engine`."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetMapper, load_proposals_into_dataset
from detectron2.evaluation import DatasetEvaluator
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.layers import NaiveSyncBatchNorm, ROIAlign
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.modeling import build_model as build_detectron2s
from detectron2.modeling.poolers import ROIPooler
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from convert.read import read_file
from detection.d2 import catalog, densepose
from detection.d2.config import check_transfer_config as check_config
from detection.d2.config import transfer_defaults as default_config
from detection.d2.config import with_builder
from detection.data.pipeline import keep_trainable, training_records
from detection.data.sample import Sample
from detection.datasets import find_source, known_sources, read_split
from detection.datasets.base import Record, Split, base_name
from detection.evaluation.evaluators import build_evaluator
from detection.modeling.focal_loss import compile_focal_loss
from detection.modeling.memory_format import set_memory_format
from detection.modeling.roi_align import roi_align
from moco.common import distributed
from moco.common.errors import DataError, UserError, plural

__all__ = ["check_config", "default_config"]

loggers = ("detectron2", "densepose")
open_url = catalog.open_url
provide_datasets = catalog.provide_user_datasets


def check_evaluator(split: Split, cfg: CfgNode) -> None:
    if split.evaluator_type == "densepose":
        densepose.fetch_surface()
    elif split.from_catalog:
        catalog.check_evaluator(split)
    else:
        build_evaluator(split, cfg, Path(cfg.OUTPUT_DIR))


@contextmanager
def session() -> Iterator[None]:
    """Create Detectron2's process group of this machine, and drop its groups at the end.

    Detectron2 caches its process groups forever, which would keep the connections open.
    """
    if distributed.world_size() > 1:
        comm.create_local_process_group(distributed.local_processes())
    try:
        yield
    finally:
        comm._LOCAL_PROCESS_GROUP = None
        comm._get_global_gloo_group.cache_clear()


def build_model(cfg: CfgNode) -> nn.Module:
    """Register the datasets, whose metadata heads look up, and build the network."""
    if cfg.MODEL.get("DENSEPOSE_ON", False):
        densepose.check_processes(cfg, distributed.world_size())
    sources = known_sources(cfg)
    names = [n for n in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST) if base_name(n) in sources]
    catalog.register(cfg, [name for name in names if find_source(name, cfg).present()])
    model: nn.Module = build_detectron2s(with_builder(cfg))
    set_memory_format(model, cfg)
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        compile_focal_loss(cfg.MODEL.DEVICE)
    if cfg.SOLVER.PRECISION == "bf16":
        replace_roi_align(model)
        widen_sync_bn(model)
    return model


def to_model(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Convert samples to the dicts of Detectron2's mapper; those of `mapper` pass unchanged."""
    return [_with_instances(sample) if "boxes" in sample else {**sample} for sample in samples]


def _with_instances(sample: Sample) -> dict[str, Any]:
    learned = {key: sample.get(key) for key in ("boxes", "classes", "masks", "keypoints")}
    instances = Instances(tuple(sample["image"].shape[-2:]))
    instances.gt_boxes, instances.gt_classes = Boxes(learned["boxes"]), learned["classes"]
    if len(instances):  # as in Detectron2, without objects there are no such fields
        if (masks := learned["masks"]) is not None:
            kind = BitMasks if isinstance(masks, Tensor) else PolygonMasks
            instances.gt_masks = kind(masks)
        if learned["keypoints"] is not None:
            instances.gt_keypoints = Keypoints(learned["keypoints"])
    return {**{k: v for k, v in sample.items() if k not in learned}, "instances": instances}


def to_predictions(outputs: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [_tensors(output) for output in outputs]


def _tensors(output: dict[str, Any]) -> dict[str, Tensor]:
    if "instances" not in output:
        return {"sem_seg": output["sem_seg"]}
    found: Instances = output["instances"]
    tensors = {"boxes": found.pred_boxes.tensor}
    for name in ("scores", "pred_classes", "pred_masks", "pred_keypoints"):
        if found.has(name):
            tensors[name.removeprefix("pred_")] = found.get(name)
    return tensors


def evaluator(split: Split, cfg: CfgNode, folder: Path) -> "_OwnEvaluator | None":
    if split.evaluator_type == "densepose":
        return _OwnEvaluator(densepose.build_evaluator(cfg, split.name))
    if split.from_catalog:
        return _OwnEvaluator(catalog.build_evaluator(split, cfg, folder))
    return None


class _OwnEvaluator:
    """Adapter of a Detectron2 evaluator that returns its results as one flat dict."""

    def __init__(self, evaluator: DatasetEvaluator) -> None:
        self._evaluator = evaluator
        evaluator.reset()

    def process(self, records: Sequence[Record], outputs: Any) -> None:
        self._evaluator.process(records, outputs)

    def evaluate(self) -> dict[str, float]:
        results = flatten_results_dict(self._evaluator.evaluate() or {})
        return {name: float(value) for name, value in results.items()}


@contextmanager
def step_scope(iteration: int) -> Iterator[Mapping[str, tuple[float, bool]]]:
    """Open an `EventStorage` and return its scalars; images and histograms are dropped."""
    scalars: dict[str, tuple[float, bool]] = {}
    with EventStorage(iteration) as storage:
        yield scalars
    hints = storage.smoothing_hints()
    scalars |= {name: (value, hints[name]) for name, (value, _) in storage.latest().items()}


def mapper(
    cfg: CfgNode, *, training: bool
) -> tuple[Sequence[Record], Callable[[Record], Any]] | None:
    """Return records and Detectron2's own mapper for tasks that `detection.data` cannot map.

    These are DensePose, INPUT.CROP, precomputed proposals, and panoptic segmentation.
    """
    model, names = cfg.MODEL, cfg.DATASETS.TRAIN if training else cfg.DATASETS.TEST
    if training and model.get("DENSEPOSE_ON", False):
        return densepose.records_and_mapper(cfg)
    if model.LOAD_PROPOSALS:
        datasets = cfg.DATASETS
        files = datasets.PROPOSAL_FILES_TRAIN if training else datasets.PROPOSAL_FILES_TEST
        records = _records_with_proposals(cfg, names, files)
        kept = keep_trainable(cfg, records) if training else records
        return kept, DatasetMapper(cfg, training)
    if training and (cfg.INPUT.CROP.ENABLED or model.META_ARCHITECTURE == "PanopticFPN"):
        return training_records(cfg), DatasetMapper(cfg, True)
    return None


def _records_with_proposals(
    cfg: CfgNode, names: Sequence[str], files: Sequence[str]
) -> list[Record]:
    """Read DATASETS.PROPOSAL_FILES_* without executing anything in them.

    Detectron2 unpickles such files, so it gets safe copies of their contents.
    """
    if len(files) != len(names):
        raise UserError(
            f"MODEL.LOAD_PROPOSALS True: got {plural(len(files), 'proposal file')} for "
            f"{', '.join(names)}; set one for each in DATASETS.PROPOSAL_FILES_TRAIN and _TEST"
        )
    found: list[Record] = []
    with TemporaryDirectory() as scratch:
        copy = Path(scratch, "proposals")
        for name, file in zip(names, files, strict=True):
            copy.write_bytes(pickle.dumps(read_file(file)))
            records = [dict(record) for record in read_split(name, cfg).records]
            try:
                found += load_proposals_into_dataset(records, str(copy))
            except (KeyError, TypeError, IndexError) as error:
                raise DataError(
                    f"{file}: does not contain proposals of {name} ({error!r})"
                ) from error
    return found


def augmented(cfg: CfgNode, model: nn.Module) -> nn.Module | None:
    return GeneralizedRCNNWithTTA(with_builder(cfg), model) if cfg.TEST.AUG.ENABLED else None


class Fp32RegionsROIAlign(nn.Module):
    """RoIAlign with regions in fp32, and with the fast gradient in bf16 on a CPU.

    Deviation: Detectron2's `ROIAlign` rounds the regions to the dtype of the features.
    """

    def __init__(self, layer: ROIAlign) -> None:
        super().__init__()
        (self.size, _), self.scale = layer.output_size, layer.spatial_scale
        self.sampling_ratio = layer.sampling_ratio

    def forward(self, features: Tensor, rois: Tensor) -> Tensor:
        """Pool (N, C, H, W) in regions (R, 5), image index and box, to (R, C, P, P)."""
        return roi_align(features, rois, self.size, self.scale, self.sampling_ratio)


def replace_roi_align(model: nn.Module) -> None:
    """Use `Fp32RegionsROIAlign` in all poolers (in place); the state dict does not change."""
    for pooler in model.modules():
        if isinstance(pooler, ROIPooler):
            layers = [Fp32RegionsROIAlign(layer) for layer in pooler.level_poolers]
            pooler.level_poolers = nn.ModuleList(layers)


class Fp32NaiveSyncBatchNorm(NaiveSyncBatchNorm):
    """NaiveSyncBatchNorm in fp32, because a variance is a small difference of large numbers.

    Deviation: Detectron2 computes only fp16 in fp32, not bf16.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (N, C, H, W) in fp32 and return it in the dtype of `x`."""
        out: Tensor = super().forward(x.float()).to(x.dtype)
        return out


def widen_sync_bn(model: nn.Module) -> None:
    """Compute the statistics of all NaiveSyncBatchNorm layers in fp32 (in place)."""
    for layer in model.modules():
        if isinstance(layer, NaiveSyncBatchNorm):
            layer.__class__ = Fp32NaiveSyncBatchNorm
