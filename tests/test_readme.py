"""README.md: its length, its links and image; its numbers, and the paper's in docs/results.md."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.report.published import load_paper
from benchmarks.suites.suite_file import load_suite
from detection.config.task import default_task
from moco.common.cfgnode import load_cfg
from moco.pretraining.config import load_pretrain_cfg

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PARTS = {  # of Table 6, and of tables with more than one part
    "ImageNet, linear classification": "MoCo",
    "COCO, R50-FPN, 6x": "6x",
    "COCO keypoints": "COCO keypoints",
    "COCO DensePose": "COCO dense pose",
    "LVIS v0.5, 2x": "LVIS",
    "Cityscapes instances": "Cityscapes instances",
    "Cityscapes semantic": "Cityscapes semantic",
    "VOC semantic": "VOC semantic",
}
ROWS = {"random": "random", "supervised": "super. IN-1M", "MoCo": r"MoCo IN-1M|unsup. IN-1M|R50$"}


def test_it_is_short_and_leads_somewhere():
    assert len(README.splitlines()) <= 200
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            assert (ROOT / path).exists(), target
            text = (ROOT / path).read_text() if path and anchor else README
            heading = anchor.replace("-", "[ -]")
            assert not anchor or re.search(rf"^#+ {heading}$", text, re.M | re.I), target


@pytest.fixture(scope="module")
def long_description():
    spec = importlib.util.spec_from_file_location("of_this_checkout", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.long_description


def targets(text: str) -> list[str]:
    """Return the targets of all links and images, whether the text around them is a link or not."""
    return re.findall(r"\]\(([^)]+)\)", text)


def test_a_wheel_has_no_relative_link(long_description):
    """Neither with the repository's address nor without, and absolute ones stay as they are."""
    absolute = [target for target in targets(README) if target.startswith("https://")]
    assert len(absolute) < len(targets(README))
    assert targets(long_description(README, None)) == absolute
    somewhere = "https://example.org/me/it"
    expected = {target: target for target in absolute}
    for target in set(targets(README)) - set(absolute):
        expected[target] = f"{somewhere}/blob/HEAD/{target}"
        if target.startswith("#"):
            expected[target] = f"{somewhere}{target}"
        elif target.endswith(".png"):
            expected[target] = f"{somewhere}/raw/HEAD/{target}"
    found = targets(long_description(README, somewhere))
    assert found == [expected[target] for target in targets(README)]


PAGE = "a [page](docs/a.md#b), a [site](https://x.y)"
BADGE = "[![badge](https://x.y/b)](LICENSE)"
IMAGE = "![what it\nshows](docs/a.png)"
CODE = "```python\nx[0](y)\n```\n"


@pytest.mark.parametrize(
    ("text", "without", "with_address"),
    [
        (PAGE, "a page, a [site](https://x.y)", PAGE.replace("docs", "R/blob/HEAD/docs")),
        (BADGE, "![badge](https://x.y/b)", BADGE.replace("LICENSE", "R/blob/HEAD/LICENSE")),
        (IMAGE, "what it\nshows", IMAGE.replace("docs", "R/raw/HEAD/docs")),
        (CODE, CODE, CODE),
    ],
)
def test_links_become_absolute_or_text(long_description, text, without, with_address):
    assert long_description(text, None) == without
    assert long_description(text, "R") == with_address


def test_the_image_is_small_enough_for_a_page():
    [path] = re.findall(r"!\[[^\]]+\]\((docs[^)]+)\)", README)
    assert (ROOT / path).stat().st_size < 300_000
    with Image.open(ROOT / path) as image:
        assert image.format == "PNG" and image.width >= 900


# Task → its suite and the measured iteration of one GPU with 2 images, for the rows that have one.
C4, FPN = "Faster R-CNN C4, extra BN", "Mask R-CNN FPN"
HOURS = {
    "voc/faster_rcnn_R_50_C4_24k": ("voc", C4),
    "coco/mask_rcnn_R_50_FPN_1x": ("coco", FPN),
    "lvis/mask_rcnn_R_50_FPN_2x": ("lvis", None),
    "cityscapes/mask_rcnn_R_50_FPN_24k": ("cityscapes", None),
}


def test_hours_are_those_of_the_suites_and_of_the_measured_iterations():
    """Also that of pre-training: its hours are measured seconds times steps of the recipe."""
    found = re.findall(r"^\| `(\w+/\w+)` \| ([\d.]+) \| ([\d.]+|–) \|", README, re.M)
    measurements = json.loads((ROOT / "results" / "speed" / "h100.json").read_text())
    seconds = {row["what"]: row["ours"] for each in measurements for row in each["rows"]}
    expected = []
    for task, (suite, measured) in HOURS.items():
        file = ROOT / "configs" / f"{task}.yaml"
        solver = load_cfg(default_task(), file, []).SOLVER
        [stated] = [
            each.seconds_per_iteration
            for each in load_suite(ROOT / "configs" / "suites" / f"{suite}.yaml").tasks
            if Path(each.config).resolve() == file
        ]
        row = [task, f"{solver.MAX_ITER * stated / 3600:.1f}", "–"]
        if measured:
            iteration = seconds[f"training iteration; {measured}; detectron2, fp32"]
            row[-1] = f"{solver.MAX_ITER * solver.IMS_PER_BATCH / 2 * iteration / 3600:.1f}"
        expected.append(tuple(row))
    assert found == expected
    [step] = [value for what, value in seconds.items() if what.startswith("pre-training from JPEG")]
    recipe = load_pretrain_cfg(
        str(ROOT / "configs/pretrain/moco_v2_r50_in1m_200ep.yaml"), []
    ).SOLVER
    steps = recipe.MAX_EPOCHS * (1_281_167 // recipe.BATCH_SIZE)
    assert f"| 53 (the paper, v1) | {steps * step / 3600:.1f} |" in README


def test_reference_numbers_are_those_of_the_paper():
    page = (ROOT / "docs" / "results.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line[:1] == "|"]
    assert lines[0] == ["task", "table", "metric", *ROWS, "MoCo here"]
    for task, number, metric, *values, ours in lines[2:]:
        digits, part = re.fullmatch(r"(A\.1|\d)(\w?)", number).groups()
        [table] = [
            table
            for table in load_paper()[1]
            if str(table.number) == digits and table.part == (PARTS.get(task) or part or None)
        ]
        [column] = [i for i, c in enumerate(table.columns) if c in (metric, f"{metric}, MoCo")]
        for name, value in zip(ROWS.values(), values, strict=True):
            found = [row for row in table.rows if re.match(name, row.name)]
            expected = found[0].values[column] if found else None
            assert value == ("–" if expected is None else f"{expected:.1f}"), (task, name)
        assert ours == "not run yet"  # whoever fills one in names its records
