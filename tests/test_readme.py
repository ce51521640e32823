"""README.md: its length, its links and image, and that its reference numbers are the paper's."""

import importlib.util
import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.report.paper import load_paper

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


def test_reference_numbers_are_those_of_the_paper():
    section = README.split("## Results")[1].split("## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
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
