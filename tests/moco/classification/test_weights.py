"""Which files are a start, what is dropped, and what is refused."""

import pytest
import torch
from safetensors.torch import save_file
from torchvision.models import resnet18

from moco.classification.config import IMAGENET_MEAN
from moco.classification.weights import read_weights
from moco.common.errors import DataError, UserError
from moco.modeling.encoder import EncoderSpec, build_backbone
from tests.moco.classification.classify_runs import MEAN, SPEC, STD, write_pretrained
from tests.oracles.resnets import randomize

IMAGENET = EncoderSpec("resnet10", "imagenet", 0.125)


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    network = build_backbone(IMAGENET)
    randomize(network)
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def official(state):
    """As main_moco.py saves it, MLP head included."""
    names = {f"module.encoder_{e}.{k}": v for e in "qk" for k, v in state.items()}
    for e in "qk":
        for part in ("fc.0.weight", "fc.0.bias", "fc.2.weight", "fc.2.bias"):
            names[f"module.encoder_{e}.{part}"] = torch.zeros(4, 4)
    names |= {"module.queue": torch.zeros(4, 8), "module.queue_ptr": torch.zeros(1).long()}
    return {"epoch": 200, "arch": "resnet10", "state_dict": names, "optimizer": {}}


def example(state):
    """As pytorch/examples and main_lincls.py save it."""
    head = {"fc.weight": torch.zeros(3, 64), "fc.bias": torch.zeros(3)}
    names = {f"module.{k}": v for k, v in {**state, **head}.items()}
    return {"epoch": 90, "arch": "resnet10", "state_dict": names, "best_acc1": 1.0}


def plain(state):
    return {**state, "fc.weight": torch.zeros(3, 64), "fc.bias": torch.zeros(3)}


LAYOUTS = {"facebookresearch/moco": official, "pytorch/examples": example, "torchvision": plain}


def save(tmp_path, content, name="weights.pth.tar"):
    torch.save(content, tmp_path / name)
    return str(tmp_path / name)


@pytest.mark.parametrize("source", LAYOUTS)
def test_files_of_others(state, tmp_path, source):
    weights = read_weights(save(tmp_path, LAYOUTS[source](state)))
    assert (weights.source, weights.spec, weights.init) == (source, IMAGENET, "weights")
    assert weights.mean == IMAGENET_MEAN and len(weights.sha256) == 64
    assert weights.state.keys() == state.keys()
    assert all(torch.equal(weights.state[name], value) for name, value in state.items())


def test_safetensors(state, tmp_path):
    """As convert/convert_to_d2.py --to torchvision writes them."""
    save_file(state, tmp_path / "mine.safetensors")
    weights = read_weights(str(tmp_path / "mine.safetensors"))
    assert (weights.source, weights.spec, weights.init) == ("torchvision", IMAGENET, "mine")
    assert all(torch.equal(weights.state[name], value) for name, value in state.items())


def test_a_checkpoint_of_this_project(tmp_path):
    path = write_pretrained(tmp_path / "checkpoint_0199.pth.tar")
    weights = read_weights(str(path))
    assert (weights.spec, weights.mean, weights.std) == (SPEC, MEAN, STD)
    assert weights.source == "moco-transfer/1"
    assert weights.init == f"{tmp_path.name}_checkpoint_0199"
    assert read_weights(str(path), init="mine").init == "mine"
    content = torch.load(path, weights_only=True)["state_dict"]
    for name, value in weights.state.items():
        assert torch.equal(value, content[f"module.encoder_q.{name}"])


def test_torchvisions_own_network_is_recognized(tmp_path):
    torch.manual_seed(0)
    model = resnet18()
    randomize(model)
    path = save(tmp_path, model.state_dict(), "resnet18.pth")
    weights = read_weights(path)
    assert weights.spec == EncoderSpec("resnet18")
    mine = build_backbone(weights.spec).eval()
    mine.load_state_dict(weights.state)
    model.fc = torch.nn.Identity()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(mine(x), model.eval()(x))


def test_files_without_batch_counters(state, tmp_path):
    old = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
    assert read_weights(save(tmp_path, old)).spec == IMAGENET


def test_a_stem_that_the_shapes_do_not_tell(tmp_path):
    network = build_backbone(SPEC)
    randomize(network)
    path = save(tmp_path, network.state_dict())
    with pytest.raises(UserError, match=r"MODEL\.STEM cifar \(1\) or stride2 \(2\)"):
        read_weights(path)
    assert read_weights(path, stem="stride2").spec == SPEC
    assert read_weights(path, stem="cifar").spec.stem == "cifar"


