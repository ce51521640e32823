"""The notebook, the Dockerfile and the files that other sites read."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from convert import convert_to_d2
from moco import __version__
from tests.oracles.collection import write_collection
from tests.oracles.resnets import make_resnet

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOK = ROOT / "docs" / "notebooks" / "quickstart.ipynb"


# The notebook's parameters, small: a few iterations of everything, one seed.
SMALL = """
PRETRAINING = ["SOLVER.MAX_ITERS", "4", "SOLVER.BATCH_SIZE", "16", "MOCO.K", "32"]
PRETRAINING += ["SOLVER.WARMUP_ITERS", "1"]
IMAGES = 64
OPTIONS = {"SOLVER.MAX_ITER": 4, "SOLVER.STEPS": (2, 3), "SOLVER.WARMUP_ITERS": 1}
OPTIONS |= {"INPUT.MIN_SIZE_TRAIN": (96,), "INPUT.MIN_SIZE_TEST": 96, "TEST.PRECISE_BN.NUM_ITER": 1}
OPTIONS |= {"MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 8, "SOLVER.PRECISION": "fp32"}
SEEDS = 1
"""
# A converted file and a dataset of the user's instead of those that the notebook makes.
OWN = """
WEIGHTS, DATA = "my_r18.pth", "shapes"
"""


def run_notebook(folder, monkeypatch, parameters):
    """Run the cells from top to bottom; returns what they print and show, by type."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    book = nbformat.read(NOTEBOOK, as_version=4)
    [cell] = [c for c in book.cells if "parameters" in c.metadata.get("tags", ())]
    cell.source += parameters
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(book, timeout=500, kernel_name="python3", resources=resources).execute()
    outputs = [out for cell in book.cells for out in cell.get("outputs", ())]
    shown = {kind: text for out in outputs for kind, text in out.get("data", {}).items()}
    printed = "".join(out.get("text", "") for out in outputs)
    assert re.search(r"^random   seed 0: AP [\d.]+\nmine     seed 0: AP [\d.]+\n", printed, re.M)
    rows = re.findall(r"^\| (\w+) +\| 1 +\| \D*\d+\.\d", shown["text/markdown"], re.M)
    assert rows[:2] == ["random", "mine"]
    assert shown["text/html"].startswith("<iframe srcdoc=")
    assert (folder / "first_table/runs/tables/table.html").is_file()
    return printed, shown["text/markdown"]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    printed, table = run_notebook(tmp_path, monkeypatch, SMALL)
    assert "ResNet-10, stride2 stem" in printed and "quickstart_R_10_C4" in table


@pytest.mark.slow
def test_the_notebook_runs_on_own_weights_and_data(tmp_path, monkeypatch):
    write_collection(tmp_path, ("shapes",))  # in COCO's format, as Roboflow exports it
    torch.save(make_resnet(18, base=16).state_dict(), tmp_path / "source.pth")
    convert_to_d2.main([str(tmp_path / "source.pth"), str(tmp_path / "my_r18.pth")])
    printed, table = run_notebook(tmp_path, monkeypatch, SMALL + OWN)
    assert "ResNet-18, 16 stem channels" in printed and "data: DATASETS.COCO_DIR" in printed
    assert "faster_rcnn_R_18_C4_small" in table and "4 iterations, tested on shapes_test" in table
    assert not (tmp_path / "first_table/pretrain").exists()


def test_the_notebook_has_no_outputs():
    cells = yaml.safe_load(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)


def installs(text: str) -> set[str]:
    """Find the arguments of `pip install`, without flags of its own output."""
    lines = text.replace("\\\n", " ").replace("&&", "\n")
    found = re.findall(r"python -m pip install(.*)", lines)
    return {" ".join(line.replace("--no-cache-dir", "").split("#")[0].split()) for line in found}


def test_the_dockerfile_installs_as_the_page_says():
    dockerfile = (ROOT / "docs" / "docker" / "Dockerfile").read_text()
    page = (ROOT / "docs" / "install.md").read_text()
    commands = installs(dockerfile)
    assert len(commands) == 3 and commands <= installs(page)
    for source in re.findall(r"^COPY (.+) \S+$", dockerfile, re.M):
        assert all((ROOT / name).exists() for name in source.split())


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and str(citation["version"]) == __version__
    assert {"message", "title", "authors"} <= citation.keys()
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_issue_forms_are_complete():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "attributes"} <= item.keys() for item in form["body"]), path.name
