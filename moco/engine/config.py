"""The keys that every training has: pre-training, linear classification, fine-tuning."""

from collections.abc import Collection, Mapping
from typing import Any

from fvcore.common.config import CfgNode

from moco.common.cfgcheck import check_choice, check_interval, check_numbers, check_range, get
from moco.common.cfgnode import cfg_sha256, differing, flatten
from moco.common.errors import UserError
from moco.common.registry import lookup

# Keys that name a place or a speed and leave the weights as they are, up to rounding on another
# device. A resumed run may change them; the hash of the protocol leaves them out.
PLACES_AND_SPEED = (
    "OUTPUT_DIR",
    "DEVICE",
    "NUM_THREADS",
    "DIST_TIMEOUT_SECONDS",
    "DETERMINISTIC",
    "DATA.ROOT",
    "DATA.NUM_WORKERS",
    "DATA.WORKER_TIMEOUT_SECONDS",
    "DATA.CACHE_MIB",
    "SOLVER.COMPILE",
    "SOLVER.STOP_AT_ITERS",
    "CHECKPOINT",
    "LOG",
)
PRECISIONS = ("fp32", "bf16", "fp16")
LOWEST = {
    0: "SEED NUM_THREADS DATA.NUM_WORKERS DATA.CACHE_MIB SOLVER.BASE_LR SOLVER.GAMMA "
    "SOLVER.WEIGHT_DECAY SOLVER.WARMUP_ITERS SOLVER.WARMUP_EPOCHS SOLVER.REFERENCE_BATCH_SIZE "
    "SOLVER.STOP_AT_ITERS CHECKPOINT.EVERY_ITERS CHECKPOINT.MILESTONE_EPOCHS",
    1: "DIST_TIMEOUT_SECONDS DATA.WORKER_TIMEOUT_SECONDS LOG.EVERY_ITERS SOLVER.MAX_EPOCHS "
    "SOLVER.DECAY_EVERY_ITERS CHECKPOINT.EVERY_EPOCHS",
    2: "SOLVER.BATCH_SIZE CHECKPOINT.KEEP",
}
IMAGENET_MEAN = (0.485, 0.456, 0.406)  # RGB, of 0..1; main_moco.py, main_lincls.py
IMAGENET_STD = (0.229, 0.224, 0.225)


