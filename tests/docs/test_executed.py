"""Every block of commands in README.md and docs/ is executed by a test, or says what it needs.

The tutorials are executed in test_tutorials.py. Here, what is left of the other pages runs in one
process on tiny data; the table of each page replaces what would take long.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from benchmarks.__main__ import main
from detection.config.resolve import scale_to_processes
from detection.config.task import default_task
from detection.datasets import read_split
from moco.common.cfgnode import load_cfg
from tests.conftest import ROOT
from tests.docs.test_commands import FENCE, PAGES, commands_of
from tests.docs.test_tutorials import (
    NARROW_18,
    NARROW_50,
    PRETRAIN,
    code_blocks,
    execute,
    published_voc,
    random_like,
    tiny_suite,
    voc_layout,
    words,
)
from tests.oracles.checkpoints import own
from tests.oracles.layouts_vit import timm_vit
from tests.oracles.relayout import as_roboflow, as_yolo
from tests.oracles.resnets import randomize
from tests.oracles.small_tasks import SMALL_VOC
from tests.oracles.tiny_coco import write_coco

NEEDS = re.compile(r"^# needs .+\n")
# The wheel's test installs and runs the quickstart, tests/benchmarks/ runs the doctor, and
# CONTRIBUTING.md is about the tests themselves.
ELSEWHERE = re.compile(
    r"python -m (?:pip|pytest|http\.server)\b|moco-transfer (?:quickstart|doctor|--help)\b"
)
BLOCKS = {
    str(page.relative_to(ROOT)): [
        code
        for language, code in FENCE.findall(page.read_text(encoding="utf-8"))
        if language in ("", "bash")
    ]
    for page in PAGES
    if page.name != "CONTRIBUTING.md"
}
SMALL = words(SMALL_VOC)
PIXELS = ("INPUT.MAX_SIZE_TRAIN", "INPUT.MAX_SIZE_TEST", "MODEL.BACKBONE.SQUARE_PAD")
SMALL_VIT_VOC = SMALL_VOC | dict.fromkeys(PIXELS, 96)
PRETRAIN_VIT = PRETRAIN.replace("MOCO.K 32", "MOCO.K 8")


def commands_to_run(page: str) -> list[str]:
    """Return the commands of the blocks that name no need."""
    blocks = [code for code in BLOCKS[page] if not NEEDS.match(code)]
    found = commands_of("".join(f"```bash\n{code}```\n" for code in blocks))
    return [command for command in found if not ELSEWHERE.match(command)]


def run(page: str, replace: dict[str, str]) -> None:
    """Run the commands of a page after `replace`, pattern → text; every pattern must match."""
    text = "\n".join(commands_to_run(page))
    for pattern, value in replace.items():
        text, count = re.subn(pattern, value, text)
        assert count, f"{pattern} is not on {page} any more"
    execute(text)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Return an empty working directory with VOC2007 and VOC2012 in `datasets`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DETECTRON2_DATASETS", "datasets")
    published_voc(Path("datasets"))
    return tmp_path


def save_resnet(*files: str, depth: int = 18, base: int = 64) -> None:
    for file in files:
        torch.save(own(depth=depth, base=base), file)


@pytest.mark.slow
def test_faq(here):
    save_resnet("my_checkpoint.pth.tar", "mine.pth", depth=50, base=16)
    run("docs/faq.md", {"path/to/voc_layout": "datasets/VOC2007"})


@pytest.mark.slow
def test_converting(here):
    save_resnet("FILE")
    net = timm.create_model("regnety_004")
    randomize(net)
    state = net.state_dict()
    torch.save({"arch": "regnety_004", "state_dict": state}, "last.pth.tar")
    save_file(state, "model.safetensors")
    # The page continues with the ResNet's weights.pth.
    other = {r"(last\.pth\.tar|model\.safetensors) weights": r"\1 timm"}
    other[r"timm\.pth --timm"] = "timm.pth --overwrite --timm"
    run("docs/guides/converting.md", other)


@pytest.mark.slow
def test_datasets_then_the_report(here):
    voc = voc_layout(Path("voc_layout"))
    cfg = default_task()
    cfg.DATASETS.VOC_DIR = str(voc)
    splits = {name: read_split(f"voc_layout_{name}", cfg) for name in ("trainval", "test")}
    splits = {"train": splits["trainval"], "test": splits["test"]}
    as_yolo(Path("yolo"), splits)
    as_yolo(Path("without_splits"), {"train": splits["train"]})
    as_roboflow(Path("export"), splits)
    write_coco(Path("datasets"), {"train2017": 2, "val2017": 2})
    save_resnet("moco.pth", base=16)
    small = f"{SMALL} {random_like(NARROW_18)}"
    run(
        "docs/guides/datasets.md",
        {
            "split path/to/yolo": "split without_splits",
            "path/to/": "",
            r"own/(train|test)\.json": r"export/\1/_annotations.coco.json",
            r"(VOC_DIR|COCO_\w+|YOLO_YAML)(.*)runs/own/moco_0": rf"\1\2runs/\1/moco_0 {small}",
        },
    )
    train = "train --config-file faster_rcnn_R_18_C4_small DATASETS.VOC_DIR voc_layout SEED 0"
    random = f"{train} MODEL.WEIGHTS random OUTPUT_DIR runs/VOC_DIR/random_0 {small}"
    assert not main(shlex.split(random))
    run(
        "docs/guides/report.md",
        {"runs/voc_24k": "runs/VOC_DIR", "runs/coco_fpn_1x": "runs/COCO_DIR"},
    )
    assert Path("report.zip").is_file()
    as_roboflow(Path("FOLDER/things"), splits)
    as_roboflow(Path("FOLDER/others"), splits)
    save_resnet("r18.pth")
    run("docs/guides/suites.md", {"many_small": r"\g<0> --dry-run"})


@pytest.mark.slow
def test_finetuning_pretraining_and_resuming(here):
    save_resnet("moco_v2.pth", depth=50, base=16)
    vit = timm_vit(0, 48, 4, depth=4, patch_size=16, img_size=32)
    torch.save({"model": vit.state_dict()}, "vit.pth")
    assert not main(["convert", "vit.pth", "vit_tiny.pth", "--num-heads", "4"])
    sizes = {"EMBED_DIM": 48, "DEPTH": 4, "NUM_HEADS": 4, "MLP_DIM": 96}
    small = words(SMALL_VIT_VOC | {f"MODEL.VIT.{key}": size for key, size in sizes.items()})
    voc = voc_layout(Path("path/to/voc"), 64)
    Path("path/to/images").symlink_to((voc / "JPEGImages").absolute())
    run("docs/guides/finetuning.md", {"OUTPUT_DIR runs/small/vit_0": rf"\g<0> {small}"})
    small = {r"(small_r18 .*)": rf"\1 {PRETRAIN}"}
    run("docs/guides/pretraining.md", small | {r"(small_vit .*)": rf"\1 {PRETRAIN_VIT}"})
    run("docs/guides/resuming.md", small)
    assert Path("curves.png").is_file()


@pytest.mark.slow
def test_readme_and_plan(here):
    save_resnet("FILE")
    run(
        "README.md",
        {
            "DIR": "datasets/VOC2007",
            "evaluate": r"\g<0> --dry-run --seconds-per-iteration 0.1 --executor cpu",
        },
    )
    save_resnet("mine.pth")
    dry = r"\g<0> --dry-run --seconds-per-iteration 0.1 --executor cpu"
    run("docs/guides/rank.md", {"my_dataset": "datasets/VOC2007", "rank": dry})
    save_resnet("my.pth", depth=50, base=16)
    suite = "name: voc\ntitle: tiny\ntasks:\n  - config: faster_rcnn_R_50_C4_24k\n    trials: 1"
    tiny = re.sub(r"^  - config: (\S+)", tiny_suite(NARROW_50), suite, flags=re.M)
    Path("tiny.yaml").write_text(tiny, encoding="utf-8")
    run("docs/guides/plan.md", {"suite voc": "suite tiny.yaml --executor cpu"})
    assert len(json.loads(Path("plan.json").read_text(encoding="utf-8"))["runs"]) == 2


def test_the_numbers_that_a_page_says_are_printed(capsys):
    """The comments behind the prints of docs/guides/numbers.md are what they print."""
    [code] = code_blocks("guides/numbers.md", "python")
    exec(code, {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print.*# (.+)$", code, re.M)


def test_what_one_gpu_changes():
    """The table of docs/tutorials/checkpoint_on_voc.md has the keys before and after scaling."""
    page = (ROOT / "docs/tutorials/checkpoint_on_voc.md").read_text()
    cfg = load_cfg(default_task(), ROOT / "configs/voc/faster_rcnn_R_50_C4_24k.yaml", [])
    cfg.defrost()
    columns = []
    for processes in (8, 1):
        cfg.SOLVER.REFERENCE_WORLD_SIZE = 8
        scale_to_processes(cfg, processes)
        solver = cfg.SOLVER
        steps = f"{solver.MAX_ITER:,}; {solver.STEPS[0]:,} and {solver.STEPS[1]:,}; "
        columns.append(
            [
                f"{solver.IMS_PER_BATCH}",
                f"{solver.BASE_LR:g}",
                f"{steps}{solver.WARMUP_ITERS}",
                f"{solver.MAX_ITER * solver.IMS_PER_BATCH:,}",
            ]
        )
    for before, after in zip(*columns, strict=True):
        assert f"| {before} | {after} |" in page


def test_every_block_is_executed_or_says_what_it_needs():
    """`# needs …` is the first line of a block that no test executes as it is printed."""
    executed = set(
        re.findall(
            r'script\(\s*"([\w/]+)"', Path(__file__).with_name("test_tutorials.py").read_text()
        )
    )
    here = set(re.findall(r'    run\(\s*"([\w/.]+)"', Path(__file__).read_text(encoding="utf-8")))
    left = {page for page in BLOCKS if commands_to_run(page)}
    assert left - {f"docs/{page}.md" for page in executed} == here
