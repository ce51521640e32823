import pytest

from moco.engine.schedule import LearningRate


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


def test_exponential_of_the_papers_billion_images():
    """Sec. 4: 0.12, times 0.9 after every 62.5k iterations, 1.25M in all; never held by epochs."""
    lr = LearningRate(
        0.12, "exponential", 1_250_000, steps_per_epoch=917_968, gamma=0.9, decay_every_iters=62_500
    )
    at = {0: 0.12, 62_499: 0.12, 62_500: 0.108, 125_000: 0.0972, 917_968: 0.12 * 0.9**14}
    at[1_249_999] = 0.12 * 0.9**19
    assert {step: pytest.approx(lr(step)) for step in at} == at


def test_exponential_as_a_list():
    lr = LearningRate(1.0, "exponential", 7, 3, gamma=0.5, decay_every_iters=2, warmup_iters=3)
    expected = [1 / 3, 2 / 3, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert [lr(step) for step in range(7)] == pytest.approx(expected)


def test_a_constant_rate():
    lr = LearningRate(0.5, "step", 4, steps_per_epoch=2)
    assert [lr(step) for step in range(4)] == [0.5] * 4
