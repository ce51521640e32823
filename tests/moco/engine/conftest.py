"""Tiny runs of all trainings, over which the loop's tests are parametrized."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moco.engine.checkpoint import CLASSIFIER_FORMAT, FORMAT
from tests.moco.classification import classify_runs
from tests.moco.commands import finetune, linear, pretrain

labeled, pretrained = classify_runs.labeled, classify_runs.pretrained


@pytest.fixture(scope="session", params=["pretrain", "linear", "finetune"])
def train(request, images, tiny, labeled, pretrained) -> Callable[..., None]:
    """`train(folder, *flags, KEY=value)`: a run of 8 or 6 steps, in epochs of 3 or 2.

    `train.form`: the format of its checkpoints.
    """

    def go(folder: Path, *flags: str, **changes: object) -> None:
        if request.param == "pretrain":
            pretrain([*tiny(DATA__ROOT=images, OUTPUT_DIR=folder, **changes), *flags])
            return
        command = linear if request.param == "linear" else finetune
        changes = {"SOLVER__BASE_LR": 0.1, **changes}
        command([*classify_runs.words(folder, labeled, pretrained, **changes), *flags])

    go.name = request.param  # type: ignore[attr-defined]
    go.form = FORMAT if request.param == "pretrain" else CLASSIFIER_FORMAT  # type: ignore[attr-defined]
    return go
