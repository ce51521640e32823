"""Small C4 detectors, weights and pictures that are the same on every machine.

Used by the parity tests (against the real Detectron2), by the stored references and by whoever
regenerates them. Nothing here comes from the engine under test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from detection.task import default_task

# Anchors and top-k sizes that fit pictures of about 200 px.
COMMON: dict[str, Any] = {
    "MODEL.DEVICE": "cpu",
    "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
    "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.RESNETS.NORM": "BN",
    "MODEL.RESNETS.STRIDE_IN_1X1": False,
    "MODEL.ANCHOR_GENERATOR.SIZES": [[16, 32, 64, 128]],
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 600,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 200,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 300,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 60,
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 64,
    "MODEL.ROI_HEADS.NAME": "Res5ROIHeadsExtraNorm",
    "MODEL.ROI_HEADS.NUM_CLASSES": 5,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 32,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.15,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 7,
    "INPUT.FORMAT": "RGB",
    "SOLVER.BASE_LR": 0.005,
    "SOLVER.MOMENTUM": 0.9,
    "SOLVER.WEIGHT_DECAY": 1e-3,
}
# A quarter of the channels of a ResNet-50 and of a ResNet-18.
NARROW_R50 = {
    **COMMON,
    "MODEL.RESNETS.DEPTH": 50,
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 16,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 16,
}
FULL_R50 = {**COMMON, "MODEL.RESNETS.DEPTH": 50}
R18 = {
    **COMMON,
    "MODEL.RESNETS.DEPTH": 18,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
}


def task(keys: dict[str, Any]) -> CfgNode:
    """The embedded engine's configuration."""
    return merge(default_task(), keys)


def merge(cfg: CfgNode, keys: dict[str, Any]) -> CfgNode:
    """A frozen copy of `cfg` with dotted keys set."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.merge_from_list([item for pair in keys.items() for item in pair])
    cfg.freeze()
    return cfg


def fill(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Weights for every tensor of a state dict, from NumPy's legacy generator (fixed for ever).

    Scaled so that activations stay of order one, also with these statistics in batch norm.
    """
    rng = np.random.RandomState(seed)
    filled = {}
    for name in sorted(state):
        shape, leaf = tuple(state[name].shape), name.rsplit(".", 1)[-1]
        if leaf == "num_batches_tracked":
            filled[name] = torch.zeros_like(state[name])
            continue
        if leaf in ("running_var",) or (leaf == "weight" and len(shape) == 1):
            value = rng.uniform(0.5, 1.5, shape)
            if ends_a_branch(name, state):
                value *= 0.3
        elif len(shape) <= 1:
            value = rng.standard_normal(shape) * 0.1
        else:
            value = rng.standard_normal(shape) * (2.0 / np.prod(shape[1:])) ** 0.5
            heads = ("cls_score", "bbox_pred", "objectness_logits", "anchor_deltas")
            value *= dict(zip(heads, (0.1, 0.2, 0.3, 0.05), strict=True)).get(
                name.split(".")[-2], 1.0
            )
        filled[name] = torch.as_tensor(value, dtype=torch.float32)
    return filled


def ends_a_branch(name: str, state: dict[str, Tensor]) -> bool:
    """Whether this is the scale of the last batch norm before a residual sum."""
    block, _, conv = name.removesuffix(".norm.weight").rpartition(".")
    last = "conv3" if f"{block}.conv3.weight" in state else "conv2"
    return name.endswith(".norm.weight") and conv == last


def pictures(sizes: list[tuple[int, int]], seed: int, num_classes: int = 5) -> list[dict[str, Any]]:
    """Noise with bright rectangles: training samples of the given (height, width) sizes."""
    rng = np.random.RandomState(seed)
    samples = []
    for number, (height, width) in enumerate(sizes):
        image = rng.randint(0, 120, (3, height, width))
        boxes, classes = [], []
        for _ in range(1 + number % 4):
            w, h = rng.randint(20, width // 2), rng.randint(20, height // 2)
            x, y = rng.randint(0, width - w), rng.randint(0, height - h)
            kind = int(rng.randint(num_classes))
            image[:, y : y + h, x : x + w] = rng.randint(100, 255, (3, 1, 1)) - 8 * kind
            boxes.append([x, y, x + w, y + h])
            classes.append(kind)
        samples.append(
            {
                "image": torch.as_tensor(image.clip(0, 255), dtype=torch.uint8),
                "boxes": torch.tensor(boxes, dtype=torch.float32),
                "classes": torch.tensor(classes),
                "height": height * 2 + 1,
                "width": width * 2 - 1,
                "image_id": str(number),
                "file_name": f"{number}.jpg",
            }
        )
    return samples


def without_objects(sample: dict[str, Any]) -> dict[str, Any]:
    """The same picture without any annotation."""
    return {**sample, "boxes": torch.zeros(0, 4), "classes": torch.zeros(0, dtype=torch.int64)}


def summary(
    model: nn.Module,
    losses: Callable[[list[dict[str, Any]]], dict[str, Tensor]],
    detections: Callable[[list[dict[str, Any]]], list[dict[str, Tensor]]],
) -> dict[str, Any]:
    """A few numbers that a detector with the weights of `fill` cannot have by accident.

    `losses` and `detections` run the model in training and evaluation mode.
    """
    samples = pictures([(141, 123), (110, 160)], seed=8)
    model.eval()
    pixels = (samples[0]["image"][None].float() - 110.0) / 58.0
    with torch.no_grad():
        res4 = model.get_submodule("backbone")(pixels)["res4"]
    found = detections(samples[:1])[0]
    model.train()
    torch.manual_seed(0)
    values = losses(samples)
    sum(values.values()).backward()  # type: ignore[union-attr]
    gradients = {
        name: parameter.grad.norm().item()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.dim() > 1
    }
    some = sorted(gradients)[:: max(len(gradients) // 12, 1)]
    statistics = {
        name: value.norm().item()
        for name, value in model.state_dict().items()
        if ".0.conv1.norm.running" in name
    }
    return {
        "features": {
            "shape": list(res4.shape),
            "norm": res4.norm().item(),
            "sample": res4.flatten()[:: res4.numel() // 16][:16].tolist(),
        },
        "losses": {name: value.item() for name, value in values.items()},
        "gradient_norm": sum(value**2 for value in gradients.values()) ** 0.5,
        "gradients": {name: gradients[name] for name in some},
        "statistics": statistics,
        "detections": {name: value[:8].tolist() for name, value in found.items()},
    }