def common_cfg() -> CfgNode:
    """The common keys with their defaults; a training adds its own and changes what differs."""
    cfg = CfgNode()
    # Folder of the run: checkpoints, metrics.json, run.json.
    cfg.OUTPUT_DIR = ""
    # Any integer >= 0; determines initial weights, order, and everything that is sampled.
    cfg.SEED = 0
    # auto (a GPU where there is one), cpu, cuda or cuda:N.
    cfg.DEVICE = "auto"
    # CPU threads of the training process, >= 1; 0 leaves torch's choice.
    cfg.NUM_THREADS = 0
    # Only kernels whose results are bitwise reproducible; slower on a GPU, no difference on a CPU.
    cfg.DETERMINISTIC = False
    # With several processes: how long one waits for the others before the run is given up, >= 1.
    cfg.DIST_TIMEOUT_SECONDS = 600

    cfg.DATA = CfgNode()
    # The images: a folder, or another layout that the training takes (see its own keys).
    cfg.DATA.ROOT = ""
    # Processes that read images; 0 reads in the training process. Results do not depend on it.
    cfg.DATA.NUM_WORKERS = 4
    # A data-loader worker that delivers nothing for so long is taken to hang, >= 1.
    cfg.DATA.WORKER_TIMEOUT_SECONDS = 600
    # Memory for decoded images, MiB in all of each process of the run (torchrun's, not those that
    # read); 0 decodes each epoch again. Pays for small images.
    cfg.DATA.CACHE_MIB = 0

    cfg.AUG = CfgNode()
    # Side of the square crop in pixels after resizing, >= 8; of a ViT a multiple of its patches'.
    cfg.AUG.CROP_PX = 224
    # Range of the crop's share of the image's area, 0..1.
    cfg.AUG.CROP_SCALE = (0.2, 1.0)
    # Range of the crop's width / height, > 0.
    cfg.AUG.CROP_RATIO = (3 / 4, 4 / 3)
    # Probability of flipping left and right, 0..1.
    cfg.AUG.FLIP_PROB = 0.5
    # Per RGB channel, of pixels scaled to 0..1.
    cfg.AUG.MEAN = IMAGENET_MEAN
    cfg.AUG.STD = IMAGENET_STD

    cfg.MODEL = CfgNode()
    # resnet10 (one basic block per stage), resnet18, resnet34, resnet50, resnet101 or
    # resnext50_32x8d (the paper's RX50); vit_micro (for a CPU), vit_tiny, vit_small or vit_base,
    # with MoCo v3's 12 heads, patches of 16 px and positions for images of AUG.CROP_PX.
    cfg.MODEL.ARCH = "resnet50"
    # imagenet: 7x7 stride 2 + max-pool. stride2: 3x3 stride 2. cifar: 3x3 stride 1.
    cfg.MODEL.STEM = "imagenet"
    # Multiplies all channel counts; 64 * WIDTH must be a whole number >= 8. The paper's R50w2x and
    # R50w4x are 2 and 4.
    cfg.MODEL.WIDTH = 1.0

    cfg.SOLVER = CfgNode()
    # N, images per step, of all processes together.
    cfg.SOLVER.BATCH_SIZE = 256
    # The batch that learning rates and durations in steps are meant for; with another BATCH_SIZE N
    # rates are multiplied by N / REFERENCE_BATCH_SIZE and durations divided by it (linear scaling,
    # sec. 4.1). 0: they are used as given.
    cfg.SOLVER.REFERENCE_BATCH_SIZE = 0
    # Before any decay.
    cfg.SOLVER.BASE_LR = 0.03
    # Length of the run in passes over the data, >= 1; --extend makes a finished run longer.
    cfg.SOLVER.MAX_EPOCHS = 200
    # step: times GAMMA at each milestone. cosine: half a cosine from BASE_LR to 0. warmup_cosine:
    # one from the end of the warm-up on, at each step (MoCo v3). exponential: times GAMMA after
    # every DECAY_EVERY_ITERS steps (the paper's IG-1B: 0.9, 62500). Others can be registered in
    # moco.engine.schedule.SCHEDULES.
    cfg.SOLVER.SCHEDULE = "step"
    cfg.SOLVER.MILESTONES_EPOCHS = (120, 160)
    cfg.SOLVER.DECAY_EVERY_ITERS = 62500
    # sgd (sec. 4, Training), lars, for large batches (moco/engine/lars.py), or adamw, for vision
    # transformers. Others can be registered in moco.engine.optim.OPTIMIZERS.
    cfg.SOLVER.OPTIMIZER = "sgd"
    # Of sgd and lars, 0 <= momentum < 1.
    cfg.SOLVER.MOMENTUM = 0.9
    # Of all trained parameters, with lars not of biases and norms; >= 0.
    cfg.SOLVER.WEIGHT_DECAY = 1e-4
    # Factor of the learning rate at each milestone.
    cfg.SOLVER.GAMMA = 0.1
    # How often the learning rate changes: epoch (as the official code) or iter.
    cfg.SOLVER.LR_UPDATE = "epoch"
    # Linear rise of the learning rate over the first steps, >= 0, or over the first epochs.
    cfg.SOLVER.WARMUP_ITERS = 0
    cfg.SOLVER.WARMUP_EPOCHS = 0.0
    # fp32, or autocast (convolutions and matrix products in 16 bits, weights in fp32): bf16, or
    # fp16 with a scaled loss. auto: bf16 where the processor has instructions for it, else fp32; a
    # resumed run keeps what it began with. The run is recorded with what was chosen.
    cfg.SOLVER.PRECISION = "auto"
    # Keep images and activations as (N, H, W, C) in memory: the same values up to rounding, another
    # speed. None: where it is faster, which is on a CPU and in 16 bits.
    cfg.SOLVER.CHANNELS_LAST = None
    # torch.compile for the network: the same mathematics in fewer kernels, after minutes of
    # compilation.
    cfg.SOLVER.COMPILE = False
    # Save and leave with exit code 85 when this step is done, as if preempted; 0 = never.
    cfg.SOLVER.STOP_AT_ITERS = 0

    cfg.CHECKPOINT = CfgNode()
    # Save after every this many epochs, >= 1, and additionally every this many steps (0 = not).
    cfg.CHECKPOINT.EVERY_EPOCHS = 1
    cfg.CHECKPOINT.EVERY_ITERS = 0
    # Newest checkpoints to keep, >= 2, beside the newest one after which the loss stayed in its
    # range (moco/engine/saver.py).
    cfg.CHECKPOINT.KEEP = 2
    # Checkpoints at multiples of this many epochs are kept; 0 = none.
    cfg.CHECKPOINT.MILESTONE_EPOCHS = 0

    cfg.LOG = CfgNode()
    # One line in metrics.json every this many steps, >= 1: means over those steps.
    cfg.LOG.EVERY_ITERS = 20
    # Who gets the same numbers: tensorboard (event files in OUTPUT_DIR), wandb, mlflow. Others can
    # be registered in moco.engine.loggers.LOGGERS.
    cfg.LOG.LOGGERS = ("tensorboard",)
    return cfg


