"""docs/architecture.md: what a change touches, and that the files and names it leads to exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import hooks
from tests.docs.changes import CHANGES, ROOT, Change, apply, row

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project that a change may be made in."""
    folder = tmp_path_factory.mktemp("project")
    ignored = shutil.ignore_patterns("__pycache__", "test_*.py", "golden", "report*.html")
    for name in (*hooks.PACKAGES, "configs", "docs", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("mkdocs.yml", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def contents(project: Path) -> dict[str, bytes]:
    """Return the contents of all files by path, without what running them has written."""
    files = (path for path in project.rglob("*") if path.is_file())
    return {
        str(path.relative_to(project)): path.read_bytes()
        for path in files
        if "__pycache__" not in path.parts and path.suffix != ".pth"
    }


def run(code: str, project: Path) -> str:
    """Run Python code in a copy of the project; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_no_proof_passes_without_its_change(copy: Path) -> None:
    proofs = {change.title: change.proof for change in CHANGES}
    code = f"""
for title, proof in {proofs!r}.items():
    try:
        exec(proof, {{}})
    except BaseException:
        continue
    print(title)
"""
    assert run(code, copy) == ""


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.title)
def test_a_change_touches_what_the_page_says(change: Change, copy: Path) -> None:
    before = contents(copy)
    undo = apply(change, copy)
    try:
        run(change.proof, copy)
        after = contents(copy)
        touched = [name for name in change.edits if after[name] != before.get(name)]
        assert {k for k in after if after[k] != before.get(k)} == set(touched)
    finally:
        for name, content in undo.items():
            if content is None:
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(content)
    expected = row(change, {name: name not in before for name in touched})
    assert expected in PAGE.splitlines(), f"docs/architecture.md needs the line\n{expected}"


def test_every_walk_leads_to_something() -> None:
    """Each `file.py`: `name` of the page is a name that the file defines."""
    steps = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", PAGE)
    assert len(steps) >= 15
    for path, names in steps:
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            found = re.search(rf"^\s*(?:def|class) {name.split('.')[-1]}\b", text, re.M)
            assert found, f"{path} defines no {name}"


def test_the_picture_shows_every_room() -> None:
    rooms = {
        f"{path.parent.relative_to(ROOT)}/"
        for package in hooks.PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    shown = set(re.findall(r"^\| `([\w/]+/)` \|", PAGE, re.M))
    assert rooms - shown <= {"benchmarks/report/templates/"} and not shown - rooms - {
        "configs/",
        "docs/",
        "tests/",
    }
