"""Conversion and training of timm's networks: bitwise equality of both engines.

Every quantity of their detectors is compared in test_model.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from convert.convert_to_d2 import convert_file
from convert.families.timm import format_arguments
from convert.verify import read_converted
from detection.config.task import load_task
from detection.engine import launch
from detection.engine.job import Job
from detection.engine.weights import EngineResult
from moco.common.errors import DataError, UserError
from moco.common.files import load_torch
from moco.common.run import RunFolder
from tests.detection.conftest import task_files
from tests.oracles import tiny_detector as tiny
from tests.oracles.small_tasks import run_both
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
    "MODEL.DEVICE": "cpu",
    "SEED": 42,
}
PRECISE_BN = {"TEST.PRECISE_BN.NUM_ITER": 1}
SQUARE = {"MODEL.BACKBONE.SQUARE_PAD": 128, "INPUT.MAX_SIZE_TRAIN": 128, "INPUT.MAX_SIZE_TEST": 128}
VIT: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 3}
ONE_SIZE = {**VIT, "img_size": 64}
# One network of each kind, made small where timm takes the arguments. Networks of one size are
# resampled from it for a square of 128 px, and patches of 14 px become 16.
WITH_ONE_MAP: dict[str, dict[str, Any]] = {
    "aimv2_large_patch14_224": VIT,
    "beit_base_patch16_224": ONE_SIZE,
    "cait_xxs24_224": ONE_SIZE,
    "deit_tiny_distilled_patch16_224": VIT,
    "eva02_tiny_patch14_224": VIT,
    "naflexvit_base_patch16_gap": VIT,
    "samvit_base_patch16": {**ONE_SIZE, "global_attn_indexes": [1]},
    "test_vit3": {},
    "vit_base_patch16_rope_reg1_gap_256": VIT,
    "vit_base_patch16_siglip_224": VIT,
    "vit_pe_core_tiny_patch16_384": {"depth": 2, "img_size": 64},
    "vit_relpos_small_patch16_224": ONE_SIZE,
    "vit_small_patch16_dinov3": VIT,
    "xcit_nano_12_p16_224": {"depth": 2},
}
SMALL = {"depths": [1, 1, 2, 1], "embed_dims": [16, 32, 48, 64]}
WITH_FOUR_MAPS: dict[str, dict[str, Any]] = {
    "davit_tiny": {**SMALL, "num_heads": [1, 2, 3, 4]},
    "edgenext_xx_small": {},
    "hiera_tiny_224": {"embed_dim": 24, "stages": [1, 1, 2, 1], "img_size": 64},
    "mobilenetv4_conv_small": {},
    "pvt_v2_b0": {"depths": [1, 1, 1, 1]},
    "swinv2_tiny_window8_256": {
        **{"depths": [1, 1, 2, 1], "embed_dim": 24, "num_heads": [1, 2, 3, 4]},
        **{"img_size": 64, "window_size": 2},
    },
    "test_coatnet": {},
    "test_efficientnet": {},
    "test_mambaout": {},
    "test_maxvit": {},
    "tiny_vit_5m_224": {**SMALL, "num_heads": [1, 1, 3, 4]},
    "twins_svt_small": SMALL,
}


def save(name: str, path: Path, **arguments: Any) -> dict[str, torch.Tensor]:
    """Save and return a state dict of timm's network `name` with other than initial values."""
    names = timm.create_model(name, **arguments).state_dict()
    filled = tiny.fill({f"net.{key}": value for key, value in names.items()}, seed=1)
    state = {key: filled[f"net.{key}"] for key in names}
    torch.save(state, path)
    return state


def trained(
    config: str, keys: dict[str, Any], engine: str, out: Path
) -> tuple[EngineResult, dict[str, torch.Tensor]]:
    """Train a detector for two iterations; return the result and the trained tensors."""
    opts = [str(item) for pair in {**keys, "OUTPUT_DIR": out}.items() for item in pair]
    task = load_task(CONFIGS / f"{config}.yaml", opts, engine)
    with RunFolder(out):
        result = launch.run(Job(engine, task.cfg, task.weights))
    return result, load_torch(out / "model_final.pth")["model"]


