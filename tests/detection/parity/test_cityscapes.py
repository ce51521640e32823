"""UPerNet on Cityscapes in a miniature: rectangular crops, equal on both engines."""

import pytest

from detection.train_net import main
from moco.common.run import read_record
from tests.oracles.small_tasks import ENGINES, logged, narrow_file, run_both
from tests.oracles.tiny_cityscapes import write_cityscapes

TASK = "cityscapes/upernet_R_50_80k"


@pytest.mark.detectron2
@pytest.mark.slow
@pytest.mark.usefixtures("detectron2", "fresh_cache")
def test_upernet_is_one_run_on_both_engines(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    write_cityscapes(tmp_path, {"train": 4, "val": 2})
    weights = narrow_file(50, tmp_path)
    record = run_both(TASK, weights, tmp_path, "SOLVER.MAX_ITER", 5)
    assert record.iterations == 5
    assert [record.config[f"INPUT.SEM_SEG_CROP_{key}"] for key in ("SIZE", "ASPECT")] == [64, 2.0]
    for engine in ENGINES:
        folder = tmp_path / engine
        assert {"loss_sem_seg", "loss_sem_seg_auxiliary"} <= logged(folder).keys()
        assert main(["--engine", engine, "--eval-only", "--resume", "OUTPUT_DIR", str(folder)]) == 0
        assert read_record(folder / "inference" / "run.json").metrics == record.metrics
