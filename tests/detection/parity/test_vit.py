"""Vision transformers in both engines: Detectron2's stock classes, whole runs, checkpointing.

Every quantity of their detectors is compared in test_model.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from convert.convert_to_d2 import convert_file
from detection.config.task import default_task
from detection.embedded.build import build_model
from detection.modeling.norms import with_process_norms
from moco.common.cfgnode import load_cfg
from moco.common.errors import UserError
from tests.detection.conftest import task_files
from tests.oracles import tiny_detector as tiny
from tests.oracles.small_tasks import CONFIGS, SMALL_VIT, SMALL_VOC, assert_same_run, run
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


@pytest.fixture(autouse=True)
def timm():
    return pytest.importorskip("timm", reason="timm is not installed")


def test_it_is_detectron2s_own_class_as_vitdet_builds_it():
    """As projects/ViTDet/configs/common/models/mask_rcnn_vitdet.py, with other numbers."""
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
    """`size_divisiblity` in vit.py: without a square it pads nothing, and p5 has no whole cells."""
    from detectron2.modeling.backbone.vit import SimpleFeaturePyramid

    from tests.oracles import detectron2_engine as d2

    model = d2.model(d2.config(tiny.VIT_SFP))
    batch = model.preprocess_image(tiny.images([(97, 70), (60, 101)], seed=0))
    assert batch.tensor.shape[-2:] == (128, 128)
    assert SimpleFeaturePyramid.size_divisibility.fget(model.backbone) == 0


def test_checkpointed_blocks_have_the_same_gradients():
    from tests.oracles import detectron2_engine as d2

    samples = tiny.images([(101, 133), (90, 64)], seed=2)
    gradients = []
    for checkpointed in (False, True):
        keys = {**tiny.VIT_SFP, "MODEL.VIT.CHECKPOINT_BLOCKS": checkpointed}
        torch.manual_seed(0)
        model = d2.model(d2.config(keys))
        torch.manual_seed(1)
        sum(d2.losses(model, samples).values()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(x, gradients[1][name]) for name, x in gradients[0].items())


def test_without_timm_it_is_one_line(monkeypatch):
    import importlib.util

    from detection.d2.config import check_transfer_config
    from tests.oracles import detectron2_engine as d2

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "timm" else find(name, *a)
    )
    with pytest.raises(UserError, match=r"moco-transfer\[vit\]"):
        check_transfer_config(d2.config(tiny.VIT_SFP))
    build_model(tiny.task(tiny.VIT_SFP))


@pytest.fixture(scope="module")
def vit_file(tmp_path_factory) -> Path:
    """A converted ViT with timm's names, as wide as SMALL says."""
    from timm.models.vision_transformer import VisionTransformer

    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(4)
    net = VisionTransformer(
        img_size=64, patch_size=16, num_classes=3, embed_dim=32, depth=4, num_heads=4, mlp_ratio=2
    )
    for parameter in net.parameters():
        nn.init.normal_(parameter, parameter.mean().item(), 0.05)
    torch.save(net.state_dict(), folder / "timm.file")
    report = convert_file(folder / "timm.file", folder / "vit.pth", num_heads=4)
    assert report.not_checked == ""
    assert "faster_rcnn_ViT_Ti_small" in report.next_command()
    return folder / "vit.pth"


@pytest.mark.slow
@pytest.mark.parametrize("builder", ["build_vit_sfp_backbone", "build_vit_fpn_backbone"])
@pytest.mark.parametrize("init", ["random", "file"])
def test_the_small_task_is_one_run_in_both_engines(builder, init, vit_file, tmp_path):
    from detection.train_net import main
    from moco.common.run import read_record

    voc = write_voc(tmp_path / "voc", {"trainval": 6, "test": 3})
    weights = vit_file if init == "file" else "random"
    keys = {**SMALL, "DATASETS.VOC_DIR": voc, "MODEL.WEIGHTS": weights}
    keys["MODEL.BACKBONE.NAME"] = builder
    for engine in ("detectron2", "embedded"):
        every = {**keys, "OUTPUT_DIR": tmp_path / engine}
        opts = [str(item) for pair in every.items() for item in pair]
        assert main(["--config-file", str(TASK), "--engine", engine, *opts]) == 0
        record = read_record(tmp_path / engine / "run.json")
        if init == "file":
            left = record.coverage["left_at_init"]
            assert record.coverage["loaded"] == 3 + 4 * 12
            assert not [n for n in left if n.startswith("backbone.net.") and "rel_pos" not in n]
        assert "MODEL.VIT.WINDOW_SIZE" in record.config
    assert_same_run(tmp_path / "detectron2", tmp_path / "embedded")


# Task → parameters in millions at full width.
TASKS = {
    "coco/mask_rcnn_ViT_B_100ep": 110.9,
    "coco/mask_rcnn_ViT_L_100ep": 330.7,
    "coco/mask_rcnn_ViT_B_FPN_25ep": 115.6,
    "coco/mask_rcnn_ViT_B_FPN_50ep": 115.6,
    "coco/mask_rcnn_ViT_B_FPN_100ep": 115.6,
    "coco/mask_rcnn_ViT_L_FPN_100ep": 338.9,
    "coco/mask_rcnn_ViT_Ti_640_100ep": 27.7,
    "lvis/mask_rcnn_ViT_B_v1_100ep": 116.9,
}


def test_the_table_names_every_task():
    assert set(TASKS) == {
        task for task in task_files() if "ViT" in task and not task.startswith("voc/")
    }


@pytest.mark.parametrize("task", TASKS)
def test_the_model_at_full_width(task):
    """ViTDet's Table 4 has 111 and 331 million parameters of ViT-B and -L on COCO."""
    file, opts = CONFIGS / f"{task}.yaml", ["MODEL.DEVICE", "meta"]
    opts += ["MODEL.ROI_BOX_HEAD.USE_FED_LOSS", False]  # it reads the data, and has no parameters
    with torch.device("meta"):
        model = build_model(with_process_norms(load_cfg(default_task(), file, opts), 1))
    number = sum(p.numel() for p in model.parameters()) / 1e6
    assert number == pytest.approx(TASKS[task], abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_one_run_in_both_engines(task, vit_file, data_of, tmp_path):
    """Two iterations of the task file with a small transformer and small images."""
    data_of(task)
    records = [
        run(task, vit_file, tmp_path / engine, engine) for engine in ("detectron2", "embedded")
    ]
    assert_same_run(tmp_path / "detectron2", tmp_path / "embedded")
    for field in ("metrics", "coverage", "config_sha256", "recipe"):
        assert getattr(records[0], field) == getattr(records[1], field)
    assert records[0].coverage["loaded"] == 3 + 4 * 12
    assert {"bbox/AP", "segm/AP"} <= set(records[0].metrics)
