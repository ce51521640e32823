"""The commands of every tutorial run on tiny data, in the order of its page; a guide's script, too.

The table of each page replaces only what would take long or needs a network.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from moco.common.cfgnode import read_yaml
from moco.common.files import load_torch
from tests.conftest import ROOT
from tests.docs.test_commands import HEREDOC
from tests.oracles.checkpoints import own
from tests.oracles.layouts_vit import timm_vit
from tests.oracles.resnets import make_resnet
from tests.oracles.small_tasks import SHORT, SMALL, SMALL_VOC
from tests.oracles.tiny_voc import VOC_NAMES, write_voc

pytestmark = pytest.mark.slow

PRETRAIN = (
    "MOCO.K 32 SOLVER.BATCH_SIZE 8 SOLVER.MAX_ITERS 3 SOLVER.WARMUP_ITERS 1 AUG.CROP_PX 32 "
    "LOG.EVERY_ITERS 1"
)
NARROW_18 = {"RES2_OUT_CHANNELS": 16, "STEM_OUT_CHANNELS": 16}
NARROW_50 = {"RES2_OUT_CHANNELS": 64, "STEM_OUT_CHANNELS": 16, "WIDTH_PER_GROUP": 16}


def words(keys: Mapping[str, object]) -> str:
    return " ".join(f"{key} '{value}'" for key, value in keys.items() if key != "SEED")


def random_like(narrow: Mapping[str, int]) -> str:
    """Return keys of a random network as small as the weights, whose contract has its own."""
    return words({f"MODEL.RESNETS.{key}": value for key, value in narrow.items()})


def code_blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def script(page: str, replace: Mapping[str, str]) -> str:
    """Return the commands of a page after `replace`, pattern → text; every pattern must match."""
    lines = "".join(code_blocks(f"{page}.md", "bash")).replace("\\\n", " ")
    for pattern, value in replace.items():
        lines, count = re.subn(pattern, lambda found, v=value: found.expand(v), lines, flags=re.M)
        assert count, f"{pattern} is not on {page}.md any more"
    return lines


def execute(text: str) -> None:
    """Execute a page's commands in this process; only other programs have their own."""
    for name, content in HEREDOC.findall(text):
        Path(name).write_text(content, encoding="utf-8")
    for line in filter(None, HEREDOC.sub("", text).splitlines()):
        name, *arguments = shlex.split(line, comments=True)
        if name == "export":
            os.environ |= [arguments[0].split("=", 1)]
        elif name == "moco-transfer":
            assert not main(arguments), line
        else:
            subprocess.run([name, *arguments], check=True, timeout=500)


@pytest.fixture
def shell(tmp_path, monkeypatch, capfd):
    """Return a function that executes commands in `tmp_path`, and returns what they print."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DETECTRON2_DATASETS", "datasets")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(text: str) -> str:
        execute(text)
        shown = "".join(capfd.readouterr())
        assert "Traceback" not in shown
        return shown

    return run


def rows(table: Path) -> list[str]:
    """Return the inits in the first table, which comes before the paper's and convergence."""
    ours = re.split("of the paper|Convergence:", table.read_text(encoding="utf-8"))[0]
    return re.findall(r"^\| (\w+) \| +\d", ours, re.M)


def records(folder: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.rglob("run.json")}


def voc_layout(folder: Path, count: int = 6) -> Path:
    return write_voc(folder, {"trainval": count, "test": 3}, one_large=True)


def published_voc(folder: Path) -> None:
    """Write VOC2007 and VOC2012 with a handful of images."""
    write_voc(folder / "VOC2007", {"trainval": 6, "test": 3}, names=VOC_NAMES, one_large=True)
    write_voc(folder / "VOC2012", {"trainval": 6}, seed=1, names=VOC_NAMES, one_large=True)


