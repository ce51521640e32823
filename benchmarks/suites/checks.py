"""Checks of a suite's runs, made before the first one starts.

A detection run is checked by the function that train_net calls (`detection.config.task.load_task`):
configuration, weights, their input contract, every dataset. All problems are listed together, one
line each. A check imports torch and may hold a dataset's annotations for a moment, so the command
calls `check` in a child process.
"""

import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from benchmarks.suites.checkpoints import Checkpoints
from benchmarks.suites.suite import (
    CHOOSE,
    DETECTION,
    GRID_POINT,
    LINEAR,
    MOCO,
    RunSpec,
    SuiteTask,
)
from benchmarks.suites.suite_file import refuse_per_run
from detection.config.keys import KEYS
from moco.common.cfgnode import split_assignments
from moco.common.command import RANDOM
from moco.common.errors import DataError, UserError, first_few
from moco.engine.keys import CLASSIFICATION

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode
    from torch import nn

    from detection.config.task import Task
    from detection.evaluation.reachable import Reachable

DATASETS_VARIABLE = "DETECTRON2_DATASETS"
_DETECTION = (DETECTION, GRID_POINT)
DECODING_SECONDS = 20.0  # of all images together


@dataclass(frozen=True)
class Findings:
    """Result of `check`.

    Attributes:
        problems: One line each; no run may start while there is one.
        notes: Facts that a reader of the numbers should know, one line each.
        iterations: (task, engine, init) → length of the run, if it is known.
        hardware: This machine's hardware, in the form of run records.
        checkpoints: (task, engine, init) → checkpoints of such a run, if they are known.
        scores: `metric_sha256` → score of perfect predictions, by `Reachable`'s fields.
    """

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    iterations: dict[tuple[str, str, str], int] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[tuple[str, str, str], Checkpoints] = field(default_factory=dict)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)


def check(specs: Sequence[RunSpec], on_gpus: bool, scored: Sequence[str] = ()) -> Findings:
    """Check one run of each (task, engine, init); the trials differ in the seed only.

    Args:
        specs: Runs that are not done.
        on_gpus: Whether the runs will see GPUs.
        scored: Keys of `Findings.scores` that earlier calls have computed.
    """
    if not on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for a GPU
    warnings.simplefilter("ignore", FutureWarning)  # about Detectron2's own source
    from moco.common.run import provenance

    trials: dict[tuple[str, str, str], RunSpec] = {}
    for spec in specs:
        if spec.program == CHOOSE:  # it reads only other runs
            continue
        trials.setdefault((spec.task, spec.engine, spec.init), spec)
    decoded: dict[tuple[tuple[str, str], ...], tuple[str, str]] = {}
    end = time.monotonic() + DECODING_SECONDS
    scores: dict[str, tuple[Reachable | None, str]] = dict.fromkeys(scored, (None, ""))
    found = {
        key: _scored(_decoded(_outcome(spec), decoded, end), scores) for key, spec in trials.items()
    }
    sound = {key: each for key, each in found.items() if not each.problem}
    problems: dict[str, list[str]] = {}  # problem → runs that have it
    for (task, engine, init), each in found.items():
        if each.problem:
            which = f"{task} from {init}" + ("" if engine == MOCO else f" ({engine})")
            problems.setdefault(each.problem, []).append(which)
    read = {(task, engine) for task, engine, _ in sound}  # their data and keys are checked
    for (task, engine), spec in {(s.task, s.engine): s for s in trials.values()}.items():
        if spec.program not in _DETECTION or (task, engine) in read:
            continue
        # Bad weights end a check before it reads the data.
        if problem := _outcome(replace(spec, weights=RANDOM)).problem:
            names = problems.setdefault(problem, [])
            if not any(name.startswith(f"{task} from") for name in names):
                names.append(task)
    lines = [f"{first_few(names, 3)}: {problem}" for problem, names in problems.items()]
    titled, noted = (defaultdict[str, dict[str, None]](dict) for _ in range(2))  # ordered sets
    for (task, _, _), each in sound.items():
        titled[each.title][task] = None
        for note in each.notes:
            noted[note][task] = None
    lines += [
        f"{' and '.join(tasks)}: both would be {name} in the tables; give one of them a file (or "
        "TASK) of its own name"
        for name, tasks in titled.items()
        if len(tasks) > 1
    ]
    return Findings(
        tuple(lines),
        tuple(f"{first_few(list(tasks), 3)}: {note}" for note, tasks in noted.items()),
        {key: each.iterations for key, each in found.items() if each.iterations},
        provenance()["hardware"],
        {key: each.checkpoints for key, each in found.items() if each.checkpoints},
        {sha256: asdict(score) for sha256, (score, _) in scores.items() if score},
    )


