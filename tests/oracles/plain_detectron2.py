"""Detectron2's own `DefaultTrainer`, with only the changes that a task needs.

All differences from Detectron2's tools/train_net.py are in the table at the beginning of
tests/detection/parity/test_plain_detectron2.py.
"""

import argparse
import importlib
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode, get_cfg
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    MetadataCatalog,
    build_detection_test_loader,
    build_detection_train_loader,
)
from detectron2.data import transforms as T
from detectron2.data.datasets import register_coco_instances
from detectron2.data.datasets.builtin_meta import _get_builtin_metadata
from detectron2.engine import DefaultTrainer, default_setup, defaults, launch
from detectron2.evaluation import COCOEvaluator, DatasetEvaluator, SemSegEvaluator
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.layers import ShapeSpec
from detectron2.modeling import (
    BACKBONE_REGISTRY,
    FPN,
    GeneralizedRCNNWithTTA,
    SwinTransformer,
    build_model,
)
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.vit import get_vit_lr_decay_rate
from detectron2.solver.build import get_default_optimizer_params, maybe_add_gradient_clipping
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from torch import nn

from detection.config.task import add_transfer_config
from detection.d2.config import with_builder
from detection.datasets.voc import VOC_CLASSES
from detection.modeling.focal_loss import compile_focal_loss
from detection.modeling.norms import with_process_norms
from detection.modeling.optimizer import parameter_layer
from tests.oracles.sem_seg_mapper import build_mapper as sem_seg_mapper

# Of projects/ViTDet/configs, of COCO/cascade_mask_rcnn_swin_b_in21k_50ep.py there, and ConvNeXt's.
NOT_DECAYED = ("pos_embed", "relative_position_bias_table", "gamma")


