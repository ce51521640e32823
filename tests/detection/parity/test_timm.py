"""Conversion and training of timm's networks: bitwise equality of both engines.

Every quantity of their detectors is compared in test_model.py.
"""

from pathlib import Path

import pytest
import timm
import torch

from convert.convert_to_d2 import convert_file
from convert.prove import read_converted
from detection.config.task import load_task
from detection.engine import launch
from detection.engine.job import Job
from moco.common.errors import DataError, UserError
from moco.common.files import load_torch
from moco.common.run import RunFolder
from moco.modeling.soundness import fixed_image
from tests.oracles import tiny_detector as tiny
from tests.oracles.tiny_voc import write_voc

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "voc"
TINY = {
    "DATALOADER.NUM_WORKERS": 0,
    "INPUT.MIN_SIZE_TRAIN": (90, 100),
    "INPUT.MIN_SIZE_TEST": 96,
    "SOLVER.PRECISION": "fp32",
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.MAX_ITER": 2,
    "SOLVER.STEPS": (),
    "SOLVER.WARMUP_ITERS": 0,
    "TEST.PRECISE_BN.NUM_ITER": 1,
    "MODEL.DEVICE": "cpu",
    "SEED": 42,
}


def save(name: str, path: Path) -> dict[str, torch.Tensor]:
    """Save and return a state dict of timm's network `name` with other than initial values."""
    state = tiny.fill(timm.create_model(name).state_dict(), seed=1)
    torch.save(state, path)
    return state


@pytest.mark.slow
@pytest.mark.detectron2
@pytest.mark.usefixtures("detectron2")
@pytest.mark.parametrize(
    ("config", "name"),
    [("faster_rcnn_ConvNeXt_A_small", "convnext_atto"), ("faster_rcnn_timm_small", "regnety_002")],
)
def test_from_timms_file_to_a_trained_detector(config: str, name: str, tmp_path: Path) -> None:
    state = save(name, tmp_path / "a.file")
    is_timm = config == "faster_rcnn_timm_small"
    convert_file(tmp_path / "a.file", tmp_path / "out.pth", timm_model=name if is_timm else None)
    voc = write_voc(tmp_path / "voc", {"train": 4, "val": 2})
    results, models = [], []
    for engine, weights in (("detectron2", "out.pth"), ("embedded", "a.file")):
        keys = {**TINY, "DATASETS.VOC_DIR": voc, "DATASETS.VOC_METRIC": "voc"}
        keys |= {"MODEL.WEIGHTS": tmp_path / weights}
        out = tmp_path / engine
        opts = [str(item) for pair in {**keys, "OUTPUT_DIR": out}.items() for item in pair]
        task = load_task(CONFIGS / f"{config}.yaml", opts, engine)
        with RunFolder(out):
            results.append(launch.run(Job(engine, task.cfg, task.weights)))
        models.append(load_torch(out / "model_final.pth")["model"])
    assert results[0].metrics == results[1].metrics
    assert results[0].coverage == results[1].coverage
    assert ("backbone.bottom_up.norm0.weight" in results[0].coverage.left_at_init) is not is_timm
    assert models[0].keys() == models[1].keys()
    assert not [n for n, x in models[0].items() if not torch.equal(x, models[1][n])]
    first = "backbone.bottom_up." + ("net.stem.conv.weight" if is_timm else "stem.0.weight")
    before = state["stem.conv.weight" if is_timm else "stem.0.weight"]
    assert 0 < (models[0][first] - before).abs().max() < 0.01  # loaded, and trained


@pytest.mark.slow
@pytest.mark.parametrize("name", ["regnety_002", "mobilenetv3_small_050", "xception41"])
def test_the_features_are_those_of_timms_own_model(name: str, tmp_path: Path) -> None:
    """They are equal for networks that timm renames, cuts at the head, or hooks."""
    from convert.modeling.timm_features import TimmFeatures

    state = save(name, tmp_path / "a.file")
    report = convert_file(tmp_path / "a.file", tmp_path / "out.safetensors", timm_model=name)
    converted = read_converted(tmp_path / "out.safetensors")
    assert report.features["res5"].bitwise
    theirs = timm.create_model(
        name,
        features_only=True,
        pretrained=True,
        pretrained_cfg_overlay={"state_dict": state},
    )
    ours = TimmFeatures(name)
    counters = {k: v for k, v in ours.state_dict().items() if k.endswith("num_batches_tracked")}
    ours.load_state_dict({**converted.model, **counters})
    image = fixed_image((96, 128))
    with torch.no_grad():
        expected = theirs.eval()(image)[-4:]
        for value, own in zip(expected, ours.eval()(image).values(), strict=True):
            assert torch.equal(value, own)


def test_its_contract_is_timms(tmp_path: Path) -> None:
    name = "efficientvit_b0"
    state = save(name, tmp_path / "a.file")
    convert_file(tmp_path / "a.file", tmp_path / "out.pth", timm_model=f"{name}.r224_in1k")
    contract = read_converted(tmp_path / "out.pth").contract
    assert contract.d2_keys()["MODEL.TIMM.NAME"] == name
    cfg = timm.models.get_pretrained_cfg(f"{name}.r224_in1k")
    assert contract.pixels.mean == pytest.approx([255 * value for value in cfg.mean])
    assert contract.pixels.std == pytest.approx([255 * value for value in cfg.std])
    assert contract.pixels.channel_order == "RGB"
    wrong = {**state, "other.weight": torch.ones(2)}
    del wrong["stem.in_conv.conv.weight"]
    torch.save(wrong, tmp_path / "b.file")
    with pytest.raises(DataError, match=r"missing: .*stem\.in_conv"):
        convert_file(tmp_path / "b.file", tmp_path / "b.pth", timm_model=name)
    torch.save({**state, "other.weight": torch.ones(2)}, tmp_path / "b.file")
    with pytest.raises(DataError, match=r"neither mapped nor dropped by a rule: 'other\.weight'"):
        convert_file(tmp_path / "b.file", tmp_path / "b.pth", timm_model=name)
    with pytest.raises(UserError, match="no such network"):
        convert_file(tmp_path / "a.file", tmp_path / "b.pth", timm_model="efficientvit_q0")
    average = {k: v / 2 if v.is_floating_point() else v for k, v in state.items()}
    torch.save({"state_dict": state, "state_dict_ema": average}, tmp_path / "c.file")
    convert_file(tmp_path / "c.file", tmp_path / "c.pth", timm_model=name)
    assert read_converted(tmp_path / "c.pth").contract.encoder == "state_dict_ema"
    with pytest.raises(UserError, match="--encoder key"):
        convert_file(tmp_path / "c.file", tmp_path / "d.pth", timm_model=name, encoder="key")
