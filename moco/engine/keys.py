"""Configuration keys of pre-training, linear classification and fine-tuning.

The defaults are the paper's pre-training except for SOLVER.PRECISION: ResNet-50, 200 epochs of
batch 256, K = 65536, augmentation v1. moco/classification/config.py overrides some.
"""

import math

from moco.common.keys import (
    Key,
    Keys,
    Range,
    Role,
    closed_interval,
    finite,
    numbers,
    one_of,
    ordered_pair,
    range_with,
)
from moco.modeling.archs import ARCHS, STEMS, VITS

PRECISIONS = ("fp32", "bf16", "fp16")
IMAGENET_MEAN = (0.485, 0.456, 0.406)  # RGB, of 0..1; main_moco.py, main_lincls.py
IMAGENET_STD = (0.229, 0.224, 0.225)
# Key in checkpoints and records of version 0.1.0, now LOG.LOGGERS; not part of the protocol.
FORMER = ("LOG.TENSORBOARD",)
# Keys that a resumed run may change besides those of places and speed. The treatment of bad images
# affects only images that the run has not read yet.
RESUMABLE = ("OUTPUT_DIR", "DATA.BAD_IMAGES", "DATA.MAX_BAD_FRACTION")

_SHARE = closed_interval(0, 1)
_MEAN = numbers(3)
_STD = numbers(3, "3 numbers > 0", lambda number: number > 0)
_MOMENTUM = Range(lambda value: 0 <= value < 1, "0 <= momentum < 1")
_TEMPERATURE = Range(lambda value: 0 < value < math.inf, "a temperature > 0, finite")

