r"""Fine-tune a detector and evaluate it: one run, one folder, one record.

    python detection/train_net.py --config-file configs/voc/faster_rcnn_R_50_C4_24k.yaml \
        --num-gpus 8 MODEL.WEIGHTS moco.pth OUTPUT_DIR runs/voc_24k/moco_0

Flags and files are those of Detectron2's train_net.py. The engine is Detectron2 if it can be
imported, else the embedded one; the choice is printed and recorded.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if not __package__:
    # In a script, Python searches modules in the script's folder instead of the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moco.common import distributed
from moco.common.command import RANDOM, build_options, command_parser, parse_with_pairs
from moco.common.errors import UserError, echo, run_cli
from moco.common.files import expand_home
from moco.common.pretrained import describe_download
from moco.common.shipped import find, resolve

if TYPE_CHECKING:
    from detection.engine.job import Processes


@dataclass(frozen=True)
class Options:
    """Options of the command line; `build_parser` describes them."""

    config_file: str | None
    engine: str
    resume: bool
    overwrite: bool
    eval_only: bool
    num_gpus: int
    num_machines: int
    machine_rank: int
    dist_url: str
    check_only: bool
    visualize: int
    imports: Sequence[str]
    opts: Sequence[str]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line; --help works without importing torch."""
    parser = command_parser("train", (__doc__ or "").splitlines()[0])
    parser.add_argument("--config-file", metavar="FILE", help="task: a file or a shipped name")
    parser.add_argument(
        "--engine",
        choices=("auto", "detectron2", "embedded"),
        default="auto",
        help="auto: detectron2 if it can be imported, else embedded",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in OUTPUT_DIR, if there is one"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="start from scratch in a folder that is not empty"
    )
    parser.add_argument(
        "--eval-only",
        action="store_true",
        help="evaluate the trained model MODEL.WEIGHTS (with --resume: OUTPUT_DIR's last one)",
    )
    parser.add_argument(
        "--num-gpus",
        type=int,
        default=1,
        help="number of processes on this machine, one per GPU (with MODEL.DEVICE cpu: on the CPU)",
    )
    parser.add_argument("--num-machines", type=int, default=1)
    parser.add_argument("--machine-rank", type=int, default=0)
    parser.add_argument(
        "--dist-url",
        default="auto",
        help="tcp://host:port of the first machine, for several machines",
    )
    parser.add_argument(
        "--check-only",
        action="store_true",
        help="check configuration, weights and data against the paper's recipe, and stop",
    )
    parser.add_argument(
        "--visualize",
        type=int,
        default=0,
        metavar="N",
        help="draw the predictions on N test images into OUTPUT_DIR/inference/visualize",
    )
    parser.add_argument(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="with Detectron2: import your own module first, e.g. one that registers a dataset in "
        "DatasetCatalog; may be repeated",
    )
    parser.add_argument(
        "opts",
        nargs="*",
        metavar="KEY VALUE",
        help="config overrides: MODEL.WEIGHTS file|name|random, OUTPUT_DIR, SEED, …",
    )
    return parser


