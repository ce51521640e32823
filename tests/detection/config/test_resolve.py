"""Device, precision and metric of a task."""

import pytest
import torch

from detection.config.keys import protocol_sha256
from detection.config.task import draft_task, load_task, resolved_config
from tests.conftest import ROOT


def test_an_unset_device_is_found(small_config, voc_folder, monkeypatch):
    opts = ["MODEL.WEIGHTS", "random", "DATASETS.VOC_DIR", str(voc_folder)]
    opts += ["SOLVER.PRECISION", "fp32"]
    for available, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=available: answer)
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=int(available): number)
        assert load_task(small_config, opts, "embedded").cfg.MODEL.DEVICE == device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    opts += ["MODEL.DEVICE", "cpu"]
    assert load_task(small_config, opts, "embedded", num_processes=2).cfg.MODEL.DEVICE == "cpu"


def test_precision(voc_folder, monkeypatch):
    """The chosen precision is in the configuration, in a note and in the protocol."""

    def resolved(*keys, fast=True):
        monkeypatch.setattr("moco.engine.device.has_fast_bf16", lambda device: fast)
        where = ["DATASETS.VOC_DIR", str(voc_folder), "MODEL.WEIGHTS", "random", "SEED", "0"]
        path = ROOT / "configs" / "voc" / "faster_rcnn_R_18_C4_small.yaml"
        task = load_task(path, [*where, "MODEL.DEVICE", "cpu", *keys], "embedded")
        solver, last = task.cfg.SOLVER, task.cfg.MODEL.CHANNELS_LAST
        told = [note for note in task.notes if note.startswith("SOLVER.PRECISION auto: ")]
        slower = any("slower than fp32" in note for note in task.notes)
        assert slower is (solver.PRECISION == "bf16" and not fast)
        return (solver.PRECISION, solver.AMP.ENABLED, last, len(told)), resolved_config(task)

    (auto, bf16), (slow, fp32) = resolved(), resolved(fast=False)
    assert (auto, slow) == (("bf16", True, True, 1), ("fp32", False, False, 1))
    assert resolved("SOLVER.PRECISION", "fp32") == (("fp32", False, False, 0), fp32)
    amp = ("SOLVER.PRECISION", "fp32", "SOLVER.AMP.ENABLED", "True")
    assert resolved(*amp) == resolved(*amp, fast=False) == (("bf16", True, True, 0), bf16)
    assert resolved("MODEL.CHANNELS_LAST", "False")[0] == ("bf16", True, False, 1)
    assert protocol_sha256(bf16) != protocol_sha256(fp32)
    del fp32["SOLVER.PRECISION"]  # As in a record from before the key existed.
    assert protocol_sha256(fp32) == protocol_sha256(resolved(fast=False)[1])


@pytest.mark.parametrize(
    ("keys", "metric"),
    [
        ((), "coco"),
        (("DATASETS.VOC_METRIC", "voc"), "pascal_voc"),
        (("DATASETS.VOC_YEAR", "2012"), "pascal_voc"),
    ],
)
def test_a_custom_folder_has_cocos_metric_unless_another_is_set(
    small_config, voc_folder, keys, metric
):
    opts = ["MODEL.WEIGHTS", "random", "SEED", "0", "DATASETS.VOC_DIR", str(voc_folder), *keys]
    task = load_task(small_config, opts, "embedded")
    assert task.test.evaluator_type == metric
    assert draft_task(small_config, opts).cfg.DATASETS.VOC_METRIC == task.cfg.DATASETS.VOC_METRIC
    # With the hash of 11-point records, a table would average both.
    old = resolved_config(task) | {"DATASETS.VOC_METRIC": "voc", "DATASETS.VOC_YEAR": 2007}
    assert (protocol_sha256(resolved_config(task)) == protocol_sha256(old)) is ("voc" in keys)


def test_a_resumed_run_keeps_its_metric(small_config, voc_folder, tmp_path):
    opts = ["MODEL.WEIGHTS", "random", "SEED", "0", "DATASETS.VOC_DIR", str(voc_folder)]
    opts += ["OUTPUT_DIR", str(tmp_path)]
    begun = load_task(small_config, [*opts, "DATASETS.VOC_METRIC", "voc"], "embedded")
    (tmp_path / "config.yaml").write_text(begun.cfg.dump())
    resumed = load_task(small_config, opts, "embedded", resume=True)
    assert resumed.test.evaluator_type == "pascal_voc"
    assert "DATASETS.VOC_METRIC voc: as the run was started" in resumed.notes
    assert load_task(small_config, opts, "embedded").test.evaluator_type == "coco"
