"""Every key of a pre-training run, with its unit and range, and the checks across keys.

The defaults are the paper's: ResNet-50, 200 epochs of batch 256, K = 65536, augmentation v1.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fvcore.common.config import CfgNode

from moco.cfgnode import load_cfg
from moco.errors import UserError
from moco.fileio import PathLike

if TYPE_CHECKING:
    import torch

AUG_KINDS = ("v1", "v2")
# Keys under AUG in which MoCo v2 (arXiv 2003.04297; main_moco.py --aug-plus) differs from v1.
AUG_V2: dict[str, Any] = {
    "KIND": "v2",
    "JITTER_PROB": 0.8,
    "HUE": 0.1,
    "BLUR_PROB": 0.5,
}
# Keys that name a place or a speed and leave the weights as they are, up to rounding on another
# device. A resumed run may change them; the hash of the protocol leaves them out.
PLACES_AND_SPEED = (
    "OUTPUT_DIR",
    "DEVICE",
    "NUM_THREADS",
    "DATA.ROOT",
    "DATA.NUM_WORKERS",
    "DATA.CACHE_MIB",
    "DATA.KNN_ROOT",
    "SOLVER.STOP_AT_ITERS",
    "CHECKPOINT",
    "KNN",
    "LOG",
)


def default_cfg(aug: str = "v1") -> CfgNode:
    """All keys with their defaults; those under AUG are the paper's (v1) or MoCo v2's (v2)."""
    cfg = CfgNode()
    # Folder of the run: checkpoints, metrics.json, run.json.
    cfg.OUTPUT_DIR = "output/pretrain"
    # Any integer >= 0; determines initial weights, queue, order, augmentation and BN shuffle.
    cfg.SEED = 0
    # auto (a GPU where there is one), cpu, cuda or cuda:N.
    cfg.DEVICE = "auto"
    # CPU threads of the training process, >= 1; 0 leaves torch's choice.
    cfg.NUM_THREADS = 0

    cfg.DATA = CfgNode()
    # A folder of pictures (nested or flat; its train/ is used where it has one) or a .txt file
    # with one path per line, relative to the file.
    cfg.DATA.ROOT = ""
    # Processes that read pictures; 0 reads in the training process. Results do not depend on it.
    cfg.DATA.NUM_WORKERS = 4
    # What to do with a picture that cannot be decoded: fail (naming it) or skip (another one of
    # the data set takes its place).
    cfg.DATA.BAD_IMAGES = "fail"
    # With skip: share of the data set that may be bad, 0..1; beyond it the run stops.
    cfg.DATA.MAX_BAD_FRACTION = 0.001
    # Memory for decoded pictures, MiB in all; 0 decodes anew each epoch. Pays for small pictures.
    cfg.DATA.CACHE_MIB = 0
    # Folder with train/<class>/* and val/<class>/* for the kNN monitor; "" turns it off.
    cfg.DATA.KNN_ROOT = ""

    cfg.AUG = CfgNode()
    # v1: grey, then jitter (the paper, sec. 3.3). v2: jitter, then grey, then blur (MoCo v2).
    # The keys below take that kind's values unless they are set.
    cfg.AUG.KIND = "v1"
    # Side of the square crop in pixels after resizing, a multiple of 1, >= 8.
    cfg.AUG.CROP_PX = 224
    # Range of the crop's share of the picture's area, 0..1.
    cfg.AUG.CROP_SCALE = (0.2, 1.0)
    # Range of the crop's width / height, > 0.
    cfg.AUG.CROP_RATIO = (3 / 4, 4 / 3)
    # Probability of flipping left and right, 0..1.
    cfg.AUG.FLIP_PROB = 0.5
    # Probability of applying the four jitters (together), 0..1.
    cfg.AUG.JITTER_PROB = 1.0
    # Factors are drawn from 1 ± these, >= 0; hue is shifted by up to this part of the circle,
    # 0..0.5. The four are applied in random order.
    cfg.AUG.BRIGHTNESS = 0.4
    cfg.AUG.CONTRAST = 0.4
    cfg.AUG.SATURATION = 0.4
    cfg.AUG.HUE = 0.4
    # Probability of turning the picture grey, 0..1.
    cfg.AUG.GRAY_PROB = 0.2
    # Probability of a Gaussian blur, 0..1, and the range of its sigma in pixels.
    cfg.AUG.BLUR_PROB = 0.0
    cfg.AUG.BLUR_SIGMA_PX = (0.1, 2.0)
    # Per RGB channel, of pixels scaled to 0..1. Written into the checkpoint for the converter.
    cfg.AUG.MEAN = (0.485, 0.456, 0.406)
    cfg.AUG.STD = (0.229, 0.224, 0.225)
    if aug == "v2":
        cfg.AUG.update(AUG_V2)

    cfg.MODEL = CfgNode()
    # resnet10 (one basic block per stage), resnet18, resnet34 or resnet50.
    cfg.MODEL.ARCH = "resnet50"
    # imagenet: 7x7 stride 2 + max-pool. stride2: 3x3 stride 2. cifar: 3x3 stride 1.
    cfg.MODEL.STEM = "imagenet"
    # Multiplies all channel counts; 64 * WIDTH must be a whole number >= 8.
    cfg.MODEL.WIDTH = 1.0

    cfg.MOCO = CfgNode()
    # Dimension C of queries and keys.
    cfg.MOCO.DIM = 128
    # Queue length K >= SOLVER.BATCH_SIZE; a batch need not divide it.
    cfg.MOCO.K = 65536
    # Momentum m of the key encoder, 0 <= m < 1 (eq. 2).
    cfg.MOCO.M = 0.999
    # Temperature, > 0 (eq. 1).
    cfg.MOCO.T = 0.07
    # A two-layer head instead of a linear one (MoCo v2).
    cfg.MOCO.MLP = False
    # Batch normalisation sees the batch in this many groups, as the paper's 8 GPUs do; divides
    # the batch. 1 is ordinary BN, with which the model cheats (sec. 3.3).
    cfg.MOCO.BN_SPLITS = 8
    # Shuffle the keys between the groups (sec. 3.3, Shuffling BN).
    cfg.MOCO.SHUFFLE_BN = True

    cfg.SOLVER = CfgNode()
    # N, pictures per step.
    cfg.SOLVER.BATCH_SIZE = 256
    # SGD (sec. 4, Training). The learning rate belongs to the batch size: 0.03 for 256.
    cfg.SOLVER.BASE_LR = 0.03
    cfg.SOLVER.MOMENTUM = 0.9
    cfg.SOLVER.WEIGHT_DECAY = 1e-4
    # Length of the run: MAX_EPOCHS passes over the data, unless MAX_ITERS > 0 gives it in steps.
    cfg.SOLVER.MAX_EPOCHS = 200
    cfg.SOLVER.MAX_ITERS = 0
    # step: times GAMMA at each milestone. cosine: half a cosine from BASE_LR to 0.
    cfg.SOLVER.SCHEDULE = "step"
    cfg.SOLVER.MILESTONES_EPOCHS = (120, 160)
    cfg.SOLVER.GAMMA = 0.1
    # How often the learning rate changes: epoch (as the official code) or iter.
    cfg.SOLVER.LR_UPDATE = "epoch"
    # Linear rise of the learning rate over the first steps, >= 0.
    cfg.SOLVER.WARMUP_ITERS = 0
    # fp32, or bf16 (autocast: convolutions and matrix products in bf16, weights in fp32).
    cfg.SOLVER.PRECISION = "fp32"
    # Keep pictures and activations as (N, H, W, C) in memory: the same values, another speed.
    cfg.SOLVER.CHANNELS_LAST = False
    # Save and leave with exit code 85 when this step is done, as if preempted; 0 = never.
    cfg.SOLVER.STOP_AT_ITERS = 0

    cfg.CHECKPOINT = CfgNode()
    # Save after every this many epochs, >= 1, and additionally every this many steps (0 = not).
    cfg.CHECKPOINT.EVERY_EPOCHS = 1
    cfg.CHECKPOINT.EVERY_ITERS = 0
    # Newest checkpoints to keep, >= 2.
    cfg.CHECKPOINT.KEEP = 2
    # Checkpoints at multiples of this many epochs are kept for ever; 0 = none.
    cfg.CHECKPOINT.MILESTONE_EPOCHS = 0

    cfg.KNN = CfgNode()
    # Classify DATA.KNN_ROOT every this many epochs; 0 = only at the end.
    cfg.KNN.EVERY_EPOCHS = 0
    # Neighbours and temperature of their votes (InstDisc, arXiv 1805.01978, sec. 3.4).
    cfg.KNN.K = 200
    cfg.KNN.T = 0.1
    # The shorter side is resized to RESIZE_PX and the centre CROP_PX x CROP_PX is taken. 0 means
    # AUG.CROP_PX for the crop, and 256/224 of the crop for the resizing.
    cfg.KNN.RESIZE_PX = 0
    cfg.KNN.CROP_PX = 0

    cfg.LOG = CfgNode()
    # One line in metrics.json every this many steps, >= 1: means over those steps.
    cfg.LOG.EVERY_ITERS = 20
    # The same numbers as event files, where tensorboard is installed.
    cfg.LOG.TENSORBOARD = True
    return cfg


def load_pretrain_cfg(config_file: PathLike | None, opts: Sequence[str]) -> CfgNode:
    """Defaults, then the YAML file, then ``KEY VALUE`` pairs; checked and frozen.

    Raises:
        UserError: unknown key, wrong type, or keys that contradict each other.
    """
    cfg = load_cfg(default_cfg(), config_file, opts)
    _choice(cfg, "AUG.KIND", AUG_KINDS)
    if cfg.AUG.KIND != "v1":
        cfg = load_cfg(default_cfg(cfg.AUG.KIND), config_file, opts)
    check_cfg(cfg)
    return cfg


def check_cfg(cfg: CfgNode) -> None:
    """Ranges and cross-field constraints; everything that needs no data.

    Raises:
        UserError: naming the key, what it got and what it may be.
    """
    _choice(cfg, "AUG.KIND", AUG_KINDS)
    _choice(cfg, "MODEL.ARCH", ("resnet10", "resnet18", "resnet34", "resnet50"))
    _choice(cfg, "MODEL.STEM", ("imagenet", "stride2", "cifar"))
    _choice(cfg, "SOLVER.SCHEDULE", ("step", "cosine"))
    _choice(cfg, "SOLVER.LR_UPDATE", ("epoch", "iter"))
    _choice(cfg, "SOLVER.PRECISION", ("fp32", "bf16"))
    _choice(cfg, "DATA.BAD_IMAGES", ("fail", "skip"))
    for key in ("SEED", "NUM_THREADS", "DATA.NUM_WORKERS", "DATA.CACHE_MIB"):
        _range(cfg, key, low=0)
    for key in ("MAX_ITERS", "WARMUP_ITERS", "STOP_AT_ITERS", "WEIGHT_DECAY", "BASE_LR"):
        _range(cfg, f"SOLVER.{key}", low=0)
    for key in ("CHECKPOINT.EVERY_ITERS", "CHECKPOINT.MILESTONE_EPOCHS", "KNN.EVERY_EPOCHS"):
        _range(cfg, key, low=0)
    for key in ("KNN.RESIZE_PX", "KNN.CROP_PX"):
        _range(cfg, key, low=0)
    for key in ("MOCO.DIM", "SOLVER.MAX_EPOCHS", "CHECKPOINT.EVERY_EPOCHS", "LOG.EVERY_ITERS"):
        _range(cfg, key, low=1)
    for key in ("MOCO.BN_SPLITS", "KNN.K"):
        _range(cfg, key, low=1)
    _range(cfg, "SOLVER.BATCH_SIZE", low=2)
    _range(cfg, "CHECKPOINT.KEEP", low=2)
    _range(cfg, "AUG.CROP_PX", low=8)
    for key in ("FLIP_PROB", "JITTER_PROB", "GRAY_PROB", "BLUR_PROB"):
        _range(cfg, f"AUG.{key}", low=0, high=1)
    for key in ("BRIGHTNESS", "CONTRAST", "SATURATION"):
        _range(cfg, f"AUG.{key}", low=0, high=1)
    _range(cfg, "AUG.HUE", low=0, high=0.5)
    _range(cfg, "DATA.MAX_BAD_FRACTION", low=0, high=1)
    _interval(cfg, "AUG.CROP_SCALE", high=1)
    _interval(cfg, "AUG.CROP_RATIO")
    _interval(cfg, "AUG.BLUR_SIGMA_PX")
    _numbers(cfg, "AUG.MEAN", 3)
    if min(_numbers(cfg, "AUG.STD", 3)) <= 0:
        raise UserError(f"AUG.STD: got {cfg.AUG.STD}, expected 3 numbers > 0")
    for key in ("MOCO.T", "KNN.T"):
        if not _get(cfg, key) > 0:
            raise UserError(f"{key}: got {_get(cfg, key)}, expected a temperature > 0")
    if not 0 <= cfg.MOCO.M < 1:
        raise UserError(f"MOCO.M: got {cfg.MOCO.M}, expected 0 <= m < 1 (the paper: 0.999)")
    if not 0 <= cfg.SOLVER.MOMENTUM < 1:
        raise UserError(f"SOLVER.MOMENTUM: got {cfg.SOLVER.MOMENTUM}, expected 0 <= momentum < 1")
    _check_batch(cfg.SOLVER.BATCH_SIZE, cfg.MOCO.K, cfg.MOCO.BN_SPLITS)
    _check_milestones(cfg)


def pick_device(name: str) -> "torch.device":
    """``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: not a device's name, or a GPU that is not there.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise UserError(f"device: got {name!r}, choices are auto, cpu, cuda, cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device: {name} is not here (GPUs found: {torch.cuda.device_count()}); use cpu"
        )
    return torch.device(name)


