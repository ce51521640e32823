"""Refusals of `pretrain`, `linear`, `finetune` and `knn`: keys, YAML, images, weights."""

import re
from collections.abc import Callable
from typing import Any

import torch

from tests.oracles.bombs import png_bomb
from tests.oracles.refused_files import (
    Edit,
    both,
    folder_of,
    gone,
    json_edit,
    move,
    plain,
    query,
    resnext,
    saved,
    text,
    torch_edit,
)
from tests.refusals.rows import Row, rows

RUN = (r"run/(config\.yaml|log\.txt|[\w.]+\.json)",)  # Files written before the first step.
ON = "DEVICE cpu NUM_THREADS 1 DATA.NUM_WORKERS 0 LOG.LOGGERS ()"
TINY = (
    "MODEL.ARCH resnet10 MODEL.STEM stride2 MODEL.WIDTH 0.125 AUG.CROP_PX 16 MOCO.DIM 16 "
    "MOCO.K 16 MOCO.BN_SPLITS 2 SOLVER.BATCH_SIZE 8 SOLVER.BASE_LR 0.1 SOLVER.PRECISION fp32"
)
PLAIN = f"pretrain {ON} OUTPUT_DIR run DATA.ROOT images"
SMALL = f"{PLAIN} {TINY}"

# Values just outside the ranges of keys.
OUTSIDE = """
MOCO.MECHANISM simclr, MOCO.BANK_MOMENTUM 1, MOCO.M 1.0, MOCO.T 0, MODEL.ARCH resnet51,
MODEL.ARCH vit_huge, MODEL.STEM vgg, AUG.KIND v4, AUG.BLUR_PROB_2 1.5, AUG.SOLARIZE_PROB -1,
AUG.CROP_SCALE [0.5;0.2], AUG.CROP_SCALE [0.5], AUG.HUE 0.6, AUG.STD [1;1;0], AUG.MEAN [],
CHECKPOINT.KEEP 1, SOLVER.BASE_LR inf, SOLVER.WEIGHT_DECAY nan, SOLVER.GAMMA -1,
SOLVER.PRECISION half, SOLVER.SCHEDULE linear
"""
RANGES = rows(
    PLAIN,
    *(
        (pair.replace(";", ","), f"{pair.split()[0]}: got .*(expected|choices)")
        for pair in re.split(r",\s", OUTSIDE.strip())
    ),
)
KEYS = rows(
    PLAIN,
    ("MOCO.K 255", "MOCO.K: got 255"),
    ("MOCO.K 511 MOCO.SYMMETRIC True", "MOCO.K: got 511"),
    ("MOCO.MECHANISM end_to_end", "MOCO.K: got 65536"),
    ("MOCO.MECHANISM end_to_end MOCO.K 256 SOLVER.ACCUMULATE 2", "SOLVER.ACCUMULATE: got 2"),
    ("MOCO.MECHANISM memory_bank MOCO.LOSS nce SOLVER.ACCUMULATE 2", "SOLVER.ACCUMULATE"),
    ("MOCO.LOSS nce", "MOCO.LOSS"),
    ("MOCO.MECHANISM memory_bank MOCO.SYMMETRIC True", "MOCO.SYMMETRIC"),
    ("MOCO.MECHANISM moco_v3", "MOCO.K: got 65536"),
    ("MOCO.MECHANISM moco_v3 MOCO.K 256", "MOCO.BN_SPLITS: got 8"),
    ("MOCO.MECHANISM moco_v3 MOCO.K 256 SOLVER.ACCUMULATE 2", "SOLVER.ACCUMULATE: got 2"),
    ("MODEL.ARCH vit_small MODEL.WIDTH 2", "MODEL.WIDTH 2: vit_small"),
    ("MODEL.ARCH vit_small MODEL.STEM cifar", "MODEL.STEM cifar"),
    ("MODEL.ARCH vit_small AUG.CROP_PX 100", "AUG.CROP_PX: got 100"),
    ("MODEL.FREEZE_PATCH_EMBED True", "MODEL.FREEZE_PATCH_EMBED: resnet50"),
    ("MOCO.BN_SPLITS 7", "MOCO.BN_SPLITS: got 7, .* 4$"),
    ("MOCO.BN_SPLITS 256", "MOCO.BN_SPLITS: got 256, .* 128$"),
    ("MOCO.BN_SPLITS 1 SOLVER.ACCUMULATE 2", "MOCO.BN_SPLITS: got 1"),
    ("SOLVER.ACCUMULATE 3", "MOCO.BN_SPLITS: got 8"),
    ("SOLVER.MAX_EPOCHS 160", "MILESTONES_EPOCHS: 160"),
    ("SOLVER.MILESTONES_EPOCHS (9,3)", "MILESTONES_EPOCHS: got"),
    ("SOLVER.OPTIMIZER adam", "SOLVER.OPTIMIZER: got 'adam'.* lars"),
    ("MODEL.WIDTH 0.3", "width: got 0.3"),
    ("MODEL.WIDTH 0.0", "width: got 0.0"),
    ("MODEL.WIDTH 0.1", "width: got 0.1"),
    ("SOLVER.CHANNELS_LAST maybe", "CHANNELS_LAST"),
    ("DEVICE tpu", "choices are auto, cpu"),
    ("DEVICE cuda:99", "is not available"),
    ("DEVICE cuda", "is not available"),
    ("DATA.ROOT", "'DATA.ROOT' has no value"),
    ("DATA.ROOT ''", "DATA.ROOT"),
    # Suggestions for unknown keys.
    ("SOLVER.BATCHSIZE 8", "SOLVER.BATCHSIZE; the nearest is SOLVER.BATCH_SIZE"),
    ("SOLVER.LR 1", "unknown key SOLVER.LR.* SOLVER.BASE_LR$"),
    ("solver.base_lr 1", "unknown key solver.base_lr.* SOLVER.BASE_LR$"),
    ("SOLVER.IMS_PER_BATCH 1", "unknown key SOLVER.IMS_PER_BATCH.* SOLVER.BATCH_SIZE$"),
    # Names of config files.
    ("--config-file small_r19", "pretrain/small_r18"),
    ("--config-file ../setup", r"\.\./setup.*moco-transfer configs"),
    ("--config-file ''", "config"),
    ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
)
ALIASES = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]
# PyYAML from 6.0.4 on merges equal keys once, so it takes many mappings to have many values.
MERGES = [f"a0: &a0 {{{', '.join(f'k{i}: 1' for i in range(2000))}}}"]
MERGES += [f"a{i}: {{<<: *a0}}" for i in range(1, 60)]
TAGS = (
    "object/apply:os.system ['touch marker']",
    "object/apply:eval ['1']",
    "tuple [3, 4]",
    "name:os.system",
    "object/new:eval ['1']",
)
YAML = rows(
    f"{PLAIN} --config-file a.yaml",
    *(
        (text("a.yaml", content), rf"a\.yaml: .*{words}")
        for content, words in (
            ("SOLVER: {BASE_LRR: 1}", "unknown key SOLVER.BASE_LRR; the nearest is SOLVER.BASE_LR"),
            ("MAX_EPOCHS: 3", "unknown key MAX_EPOCHS; the nearest is SOLVER.MAX_EPOCHS"),
            ("SOLVER: {MAX_EPOCHS: many}", "SOLVER.MAX_EPOCHS expects int such as 200, got 'many'"),
            ("SOLVER: {BASE_LR: high}", "SOLVER.BASE_LR expects float"),
            ("SOLVER: 3", "SOLVER is a group of keys"),
            ("- a\n- b", "expected KEY: VALUE lines, got list"),
            ("a: [", "not valid YAML"),
            ("_BASE_: a.yaml", "does it name itself"),
            ("_BASE_: 5", "got 5, expected a file name"),
            ("_BASE_: ~", "got None, expected a file name"),
            ("_BASE_: [1]", "got 1, expected a file name"),
            ("SEED: 2020-99-99", r"not valid YAML \(month must be in 1..12\)"),
            (f"SEED: {'9' * 5000}", r"not valid YAML \(Exceeds the limit"),
            ("\n".join(ALIASES), "not valid YAML .*more than 100000 parts"),
            ("\n".join(MERGES), "not valid YAML .*merge keys .* more than 100000 values"),
            ("A: " + "[" * 200 + "]" * 200, "not valid YAML"),
            ("A: " + "[" * 100_000 + "]" * 100_000, "not valid YAML"),
            *(
                (f"DATA:\n  ROOT: x\nSOLVER:\n  STEPS: !!python/{tag}\n", f"line 4: .*{word}")
                for tag in TAGS
                for word in [f"python/{tag.split()[0]}"]
            ),
        )
    ),
    (text("a.yaml", '_BASE_: "a\\0.yaml"'), "embedded null byte"),
    (text("a.yaml", "_BASE_: https://example.org/a.yaml"), "is remote"),
    (text("a.yaml", "_BASE_: missing.yaml"), r"missing\.yaml"),
    (text("a.yaml", "_BASE_: ../../etc/hostname"), "hostname"),
    (text("a.yaml", f"_BASE_: {'a' * 300}.yaml"), r"aaa\.yaml"),
)
YAML += rows(f"{PLAIN} --config-file a.py", (text("a.py", "SOLVER = 1"), r"a \.yaml file"))

