"""The command line of the converter: its report, its next command, its flags."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from convert import convert_to_d2
from convert.convert_to_d2 import convert_file, main
from convert.inspect_file import inspect_file
from moco.common.files import load_torch, sha256_file
from moco.engine.checkpoint import checkpoint_name
from tests.oracles.checkpoints import official, own
from tests.oracles.resnets import make_resnet

ROOT = Path(__file__).resolve().parent.parent.parent

Save = Callable[..., Path]


def test_report(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, dst = save(official()), tmp_path / "out 1.pth"
    assert main([str(src), str(dst)]) == 0
    out = capsys.readouterr().out
    for text in (
        "facebookresearch/moco checkpoint, epoch 200, MLP head",
        "ResNet-18, 8 stem channels",
        "100 mapped; dropped: 20 batch counter, 4 head, 124 key encoder, 2 queue,",
        "left at init: 20 batch counter",
        "encoder       query (--encoder selects key)",
        "RGB, scale 0..255, mean [123.675, 116.28, 103.53], std [58.395, 57.12, 57.375], stride in "
        "the 3x3",
        "stem /4, res2 /4, res3 /8, res4 /16, res5 /32: bitwise equal to those of torchvision's "
        "ResNet, filled by their own names (max abs difference 0)",
        f"{dst} sha256 {sha256_file(dst)}",
    ):
        assert text in out
    assert f"MODEL.WEIGHTS '{dst}'" in out.splitlines()[-1]
    assert out.splitlines()[-1].endswith("OUTPUT_DIR 'runs/out 1_0'")


@pytest.mark.parametrize(("depth", "base"), [(10, 24), (18, 64), (34, 8), (50, 8)])
def test_the_next_command_is_complete(depth: int, base: int, save: Save, tmp_path: Path) -> None:
    """The printed command, with data filled in, loads these weights and sets an output folder."""
    from detection.train_net import main as train
    from tests.oracles.tiny_voc import COLORS, write_voc

    report = convert_file(save(make_resnet(depth, base=base).state_dict()), tmp_path / "out.pth")
    words = shlex.split(report.next_command())
    assert words[:4] == ["python", "-m", "benchmarks", "train"] and "OUTPUT_DIR" in words
    data = ["DATASETS.VOC_DIR", str(tmp_path / "voc")]
    write_voc(tmp_path / "voc", {"trainval": 2, "test": 2}, names=dict.fromkeys(COLORS, "cat"))
    assert train(["--check-only", "--engine", "embedded", *words[4:], *data]) == 0


@pytest.mark.parametrize("stem", ["imagenet", "stride2"])
def test_the_next_command_of_torchvisions_names(stem: str, save: Save, tmp_path: Path) -> None:
    from convert.initial_weights import read_initial_weights
    from moco.classification.classify import parse_args
    from moco.classification.config import load_classify_cfg, with_weights
    from moco.linear import LINEAR

    report = convert_file(save(own(stem=stem)), tmp_path / "out.pth", to="torchvision")
    words = shlex.split(report.next_command())
    assert words[:4] == ["python", "-m", "benchmarks", "linear"]
    args = parse_args(LINEAR, words[4:])
    cfg = load_classify_cfg(LINEAR.defaults, args.config_file, args.opts)
    weights = read_initial_weights(args.checkpoint, cfg.MODEL.ARCH, cfg.MODEL.STEM)
    cfg = with_weights(cfg, weights.spec, weights.mean, weights.std, weights.config)
    assert weights.spec.stem == stem
    assert cfg.AUG.MEAN == pytest.approx((0.4, 0.5, 0.6))
    assert cfg.AUG.STD == pytest.approx((0.2, 0.25, 0.3))
    assert "OUTPUT_DIR" in args.opts


def test_a_run_folder_means_its_last_checkpoint(save: Save, tmp_path: Path) -> None:
    """The one that `last_checkpoint` names, also where a resumed run has left later ones."""
    for epoch in (0, 2, 10):
        save({**own(), "epoch": epoch}, checkpoint_name(epoch))
    assert convert_file(tmp_path, tmp_path / "out.pth").epoch == 10
    assert "epoch 10" in inspect_file(tmp_path)
    for pointer, epoch in (
        (checkpoint_name(2), 2),
        (checkpoint_name(5), 10),
        (f"../{tmp_path.name}/{checkpoint_name(0)}", 10),
    ):
        (tmp_path / "last_checkpoint").write_text(pointer)
        report = convert_file(tmp_path, tmp_path / "out.pth")
        assert (report.epoch, report.source_path.parent) == (epoch, tmp_path)


@pytest.mark.slow
def test_run_as_a_script_from_any_folder(save: Save, tmp_path: Path) -> None:
    src = save(official())
    script = str(ROOT / "convert" / "convert_to_d2.py")
    done = subprocess.run(
        [sys.executable, script, src.name, "out.pth"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "bitwise equal" in done.stdout


def test_the_flags_are_these() -> None:
    flags = {flag for a in convert_to_d2.build_parser()._actions for flag in a.option_strings}
    expected = (
        "-h --help --to --encoder --mean --std --scale --channel-order --stride-in-1x1 "
        "--stem --num-heads --activation --patch-size --patch-rule --image-size "
        "--fold-layer-scale --timm-model --timm-arguments --as --overwrite --debug"
    )
    assert flags == set(expected.split())


def test_same_input_gives_the_same_file(save: Save, tmp_path: Path) -> None:
    src = save(official())
    for suffix in (".pth", ".pkl"):
        (tmp_path / "a").mkdir(exist_ok=True)
        one = convert_file(src, tmp_path / f"x{suffix}").output_sha256
        two = convert_file(src, tmp_path / "a" / f"x{suffix}").output_sha256
        assert one == two
    assert (
        load_torch(tmp_path / "x.pth")["contract"]
        == load_torch(tmp_path / "a" / "x.pth")["contract"]
    )
