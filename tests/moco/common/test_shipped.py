"""Shipped configuration files by name."""

from pathlib import Path

import pytest

from moco.common import shipped
from moco.common.cfgnode import read_yaml

TASK = shipped.CONFIGS / "voc" / "faster_rcnn_R_50_C4_24k.yaml"


@pytest.mark.parametrize("folder", ["", "voc/", "configs/voc/"])
@pytest.mark.parametrize("ending", ["", ".yaml"])
def test_a_name_with_or_without_folder_and_ending(folder, ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped.resolve(f"{folder}{TASK.stem}{ending}") == TASK


def test_an_existing_file_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "voc").mkdir()  # datasets have such folders
    assert shipped.resolve("voc") == shipped.CONFIGS / "suites" / "voc.yaml"
    (tmp_path / "voc.yaml").touch()
    assert shipped.resolve("voc.yaml") == Path("voc.yaml")


def test_a_copy_elsewhere_finds_its_base(tmp_path):
    copy = tmp_path / "mine.yaml"
    copy.write_text(TASK.read_text())
    assert read_yaml(copy) == read_yaml(TASK)
    copy.write_text("_BASE_: faster_rcnn_R_50_C4_24k\n")
    assert read_yaml(copy) == read_yaml(TASK)


@pytest.mark.parametrize("checkout", [True, False])
def test_the_spelling_of_a_file_in_a_command(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "CHECKOUT", checkout)
    monkeypatch.chdir(shipped.ROOT)
    name = "configs/imagenet/linear.yaml"
    assert shipped.display_name(name) == (name if checkout else "imagenet/linear")
    monkeypatch.chdir(tmp_path)
    assert (
        shipped.display_name("imagenet/linear") == shipped.display_name(name) == "imagenet/linear"
    )
