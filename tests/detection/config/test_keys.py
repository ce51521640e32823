"""Ranges and choices in the table of keys."""

import re

import pytest

from benchmarks.report.isolation import SAMPLING
from benchmarks.report.records import TASK_KEYS
from detection.config.checks import check_values
from detection.config.keys import DETECTRON2S, KEYS, OURS, protocol_sha256
from detection.config.recipe import FREE
from detection.config.task import add_transfer_config, default_task
from detection.embedded.supported import check_supported
from moco.common.cfgnode import flatten
from moco.common.errors import UserError
from moco.engine.keys import CLASSIFICATION, COMMON, PRETRAIN, RESUMABLE

NAN, INF = float("nan"), float("inf")
# Values just outside each range that is not a list of choices.
OUTSIDE = {
    "DATALOADER.NUM_WORKERS": [-1],
    "INPUT.FORMAT": ["GRB", "L"],
    "INPUT.LSJ.SCALE_RANGE": [[2.0, 0.1], [0.0, 1.0], [1.0]],
    "INPUT.LSJ.SIZE": [0],
    "INPUT.MAX_SIZE_TEST": [0],
    "INPUT.MAX_SIZE_TRAIN": [0],
    "INPUT.MIN_SIZE_TEST": [-1],
    "INPUT.MIN_SIZE_TRAIN": [(), (0,), (NAN,)],
    "INPUT.SEM_SEG_CROP_ASPECT": [0.0, NAN],
    "INPUT.SEM_SEG_CROP_SIZE": [-1],
    "INPUT.SEM_SEG_MAX_CLASS_SHARE": [0.0, 1.1],
    "INPUT.SEM_SEG_SCALE_RANGE": [[2.0, 0.5], [0.0, 1.0]],
    "INPUT.SEM_SEG_SIZE": [-1],
    "MODEL.BACKBONE.CACHE_GB": [-0.1],
    "MODEL.PIXEL_MEAN": [[1.0, 2.0], [1.0, 2.0, INF]],
    "MODEL.PIXEL_STD": [[1.0, 0.0, 1.0]],
    "MODEL.SEM_SEG_HEAD.AUXILIARY_WEIGHT": [-0.1],
    "MODEL.SEM_SEG_HEAD.DROPOUT": [-0.1, 1.0],
    "MODEL.CONVNEXT.DROP_PATH": [-0.1, 1.0],
    "MODEL.SWIN.DROP_PATH": [-0.1, 1.0],
    "MODEL.TIMM.DROP_PATH": [-0.1, 1.0],
    "SEED": [2**31],
    "SOLVER.BACKBONE_LR_FACTOR": [0.0, NAN],
    "SOLVER.BASE_LR": [0.0, NAN, INF],
    "SOLVER.BETAS": [(0.9, 1.0), (0.9,), (-0.1, 0.9)],
    "SOLVER.CHECKPOINT_PERIOD": [0],
    "SOLVER.IMS_PER_BATCH": [0],
    "SOLVER.LR_DECAY": [0.0, 1.1],
    "SOLVER.MAX_ITER": [0],
    "SOLVER.POLY_LR_POWER": [0.0, NAN],
    "SOLVER.WARMUP_ITERS": [-1],
    "SOLVER.WEIGHT_DECAY_EMBED": [-0.1],
    "TEST.COCO_MAX_DETECTIONS": [0],
    "TEST.DETECTIONS_PER_IMAGE": [0],
    "TEST.EVAL_PERIOD": [-1],
    "TEST.PRECISE_BN.NUM_ITER": [0],
    "TEST.SEM_SEG_REDUCED_SIZE": [-1],
    "TEST.SEM_SEG_STRIDE": [-1],
    "TEST.SEM_SEG_WINDOW": [-1],
}
RANGED = [name for name, key in KEYS.items() if key.range]
EMBEDDED = [name for name, key in KEYS.items() if key.embedded]


def with_value(key, value):
    """Return the defaults with one key changed, whatever its type."""
    cfg = default_task()
    *parents, last = key.split(".")
    node = cfg
    for parent in parents:
        node = node[parent]
    node[last] = value
    return cfg


@pytest.mark.parametrize("name", RANGED)
def test_values_out_of_range_are_refused(name):
    key = KEYS[name]
    key.check(name, key.default)
    outside = ["no such value"] if key.range.choices else OUTSIDE[name]
    for value in (None, *outside):
        with pytest.raises(UserError, match=rf"^{re.escape(name)}: got ") as error:
            check_values(with_value(name, value))
        for choice in key.range.choices or [key.range.expected]:
            assert str(choice) in str(error.value)


@pytest.mark.parametrize("name", EMBEDDED)
def test_values_that_the_embedded_engine_lacks_are_refused(name):
    expected = rf"^{re.escape(name)} no such value: the embedded engine has only "
    with pytest.raises(UserError, match=expected) as error:
        check_supported(with_value(name, "no such value"))
    assert all(str(choice) in str(error.value) for choice in KEYS[name].embedded)


def test_each_key_is_in_one_table():
    assert not DETECTRON2S.keys() & OURS.keys()
    for keys in (PRETRAIN, CLASSIFICATION):
        assert list(keys)[: len(COMMON)] == list(COMMON)
        assert all(keys[name] is key for name, key in COMMON.items())


def test_keys_that_are_listed_elsewhere_exist():
    assert set(FREE) <= KEYS.keys()
    assert set(RESUMABLE) <= PRETRAIN.keys()
    assert set(SAMPLING) <= TASK_KEYS.keys()


def test_defaults_are_not_shared():
    changed = default_task()
    changed.MODEL.PIXEL_MEAN[0] = 1.0
    changed.DATASETS.VOC_CLASSES.append("x")
    assert default_task().MODEL.PIXEL_MEAN[0] == 103.53
    assert list(default_task().DATASETS.VOC_CLASSES) == []


def test_only_values_other_than_the_default_are_hashed():
    config = flatten(default_task())
    assert protocol_sha256(config) == protocol_sha256({})
    assert protocol_sha256(config | {"LOG.LOGGERS": ("wandb",)}) == protocol_sha256({})
    changed = {**config, "SOLVER.GAMMA": 0.2}
    assert protocol_sha256(changed) == protocol_sha256({"SOLVER.GAMMA": 0.2})
    assert protocol_sha256(changed) != protocol_sha256({})


@pytest.mark.detectron2
def test_keys_and_defaults_are_detectron2s(detectron2):
    """Every key of get_cfg() is in the table, and `add_transfer_config` adds all others."""
    from detectron2.config import get_cfg

    upstream, defaults = flatten(get_cfg()), flatten(default_task())
    for key, value in upstream.items():
        assert key in defaults, key
        assert (defaults[key], type(defaults[key])) == (value, type(value)), key
    cfg = get_cfg()
    add_transfer_config(cfg)
    assert set(flatten(cfg)) == set(defaults)
