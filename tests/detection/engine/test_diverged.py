"""Trainings whose weights are no longer finite: refused on both engines before they are used."""

import pytest
import torch

from detection.train_net import main
from moco.common.errors import NumericError
from moco.common.run import metrics_lines, read_record

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "step, opts",
    [
        (3, ("TEST.PRECISE_BN.ENABLED", "True")),
        (3, ("TEST.PRECISE_BN.ENABLED", "False")),
        (2, ("TEST.PRECISE_BN.ENABLED", "False", "TEST.EVAL_PERIOD", "2")),
    ],
    ids=["PreciseBN", "the-last-checkpoint", "an-evaluation"],
)
def test_weights_are_not_used(
    step, opts, engine, small_config, small_options, r18_file, tmp_path, monkeypatch
):
    taken, optimize = [], torch.optim.SGD.step

    def diverge(optimizer, *args, **kwargs):
        optimize(optimizer, *args, **kwargs)
        taken.append(optimizer)
        if len(taken) == step:
            optimizer.param_groups[0]["params"][0].data[0] = torch.nan

    monkeypatch.setattr(torch.optim.SGD, "step", diverge)
    argv = ["--config-file", small_config, "--engine", engine, *small_options, *opts]
    argv += ["MODEL.WEIGHTS", str(r18_file), "SOLVER.CHECKPOINT_PERIOD", "1" if step == 3 else "5"]
    argv += ["DATALOADER.NUM_WORKERS", "0", "OUTPUT_DIR", str(tmp_path)]
    with pytest.raises(NumericError, match=f"iteration {step - 1}: .* not finite") as caught:
        main(argv)
    assert caught.value.exit_code == 4
    assert read_record(tmp_path / "run.json").status == "failed"
    assert not any("bbox/AP" in line for line in metrics_lines(tmp_path) or ())
    for path in tmp_path.glob("model_*.pth"):
        state = torch.load(path, weights_only=True)["model"]
        assert all(torch.isfinite(value).all() for value in state.values()), path.name
    assert (tmp_path / "model_0000001.pth").exists() == (step == 3)
    assert not (tmp_path / "model_final.pth").exists()