IMAGES = rows(
    SMALL,
    ("DATA.ROOT nowhere", "nowhere: no .*ROOT/train/class/"),
    ("DATA.KNN_ROOT images", "train: no such folder"),
    ("SOLVER.BATCH_SIZE 16", "has 9 images, less than one batch of 16; .*SOLVER.BATCH_SIZE"),
    code=3,
)
IMAGES += rows(
    f"{SMALL} SOLVER.SCHEDULE cosine",
    ("SOLVER.WARMUP_EPOCHS 200.0", "SOLVER.WARMUP_EPOCHS: .*200 epochs of 1 step"),
    ("SOLVER.WARMUP_ITERS 200", "SOLVER.WARMUP_ITERS: .*200 epochs of 1 step"),
)
IMAGES += rows(
    SMALL,
    (
        both(gone("images"), folder_of("images/train"), text("images/val/cat/v.jpg", "")),
        "no images",
    ),
    (both(gone("images"), folder_of("images")), "images: no .*ROOT/train/class/0001.jpg"),
    (text("images/3.jpg", b""), r"3\.jpg: the file is empty"),
    (text("images/3.jpg", "<html>not found</html>"), r"3\.jpg: not an image"),
    (text("images/3.jpg", b"\xff\xd8\xff\xe0\x00\x10JFIF"), r"3\.jpg: (not an image|cannot be)"),
    (text("images/3.jpg", "%!PS-Adobe-3.0 EPSF-3.0\n"), r"3\.jpg: not an image \(JPEG, PNG"),
    # Above PIL's limits for a warning and for an error.
    (text("images/3.jpg", png_bomb(10_000)), r"3\.jpg: decompression bomb"),
    (text("images/3.jpg", png_bomb(20_000)), r"3\.jpg: decompression bomb"),
    code=3,
    leaves=RUN,
)
IMAGES += rows(
    f"{SMALL} DATA.ROOT list.txt",
    (
        text("list.txt", "images/1.jpg\nmissing.jpg\n"),
        "list.txt: line 2: no such file .*missing.jpg",
    ),
    code=3,
)

