"""Learning-rate schedules, compared with explicit lists."""

import pytest

from moco.common.errors import UserError
from moco.engine.config import default_cfg
from moco.engine.keys import COMMON
from moco.engine.solver import SCHEDULES, LearningRate, Length, check_warmup


def rates(total_steps, steps_per_epoch, at=None, **keys):
    """Return the learning rates at the given steps, or at all."""
    solver = default_cfg(COMMON).SOLVER
    solver.merge_from_list([word for pair in keys.items() for word in pair])
    rate = LearningRate(solver, Length(total_steps, steps_per_epoch))
    return [rate(step) for step in (range(total_steps) if at is None else at)]


def test_steps_of_the_paper():
    """Sec. 4: 0.03, times 0.1 at epochs 120 and 160 of 200."""
    at = {0: 0.03, 1199: 0.03, 1200: 0.003, 1599: 0.003, 1600: 0.0003, 1999: 0.0003}
    assert rates(2000, 10, at) == pytest.approx(list(at.values()))


def test_exponential_of_the_papers_billion_images():
    """Sec. 4: 0.12, times 0.9 after every 62.5k iterations, 1.25M in all; never held by epochs."""
    at = {0: 0.12, 62_499: 0.12, 62_500: 0.108, 125_000: 0.0972, 917_968: 0.12 * 0.9**14}
    at[1_249_999] = 0.12 * 0.9**19
    got = rates(1_250_000, 917_968, at, SCHEDULE="exponential", BASE_LR=0.12, GAMMA=0.9)
    assert got == pytest.approx(list(at.values()))


@pytest.mark.parametrize(
    ("steps", "keys", "expected"),
    [
        (4, {"SCHEDULE": "cosine", "LR_UPDATE": "iter"}, [1, 0.853553, 0.5, 0.146447]),
        # adjust_learning_rate of main_moco.py: one value per epoch, never 0.
        (16, {"SCHEDULE": "cosine"}, [x for x in (1, 0.853553, 0.5, 0.146447) for _ in range(4)]),
        (6, {"WARMUP_ITERS": 4, "MILESTONES_EPOCHS": ()}, [0.25, 0.5, 0.75, 1, 1, 1]),
        (
            7,
            {"SCHEDULE": "exponential", "GAMMA": 0.5, "DECAY_EVERY_ITERS": 2, "WARMUP_ITERS": 3},
            [1 / 3, 2 / 3, 0.5, 0.5, 0.25, 0.25, 0.125],
        ),
        (4, {"MILESTONES_EPOCHS": ()}, [1] * 4),
        (6, {"SCHEDULE": "warmup_cosine", "WARMUP_ITERS": 2}, [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules_as_lists(steps, keys, expected):
    assert rates(steps, 4, BASE_LR=1.0, **keys) == pytest.approx(expected, abs=1e-6)


def test_a_warmup_in_epochs_follows_the_data():
    of_imagenet = rates(4, 2, BASE_LR=1.0, WARMUP_EPOCHS=1.0, MILESTONES_EPOCHS=())
    assert of_imagenet == rates(4, 2, BASE_LR=1.0, WARMUP_ITERS=2, MILESTONES_EPOCHS=())


@pytest.mark.parametrize(
    ("images", "keys", "fits"),
    [
        # MoCo v3's 300 epochs of 4096 images, on ImageNet, ImageNet-100 and 50,000 images.
        (1_281_167, {"WARMUP_ITERS": 12480}, True),
        (126_689, {"WARMUP_ITERS": 12480}, False),
        (50_000, {"WARMUP_ITERS": 12480}, False),
        (50_000, {"WARMUP_EPOCHS": 40.0}, True),
        (50_000, {"WARMUP_EPOCHS": 300.0}, False),
        (50_000, {}, True),
    ],
)
def test_a_warmup_as_long_as_the_run_is_refused(images, keys, fits):
    solver = default_cfg(COMMON).SOLVER
    solver.merge_from_list([word for pair in keys.items() for word in pair])
    solver.BATCH_SIZE = 4096
    epoch = images // 4096
    length = Length(300 * epoch, epoch)
    if fits:
        check_warmup(solver, length)
        return
    key = next(iter(keys))
    with pytest.raises(UserError, match=rf"SOLVER.{key}: .*300 epochs of {epoch} steps"):
        check_warmup(solver, length)


def test_a_schedule_from_outside(register):
    def halving(solver, length):
        return lambda step: solver.GAMMA**step

    register(SCHEDULES, halving)
    assert rates(3, 3, SCHEDULE="halving", BASE_LR=8.0, GAMMA=0.5) == [8, 4, 2]
