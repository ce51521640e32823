"""Threads that a closed connection between processes leaves behind; imports few modules."""

import gc
from pathlib import Path

import torch

from moco.common import distributed
from moco.common.errors import UserError


def gloo_threads(fails: bool) -> tuple[list[str], list[str]]:
    """Return the names of gloo's threads within a session, which may fail, and after it."""
    gc.disable()  # or its end is a matter of luck
    within: list[str] = []
    try:
        with distributed.session(torch.device("cpu"), timeout_seconds=60):
            _train(within, fails)
    except UserError:
        return within, _threads()  # with the error still there
    return within, _threads()


def _train(within: list[str], fails: bool) -> None:
    model = distributed.data_parallel(torch.nn.Linear(4, 4))
    model.itself = [model]  # as a module whose parts know it
    model(torch.ones(2, 4)).sum().backward()
    within.extend(_threads())
    if fails:
        raise UserError("as asked")


def _threads() -> list[str]:
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def detectron2s_gloo_threads() -> tuple[list[str], list[str]]:
    """Return gloo's threads within and after the plugin's `session`, with Detectron2's group."""
    from detectron2.utils import comm

    from detection.d2.engine import session

    gc.disable()
    within: list[str] = []
    with distributed.session(torch.device("cpu"), timeout_seconds=60), session():
        comm.all_gather("its own group of all processes")
        _train(within, fails=False)
    return within, _threads()