@pytest.mark.slow
@pytest.mark.detectron2
@pytest.mark.usefixtures("detectron2")
@pytest.mark.parametrize("name", [*WITH_ONE_MAP, *WITH_FOUR_MAPS])
def test_two_iterations_of_each_kind(name: str, tmp_path: Path) -> None:
    arguments = {**WITH_ONE_MAP, **WITH_FOUR_MAPS}[name]
    state = save(name, tmp_path / "a.file", **arguments)
    config = "faster_rcnn_timm_vit_small" if name in WITH_ONE_MAP else "faster_rcnn_timm_small"
    voc = write_voc(tmp_path / "voc", {"train": 4, "val": 2})
    keys = {**TINY, **SQUARE, "DATASETS.VOC_DIR": voc, "DATASETS.VOC_METRIC": "voc"}
    keys |= {"MODEL.TIMM.NAME": name, "MODEL.TIMM.ARGUMENTS": format_arguments(arguments)}
    keys |= {} if name in WITH_ONE_MAP else PRECISE_BN
    keys |= {"MODEL.WEIGHTS": tmp_path / "a.file"}
    (one, a), (two, b) = (
        trained(config, keys, engine, tmp_path / engine) for engine in ("detectron2", "embedded")
    )
    assert one.metrics == two.metrics
    assert one.coverage == two.coverage
    assert a.keys() == b.keys()
    assert not [key for key, value in a.items() if not torch.equal(value, b[key])]
    own = {key: value for key, value in a.items() if ".net." in key}
    assert own
    before = {key: state[key.rpartition("net.")[2]] for key in own}
    changes = [
        float((value - before[key]).abs().max())
        for key, value in own.items()
        if value.shape == before[key].shape and "running_" not in key and "num_b" not in key
    ]
    assert 0 < max(changes) < 0.01  # loaded, and trained


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
    keys = {**TINY, **PRECISE_BN, "DATASETS.VOC_DIR": voc, "DATASETS.VOC_METRIC": "voc"}
    results, models = zip(
        *(
            trained(
                config, {**keys, "MODEL.WEIGHTS": tmp_path / weights}, engine, tmp_path / engine
            )
            for engine, weights in (("detectron2", "out.pth"), ("embedded", "a.file"))
        ),
        strict=True,
    )
    assert results[0].metrics == results[1].metrics
    assert results[0].coverage == results[1].coverage
    assert ("backbone.bottom_up.norm0.weight" in results[0].coverage.left_at_init) is not is_timm
    assert models[0].keys() == models[1].keys()
    assert not [n for n, x in models[0].items() if not torch.equal(x, models[1][n])]
    first = "backbone.bottom_up." + ("net.stem.conv.weight" if is_timm else "stem.0.weight")
    before = state["stem.conv.weight" if is_timm else "stem.0.weight"]
    assert 0 < (models[0][first] - before).abs().max() < 0.01  # loaded, and trained


COCO = [task for task in task_files() if task.startswith("coco/") and "_timm_" in task]


@pytest.mark.slow
@pytest.mark.detectron2
@pytest.mark.usefixtures("detectron2")
@pytest.mark.parametrize("task", COCO)
def test_a_task_is_one_run_in_both_engines(task: str, data_of: Any, tmp_path: Path) -> None:
    """Two iterations with a small network and small images are equal; frozen tensors stay."""
    data_of(task)
    one_map = "_vit_" in task
    name = "eva02_small_patch14_224" if one_map else "hiera_tiny_224"
    arguments = {**WITH_ONE_MAP, **WITH_FOUR_MAPS}[name.replace("small", "tiny")]
    save(name, tmp_path / "a.file", **arguments)
    keys = {**SQUARE, "INPUT.LSJ.SIZE": 128, "SOLVER.AMP.ENABLED": False}
    keys |= {"MODEL.TIMM.ARGUMENTS": format_arguments(arguments), "SOLVER.PRECISION": "fp32"}
    opts = [item for pair in keys.items() for item in pair]
    record = run_both(task, tmp_path / "a.file", tmp_path, *opts)
    assert {"bbox/AP", "segm/AP"} <= set(record.metrics)
    frozen = (record.start or {}).get("frozen", {}).get("tensors", 0)
    loaded = record.coverage["loaded"]  # a frozen network has buffers besides
    assert frozen >= loaded > 0 if task.endswith("_frozen") else not frozen


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
