"""Write the stored references of the embedded engine from Detectron2's own model.

    python -m tests.golden.regenerate_embedded

It needs Detectron2. Run it only if the images or weights of tests/oracles/tiny_detector.py change,
and commit the references alone.
"""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from detection.train_net import main as train
from moco.common.files import load_torch
from tests.oracles import tiny_detector as tiny
from tests.oracles.small_tasks import CONFIGS, SMALL_VOC, narrow_file
from tests.oracles.tiny_voc import write_voc

FOLDER = Path(__file__).parent / "embedded"
NETWORKS = {
    "r50": tiny.NARROW_R50,
    "r18": tiny.R18,
    "r50_c4_mask": tiny.C4_MASK,
    "r50_dilated_c5": tiny.DILATED_C5,
    "r50_fpn_mask": tiny.FPN_MASK,
    "r50_fpn_keypoints": tiny.KEYPOINTS,
    "r50_fcn16s": tiny.FCN,
}


TENSORS = (
    "backbone.stem.conv1.weight",
    "backbone.res3.0.conv1.norm.running_var",
    "backbone.res4.1.conv2.weight",
    "proposal_generator.rpn_head.conv.weight",
    "roi_heads.box_predictor.cls_score.weight",
)


def two_processes(engine: str, folder: Path) -> dict[str, Any]:
    """Return the last losses of a short run of two processes, and the changes of some tensors."""
    keys = {
        **SMALL_VOC,
        "DATASETS.VOC_DIR": write_voc(folder / "shapes", {"trainval": 6, "test": 3}),
        "MODEL.WEIGHTS": narrow_file(18, folder),
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,
        "DATALOADER.NUM_WORKERS": 0,
        "OUTPUT_DIR": folder / "run",
    }
    config = CONFIGS / "voc" / "faster_rcnn_R_18_C4_small.yaml"
    argv = ["--config-file", str(config), "--engine", engine, "--num-gpus", "2"]
    assert train([*argv, *(str(item) for pair in keys.items() for item in pair)]) == 0
    start = load_torch(keys["MODEL.WEIGHTS"])["model"]
    end = load_torch(folder / "run" / "model_final.pth")["model"]
    zero = torch.zeros(())
    values: dict[str, float] = {}
    for line in (folder / "run" / "metrics.json").read_text().splitlines():
        values |= json.loads(line)
    return {
        "losses": {name: x for name, x in sorted(values.items()) if "loss" in name},
        "moved": {name: float((end[name] - start.get(name, zero)).norm()) for name in TENSORS},
    }


def main() -> None:
    from tests.oracles import detectron2_engine as d2

    torch.set_num_threads(1)
    for name, keys in NETWORKS.items():
        model = d2.model(d2.config(keys))
        model.load_state_dict(tiny.fill(model.state_dict(), seed=2))
        numbers = tiny.summary(
            model,
            lambda samples, model=model: d2.losses(model, samples),
            lambda samples, model=model: d2.detections(model, samples),
            keys,
        )
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(numbers, indent=1) + "\n")
        print(f"{path}: {path.stat().st_size} bytes")
    os.environ["OMP_NUM_THREADS"] = "1"
    with TemporaryDirectory() as scratch:
        numbers = two_processes("detectron2", Path(scratch))
    (FOLDER / "two_processes.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
