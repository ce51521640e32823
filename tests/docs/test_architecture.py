"""docs/architecture.md: the files and names that it leads to exist."""

import re
from pathlib import Path

from docs import hooks

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_walk_leads_to_something() -> None:
    """Each `file.py`: `name` of the page is a name that the file defines."""
    steps = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", PAGE)
    assert len(steps) >= 15
    for path, names in steps:
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            found = re.search(rf"^\s*(?:def|class) {name.split('.')[-1]}\b", text, re.M)
            assert found, f"{path} defines no {name}"


def test_the_table_shows_every_package() -> None:
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for package in hooks.PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    shown = set(re.findall(r"^\| `([\w/]+/)` \|", PAGE, re.M))
    assert packages - shown <= {"benchmarks/report/templates/"} and not shown - packages - {
        "configs/",
        "docs/",
        "tests/",
    }
