"""Backbones that run image by image: equality with and without the cache, what is refused."""

import json

import pytest
import torch

from detection.config.task import load_task
from detection.embedded.model import build_model
from detection.engine import launch, per_image
from detection.engine.job import Job, Processes
from detection.engine.per_image import run_per_image
from moco.common.errors import UserError
from moco.common.files import load_torch
from moco.common.run import RunFolder
from tests.detection.parity.test_model import CONVNEXT, SWIN, TIMM
from tests.oracles import tiny_detector as tiny
from tests.oracles.tiny_voc import write_voc

KEYS = {
    "MODEL.WEIGHTS": "random",
    "MODEL.MASK_ON": False,
    "MODEL.ROI_HEADS.NUM_CLASSES": 3,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.05,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 16,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 30,
    "MODEL.BACKBONE.PER_IMAGE": True,
    "INPUT.MIN_SIZE_TRAIN": (90,),
    "INPUT.MIN_SIZE_TEST": 96,
    "DATALOADER.NUM_WORKERS": 0,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.MAX_ITER": 20,
    "SOLVER.STEPS": (),
    "SOLVER.WARMUP_ITERS": 2,
    "TEST.EVAL_PERIOD": 10,
    "SEED": 5,
}
R18 = {
    **tiny.FPN,
    "MODEL.RESNETS.DEPTH": 18,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,
    **KEYS,
    "MODEL.BACKBONE.FREEZE_AT": 5,
    "TEST.PRECISE_BN.ENABLED": True,
    "TEST.PRECISE_BN.NUM_ITER": 2,
}
# Networks with drop path, which a frozen network does not have.
FROM_STRIDE_8 = {
    "MODEL.FPN.IN_FEATURES": ["res3", "res4", "res5"],
    "MODEL.RPN.IN_FEATURES": ["p3", "p4", "p5", "p6"],
    "MODEL.ROI_HEADS.IN_FEATURES": ["p3", "p4", "p5"],
    "MODEL.ANCHOR_GENERATOR.SIZES": [[16], [32], [64], [128]],
}
NETWORKS = {
    "convnext": {**CONVNEXT, **KEYS, "MODEL.BACKBONE.FREEZE_AT": 5},
    "r18": R18,
    "r18-bf16-channels-last": {**R18, "SOLVER.PRECISION": "bf16", "MODEL.CHANNELS_LAST": True},
    "swin": {**SWIN, **KEYS, "MODEL.BACKBONE.FREEZE_AT": 5},
    "swin-from-stride-8": {**SWIN, **KEYS, **FROM_STRIDE_8, "MODEL.BACKBONE.FREEZE_AT": 5},
    "timm": {**TIMM, **KEYS, "MODEL.BACKBONE.FREEZE_AT": -1},
    "vit": {**tiny.VIT_SFP, **KEYS, "MODEL.BACKBONE.FREEZE_AT": -1},
    "vit-from-stride-8": {
        **tiny.VIT_SFP,
        **KEYS,
        **FROM_STRIDE_8,
        "MODEL.BACKBONE.FREEZE_AT": -1,
    },
    "vit-fpn": {**tiny.VIT_FPN, **KEYS, "MODEL.BACKBONE.FREEZE_AT": -1},
}
C4 = {**tiny.NARROW_R50, **KEYS, "MODEL.BACKBONE.FREEZE_AT": 5}


@pytest.fixture(scope="module")
def voc(tmp_path_factory):
    return write_voc(tmp_path_factory.mktemp("voc") / "voc", {"train": 5, "val": 2})


def load(voc, out, keys, engine="embedded"):
    every = {**keys, "DATASETS.VOC_DIR": voc, "OUTPUT_DIR": out}
    return load_task(None, [str(item) for pair in every.items() for item in pair], engine).cfg


def train(voc, out, keys, engine="embedded", processes=1):
    """Return the model of a run, and the text of its log, without times, and of its metrics."""
    cfg = load(voc, out, keys, engine)
    with RunFolder(out):
        result = launch.run(Job(engine, cfg, processes=Processes(processes)))
    lines = [json.loads(line) for line in (out / "metrics.json").read_text().splitlines()]
    timed = ("data_time", "rank_data_time", "time", "eta_seconds")
    log = [{k: v for k, v in line.items() if k not in timed} for line in lines]
    # As text, because NaN differs from itself.
    return load_torch(out / "model_final.pth")["model"], json.dumps([log, result.metrics])


