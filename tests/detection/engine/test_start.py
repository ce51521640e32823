"""Digests of a run's start: equal for equal seeds, different for different seeds."""

import json

import pytest
import torch
from PIL import Image
from torch import nn

from detection.config.task import load_task
from detection.config.trained import read_start
from detection.engine import launch
from detection.engine.job import Job
from detection.engine.start import batch_digest, check_frozen, frozen_digest
from detection.train_net import main
from moco.common.run import RunFolder, read_record, write_record
from tests.benchmarks.report.fake_runs import record
from tests.detection.parity.test_trainer import KEYS
from tests.oracles.tiny_voc import write_voc


def batch(number, channels=slice(None)):
    image = torch.arange(3 * 16 * 24).reshape(3, 16, 24).add(number)[channels].to(torch.uint8)
    return [{"image": image, "image_id": number, "file_name": "x/1.jpg"}]


def test_a_batch_is_its_images_however_their_channels_are_ordered():
    assert batch_digest(batch(1)) == batch_digest(batch(1, [2, 1, 0])) != batch_digest(batch(2))
    [sample] = batch(1)
    flipped = {**sample, "image": sample["image"].flip(2)}
    assert batch_digest([flipped]) != batch_digest([sample])
    assert batch_digest([sample] * 2) != batch_digest([sample])


def test_records_with_and_without_it(tmp_path):
    old = {"head": {"x": "1"}, "batches": ["2", "3"]}  # of earlier versions
    for start in (old, {"batches": ["2"]}):
        assert read_record(write_record(tmp_path, record(start=start))).start == start
    path = write_record(tmp_path, record())
    fields = json.loads(path.read_text())
    del fields["start"]
    path.write_text(json.dumps(fields))
    assert read_record(path).start is None


@pytest.mark.slow
def test_equal_seeds_and_images_start_equally(tmp_path):
    voc = write_voc(tmp_path / "voc", {"train": 10, "val": 2})
    starts = {}
    for name, keys in {"a": {}, "b": {}, "c": {"SEED": 43}, "encoded": {}}.items():
        if name == "encoded":  # Names, sizes and annotations stay.
            for path in (voc / "JPEGImages").iterdir():
                Image.open(path).save(path, quality=60)
        more = {"DATASETS.VOC_DIR": voc, "OUTPUT_DIR": tmp_path / name, "SOLVER.STEPS": ()}
        every = {**KEYS, **more, "SOLVER.MAX_ITER": 2, "SOLVER.WARMUP_ITERS": 0, **keys}
        opts = [str(item) for pair in every.items() for item in pair]
        with RunFolder(tmp_path / name):
            launch.run(Job("embedded", load_task(None, opts, "embedded").cfg))
        starts[name] = read_start(tmp_path / name)
    assert starts["a"] == starts["b"] and len(starts["a"]["batches"]) == 1
    assert starts["a"]["batches"] != starts["c"]["batches"]
    assert starts["a"]["batches"] != starts["encoded"]["batches"]


@pytest.mark.slow
def test_a_frozen_backbone_stays_as_it_was(tmp_path, small_config, small_options, engine):
    """Stem to res4 of a ResNet-18 are frozen with their statistics."""
    out = tmp_path / "run"
    keys = ["MODEL.WEIGHTS", "random", "MODEL.BACKBONE.FREEZE_AT", "4", "OUTPUT_DIR", str(out)]
    main(["--config-file", small_config, "--engine", engine, *small_options, *keys])
    frozen = read_record(out / "run.json").start["frozen"]
    assert frozen["tensors"] == 90
    assert frozen["sha256"] == frozen["sha256_after"]


def test_frozen_tensors_are_those_of_the_backbone_that_do_not_train():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
            self.head = nn.Linear(4, 2).requires_grad_(False)

    model = Detector()
    assert frozen_digest(model) is None
    model.backbone[0].requires_grad_(False)
    assert frozen_digest(model)["tensors"] == 2
    model.backbone[1].requires_grad_(False)  # Its statistics are frozen as well.
    before = frozen_digest(model)
    assert before["tensors"] == 7
    model.backbone[2].weight.data.add_(1)
    model.head.weight.data.add_(1)
    assert frozen_digest(model) == before
    start = {"batches": [], "frozen": before}
    check_frozen(start, frozen_digest(model))
    assert start["frozen"]["sha256_after"] == before["sha256"]
    model.backbone(torch.rand(1, 3, 4, 4))  # Training mode updates the statistics.
    with pytest.raises(RuntimeError, match="frozen"):
        check_frozen({**start, "frozen": before}, frozen_digest(model))
