"""A vision transformer through the commands: pre-training, kNN, linear, fine-tuning, conversion."""

import pytest
import torch

from convert.convert_to_d2 import convert_file
from convert.initial_weights import read_initial_weights
from convert.verify import read_converted
from moco.common.errors import DataError, UserError
from moco.common.run import read_record
from moco.engine.checkpoint import CLASSIFIER_FORMAT, list_checkpoints
from moco.modeling import archs
from moco.modeling.archs import ViTArch, ViTSpec
from moco.modeling.encoder import build_backbone, load_backbone
from tests.moco.classification.classify_runs import words
from tests.moco.commands import finetune, knn, linear
from tests.moco.commands import pretrain as main
from tests.oracles.training import metrics, newest

SIDE = 32
KEYS = {
    "MODEL__ARCH": "vit_micro",
    "MODEL__STEM": "imagenet",
    "MODEL__WIDTH": 1,
    "MOCO__MECHANISM": "moco_v3",
    "MOCO__K": 8,
    "MOCO__BN_SPLITS": 1,
    "MOCO__MLP_DIM": 32,
    "AUG__CROP_PX": SIDE,
    "SOLVER__OPTIMIZER": "adamw",
    "SOLVER__BASE_LR": 0.001,
}


@pytest.fixture(scope="module")
def checkpoint(images, tiny, labeled, tmp_path_factory):
    """Pre-train for three steps, with the kNN monitor at the end."""
    folder = tmp_path_factory.mktemp("vit") / "run"
    data = {"DATA__ROOT": images, "DATA__KNN_ROOT": labeled, "KNN__K": 3, "OUTPUT_DIR": folder}
    main(tiny(SOLVER__MAX_ITERS=3, **data, **KEYS))
    return list_checkpoints(folder)[-1]


@pytest.fixture(scope="module")
def state(checkpoint):
    return newest(checkpoint.parent)["state_dict"]


def part(state, start):
    return {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}


def test_knn_is_that_of_the_monitor(checkpoint, labeled, capsys, tmp_path):
    logged = [line["knn/top1"] for line in metrics(checkpoint.parent) if "knn/top1" in line]
    where = ["--checkpoint", str(checkpoint), "--data", str(labeled), "--k", "3"]
    knn([*where, "--output", str(tmp_path / "knn")])
    record = read_record(tmp_path / "knn/run.json")
    assert record.metrics["knn/top1"] == logged[0] and record.task == "knn_vit_micro"
    with pytest.raises(UserError, match=r"--crop-px: got 48.* 32 px"):
        knn([*where, "--crop-px", "48"])


def test_conversion_knows_its_heads(checkpoint, state, tmp_path):
    report = convert_file(checkpoint, tmp_path / "out.pth")
    converted = read_converted(tmp_path / "out.pth")
    architecture = converted.contract.architecture
    assert (architecture.num_heads, architecture.image_size) == (4, SIDE)
    assert report.dropped["predictor"] == 10 and report.dropped["key encoder"] > 50
    query = part(state, "module.encoder_q.")
    assert all(torch.equal(x, query[name]) for name, x in converted.model.items())
    with pytest.raises(UserError, match="cls_token"):  # a detector has no place for it
        read_initial_weights(str(tmp_path / "out.pth"))


def test_what_is_read_is_what_was_trained(checkpoint, state):
    query, weights = part(state, "module.encoder_q."), read_initial_weights(str(checkpoint))
    assert weights.spec == ViTSpec("vit_micro", SIDE)
    assert weights.state.keys() == {k for k in query if not k.startswith("head.")}
    assert all(torch.equal(x, query[name]) for name, x in weights.state.items())
    assert "predictor.0.weight" in weights.extra and "encoder_q.head.0.weight" in weights.extra


