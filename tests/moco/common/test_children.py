"""Variables of `own_modules`, by what `python -m` imports with them."""

import os
import subprocess
import sys

import pytest

from moco.common.shipped import own_modules


@pytest.mark.parametrize("before", ["", "another_folder"])
def test_own_modules_are_found_in_a_folder_that_has_others(before, tmp_path, monkeypatch):
    for name in ("moco", "detection", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.setenv("PYTHONPATH", before)
    command = [sys.executable, "-m", "benchmarks", "pretrain", "--help"]
    own = {**os.environ, **own_modules()}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert "usage:" in done.stdout, done.stderr
    assert own["PYTHONPATH"].endswith(before)
