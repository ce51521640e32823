"""Vision transformers in both engines: equality with Detectron2's stock classes, whole runs.

Every quantity of their detectors is compared in test_model.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.make_table import main as make_table
from benchmarks.quickstart import NETWORKS, SMOKE_PRETRAIN
from convert.convert_to_d2 import ConversionReport, convert_file
from convert.verify import read_converted
from detection.config.task import default_task
from detection.embedded.model import build_model
from detection.modeling.norms import with_process_norms
from detection.train_net import main
from moco.common.cfgnode import load_cfg
from moco.common.run import read_record
from tests.detection.conftest import task_files
from tests.moco.commands import pretrain
from tests.oracles import tiny_detector as tiny
from tests.oracles.layouts_vit import dinov2, timm_dinov3, timm_vit
from tests.oracles.small_tasks import (
    CONFIGS,
    ENGINES,
    SMALL_VIT,
    SMALL_VOC,
    assert_same_run,
    run_both,
)
from tests.oracles.tiny_voc import write_voc

pytestmark = [pytest.mark.detectron2, pytest.mark.usefixtures("detectron2")]

TASK = CONFIGS / "voc" / "faster_rcnn_ViT_Ti_small.yaml"
# The task with a smaller transformer, whose windows do not divide its maps.
SMALL = {
    **SMALL_VOC,
    **SMALL_VIT,
    "MODEL.VIT.WINDOW_SIZE": 3,
    "INPUT.MAX_SIZE_TRAIN": 128,
}
BUILDERS = ("build_vit_sfp_backbone", "build_vit_fpn_backbone")


@pytest.fixture(autouse=True)
def timm():
    import timm

    return timm


def test_it_is_detectron2s_own_class_as_vitdet_builds_it():
    """The reference is built as in ViTDet's mask_rcnn_vitdet.py, with other numbers."""
    from detectron2.modeling.backbone.fpn import LastLevelMaxPool
    from detectron2.modeling.backbone.vit import SimpleFeaturePyramid, ViT

    keys = {**tiny.VIT_SFP, "MODEL.BACKBONE.SQUARE_PAD": 160, "MODEL.VIT.GLOBAL_BLOCKS": [1, 3]}
    keys |= {"INPUT.MAX_SIZE_TRAIN": 160, "INPUT.MAX_SIZE_TEST": 160}
    torch.manual_seed(0)
    stock = SimpleFeaturePyramid(
        net=ViT(
            img_size=160,
            patch_size=16,
            embed_dim=32,
            depth=4,
            num_heads=4,
            drop_path_rate=0.4,
            window_size=5,
            mlp_ratio=2.25,
            qkv_bias=True,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            window_block_indexes=[0, 2],
            residual_block_indexes=[],
            use_rel_pos=True,
            out_feature="last_feat",
            pretrain_img_size=96,
        ),
        in_feature="last_feat",
        out_channels=16,
        scale_factors=(4.0, 2.0, 1.0, 0.5),
        top_block=LastLevelMaxPool(),
        norm="LN",
        square_pad=160,
    )
    torch.manual_seed(0)
    ours = build_model(tiny.task(keys)).backbone
    state = stock.state_dict()
    assert set(state) == set(ours.state_dict())
    assert all(torch.equal(x, state[name]) for name, x in ours.state_dict().items())
    filled = tiny.fill(state, seed=2)
    images = torch.randn(2, 3, 160, 160)
    for model in (stock, ours):
        model.load_state_dict(filled)
        model.train()
    torch.manual_seed(3)
    expected = stock(images)
    torch.manual_seed(3)
    actual = ours(images)
    assert list(expected) == list(actual) == list(ours.strides)
    assert all(torch.equal(x, actual[name]) for name, x in expected.items())


def test_a_batch_is_padded_where_stock_detectron2_forgets_it():
    """`size_divisiblity` is misspelled in its vit.py, so that without a square it pads nothing."""
    from detectron2.modeling.backbone.vit import SimpleFeaturePyramid

    from tests.oracles import detectron2_engine as d2

    model = d2.model(d2.config(tiny.VIT_SFP))
    batch = model.preprocess_image(tiny.images([(97, 70), (60, 101)], seed=0))
    assert batch.tensor.shape[-2:] == (128, 128)
    assert SimpleFeaturePyramid.size_divisibility.fget(model.backbone) == 0