def check_common(cfg: CfgNode) -> None:
    """The common keys are in their ranges, else UserError."""
    from moco.engine.loggers import check_loggers
    from moco.engine.optim import OPTIMIZERS
    from moco.engine.schedule import SCHEDULES

    lookup(SCHEDULES, cfg.SOLVER.SCHEDULE, "SOLVER.SCHEDULE")
    lookup(OPTIMIZERS, cfg.SOLVER.OPTIMIZER, "SOLVER.OPTIMIZER")
    check_loggers(cfg.LOG.LOGGERS)
    check_choice(cfg, "SOLVER.LR_UPDATE", ("epoch", "iter"))
    check_choice(cfg, "SOLVER.PRECISION", ("auto", *PRECISIONS))
    if cfg.SOLVER.CHANNELS_LAST not in (None, True, False):
        value = cfg.SOLVER.CHANNELS_LAST
        raise UserError(f"SOLVER.CHANNELS_LAST: got {value!r}, choices are None, True, False")
    check_lowest(cfg, LOWEST)
    if cfg.SOLVER.WARMUP_ITERS and cfg.SOLVER.WARMUP_EPOCHS:
        raise UserError("SOLVER.WARMUP_ITERS, SOLVER.WARMUP_EPOCHS: set one of them, the other 0")
    check_momentum(cfg, "SOLVER.MOMENTUM")
    check_range(cfg, "AUG.FLIP_PROB", low=0, high=1)
    check_interval(cfg, "AUG.CROP_SCALE", high=1)
    check_interval(cfg, "AUG.CROP_RATIO")
    for key in ("AUG.MEAN", "AUG.STD"):
        if len(get(cfg, key)):
            check_numbers(cfg, key, 3)
    if min(cfg.AUG.STD, default=1) <= 0:
        raise UserError(f"AUG.STD: got {cfg.AUG.STD}, expected 3 numbers > 0")


def check_lowest(cfg: CfgNode, lowest: Mapping[int, str]) -> None:
    """Each of the keys of a bound is at least the bound and finite, else UserError."""
    for low, keys in lowest.items():
        for key in keys.split():
            check_range(cfg, key, low=low)


def check_momentum(cfg: CfgNode, key: str) -> None:
    """From 0 to below 1, else UserError."""
    if not 0 <= get(cfg, key) < 1:
        raise UserError(f"{key}: got {get(cfg, key)}, expected 0 <= momentum < 1")


def protocol_sha256(
    cfg: Mapping[str, Any], defaults: Mapping[str, Any], exclude: Collection[str]
) -> str:
    """Hash what two runs must have in common to be rows of one table.

    Only values that differ from the defaults count, so that a new key changes no hash.
    """
    return cfg_sha256(differing(flatten(cfg), flatten(defaults)), exclude)


def check_processes(cfg: CfgNode, world_size: int) -> None:
    """The batch can be divided among the processes, else UserError."""
    N = cfg.SOLVER.BATCH_SIZE
    if N % world_size:
        raise UserError(
            f"SOLVER.BATCH_SIZE: got {N}, expected a multiple of the {world_size} processes, "
            f"e.g. {N - N % world_size or world_size}"
        )
