"""Parity with the official MoCo release: its task files and the weights of its converter.

The setup of its train_net.py is transcribed and runs on plain Detectron2: get_cfg(), its ROI heads,
DetectionCheckpointer.
"""

import pickle
from pathlib import Path

import pytest
import torch

from detection.config.recipe import compare_with_recipe
from detection.config.task import load_task
from detection.train_net import main
from moco.common.run import read_record
from tests.oracles.checkpoints import caffe2, detectron2_layout
from tests.oracles.official_yaml import NAMES, write_official
from tests.oracles.resnets import make_resnet
from tests.oracles.small_tasks import SHORT, SMALL

pytestmark = [
    pytest.mark.detectron2,
    pytest.mark.slow,
    pytest.mark.usefixtures("detectron2"),
]

NARROW = {
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 16,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 16,
}
RECIPES = {"voc": "Table 2b", "coco": "Table 5d"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write the task files, `output.pkl` and `msra.pkl` at a quarter of the width, `full.pkl`."""
    folder = write_official(tmp_path_factory.mktemp("official"))
    narrow, full = make_resnet(50, base=16), make_resnet(50, base=64)
    for name, value in full.state_dict().items():
        if name.endswith("bn3.weight"):
            value.mul_(0.2)  # Otherwise the residual sums overflow.
    for name, content in (
        ("output.pkl", detectron2_layout(narrow, "MOCO")),
        ("msra.pkl", caffe2(narrow)),
        ("full.pkl", detectron2_layout(full, "MOCO")),
    ):
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder


def official_model(file: Path, weights: Path, keys: dict[str, object], monkeypatch):
    """Build and load the model as the official train_net.py does."""
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.config import get_cfg
    from detectron2.layers import get_norm
    from detectron2.modeling import ROI_HEADS_REGISTRY, build_model
    from detectron2.modeling.roi_heads import Res5ROIHeads

    class Official(Res5ROIHeads):
        def __init__(self, cfg, input_shape):
            super().__init__(cfg, input_shape)
            norm = cfg.MODEL.RESNETS.NORM
            norm = get_norm(norm, self.res5[-1].out_channels)
            self.res5.add_module("norm", norm)

    cfg = get_cfg()
    cfg.merge_from_file(str(file))
    values = {**keys, "MODEL.DEVICE": "cpu", "MODEL.WEIGHTS": str(weights)}
    cfg.merge_from_list([item for pair in values.items() for item in pair])
    with monkeypatch.context() as patch:
        # The official name is that of this project's class.
        patch.setitem(ROI_HEADS_REGISTRY._obj_map, "Res5ROIHeadsExtraNorm", Official)
        torch.manual_seed(0)
        model = build_model(cfg)
    DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)
    assert type(model.roi_heads) is Official
    return model


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("voc", "full.pkl"),
        ("voc", "msra.pkl"),
        ("coco", "output.pkl"),
        ("coco", "msra.pkl"),
    ],
)
def test_the_same_model_is_built_and_loaded(name, weights, folder, data_of, monkeypatch):
    """State and outputs are bitwise identical, random layers included."""
    from detectron2.modeling import build_model

    from detection.d2.heads import Res5ROIHeadsExtraNorm
    from detection.engine.weights import load_converted
    from detection.modeling.backbones import backbone_type
    from detection.modeling.norms import with_process_norms

    data_of(name)
    moco = "" if weights == "msra.pkl" else "_moco"
    file = folder / f"{NAMES[name]}{moco}.yaml"
    opts = ["MODEL.WEIGHTS", str(folder / weights), "MODEL.DEVICE", "cpu"]
    task = load_task(str(file), opts, "detectron2")
    width = {} if weights == "full.pkl" else NARROW
    # The tiny data and the narrow weights are the only deviations.
    assert task.recipe.recipe == RECIPES[name]
    assert {line.split(":")[0] for line in task.recipe.deviations} == {
        *width,
        *task.cfg.DATASETS.TRAIN,
        *task.cfg.DATASETS.TEST,
    }
    if not width:
        label = compare_with_recipe(task.cfg, task.weights.contract).label
        assert label == f"as in the paper ({RECIPES[name]})"
    theirs = official_model(file, folder / weights, width, monkeypatch)

    torch.manual_seed(0)
    ours = build_model(with_process_norms(task.cfg, 1))
    assert type(ours.roi_heads) is Res5ROIHeadsExtraNorm
    kind = backbone_type(task.cfg.MODEL.BACKBONE.NAME)
    coverage = load_converted(ours, task.weights.model, kind)
    assert coverage.loaded == 265
    expected, state = theirs.state_dict(), ours.state_dict()
    assert list(expected) == list(state)
    # The official converter keeps torchvision's counters, which no layer with momentum reads.
    different = [
        key
        for key, value in expected.items()
        if not torch.equal(value, state[key]) and not key.endswith("num_batches_tracked")
    ]
    assert not different
    assert [p.requires_grad for p in ours.parameters()] == [
        p.requires_grad for p in theirs.parameters()
    ]
    image = torch.randint(0, 256, (3, 96, 128), generator=torch.Generator().manual_seed(1))
    batch = [{"image": image.byte(), "height": 96, "width": 128}]
    for model in (ours, theirs):  # Untrained models need these for detections.
        model.roi_heads.box_predictor.test_score_thresh = 0.0
        model.roi_heads.box_predictor.test_topk_per_image = 10
    with torch.no_grad():
        outputs = [model.eval()(batch)[0]["instances"] for model in (ours, theirs)]
    assert len(outputs[0]) == 10
    for field, value in outputs[0].get_fields().items():
        other = outputs[1].get(field)
        assert torch.equal(getattr(value, "tensor", value), getattr(other, "tensor", other)), field
    # In training mode the official model has naiveSyncBN, and this project's has plain BN.
    with torch.no_grad():
        pixels = ours.preprocess_image(batch).tensor
        features = [m.train().backbone(pixels)["res4"] for m in (ours, theirs)]
        features = [m.roi_heads.res5(f) for m, f in zip((ours, theirs), features, strict=True)]
    torch.testing.assert_close(*features, rtol=1e-4, atol=1e-4)


def test_the_readmes_command_runs(folder, data_of, tmp_path, capsys):
    """The official file trains with MODEL.WEIGHTS, sizes and durations on the command line."""
    data_of("voc")
    values = SMALL | SHORT | {"OUTPUT_DIR": tmp_path, "MODEL.WEIGHTS": folder / "output.pkl"}
    opts = [str(item) for pair in values.items() for item in pair]
    file = folder / f"{NAMES['voc']}_moco.yaml"
    assert main(["--config-file", str(file), "--engine", "detectron2", *opts]) == 0
    record = read_record(tmp_path / "run.json")
    assert (record.status, record.init, record.iterations) == ("done", "output", 2)
    assert record.task == "pascal_voc_R_50_C4_24k_moco"
    assert record.weights_source == "facebookresearch/moco (converted)"
    assert record.coverage["loaded"] == 265