def assert_same(one, other):
    tiny.assert_same(one[0], other[0])
    assert one[1] == other[1]
    assert "total_loss" in one[1] and "bbox/AP" in one[1]


def entries(folder):
    return sorted(folder.glob("*/*.safetensors"))


@pytest.mark.parametrize(
    "name",
    [n if n in ("r18", "vit") else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS],
)
def test_a_run_is_the_same_without_a_cache_and_with_that_of_another(name, voc, tmp_path):
    cached = {**NETWORKS[name], "MODEL.BACKBONE.CACHE_DIR": tmp_path / "cache"}
    without = train(voc, tmp_path / "without", {**NETWORKS[name], "MODEL.BACKBONE.CACHE_GB": 0})
    assert_same(train(voc, tmp_path / "first", cached), without)
    written = {path: path.stat().st_mtime_ns for path in entries(tmp_path / "cache")}
    if "bf16" not in name:  # PreciseBN and the evaluation compute in fp32
        assert len(written) == 5 * 2 + 2  # flipped and not, and the test images
    assert_same(train(voc, tmp_path / "second", cached), without)
    assert {path: path.stat().st_mtime_ns for path in entries(tmp_path / "cache")} == written


def test_an_evaluation_alone_has_the_same_numbers(voc, tmp_path):
    keys = {**R18, "SOLVER.MAX_ITER": 4, "TEST.EVAL_PERIOD": 0}
    _, text = train(voc, tmp_path / "run", keys)
    cfg = load(voc, tmp_path / "run", keys)
    (tmp_path / "run/config.yaml").write_text(cfg.dump(), encoding="utf-8")
    words = ["MODEL.WEIGHTS", tmp_path / "run/model_final.pth", "OUTPUT_DIR", tmp_path / "alone"]
    task = load_task(tmp_path / "run/config.yaml", [*map(str, words)], "embedded", eval_only=True)
    with RunFolder(tmp_path / "alone"):
        found = launch.run(Job("embedded", task.cfg, eval_only=True)).metrics
    assert json.dumps(found) == json.dumps(json.loads(text)[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r18", "vit"])
def test_two_processes_share_a_cache(name, voc, tmp_path):
    cached = {**NETWORKS[name], "MODEL.BACKBONE.CACHE_DIR": tmp_path / "cache"}
    without = {**NETWORKS[name], "MODEL.BACKBONE.CACHE_GB": 0}
    expected = train(voc, tmp_path / "without", without, processes=2)
    for run in ("first", "second"):
        assert_same(train(voc, tmp_path / run, cached, processes=2), expected)
    assert len(entries(tmp_path / "cache")) == 5 * 2 + 2


@pytest.mark.detectron2
@pytest.mark.parametrize("name", sorted({*NETWORKS} - {"timm"}))
def test_both_engines_are_equal(name, voc, tmp_path, detectron2):
    ours = train(voc, tmp_path / "embedded", NETWORKS[name])
    theirs = train(voc, tmp_path / "detectron2", NETWORKS[name], "detectron2")
    tiny.assert_same(theirs[0], ours[0])
    assert json.dumps(json.loads(theirs[1])[1]) == json.dumps(json.loads(ours[1])[1])


def random_sample(*size):
    return {"image": torch.randint(0, 256, (3, *size), dtype=torch.uint8)}


@pytest.mark.parametrize("keys", [R18, C4, NETWORKS["swin"]], ids=["r18", "c4", "swin"])
def test_maps_are_those_of_the_image_alone(keys, voc, tmp_path):
    cfg = load(voc, tmp_path, {**keys, "MODEL.BACKBONE.CACHE_GB": 0})
    model = build_model(cfg).eval()
    samples = [random_sample(90, 130), random_sample(40, 200)]
    net = getattr(model.backbone, "bottom_up", model.backbone)
    alone = [net(model.images([sample])[1]) for sample in samples]
    padded = net(model.images(samples)[1])
    run_per_image(model, cfg, "embedded")
    found = {}
    net.register_forward_hook(lambda module, inputs, output: found.update(output))
    model(samples)
    assert found.keys() == padded.keys()
    for i, maps in enumerate(alone):
        changed = []
        for name, x in maps.items():
            height, width = x.shape[-2:]
            assert found[name].shape == padded[name].shape
            assert torch.equal(found[name][i, :, :height, :width], x[0])
            changed.append(not torch.equal(padded[name][i, :, :height, :width], x[0]))
        assert any(changed)


def test_a_damaged_entry_is_computed_again(voc, tmp_path):
    cached = {**R18, "MODEL.BACKBONE.CACHE_DIR": tmp_path / "cache"}
    expected = train(voc, tmp_path / "first", cached)
    flipped, cut, empty, text = entries(tmp_path / "cache")[:4]
    before = {path: path.read_bytes() for path in (flipped, cut, empty, text)}
    content = bytearray(before[flipped])
    content[-5] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(before[cut][:-100])
    empty.write_bytes(b"")
    text.write_text("maps")
    assert_same(train(voc, tmp_path / "second", cached), expected)
    assert {path: path.read_bytes() for path in before} == before


def test_the_cache_of_a_run_is_limited_and_removed(voc, tmp_path, caplog):
    caplog.set_level("INFO")
    keys = {**R18, "SOLVER.MAX_ITER": 4, "TEST.EVAL_PERIOD": 0}
    train(voc, tmp_path / "whole", {**keys, "MODEL.BACKBONE.CACHE_DIR": tmp_path / "cache"})
    limit = sum(path.stat().st_size for path in entries(tmp_path / "cache")) / 2
    limited = {**keys, "MODEL.BACKBONE.CACHE_GB": limit / 1e9}
    limited_folder = {"MODEL.BACKBONE.CACHE_DIR": tmp_path / "limited"}
    train(voc, tmp_path / "run", {**limited, **limited_folder})
    sizes = [path.stat().st_size for path in entries(tmp_path / "limited")]
    assert 0 < sum(sizes) <= limit
    assert caplog.text.count("is reached; further maps are computed each time") == 1


def test_the_forecast_is_the_bytes_written(voc, tmp_path, caplog):
    caplog.set_level("INFO")
    keys = {**R18, "MODEL.BACKBONE.CACHE_DIR": tmp_path / "cache"}
    train(voc, tmp_path / "run", keys)
    written = entries(tmp_path / "cache")
    forecast = float(caplog.text.partition("forecast: ")[2].split()[0])
    assert f"GB for {len(written)} images" in caplog.text
    # A file has some hundred bytes besides the maps.
    assert forecast == pytest.approx(sum(path.stat().st_size for path in written) / 1e9, rel=0.01)


def test_a_cache_that_cannot_be_written_is_done_without(voc, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file in the place of the folder")
    keys = {**R18, "SOLVER.MAX_ITER": 3, "TEST.EVAL_PERIOD": 0}
    cached = {**keys, "MODEL.BACKBONE.CACHE_DIR": tmp_path / "cache"}
    found = train(voc, tmp_path / "run", cached)
    assert_same(found, train(voc, tmp_path / "without", {**keys, "MODEL.BACKBONE.CACHE_GB": 0}))
    assert "further maps are computed each time" in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"MODEL.BACKBONE.FREEZE_AT": 4}, r"FREEZE_AT 4: MODEL.BACKBONE.PER_IMAGE needs .* to 5"),
        ({"TEST.AUG.ENABLED": True}, "TEST.AUG.ENABLED True: it calls the backbone"),
    ],
)
def test_it_is_refused(keys, message, detectron2, voc, tmp_path):
    with pytest.raises(UserError, match=message):
        load(voc, tmp_path, {**R18, **keys}, "detectron2")


