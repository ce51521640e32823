"""Checkpoints that a diverging run keeps and names."""

import math

import pytest
import torch

from moco.common.errors import NumericError, UserError
from moco.engine.checkpoint import list_checkpoints, load_checkpoint
from moco.engine.saver import LossRange, largest_weight
from moco.engine.solver import LearningRate


def good_after(losses, weights=1.0):
    """Return the good checkpoint after these losses, with one named by its step after each."""
    loss_range = LossRange()
    for step, loss in enumerate(losses):
        loss_range.add(loss)
        loss_range.save(str(step), weights)
    return loss_range.good


@pytest.mark.parametrize(
    ("losses", "good"),
    [
        ([], ""),
        ([7.0], ""),  # no step has used the checkpoint's weights yet
        ([7.0, 6.0, 5.0], "1"),
        ([7.0, 6.0, 1e4], "0"),  # the loss of the weights after step 1
        ([7.0, 6.0, 1e4, 1e5, 1e6], "0"),
        ([7.0, 600.0, 6.0, 5.0], "2"),  # a peak possible with a high learning rate
        ([7.0, 1e4, 6.0, 5.0], "2"),  # back in range
        ([0.05, 5.5, 11.0], "1"),  # MoCo, whose queue starts with random keys
        ([*[0.001] * 2000, 0.2, 0.001], "2000"),  # losses near 0 may grow a hundredfold
        ([*[0.001] * 2000, 200.0, 200.0], "1998"),
    ],
)
def test_a_checkpoint_is_good_once_the_next_loss_was_in_range(losses, good):
    assert good_after(losses) == good


def test_neither_a_slowly_rising_loss_nor_large_weights_are_good():
    """Normalized queries have a bounded loss, whatever the weights."""
    assert int(good_after([7.0 * 50**i for i in range(8)])) <= 1
    assert good_after([7.0] * 5, weights=1e6) == "3"
    assert good_after([7.0] * 5, weights=3e29) == ""


def test_the_range_is_restored_from_a_checkpoint():
    one, losses = LossRange(), [7.0, 6.0, 5.0, 2.0, 1e9, 3.0]
    for step, loss in enumerate(losses):
        one.add(loss)
        saved = one.save(str(step), 1.0)
        again = LossRange()
        again.load(saved, str(step))
        assert vars(again) == vars(one)
        one = again
    assert one.good == "4"


def test_largest_weight():
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -4.0]]))
        model.bias.fill_(1)
        assert largest_weight(model) == 4
        model.bias.fill_(math.nan)
        assert math.isnan(largest_weight(model))


@pytest.fixture
def diverge(train, monkeypatch):
    """Return a function that trains 8 or 6 steps with the given learning rates at some steps."""
    usual = LearningRate.__call__

    def go(folder, rates):
        monkeypatch.setattr(
            LearningRate, "__call__", lambda self, step: rates.get(step) or usual(self, step)
        )
        more = {} if train.name == "pretrain" else {"SOLVER__MAX_EPOCHS": 4}
        train(folder, CHECKPOINT__EVERY_ITERS=1, **more)

    return go


def test_a_diverged_run_keeps_the_checkpoint_before(train, diverge, tmp_path):
    """From step 3 on weights are at least 1e7; KEEP 2 alone would leave only such checkpoints."""
    run = tmp_path / "run"
    rates = {2: 1e9} | dict.fromkeys(range(3, 8), 1e-09)
    diverge(run, rates)
    states = {path: load_checkpoint(path, train.form) for path in list_checkpoints(run)}
    assert [state["step"] for state in states.values()] == [2, 7, 8]
    weights = [max(float(x.abs().max()) for x in s["state_dict"].values()) for s in states.values()]
    assert weights[0] < 1e3 and min(weights[1:]) > 1e6
    assert load_checkpoint(run / (run / "last_checkpoint").read_text(), train.form)["step"] == 8


def test_a_moved_folder_is_not_created_again(train, monkeypatch, tmp_path):
    run, usual = tmp_path / "run", LearningRate.__call__

    def move(self, step):
        if step == 2:
            run.rename(tmp_path / "elsewhere")
        return usual(self, step)

    monkeypatch.setattr(LearningRate, "__call__", move)
    with pytest.raises(UserError, match=r"/run is gone: it was moved or deleted .* --resume"):
        train(run, CHECKPOINT__EVERY_ITERS=1)
    assert not run.exists()
    states = [load_checkpoint(p, train.form) for p in list_checkpoints(tmp_path / "elsewhere")]
    assert [state["step"] for state in states] == [1, 2]


@pytest.mark.slow
def test_the_message_names_the_good_checkpoint(train, diverge, tmp_path):
    """The loss diverges some steps after the learning rate."""
    run = tmp_path / "run"
    rates = {2: 1e9} | dict.fromkeys(range(3, 6), 1e-09) | {6: math.inf}
    with pytest.raises(NumericError) as error:
        diverge(run, rates)
    (kept,) = [p for p in list_checkpoints(run) if load_checkpoint(p, train.form)["step"] == 2]
    assert str(kept) in str(error.value)


def test_weights_that_are_not_finite_are_not_saved(train, diverge, tmp_path):
    with pytest.raises(NumericError, match=r"weight is .* after step 2; .*SOLVER\.BASE_LR"):
        diverge(tmp_path / "run", {2: math.inf})
    states = [load_checkpoint(p, train.form) for p in list_checkpoints(tmp_path / "run")]
    assert [state["step"] for state in states] == [1, 2]
