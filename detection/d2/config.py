"""Detectron2's config with this project's keys, its checks, and safe copies of model-zoo files."""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.data import DatasetCatalog
from detectron2.modeling import (
    BACKBONE_REGISTRY,
    META_ARCH_REGISTRY,
    ROI_HEADS_REGISTRY,
    SEM_SEG_HEADS_REGISTRY,
)
from fvcore.common.config import BASE_KEY

from convert.modeling.resnet import NUM_BLOCKS, STEMS
from convert.verify import read_converted
from detection.config.checks import check_basic_blocks, check_box_head
from detection.config.resolve import resolve_classes, resolve_metric, resolve_names
from detection.config.task import add_transfer_config
from detection.config.trained import apply_trained_config, trained_file
from detection.config.weights import apply_contract, apply_random, check_weights, read_weights
from detection.d2 import densepose
from detection.d2.backbones import builder_name, detectron2_has
from detection.d2.catalog import register
from detection.datasets import known_sources, read_split
from detection.datasets.base import base_name
from detection.modeling.backbones import check_backbone
from detection.modeling.norms import norm_keys
from moco.common.cfgnode import explicit_keys, flatten, merge_cfg
from moco.common.command import RANDOM, converter
from moco.common.errors import UserError
from moco.common.files import read_text
from moco.common.pretrained import MODEL_ZOO, find_remote
from moco.common.shipped import resolve

# The names that detectron2.layers.get_norm accepts.
_NORMS = ("", "BN", "SyncBN", "FrozenBN", "GN", "nnSyncBN", "naiveSyncBN", "naiveSyncBN_N", "LN")


def transfer_defaults(*, dense_pose: bool = False) -> CfgNode:
    """Return Detectron2's defaults with this project's keys and, if requested, DensePose's."""
    cfg = get_cfg()
    if dense_pose:
        densepose.add_keys(cfg)
    add_transfer_config(cfg)
    return cfg


