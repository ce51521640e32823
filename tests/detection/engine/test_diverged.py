"""Weights that are not finite stop the training before they are used."""

import pytest
import torch

from detection.train_net import main
from moco.common.errors import NumericError
from moco.common.run import metrics_lines, read_record

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "case",
    [
        (3, torch.nan, {"TEST.PRECISE_BN.ENABLED": True, "SOLVER.CHECKPOINT_PERIOD": 1}, [0, 1]),
        (3, torch.nan, {"SOLVER.CHECKPOINT_PERIOD": 1}, [0, 1]),
        (2, torch.inf, {"SOLVER.CHECKPOINT_PERIOD": 1}, [0]),
        (2, torch.nan, {"TEST.EVAL_PERIOD": 2}, []),
    ],
    ids=["PreciseBN", "the-last-checkpoint", "a-checkpoint", "an-evaluation"],
)
def test_weights_are_not_used(case, small_config, small_options, r18_file, tmp_path, monkeypatch):
    step, value, keys, checkpoints = case
    taken, optimize = [], torch.optim.SGD.step

    def diverge(optimizer, *args, **kwargs):
        optimize(optimizer, *args, **kwargs)
        taken.append(optimizer)
        if len(taken) == step:
            optimizer.param_groups[0]["params"][0].data[0] = value

    monkeypatch.setattr(torch.optim.SGD, "step", diverge)
    keys = {"TEST.PRECISE_BN.ENABLED": False, "DATALOADER.NUM_WORKERS": 0, **keys}
    argv = ["--config-file", small_config, "--engine", "embedded", *small_options]
    argv += [str(item) for pair in keys.items() for item in pair]
    argv += ["MODEL.WEIGHTS", str(r18_file), "OUTPUT_DIR", str(tmp_path)]
    with pytest.raises(NumericError, match=f"iteration {step - 1}: .* not finite") as caught:
        main(argv)
    assert caught.value.exit_code == 4
    record = read_record(tmp_path / "run.json")
    assert (record.status, record.iterations) == ("failed", step)
    assert not any("bbox/AP" in line for line in metrics_lines(tmp_path) or ())
    expected = [f"model_{iteration:07d}.pth" for iteration in checkpoints]
    assert sorted(path.name for path in tmp_path.glob("model_*.pth")) == expected
    for name in expected:
        state = torch.load(tmp_path / name, weights_only=True)["model"]
        assert all(torch.isfinite(value).all() for value in state.values()), name
