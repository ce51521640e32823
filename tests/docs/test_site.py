"""Site: its navigation, the pages generated from the code, and that it builds offline."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from detection.config.task import default_task
from docs import hooks
from moco.classification.config import default_cfg
from moco.common.cfgnode import flatten
from moco.finetune import FINETUNE
from moco.pretraining.config import default_cfg as default_pretraining
from tests.oracles.python import run_python

ROOT = Path(__file__).resolve().parent.parent.parent


def pages_of(nav):
    """List the paths of all pages in a navigation."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages_of(entry)]


def test_every_page_is_in_the_navigation():
    pages = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    files = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(pages) == files | set(hooks.TOP_LEVEL)
    assert len(pages) == len(set(pages))
    assert all((ROOT / name).is_file() for name in hooks.TOP_LEVEL.values())


def test_every_key_is_in_the_reference():
    page = hooks.config_keys()
    cfgs = [default_pretraining(), default_cfg(FINETUNE.defaults), default_task()]
    keys = {key for cfg in cfgs for key in flatten(cfg)}
    anchors = re.findall(r'<a id="([\w.]+)">', page)
    assert set(anchors) == keys
    assert len(anchors) == len(keys)


def test_every_key_is_described():
    """Only keys with a single value need no description."""
    tables = hooks.KEYS, hooks.training.PRETRAIN, hooks.training.CLASSIFICATION
    keys = [key for table in tables for key in table.values()]
    silent = [key for key in keys if not key.doc]
    assert all(len(key.embedded or key.range.choices) == 1 for key in silent)
    assert all(key.doc.endswith(".") for key in keys if key.doc)


def test_defaults_are_those_of_each_command():
    page = hooks.config_keys()
    assert (
        "`SOLVER.BASE_LR` *float* = `0.03` (pretrain), `30.0` (linear), `0.03` (finetune)" in page
    )
    assert "`AUG.HUE` *float* = `0.4` (v1), `0.1` (v2)" in page


def test_every_command_is_in_the_reference():
    page = hooks.command_line()
    for name in hooks.COMMANDS:
        assert re.search(rf"^## {name}\n\n(.+)", page, re.M), name
    assert "- `--config-file` `YAML`\n" in page
    assert "## datasets doctor" in page


def test_the_site_is_built_with_the_versions_that_ci_has():
    """Another mkdocs or theme changes every page, so the extra names exact versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = project["optional-dependencies"]["docs"]
    assert set(pins) <= set((ROOT / ".ci" / "constraints.txt").read_text().splitlines())


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_the_network(tmp_path):
    pytest.importorskip("material")
    run_python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path, NO_MKDOCS_2_WARNING="1")
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 40
    remote = re.compile(
        r"""<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//|<link[^>]*https?://"""
    )
    for page in pages:
        assert not remote.search(page.read_text()), page
        assert "<!-- generated" not in page.read_text(), page
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style