@dataclass(frozen=True)
class _Outcome:
    """Result of the check of one run.

    Attributes:
        problem: Reason why the run would fail; empty if it would not.
        iterations: Length of the run; 0 if unknown.
        checkpoints: Checkpoints that the run writes; None if unknown.
        notes: Facts that a reader of the numbers should know.
        title: Name of the task in tables.
        task: Resolved task of a detection run; None if it is not known.
    """

    problem: str = ""
    iterations: int = 0
    checkpoints: Checkpoints | None = None
    notes: tuple[str, ...] = ()
    title: str = ""
    task: "Task | None" = None


def _decoded(
    outcome: _Outcome, known: dict[tuple[tuple[str, str], ...], tuple[str, str]], end: float
) -> _Outcome:
    """Decode the images of a run, and add a damaged image to the outcome as its problem.

    Otherwise the run would end at that image, or in the evaluation, after the training.

    Args:
        outcome: Outcome of the run.
        known: `Task.data` → problem and note; extended, as runs share their data.
        end: When images are no longer decoded, by `time.monotonic`.
    """
    from detection.datasets.doctor import command, decode_within

    if (task := outcome.task) is None:
        return outcome
    if task.data not in known:
        doctor = command(task.cfg)
        hint = f"; to check all of it: {doctor}" if doctor else ""
        try:
            note = decode_within((*task.train, task.test), end - time.monotonic())
            known[task.data] = "", f"{note}{hint}" if note else ""
        except DataError as error:
            known[task.data] = f"{error}{hint}", ""
    problem, note = known[task.data]
    notes = (*outcome.notes, note) if note else outcome.notes
    return replace(outcome, problem=problem, notes=notes)


def _scored(outcome: _Outcome, known: "dict[str, tuple[Reachable | None, str]]") -> _Outcome:
    """Score perfect predictions on the test split, and note why the score is below 100.

    Args:
        outcome: Outcome of the run; the result is without the task, and thereby without the data.
        known: `metric_sha256` → score (None if not computed) and note; extended.
    """
    from detection.config.task import resolved_config
    from detection.evaluation.metrics import metric_sha256
    from detection.evaluation.reachable import score_of_perfect

    if (task := outcome.task) is None or outcome.problem:
        return replace(outcome, task=None)
    sha256 = metric_sha256(task.data[-1], resolved_config(task))
    problem = ""
    if sha256 not in known:
        try:
            score, line = score_of_perfect(task.test, task.cfg)
            known[sha256] = score, "" if score and not score.faults else line
        except (DataError, UserError) as error:
            problem = str(error)
    _, note = known.get(sha256, (None, ""))
    notes = (*outcome.notes, note) if note else outcome.notes
    return replace(outcome, problem=problem, notes=notes, task=None)


def _outcome(spec: RunSpec) -> _Outcome:
    try:
        return (_check_detection if spec.program in _DETECTION else _check_moco)(spec)
    except UserError as error:
        problem = str(error)
    except Exception as error:  # the run would raise it, too
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    known = _Outcome()
    if spec.program in _DETECTION:
        try:
            known = _without_data(spec)
        except UserError as error:  # the keys or the weights are wrong, perhaps besides the data
            problem = str(error)
        except Exception:  # the same again
            pass
    return replace(known, problem=problem)


def command_keys(spec: RunSpec) -> list[str]:
    """Return the overrides of a run as `KEY VALUE` arguments, with the folder of datasets."""
    return [part for key, text in spec.overrides for part in (key, with_datasets_folder(text))]


def with_datasets_folder(text: str) -> str:
    """Replace `$DETECTRON2_DATASETS` in a value by the folder of datasets."""
    root = os.path.expanduser(os.environ.get(DATASETS_VARIABLE, "datasets"))
    return text.replace(f"${DATASETS_VARIABLE}", root)


def option_pairs(
    suite_tasks: Sequence[SuiteTask], arguments: Sequence[str], where: str = "--opts"
) -> dict[str, list[tuple[str, str]]]:
    """Split `--opts KEY VALUE ...` by program: each key goes to the programs that have it.

    Args:
        suite_tasks: Tasks of the suite.
        arguments: `KEY VALUE` or `KEY=VALUE` words.
        where: Name of the arguments in messages.

    Raises:
        UserError: If a key has no value, or no program of the suite has the key.
    """
    opts = split_assignments(arguments)
    if len(opts) % 2:
        raise UserError(f"{where}: {opts[-1]!r} has no value; overrides are KEY VALUE pairs")
    known = {task.program: _known_keys(task.program) for task in suite_tasks}
    pairs: dict[str, list[tuple[str, str]]] = {program: [] for program in known}
    for key, value in zip(opts[::2], opts[1::2], strict=True):
        refuse_per_run(where, key)
        takers = [program for program, knows in known.items() if knows(key)]
        if not takers:
            raise UserError(
                f"{where}: got the unknown key {key}; none of the suite's programs "
                f"({', '.join(known)}) has it"
            )
        for program in takers:
            pairs[program].append((key, value))
    return pairs


