"""The notebook, the Dockerfile and the files that other sites read."""

import re
from pathlib import Path

import pytest
import yaml

from moco import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOK = ROOT / "docs" / "notebooks" / "quickstart.ipynb"


# The notebook's parameters, small: four iterations of everything, one seed.
SMALL = """
PRETRAINING = ["SOLVER.MAX_ITERS", "4", "SOLVER.BATCH_SIZE", "16", "MOCO.K", "32"]
PRETRAINING += ["SOLVER.WARMUP_ITERS", "1"]
IMAGES = 64
OPTIONS = {"SOLVER.MAX_ITER": 4, "SOLVER.STEPS": (2, 3), "SOLVER.WARMUP_ITERS": 1}
SEEDS = 1
"""


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(NOTEBOOK, as_version=4)
    [parameters] = [c for c in book.cells if "parameters" in c.metadata.get("tags", ())]
    parameters.source += SMALL
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=500, kernel_name="python3", resources=resources).execute()
    outputs = [out for cell in book.cells for out in cell.get("outputs", ())]
    printed = "".join(out.get("text", "") for out in outputs)
    assert re.search(r"^random   seed 0: AP [\d.]+\nmine     seed 0: AP [\d.]+\n", printed, re.M)
    shown = {kind: text for out in outputs for kind, text in out.get("data", {}).items()}
    assert re.search(r"^\| random .*\n\| mine ", shown["text/markdown"], re.M)
    assert shown["text/html"].startswith("<iframe srcdoc=")
    assert (tmp_path / "first_table/runs/tables/table.html").is_file()


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
