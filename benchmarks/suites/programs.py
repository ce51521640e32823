"""The training programs that a suite runs: what they check, and the commands that start them."""

import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.suites.checks import Findings, check, command_keys
from benchmarks.suites.executors.base import HOST, PORT, RANK
from benchmarks.suites.suite import DETECTION, DETECTRON2, EMBEDDED, RunSpec
from detection.config.engines import detectron2_installed
from moco.common import pretrained
from moco.common.command import RANDOM
from moco.common.errors import UserError
from moco.common.pretrained import LocalWeights

_T = TypeVar("_T")
PLOTTED_IMAGES = 4  # with predictions, for the report
_SIGNALS = "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"  # torchrun would otherwise die of the last two


class Programs:
    """This project's; tests put small ones in their place. Only their own processes import torch.

    See benchmarks/suites/checks.py for what is checked.
    """

    def not_downloaded(self, weights: Mapping[str, str]) -> dict[str, str]:
        """Init → what would have to be downloaded for it; those that need nothing are left out."""
        needed = _each(pretrained.not_downloaded, weights)
        return {init: what for init, what in needed.items() if what}

    def locate(self, weights: Mapping[str, str]) -> dict[str, LocalWeights | None]:
        """Init → its file, downloaded if need be; None is random.

        Raises:
            UserError: weights that cannot be downloaded.
        """
        files = {init: text for init, text in weights.items() if text != RANDOM}
        found = _each(pretrained.locate, files)
        return {init: found.get(init) for init in weights}

    def choose_engines(self, wanted: str) -> tuple[str, ...]:
        """`auto`, `detectron2`, `embedded` or `each` → engines for detection.

        Detectron2 is not imported before `check`, which takes longer than all else that a dry run
        does.

        Raises:
            UserError: Detectron2 is needed and not installed.
        """
        if wanted == EMBEDDED or (wanted == "auto" and not detectron2_installed()):
            return (EMBEDDED,)
        if not detectron2_installed():
            raise UserError(
                f"--engine {wanted}: Detectron2 is not installed; README.md says how, or use "
                "--engine embedded"
            )
        return (DETECTRON2, EMBEDDED) if wanted == "each" else (DETECTRON2,)

    def check(self, specs: Sequence[RunSpec], on_gpus: bool) -> Findings:
        return _in_own_process(check, list(specs), on_gpus)

    def command(self, spec: RunSpec, folder: Path, machines: int = 1) -> list[str]:
        """The command that starts a run in a folder, or continues it.

        On several machines each has to fill in what only it knows, see
        benchmarks/suites/executors/base.py.
        """
        keys = [*command_keys(spec), "OUTPUT_DIR", str(folder), "SEED", str(spec.seed)]
        if spec.program == DETECTION:
            gpus = max(spec.gpus // machines, 1)
            flags = ["--engine", spec.engine, "--resume", "--num-gpus", str(gpus)]
            if machines > 1:
                flags += ["--num-machines", str(machines), "--machine-rank", RANK]
                flags += ["--dist-url", f"tcp://{HOST}:{PORT}"]
            if spec.seed == 0:  # the report shows one trial's
                flags += ["--visualize", str(PLOTTED_IMAGES)]
            program = ["-m", "detection.train_net", *flags, "--config-file", str(spec.config)]
            return [sys.executable, *program, *keys, "MODEL.WEIGHTS", spec.weights]
        launcher = []
        if spec.gpus > 1:
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={spec.gpus // machines}"]
            if machines > 1:
                launcher += [f"--nnodes={machines}", f"--node-rank={RANK}"]
                launcher += [f"--master-addr={HOST}", f"--master-port={PORT}"]
            else:
                launcher += ["--standalone"]
            launcher += [f"--signals-to-handle={_SIGNALS}"]
        program = ["-m", "benchmarks", spec.program, "--config-file", str(spec.config)]
        program += ["--resume=auto", "--checkpoint", spec.weights]
        if spec.weights != RANDOM:
            program += ["--init", spec.init]
        return [sys.executable, *launcher, *program, *keys]


def _each(function: Callable[[str], _T], weights: Mapping[str, str]) -> dict[str, _T]:
    """Init → `function` of its weights, all in a process of their own where one imports timm, and
    with it torch."""
    apart = any(text.startswith("timm://") for text in weights.values())
    texts = list(weights.values())
    found = _in_own_process(_map, function, texts) if apart else _map(function, texts)
    return dict(zip(weights, found, strict=True))


def _map(function: Callable[[str], _T], texts: Sequence[str]) -> list[_T]:
    return [function(text) for text in texts]


def _in_own_process(function: Callable[..., _T], *arguments: Any) -> _T:
    """Call `function` in a fresh process, so that what it imports and reads is gone afterwards."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()