# Folders and checkpoints of runs.
FOLDERS = [
    *rows(
        SMALL,
        (text("run/thesis.txt", "years"), r"not empty .*--overwrite"),
        (text("run", "a file"), "cannot be used as output folder"),
    ),
    *rows(
        SMALL,
        ("--resume --overwrite", "exclude each other"),
        ("--extend", "--extend: .* holds no checkpoint"),
    ),
    *rows(
        f"{SMALL} --resume x.pth.tar",
        (saved("x.pth.tar", [1, 2]), "got a list, expected a checkpoint"),
        (saved("x.pth.tar", {"state_dict": {}}), "no 'epoch'; expected a checkpoint written by"),
        *(
            (both(move("moco.pth.tar", "x.pth.tar"), torch_edit("x.pth.tar", change)), words)
            for change, words in (
                (lambda c: c.update(step="3"), "a malformed 'step'"),
                (lambda c: c.update(format="moco-transfer/9"), "format 'moco-transfer/9', expect"),
            )
        ),
        (folder_of("other"), r"x\.pth\.tar: "),
        *((text("x.pth.tar", raw), r"x\.pth\.tar: ") for raw in (b"", b"PK\x03\x04 half", b"text")),
        code=3,
        files="moco.pth.tar",
    ),
    *rows(
        SMALL,
        ("SEED 1", "WORLD_SIZE is 2, but RANK is not set; .* torchrun"),
        env={"WORLD_SIZE": "2"},
    ),
    *rows(
        SMALL,
        ("LOG.LOGGERS \"('wandb',)\"", r"LOG.LOGGERS.*moco-transfer\[wandb\]"),
        ("LOG.LOGGERS \"('mlflow',)\"", r"LOG.LOGGERS.*moco-transfer\[mlflow\]"),
        without=("wandb", "mlflow"),
        leaves=RUN,
    ),
]

