"""Damaged, misnamed, untrained and overflowing weights, in every command alike."""

import pytest
import torch

from convert.convert_to_d2 import convert_in_memory
from convert.initial_weights import read_initial_weights
from moco.common.errors import DataError, UserError
from moco.modeling.soundness import check_arch
from tests.moco.classification.classify_runs import write_pretrained
from tests.moco.commands import knn
from tests.oracles.resnets import make_resnet

R50 = {"depth": 50, "num_groups": 1, "width_per_group": 64, "stem_out_channels": 64}


def converted(path):
    return convert_in_memory(path).notes


def classified(path):
    """Read weights as linear classification and fine-tuning do."""
    return read_initial_weights(str(path)).notes


def by_neighbors(path):
    """Run kNN, which refuses the weights or fails at a folder without images."""
    (path.parent / "no-images").mkdir()
    knn(["--checkpoint", str(path), "--data", str(path.parent / "no-images")])


def changed(tmp_path, change):
    """Write a checkpoint of this project after `change` of its content."""
    path = write_pretrained(tmp_path / "checkpoint_0000.pth.tar")
    content = torch.load(path, weights_only=True)
    content["config"] = {"AUG.CROP_PX": 16}
    change(content)
    torch.save(content, path)
    return path


def test_a_sound_one_is_taken(tmp_path, capsys):
    path = changed(tmp_path, lambda content: None)
    (warning,) = classified(path)  # its scales are those of initialization
    assert "scale and shift" in warning
    assert any("scale and shift" in note for note in converted(path))
    with pytest.raises(UserError, match="no-images"):
        by_neighbors(path)
    assert "note: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("archs", "counts"),  # numbers of notes and of warnings
    [
        (("vit_small", "resnet50d", "resnet101d", "ResNet-101", "x\x1b[2J"), (0, 1)),
        (("ResNet50", "rn50", "R-50"), (1, 0)),
        (("resnet50", None, ["resnet50"]), (0, 0)),
    ],
)
def test_recorded_names_of_a_resnet50(archs, counts):
    for arch in archs:
        notes, warnings = [], []
        check_arch(arch, R50, "x", notes, warnings)
        assert (len(notes), len(warnings)) == counts and "\x1b" not in "".join(warnings), arch


def test_the_arch_of_the_official_code(tmp_path):
    """Converter and classifier warn of a file that names another network, or refuse it."""
    state = {f"module.{key}": value for key, value in make_resnet().state_dict().items()}
    torch.save({"arch": "vit_small", "state_dict": state}, tmp_path / "a.pth")
    for command in (converted, classified):
        assert any("'vit_small'" in text for text in command(tmp_path / "a.pth"))
    torch.save({"arch": "resnet34", "state_dict": state}, tmp_path / "a.pth")
    for command in (converted, classified):
        with pytest.raises(DataError, match="says arch 'resnet34'"):
            command(tmp_path / "a.pth")