def _check_batch(batch: int, queue: int, splits: int) -> None:
    if queue < batch:
        raise UserError(
            f"MOCO.K: got {queue}, expected at least SOLVER.BATCH_SIZE ({batch}): "
            "the queue holds whole batches"
        )
    if batch % splits:
        near = max(d for d in range(1, splits + 1) if batch % d == 0)
        raise UserError(
            f"MOCO.BN_SPLITS: {splits} does not divide SOLVER.BATCH_SIZE {batch}; "
            f"the next smaller divisor is {near}"
        )
    if batch // splits < 2:
        raise UserError(
            f"MOCO.BN_SPLITS: {splits} groups of a batch of {batch} leave {batch // splits} "
            f"picture each; batch normalisation needs at least 2, so at most {batch // 2}"
        )


def _check_milestones(cfg: CfgNode) -> None:
    milestones = tuple(cfg.SOLVER.MILESTONES_EPOCHS)
    if cfg.SOLVER.SCHEDULE != "step":
        return
    if list(milestones) != sorted(set(milestones)) or any(
        isinstance(m, bool) or not isinstance(m, int) or m < 1 for m in milestones
    ):
        raise UserError(
            f"SOLVER.MILESTONES_EPOCHS: got {milestones}, expected rising whole numbers >= 1"
        )
    if cfg.SOLVER.MAX_ITERS == 0 and milestones and milestones[-1] >= cfg.SOLVER.MAX_EPOCHS:
        raise UserError(
            f"SOLVER.MILESTONES_EPOCHS: {milestones[-1]} is never reached in "
            f"SOLVER.MAX_EPOCHS {cfg.SOLVER.MAX_EPOCHS}; "
            "lower it, set () for none, or set SOLVER.SCHEDULE cosine"
        )


