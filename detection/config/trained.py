"""What a run left in its folder: for `--resume`, and of a trained model under `--eval-only`."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from convert.families.base import families
from detection.config.keys import NOT_PROTOCOL
from detection.config.weights import TORCHVISION_INPUT, apply_keys
from moco.common.cfgnode import flatten, read_yaml
from moco.common.command import RANDOM
from moco.common.errors import DataError, UserError
from moco.common.files import PathLike
from moco.common.run import RECORD_NAME, START_NAME, read_record

CONFIG_NAME = "config.yaml"  # of a run, beside its record and its models
# What a model needs beside its tensors: the keys of the input contract and the head.
_MODEL_KEYS = (
    *TORCHVISION_INPUT,
    "MODEL.RESNETS.DEPTH",
    "MODEL.RESNETS.STEM",
    "MODEL.RESNETS.STEM_OUT_CHANNELS",
    "MODEL.RESNETS.RES2_OUT_CHANNELS",
    "MODEL.RESNETS.NUM_GROUPS",
    "MODEL.RESNETS.WIDTH_PER_GROUP",
    "MODEL.ROI_HEADS.NAME",
    "DATASETS.VOC_CLASSES",
)
# Beginnings of more of them: the keys of other families.
_FAMILY_KEYS = tuple(family.section for family in families() if family.keys)
# How it was trained. Evaluation does not need these, but its record is of that protocol.
_TRAINING_KEYS = (
    "SOLVER.",
    "DATALOADER.",
    "DATASETS.TRAIN",
    "INPUT.MIN_SIZE_TRAIN",
    "INPUT.MAX_SIZE_TRAIN",
    "INPUT.RANDOM_FLIP",
    "INPUT.CROP.",
    "INPUT.SEM_SEG_",
    "MODEL.BACKBONE.FREEZE_AT",
)


def config_in(folder: PathLike) -> dict[str, Any]:
    """The keys of the configuration that a run's folder was begun with, flat; {}: it has none."""
    path = Path(folder) / CONFIG_NAME
    return flatten(read_yaml(path)) if path.is_file() else {}


def read_start(folder: PathLike) -> dict[str, Any] | None:
    """What a run started from, as its `start.json` has it; None: it has none.

    `weights_sha256` is of the file that MODEL.WEIGHTS named, None of random weights; the rest is
    from `detection.engine.start.StartFile`.
    """
    path = Path(folder) / START_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def check_resumed_weights(cfg: CfgNode, sha256: str | None) -> None:
    """Whether a run that is resumed was begun with the same MODEL.WEIGHTS, wherever they are now.

    Args:
        sha256: of the file that MODEL.WEIGHTS names; None: random.

    Raises:
        UserError: naming both.
    """
    before, now = config_in(cfg.OUTPUT_DIR).get("MODEL.WEIGHTS"), cfg.MODEL.WEIGHTS
    start = read_start(cfg.OUTPUT_DIR) or {}
    # A run of plain Detectron2 has no hash.
    known, same = "weights_sha256" in start, start.get("weights_sha256") == sha256
    if before is None or (same if known else before == now):
        return

    def named(weights: str, digest: str | None) -> str:
        return f"{weights} (sha256 {digest[:10]})" if digest else weights

    raise UserError(
        f"--resume: {cfg.OUTPUT_DIR} was begun from {named(before, start.get('weights_sha256'))}, "
        f"but MODEL.WEIGHTS is {named(now, sha256)}; give the same weights, or start from scratch "
        "in another folder"
    )


def trained_config(opts: Sequence[str], *, resume: bool) -> Path:
    """The config.yaml beside the trained model that `--eval-only` names: the whole task is in it.

    Args:
        opts: `KEY VALUE` overrides.
        resume: the model is the last one in OUTPUT_DIR, not MODEL.WEIGHTS.

    Raises:
        UserError: there is none.
    """
    given = dict(zip(opts[::2], opts[1::2], strict=False))
    key = "OUTPUT_DIR" if resume else "MODEL.WEIGHTS"
    folder = Path(given.get(key, ""))
    folder = folder if resume else folder.parent
    if key not in given or not (folder / CONFIG_NAME).is_file():
        raise UserError(
            f"--eval-only without --config-file takes the {CONFIG_NAME} beside the model, but "
            f"{key} is {given.get(key, 'not set')!r} and there is none; give --config-file, e.g. "
            f"the {CONFIG_NAME} of the run that trained it"
        )
    return folder / CONFIG_NAME


def trained_file(cfg: CfgNode, *, resume: bool) -> Path:
    """The trained model that MODEL.WEIGHTS or, with `resume`, OUTPUT_DIR's last_checkpoint names.

    Raises:
        UserError: MODEL.WEIGHTS names none; DataError: a file is missing.
    """
    path = Path(cfg.MODEL.WEIGHTS)
    if resume:
        pointer = Path(cfg.OUTPUT_DIR) / "last_checkpoint"
        if not pointer.is_file():
            raise DataError(f"{pointer} is missing, so there is no last checkpoint to evaluate")
        path = pointer.parent / Path(pointer.read_text(encoding="utf-8").strip()).name
    elif cfg.MODEL.WEIGHTS in ("", RANDOM):
        raise UserError(
            f"MODEL.WEIGHTS is {cfg.MODEL.WEIGHTS!r}; --eval-only needs a trained model such as "
            "OUTPUT_DIR/model_final.pth, or --resume for the folder's last one"
        )
    if not path.is_file():
        raise DataError(f"MODEL.WEIGHTS {path}: no such file; expected a trained model")
    return path


def apply_trained(cfg: CfgNode, explicit: Collection[str]) -> None:
    """Set what the config.yaml beside MODEL.WEIGHTS says about the model (in place).

    Args:
        explicit: keys that were set; they must already agree.

    Raises:
        UserError: a contradiction, or nobody says how the model's pixels were normalized.
    """
    trained = config_in(Path(cfg.MODEL.WEIGHTS).parent)
    unknown = [key for key in TORCHVISION_INPUT if key not in trained and key not in explicit]
    if unknown:
        raise UserError(
            f"{', '.join(unknown)}: not known for {cfg.MODEL.WEIGHTS}, which has no {CONFIG_NAME} "
            "beside it; use --config-file with the one of the run that trained it, or set the keys"
        )
    model = {k: v for k, v in trained.items() if k in _MODEL_KEYS or k.startswith(_FAMILY_KEYS)}
    apply_keys(cfg, model, explicit, f"the model {cfg.MODEL.WEIGHTS}")
    for key in flatten(cfg).keys() & trained.keys():
        if key == "SEED" or (key.startswith(_TRAINING_KEYS) and key not in NOT_PROTOCOL):
            cfg.merge_from_list([key, trained[key]])


def training_data(model: Path) -> list[tuple[str, str]] | None:
    """(name, annotations_sha256) of what a model was trained on, None if no record says so."""
    record = model.with_name(RECORD_NAME)
    if record.is_file():
        data = read_record(record).provenance.get("data")
        if isinstance(data, list) and all(isinstance(x, list) and len(x) == 2 for x in data):
            return [(str(name), str(sha256)) for name, sha256 in data[:-1]]
    return None
