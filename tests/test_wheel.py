"""The built wheel, installed by itself into an empty folder."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from moco import __version__
from moco.common.run import read_record, source_sha256

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("moco", "convert", "detection", "benchmarks", "moco_transfer")
pytestmark = pytest.mark.slow


def run(*command: str | Path, **more: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=300, **more
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Build wheel and sdist without a network, outside the checkout; return their folder."""
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    # The sdist first, and the wheel from what is in it.
    run(sys.executable, "-m", "build", "-n", "-o", folder, tree)
    return folder


def test_what_is_in_the_wheel_and_the_sdist(built):
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    with ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        [metadata] = [name for name in inside if name.endswith(".dist-info/METADATA")]
        description = archive.read(metadata).decode().partition("\n\n")[2]
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    assert description.startswith("# moco-transfer\n")
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]+)\)", description))
    listed = run("git", "ls-files", *PACKAGES, cwd=ROOT)
    expected = set(listed.splitlines())
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")}
    data |= {str(path.relative_to(ROOT)) for path in (ROOT / "results").glob("*.zip")}
    assert expected | {f"moco/{name}" for name in data} == {
        name for name in inside if ".dist-info/" not in name
    }
    assert expected | data | {"README.md", "LICENSE", "pyproject.toml", "setup.py"} <= source


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    [wheel] = built.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel)
    return folder


def test_the_quickstart_runs_from_any_folder(installed, tmp_path):
    """Even from a clone of the official MoCo: its packages have some of our names."""
    for name in PACKAGES[:4]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('another package')")
    own = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command, here = installed / "bin" / "moco-transfer", {"cwd": tmp_path, "env": own}
    assert str(installed) in run(command, "configs", **here)
    said = run(command, "quickstart", "--smoke", "--seeds", "1", **here)
    assert "\nrandom       1 " in said and "\nmoco         1 " in said
    [path] = (tmp_path / "quickstart_out_smoke").glob("runs/*/moco/*/suite.log")
    record = read_record(path.with_name("run.json")).provenance
    assert record["project"] == {"version": __version__, "source_sha256": source_sha256()}
    log = path.read_text()
    assert "next: moco-transfer table" in log  # said only where there is no checkout
    task = ("train", "--check-only", "--engine", "embedded", "--config-file", "quickstart_R_10_C4")
    keys = ("MODEL.WEIGHTS", "random", "DATASETS.VOC_DIR", "quickstart_out_smoke/data/scenes")
    assert "checked" in run(command, *task, *keys, **here)
