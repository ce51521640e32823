"""Keys of the trainings of moco/: pre-training, linear classification, fine-tuning.

The defaults are the paper's pre-training except for SOLVER.PRECISION: ResNet-50, 200 epochs of
batch 256, K = 65536, augmentation v1. moco/classification/config.py overrides some.
"""

import math
from dataclasses import replace

from moco.common.keys import Key, Keys, Range, also, between, finite, interval, numbers, one_of
from moco.modeling.archs import ARCHS, STEMS, VITS

EVERY, PRETRAIN, CLASSIFICATION = "", "pretrain", "classification"
PRECISIONS = ("fp32", "bf16", "fp16")
IMAGENET_MEAN = (0.485, 0.456, 0.406)  # RGB, of 0..1; main_moco.py, main_lincls.py
IMAGENET_STD = (0.229, 0.224, 0.225)
# Key of version 0.1.0, in its checkpoints and records; now LOG.LOGGERS. Not part of the protocol.
FORMER = ("LOG.TENSORBOARD",)

_SHARE = between(0, 1)
_MEAN = numbers(3)
_STD = numbers(3, "3 numbers > 0", lambda number: number > 0)
_MOMENTUM = Range(lambda value: 0 <= value < 1, "0 <= momentum < 1")
_TEMPERATURE = Range(lambda value: 0 < value < math.inf, "a temperature > 0, finite")

KEYS = Keys([])


def _add(program: str, *rows: Key) -> None:
    KEYS.add(*(replace(row, program=program) for row in rows))


