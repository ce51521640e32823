"""Scaling of batch, learning rate and schedule to the number of processes."""

import pytest

from detection.config.resolve import scale_to_processes
from detection.config.task import default_task
from moco.common.cfgnode import flatten


def config(reference: int):
    """Return the configuration of COCO 1x for `reference` processes."""
    cfg = default_task()
    values = {
        "SOLVER.REFERENCE_WORLD_SIZE": reference,
        "SOLVER.IMS_PER_BATCH": 16,
        "SOLVER.BASE_LR": 0.02,
        "SOLVER.MAX_ITER": 90000,
        "SOLVER.STEPS": (60000, 80000),
        "SOLVER.WARMUP_ITERS": 1000,
        "SOLVER.CHECKPOINT_PERIOD": 5000,
        "TEST.EVAL_PERIOD": 3000,
    }
    cfg.merge_from_list([item for pair in values.items() for item in pair])
    return cfg


def test_by_hand_from_eight_to_two():
    cfg = config(8)
    scaled, warning = scale_to_processes(cfg, 2)
    solver = cfg.SOLVER
    assert (solver.IMS_PER_BATCH, solver.BASE_LR) == (4, 0.005)
    assert (solver.MAX_ITER, solver.STEPS) == (360000, (240000, 320000))
    assert (solver.WARMUP_ITERS, solver.CHECKPOINT_PERIOD) == (4000, 20000)
    assert cfg.TEST.EVAL_PERIOD == 12000
    assert "batch 16 -> 4" in scaled and "0.02 -> 0.005" in scaled and "90000 -> 360000" in scaled
    assert "not equivalent" in warning and "BN sees 4 images at once instead of 16" in warning
    # The number of epochs stays.
    assert solver.MAX_ITER * solver.IMS_PER_BATCH == 90000 * 16


@pytest.mark.detectron2
@pytest.mark.parametrize("processes", [1, 2, 3, 8, 16, 64])
def test_the_rule_is_detectron2s(processes, detectron2):
    from detectron2.engine import DefaultTrainer

    cfg = config(8)
    theirs = flatten(DefaultTrainer.auto_scale_workers(cfg.clone(), processes))
    scale_to_processes(cfg, processes)
    assert flatten(cfg) == theirs
    # Detectron2's trainer scales a second time, which changes nothing.
    assert flatten(DefaultTrainer.auto_scale_workers(cfg.clone(), processes)) == theirs


@pytest.mark.parametrize("reference", [0, 4])
def test_without_need_nothing_changes(reference):
    cfg = config(reference)
    before = flatten(cfg)
    assert scale_to_processes(cfg, 4) == []
    assert flatten(cfg) == before