def parse_args(argv: Sequence[str] | None = None) -> Options:
    """Parse the command line, in which pairs may stand between the flags."""
    return build_options(parse_with_pairs(build_parser(), argv), Options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; see `build_parser`."""
    args = parse_args(argv)
    main_process = distributed.launched_rank() == 0

    from detection.config.task import complete_task, draft_task, load_task
    from detection.config.trained import trained_config
    from detection.datasets import cache_clear
    from moco.common.cfgnode import explicit_keys
    from moco.common.run import check_unused

    cache_clear()  # files may have changed since an earlier run in this process
    if args.visualize < 0:
        raise UserError(f"--visualize: got {args.visualize}, expected 0 or more images")
    # torchrun --max-restarts starts all processes again after one has died.
    if distributed.restart_count() and not args.eval_only:
        args = replace(args, resume=True, overwrite=False)
    opts = args.opts
    config_file: str | Path | None = args.config_file
    if config_file is not None and model_zoo_file(config_file) is None:
        config_file = resolve(config_file)
    if args.eval_only and config_file is None:
        config_file = found = trained_config(opts, resume=args.resume)
        # The folder of the training may have moved since.
        if "OUTPUT_DIR" not in opts[::2]:
            opts = [*opts, "OUTPUT_DIR", str(found.parent)]
        if main_process:
            echo(f"config: {config_file}, next to the model")
    draft = None
    # Only Detectron2 knows its model zoo, and DensePose's keys.
    from_zoo = args.engine != "embedded" and model_zoo_file(config_file) is not None
    if not (from_zoo or "MODEL.DENSEPOSE_ON" in explicit_keys(config_file, opts)):
        draft = draft_task(config_file, opts, eval_only=args.eval_only, resume=args.resume)
    checked = "checked, nothing"
    if args.check_only and not args.eval_only:
        overrides = dict(zip(opts[::2], opts[1::2], strict=False))
        weights = draft.cfg.MODEL.WEIGHTS if draft else overrides.get("MODEL.WEIGHTS", "")
        if missing := describe_download(weights):
            opts = [*opts, "MODEL.WEIGHTS", RANDOM]
            if draft:
                draft.cfg.MODEL.WEIGHTS = RANDOM
            if main_process:
                echo(f"note: {weights}: would download {missing}; random weights replace them here")
            checked = f"checked with random weights instead of {weights}, nothing"
    if main_process:
        fresh = not (args.resume or args.overwrite or args.eval_only or args.check_only)
        if draft and fresh and args.machine_rank == 0:
            check_unused(draft.cfg.OUTPUT_DIR)
        echo(f"starting: {config_file or 'Detectron2 defaults'}")
    engine, reason = choose_engine(args.engine)
    imported = import_own(args.imports, engine)
    if main_process:
        echo(f"engine: {engine} ({reason})", *imported)

    from detection.engine import run  # Imports torch.
    from detection.engine.job import Job, check_processes

    several = processes(args)
    if draft:
        task = complete_task(draft, engine, several.world_size)
    else:
        with TemporaryDirectory(prefix="detection-") as scratch:
            task = load_task(
                find_config(config_file, engine, Path(scratch)),
                opts,
                engine,
                eval_only=args.eval_only,
                resume=args.resume,
                num_processes=several.world_size,
            )
    if task.seed_sampled and not args.eval_only and (several.started or several.num_machines > 1):
        raise UserError("SEED is not set; several machines, or torchrun, need a common one; set it")
    scored = ""
    if args.check_only and main_process:
        from detection.evaluation.reachable import score_of_perfect

        _, scored = score_of_perfect(task.test, task.cfg)
    description = run.describe(task, scored)
    if main_process:
        print(description, flush=True)
    check_processes(task.cfg, several, eval_only=args.eval_only)
    if args.check_only:
        if main_process:
            echo(f"{checked} was trained or written; recipe: {task.recipe.label}")
        return 0
    job = Job(
        engine=task.engine,
        cfg=task.cfg,
        weights=task.weights,
        resume=args.resume,
        eval_only=args.eval_only,
        visualize=args.visualize,
        processes=several,
        imports=tuple(args.imports),
    )
    if several.machine_rank > 0 or not main_process:
        from detection.engine import launch  # Imports torchvision.

        launch.run(job)
    else:
        run.run_in_folder(task, job, description, overwrite=args.overwrite)
    return 0


def choose_engine(wanted: str) -> tuple[str, str]:
    """Return the name of the engine and the reason for the choice.

    Raises:
        UserError: If Detectron2 is requested and cannot be imported.
    """
    if wanted == "embedded":
        return "embedded", "requested"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Detectron2's own source causes them.
            import detection.d2  # noqa: F401  # the only package that imports detectron2
    except Exception as error:  # A broken installation may raise anything.
        if wanted == "detectron2":
            raise UserError(
                f"--engine detectron2: Detectron2 cannot be imported ({error}); install it as "
                "README.md describes, or use --engine embedded"
            ) from error
        return "embedded", f"Detectron2 cannot be imported: {error}"
    why = "requested" if wanted == "detectron2" else "it can be imported"
    return "detectron2", f"version {metadata.version('detectron2')}, {why}"


def import_own(names: Sequence[str], engine: str) -> list[str]:
    """Import the user's modules, and return a line about each.

    Only the command line may name them, never a config file or a dataset, because importing runs
    code.

    Raises:
        UserError: If one cannot be imported, or the engine does not support it.
    """
    if not names:
        return []
    if engine != "detectron2":
        raise UserError("--import: the embedded engine does not import modules; use Detectron2")
    from detection.engine.job import import_modules

    return import_modules(names)


def model_zoo_file(name: str | Path | None) -> Path | None:
    """Return a file of Detectron2's model zoo; None if `name` exists here or is shipped."""
    spec = find_spec("detectron2")
    here = name is None or expand_home(name).exists() or find(name) is not None
    if name is None or here or spec is None or spec.origin is None:
        return None
    folder = (Path(spec.origin).parent / "model_zoo" / "configs").resolve()
    path = (folder / name).resolve()
    return path if path.is_file() and path.is_relative_to(folder) else None


def find_config(name: str | Path | None, engine: str, scratch: Path) -> str | Path | None:
    """Return a task file; for one of Detectron2's model zoo (`COCO-Detection/….yaml`), a copy.

    Args:
        name: Task file, or name in the model zoo.
        engine: Name of the engine; only Detectron2 has a model zoo.
        scratch: Folder for the copy.
    """
    path = model_zoo_file(name)
    if engine != "detectron2" or path is None:
        return name
    from detection.d2.config import plain_copy

    return plain_copy(path, scratch)


def processes(args: Options) -> "Processes":
    """Return the processes that the flags or torchrun request; raise UserError if both do."""
    from detection.engine.job import Processes, torchrun_processes

    started = torchrun_processes()
    if started is None:
        return Processes(args.num_gpus, args.num_machines, args.machine_rank, args.dist_url)
    if (args.num_gpus, args.num_machines) != (1, 1):
        raise UserError("--num-gpus, --num-machines: torchrun has started the processes; omit both")
    return started


if __name__ == "__main__":
    run_cli(main)
