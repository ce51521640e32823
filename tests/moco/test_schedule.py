import pytest

from moco.schedule import LearningRate


def test_steps_of_the_paper():
    """Sec. 4: 0.03, times 0.1 at epochs 120 and 160 of 200."""
    lr = LearningRate(0.03, "step", 2000, steps_per_epoch=10, milestones_epochs=(120, 160))
    at = {0: 0.03, 1199: 0.03, 1200: 0.003, 1599: 0.003, 1600: 0.0003, 1999: 0.0003}
    assert {step: pytest.approx(lr(step)) for step in at} == at


def test_cosine_per_epoch_is_the_official_one():
    """adjust_learning_rate of main_moco.py: one value per epoch, never 0."""
    lr = LearningRate(1.0, "cosine", 8, steps_per_epoch=2)
    expected = [1, 1, 0.853553, 0.853553, 0.5, 0.5, 0.146447, 0.146447]
    assert [lr(step) for step in range(8)] == pytest.approx(expected, abs=1e-6)


def test_cosine_per_step():
    lr = LearningRate(2.0, "cosine", 4, steps_per_epoch=4, per_epoch=False)
    assert [lr(step) for step in range(4)] == pytest.approx([2, 1.707107, 1, 0.292893], abs=1e-6)


def test_warmup_rises_to_the_schedule():
    lr = LearningRate(1.0, "step", 10, steps_per_epoch=10, warmup_iters=4)
    assert [lr(step) for step in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