def setup(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Set up `cfg` for a custom train_net.py on Detectron2's `DefaultTrainer` (in place).

    Adds this project's keys, merges the config file and the overrides, applies the input contract
    of MODEL.WEIGHTS (with `--eval-only` the config.yaml next to the trained model), and registers
    the datasets that this project reads. Other names in DatasetCatalog are left unchanged.

    Args:
        cfg: Detectron2's `get_cfg()`, with or without keys of another project.
        args: Arguments of Detectron2's `default_argument_parser()`; a `config_file` that is the
            name of a shipped file is replaced by its path.

    Raises:
        UserError: If a key is unknown or contradicts the weights, or if Detectron2's checkpointer
            cannot load the weights.
        DataError: If a dataset cannot be read.
    """
    config_file = resolve(args.config_file) if args.config_file else None
    args.config_file = str(config_file or "")  # Detectron2's `default_setup` opens it
    explicit, overrides = explicit_keys(config_file, args.opts), explicit_keys(None, args.opts)
    add_transfer_config(cfg)
    merge_cfg(cfg, config_file, args.opts)
    if args.eval_only:
        cfg.MODEL.WEIGHTS = str(trained_file(cfg, resume=args.resume))
        apply_trained_config(cfg, explicit)
    else:
        _apply_weights(cfg, explicit, overrides)
    cfg.MODEL.BACKBONE.NAME = builder_name(cfg)
    resolve_metric(cfg, explicit, resume=args.resume)
    resolve_names(cfg, overrides, eval_only=args.eval_only)
    test, sources = tuple(cfg.DATASETS.TEST), known_sources(cfg)
    names = test if args.eval_only else (*cfg.DATASETS.TRAIN, *test)
    # Detectron2's mapper can read only its own copies of ADE20k's label maps.
    theirs = {
        n
        for n in names
        if n in DatasetCatalog and (base_name(n) not in sources or n.startswith("ade20k_"))
    }
    register(cfg, [name for name in names if name not in theirs])
    if test and test[0] not in theirs:
        resolve_classes(cfg, read_split(test[0], cfg), explicit, overrides)


def _apply_weights(cfg: CfgNode, explicit: set[str], overrides: set[str]) -> None:
    """Adapt preprocessing and architecture in `cfg` to MODEL.WEIGHTS (in place).

    Detectron2's checkpointer opens the file later and only warns of names that it does not know,
    so a checkpoint that was not converted would leave the backbone randomly initialized.
    """
    named = cfg.MODEL.WEIGHTS
    check_weights(named)
    if named == RANDOM or named.startswith(tuple(MODEL_ZOO)):
        weights = read_weights(named)
    elif find_remote(named) is None:
        weights = read_converted(named)
    else:
        raise UserError(
            f"MODEL.WEIGHTS {named}: Detectron2's checkpointer cannot open this name; set the file "
            f"that `{converter()} {named} weights.pth` writes"
        )
    if weights is None:
        apply_random(cfg, explicit)
        cfg.MODEL.WEIGHTS = ""  # Detectron2's value for random initialization
    else:
        apply_contract(cfg, weights.contract, explicit, explicit - overrides)


def check_transfer_config(cfg: CfgNode) -> None:
    """Raise UserError for keys that fail an assertion in Detectron2 or build another network."""
    resnets, values = cfg.MODEL.RESNETS, flatten(cfg)
    for key, allowed in (("STEM", STEMS), ("DEPTH", NUM_BLOCKS)):
        if resnets[key] not in allowed:
            choices = ", ".join(map(str, allowed))
            raise UserError(f"MODEL.RESNETS.{key}: got {resnets[key]}, choices are {choices}")
    check_basic_blocks(cfg)
    check_box_head(cfg)
    for key, registry in (
        ("MODEL.META_ARCHITECTURE", META_ARCH_REGISTRY),
        ("MODEL.BACKBONE.NAME", BACKBONE_REGISTRY),
        ("MODEL.ROI_HEADS.NAME", ROI_HEADS_REGISTRY),
        ("MODEL.SEM_SEG_HEAD.NAME", SEM_SEG_HEADS_REGISTRY),
    ):
        if values[key] not in registry:
            choices = ", ".join(name for name, _ in registry)
            raise UserError(f"{key}: got {values[key]!r}, choices are {choices}")
    check_backbone(cfg)
    builder_name(cfg)
    if not detectron2_has(cfg) and any(resnets.DEFORM_ON_PER_STAGE):
        raise UserError(
            f"MODEL.RESNETS.DEFORM_ON_PER_STAGE {resnets.DEFORM_ON_PER_STAGE}: not supported by "
            f"ResNet-{resnets.DEPTH} with the {resnets.STEM} stem; set all to False"
        )
    for key in norm_keys(cfg):
        if values[key] not in _NORMS:
            raise UserError(f"{key}: got {values[key]!r}, choices are {', '.join(_NORMS)}")
    _check_test_aug(cfg)
    if cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor":
        if cfg.INPUT.CROP.ENABLED:
            raise UserError(
                "INPUT.CROP.ENABLED True: semantic segmentation crops by INPUT.SEM_SEG_CROP_SIZE; "
                "set it to False"
            )
        if cfg.INPUT.RANDOM_FLIP not in ("horizontal", "none"):
            raise UserError(
                f"INPUT.RANDOM_FLIP: got {cfg.INPUT.RANDOM_FLIP!r}, choices for semantic "
                "segmentation are horizontal, none"
            )


def _check_test_aug(cfg: CfgNode) -> None:
    """Raise UserError for models that Detectron2's GeneralizedRCNNWithTTA cannot wrap."""
    model = cfg.MODEL
    for key, fits in (
        ("MODEL.META_ARCHITECTURE", model.META_ARCHITECTURE == "GeneralizedRCNN"),
        ("MODEL.KEYPOINT_ON", not model.KEYPOINT_ON),
        ("MODEL.LOAD_PROPOSALS", not model.LOAD_PROPOSALS),
        ("MODEL.DENSEPOSE_ON", not model.get("DENSEPOSE_ON", False)),
    ):
        if cfg.TEST.AUG.ENABLED and not fits:
            raise UserError(
                f"TEST.AUG.ENABLED: Detectron2 has no test-time augmentation for {key} "
                f"{flatten(cfg)[key]}; set it to False"
            )


def with_builder(cfg: CfgNode) -> CfgNode:
    """Return a frozen copy of `cfg` whose MODEL.BACKBONE.NAME can build its backbone.

    The task and its records keep Detectron2's name, which the embedded engine knows as well.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.BACKBONE.NAME = builder_name(cfg)
    cfg.freeze()
    return cfg


def plain_copy(path: Path, scratch: Path) -> Path:
    """Copy a config and its bases into `scratch`, with YAML's Python tags replaced by their values.

    Nothing in the files is evaluated. Detectron2's `model_zoo.get_config_file` is not used, because
    it needs an older setuptools.
    """
    content = _ZooLoader(read_text(path)).get_single_data()
    if BASE_KEY in content:
        base = (path.parent / content[BASE_KEY]).resolve()
        content[BASE_KEY] = str(plain_copy(base, scratch))
    copy = scratch / path.name
    copy.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML, too
    return copy


class _ZooLoader(yaml.SafeLoader):
    """Safe YAML loader with the values of the expressions in the model zoo's configs."""


def _known_value(loader: _ZooLoader, node: yaml.SequenceNode) -> Any:
    (text,) = loader.construct_sequence(node)
    if text not in _EXPRESSIONS:
        raise UserError(
            f"the model-zoo config contains the expression {text!r}, which is not evaluated"
        )
    return _EXPRESSIONS[text]


_EXPRESSIONS = {
    "[[x, x * 2**(1.0/3), x * 2**(2.0/3) ] for x in [32, 64, 128, 256, 512 ]]": [
        [x, x * 2 ** (1.0 / 3), x * 2 ** (2.0 / 3)] for x in (32, 64, 128, 256, 512)
    ]
}
_ZooLoader.add_constructor("tag:yaml.org,2002:python/object/apply:eval", _known_value)