_add(
    EVERY,
    Key(
        "OUTPUT_DIR",
        "",
        "Folder of the run: checkpoints, metrics.json, run.json.",
        place=True,
        per_run=True,
    ),
    Key(
        "SEED",
        0,
        "Determines initial weights, order, and everything that is sampled.",
        finite(0),
        per_run=True,
    ),
    Key(
        "DEVICE",
        "auto",
        "auto (a GPU where there is one), cpu, cuda or cuda:N.",
        place=True,
        sampling=True,
    ),
    Key(
        "NUM_THREADS",
        0,
        "CPU threads of the training process; 0 leaves torch's choice.",
        finite(0),
        place=True,
    ),
    Key(
        "DETERMINISTIC",
        False,
        "Use only kernels whose results are bitwise reproducible; slower on a GPU, no difference "
        "on a CPU.",
        speed=True,
    ),
    Key(
        "DIST_TIMEOUT_SECONDS",
        600,
        "With several processes: how long a process waits for the others before the run fails.",
        finite(1),
        place=True,
    ),
    Key(
        "DATA.NUM_WORKERS",
        4,
        "Data-loader workers; 0 reads in the training process. Results do not depend on it.",
        finite(0),
        place=True,
        sampling=True,
    ),
    Key(
        "DATA.WORKER_TIMEOUT_SECONDS",
        600,
        "A data-loader worker that delivers nothing for this long is considered hung.",
        finite(1),
        place=True,
    ),
    Key(
        "DATA.CACHE_MIB",
        0,
        "Memory to cache decoded images, in MiB per process of the run (shared by its data-loader "
        "workers); 0 decodes them in each epoch. Useful for small images.",
        finite(0),
        place=True,
    ),
    Key(
        "AUG.CROP_SCALE", (0.2, 1.0), "Range of the crop's share of the image's area.", interval(1)
    ),
    Key("AUG.CROP_RATIO", (3 / 4, 4 / 3), "Range of the crop's width / height.", interval()),
    Key("AUG.FLIP_PROB", 0.5, "Probability of flipping left and right.", _SHARE),
    Key("SOLVER.BATCH_SIZE", 256, "N, images per step, of all processes together.", finite(2)),
    Key(
        "SOLVER.REFERENCE_BATCH_SIZE",
        0,
        "Batch size for which learning rates and durations in steps are specified; with another "
        "BATCH_SIZE N, rates are multiplied by N / REFERENCE_BATCH_SIZE and durations divided by "
        "it (linear scaling, sec. 4.1). 0: they are used as given.",
        finite(0),
    ),
    Key(
        "SOLVER.BASE_LR",
        0.03,
        "Learning rate before any decay; in classification of pre-trained weights, see "
        "SOLVER.RANDOM_LR.",
        finite(0),
    ),
    Key(
        "SOLVER.MAX_EPOCHS",
        200,
        "Length of the run in passes over the data; --extend continues a finished run.",
        finite(1),
    ),
    Key(
        "SOLVER.SCHEDULE",
        "step",
        "step: multiply by GAMMA at each milestone. cosine: half a cosine from BASE_LR to 0. "
        "warmup_cosine: half a cosine from the end of the warm-up on, at each step (MoCo v3). "
        "exponential: multiply by GAMMA after every DECAY_EVERY_ITERS steps (the paper's IG-1B: "
        "0.9, 62500). Others can be registered in moco.engine.solver.SCHEDULES.",
    ),
    Key(
        "SOLVER.MILESTONES_EPOCHS",
        (120, 160),
        "Epochs at which step decays: increasing integers below MAX_EPOCHS.",
    ),
    Key("SOLVER.DECAY_EVERY_ITERS", 62500, "Steps between the decays of exponential.", finite(1)),
    Key(
        "SOLVER.OPTIMIZER",
        "sgd",
        "sgd (sec. 4, Training), lars, for large batches (moco/engine/lars.py), or adamw, for "
        "vision transformers. Others can be registered in moco.engine.solver.OPTIMIZERS.",
    ),
    Key("SOLVER.MOMENTUM", 0.9, "Momentum of sgd and lars.", _MOMENTUM),
    Key(
        "SOLVER.WEIGHT_DECAY",
        1e-4,
        "Weight decay of all trained parameters; lars excludes biases and norms.",
        finite(0),
    ),
    Key("SOLVER.GAMMA", 0.1, "Factor of the learning rate at each milestone.", finite(0)),
    Key(
        "SOLVER.LR_UPDATE",
        "epoch",
        "How often the learning rate changes: each epoch (as the official code) or iteration.",
        one_of("epoch", "iter"),
    ),
    Key(
        "SOLVER.WARMUP_ITERS",
        0,
        "Linear warm-up of the learning rate in steps; or set WARMUP_EPOCHS.",
        finite(0),
    ),
    Key(
        "SOLVER.WARMUP_EPOCHS",
        0.0,
        "Linear warm-up of the learning rate in epochs; or set WARMUP_ITERS.",
        finite(0),
    ),
    Key(
        "SOLVER.PRECISION",
        "auto",
        "fp32, or autocast (convolutions and matrix products in 16 bits, weights in fp32): bf16, "
        "or fp16 with a scaled loss. auto: bf16 where the processor has instructions for it, else "
        "fp32; a resumed run keeps its precision. The record has the precision chosen. "
        "Classification defaults to fp32, in which published accuracies were measured.",
        one_of("auto", *PRECISIONS),
    ),
    Key(
        "SOLVER.CHANNELS_LAST",
        None,
        "Store images and activations as (N, H, W, C) in memory: the same values up to rounding, "
        "at another speed. None: if it is faster, which is on a CPU and in 16 bits.",
        one_of(None, True, False),
    ),
    Key(
        "SOLVER.COMPILE",
        False,
        "Use torch.compile for the network: the same mathematics in fewer kernels, after minutes "
        "of compilation.",
        speed=True,
    ),
    Key(
        "SOLVER.STOP_AT_ITERS",
        0,
        "Save and exit with code 85 after this step, as if preempted; 0: never.",
        finite(0),
        speed=True,
    ),
    Key(
        "CHECKPOINT.EVERY_EPOCHS", 1, "Number of epochs between checkpoints.", finite(1), speed=True
    ),
    Key(
        "CHECKPOINT.EVERY_ITERS",
        0,
        "Number of steps between additional checkpoints; 0: none.",
        finite(0),
        speed=True,
    ),
    Key(
        "CHECKPOINT.KEEP",
        2,
        "Number of newest checkpoints to keep, besides the newest one after which the loss stayed "
        "in its range (moco/engine/saver.py).",
        finite(2),
        speed=True,
    ),
    Key(
        "CHECKPOINT.MILESTONE_EPOCHS",
        0,
        "Checkpoints at multiples of this many epochs are kept; 0: none.",
        finite(0),
        speed=True,
    ),
    Key(
        "LOG.EVERY_ITERS",
        20,
        "Number of steps per line of metrics.json, which has the means over them.",
        finite(1),
        speed=True,
    ),
    Key(
        "LOG.LOGGERS",
        ("tensorboard",),
        "Loggers that receive the lines of metrics.json: tensorboard (event files in OUTPUT_DIR), "
        "wandb, mlflow. Others can be registered in moco.engine.loggers.LOGGERS.",
        place=True,
    ),
)
_add(
    PRETRAIN,
    Key(
        "DATA.ROOT",
        "",
        "A folder of images (nested or flat; its train/ is used if it has one), a .txt file "
        "with one path per line, relative to the file, tar shards (a folder of them, one, or a "
        "pattern such as shards/train-{000000..000146}.tar), or CIFAR-10's folder "
        "(cifar-10-batches-py).",
        place=True,
        data="folder",
    ),
    Key(
        "DATA.BAD_IMAGES",
        "fail",
        "Treatment of an image that cannot be decoded: fail (naming it) or skip (another image of "
        "the dataset takes its place).",
        one_of("fail", "skip"),
        resume=True,  # it affects only images that the run has not read yet
    ),
    Key(
        "DATA.MAX_BAD_FRACTION",
        0.001,
        "With skip: fraction of the dataset that may be bad; above it the run stops.",
        _SHARE,
        resume=True,
    ),
    Key(
        "DATA.KNN_ROOT",
        "",
        "Folder with train/<class>/* and val/<class>/*, or CIFAR-10's, for the kNN monitor; "
        '"" turns it off.',
        place=True,
    ),
    Key(
        "DATA.SHARD_WINDOW",
        16,
        "If DATA.ROOT is tar shards: number of shards that are shuffled together.",
        finite(1),
    ),
    Key(
        "AUG.KIND",
        "v1",
        "v1: grayscale, then color jitter (the paper, sec. 3.3). v2: color jitter, then grayscale, "
        "then blur (MoCo v2). v3: as v2, then solarization, and the two views differ (MoCo v3; its "
        "CROP_SCALE for ViTs is (0.08, 1)). The keys below default to the values of this kind.",
        one_of("v1", "v2", "v3"),
    ),
    Key(
        "AUG.CROP_PX",
        224,
        "Side of the square crop after resizing, in pixels; for a ViT a multiple of the patch.",
        finite(8),
    ),
    Key("AUG.JITTER_PROB", 1.0, "Probability of color jitter (all four together).", _SHARE),
    Key(
        "AUG.BRIGHTNESS",
        0.4,
        "Brightness factor is sampled from 1 ± this; the four jitters are in random order.",
        _SHARE,
    ),
    Key("AUG.CONTRAST", 0.4, "Contrast factor is sampled from 1 ± this.", _SHARE),
    Key("AUG.SATURATION", 0.4, "Saturation factor is sampled from 1 ± this.", _SHARE),
    Key(
        "AUG.HUE",
        0.4,
        "Hue is shifted by up to this fraction of the color circle.",
        between(0, 0.5),
    ),
    Key("AUG.GRAY_PROB", 0.2, "Probability of converting the image to grayscale.", _SHARE),
    Key("AUG.BLUR_PROB", 0.0, "Probability of a Gaussian blur.", _SHARE),
    Key("AUG.BLUR_SIGMA_PX", (0.1, 2.0), "Range of the blur's sigma in pixels.", interval()),
    Key(
        "AUG.SOLARIZE_PROB",
        0.0,
        "Probability of solarization (inverting values of at least 0.5), after the blur.",
        _SHARE,
    ),
    Key(
        "AUG.BLUR_PROB_2",
        -1.0,
        "AUG.BLUR_PROB of the second view, the key of the first pass; -1: AUG.BLUR_PROB.",
        also(-1, _SHARE),
    ),
    Key(
        "AUG.SOLARIZE_PROB_2",
        -1.0,
        "AUG.SOLARIZE_PROB of the second view, likewise; -1: AUG.SOLARIZE_PROB.",
        also(-1, _SHARE),
    ),
    Key(
        "AUG.MEAN",
        IMAGENET_MEAN,
        "Mean per RGB channel of pixels scaled to 0..1. The checkpoint records it for the "
        "converter, as well as AUG.STD.",
        _MEAN,
    ),
    Key("AUG.STD", IMAGENET_STD, "Std per RGB channel of pixels scaled to 0..1.", _STD),
    Key(
        "MODEL.ARCH",
        "resnet50",
        "Architecture. resnet10 has one basic block per stage, resnext50_32x8d is the paper's "
        "RX50; vit_micro is for a CPU, and the other ViTs have MoCo v3's 12 heads, patches of 16 "
        "px and position embeddings for images of AUG.CROP_PX.",
        one_of(*ARCHS, *VITS),
    ),
    Key(
        "MODEL.STEM",
        "imagenet",
        "imagenet: 7x7 stride 2 + max-pool. stride2: 3x3 stride 2. cifar: 3x3 stride 1.",
        one_of(*STEMS),
    ),
    Key(
        "MODEL.WIDTH",
        1.0,
        "Multiplier of all channel counts; 64 * WIDTH must be an integer >= 8. The paper's "
        "R50w2x and R50w4x are 2 and 4.",
    ),
    Key(
        "MODEL.WEIGHTS",
        "",
        "Initial weights: any file that convert/convert_to_d2.py recognizes, or a name or address "
        'of one (`moco-transfer weights --help`); "": from scratch. Head, key encoder and queue '
        "are loaded as well if the file has them in the run's shapes.",
        place=True,  # a resumed run compares the content of the file
    ),
    Key(
        "MODEL.ZERO_INIT_RESIDUAL",
        False,
        "Initialize each residual block of a ResNet as the identity (as in MoCo v3).",
    ),
    Key(
        "MODEL.FREEZE_PATCH_EMBED",
        False,
        "Keep the random patch projection of a ViT fixed, which stabilizes training (MoCo v3, "
        "sec. 4).",
    ),
    Key("MOCO.DIM", 128, "Dimension C of queries and keys.", finite(1)),
    Key(
        "MOCO.MECHANISM",
        "momentum_queue",
        "One of the paper's three mechanisms (Fig. 2): momentum_queue (MoCo), end_to_end or "
        "memory_bank; or moco_v3 (arXiv 2104.02057).",
    ),
    Key(
        "MOCO.K",
        65536,
        "Size K of the dictionary. momentum_queue: length of the queue, at least one step's keys "
        "and not necessarily a multiple of them. memory_bank: negatives per step. end_to_end and "
        "moco_v3: must be SOLVER.BATCH_SIZE.",
        finite(1),
    ),
    Key(
        "MOCO.M",
        0.999,
        "momentum_queue: momentum m of the key encoder (eq. 2). moco_v3: its initial value, which "
        "rises to 1 by half a cosine.",
        _MOMENTUM,
    ),
    Key(
        "MOCO.BANK_MOMENTUM",
        0.5,
        "memory_bank: momentum of an entry (InstDisc, arXiv 1805.01978).",
        _MOMENTUM,
    ),
    Key(
        "MOCO.SHARED_ENCODER",
        True,
        "end_to_end: the key encoder is the query encoder. False: two networks, each with its own "
        "gradient.",
    ),
    Key(
        "MOCO.LOSS",
        "info_nce",
        "info_nce (eq. 1) or, for memory_bank, nce (InstDisc's).",
        one_of("info_nce", "nce"),
    ),
    Key(
        "MOCO.SYMMETRIC",
        False,
        "Use each view once as query and once as key, and add the two losses (an option of the "
        "official CIFAR notebook, and the published moco_v3); a queue then takes 2 N keys per "
        "step. Not supported by memory_bank.",
    ),
    Key("MOCO.T", 0.07, "Temperature (eq. 1).", _TEMPERATURE),
    Key(
        "MOCO.MLP",
        False,
        "A two-layer head instead of a linear one (MoCo v2); moco_v3 has heads of its own.",
    ),
    Key(
        "MOCO.MLP_DIM",
        4096,
        "moco_v3: hidden width of the projection head and the prediction head.",
        finite(1),
    ),
    Key(
        "MOCO.BN_SPLITS",
        8,
        "Number of groups of the batch of all processes that batch normalization sees separately, "
        "as on the paper's 8 GPUs; a multiple of the number of processes that divides the batch. 1 "
        "is BN of the whole batch, synchronized between the processes: moco_v3 requires it, and "
        "the paper's mechanisms cheat with it (sec. 3.3).",
        finite(1),
    ),
    Key(
        "MOCO.SHUFFLE_BN",
        True,
        "Shuffle the keys between the groups (sec. 3.3, Shuffling BN); False is the ablation of "
        "the appendix. memory_bank and moco_v3 do not need it.",
    ),
    Key(
        "MOCO.SHUFFLE_BY",
        "index",
        "With several processes: index (each loads the key views that it encodes; no image is sent "
        "and each is decoded twice) or all_to_all (views are sent as 8-bit pixels). Results are "
        "the same.",
        one_of("index", "all_to_all"),
        speed=True,
    ),
    Key(
        "SOLVER.ACCUMULATE",
        1,
        "Number of parts into which each process splits its share of the batch to save memory: "
        "the same gradients and dictionary, but BN's running statistics, used for evaluation, are "
        "updated once per part. A divisor of the process's BN groups; not supported by "
        "end_to_end, moco_v3 and nce.",
        finite(1),
    ),
    Key(
        "SOLVER.MAX_ITERS",
        0,
        "Length of the run in steps instead of MAX_EPOCHS; 0: MAX_EPOCHS.",
        finite(0),
    ),
    Key(
        "KNN.EVERY_EPOCHS",
        0,
        "Number of epochs between kNN evaluations on DATA.KNN_ROOT; 0: only at the end.",
        finite(0),
        speed=True,
    ),
    Key("KNN.K", 200, "Neighbors (InstDisc, arXiv 1805.01978, sec. 3.4).", finite(1), speed=True),
    Key("KNN.T", 0.1, "Temperature of the neighbors' votes.", _TEMPERATURE, speed=True),
    Key(
        "KNN.RESIZE_PX",
        0,
        "torchvision's Resize(RESIZE_PX) before the crop; 0: 256/224 of the crop.",
        finite(0),
        speed=True,
    ),
    Key(
        "KNN.CROP_PX",
        0,
        "torchvision's CenterCrop(CROP_PX); 0: AUG.CROP_PX.",
        finite(0),
        speed=True,
    ),
)
_add(
    CLASSIFICATION,
    Key("TASK", "", "Name of the task in run.json; the network's name is appended."),
    Key(
        "DATA.ROOT",
        "",
        "A folder with train/<class>/* and val/<class>/*, or with the files of iNaturalist 2018 or "
        "CIFAR-10.",
        place=True,
        data="folder",
    ),
    Key(
        "AUG.CROP_PX",
        0,
        "Side of the square crop of training, in pixels; 0: as in this project's pre-training of "
        "the weights, else 224.",
        also(0, finite(8)),
    ),
    Key(
        "AUG.MEAN",
        (),
        "Mean per RGB channel of pixels scaled to 0..1; (): as recorded in the checkpoint, else "
        "ImageNet's.",
        also((), _MEAN),
        weights=True,
    ),
    Key("AUG.STD", (), "Std per RGB channel, likewise.", also((), _STD), weights=True),
    Key(
        "EVAL.RESIZE_PX",
        0,
        '"1-crop" (sec. 4.1): torchvision\'s Resize(RESIZE_PX); 0: 256/224 of the crop.',
        finite(0),
    ),
    Key("EVAL.CROP_PX", 0, "torchvision's CenterCrop(CROP_PX); 0: AUG.CROP_PX.", finite(0)),
    Key(
        "EVAL.EVERY_EPOCHS",
        1,
        "Number of epochs between evaluations; the one at the end is the result.",
        finite(0),
        speed=True,
    ),
    Key(
        "MODEL.ARCH",
        "",
        'Architecture, as for pre-training; "": that of the checkpoint. Random weights require it.',
    ),
    Key(
        "MODEL.STEM",
        "",
        'Stem, as for pre-training; "": that of the checkpoint, imagenet for random weights.',
    ),
    Key(
        "MODEL.WIDTH",
        0.0,
        "Width, as for pre-training; 0: that of the checkpoint, 1 for random weights.",
        finite(0),
    ),
    Key(
        "SOLVER.RANDOM_LR",
        0.0,
        "Learning rate instead of SOLVER.BASE_LR for random weights, so that one recipe has the "
        "paper's two learning rates; 0: SOLVER.BASE_LR.",
        finite(0),
    ),
)
