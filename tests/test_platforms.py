"""Systems other than Linux: macOS lacks some names, Windows more, and is answered in one line."""

import json
import os
from pathlib import Path

import pytest

from moco.common.distributed import usable_cores
from tests.oracles.python import run_python

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("moco", "convert", "detection", "benchmarks")
    for path in (ROOT / package).rglob("*.py")
    if "run_cli(main)" in path.read_text()
)
# What torch and others need of these, they have imported before.
WITHOUT_POSIX = """
import os, signal, sys
import detection.engine.trainer, benchmarks.report.page, tensorboard, filelock, subprocess
import convert.convert_to_d2, moco.finetune, moco.knn, scipy.optimize, torchvision, multiprocessing
for name in [n for n in sys.modules if n.split(".")[0] in ("moco", "convert", "detection",
                                                           "benchmarks")]:
    del sys.modules[name]
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "killpg", "getpgid", "setsid", "fork", "pwrite", "getuid"):
    delattr(os, name)
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGCHLD", "SIGALRM"):
    delattr(signal, name)
"""
OPTIONAL = ("detectron2", "densepose", "lightly", "webdataset", "hotcoco")


def test_cores_without_linuxs_affinity(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.slow
def test_every_module_is_imported_without_posix_names():
    code = f"""{WITHOUT_POSIX}
import importlib
from pathlib import Path
for package in ("moco", "convert", "detection", "benchmarks"):
    for path in sorted(Path(package).rglob("*.py")):
        name = ".".join(path.with_suffix("").parts)
        try:
            importlib.import_module(name.removesuffix(".__init__"))
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in {OPTIONAL}:
                raise
print("imported all")
"""
    assert run_python("-c", code).endswith("imported all\n")


@pytest.mark.slow
def test_every_command_answers_windows_in_one_line():
    code = f"""{WITHOUT_POSIX}
import contextlib, io, json, runpy
answers = {{}}
sys.platform = "win32"
for name in sys.argv[1:]:
    sys.argv = [name]
    sys.modules.pop(name, None)  # another command may have imported it
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runpy.run_module(name, run_name="__main__")
    except SystemExit as error:
        answers[name] = (error.code, said.getvalue())
print(json.dumps(answers))
"""
    answers = json.loads(run_python("-c", code, *COMMANDS).splitlines()[-1])
    assert set(answers) == set(COMMANDS) and len(COMMANDS) > 12
    for name, (exit_code, said) in answers.items():
        assert exit_code == 2, name
        assert said.count("\n") == 1 and "Linux, macOS" in said and "WSL" in said, (name, said)
