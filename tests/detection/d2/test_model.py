"""The plugin's parts on the real Detectron2: head, norms, weights, datasets, evaluator."""

import json

import pytest
import torch

from convert.verify import read_converted
from detection.config.engines import find_engine
from detection.config.task import load_task
from detection.engine.evaluate import GatheredEvaluator
from detection.engine.weights import load_converted
from detection.modeling.backbones import backbone_type
from tests.oracles.tiny_coco import write_coco
from tests.oracles.tiny_voc import VOC_NAMES, write_voc

pytestmark = [pytest.mark.detectron2, pytest.mark.usefixtures("detectron2")]


@pytest.fixture
def load(small_config, small_options, tmp_path):
    def call(*opts: object, engine: str = "detectron2", weights: object = "random"):
        base = [*small_options, "MODEL.WEIGHTS", str(weights), "OUTPUT_DIR", str(tmp_path / "out")]
        return load_task(small_config, [*base, *map(str, opts)], engine).cfg

    return call


NARROW_R50 = [
    "MODEL.RESNETS.DEPTH", 50,
    "MODEL.RESNETS.STEM_OUT_CHANNELS", 8,
    "MODEL.RESNETS.RES2_OUT_CHANNELS", 32,
    "MODEL.RESNETS.WIDTH_PER_GROUP", 8,
]  # fmt: skip


def build(cfg):
    from detectron2.modeling import build_model

    from detection.modeling.norms import with_process_norms

    torch.manual_seed(cfg.SEED)
    return build_model(with_process_norms(cfg, 1))


def test_the_extra_norm_is_the_official_one(load):
    """The head is Detectron2's res5 and a norm over its map, as in facebookresearch/moco."""
    from detectron2.modeling.roi_heads import Res5ROIHeads

    heads = build(load(*NARROW_R50)).roi_heads
    assert isinstance(heads, Res5ROIHeads)
    assert [name for name, _ in heads.res5.named_children()] == ["0", "1", "2", "norm"]
    assert isinstance(heads.res5.norm, torch.nn.BatchNorm2d)
    assert heads.res5.norm.num_features == 256
    maps = torch.randn(2, 128, 6, 6)
    heads.eval()
    heads.res5.norm.running_mean.fill_(3.0)
    expected = heads.res5.norm(heads.res5[2](heads.res5[1](heads.res5[0](maps))))
    assert torch.equal(heads.res5(maps), expected)
    assert expected.shape == (2, 256, 3, 3)


def test_nothing_is_frozen_and_every_parameter_learns(load):
    from detectron2.data import DatasetCatalog, build_detection_train_loader
    from detectron2.utils.events import EventStorage

    from detection.d2.catalog import register

    cfg = load("SOLVER.IMS_PER_BATCH", 4, "DATALOADER.NUM_WORKERS", 0)
    register(cfg, (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
    assert len(DatasetCatalog.get("shapes_trainval")) == 6
    model = build(cfg).train()
    with EventStorage():
        losses = model(next(iter(build_detection_train_loader(cfg))))
    assert set(losses) == {"loss_cls", "loss_box_reg", "loss_rpn_cls", "loss_rpn_loc"}
    sum(losses.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    stem = model.backbone.stem.conv1
    assert stem.weight.grad.abs().sum() > 0
    assert stem.norm.weight.grad.abs().sum() > 0


def test_plain_detectron2_loads_a_converted_file_alike(load, r18_file, tmp_path):
    """Its name-matching heuristics load every tensor where our direct names do."""
    from detectron2.checkpoint import DetectionCheckpointer

    cfg = load(weights=r18_file)
    theirs, ours = build(cfg), build(cfg)
    DetectionCheckpointer(theirs, str(tmp_path)).load(str(r18_file))
    load_converted(ours, read_converted(r18_file).model, backbone_type("build_resnet_backbone"))
    expected = ours.state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_model_is_built_without_its_training_data(load):
    """A model can be evaluated on another machine, without the training data."""
    cfg = load().clone()
    cfg.defrost()
    cfg.DATASETS.TRAIN = ("not_here",)
    assert find_engine("detectron2").build_model(cfg)


def test_a_folder_can_be_registered_twice(load, voc_folder):
    """A second task in one process neither fails nor takes the first one's for the user's."""
    from detectron2.data import MetadataCatalog

    from detection.d2.catalog import provide_user_datasets, register
    from detection.datasets import read_split

    cfg = load()
    for _ in range(2):
        register(cfg, (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
    meta = MetadataCatalog.get("shapes_test")
    assert (meta.evaluator_type, meta.year, meta.split) == ("pascal_voc", 2007, "test")
    assert meta.thing_classes == ["blue", "green", "red"]
    assert meta.dirname == str(voc_folder)
    provide_user_datasets(cfg)
    assert not read_split("shapes_test", cfg).from_catalog


def test_a_name_of_detectron2_is_read_by_us(load, tmp_path, monkeypatch):
    """A list of one image, which Detectron2 reads with numpy.loadtxt, would be a scalar there."""
    from detectron2.data import DatasetCatalog, MetadataCatalog

    from detection.d2.catalog import register

    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    write_voc(tmp_path / "VOC2007", {"train": 2, "val": 1}, names=VOC_NAMES)
    cfg = load("DATASETS.VOC_DIR", "", "DATASETS.TRAIN", "('voc_2007_train',)",
               "DATASETS.TEST", "('voc_2007_val',)", "MODEL.ROI_HEADS.NUM_CLASSES", 20)  # fmt: skip
    register(cfg, (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
    (record,) = DatasetCatalog.get("voc_2007_val")
    assert record["image_id"] == "000002" and record["annotations"]
    meta = MetadataCatalog.get("voc_2007_val")
    assert meta.evaluator_type == "pascal_voc" and meta.thing_classes[14] == "person"


def test_one_file_under_two_ids_is_two_images(load, tmp_path, monkeypatch):
    """The objects of a file are split over its ids, as in exports of one class at a time."""
    from detectron2.structures import Boxes, Instances

    from detection.datasets import read_split

    write_coco(tmp_path, {"val2017": 4}, crowd=False)
    path = tmp_path / "coco/annotations/instances_val2017.json"
    content = json.loads(path.read_text())
    first, second = content["images"][:2]
    first |= {key: second[key] for key in ("file_name", "width", "height")}
    path.write_text(json.dumps(content))
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    cfg = load()
    split = read_split("coco_2017_val", cfg)
    evaluator = GatheredEvaluator(split, cfg, tmp_path / "out", find_engine("detectron2"))
    for record in split.records:
        objects = record["annotations"]
        boxes = torch.tensor([item["bbox"] for item in objects]).float().reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        found = Instances((record["height"], record["width"]))
        found.pred_boxes, found.scores = Boxes(boxes), torch.ones(len(boxes))
        found.pred_classes = torch.tensor([item["category_id"] for item in objects]).long()
        evaluator.process([{**record}], [{"instances": found}])
    assert evaluator.evaluate()["bbox/AP"] == pytest.approx(100)
