"""`detection.d2.setup`, the call of a custom train_net.py (docs/guides/own_train_net.md)."""

import pytest
import torch

from moco.common.errors import UserError
from moco.common.files import load_torch

pytestmark = [pytest.mark.detectron2, pytest.mark.usefixtures("detectron2")]

SMALL = "configs/voc/faster_rcnn_R_18_C4_small.yaml"


@pytest.fixture
def configure(r18_file, voc_folder):
    """Return Detectron2's config after `setup`, for flags and overrides of the small task."""
    from detectron2.config import get_cfg
    from detectron2.engine import default_argument_parser

    import detection.d2

    def call(*opts: object, weights: object = r18_file, data: object = voc_folder, flags=()):
        values = ["MODEL.WEIGHTS", weights, "DATASETS.VOC_DIR", data, "MODEL.DEVICE", "cpu", *opts]
        args = default_argument_parser().parse_args(
            ["--config-file", "faster_rcnn_R_18_C4_small", *flags, *map(str, values)]
        )
        cfg = get_cfg()
        assert cfg.INPUT.FORMAT == "BGR" and cfg.MODEL.RESNETS.STRIDE_IN_1X1
        detection.d2.setup(cfg, args)
        assert args.config_file.endswith(SMALL)  # which Detectron2 opens
        return cfg

    return call


def test_the_weights_contract_and_the_folder_set_the_keys(configure, r18_file):
    """Plain Detectron2 then works: its config, catalog, model and checkpointer."""
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.data import DatasetCatalog
    from detectron2.modeling import build_model

    cfg = configure("MODEL.RESNETS.NORM", "BN")
    assert cfg.INPUT.FORMAT == "RGB" and not cfg.MODEL.RESNETS.STRIDE_IN_1X1
    assert cfg.MODEL.PIXEL_STD == [58.395, 57.12, 57.375]
    assert cfg.DATASETS.TRAIN == ("shapes_trainval",) and cfg.DATASETS.TEST == ("shapes_test",)
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3
    assert len(DatasetCatalog.get("shapes_trainval")) == 6
    model = build_model(cfg)
    DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)
    stored = load_torch(r18_file)["model"]["res4.1.conv2.weight"]
    assert torch.equal(model.backbone.res4[1].conv2.weight, stored)


def test_the_weights_choose_builder_and_preprocessing(configure, narrow_r18_file):
    """Detectron2's own builder has only one width of ResNet-18."""
    cfg = configure("MODEL.RESNETS.RES2_OUT_CHANNELS", 16, weights=narrow_r18_file)
    assert cfg.MODEL.BACKBONE.NAME == "build_transfer_resnet_backbone"
    assert cfg.MODEL.RESNETS.STEM_OUT_CHANNELS == 16
    cfg = configure(weights="random")
    assert cfg.MODEL.WEIGHTS == "" and cfg.INPUT.FORMAT == "RGB"


def test_other_names_in_detectron2s_catalog_stay_as_they_are(configure):
    """Several test splits are kept as well; class names are the user's evaluator's concern."""
    from detectron2.data import DatasetCatalog

    DatasetCatalog.register("mine", lambda: [{"file_name": "a.jpg"}])
    DatasetCatalog.register("also_mine", lambda: [])
    names = ("DATASETS.TRAIN", "('mine',)", "DATASETS.TEST", "('mine', 'also_mine')")
    cfg = configure(*names, "MODEL.ROI_HEADS.NUM_CLASSES", 7, data="")
    assert cfg.DATASETS.TEST == ("mine", "also_mine") and cfg.MODEL.ROI_HEADS.NUM_CLASSES == 7
    assert DatasetCatalog.get("mine") == [{"file_name": "a.jpg"}]


def test_evaluation_takes_the_config_beside_the_model(configure, tmp_path):
    """The training data need not be there."""
    (tmp_path / "config.yaml").write_text(configure("INPUT.MIN_SIZE_TEST", 96).dump())
    (tmp_path / "model_final.pth").touch()
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    model = str(tmp_path / "model_final.pth")
    cfg = configure(weights=model, flags=("--eval-only",))
    assert cfg.INPUT.FORMAT == "RGB" and cfg.MODEL.WEIGHTS == model
    cfg = configure("OUTPUT_DIR", tmp_path, flags=("--eval-only", "--resume"))
    assert cfg.MODEL.WEIGHTS == model
    with pytest.raises(UserError, match=r"INPUT.FORMAT: you set 'BGR', but the model"):
        configure("INPUT.FORMAT", "BGR", weights=model, flags=("--eval-only",))


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        (("INPUT.FORMAT", "BGR"), "INPUT.FORMAT: you set 'BGR', but the weights .* need 'RGB'"),
        (("MODEL.ROI_HEADS.NUM_CLASSES", 20), "got 20, but shapes_test has 3 classes"),
        (("MODEL.WEIGHTS", "moco_v2_r50_800ep"), "cannot open this name; set the file that"),
    ],
)
def test_a_contradiction_is_one_line(configure, opts, message):
    with pytest.raises(UserError, match=message) as error:
        configure(*opts)
    assert "\n" not in str(error.value)


def test_a_checkpoint_that_is_not_converted_is_refused(configure, tmp_path):
    """Detectron2's checkpointer would only warn, and leave the backbone randomly initialized."""
    torch.save({"conv1.weight": torch.zeros(64, 3, 7, 7)}, tmp_path / "raw.pth")
    with pytest.raises(UserError, match=r"raw.pth: not a file that .*; convert the checkpoint"):
        configure(weights=tmp_path / "raw.pth")