@pytest.mark.parametrize(
    "keys",
    [
        {"INPUT.LSJ.ENABLED": True},
        {"INPUT.MIN_SIZE_TRAIN": (80, 90), "INPUT.MIN_SIZE_TRAIN_SAMPLING": "range"},
    ],
)
def test_random_pixels_are_not_cached(keys, voc, tmp_path, caplog):
    caplog.set_level("INFO")
    cfg = load(voc, tmp_path, {**R18, **keys})
    run_per_image(build_model(cfg), cfg, "embedded")
    name = sorted(keys)[-1]
    assert f"the backbone's maps are not cached: {name} " in caplog.text


def test_what_the_maps_depend_on_has_a_context_of_its_own(voc, tmp_path, monkeypatch):
    def context(keys=None, seed=0):
        cfg = load(voc, tmp_path, {**R18, **(keys or {})})
        torch.manual_seed(seed)
        model = build_model(cfg)
        return per_image._context(model.backbone.bottom_up, cfg, "embedded")

    found = [
        context(),
        context(seed=1),
        context({"MODEL.PIXEL_MEAN": [1.0, 2.0, 3.0]}),
        context({"INPUT.FORMAT": "BGR"}),
    ]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    assert len({*found, context()}) == 5
    monkeypatch.undo()
    assert context({"MODEL.BACKBONE.CACHE_GB": 1.0, "SEED": 9}) == found[0]