def write_timm(out: Path) -> ConversionReport:
    """Write timm's ViT with the width of SMALL_VIT."""
    net = timm_vit(4, 32, 4, depth=4, img_size=64, patch_size=16, num_classes=3)
    torch.save(net.state_dict(), out.parent / "timm.file")
    return convert_file(out.parent / "timm.file", out, num_heads=4)


def write_dinov2_giant(out: Path) -> ConversionReport:
    """Write DINOv2's ViT with its giant's MLPs, gated by SiLU."""
    from timm.layers import SwiGLUPacked

    mlps = {"mlp_layer": SwiGLUPacked, "mlp_ratio": 4, "init_values": 1e-5}
    net = timm_vit(4, 32, 4, depth=4, img_size=64, patch_size=16, num_classes=3, **mlps)
    torch.save(net.state_dict(), out.parent / "giant.file")
    return convert_file(out.parent / "giant.file", out, num_heads=4)


def write_dinov2(out: Path, registers: int = 0) -> ConversionReport:
    """Write DINOv2's ViT of the same width, with LayerScale and patches of 14 px."""
    sizes = {"depth": 4, "img_size": 56, "patch_size": 14}
    torch.save(
        dinov2(32, 4, in_chunks=False, registers=registers, **sizes), out.parent / "dinov2.file"
    )
    report = convert_file(out.parent / "dinov2.file", out, num_heads=4, patch_size=16)
    assert "changed as requested: patches 14 to 16 px by pseudo-inverse" in report.notes
    assert any("reg_token" in note for note in report.notes) is (registers > 0)
    return report


def write_dinov3(out: Path, *, mlp_ratio: float = 2, **changes: bool) -> ConversionReport:
    """Write DINOv3's ViT of the same width; its MLPs are as wide as those of SMALL_VIT."""
    sizes = {"embed_dim": 32, "depth": 4, "img_size": 64, "patch_size": 16}
    net = timm_dinov3(**sizes, mlp_ratio=mlp_ratio, **changes)
    torch.save(net.state_dict(), out.parent / "dinov3.file")
    return convert_file(out.parent / "dinov3.file", out, num_heads=4)


def write_moco_v3(out: Path) -> ConversionReport:
    """Write a ViT of the quickstart's pre-training, cut to four steps."""
    images = write_voc(out.parent / "images", {"train": 32}) / "JPEGImages"
    given = {**SMOKE_PRETRAIN, **NETWORKS["vit"].smoke, "DATA.ROOT": images}
    given |= {"OUTPUT_DIR": out.parent / "pretrain"}
    opts = [str(item) for pair in given.items() for item in pair]
    pretrain(["--config-file", "pretrain/quickstart_vit", *opts])
    return convert_file(out.parent / "pretrain", out)


FILES = {
    "timm": write_timm,
    "giant": write_dinov2_giant,
    "dinov2": write_dinov2,
    "dinov2-registers": partial(write_dinov2, registers=4),
    "dinov3": write_dinov3,
    "moco_v3": write_moco_v3,
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Callable[[str], Path]:
    """Return a converted file of FILES by name; each is written once."""

    @cache
    def write(name: str) -> Path:
        out: Path = tmp_path_factory.mktemp("vit") / f"{name}.pth"
        report = FILES[name](out)
        assert "faster_rcnn_ViT_Ti_small" in report.next_command()
        return out

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "builder"),
    [
        *(("timm", builder) for builder in BUILDERS),
        ("dinov2", BUILDERS[0]),
        ("dinov2-registers", BUILDERS[1]),
        ("moco_v3", BUILDERS[0]),
    ],
)
def test_the_small_task_is_one_run_in_both_engines(builder, init, converted, tmp_path, capsys):
    """From the file to the table, both engines have equal results."""
    voc = write_voc(tmp_path / "voc", {"trainval": 6, "test": 3})
    weights = converted(init)
    keys = {**SMALL, "DATASETS.VOC_DIR": voc, "MODEL.WEIGHTS": weights}
    its = read_converted(weights).contract.architecture
    keys |= {"MODEL.BACKBONE.NAME": builder} | its.d2_keys()
    assert its.layer_scale is init.startswith("dinov2") and its.patch_size == 16
    runs = tmp_path / "runs"
    for engine in ENGINES:
        every = {**keys, "OUTPUT_DIR": runs / engine}
        opts = [str(item) for pair in every.items() for item in pair]
        assert main(["--config-file", str(TASK), "--engine", engine, *opts]) == 0
        record = read_record(runs / engine / "run.json")
        left = record.coverage["left_at_init"]
        assert record.coverage["loaded"] == 3 + 4 * (14 if its.layer_scale else 12)
        assert not [n for n in left if n.startswith("backbone.net.") and "rel_pos" not in n]
        assert "MODEL.VIT.WINDOW_SIZE" in record.config
    assert_same_run(runs / "detectron2", runs / "embedded")
    capsys.readouterr()
    make_table([str(runs), "--engine", "each"])
    table = capsys.readouterr().out
    assert record.metrics["bbox/AP"] is not None
    rows = [line for line in table.splitlines() if record.init in line]
    assert len(rows) >= 2 and all(f": {engine} engine" in table for engine in os.listdir(runs))


