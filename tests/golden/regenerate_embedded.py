"""Write the stored references of the embedded engine from Detectron2's own model.

    python -m tests.golden.regenerate_embedded

Needs Detectron2. To be run only when the pictures or weights of tests/oracles/tiny_detector.py
change, and committed alone.
"""

import json
from pathlib import Path

import torch

from tests.oracles import tiny_detector as tiny

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


if __name__ == "__main__":
    main()
