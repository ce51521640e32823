"""The command lines of the two protocols, pinned."""

from pathlib import Path

import pytest

from moco import pretrain
from moco.classification.classify import build_parser, parse_args
from moco.finetune import FINETUNE
from moco.linear import LINEAR


@pytest.mark.parametrize("protocol", [LINEAR, FINETUNE], ids=lambda p: p.kind)
def test_flags_are_these(protocol):
    flags = {word for action in build_parser(protocol)._actions for word in action.option_strings}
    expected = (
        "-h --help --config-file --resume --extend --overwrite --debug --schedule -a --arch -j "
        "--workers -b --batch-size --lr --learning-rate --momentum --wd --weight-decay --epochs "
        "--seed --dist-timeout --checkpoint --init"
    )
    assert flags == set(expected.split())


def test_lr_sets_the_rate_of_the_run():
    args = parse_args(FINETUNE, ["--checkpoint", "random", "-a", "resnet18", "--lr", "0.2"])
    pairs = dict(zip(args.opts[::2], args.opts[1::2], strict=True))
    assert pairs["SOLVER.RANDOM_LR"] == "0.2"
    args = parse_args(FINETUNE, ["--checkpoint", "x", "--lr", "0.2"])
    assert "SOLVER.RANDOM_LR" not in args.opts


@pytest.mark.parametrize(
    ("line", "opts"),
    [
        ("--schedule 60 80", ["SOLVER.MILESTONES_EPOCHS", "(60,80,)"]),
        ("--schedule", ["SOLVER.MILESTONES_EPOCHS", "()"]),
        # Numbers in the KEY VALUE pairs that follow are not epochs.
        ("--schedule 60 80 SEED 3", ["SOLVER.MILESTONES_EPOCHS", "(60,80,)", "SEED", "3"]),
        ("SEED 3 --schedule 60", ["SOLVER.MILESTONES_EPOCHS", "(60,)", "SEED", "3"]),
    ],
)
def test_schedule(line, opts):
    assert parse_args(LINEAR, ["--checkpoint", "x", *line.split()]).opts == opts


def test_a_checkpoint_below_the_home_folder():
    """A shell leaves the tilde of `--resume=~/x` alone."""
    file, word = str(Path.home() / "a.pth.tar"), "--resume=~/a.pth.tar"
    assert parse_args(LINEAR, ["--checkpoint", "x", word]).resume == file
    assert pretrain.parse_args([word]).resume == file