# Initial weights, from this project's checkpoints and from others.
WEIGHTS = f"{SMALL} MODEL.WEIGHTS moco.pth.tar"
CLASSIFY = f"--checkpoint moco.pth.tar {ON} OUTPUT_DIR run DATA.ROOT labeled AUG.CROP_PX 16 "
CLASSIFY += "SOLVER.BATCH_SIZE 4 SOLVER.MAX_EPOCHS 2 SOLVER.MILESTONES_EPOCHS (1,)"
LINEAR = f"linear {CLASSIFY}"
KNN = "knn --checkpoint moco.pth.tar --data labeled --k 3"
STARTS = [
    *rows(
        WEIGHTS,
        ("MODEL.ARCH resnet18", r"MODEL\.ARCH.*resnet10"),
        ("MODEL.STEM cifar", r"MODEL\.STEM"),
    ),
    *rows(
        WEIGHTS,
        *(
            (torch_edit("moco.pth.tar", change), r"moco\.pth\.tar")
            for change in (
                lambda c: c["state_dict"]["module.queue"].fill_(float("nan")),
                lambda c: c["state_dict"]["module.encoder_k.conv1.weight"].fill_(float("inf")),
                lambda c: c["state_dict"]["module.queue_ptr"].fill_(32),
                lambda c: c["state_dict"]["module.encoder_q.conv1.weight"].fill_(float("nan")),
            )
        ),
        code=3,
        leaves=RUN,
    ),
    *rows(
        LINEAR,
        ("MODEL.ARCH resnet18", r"MODEL\.ARCH: got resnet18.* resnet10"),
        ("MODEL.WIDTH 1.0", r"MODEL\.WIDTH"),
        ("MODEL.STEM cifar", r"MODEL\.STEM"),
        ("SOLVER.MAX_EPOCHS 1", "MILESTONES_EPOCHS: 1"),
        ("EVAL.RESIZE_PX 8", "RESIZE_PX"),
        ("DATA.ROOT ''", r"DATA\.ROOT"),
    ),
    *rows(LINEAR, ("SOLVER.BATCH_SIZE 32", r"SOLVER\.BATCH_SIZE"), code=3),
    *rows(f"finetune {CLASSIFY}", ("SOLVER.BATCH_SIZE 32", r"SOLVER\.BATCH_SIZE"), code=3),
    *rows("linear DATA.ROOT labeled", ("", "required: --checkpoint")),
    *rows("knn --data labeled", ("", "required: --checkpoint")),
    *rows(LINEAR.replace("moco.pth.tar", "random"), ("", r"MODEL\.ARCH")),
    *rows(
        LINEAR.replace("moco.pth.tar", "stem.pth"),
        (plain("stem.pth", stem="stride2"), r"MODEL\.STEM .* cifar \(1\) or stride2 \(2\)"),
    ),
    *rows(KNN.replace("moco.pth.tar", "stem.pth"), (plain("stem.pth", stem="stride2"), "--stem")),
    *rows(LINEAR.replace("moco.pth.tar", "random.pth"), (plain("random.pth"), "--init")),
    *rows(LINEAR.replace("moco.pth.tar", "x.pth"), (saved("x.pth", resnext()), "32 groups of 4")),
    *rows(KNN, ("--resize-px 8 --crop-px 16", "RESIZE_PX|resize-px")),
    *rows(f"{KNN} --output run", (text("run/run.json", "{}"), "is not empty")),
    *rows(KNN.replace("labeled", "images"), ("", "images.*<class>"), code=3),
    *rows(LINEAR, ("DATA.ROOT images", "images.*<class>"), code=3),
    # Classes.
    *rows(
        LINEAR, (text("labeled/val/eel/4.png", b""), "class eel is in val but not in train"), code=3
    ),
]
INAT = f"{LINEAR} DATA.ROOT inat"


def of_inat(change: Callable[[Any], object]) -> Edit:
    return json_edit("inat/val2018.json", change)


