"""Configuration and start of an earlier run, read from its folder for --resume and --eval-only."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from detection.config.keys import KEYS
from detection.config.weights import TORCHVISION_INPUT, apply_keys
from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import RANDOM
from moco.common.errors import DataError, UserError
from moco.common.files import PathLike, read_text
from moco.common.keys import Role, names_of
from moco.common.run import RECORD_NAME, START_NAME, read_record

# Of the task's keys, those that describe how a model was trained, by the start of their names.
_TRAINING = (
    *("SOLVER.", "DATALOADER.", "SEED", "DATASETS.TRAIN", "MODEL.BACKBONE.FREEZE_AT"),
    *("INPUT.MIN_SIZE_TRAIN", "INPUT.MAX_SIZE_TRAIN", "INPUT.RANDOM_FLIP", "INPUT.CROP."),
    "INPUT.SEM_SEG_",
)
CONFIG_NAME = "config.yaml"  # Configuration of a run, next to its record and its models.


def read_run_config(folder: PathLike) -> dict[str, Any]:
    """Return the configuration that a folder's run was started with, by full keys; {} if none."""
    path = Path(folder) / CONFIG_NAME
    return flatten(read_yaml(path)) if path.is_file() else {}


def read_start(folder: PathLike) -> dict[str, Any] | None:
    """Return the contents of a run's `start.json`; None without one.

    `weights_sha256` is that of the file that MODEL.WEIGHTS named, None for random weights;
    `detection.engine.start.write_start` writes the rest.
    """
    path = Path(folder) / START_NAME
    return json.loads(read_text(path)) if path.is_file() else None


def check_resumed_weights(cfg: CfgNode, sha256: str | None) -> None:
    """Check that a resumed run was started from the same weights; the file may have moved.

    Args:
        cfg: Configuration.
        sha256: SHA-256 of the file that MODEL.WEIGHTS names; None for random weights.

    Raises:
        UserError: If the run was started from other weights.
    """
    before, now = read_run_config(cfg.OUTPUT_DIR).get("MODEL.WEIGHTS"), cfg.MODEL.WEIGHTS
    start = read_start(cfg.OUTPUT_DIR) or {}
    # Plain Detectron2 writes no hash; then the paths are compared.
    known, same = "weights_sha256" in start, start.get("weights_sha256") == sha256
    if before is None or (same if known else before == now):
        return

    def named(weights: str, digest: str | None) -> str:
        return f"{weights} (sha256 {digest[:10]})" if digest else weights

    started_from = named(before, start.get("weights_sha256"))
    raise UserError(
        f"--resume: {cfg.OUTPUT_DIR} was started from {started_from}, but MODEL.WEIGHTS is "
        f"{named(now, sha256)}; give the same weights, or start from scratch in another folder"
    )


def trained_config(opts: Sequence[str], *, resume: bool) -> Path:
    """Return the config.yaml next to the model of `--eval-only`, which holds the whole task.

    Args:
        opts: `KEY VALUE` overrides.
        resume: Whether the model is the last one in OUTPUT_DIR instead of MODEL.WEIGHTS.

    Raises:
        UserError: If the file does not exist.
    """
    overrides = dict(zip(opts[::2], opts[1::2], strict=False))
    key = "OUTPUT_DIR" if resume else "MODEL.WEIGHTS"
    folder = Path(overrides.get(key, ""))
    folder = folder if resume else folder.parent
    if key not in overrides or not (folder / CONFIG_NAME).is_file():
        raise UserError(
            f"--eval-only without --config-file takes the {CONFIG_NAME} next to the model, but "
            f"{key} is {overrides.get(key, 'not set')!r} and there is none; give --config-file, "
            f"e.g. the {CONFIG_NAME} of the run that trained it"
        )
    return folder / CONFIG_NAME


def trained_file(cfg: CfgNode, *, resume: bool) -> Path:
    """Return the trained model of MODEL.WEIGHTS or, with `resume`, of OUTPUT_DIR's last_checkpoint.

    Raises:
        UserError: If MODEL.WEIGHTS names no trained model.
        DataError: If a file is missing.
    """
    path = Path(cfg.MODEL.WEIGHTS)
    if resume:
        pointer = Path(cfg.OUTPUT_DIR) / "last_checkpoint"
        if not pointer.is_file():
            raise DataError(f"{pointer} is missing, so there is no last checkpoint to evaluate")
        path = pointer.parent / Path(read_text(pointer).strip()).name
    elif cfg.MODEL.WEIGHTS in ("", RANDOM):
        raise UserError(
            f"MODEL.WEIGHTS is {cfg.MODEL.WEIGHTS!r}; --eval-only needs a trained model such as "
            "OUTPUT_DIR/model_final.pth, or --resume for the folder's last one"
        )
    if not path.is_file():
        raise DataError(f"MODEL.WEIGHTS {path}: no such file; expected a trained model")
    return path


def apply_trained_config(cfg: CfgNode, explicit: Collection[str]) -> None:
    """Set the model's keys in place, from the config.yaml next to MODEL.WEIGHTS.

    Args:
        cfg: Configuration.
        explicit: Keys that were set; they have to agree with the file.

    Raises:
        UserError: If a key that was set contradicts the file, or the pixel normalization of the
            model is unknown.
    """
    trained = read_run_config(Path(cfg.MODEL.WEIGHTS).parent)
    unknown = [key for key in TORCHVISION_INPUT if key not in trained and key not in explicit]
    if unknown:
        raise UserError(
            f"{', '.join(unknown)}: unknown for {cfg.MODEL.WEIGHTS}, because no {CONFIG_NAME} is "
            "next to it; use --config-file with the one of the run that trained it, or set the keys"
        )
    model = [name for name, key in KEYS.items() if key.model or key.role is Role.WEIGHTS]
    needed = {name: trained[name] for name in model if name in trained}
    apply_keys(cfg, needed, explicit, f"the model {cfg.MODEL.WEIGHTS}")
    # Detectron2's keys differ between its versions.
    known = flatten(cfg).keys() & trained.keys()
    for name in known.intersection(names_of(KEYS, Role.PROTOCOL, Role.RUN)):
        if name.startswith(_TRAINING):
            cfg.merge_from_list([name, trained[name]])


def training_data(model: Path) -> list[tuple[str, str]] | None:
    """Return (name, annotations_sha256) of a model's training splits; None without a record."""
    record = model.with_name(RECORD_NAME)
    if record.is_file():
        data = read_record(record).provenance.get("data")
        if isinstance(data, list) and all(isinstance(x, list) and len(x) == 2 for x in data):
            return [(str(name), str(sha256)) for name, sha256 in data[:-1]]
    return None
