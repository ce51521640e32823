"""Refusals of `train` before its folder is made: keys, weights, engines, processes, folders."""

import pickle
import re
from functools import partial

import numpy as np
import torch

from tests.oracles.refused_files import folder_of, saved, text, torch_edit
from tests.refusals.rows import Row, rows

TASK = "voc/faster_rcnn_R_18_C4_small"
ON = "MODEL.DEVICE cpu OUTPUT_DIR run"
SMALL = f"train --config-file {TASK} {ON} --engine"
ON_VOC = "DATASETS.VOC_DIR {tmp}/voc MODEL.WEIGHTS random"
LSJ = "INPUT.LSJ.ENABLED True"
KEYS = (
    ("SOLVER.BASE_LRR 1", "SOLVER.BASE_LRR; .*SOLVER.BASE_LR"),
    ("SOLVER.MAX_ITER many", "SOLVER.MAX_ITER expects int"),
    ("SOLVER.MAX_ITER", "SOLVER.MAX_ITER"),
    ("SOLVER.MAX_ITER 100", r"SOLVER.STEPS: got \(225, 275\), .*MAX_ITER 100"),
    ("SOLVER.STEPS '(20, 10)'", "SOLVER.STEPS"),
    ("SOLVER.WARMUP_ITERS 230", "WARMUP_ITERS: got 230, .* less than 225, .* reach 0.001, not"),
    ("SOLVER.STEPS () SOLVER.WARMUP_ITERS 300", "WARMUP_ITERS: got 300, .* less than 300"),
    ("SOLVER.BASE_LR 0", "SOLVER.BASE_LR: got 0.0, .* 0"),
    ("SOLVER.PRECISION fp16", "SOLVER.PRECISION fp16"),
    ("SOLVER.REFERENCE_WORLD_SIZE 3", "REFERENCE_WORLD_SIZE: got 3, .* 4"),
    ("SOLVER.REFERENCE_WORLD_SIZE -1", "REFERENCE_WORLD_SIZE: got -1, .* 4"),
    ("DATASETS.TEST \"('voc_test','voc_trainval')\"", "DATASETS.TEST: got .*expected one dataset"),
    ("SOLVER.OPTIMIZER Adam", "SOLVER.OPTIMIZER"),
    ("SOLVER.LR_DECAY 0.5 MODEL.BACKBONE.NAME build_my_own", "MODEL.BACKBONE.NAME"),
    ("SOLVER.LR_DECAY_BY_STAGE True", "LR_DECAY_BY_STAGE True: only ConvNeXts"),
    ("SOLVER.BASE_LR_END 0.1", "SOLVER.BASE_LR_END"),
    (f"{LSJ} MODEL.META_ARCHITECTURE SemanticSegmentor", "MODEL.META_ARCHITECTURE"),
    (
        f"{LSJ} MODEL.MASK_ON True DATALOADER.FILTER_EMPTY_ANNOTATIONS False",
        "DATALOADER.FILTER_EMPTY_ANNOTATIONS",
    ),
    (f"{LSJ} INPUT.CROP.ENABLED True", "INPUT.CROP.ENABLED"),
    (
        "INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TRAIN_SAMPLING range",
        "INPUT.MIN_SIZE_TRAIN: .*MIN_SIZE_TRAIN_SAMPLING",
    ),
    ("INPUT.CORRUPTION fog", r"INPUT\.CORRUPTION"),
    ("INPUT.CORRUPTION fog.6", r"INPUT\.CORRUPTION"),
    ("INPUT.CORRUPTION rain.3", r"INPUT\.CORRUPTION"),
    ("MODEL.DEVICE gpu", "MODEL.DEVICE: got 'gpu', .*cuda"),
    ("MODEL.DEVICE cuda", r"MODEL\.DEVICE: cuda:0 is not available .*; use cpu"),
    ("MODEL.ROI_HEADS.NUM_CLASSES 20", "NUM_CLASSES: got 20, .* 3 classes"),
    ("DATASETS.TRAIN \"('voc_all',)\"", "voc_all .*voc_trainval"),
    ("DATASETS.VOC_YEAR 2010", "VOC_YEAR: got 2010, .* 2007, 2012"),
    (
        "MODEL.WEIGHTS ''",
        "MODEL.WEIGHTS is empty; give a file from moco-transfer convert, a checkpoint .*random",
    ),
    ("LOG.LOGGERS ('tensorboad',)", "LOG.LOGGERS.*tensorboad"),
    ("--visualize -1", "--visualize: got -1"),
    ("--resume --overwrite", "exclude each other"),
    ("--num-gpus 0", "expected at least one of each"),
    ("--num-machines 2", "--dist-url: got auto, --num-machines needs tcp://"),
    ("--num-machines 2 --dist-url tcp://first", "got tcp://first, .*needs tcp://"),
    ("--num-machines 2 --dist-url file:///x", "got file:///x, .*needs tcp://"),
    ("--num-machines 2 --machine-rank 2 --dist-url tcp://a:1", "below the number"),
    ("--num-gpus 3", "IMS_PER_BATCH 4 cannot be divided among 3"),
    ("--eval-only", "--eval-only needs a trained model"),
    ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
)
FILES = (
    ("DATASETS.VOC_CLASSES \"['blue', 'red']\"", "'green'"),
    ("DATASETS.VOC_DIR nowhere", "VOC_DIR nowhere: .*Annotations"),
    ("MODEL.WEIGHTS moco.pth", "MODEL.WEIGHTS moco.pth: no such file.*random"),
    ("MODEL.WEIGHTS Random", "random"),
    ("--eval-only MODEL.WEIGHTS x.pth", "MODEL.WEIGHTS x.pth: no such file"),
    ("--eval-only --resume MODEL.WEIGHTS x.pth", "last_checkpoint is missing"),
)
# Detectron2's own configuration takes another path after the first checks of keys and files.
LATE = [
    row
    for row in KEYS
    if re.match(
        "MODEL.DEVICE|SOLVER.PRECISION|SOLVER.REF|DATASETS.VOC_YEAR|MODEL.ROI|--num", row[0]
    )
]
KEYS_AND_FILES = [
    *rows(f"{SMALL} embedded {ON_VOC}", *KEYS),
    *rows(f"{SMALL} embedded {ON_VOC}", *FILES, code=3),
    *rows(f"{SMALL} detectron2 {ON_VOC}", *LATE, needs=("detectron2",)),
    *rows(f"{SMALL} detectron2 {ON_VOC}", FILES[0], needs=("detectron2",), code=3),
]
KEYS_AND_FILES += rows(
    f"{SMALL} embedded DATASETS.VOC_DIR {{tmp}}/voc MODEL.WEIGHTS random.pth",
    (text("random.pth", ""), "random.pth: would be called 'random' in a table"),
)
WITH = f"{SMALL} embedded DATASETS.VOC_DIR {{tmp}}/voc MODEL.RESNETS.RES2_OUT_CHANNELS 16"
# Names of tasks, task files, output folders and engines.
PLACES = [
    *rows(
        f"train --config-file {{}} {ON} {ON_VOC} --engine embedded",
        ("mask_rcnn_R_50_FPN_1x", "coco/mask_rcnn_R_50_FPN_1x.*lvis/mask_rcnn_R_50_FPN_1x"),
        ("voc/faster_rcnn_R_50_C4_25k.yaml", "voc/faster_rcnn_R_50_C4_24k"),
        ("coco/faster_rcnn_R_50_C4_24k", "voc/faster_rcnn_R_50_C4_24k"),
        ("coco/densepose_rcnn_R_50_FPN_s1x", "error: MODEL.DENSEPOSE_ON.*embedded engine .*detec"),
        (
            "coco/mask_rcnn_R_50_FPN_1x MODEL.RESNETS.DEFORM_ON_PER_STAGE [0,0,1,1]",
            "DEFORM_ON_PER_STAGE .*embedded engine .*detectron2",
        ),
    ),
    *rows(
        f"train --config-file task.yaml {ON} {ON_VOC} --engine embedded",
        (
            text("task.yaml", "OUTPUT_DIR: !!python/object/apply:os.system ['touch marker']\n"),
            r"python/object/apply:os\.system",
        ),
        *(
            (text("task.yaml", f"_BASE_: {TASK}\n{key}: [antigravity]\n"), key)
            for key in ("imports", "IMPORTS", "DATASETS.IMPORT")  # Importing would run code.
        ),
    ),
    *rows(
        "train",
        (
            "--check-only MODEL.WEIGHTS random",
            "DATASETS.TRAIN is empty; .*DATASETS.VOC_DIR.*--config-file voc/",
        ),
        ("--eval-only MODEL.WEIGHTS r18.pth", r"MODEL\.WEIGHTS is .*r18\.pth.*--config-file"),
        ("--eval-only --resume", "OUTPUT_DIR is 'not set'.*--config-file"),
    ),
    *rows(
        f"{SMALL} embedded {ON_VOC}",
        (text("run/thesis.txt", "years"), r"not empty \(it holds thesis\.txt\).*--overwrite"),
        (text("run", "a file"), "cannot be used as output folder"),
    ),
    *rows(
        f"{SMALL} detectron2 {ON_VOC}",
        ("", "--engine detectron2: Detectron2 cannot be imported"),
        without=("detection.d2",),
    ),
    *rows(
        f"train --config-file {TASK} OUTPUT_DIR run --engine embedded {ON_VOC}",
        ("--num-gpus 2", r"2 processes .*--num-gpus.*MODEL\.DEVICE cpu"),
    ),
    *rows(f"{SMALL} embedded {ON_VOC} --import json", ("", "--import.*Detectron2")),
]
RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
RANK |= {"MASTER_PORT": "1", "MASTER_ADDR": "localhost"}
TORCHRUN = [
    *rows(
        f"{SMALL} embedded {ON_VOC}",
        ("--num-gpus 2", "--num-gpus, .*torchrun has started the processes; omit"),
        ("SEED -1", "SEED is not set; several machines, or torchrun, need a common one"),
        env=RANK,
    ),
]