def test_a_file_of_the_official_code(tmp_path, monkeypatch):
    """Its layout implies 12 heads, and the class token is loaded."""
    monkeypatch.setitem(archs.VITS, "vit_one_block", ViTArch(384, 1, 12))
    torch.manual_seed(0)
    spec = ViTSpec("vit_one_block", SIDE)
    network = build_backbone(spec)
    for name, p in network.named_parameters():
        torch.nn.init.normal_(p, mean=float("norm" in name), std=0.02)
    names = {f"module.base_encoder.{k}": v for k, v in network.state_dict().items()}
    names |= {f"module.momentum_encoder.{k}": v for k, v in network.state_dict().items()}
    torch.save({"epoch": 300, "arch": "vit_small", "state_dict": names}, tmp_path / "s.pth.tar")
    weights = read_initial_weights(str(tmp_path / "s.pth.tar"))
    assert (weights.spec, weights.source) == (spec, "facebookresearch/moco-v3")
    x = torch.randn(1, 3, SIDE, SIDE)
    with torch.no_grad():
        assert torch.equal(load_backbone(spec, weights.state)(x), network(x))


@pytest.mark.parametrize("program", [linear, finetune])
@pytest.mark.parametrize("start", ["pretrained", "random"])
def test_classification(checkpoint, labeled, tmp_path, program, start):
    keys = {"AUG__CROP_PX": SIDE, "SOLVER__MAX_EPOCHS": 1, "SOLVER__MILESTONES_EPOCHS": "()"}
    keys |= {"SOLVER__BASE_LR": 0.01}
    arguments = words(tmp_path / "run", labeled, checkpoint, **keys)
    if start == "random":
        arguments[1] = "random"
        arguments += ["MODEL.ARCH", "vit_micro"]
    program(arguments)
    content = newest(tmp_path / "run", CLASSIFIER_FORMAT)
    assert content["encoder"] == {"arch": "vit_micro", "image_size": SIDE}
    trained, before = part(content["state_dict"], "module."), read_initial_weights(str(checkpoint))
    assert trained["head.weight"].shape == (3, 128)
    same = torch.equal(trained["norm.weight"], before.state["norm.weight"])
    assert same == (program is linear and start == "pretrained")
    record = read_record(tmp_path / "run/run.json")
    assert record.task.endswith("_vit_micro") and 0 <= record.metrics[f"{record.kind}/top1"] <= 100


def test_images_of_another_size_are_refused(checkpoint, labeled, tmp_path, opts):
    with pytest.raises(UserError, match=r"AUG\.CROP_PX: got 48"):
        linear(words(tmp_path / "run", labeled, checkpoint, AUG__CROP_PX=48))
    keys = {**KEYS, "AUG__CROP_PX": 48, "MODEL__WEIGHTS": checkpoint}
    with pytest.raises(UserError, match=r"AUG\.CROP_PX: got 48"):
        main(opts("from", **keys))


def test_pretraining_from_its_own_weights(checkpoint, state, opts, tmp_path):
    """Both heads and the key encoder are loaded."""
    keys = {**KEYS, "SOLVER__BASE_LR": 0, "SOLVER__MAX_ITERS": 1}
    main(opts(MODEL__WEIGHTS=checkpoint, **keys))
    after = newest(tmp_path / "run")["state_dict"]
    moving = ("running_mean", "running_var", "num_batches_tracked")
    for name in (name for name in state if not name.endswith(moving)):
        torch.testing.assert_close(after[name], state[name], rtol=0, atol=1e-6)
    assert read_record(tmp_path / "run/run.json").coverage["left_at_init"] == []


@pytest.mark.parametrize(
    ("record", "reason"),
    [({"image_size": "big"}, "image_size"), ({"image_size": 33}, "33"), ({}, "image_size")],
)
def test_a_damaged_record_is_refused(checkpoint, tmp_path, record, reason):
    content = torch.load(checkpoint, weights_only=True)
    content["encoder"] = {"arch": "vit_micro", **record}
    torch.save(content, tmp_path / "damaged.pth.tar")
    with pytest.raises(DataError, match=reason):
        read_initial_weights(str(tmp_path / "damaged.pth.tar"))
