"""Weights that are damaged, misnamed, never trained or overflowing, in every command alike."""

import pytest
import torch

from convert.convert_to_d2 import convert_in_memory
from convert.initial_weights import read_initial_weights
from moco.common.errors import DataError, UserError
from moco.knn import main as knn
from moco.modeling.soundness import check_arch
from tests.moco.classification.classify_runs import write_pretrained
from tests.oracles.resnets import make_resnet

Q = "module.encoder_q."
R50 = {"depth": 50, "num_groups": 1, "width_per_group": 64, "stem_out_channels": 64}


def converted(path):
    return convert_in_memory(path).notes


def classified(path):
    """What moco.linear and moco.finetune do first."""
    return read_initial_weights(str(path)).notes


def by_neighbors(path):
    """Refused, or the folder without images is what fails."""
    (path.parent / "no-images").mkdir()
    knn(["--checkpoint", str(path), "--data", str(path.parent / "no-images")])


COMMANDS = pytest.mark.parametrize("command", [converted, classified, by_neighbors])


def changed(tmp_path, change):
    """A checkpoint of this project after `change` of its content."""
    path = write_pretrained(tmp_path / "checkpoint_0000.pth.tar")
    content = torch.load(path, weights_only=True)
    content["config"] = {"AUG.CROP_PX": 16}
    change(content)
    torch.save(content, path)
    return path


def record(part, **values):
    return lambda content: content[part].update(values)


def weights(change):
    def apply(content):
        state = content["state_dict"]
        for key in [key for key in state if key.startswith(Q) and "num_b" not in key]:
            state[key] = change(key.removeprefix(Q), state[key])

    return apply


@COMMANDS
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (record("encoder", arch=["resnet10"]), "arch"),
        (record("encoder", arch="vit_small"), "arch"),
        (record("encoder", stem={}), "stem"),
        (record("encoder", width="0.125"), "width"),
        (record("encoder", width=1e9), "width"),
        (record("encoder", width=32768.0), "width 32768"),  # 64 x as wide takes all memory
        (record("encoder", width=True), "width"),
        (record("encoder", width=float("nan")), "width"),
        (record("input", mean=[float("nan")] * 3), "mean"),
        (record("input", mean=None), "mean"),
        (record("input", mean=[1e300, 0.0, 0.0]), "mean"),
        (record("input", std=[0.0, 1.0, 1.0]), "std"),
        (record("input", std=[float("inf")] * 3), "std"),
        (record("input", std="abc"), "std"),
        (record("input", channel_order=["RGB"]), "channel_order"),
        (lambda c: c.update(encoder={1: 2}), "arch"),
        (weights(lambda key, value: value * torch.nan), "NaN or Inf"),
        (weights(lambda key, value: value.bool()), "bool"),
        (weights(lambda key, value: value.int()), "int32"),
        (weights(lambda key, value: -value if "var" in key else value), "negative variance"),
        (weights(lambda key, value: value * 0 if key == "conv1.weight" else value), "all zero"),
        (weights(lambda key, value: torch.ones(1).expand(value.shape) if key == "conv1.weight"
                 else value), "conv1"),
        (weights(lambda key, value: value * 1e30 if "conv" in key else value), "features"),
        (weights(lambda key, value: value * 1e30 if key == "bn1.weight" else value), "features"),
    ],
)  # fmt: skip
def test_refused(command, change, reason, tmp_path):
    path = changed(tmp_path, change)
    with pytest.raises(DataError, match=reason) as caught:
        command(path)
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


@COMMANDS
@pytest.mark.parametrize("zero_init", [False, True])
@pytest.mark.parametrize("moved", [None, "bn1.bias", "layer2.0.bn1.weight"])
def test_never_trained(command, zero_init, moved, tmp_path):
    """Also where the last scale of a block starts at 0, and where one number is another."""

    def reset(key, value):
        if "bn" in key or "downsample.1" in key:
            one = key.endswith(("weight", "running_var")) and not (zero_init and "bn2.w" in key)
            value = torch.full_like(value, float(one))
            if key == moved:
                value[0] = 0.5
        return value

    path = changed(tmp_path, weights(reset))
    with pytest.raises(DataError, match="never trained"):
        command(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("KNN.CROP_PX", "16"), ("KNN.RESIZE_PX", [16]), ("AUG.CROP_PX", 1e9), ("AUG.CROP_PX", 10**6)],
)
def test_sizes_of_a_checkpoint(key, value, tmp_path):
    path = changed(tmp_path, lambda content: content["config"].update({key: value}))
    with pytest.raises(DataError, match=key):
        by_neighbors(path)


def test_a_sound_one_is_taken(tmp_path, capsys):
    path = changed(tmp_path, lambda content: None)
    (warning,) = classified(path)  # its scales are those of initialization
    assert "scale and shift" in warning
    assert any("scale and shift" in note for note in converted(path))
    with pytest.raises(UserError, match="no-images"):
        by_neighbors(path)
    assert "note: " in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["vit_small", "resnet50d", "resnet101d", "ResNet-101", "x\x1b[2J"])
def test_an_arch_that_no_plain_resnet_has(arch):
    warnings = []
    check_arch(arch, R50, "x", [], warnings)
    assert len(warnings) == 1 and "\x1b" not in warnings[0]


@pytest.mark.parametrize("arch", ["resnet50", "ResNet50", "rn50", "R-50", None, ["resnet50"]])
def test_an_arch_that_a_plain_resnet_has(arch):
    notes, warnings = [], []
    check_arch(arch, R50, "x", notes, warnings)
    assert not warnings and len(notes) == (arch in ("ResNet50", "rn50", "R-50"))


def test_the_arch_of_the_official_code(tmp_path):
    """Named as another network by a file of others: said by the converter and by moco.linear."""
    state = {f"module.{key}": value for key, value in make_resnet().state_dict().items()}
    torch.save({"arch": "vit_small", "state_dict": state}, tmp_path / "a.pth")
    for command in (converted, classified):
        assert any("'vit_small'" in text for text in command(tmp_path / "a.pth"))
    torch.save({"arch": "resnet34", "state_dict": state}, tmp_path / "a.pth")
    for command in (converted, classified):
        with pytest.raises(DataError, match="says arch 'resnet34'"):
            command(tmp_path / "a.pth")