def changed(state, **changes):
    """`state` with tensors replaced (dots as `__`) or, None, left out."""
    new = dict(state)
    for name, value in changes.items():
        new[name.replace("__", ".")] = value
    return {name: value for name, value in new.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bn1__weight": None}, r"not a whole resnet10 .*: bn1\.weight is missing$"),
        ({"layer4__0__conv2__weight": None}, r"layer4\.0\.conv2\.weight is missing"),
        ({"layer4__9__conv2__weight": torch.zeros(1)}, "'layer4.9.conv2.weight' is unexpected"),
        ({"bn1__weight": torch.zeros(9)}, r"bn1\.weight is of shape \[9\] instead of \[8\]"),
        ({"bn1__weight": torch.full((8,), torch.nan)}, r"NaN or Inf: bn1\.weight"),
        ({"bn1__running_var": torch.full((8,), torch.inf)}, r"NaN or Inf: bn1\.running_var"),
        ({"bn1__weight": torch.zeros(8).long()}, "is of torch.int64, expected floating"),
        ({"bn1__weight": torch.zeros(8).to_sparse()}, "expected dense"),
        ({"bn1__weight": [1.0] * 8}, "is a list, expected"),
        ({"conv1__weight": torch.zeros(8)}, r"conv1\.weight is of shape \[8\]"),
    ],
)
@pytest.mark.parametrize("source", LAYOUTS)
def test_networks_that_are_not_whole(state, tmp_path, source, changes, message):
    path = save(tmp_path, LAYOUTS[source](changed(state, **changes)))
    with pytest.raises(DataError, match=message) as error:
        read_weights(path)
    assert str(error.value).startswith(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "unknown layout"),
        ({"model": {}}, r"unknown layout \(it holds 'model'\)"),
        ({"state_dict": {"encoder.conv1.weight": torch.zeros(1)}}, "'encoder.conv1.weight'"),
        ([1, 2], "holds list"),
    ],
)
def test_other_files(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read_weights(save(tmp_path, content))


def test_keys_of_something_else_are_not_passed_over(state, tmp_path):
    content = official(state)
    content["state_dict"]["module.decoder.weight"] = torch.zeros(1)
    with pytest.raises(DataError, match=r"keys that a facebookresearch/moco .*'module\.decoder"):
        read_weights(save(tmp_path, content))


def test_only_a_key_encoder_is_not_enough(state, tmp_path):
    content = official(state)
    names = content["state_dict"]
    for name in [n for n in names if n.startswith("module.encoder_q.")]:
        del names[name]
    with pytest.raises(DataError, match="unknown layout"):
        read_weights(save(tmp_path, content))


def test_files_that_are_no_weights(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_weights(str(tmp_path / "nowhere.pth"))
    (tmp_path / "text.pth").write_text("random")
    with pytest.raises(DataError, match=r"text\.pth: this is a text file"):
        read_weights(str(tmp_path / "text.pth"))
    (tmp_path / "empty.pth").touch()
    with pytest.raises(DataError, match="0 bytes"):
        read_weights(str(tmp_path / "empty.pth"))


class Evil:
    def __reduce__(self):
        import os

        return os.mkdir, ("evil-was-here",)


def test_nothing_in_a_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="unknown layout"):
        read_weights(save(tmp_path, {"state_dict": Evil()}))
    assert not (tmp_path / "evil-was-here").exists()


def test_random_is_a_word_and_needs_a_network(state, tmp_path):
    with pytest.raises(UserError, match=r"MODEL\.ARCH is not set; .* -a resnet50"):
        read_weights("random")
    weights = read_weights("random", "resnet18")
    assert weights.state is None and weights.spec == EncoderSpec("resnet18")
    with pytest.raises(UserError, match="another --init"):
        read_weights(save(tmp_path, plain(state), "random.pth"))


@pytest.mark.parametrize("source", LAYOUTS)
def test_another_network_than_asked_for(state, tmp_path, source):
    path = save(tmp_path, LAYOUTS[source](state))
    with pytest.raises(DataError, match="not a whole resnet18"):
        read_weights(path, arch="resnet18")
    with pytest.raises(DataError, match="not a whole resnet10 of width 1 "):
        read_weights(path, width=1.0)
    with pytest.raises(DataError, match=r"cifar stem: conv1\.weight is of shape"):
        read_weights(path, stem="cifar")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": {}}, "damaged record"),
        ({"input": {"mean": [1, 2], "std": [1, 1]}}, "damaged record"),
        ({"input": {"mean": [0, 0, 0], "std": [1, 0, 1]}}, "damaged record"),
        ({"step": None}, "malformed 'step'"),
    ],
)
def test_a_damaged_checkpoint_of_this_project(tmp_path, change, message):
    path = write_pretrained(tmp_path / "a.pth.tar")
    torch.save({**torch.load(path, weights_only=True), **change}, path)
    with pytest.raises(DataError, match=message):
        read_weights(str(path))
