"""Programs that a suite runs: checks, and the commands that start them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.suites import forkserver
from benchmarks.suites.checks import Findings, check, command_keys
from benchmarks.suites.executors.base import HOST, PORT, RANK
from benchmarks.suites.suite import (
    DETECTION,
    DETECTRON2,
    EMBEDDED,
    POINT,
    RunSpec,
)
from convert.read import find_file
from detection.config.engines import detectron2_installed
from moco.common import pretrained
from moco.common.command import RANDOM
from moco.common.errors import UserError
from moco.common.pretrained import LocalWeights

_T = TypeVar("_T")
PLOTTED_IMAGES = 4  # images with plotted predictions, for the report
_DETECTION = {DETECTION: "detection.train_net", POINT: "benchmarks.suites.point"}
_SIGNALS = "SIGTERM,SIGINT,SIGUSR1,SIGUSR2"  # by default the last two would kill torchrun


class Programs:
    """Programs of this project, which tests replace by small ones.

    Only child processes import torch. benchmarks/suites/checks.py documents the checks.
    """

    def not_downloaded(self, weights: Mapping[str, str]) -> dict[str, str]:
        """Return init → description of the download, for inits that need one."""
        needed = _map_inits(pretrained.not_downloaded, weights)
        return {init: what for init, what in needed.items() if what}

    def locate(self, weights: Mapping[str, str]) -> dict[str, LocalWeights | None]:
        """Find or download the file of each init; None stands for random initialization.

        Raises:
            UserError: If weights cannot be downloaded, or are in a folder without any.
        """
        files = {init: text for init, text in weights.items() if text != RANDOM}
        found = _map_inits(find_file, files)
        return {init: found.get(init) for init in weights}

    def choose_engines(self, wanted: str) -> tuple[str, ...]:
        """Return the detection engines for `auto`, `detectron2`, `embedded` or `each`.

        Only `check` imports Detectron2, which takes longer than the rest of a dry run.

        Raises:
            UserError: If Detectron2 is needed and not installed.
        """
        if wanted == EMBEDDED or (wanted == "auto" and not detectron2_installed()):
            return (EMBEDDED,)
        if not detectron2_installed():
            raise UserError(
                f"--engine {wanted}: Detectron2 is not installed; install it as README.md "
                "describes, or use --engine embedded"
            )
        return (DETECTRON2, EMBEDDED) if wanted == "each" else (DETECTRON2,)

    def unreadable(self, files: Sequence[Path]) -> dict[Path, str]:
        """Return file → reason why its weights cannot be read, for unreadable files."""
        return forkserver.call(_unreadable, list(files)) if files else {}

    def check(self, specs: Sequence[RunSpec], on_gpus: bool, scored: Sequence[str]) -> Findings:
        """Check the runs in a child process, see benchmarks/suites/checks.py."""
        return forkserver.call(check, list(specs), on_gpus, list(scored))

    def command(self, spec: RunSpec, folder: Path, machines: int = 1) -> list[str]:
        """Return the command that starts or resumes a run.

        The command for several machines has placeholders that each machine replaces, see
        benchmarks/suites/executors/base.py.

        Args:
            spec: Run with the paths of its weights and of the task's file.
            folder: Folder of the run.
            machines: Number of machines of the run.
        """
        keys = [*command_keys(spec), "OUTPUT_DIR", str(folder), "SEED", str(spec.seed)]
        if spec.program in _DETECTION:
            gpus = max(spec.gpus // machines, 1)
            flags = ["--engine", spec.engine, "--resume", "--num-gpus", str(gpus)]
            if machines > 1:
                flags += ["--num-machines", str(machines), "--machine-rank", RANK]
                flags += ["--dist-url", f"tcp://{HOST}:{PORT}"]
            if spec.seed == 0 and not spec.in_grid:  # the report shows images of one trial
                flags += ["--visualize", str(PLOTTED_IMAGES)]
            program = ["-m", _DETECTION[spec.program], *flags, "--config-file", str(spec.config)]
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


def _unreadable(files: Sequence[Path]) -> dict[Path, str]:
    from detection.config.weights import read_weights

    found = {}
    for file in files:
        try:
            read_weights(str(file))
        except UserError as error:
            found[file] = str(error)
        except Exception as error:  # a damaged file may raise anything
            found[file] = f"{file}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found


def _map_inits(function: Callable[[str], _T], weights: Mapping[str, str]) -> dict[str, _T]:
    """Return init → result of `function` for the weights.

    If weights need timm, and with it torch, a child process computes all of them.
    """
    apart = any(text.startswith("timm://") for text in weights.values())
    texts = list(weights.values())
    found = forkserver.call(_map_texts, function, texts) if apart else _map_texts(function, texts)
    return dict(zip(weights, found, strict=True))


def _map_texts(function: Callable[[str], _T], texts: Sequence[str]) -> list[_T]:
    return [function(text) for text in texts]