def _known_keys(program: str) -> Callable[[str], bool]:
    if program == DETECTION:
        return lambda key: key in KEYS or "DENSEPOSE" in key
    return CLASSIFICATION.__contains__


def _protocol(program: str) -> Any:
    from moco import finetune, linear

    return linear.LINEAR if program == LINEAR else finetune.FINETUNE


def _check_detection(spec: RunSpec) -> _Outcome:
    from detection.config.task import load_task
    from detection.datasets.base import TUNE
    from detection.engine.job import Processes, check_processes
    from detection.train_net import choose_engine

    choose_engine(spec.engine)  # an installed Detectron2 may fail to import
    processes = max(spec.gpus, 1)
    # OUTPUT_DIR keeps its default: only messages name it, and nothing is written.
    task = load_task(str(spec.config), _options(spec), spec.engine, num_processes=processes)
    check_processes(task.cfg, Processes(processes))
    origin = task.weights.origin if task.weights else ()  # differs from row to row
    notes = [note for note in (*task.notes, *task.warnings) if note not in origin]
    # No table has the points of a grid, which share their task's name.
    point = spec.task if task.cfg.DATASETS.PART == TUNE else ""
    title = f"{task.name}{point} on {task.test.name}"
    return replace(
        _length(task.cfg, spec.engine),
        notes=tuple(notes),
        title=title,
        task=task,
    )


def _without_data(spec: RunSpec) -> _Outcome:
    """Determine the length of a detection run without reading the data.

    Checkpoints on a custom dataset stay unknown, as their size depends on the classes.
    """
    from detection.config.task import resolve_without_data
    from detection.datasets import custom_keys

    cfg = resolve_without_data(str(spec.config), _options(spec), spec.engine, max(spec.gpus, 1))
    known = _length(cfg, spec.engine)
    return replace(known, checkpoints=None) if custom_keys(cfg.DATASETS) else known


def _options(spec: RunSpec) -> list[str]:
    return [*command_keys(spec), "MODEL.WEIGHTS", spec.weights, "SEED", str(spec.seed)]


def _length(cfg: "CfgNode", engine: str) -> _Outcome:
    """Return the iterations and checkpoints of a configuration.

    A checkpoint holds the network and a momentum for every trained parameter.
    """
    from convert.modeling.reference import on_meta_device
    from detection.config.engines import find_engine

    iterations = int(cfg.SOLVER.MAX_ITER)
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "meta"  # the size needs only the shapes
    with on_meta_device():
        size = _saved_bytes(find_engine(engine).build_model(cfg))
    number = 1 + iterations // cfg.SOLVER.CHECKPOINT_PERIOD
    return _Outcome(iterations=iterations, checkpoints=Checkpoints(size, number))


def _saved_bytes(model: "nn.Module") -> int:
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return trained + sum(t.numel() * t.element_size() for t in model.state_dict().values())


def _check_moco(spec: RunSpec) -> _Outcome:
    from convert.initial_weights import read_initial_weights
    from convert.modeling.reference import on_meta_device
    from moco.classification.config import CROP_PX, load_classify_cfg, with_weights
    from moco.classification.run import build_classifier, open_labeled_sets

    protocol = _protocol(spec.program)
    cfg = load_classify_cfg(protocol.defaults, str(spec.config), command_keys(spec))
    processes = max(spec.gpus, 1)
    batch = cfg.SOLVER.BATCH_SIZE
    if batch % processes:
        raise UserError(
            f"SOLVER.BATCH_SIZE: got {batch}, expected a multiple of the {processes} processes"
        )
    init = "" if spec.weights == RANDOM else spec.init
    network = cfg.MODEL
    keys = network.ARCH, network.STEM, network.WIDTH
    weights = read_initial_weights(spec.weights, *keys, init, cfg.AUG.CROP_PX or CROP_PX)
    cfg = with_weights(cfg, weights.spec, weights.mean, weights.std, weights.config)
    weights.spec.check_image(cfg.AUG.CROP_PX, "AUG.CROP_PX")
    if not cfg.DATA.ROOT:
        raise UserError(
            "DATA.ROOT is not set; add it to the suite's overrides, or --opts DATA.ROOT and the "
            "folder with train/<class>/* and val/<class>/*"
        )
    sets = open_labeled_sets(cfg.DATA.ROOT)
    if len(sets.train) < batch:
        raise UserError(
            f"{cfg.DATA.ROOT}: {len(sets.train)} images are less than one batch of {batch}"
        )
    steps = cfg.SOLVER.MAX_EPOCHS * (len(sets.train) // batch)
    title = f"{cfg.TASK or spec.program}_{weights.spec.name}"
    with on_meta_device():  # the size needs only the shapes
        model = build_classifier(replace(weights, state=None), len(sets.classes), protocol)
    written = Checkpoints(_saved_bytes(model), min(cfg.CHECKPOINT.KEEP, cfg.SOLVER.MAX_EPOCHS))
    return _Outcome(iterations=steps, checkpoints=written, title=title)