@BACKBONE_REGISTRY.register()
def plain_swin_fpn(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Build Detectron2's own Swin under its own FPN, from this project's keys."""
    swin, fpn = cfg.MODEL.SWIN, cfg.MODEL.FPN
    bottom_up = SwinTransformer(
        embed_dim=swin.EMBED_DIM,
        depths=swin.DEPTHS,
        num_heads=swin.NUM_HEADS,
        window_size=swin.WINDOW_SIZE,
        qkv_bias=swin.QKV_BIAS,
        drop_path_rate=swin.DROP_PATH,
        out_indices=(0, 1, 2, 3),
    )
    return FPN(
        bottom_up,
        ["p0", "p1", "p2", "p3"],
        fpn.OUT_CHANNELS,
        fpn.NORM,
        LastLevelMaxPool(),
        fpn.FUSE_TYPE,
        cfg.MODEL.BACKBONE.SQUARE_PAD,
    )


class PlainTrainer(DefaultTrainer):
    compiled = False  # COCOeval

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, name: str) -> DatasetEvaluator:
        """Build the evaluator as tools/train_net.py does."""
        folder = str(Path(cfg.OUTPUT_DIR, "inference"))
        kind = MetadataCatalog.get(name).evaluator_type
        if kind == "coco":
            return COCOEvaluator(name, output_dir=folder, use_fast_impl=cls.compiled)
        return SemSegEvaluator(name, output_dir=folder)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        if cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor":
            mapper: Any = sem_seg_mapper(cfg, training=True)
        elif cfg.INPUT.LSJ.ENABLED:
            size = cfg.INPUT.LSJ.SIZE
            changes = [
                T.RandomFlip(horizontal=True),
                T.ResizeScale(*cfg.INPUT.LSJ.SCALE_RANGE, size, size),
                T.FixedSizeCrop((size, size), pad=cfg.INPUT.LSJ.PAD, seg_pad_value=0),
            ]
            mapper = DatasetMapper(cfg, True, augmentations=changes, recompute_boxes=True)
        else:
            return super().build_train_loader(cfg)
        return build_detection_train_loader(cfg, mapper=mapper)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, name: str) -> Any:
        if cfg.MODEL.META_ARCHITECTURE != "SemanticSegmentor":
            return super().build_test_loader(cfg, name)
        mapper = sem_seg_mapper(cfg, training=False)
        return build_detection_test_loader(cfg, name, mapper=mapper)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        solver = cfg.SOLVER
        if solver.OPTIMIZER == "SGD":
            return super().build_optimizer(cfg, model)
        factor = partial(_decay, cfg=cfg) if solver.LR_DECAY != 1.0 else None
        if "vit" in cfg.MODEL.BACKBONE.NAME:
            depth = cfg.MODEL.VIT.DEPTH
            factor = partial(get_vit_lr_decay_rate, lr_decay_rate=solver.LR_DECAY, num_layers=depth)
        groups = get_default_optimizer_params(
            model,
            base_lr=solver.BASE_LR,
            weight_decay=solver.WEIGHT_DECAY,
            weight_decay_norm=solver.WEIGHT_DECAY_NORM,
            weight_decay_bias=solver.WEIGHT_DECAY_BIAS,
            lr_factor_func=factor,
            overrides={name: {"weight_decay": 0.0} for name in NOT_DECAYED},
        )
        return maybe_add_gradient_clipping(
            cfg, torch.optim.AdamW(groups, solver.BASE_LR, betas=tuple(solver.BETAS))
        )


class Compiled(PlainTrainer):
    compiled = True


class Seeded(PlainTrainer):
    """Trainer with Detectron2's own mapper, each image with a seed of its own."""

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        return build_detection_train_loader(cfg, mapper=seeded(DatasetMapper(cfg, True), cfg))


class Stuff(Seeded):
    compiled = True


def densepose_trainer(cfg: CfgNode) -> DefaultTrainer:
    """Build DensePose's trainer, each image with a seed of its own."""
    from densepose.data import DatasetMapper, build_detection_train_loader
    from densepose.engine import Trainer

    class SeededTrainer(Trainer):
        @classmethod
        def build_train_loader(cls, cfg: CfgNode) -> Any:
            return build_detection_train_loader(cfg, mapper=seeded(DatasetMapper(cfg, True), cfg))

    return SeededTrainer(cfg)


_SEEDS: list[np.random.RandomState] = []  # per process, because PreciseBN continues the stream


def seeded(mapper: Callable[[Any], Any], cfg: CfgNode) -> Callable[[Any], Any]:
    """Let a mapper sample each image from the next seed of the process."""
    if not _SEEDS:
        _SEEDS.append(np.random.RandomState(cfg.SEED + comm.get_rank()))

    def mapped(record: Any) -> Any:
        seed = int(_SEEDS[0].randint(2**32, dtype=np.uint32))
        with torch.random.fork_rng(devices=[]):
            numpy_state, python_state = np.random.get_state(), random.getstate()
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            try:
                return mapper(record)
            finally:
                np.random.set_state(numpy_state)
                random.setstate(python_state)

    return mapped


def train(config: Path, folder: Path, data: Path, num_processes: int, **options: Any) -> None:
    """Train the config.yaml of a run with plain Detectron2, and write metrics.hex.json.

    Args:
        config: The config.yaml.
        folder: Output folder.
        data: Folder in the layout of `$DETECTRON2_DATASETS`.
        num_processes: Number of processes.
        **options: See `_train`.
    """
    launch(
        _train,
        num_processes,
        dist_url="auto",
        args=(str(config), str(folder), str(data), tuple(options.items())),
    )


def load_config(config: str, world_size: int) -> CfgNode:
    """Load a run's config with the builders and norms for this number of processes."""
    cfg = get_cfg()
    if "DENSEPOSE_ON" in Path(config).read_text(encoding="utf-8"):
        from densepose import add_densepose_config

        add_densepose_config(cfg)
    add_transfer_config(cfg)
    cfg.merge_from_file(config)
    return with_builder(with_process_norms(cfg, world_size))


def incompatible_keys(config: Path, checkpoint: Path) -> list[str]:
    """Return tensors that plain Detectron2's checkpointer misses, does not know or changes."""
    model = build_model(load_config(str(config), 1))
    checkpointer = DetectionCheckpointer(model)
    found: list[str] = []

    def note(incompatible: Any) -> None:
        found.extend([*incompatible.missing_keys, *incompatible.unexpected_keys])
        found.extend(name for name, *_ in incompatible.incorrect_shapes)

    checkpointer._log_incompatible_keys = note
    checkpointer.load(str(checkpoint))
    state = torch.load(checkpoint, weights_only=True)["model"]
    same = model.state_dict()
    return found + [name for name, x in state.items() if not torch.equal(x, same[name])]


def _decay(name: str, cfg: CfgNode) -> float:
    layer, last = parameter_layer(name, cfg)
    return float(cfg.SOLVER.LR_DECAY ** (last - layer))


def _train(config: str, folder: str, data: str, options: tuple[tuple[str, Any], ...]) -> None:
    """Train on one process.

    The options are `register`, a function in place of `register_data`, and `trainer`, which builds
    a trainer from a config.
    """
    _SEEDS.clear()
    given = dict(options)
    cfg = load_config(config, comm.get_world_size()).clone()
    cfg.defrost()
    cfg.OUTPUT_DIR = folder
    cfg.MODEL.WEIGHTS = cfg.MODEL.WEIGHTS.replace("random", "")
    if cfg.MODEL.BACKBONE.NAME == "build_swin_fpn_backbone":
        cfg.MODEL.BACKBONE.NAME = plain_swin_fpn.__name__
    cfg.freeze()
    default_setup(cfg, argparse.Namespace(config_file="", eval_only=False))
    register: Callable[[CfgNode, Path], None] = given.get("register", register_data)
    register(cfg, Path(data))
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        compile_focal_loss(cfg.MODEL.DEVICE)
    without_ids = partial(defaults.create_ddp_model, device_ids=None)
    with mock.patch.object(defaults, "create_ddp_model", without_ids):
        trainer = given.get("trainer", PlainTrainer)(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()
    results = dict(flatten_results_dict(trainer._last_eval_results or {}))
    if cfg.TEST.AUG.ENABLED:
        evaluators = [PlainTrainer.build_evaluator(cfg, name) for name in cfg.DATASETS.TEST]
        augmented = GeneralizedRCNNWithTTA(cfg, trainer.model)
        found = flatten_results_dict(PlainTrainer.test(cfg, augmented, evaluators))
        results |= {name.replace("/", "_TTA/", 1): value for name, value in found.items()}
    if comm.is_main_process():
        content = json.dumps({name: float(value).hex() for name, value in results.items()})
        Path(folder, "metrics.hex.json").write_text(content, encoding="utf-8")
    if comm.get_world_size() > 1:  # a process that ends with its threads of gloo may abort
        comm._LOCAL_PROCESS_GROUP = None
        comm._get_global_gloo_group.cache_clear()
        torch.distributed.destroy_process_group()


def register_data(cfg: CfgNode, data: Path) -> None:
    """Register DATASETS with Detectron2's own readers, from `data` instead of ./datasets."""
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        if name in DatasetCatalog:
            DatasetCatalog.remove(name)
        if name in MetadataCatalog.list():
            MetadataCatalog.remove(name)
        if "sem_seg" in name:
            _register_labels(name, data / "VOC2012")
            continue
        split = f"{name.rsplit('_', 1)[1]}2017"
        kind = "person_keypoints" if "keypoints" in name else "instances"
        file = data / "coco" / "annotations" / f"{kind}_{split}.json"
        meta = _get_builtin_metadata("coco_person" if "keypoints" in name else "coco")
        register_coco_instances(name, meta, str(file), str(data / "coco" / split))


def register_imported(name: str, cfg: CfgNode, data: Path) -> None:
    """Register the datasets of a user's module, and Detectron2's own names."""
    importlib.import_module(name)
    if cfg.DATASETS.TRAIN[0] not in DatasetCatalog or "coco" in cfg.DATASETS.TRAIN[0]:
        register_data(cfg, data)


def register_densepose(cfg: CfgNode, data: Path) -> None:
    """Register datasets as DensePose's project does, from `data`."""
    # DensePose's evaluator passes a timeout that not every path handler accepts.
    PathManager.set_strict_kwargs_checking(False)
    from densepose.data.datasets.coco import CocoDatasetInfo, register_dataset

    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
        split = f"{name.rsplit('_', 1)[1]}2014"
        images = "train2014" if split == "train2014" else "val2014"
        file = f"coco/annotations/densepose_{split}.json"
        register_dataset(CocoDatasetInfo(name, f"coco/{images}", file), str(data))


def _register_labels(name: str, voc: Path) -> None:
    split, folder = name.rpartition("sem_seg_")[2], "SegmentationClass"
    folder += "Aug" if split == "train_aug" else ""
    records = [
        {
            "file_name": str(voc / "JPEGImages" / f"{image_id}.jpg"),
            "sem_seg_file_name": str(voc / folder / f"{image_id}.png"),
            "image_id": image_id,
        }
        for image_id in (voc / f"ImageSets/Segmentation/{split}.txt").read_text().split()
    ]
    DatasetCatalog.register(name, lambda: records)
    metadata: dict[str, Any] = {"stuff_classes": ["background", *VOC_CLASSES], "ignore_label": 255}
    MetadataCatalog.get(name).set(**metadata, evaluator_type="sem_seg")
