"""ADE20k in a miniature: tasks on both engines from a converted file, equal in every number."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from convert.convert_to_d2 import convert_file
from convert.verify import read_converted
from detection.config.task import default_task
from detection.embedded.model import build_model
from detection.modeling.norms import with_process_norms
from detection.train_net import main
from moco.common.cfgnode import load_cfg
from moco.common.run import read_record
from tests.convert import test_convnext, test_swin
from tests.oracles.layouts_vit import timm_vit
from tests.oracles.small_tasks import CONFIGS, ENGINES, WINDOWS, logged, narrow_file, run_both
from tests.oracles.tiny_ade import LABELS, write_ade

pytestmark = [
    pytest.mark.detectron2,
    pytest.mark.slow,
    pytest.mark.usefixtures("detectron2", "fresh_cache"),
]

UPERNET = {"loss_sem_seg", "loss_sem_seg_auxiliary"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Write a converted transformer of 12 narrow blocks."""
    pytest.importorskip("timm")
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    net = timm_vit(4, 32, 4, depth=12, img_size=64, patch_size=16, num_classes=3)
    torch.save(net.state_dict(), folder / "timm.file")
    convert_file(folder / "timm.file", folder / "vit.pth", num_heads=4)
    return folder / "vit.pth"


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    return write_ade(tmp_path, {"train": 5, "val": 3})


def narrow(task: str, folder: Path) -> tuple[Path, list[object]]:
    """Write a converted narrow network of a task's family; also return its keys."""
    if "R_50" in task:
        return narrow_file(50, folder), []
    state = test_swin.make_state() if "Swin" in task else test_convnext.make_state()
    torch.save(state, folder / "a.file")
    convert_file(folder / "a.file", folder / "out.pth")
    architecture = read_converted(folder / "out.pth").contract.architecture
    return folder / "out.pth", [x for pair in architecture.d2_keys().items() for x in pair]


@pytest.mark.parametrize(
    ("task", "losses", "options"),
    [
        ("linear_frozen_ViT_B_40k", {"loss_sem_seg"}, WINDOWS),
        ("linear_ViT_B_40k", {"loss_sem_seg"}, WINDOWS),
        ("upernet_ViT_B_160k", UPERNET, WINDOWS),
        ("upernet_R_50_160k", UPERNET, ()),
        ("upernet_Swin_T_160k", UPERNET, ()),
        ("upernet_ConvNeXt_T_160k", UPERNET, WINDOWS),
    ],
)
def test_a_task_is_one_run_on_both_engines(task, losses, options, weights, data, tmp_path):
    if "ViT" not in task:
        weights, keys = narrow(task, tmp_path)
        options = (*options, *keys)
    record = run_both(f"ade20k/{task}", weights, tmp_path, *options)
    before = torch.load(weights, weights_only=True)["model"]
    for engine in ENGINES:
        found = logged(tmp_path / engine)
        assert {name for name in found if name.startswith("loss_")} == losses
        after = torch.load(tmp_path / engine / "model_final.pth", weights_only=True)["model"]
        same = [torch.equal(after[f"backbone.{name}"], x) for name, x in before.items()]
        assert all(same) if "frozen" in task else not any(same)
    left = record.coverage["left_at_init"]
    assert record.coverage["loaded"] == len(before)
    new = re.compile(r"sem_seg_head\.|backbone\.(norm[0-3]\.|.*\.rel_pos)")
    assert all(map(new.match, left))
    # Most of the 150 classes are absent from the miniature, and the record says so.
    assert {"sem_seg/mIoU", "sem_seg/mIoU_detectron2"} <= record.metrics.keys()
    assert record.metrics["sem_seg/mIoU"] <= record.metrics["sem_seg/mIoU_detectron2"]
    assert any("as in mmsegmentation" in note for note in record.notes)
    argv = ["--engine", "embedded", "--eval-only", "--resume", "OUTPUT_DIR"]
    assert main([*argv, str(tmp_path / "embedded")]) == 0
    again = read_record(tmp_path / "embedded" / "inference" / "run.json")
    assert again.metrics == record.metrics