def test_your_checkpoint_on_voc(tmp_path, shell):
    published_voc(tmp_path / "datasets")
    torch.save(own(depth=50, base=16), tmp_path / "my_checkpoint.pth.tar")
    small = words(SMALL | SHORT)
    text = script(
        "tutorials/checkpoint_on_voc",
        {
            r"path/to/datasets": "datasets",
            r"datasets fetch .*": r"\g<0> --dry-run",
            r"WORLD_SIZE 8": "WORLD_SIZE 2",  # a divisor of the small batch
            r"MODEL\.WEIGHTS mine\.pth": rf"\g<0> {small}",
            r"MODEL\.WEIGHTS random": rf"\g<0> {small} {random_like(NARROW_50)}",
        },
    )
    shown = shell(text)
    assert "holds         'arch': 'resnet50'" in shown
    assert "SOLVER.MAX_ITER: got 4, the paper has 24000" in shown
    assert shown.count("not equivalent after scaling: BN sees 1 images at once instead of 2") == 3
    assert set(records(tmp_path / "runs")) == {"mine_0", "random_0"}
    assert rows(tmp_path / "tables" / "table.md") == ["random", "mine"]


def test_a_vit_on_one_gpu(tmp_path, shell):
    published_voc(tmp_path / "datasets")
    vit = timm_vit(0, 48, 4, depth=4, patch_size=16, img_size=32)
    torch.save({"model": vit.state_dict()}, tmp_path / "mae_pretrain_vit_base.pth")
    pixels = ("INPUT.MAX_SIZE_TRAIN", "INPUT.MAX_SIZE_TEST", "MODEL.BACKBONE.SQUARE_PAD")
    small = words(SMALL_VOC | dict.fromkeys(pixels, 96))
    text = script(
        "tutorials/vit_on_one_gpu",
        {
            r"path/to/datasets": "datasets",
            r"datasets fetch .*": r"\g<0> --dry-run",
            r"--num-heads 12": "--num-heads 4",
            r"--dry-run +--init": "--dry-run --seconds-per-iteration 0.1 --init",
            r"--init random": rf"\g<0> --trials 1 --executor cpu --opts {small}",
        },
    )
    shown = shell(text)
    length, batch = (SMALL_VOC[f"SOLVER.{key}"] for key in ("MAX_ITER", "IMS_PER_BATCH"))
    assert f"budget: {length} iterations of {batch} images" in shown  # by --opts
    assert rows(tmp_path / "output" / "VOC2007" / "tables" / "table.md") == ["random", "mae"]
    assert (tmp_path / "mae.zip").is_file()


@pytest.mark.detectron2
@pytest.mark.usefixtures("detectron2")
def test_your_own_train_net(tmp_path, shell):
    """The guide's script as printed: it starts from the converted weights, trains, evaluates."""
    published_voc(tmp_path / "datasets")
    torch.save(own(depth=50, base=16), tmp_path / "moco_v2_800ep_pretrain.pth.tar")
    [code] = code_blocks("guides/own_train_net.md", "python")
    assert len(code.splitlines()) <= 40
    (tmp_path / "my_train.py").write_text(code)
    small = words(SMALL | SHORT | {"MODEL.BACKBONE.FREEZE_AT": 2})
    replace = {
        r"^python": sys.executable,
        r" --num-gpus 8": "",
        r"MODEL\.WEIGHTS": rf"{small} \g<0>",
    }
    shown = shell(script("guides/own_train_net", replace))
    trained, evaluated = re.findall(r"copypaste: ([\d.]+,[\d.]+,[\d.]+)", shown)
    assert trained == evaluated
    run = tmp_path / "runs/plain/moco_0"
    assert read_yaml(run / "config.yaml")["INPUT"]["FORMAT"] == "RGB"
    weights = load_torch(tmp_path / "moco_v2.pth")["model"]
    final = load_torch(run / "model_final.pth")["model"]
    frozen = [name for name in weights if name.startswith(("stem", "res2"))]
    assert len(frozen) == 55
    for name in frozen:
        assert torch.equal(final[f"backbone.{name}"], weights[name]), name
    learned = "res4.0.conv1.weight"
    change = (final[f"backbone.{learned}"] - weights[learned]).abs().max()
    assert 0 < change < 0.1 * weights[learned].abs().max()


def test_own_images(tmp_path, shell):
    voc_layout(tmp_path / "mine", 64)
    shutil.copytree(tmp_path / "mine" / "JPEGImages", tmp_path / "images")
    small = words(SMALL_VOC)
    text = script(
        "tutorials/own_images",
        {
            r"path/to/images": "images",
            r"path/to/voc_layout": "mine",
            r"quickstart .*": r"\g<0> --smoke --seeds 1",
            r"OUTPUT_DIR runs/pretrain$": rf"\g<0> {PRETRAIN}",
            r"OUTPUT_DIR runs/own/.*": rf"\g<0> {small}",
        },
    )
    shell(text)
    assert (tmp_path / "quickstart_out_smoke" / "tables" / "table.md").is_file()
    assert (tmp_path / "curves.png").is_file() and (tmp_path / "moco.pth").is_file()
    assert rows(tmp_path / "tables" / "table.md") == ["random", "moco"]