STARTS += rows(
    INAT,
    (text("inat/val2018.json", "{"), r"val2018\.json.*not a list of iNaturalist"),
    (text("inat/val2018.json", "[]"), r"val2018\.json.*not a list of iNaturalist"),
    (text("inat/val2018.json", "{}"), r"not a list of iNaturalist \(KeyError: 'categories'\)"),
    (of_inat(lambda c: c.update(images=[])), "lists no images"),
    (of_inat(lambda c: c["annotations"][0].update(category_id=3)), "category 3 is not among"),
    (of_inat(lambda c: c["images"][0].update(file_name="x.jpg")), "no such file .*2018.tar.gz"),
    (of_inat(lambda c: c.update(annotations=[])), "KeyError: 3"),
    (of_inat(lambda c: c["categories"].pop(0)), "do not have the same categories"),
    *(
        (of_inat(lambda c, name=name: c["images"][0].update(file_name=name)), "is outside")
        for name in ("../../etc/passwd", "/etc/passwd", "train_val2018/../../x.jpg")
    ),
    code=3,
)


def record(part: str, **values: object) -> Edit:
    return torch_edit("moco.pth.tar", lambda content: content[part].update(values))


def tensors(change: Callable[[str, Any], Any]) -> Edit:
    """Change all tensors of the query encoder except counters."""

    def edit(state: dict[str, Any]) -> None:
        state.update({k: change(k, v) for k, v in state.items() if "num_b" not in k})

    return query(edit, "moco.pth.tar")


def reset(moved: str | None, zero_init: bool) -> Edit:
    """Reset all norms to their initialization, except for one number."""

    def change(key: str, value: Any) -> Any:
        if "bn" in key or "downsample.1" in key:
            one = key.endswith(("weight", "running_var")) and not (zero_init and "bn2.w" in key)
            value = torch.full_like(value, float(one))
            if key == moved:
                value[0] = 0.5
        return value

    return tensors(change)


# Weights that are damaged, misnamed, never trained or overflowing.
NAN = float("nan")
NAN = float("nan")
UNSOUND = (
    *(
        (record(part, **{key: value}), key)
        for part, key, values in (
            ("encoder", "arch", [["resnet10"]]),
            ("encoder", "stem", [{}]),
            ("encoder", "width", ["0.125", 1e9, True, NAN]),
            ("input", "mean", [[NAN] * 3, None, [1e300, 0.0, 0.0]]),
            ("input", "std", [[0.0, 1.0, 1.0], [float("inf")] * 3, "abc"]),
            ("input", "channel_order", [["RGB"]]),
        )
        for value in values
    ),
    (record("encoder", arch="vit_small"), "encoder"),
    (record("encoder", width=32768.0), "width 32768"),  # It would take all memory.
    (torch_edit("moco.pth.tar", lambda c: c.update(encoder={1: 2})), "arch"),
    (tensors(lambda key, value: value * torch.nan), "NaN or Inf"),
    (tensors(lambda key, value: value.bool()), "bool"),
    (tensors(lambda key, value: value.int()), "int32"),
    (tensors(lambda key, value: -value if "var" in key else value), "negative variance"),
    (tensors(lambda key, value: value * 0 if key == "conv1.weight" else value), "all zero"),
    (tensors(lambda k, v: torch.ones(1).expand(v.shape) if k == "conv1.weight" else v), "conv1"),
    (tensors(lambda key, value: value * 1e30 if "conv" in key else value), "features"),
    (tensors(lambda key, value: value * 1e30 if key == "bn1.weight" else value), "features"),
    *(
        (reset(moved, zero_init), "never trained")
        for moved in (None, "bn1.bias", "layer2.0.bn1.weight")
        for zero_init in (False, True)
    ),
)
# All commands read weights by the same functions: `convert` has every row, the others some.
SOUNDNESS = [
    row
    for command, step in (("convert moco.pth.tar out.pth", 1), (LINEAR, 4), (KNN, 5))
    for row in rows(
        command, *((edit, rf"moco\.pth\.tar.*{words}") for edit, words in UNSOUND[::step]), code=3
    )
]
SOUNDNESS += rows(
    KNN,
    *(
        (torch_edit("moco.pth.tar", lambda c, k=key, v=value: c["config"].update({k: v})), key)
        for key, value in (
            ("KNN.CROP_PX", "16"),
            ("KNN.RESIZE_PX", [16]),
            ("AUG.CROP_PX", 1e9),
            ("AUG.CROP_PX", 10**6),
        )
    ),
    code=3,
)
PRETRAIN: list[Row] = [*RANGES, *KEYS, *YAML, *IMAGES, *FOLDERS, *STARTS, *SOUNDNESS]