def _get(cfg: CfgNode, key: str) -> Any:
    value: Any = cfg
    for part in key.split("."):
        value = value[part]
    return value


def _choice(cfg: CfgNode, key: str, choices: Sequence[str]) -> None:
    if _get(cfg, key) not in choices:
        raise UserError(f"{key}: got {_get(cfg, key)!r}, choices are {', '.join(choices)}")


def _range(cfg: CfgNode, key: str, low: float, high: float | None = None) -> None:
    value = _get(cfg, key)
    if not (value >= low and (high is None or value <= high)):
        expected = f">= {low}" if high is None else f"{low} to {high}"
        raise UserError(f"{key}: got {value}, expected {expected}")


def _numbers(cfg: CfgNode, key: str, count: int) -> list[float]:
    value = list(_get(cfg, key))
    if len(value) != count or not all(isinstance(v, int | float) for v in value):
        raise UserError(f"{key}: got {tuple(value)}, expected {count} numbers")
    return value


def _interval(cfg: CfgNode, key: str, high: float | None = None) -> None:
    a, b = _numbers(cfg, key, 2)
    if not 0 < a <= b or (high is not None and b > high):
        below = "" if high is None else f" <= {high}"
        raise UserError(f"{key}: got ({a}, {b}), expected (low, high) with 0 < low <= high{below}")