COMMON: Keys = {
    "OUTPUT_DIR": Key("", "Folder of the run: checkpoints, metrics.json, run.json.", role=Role.RUN),
    "SEED": Key(
        0,
        "Determines initial weights, order, and everything that is sampled.",
        finite(0),
        role=Role.RUN,
    ),
    "DEVICE": Key("auto", "auto (a GPU where there is one), cpu, cuda or cuda:N.", role=Role.PLACE),
    "NUM_THREADS": Key(
        0,
        "CPU threads of the training process; 0 leaves torch's choice.",
        finite(0),
        role=Role.PLACE,
    ),
    "DETERMINISTIC": Key(
        False,
        "Use only kernels whose results are bitwise reproducible; slower on a GPU, no difference "
        "on a CPU.",
        role=Role.SPEED,
    ),
    "DIST_TIMEOUT_SECONDS": Key(
        600,
        "With several processes: how long a process waits for the others before the run fails.",
        finite(1),
        role=Role.PLACE,
    ),
    "DATA.NUM_WORKERS": Key(
        4,
        "Data-loader workers; 0 reads in the training process. Results do not depend on it.",
        finite(0),
        role=Role.PLACE,
    ),
    "DATA.WORKER_TIMEOUT_SECONDS": Key(
        600,
        "A data-loader worker that delivers nothing for this long is considered hung.",
        finite(1),
        role=Role.PLACE,
    ),
    "DATA.CACHE_MIB": Key(
        0,
        "Memory to cache decoded images, in MiB per process of the run (shared by its data-loader "
        "workers); 0 decodes them in each epoch. Useful for small images.",
        finite(0),
        role=Role.PLACE,
    ),
    "AUG.CROP_SCALE": Key(
        (0.2, 1.0), "Range of the crop's share of the image's area.", ordered_pair(1)
    ),
    "AUG.CROP_RATIO": Key((3 / 4, 4 / 3), "Range of the crop's width / height.", ordered_pair()),
    "AUG.FLIP_PROB": Key(0.5, "Probability of flipping left and right.", _SHARE),
    "SOLVER.BATCH_SIZE": Key(256, "N, images per step, of all processes together.", finite(2)),
    "SOLVER.REFERENCE_BATCH_SIZE": Key(
        0,
        "Batch size for which learning rates and durations in steps are specified; with another "
        "BATCH_SIZE N, rates are multiplied by N / REFERENCE_BATCH_SIZE and durations divided by "
        "it (linear scaling, sec. 4.1). 0: they are used as given.",
        finite(0),
    ),
    "SOLVER.BASE_LR": Key(
        0.03,
        "Learning rate before any decay; in classification of pre-trained weights, see "
        "SOLVER.RANDOM_LR.",
        finite(0),
    ),
    "SOLVER.MAX_EPOCHS": Key(
        200,
        "Length of the run in passes over the data; --extend continues a finished run.",
        finite(1),
    ),
    "SOLVER.SCHEDULE": Key(
        "step",
        "step: multiply by GAMMA at each milestone. cosine: half a cosine from BASE_LR to 0. "
        "warmup_cosine: half a cosine from the end of the warm-up on, at each step (MoCo v3). "
        "exponential: multiply by GAMMA after every DECAY_EVERY_ITERS steps (the paper's IG-1B: "
        "0.9, 62500). Others can be registered in moco.engine.solver.SCHEDULES.",
    ),
    "SOLVER.MILESTONES_EPOCHS": Key(
        (120, 160), "Epochs at which step decays: increasing integers below MAX_EPOCHS."
    ),
    "SOLVER.DECAY_EVERY_ITERS": Key(62500, "Steps between the decays of exponential.", finite(1)),
    "SOLVER.OPTIMIZER": Key(
        "sgd",
        "sgd (sec. 4, Training), lars, for large batches (moco/engine/lars.py), or adamw, for "
        "vision transformers. Others can be registered in moco.engine.solver.OPTIMIZERS.",
    ),
    "SOLVER.MOMENTUM": Key(0.9, "Momentum of sgd and lars.", _MOMENTUM),
    "SOLVER.WEIGHT_DECAY": Key(
        1e-4, "Weight decay of all trained parameters; lars excludes biases and norms.", finite(0)
    ),
    "SOLVER.GAMMA": Key(0.1, "Factor of the learning rate at each milestone.", finite(0)),
    "SOLVER.LR_UPDATE": Key(
        "epoch",
        "How often the learning rate changes: each epoch (as the official code) or iteration.",
        one_of("epoch", "iter"),
    ),
    "SOLVER.WARMUP_ITERS": Key(
        0, "Linear warm-up of the learning rate in steps; or set WARMUP_EPOCHS.", finite(0)
    ),
    "SOLVER.WARMUP_EPOCHS": Key(
        0.0, "Linear warm-up of the learning rate in epochs; or set WARMUP_ITERS.", finite(0)
    ),
    "SOLVER.PRECISION": Key(
        "auto",
        "fp32, or autocast (convolutions and matrix products in 16 bits, weights in fp32): bf16, "
        "or fp16 with a scaled loss. auto: bf16 where the processor has instructions for it, else "
        "fp32; a resumed run keeps its precision. The record has the precision chosen. "
        "Classification defaults to fp32, in which published accuracies were measured.",
        one_of("auto", *PRECISIONS),
    ),
    "SOLVER.CHANNELS_LAST": Key(
        None,
        "Store images and activations as (N, H, W, C) in memory: the same values up to rounding, "
        "at another speed. None: if it is faster, which is on a CPU and in 16 bits.",
        one_of(None, True, False),
    ),
    "SOLVER.COMPILE": Key(
        False,
        "Use torch.compile for the network: the same mathematics in fewer kernels, after minutes "
        "of compilation.",
        role=Role.SPEED,
    ),
    "SOLVER.STOP_AT_ITERS": Key(
        0,
        "Save and exit with code 85 after this step, as if preempted; 0: never.",
        finite(0),
        role=Role.SPEED,
    ),
    "CHECKPOINT.EVERY_EPOCHS": Key(
        1, "Number of epochs between checkpoints.", finite(1), role=Role.SPEED
    ),
    "CHECKPOINT.EVERY_ITERS": Key(
        0, "Number of steps between additional checkpoints; 0: none.", finite(0), role=Role.SPEED
    ),
    "CHECKPOINT.KEEP": Key(
        2,
        "Number of newest checkpoints to keep, besides the newest one after which the loss stayed "
        "in its range (moco/engine/saver.py).",
        finite(2),
        role=Role.SPEED,
    ),
    "CHECKPOINT.MILESTONE_EPOCHS": Key(
        0,
        "Checkpoints at multiples of this many epochs are kept; 0: none.",
        finite(0),
        role=Role.SPEED,
    ),
    "LOG.EVERY_ITERS": Key(
        20,
        "Number of steps per line of metrics.json, which has the means over them.",
        finite(1),
        role=Role.SPEED,
    ),
    "LOG.LOGGERS": Key(
        ("tensorboard",),
        "Loggers that receive the lines of metrics.json: tensorboard (event files in OUTPUT_DIR), "
        "wandb, mlflow. Others can be registered in moco.engine.loggers.LOGGERS.",
        role=Role.PLACE,
    ),
}
PRETRAIN: Keys = {
    **COMMON,
    "DATA.ROOT": Key(
        "",
        "A folder of images (nested or flat; its train/ is used if it has one), a .txt file "
        "with one path per line, relative to the file, tar shards (a folder of them, one, or a "
        "pattern such as shards/train-{000000..000146}.tar), or CIFAR-10's folder "
        "(cifar-10-batches-py).",
        role=Role.PLACE,
        data=True,
    ),
    "DATA.BAD_IMAGES": Key(
        "fail",
        "Treatment of an image that cannot be decoded: fail (naming it) or skip (another image of "
        "the dataset takes its place).",
        one_of("fail", "skip"),
    ),
    "DATA.MAX_BAD_FRACTION": Key(
        0.001, "With skip: fraction of the dataset that may be bad; above it the run stops.", _SHARE
    ),
    "DATA.KNN_ROOT": Key(
        "",
        "Folder with train/<class>/* and val/<class>/*, or CIFAR-10's, for the kNN monitor; "
        '"" turns it off.',
        role=Role.PLACE,
    ),
    "DATA.SHARD_WINDOW": Key(
        16, "If DATA.ROOT is tar shards: number of shards that are shuffled together.", finite(1)
    ),
    "AUG.KIND": Key(
        "v1",
        "v1: grayscale, then color jitter (the paper, sec. 3.3). v2: color jitter, then grayscale, "
        "then blur (MoCo v2). v3: as v2, then solarization, and the two views differ (MoCo v3; its "
        "CROP_SCALE for ViTs is (0.08, 1)). The keys below default to the values of this kind.",
        one_of("v1", "v2", "v3"),
    ),
    "AUG.CROP_PX": Key(
        224,
        "Side of the square crop after resizing, in pixels; for a ViT a multiple of the patch.",
        finite(8),
    ),
    "AUG.JITTER_PROB": Key(1.0, "Probability of color jitter (all four together).", _SHARE),
    "AUG.BRIGHTNESS": Key(
        0.4,
        "Brightness factor is sampled from 1 ± this; the four jitters are in random order.",
        _SHARE,
    ),
    "AUG.CONTRAST": Key(0.4, "Contrast factor is sampled from 1 ± this.", _SHARE),
    "AUG.SATURATION": Key(0.4, "Saturation factor is sampled from 1 ± this.", _SHARE),
    "AUG.HUE": Key(
        0.4, "Hue is shifted by up to this fraction of the color circle.", closed_interval(0, 0.5)
    ),
    "AUG.GRAY_PROB": Key(0.2, "Probability of converting the image to grayscale.", _SHARE),
    "AUG.BLUR_PROB": Key(0.0, "Probability of a Gaussian blur.", _SHARE),
    "AUG.BLUR_SIGMA_PX": Key((0.1, 2.0), "Range of the blur's sigma in pixels.", ordered_pair()),
    "AUG.SOLARIZE_PROB": Key(
        0.0,
        "Probability of solarization (inverting values of at least 0.5), after the blur.",
        _SHARE,
    ),
    "AUG.BLUR_PROB_2": Key(
        -1.0,
        "AUG.BLUR_PROB of the second view, the key of the first pass; -1: AUG.BLUR_PROB.",
        range_with(-1, _SHARE),
    ),
    "AUG.SOLARIZE_PROB_2": Key(
        -1.0,
        "AUG.SOLARIZE_PROB of the second view, likewise; -1: AUG.SOLARIZE_PROB.",
        range_with(-1, _SHARE),
    ),
    "AUG.MEAN": Key(
        IMAGENET_MEAN,
        "Mean per RGB channel of pixels scaled to 0..1. The checkpoint records it for the "
        "converter, as well as AUG.STD.",
        _MEAN,
    ),
    "AUG.STD": Key(IMAGENET_STD, "Std per RGB channel of pixels scaled to 0..1.", _STD),
    "MODEL.ARCH": Key(
        "resnet50",
        "Architecture. resnet10 has one basic block per stage, resnext50_32x8d is the paper's "
        "RX50; vit_micro is for a CPU, and the other ViTs have MoCo v3's 12 heads, patches of 16 "
        "px and position embeddings for images of AUG.CROP_PX.",
        one_of(*ARCHS, *VITS),
    ),
    "MODEL.STEM": Key(
        "imagenet",
        "imagenet: 7x7 stride 2 + max-pool. stride2: 3x3 stride 2. cifar: 3x3 stride 1.",
        one_of(*STEMS),
    ),
    "MODEL.WIDTH": Key(
        1.0,
        "Multiplier of all channel counts; 64 * WIDTH must be an integer >= 8. The paper's "
        "R50w2x and R50w4x are 2 and 4.",
    ),
    "MODEL.WEIGHTS": Key(
        "",
        "Initial weights: any file that convert/convert_to_d2.py recognizes, or a name or address "
        'of one (`moco-transfer weights --help`); "": from scratch. Head, key encoder and queue '
        "are loaded as well if the file has them in the run's shapes.",
        role=Role.PLACE,  # a resumed run compares the content of the file
    ),
    "MODEL.ZERO_INIT_RESIDUAL": Key(
        False, "Initialize each residual block of a ResNet as the identity (as in MoCo v3)."
    ),
    "MODEL.FREEZE_PATCH_EMBED": Key(
        False,
        "Keep the random patch projection of a ViT fixed, which stabilizes training (MoCo v3, "
        "sec. 4).",
    ),
    "MOCO.DIM": Key(128, "Dimension C of queries and keys.", finite(1)),
    "MOCO.MECHANISM": Key(
        "momentum_queue",
        "One of the paper's three mechanisms (Fig. 2): momentum_queue (MoCo), end_to_end or "
        "memory_bank; or moco_v3 (arXiv 2104.02057).",
    ),
    "MOCO.K": Key(
        65536,
        "Size K of the dictionary. momentum_queue: length of the queue, at least one step's keys "
        "and not necessarily a multiple of them. memory_bank: negatives per step. end_to_end and "
        "moco_v3: must be SOLVER.BATCH_SIZE.",
        finite(1),
    ),
    "MOCO.M": Key(
        0.999,
        "momentum_queue: momentum m of the key encoder (eq. 2). moco_v3: its initial value, which "
        "rises to 1 by half a cosine.",
        _MOMENTUM,
    ),
    "MOCO.BANK_MOMENTUM": Key(
        0.5, "memory_bank: momentum of an entry (InstDisc, arXiv 1805.01978).", _MOMENTUM
    ),
    "MOCO.SHARED_ENCODER": Key(
        True,
        "end_to_end: the key encoder is the query encoder. False: two networks, each with its own "
        "gradient.",
    ),
    "MOCO.LOSS": Key(
        "info_nce",
        "info_nce (eq. 1) or, for memory_bank, nce (InstDisc's).",
        one_of("info_nce", "nce"),
    ),
    "MOCO.SYMMETRIC": Key(
        False,
        "Use each view once as query and once as key, and add the two losses (an option of the "
        "official CIFAR notebook, and the published moco_v3); a queue then takes 2 N keys per "
        "step. Not supported by memory_bank.",
    ),
    "MOCO.T": Key(0.07, "Temperature (eq. 1).", _TEMPERATURE),
    "MOCO.MLP": Key(
        False, "A two-layer head instead of a linear one (MoCo v2); moco_v3 has heads of its own."
    ),
    "MOCO.MLP_DIM": Key(
        4096, "moco_v3: hidden width of the projection head and the prediction head.", finite(1)
    ),
    "MOCO.BN_SPLITS": Key(
        8,
        "Number of groups of the batch of all processes that batch normalization sees separately, "
        "as on the paper's 8 GPUs; a multiple of the number of processes that divides the batch. 1 "
        "is BN of the whole batch, synchronized between the processes: moco_v3 requires it, and "
        "the paper's mechanisms cheat with it (sec. 3.3).",
        finite(1),
    ),
    "MOCO.SHUFFLE_BN": Key(
        True,
        "Shuffle the keys between the groups (sec. 3.3, Shuffling BN); False is the ablation of "
        "the appendix. memory_bank and moco_v3 do not need it.",
    ),
    "MOCO.SHUFFLE_BY": Key(
        "index",
        "With several processes: index (each loads the key views that it encodes; no image is sent "
        "and each is decoded twice) or all_to_all (views are sent as 8-bit pixels). Results are "
        "the same.",
        one_of("index", "all_to_all"),
        role=Role.SPEED,
    ),
    "SOLVER.ACCUMULATE": Key(
        1,
        "Number of parts into which each process splits its share of the batch to save memory: "
        "the same gradients and dictionary, but BN's running statistics, used for evaluation, are "
        "updated once per part. A divisor of the process's BN groups; not supported by "
        "end_to_end, moco_v3 and nce.",
        finite(1),
    ),
    "SOLVER.MAX_ITERS": Key(
        0, "Length of the run in steps instead of MAX_EPOCHS; 0: MAX_EPOCHS.", finite(0)
    ),
    "KNN.EVERY_EPOCHS": Key(
        0,
        "Number of epochs between kNN evaluations on DATA.KNN_ROOT; 0: only at the end.",
        finite(0),
        role=Role.SPEED,
    ),
    "KNN.K": Key(
        200, "Neighbors (InstDisc, arXiv 1805.01978, sec. 3.4).", finite(1), role=Role.SPEED
    ),
    "KNN.T": Key(0.1, "Temperature of the neighbors' votes.", _TEMPERATURE, role=Role.SPEED),
    "KNN.RESIZE_PX": Key(
        0,
        "torchvision's Resize(RESIZE_PX) before the crop; 0: 256/224 of the crop.",
        finite(0),
        role=Role.SPEED,
    ),
    "KNN.CROP_PX": Key(
        0, "torchvision's CenterCrop(CROP_PX); 0: AUG.CROP_PX.", finite(0), role=Role.SPEED
    ),
}
CLASSIFICATION: Keys = {
    **COMMON,
    "TASK": Key("", "Name of the task in run.json; the network's name is appended."),
    "DATA.ROOT": Key(
        "",
        "A folder with train/<class>/* and val/<class>/*, or with the files of iNaturalist 2018 or "
        "CIFAR-10.",
        role=Role.PLACE,
        data=True,
    ),
    "AUG.CROP_PX": Key(
        0,
        "Side of the square crop of training, in pixels; 0: as in this project's pre-training of "
        "the weights, else 224.",
        range_with(0, finite(8)),
    ),
    "AUG.MEAN": Key(
        (),
        "Mean per RGB channel of pixels scaled to 0..1; (): as recorded in the checkpoint, else "
        "ImageNet's.",
        range_with((), _MEAN),
        role=Role.WEIGHTS,
    ),
    "AUG.STD": Key((), "Std per RGB channel, likewise.", range_with((), _STD), role=Role.WEIGHTS),
    "EVAL.RESIZE_PX": Key(
        0,
        '"1-crop" (sec. 4.1): torchvision\'s Resize(RESIZE_PX); 0: 256/224 of the crop.',
        finite(0),
    ),
    "EVAL.CROP_PX": Key(0, "torchvision's CenterCrop(CROP_PX); 0: AUG.CROP_PX.", finite(0)),
    "EVAL.EVERY_EPOCHS": Key(
        1,
        "Number of epochs between evaluations; the one at the end is the result.",
        finite(0),
        role=Role.SPEED,
    ),
    "MODEL.ARCH": Key(
        "",
        'Architecture, as for pre-training; "": that of the checkpoint. Random weights require it.',
    ),
    "MODEL.STEM": Key(
        "", 'Stem, as for pre-training; "": that of the checkpoint, imagenet for random weights.'
    ),
    "MODEL.WIDTH": Key(
        0.0,
        "Width, as for pre-training; 0: that of the checkpoint, 1 for random weights.",
        finite(0),
    ),
    "SOLVER.RANDOM_LR": Key(
        0.0,
        "Learning rate instead of SOLVER.BASE_LR for random weights, so that one recipe has the "
        "paper's two learning rates; 0: SOLVER.BASE_LR.",
        finite(0),
    ),
}
