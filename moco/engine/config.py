"""The keys that every training has: pre-training, linear classification, fine-tuning."""

from fvcore.common.config import CfgNode

from moco.common.cfgcheck import check_choice, check_range
from moco.common.errors import UserError

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


def common_cfg() -> CfgNode:
    """The common keys with their defaults; a training adds its own and changes what differs."""
    cfg = CfgNode()
    # Folder of the run: checkpoints, metrics.json, run.json.
    cfg.OUTPUT_DIR = ""
    # Any integer >= 0; determines initial weights, order, and everything that is drawn.
    cfg.SEED = 0
    # auto (a GPU where there is one), cpu, cuda or cuda:N.
    cfg.DEVICE = "auto"
    # CPU threads of the training process, >= 1; 0 leaves torch's choice.
    cfg.NUM_THREADS = 0
    # Only kernels that give the same bits each time; slower on a GPU, no difference on a CPU.
    cfg.DETERMINISTIC = False
    # With several processes: how long one waits for the others before the run is given up, >= 1.
    cfg.DIST_TIMEOUT_SECONDS = 600

    cfg.DATA = CfgNode()
    # Where the images are; what may stand here, each training says.
    cfg.DATA.ROOT = ""
    # Processes that read images; 0 reads in the training process. Results do not depend on it.
    cfg.DATA.NUM_WORKERS = 4
    # A data-loader worker that delivers nothing for so long is taken to hang, >= 1.
    cfg.DATA.WORKER_TIMEOUT_SECONDS = 600
    # Memory for decoded images, MiB in all of each process of the run (torchrun's, not those that
    # read); 0 decodes anew each epoch. Pays for small images.
    cfg.DATA.CACHE_MIB = 0

    cfg.SOLVER = CfgNode()
    # N, images per step, of all processes together.
    cfg.SOLVER.BATCH_SIZE = 256
    # The batch that learning rates and durations in steps are meant for; with another BATCH_SIZE N
    # rates are multiplied by N / REFERENCE_BATCH_SIZE and durations divided by it (linear scaling,
    # sec. 4.1). 0: they are used as given.
    cfg.SOLVER.REFERENCE_BATCH_SIZE = 0
    # SGD (sec. 4, Training).
    cfg.SOLVER.MOMENTUM = 0.9
    cfg.SOLVER.WEIGHT_DECAY = 1e-4
    # Factor of the learning rate at each milestone.
    cfg.SOLVER.GAMMA = 0.1
    # How often the learning rate changes: epoch (as the official code) or iter.
    cfg.SOLVER.LR_UPDATE = "epoch"
    # Linear rise of the learning rate over the first steps, >= 0.
    cfg.SOLVER.WARMUP_ITERS = 0
    # fp32, or autocast (convolutions and matrix products in 16 bits, weights in fp32): bf16, or
    # fp16 with a scaled loss.
    cfg.SOLVER.PRECISION = "fp32"
    # Keep images and activations as (N, H, W, C) in memory: the same values, another speed.
    cfg.SOLVER.CHANNELS_LAST = False
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
    # Checkpoints at multiples of this many epochs are kept for ever; 0 = none.
    cfg.CHECKPOINT.MILESTONE_EPOCHS = 0

    cfg.LOG = CfgNode()
    # One line in metrics.json every this many steps, >= 1: means over those steps.
    cfg.LOG.EVERY_ITERS = 20
    # The same numbers as event files, where tensorboard is installed.
    cfg.LOG.TENSORBOARD = True
    return cfg


def check_common(cfg: CfgNode) -> None:
    """Ranges of the common keys.

    Raises:
        UserError: naming the key, what it got and what it may be.
    """
    check_choice(cfg, "SOLVER.LR_UPDATE", ("epoch", "iter"))
    check_choice(cfg, "SOLVER.PRECISION", ("fp32", "bf16", "fp16"))
    for key in ("SEED", "NUM_THREADS", "DATA.NUM_WORKERS", "DATA.CACHE_MIB"):
        check_range(cfg, key, low=0)
    for key in ("REFERENCE_BATCH_SIZE", "WEIGHT_DECAY", "GAMMA", "WARMUP_ITERS", "STOP_AT_ITERS"):
        check_range(cfg, f"SOLVER.{key}", low=0)
    for key in ("CHECKPOINT.EVERY_ITERS", "CHECKPOINT.MILESTONE_EPOCHS"):
        check_range(cfg, key, low=0)
    for key in ("DIST_TIMEOUT_SECONDS", "DATA.WORKER_TIMEOUT_SECONDS"):
        check_range(cfg, key, low=1)
    for key in ("CHECKPOINT.EVERY_EPOCHS", "LOG.EVERY_ITERS"):
        check_range(cfg, key, low=1)
    for key in ("SOLVER.BATCH_SIZE", "CHECKPOINT.KEEP"):
        check_range(cfg, key, low=2)
    if not 0 <= cfg.SOLVER.MOMENTUM < 1:
        raise UserError(f"SOLVER.MOMENTUM: got {cfg.SOLVER.MOMENTUM}, expected 0 <= momentum < 1")
