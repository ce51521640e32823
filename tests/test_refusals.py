"""Refusals of wrong input by all commands, from the rows of `tests/refusals/`.

Each row runs a command line in its own folder. The command has to end with the row's exit code and
one line that matches the row's pattern, and it must not leave files in the folder.
"""

import hashlib
import importlib.util
import logging
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.__main__ import cli  # The function behind `moco-transfer`.
from tests.oracles import refused_files
from tests.refusals import ALL, Row

ROOT = Path(__file__).resolve().parent.parent
FIRST = {row.command.split()[0]: row for row in reversed(ALL) if not row.without}.values()
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)


def case(row: Row) -> object:
    marks = [pytest.mark.detectron2] if "detectron2" in row.needs else []
    return pytest.param(row, id=f"{row.command.split()[0]}: {row.what}", marks=marks)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], None]:
    """Put a file or a folder of `refused_files.FILES` into a folder; each is made once."""
    kept = tmp_path_factory.mktemp("files")

    def put(name: str, folder: Path) -> None:
        if not (kept / name).exists():
            refused_files.FILES[name](kept / name)
        refused_files.copy(kept / name, folder / name)

    return put


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder in which a command runs; the state of this process is restored afterwards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asks the network"))
    before, modules = dict(os.environ), set(sys.modules)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads, handlers = torch.get_num_threads(), [signal.getsignal(n) for n in HANDLED]
    log = logging.getLogger()
    logs, catalogs = (log.level, log.handlers[:]), refused_files.catalogs()
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_num_threads(threads)
    for number, handler in zip(HANDLED, handlers, strict=True):
        signal.signal(number, handler)
    log.level, log.handlers[:] = logs
    for name in sys.modules.keys() - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]  # a module of the row
    for catalog, content in catalogs:
        catalog.clear()
        catalog.update(content)


def prepare(row: Row, folder: Path, put: Callable[[str, Path], None]) -> list[str]:
    """Make the files that the row's command reads, and return its arguments."""
    for package in row.needs:  # importing it is the command's business
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for name in sorted(refused_files.FILES):
        if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", f"{row.command} {row.files}"):
            put(name, folder)
    if row.edit is not None:
        row.edit(folder)
    return shlex.split(row.command.replace("{tmp}", str(folder)))


def environment(row: Row, folder: Path) -> dict[str, str]:
    """Return the environment variables of a command."""
    own = {"DETECTRON2_DATASETS": str(folder), "MOCO_TRANSFER_CACHE": str(folder / "cache")}
    own |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "500"}
    return own | {name: value.replace("{tmp}", str(folder)) for name, value in row.env.items()}


def content(folder: Path) -> dict[str, str]:
    """Return the hash of each file below a folder; empty locks and bytecode may stay."""
    kept = [path for path in folder.rglob("*") if path.name != ".lock" and path.suffix != ".pyc"]
    files = [path for path in kept if path.is_file()]
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return {str(path.relative_to(folder)): h for path, h in zip(files, hashes, strict=True)}


def check(row: Row, folder: Path, code: object, error: str, before: dict[str, str]) -> None:
    assert code == row.code, error
    *usage, line = error.splitlines()
    if usage:  # argparse prints it if a flag is missing or unknown.
        assert usage[0].startswith("usage: moco-transfer") and " error: " in line, error
    else:
        assert line.startswith("error: "), error
    assert line.isprintable() and "Traceback" not in error
    assert re.search(row.words.replace("{tmp}", re.escape(str(folder))), line), line
    after = content(folder)
    left = [name for name in after if not any(re.fullmatch(p, name) for p in row.leaves)]
    assert {name: after[name] for name in left} == before


@pytest.mark.parametrize("row", map(case, ALL))
def test_it_is_refused(row, folder, built, monkeypatch, capsys):
    words = prepare(row, folder, built)
    for name, value in environment(row, folder).items():
        monkeypatch.setenv(name, value)
    if "PYTHONPATH" in row.env:
        monkeypatch.syspath_prepend(folder)
    for package in row.without:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["moco-transfer", *words])
    monkeypatch.chdir(folder)
    before = content(folder)
    with pytest.raises(SystemExit) as left:
        cli()
    check(row, folder, left.value.code, capsys.readouterr().err, before)


@pytest.mark.slow
@pytest.mark.parametrize("row", map(case, FIRST))
def test_in_a_process_of_its_own_it_is_the_same(row, folder, built):
    words = prepare(row, folder, built)
    before = content(folder)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment(row, folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    check(row, folder, done.returncode, done.stderr, before)
