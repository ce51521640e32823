"""Run of a task in its folder: its description, its record, and the summary at the end."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from convert.families.base import DEFAULT_FAMILY
from detection.config.checks import highest_learning_rate
from detection.config.keys import protocol_sha256
from detection.config.task import Task, resolved_config
from detection.config.trained import CONFIG_NAME, read_start
from detection.config.weights import weights_sha256
from detection.datasets.doctor import command as doctor_command
from detection.engine.job import Job, iterations_before
from detection.engine.start import check_frozen
from detection.evaluation.evaluators import metric_kinds, metric_package
from detection.evaluation.metrics import (
    CORRUPTED,
    ERRORS_NAME,
    ROBUSTNESS_NAME,
    for_record,
    headline,
)
from detection.modeling.backbones import backbone_type
from moco.common.command import program, quote
from moco.common.errors import NumericError, Preempted, echo, plural, printable
from moco.common.files import atomic_write_json, atomic_write_text, open_file, sha256_file
from moco.common.run import START_NAME, RunFolder, RunRecord, provenance, write_record
from moco.engine.checkpoint import OF_DETECTRON2, delete_checkpoints


def describe(task: Task, scored: str = "") -> str:
    """Format the description of a task as lines.

    Args:
        task: Task.
        scored: Line of `score_of_perfect`; "" leaves it out.
    """
    data = [f"{split.name} ({plural(len(split.records), 'image')})" for split in task.train]
    classes = task.test.classes
    shown = ", ".join(classes if len(classes) <= 21 else (*classes[:8], "..."))
    number = len(task.recipe.deviations)
    listed = f", {plural(number, 'deviation')}:" if number else ""
    lines = [
        f"task: {task.name}, init {task.init}, seed {task.cfg.SEED}, on {task.cfg.MODEL.DEVICE}",
        f"data: {' + '.join(data) or 'no training'}, tested on {task.test.name} "
        f"({plural(len(task.test.records), 'image')}), {plural(len(classes), 'class')}: {shown}",
        *([f"to check every image: {doctor}"] if (doctor := doctor_command(task.cfg)) else []),
        *_weights_and_schedule(task),
        *_evaluation(task),
        *filter(None, [scored]),
        *(f"note: {note}" for note in (*task.notes, *task.warnings)),
        f"recipe: {task.recipe.label}{listed}",
        *(f"  {deviation}" for deviation in task.recipe.deviations),
    ]
    return "\n".join(map(printable, lines))


def _evaluation(task: Task) -> list[str]:
    """Return a line with the package that computes the metric, and a faster one."""
    name = metric_package(task.test, task.cfg)
    advice = ""
    if name == "pycocotools":
        advice = "; pip install 'moco-transfer[metrics]' for equal numbers in less time"
    return [f"metric: {task.test.evaluator_type}, by {name}{advice}"] if name else []


def _weights_and_schedule(task: Task) -> list[str]:
    """Return lines on initial weights and schedule; none for an evaluation."""
    if not task.train:
        return []
    cfg, solver = task.cfg, task.cfg.SOLVER
    source = task.weights.contract.source if task.weights else "random initialization"
    mean, std = ([round(x, 3) for x in cfg.MODEL[f"PIXEL_{key}"]] for key in ("MEAN", "STD"))
    if backbone_type(cfg.MODEL.BACKBONE.NAME).family == DEFAULT_FAMILY:
        details = f", stride in the {'1x1' if cfg.MODEL.RESNETS.STRIDE_IN_1X1 else '3x3'} conv"
    else:
        details = f", {task.weights.contract.architecture.details()}" if task.weights else ""
    by_steps = solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR"
    steps = ", ".join(map(str, solver.STEPS)) if by_steps else ""
    return [
        f"weights: {source}; {cfg.INPUT.FORMAT}, mean {mean}, std {std}{details}",
        f"schedule: {solver.MAX_ITER} iterations of {solver.IMS_PER_BATCH} images, learning rate "
        f"up to {highest_learning_rate(solver):g} after a warm-up of {solver.WARMUP_ITERS}"
        + (f", times {solver.GAMMA:g} at {steps}" if steps else ""),
    ]


def run_in_folder(task: Task, job: Job, description: str, *, overwrite: bool) -> None:
    """Run a task on the main process: lock OUTPUT_DIR, run, write the record last.

    Args:
        task: Task to run.
        job: Job of the task, which the engine runs.
        description: Text for log.txt, from `describe`.
        overwrite: Whether to start from scratch in a folder that is not empty.

    Raises:
        Exception: Any error of the engine; a failed run has a record, a preempted one has none.
    """
    # An evaluation does not change the run of its model.
    keep = job.resume or job.eval_only
    with RunFolder(task.cfg.OUTPUT_DIR, resume=keep, overwrite=overwrite) as folder:
        results = folder.path / "inference" if job.eval_only else folder.path
        if overwrite:
            # Otherwise --resume could continue the overwritten run, and a table could take its
            # results for those of the new one.
            delete_checkpoints(folder.path, OF_DETECTRON2)
            for name in ("log.txt", ERRORS_NAME, ROBUSTNESS_NAME):
                (folder.path / name).unlink(missing_ok=True)
            for name in (CORRUPTED, "inference"):
                shutil.rmtree(folder.path / name, ignore_errors=True)
        if not (job.resume and (results / CONFIG_NAME).is_file()):
            # A resumed run keeps its first configuration, so that later changes stay visible. It
            # is written last: a run killed between the two writes would not know its weights.
            if not job.eval_only:
                weights = {"weights_sha256": weights_sha256(task.weights)}
                atomic_write_json(folder.path / START_NAME, weights)
            atomic_write_text(results / CONFIG_NAME, task.cfg.dump())
        with open_file(folder.path / "log.txt", "a", encoding="utf-8") as log:
            log.write(f"{description}\n")
        from detection.engine import launch, per_image  # import torchvision

        start = time.monotonic()
        try:
            result = launch.run(job)
            start_digests = None if job.eval_only else read_start(folder.path)
            check_frozen(start_digests, result.frozen)
            shutil.rmtree(folder.path / per_image.FOLDER, ignore_errors=True)
        except Preempted:
            raise  # The run is not over: --resume continues it.
        except Exception as error:
            done = 0 if job.eval_only else iterations_before(error, folder.path)
            seconds = time.monotonic() - start
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            failed = _record(
                task,
                job,
                [reason],
                status="failed",
                diverged=isinstance(error, NumericError),
                iterations=done,
                seconds=seconds,
                metrics={},
            )
            write_record(results, failed)
            raise
        metrics, notes = for_record(result.metrics, metric_kinds(task.test, task.cfg))
        record = _record(
            task,
            job,
            notes,
            status="done",
            iterations=result.iterations,
            seconds=result.seconds,
            metrics=metrics,
            coverage=asdict(result.coverage) if result.coverage else None,
            start=start_digests,
        )
        path = write_record(results, record)
    for note in notes:
        echo(f"note: {note}")
    echo(f"{task.test.name}: {headline(record.metrics)}")
    if job.eval_only:
        echo(f"wrote {path}")
        return
    files = ("run.json", "model_final.pth", "metrics.json", "log.txt", "config.yaml")
    present = [name for name in files if (path.parent / name).is_file()]
    table = f"{program('table')} {quote(path.parent)}"
    echo(f"wrote {path.parent}: {', '.join(present)}", f"next: {table}")


def _record(
    task: Task, job: Job, notes: Sequence[str], *, seconds: float, **outcome: Any
) -> RunRecord:
    """Return the record of a finished run; `notes` follow those of the task."""
    contract = task.weights.contract if task.weights else None
    config = resolved_config(task)
    facts = provenance()
    if package := metric_package(task.test, task.cfg):
        facts["versions"][package] = metadata.version(package)
    more: dict[str, Any] = {"imports": job.imports} if job.imports else {}
    if task.weights and task.weights.sha256 and task.weights.path:
        more |= {"converted_sha256": sha256_file(task.weights.path)}
    return RunRecord(
        kind="detection",
        task=task.name,
        engine=task.engine,
        init=task.init,
        weights_sha256=sha256_file(task.cfg.MODEL.WEIGHTS)
        if job.eval_only
        else weights_sha256(task.weights),
        weights_source=contract.source if contract else None,
        seed=task.cfg.SEED,
        config_sha256=protocol_sha256(config),
        config=config,
        recipe=asdict(task.recipe),
        provenance={**facts, "data": task.data, **more},
        notes=[*task.notes, *notes],
        warnings=[*task.warnings],
        seconds=round(seconds, 3),
        **outcome,
    )