class Unknown:
    """Object whose pickle names a function that this project never calls."""

    def __reduce__(self) -> object:
        return np.random.default_rng, ()


EVALUATION = (
    f"{SMALL} embedded DATASETS.VOC_DIR {{tmp}}/voc --eval-only INPUT.FORMAT RGB "
    "MODEL.PIXEL_STD [1.0,1.0,1.0] MODEL.PIXEL_MEAN [1.0,1.0,1.0] "
    "MODEL.RESNETS.STRIDE_IN_1X1 False MODEL.RESNETS.STEM_OUT_CHANNELS 16 "
    "MODEL.RESNETS.RES2_OUT_CHANNELS 16"
)
# Weights that are damaged or contradict the task.
WEIGHTS = [
    *rows(
        WITH + " MODEL.WEIGHTS r18.pth",
        *(
            (f"{key} {value}", f"{key}: you set .*need {theirs}".replace("[", r"\["))
            for key, value, theirs in (
                ("INPUT.FORMAT", "BGR", "'RGB'"),
                ("MODEL.PIXEL_STD", "'[1.0, 1.0, 1.0]'", "[51"),
                ("MODEL.RESNETS.STRIDE_IN_1X1", "True", "False"),
            )
        ),
    ),
    *rows(
        f"train --config-file task.yaml {ON} DATASETS.VOC_DIR {{tmp}}/voc MODEL.WEIGHTS r18.pth",
        (
            text("task.yaml", f"_BASE_: {TASK}\nINPUT: {{FORMAT: BGR}}\n"),
            "INPUT.FORMAT: the task file sets 'BGR', .*need 'RGB'",
        ),
    ),
    *rows(
        f"train --config-file {{}} {ON} DATASETS.VOC_DIR {{tmp}}/voc --engine embedded",
        (
            "voc/faster_rcnn_R_50_C4_24k MODEL.WEIGHTS r18.pth",
            "MODEL.RESNETS.DEPTH: .*ResNet-50, but .* ResNet-18; .*voc/faster_rcnn_R_18_C4_small",
        ),
        (
            "voc/faster_rcnn_R_50_C4_24k MODEL.WEIGHTS r18.pth MODEL.RESNETS.DEPTH 50",
            "MODEL.RESNETS.DEPTH: you set 50, but .* need 18",
        ),
        (
            f"{TASK} MODEL.WEIGHTS r50.pth",
            "for a ResNet-18, but .* are a ResNet-50; task(?!.*Base-)",
        ),
    ),
    *rows(
        WITH + " MODEL.WEIGHTS r18.pth",
        (lambda c: c["model"].pop("res2.0.conv1.weight"), r"missing: 'res2\.0\.conv1\.w"),
        (lambda c: c.update(model=[]), "'model' is a list"),
        (lambda c: c.pop("contract"), "contract"),
        (lambda c: c["contract"].update(version=7), "version 7"),
        code=3,
        on=partial(torch_edit, "r18.pth"),
    ),
    *rows(
        WITH + " MODEL.WEIGHTS x.pth",
        (
            saved("x.pth", {"state_dict": {"net.conv1.weight": torch.ones(1)}}),
            r"unknown layout .*'net\.conv1\.weight'",
        ),
        (
            text("x.pth", pickle.dumps({"conv1.weight": np.random.default_rng})),
            r"unknown layout .*'conv1\.weight'",
        ),
        (folder_of("x.pth"), "is a folder without weights"),
        code=3,
    ),
    # Names and addresses of weights; nothing is downloaded.
    *rows(
        f"{SMALL} embedded DATASETS.VOC_DIR {{tmp}}/voc MODEL.WEIGHTS",
        ("detectron2://COCO-Detection/faster_rcnn_R_50_C4_1x/137/m.pkl", "a whole detector"),
        ("catalog://Caffe2Detectron/COCO/35857197/e2e_faster_rcnn_R-50-C4_1x", "a whole detector"),
        ("https://download.pytorch.org/models/resnet50-0676ba61.pth", "needs the file's hash"),
        ("torchvision://R-50", "unsupported address; .*detectron2://ImageNetPre"),
        ("https://host/r50.pth", r"https://host/r50\.pth#sha256="),
        ("https://host/r50.pth#0123abcd", "sha256="),
        ("https://host/r50.pth#sha1=0123abcd", "sha1"),
        ("http://host/r50.pth#sha256=0123abcd", "https"),
        ("s3://host/r50.pth", "s3://"),
        ("hf://user/model.safetensors", "hf://user/repo/file"),
        ("hf://-user/repo/model.safetensors", "hf://user/repo/file"),
        ("hf://user/re--po/model.safetensors", "hf://user/repo/file"),
        (f"hf://user/{'a' * 97}/model.safetensors", "hf://user/repo/file"),
        ("hf://user/repo/../../etc/passwd", "hf://user/repo/file"),
        ("moco_converted_by_moco", "moco_converted_by_moco"),
    ),
    *rows(
        f"{SMALL} embedded DATASETS.VOC_DIR {{tmp}}/voc MODEL.WEIGHTS",
        ("moco_v2_r50_800", "moco_v2_r50_800ep"),
        code=3,
    ),
    *rows(
        f"{SMALL} embedded DATASETS.VOC_DIR {{tmp}}/voc MODEL.WEIGHTS moco_v2_r50_800ep",
        ("", "MOCO_TRANSFER_OFFLINE"),
        env={"MOCO_TRANSFER_OFFLINE": "1"},
    ),
    *rows(
        f"{SMALL} embedded DATASETS.VOC_DIR {{tmp}}/voc MODEL.WEIGHTS",
        ("timm://resnet50.tv_in1", "timm://resnet50.tv_in1: .*resnet5"),
        ("timm://resnet51", "timm://resnet51: .*resnet5"),
    ),
    # Trained models.
    *rows(
        f"{SMALL} embedded DATASETS.VOC_DIR {{tmp}}/voc --eval-only MODEL.WEIGHTS x.pth",
        (saved("x.pth", {}), r"INPUT\.FORMAT, MODEL\.PIXEL_MEAN"),
    ),
    *rows(
        f"{EVALUATION} MODEL.WEIGHTS x.pth",
        *(
            (saved("x.pth", content), "not a trained detector")
            for content in ([1, 2], {}, {"model": {"a": "text"}})
        ),
        (saved("x.pth", {"a": Unknown()}), r"not a trained detector; .*default_rng"),
        code=3,
        leaves=(r"run/inference/.*", "run/log.txt"),  # the record of a run that failed
    ),
    *rows(
        f"{EVALUATION} MODEL.WEIGHTS r18.pth",
        ("", "does not fit this detector"),
        leaves=(r"run/inference/.*", "run/log.txt"),  # the record of a run that failed
    ),
]
DETECTION: list[Row] = [*KEYS_AND_FILES, *PLACES, *TORCHRUN, *WEIGHTS]