def test_own_annotations(tmp_path, shell):
    voc_layout(tmp_path / "mine")
    torch.save(make_resnet(18, base=64).state_dict(), tmp_path / "mine_r18.pth")
    text = script(
        "tutorials/own_dataset",
        {
            r"path/to/voc_layout": "mine",
            r"OUTPUT_DIR runs/.*": rf"\g<0> {words(SMALL_VOC)}",
            r"evaluate": r"\g<0> --seconds-per-iteration 0.1 --executor cpu",
            r"--trials 5": f"--trials 1 --opts {words(SMALL_VOC)}",
            r"^# needs to download[^$]*\$weights.*\n": "",
        },
    )
    shell(text)
    assert rows(tmp_path / "tables" / "table.md") == ["random", "mine_r18"]
    assert rows(tmp_path / "output" / "mine" / "tables" / "table.md") == ["random", "mine"]
    assert len(list((tmp_path / "runs/own_voc/mine_0/inference/visualize").iterdir())) == 3


def tiny_suite(narrow: Mapping[str, int]) -> str:
    """Return the task of a suite's file with the keys that make it tiny."""
    random = {f"MODEL.RESNETS.{key}": value for key, value in narrow.items()}
    small = {key: str(value) for key, value in (SMALL | SHORT).items() if key != "SEED"}
    return f"  - config: \\g<1>\n    overrides: {small}\n    random_overrides: {random}"


def test_table_2b(tmp_path, shell):
    published_voc(tmp_path / "datasets")
    torch.save(own(depth=50, base=16), tmp_path / "moco.pth.tar")
    torch.save(make_resnet(50, base=16).state_dict(), tmp_path / "r50.pth")
    text = script(
        "tutorials/table_2b",
        {
            r"path/to/datasets": "datasets",
            r"^trials: 5": "trials: 1",
            r"^  - config: (\S+)": tiny_suite(NARROW_50),
            r"=supervised_msra_r50": "=r50.pth",
            r"=moco_v1_r50": "=moco.pth.tar",
            r"weights fetch .*": "weights list",
            r"datasets fetch .*": r"\g<0> --dry-run",
        },
    )
    shell(text)
    tables = tmp_path / "output" / "table_2b" / "tables"
    assert sorted(rows(tables / "table.md")) == ["moco", "random", "supervised"]
    assert "55.9" in (tables / "table.md").read_text(), "the paper's row is next to ours"
    assert (tmp_path / "table_2b.zip").is_file()


SLURM = r"--executor slurm.*time=12:00:00"


def slurm_script(tmp_path: Path, executor: str) -> str:
    published_voc(tmp_path / "datasets")
    torch.save(own(depth=50, base=16), tmp_path / "mine.pth")
    suite = "name: voc\ntitle: tiny\ntasks:\n  - config: faster_rcnn_R_50_C4_24k\n    trials: 1"
    (tmp_path / "tiny.yaml").write_text(
        re.sub(r"^  - config: (\S+)", tiny_suite(NARROW_50), suite, flags=re.M)
    )
    return script("tutorials/slurm", {r"suite voc": "suite tiny.yaml", SLURM: executor})


def test_slurm_page_with_another_executor(tmp_path, shell):
    text = slurm_script(tmp_path, "--executor cpu")
    shown = shell("\n".join(line for line in text.splitlines() if "--dry-run" in line))
    assert "2 runs" in shown and not (tmp_path / "output/voc/runs").exists()


def test_slurm(tmp_path, shell):
    from tests.benchmarks.suites.test_slurm_real import why_not

    if reason := why_not():
        pytest.skip(reason)
    options = "--executor slurm --slurm gpus_per_node=0 --slurm cpus_per_task=1"
    shell(slurm_script(tmp_path, options))
    assert sorted(rows(tmp_path / "output/voc/tables/table.md")) == ["mine", "random"]