@pytest.mark.slow
@pytest.mark.parametrize("window", [3, 0])
def test_dinov3_is_one_run_of_20_iterations_in_both_engines(window, tmp_path):
    """With windows that do not divide the map, or without any and all of it frozen."""
    weights = tmp_path / "dinov3.pth"
    write_dinov3(weights, gated=True, qkv_bias=True)
    voc = write_voc(tmp_path / "voc", {"trainval": 6, "test": 3})
    keys = {**SMALL, "DATASETS.VOC_DIR": voc, "SOLVER.MAX_ITER": 20, "SOLVER.STEPS": (15,)}
    keys |= read_converted(weights).contract.architecture.d2_keys()
    keys |= {"MODEL.VIT.KEEP_TOKENS": True, "MODEL.VIT.REL_POS": False}
    keys |= {"MODEL.VIT.WINDOW_SIZE": window, "MODEL.BACKBONE.FREEZE_AT": 0 if window else 5}
    keys |= {"MODEL.VIT.ROPE_RESCALE": 2.0 if window else 0.0}
    opts = [item for pair in keys.items() for item in pair]
    record = run_both("voc/faster_rcnn_ViT_Ti_small", weights, tmp_path, *opts)
    assert record.iterations == 20 and record.coverage["loaded"] == 5 + 4 * 14
    names = [name for name in record.coverage["left_at_init"] if name.startswith("backbone.net.")]
    assert not names


TASKS = [task for task in task_files() if "ViT" in task and not task.startswith("voc/")]
OF_INSTANCES = [task for task in TASKS if not task.startswith("ade20k/")]  # test_ade20k.py


@pytest.mark.parametrize("task", TASKS)
def test_the_model_at_full_width_is_detectron2s(task, monkeypatch):
    from tests.oracles import detectron2_engine as d2

    # Detectron2's class reads values of it, which meta tensors do not have.
    monkeypatch.setattr(torch, "linspace", partial(torch.linspace, device="cpu"))
    file, opts = CONFIGS / f"{task}.yaml", ["MODEL.DEVICE", "meta"]
    opts += ["MODEL.ROI_BOX_HEAD.USE_FED_LOSS", False]  # it reads the data, and has no parameters
    cfg = with_process_norms(load_cfg(default_task(), file, opts), 1)
    with torch.device("meta"):
        theirs, ours = (
            {name: p.shape for name, p in build(cfg).named_parameters()}
            for build in (d2.model, build_model)
        )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("task", OF_INSTANCES)
def test_a_task_is_one_run_in_both_engines(task, converted, data_of, tmp_path):
    """Two iterations with a small transformer and small images are equal."""
    data_of(task)
    loaded = {"dinov3": 5 + 4 * 13, "giant": 3 + 4 * 14, "timm": 3 + 4 * 12}
    name = "dinov3" if "DINOv3" in task else "giant" if "ViT_g" in task else "timm"
    record = run_both(task, converted(name), tmp_path)
    assert record.coverage["loaded"] == loaded[name]
    assert {"bbox/AP", "segm/AP"} <= set(record.metrics)
