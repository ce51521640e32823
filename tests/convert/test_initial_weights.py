"""Initial weights of training and evaluation: accepted files and refusals."""

import pytest
import torch
from torchvision.models import resnet18

from convert.convert_to_d2 import convert_file
from convert.initial_weights import read_initial_weights
from moco.common.errors import UserError
from moco.engine.keys import IMAGENET_MEAN, IMAGENET_STD
from moco.modeling import archs
from moco.modeling.archs import ViTArch, ViTSpec
from moco.modeling.encoder import COUNTER, EncoderSpec, build_backbone, load_backbone
from tests.moco.classification.classify_runs import MEAN, SPEC, STD, write_pretrained
from tests.oracles.layouts_vit import timm_vit
from tests.oracles.resnets import randomize

IMAGENET = EncoderSpec("resnet10", "imagenet", 0.125)


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    network = build_backbone(IMAGENET)
    randomize(network)
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def official(state):
    """Return a checkpoint as main_moco.py saves it, with its MLP head."""
    names = {f"module.encoder_{e}.{k}": v for e in "qk" for k, v in state.items()}
    for e in "qk":
        for part in ("fc.0.weight", "fc.0.bias", "fc.2.weight", "fc.2.bias"):
            names[f"module.encoder_{e}.{part}"] = torch.zeros(4, 4)
    names |= {"module.queue": torch.zeros(4, 8), "module.queue_ptr": torch.zeros(1).long()}
    return {"epoch": 200, "arch": "resnet10", "state_dict": names, "optimizer": {}}


def example(state):
    """Return a checkpoint as pytorch/examples and main_lincls.py save it."""
    head = {"fc.weight": torch.zeros(3, 64), "fc.bias": torch.zeros(3)}
    names = {f"module.{k}": v for k, v in {**state, **head}.items()}
    return {"epoch": 90, "arch": "resnet10", "state_dict": names, "best_acc1": 1.0}


def plain(state):
    return {**state, "fc.weight": torch.zeros(3, 64), "fc.bias": torch.zeros(3)}


def solo(state):
    """Return the layout of vturrisi/solo-learn, which only the converter knows."""
    names = {f"backbone.{k}": v for k, v in state.items()}
    names |= {"classifier.weight": torch.zeros(3, 64), "projector.0.weight": torch.zeros(3, 64)}
    return {"pytorch-lightning_version": "1.6", "epoch": 3, "state_dict": names}


LAYOUTS = {
    "facebookresearch/moco": official,
    "pytorch/examples imagenet": example,
    "torchvision": plain,
    "vturrisi/solo-learn": solo,
}


def save(tmp_path, content, name="weights.pth.tar"):
    torch.save(content, tmp_path / name)
    return str(tmp_path / name)


def assert_holds(weights, state):
    for name, value in weights.state.items():
        assert name.endswith(COUNTER) or torch.equal(value, state[name]), name


@pytest.mark.parametrize("source", LAYOUTS)
def test_files_of_others(state, tmp_path, source):
    weights = read_initial_weights(save(tmp_path, LAYOUTS[source](state)))
    assert (weights.source, weights.spec, weights.init) == (source, IMAGENET, "weights")
    assert (weights.mean, weights.std) == (IMAGENET_MEAN, IMAGENET_STD)
    assert len(weights.sha256) == 64
    assert_holds(weights, state)


@pytest.mark.parametrize("to", ["detectron2", "torchvision"])
def test_what_the_converter_writes(state, tmp_path, to):
    path = save(tmp_path, official(state))
    convert_file(path, tmp_path / "mine.safetensors", to=to)
    weights = read_initial_weights(str(tmp_path / "mine.safetensors"))
    assert (weights.spec, weights.init) == (IMAGENET, "mine")
    assert_holds(weights, state)


def test_a_checkpoint_of_this_project(tmp_path):
    path = write_pretrained(tmp_path / "checkpoint_0199.pth.tar")
    weights = read_initial_weights(str(path))
    assert (weights.spec, weights.mean, weights.std) == (SPEC, MEAN, STD)
    assert weights.init == f"{tmp_path.name}_checkpoint_0199"
    assert read_initial_weights(str(path), init="mine").init == "mine"
    content = torch.load(path, weights_only=True)["state_dict"]
    query = {name.removeprefix("module.encoder_q."): value for name, value in content.items()}
    assert_holds(weights, query)
    assert torch.equal(weights.extra["queue"], content["module.queue"])


def test_torchvisions_own_network_gives_the_same_features(tmp_path):
    torch.manual_seed(0)
    model = resnet18()
    randomize(model)
    weights = read_initial_weights(save(tmp_path, model.state_dict(), "resnet18.pth"))
    assert weights.spec == EncoderSpec("resnet18")
    model.fc = torch.nn.Identity()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(load_backbone(weights.spec, weights.state)(x), model.eval()(x))


def test_a_stem_that_the_shapes_do_not_tell(tmp_path):
    network = build_backbone(SPEC)
    randomize(network)
    path = save(tmp_path, network.state_dict())
    for stem in ("stride2", "cifar"):
        assert read_initial_weights(path, stem=stem).spec.stem == stem


def test_an_option_that_only_the_converter_has(tmp_path):
    path = save(tmp_path, timm_vit(0, 48, 3, depth=2).state_dict())
    with pytest.raises(UserError, match=r"give --num-heads .*; convert the file first with this"):
        read_initial_weights(path)


def test_random_is_a_word():
    weights = read_initial_weights("random", "resnet18")
    assert weights.state is None and weights.spec == EncoderSpec("resnet18")


def two_networks(layout):
    """Return a file with two vision transformers of one naming, and the state of the second."""
    spec = ViTSpec("vit_one_block", 32)
    one, other = build_backbone(spec), build_backbone(spec)
    for network in (one, other):
        for name, parameter in network.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.02)
    containers, start, extra = layout
    first, second = (
        {start + name: tensor.clone() for name, tensor in network.state_dict().items()}
        for network in (other, one)
    )
    return {containers[0]: first, containers[1]: second, **extra}, one.state_dict()


@pytest.mark.parametrize(
    "layout",
    [
        (("state_dict", "state_dict_ema"), "", {"version": 2, "arch": "vit_small_patch16_224"}),
        (
            ("state_dict", "state_dict_ema"),
            "module.",
            {"version": 2, "arch": "vit_small_patch16_224"},
        ),
        (("student", "teacher"), "module.backbone.", {"dino_loss": {}}),
        (("student", "teacher"), "backbone.", {"ibot_loss": {}}),
        (("encoder", "target_encoder"), "module.", {"prototypes": torch.ones(8, 4)}),
    ],
    ids=["timm", "timm-wrapped", "dino", "ibot", "msn"],
)
def test_class_token_and_norm_are_those_of_the_chosen_network(layout, tmp_path, monkeypatch):
    monkeypatch.setitem(archs.VITS, "vit_one_block", ViTArch(384, 1, 6))
    content, expected = two_networks(layout)
    weights = read_initial_weights(save(tmp_path, content))
    for name in ("blocks.0.attn.qkv.weight", "cls_token", "norm.weight", "norm.bias"):
        assert torch.equal(weights.state[name], expected[name]), name