SIZES = {
    "R_50": {},
    "Swin_T": {},
    "ConvNeXt_T": {},
    "Swin_T, B": {
        "MODEL.SWIN.EMBED_DIM": 128,
        "MODEL.SWIN.DEPTHS": [2, 2, 18, 2],
        "MODEL.SWIN.NUM_HEADS": [4, 8, 16, 32],
    },
    "ConvNeXt_T, S": {"MODEL.CONVNEXT.DEPTHS": [3, 3, 27, 3]},
}
# Parameters in millions, of the READMEs of the official Swin and ConvNeXt; R50's is computed here.
PARAMETERS = (66, 60, 60, 121, 82)


@pytest.mark.parametrize(("name", "millions"), zip(SIZES, PARAMETERS, strict=True))
def test_the_model_at_full_width_is_of_the_published_size(name, millions, monkeypatch):
    from tests.oracles import detectron2_engine as d2

    # The rates of stochastic depth are read, and meta tensors have no values.
    monkeypatch.setattr(torch, "linspace", partial(torch.linspace, device="cpu"))
    file = CONFIGS / "ade20k" / f"upernet_{name.partition(',')[0]}_160k.yaml"
    keys = {**SIZES[name], "MODEL.DEVICE": "meta"}
    opts = [str(item) for pair in keys.items() for item in pair]
    cfg = with_process_norms(load_cfg(default_task(), file, opts), 1)
    with torch.device("meta"):
        theirs, ours = (
            {name: p.shape for name, p in build(cfg).named_parameters()}
            for build in (d2.model, build_model)
        )
    assert ours == theirs
    assert round(sum(shape.numel() for shape in ours.values()) / 1e6) == millions


def test_an_earlier_block_is_a_key(weights, data, tmp_path):
    """The map of another block gives another number, and the blocks above it have no effect."""
    values = {}
    for name in ("last_feat", "block11", "block4"):
        options = (*WINDOWS, "MODEL.SEM_SEG_HEAD.IN_FEATURES", f"['{name}']")
        folder = tmp_path / name
        run_both("ade20k/linear_frozen_ViT_B_40k", weights, folder, *options)
        values[name] = logged(folder / "embedded")["loss_sem_seg"]
    assert values["last_feat"] == values["block11"] != values["block4"]


def test_it_learns_the_classes(data, tmp_path):
    """From scratch, tested on the training images: the shapes' colors determine their classes."""
    keys = {
        "MODEL.WEIGHTS": "random",
        "MODEL.DEVICE": "cpu",
        "MODEL.VIT.PATCH_SIZE": 4,
        "MODEL.VIT.EMBED_DIM": 32,
        "MODEL.VIT.DEPTH": 1,
        "MODEL.VIT.NUM_HEADS": 2,
        "MODEL.VIT.MLP_DIM": 32,
        "MODEL.VIT.PRETRAIN_IMAGE_SIZE": 64,
        "DATASETS.TEST": ("ade20k_sem_seg_train",),
        "INPUT.SEM_SEG_SIZE": 64,
        "INPUT.MAX_SIZE_TRAIN": 128,
        "INPUT.SEM_SEG_CROP_SIZE": 64,
        "INPUT.SEM_SEG_SCALE_RANGE": [0.8, 1.25],
        "INPUT.SEM_SEG_COLOR": False,
        "INPUT.MIN_SIZE_TEST": 64,
        "TEST.SEM_SEG_WINDOW": 64,
        "SOLVER.BASE_LR": 0.01,
        "SOLVER.BACKBONE_LR_FACTOR": 1.0,
        "SOLVER.MAX_ITER": 120,
        "SOLVER.IMS_PER_BATCH": 4,
        "SOLVER.PRECISION": "fp32",
        "SOLVER.AMP.ENABLED": False,
        "DATALOADER.NUM_WORKERS": 0,
        "SEED": 1,
        "OUTPUT_DIR": tmp_path / "run",
    }
    argv = ["--config-file", str(CONFIGS / "ade20k" / "linear_ViT_B_40k.yaml")]
    argv += ["--engine", "embedded", *(str(item) for pair in keys.items() for item in pair)]
    assert main(argv) == 0
    metrics = read_record(tmp_path / "run" / "run.json").metrics
    for label in LABELS:
        assert metrics[f"sem_seg/IoU-thing {label}"] > 80
