"""Small detectors, weights and images that are the same on every machine.

Used by the parity tests (against the real Detectron2) and for the stored references, which
`tests/golden/regenerate_embedded.py` writes. Nothing here comes from the engine under test.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from detection.config.task import default_task

# Anchors and top-k sizes that fit images of about 200 px.
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
R18 = {**COMMON, "MODEL.RESNETS.DEPTH": 18, "MODEL.RESNETS.RES2_OUT_CHANNELS": 64}
NARROW_R18 = {**R18, "MODEL.RESNETS.STEM_OUT_CHANNELS": 16, "MODEL.RESNETS.RES2_OUT_CHANNELS": 16}
C4_MASK = {**NARROW_R50, "MODEL.MASK_ON": True, "MODEL.ROI_MASK_HEAD.CONV_DIM": 12}
# Heads of their own: boxes from two fully-connected layers.
_STANDARD: dict[str, Any] = {
    **NARROW_R50,
    "MODEL.ROI_HEADS.NAME": "StandardROIHeads",
    "MODEL.ROI_BOX_HEAD.NAME": "FastRCNNConvFCHead",
    "MODEL.ROI_BOX_HEAD.NUM_FC": 2,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 24,
}
DILATED_C5 = {
    **_STANDARD,
    "MODEL.BACKBONE.NAME": "build_resnet_dilated_c5_backbone",
    "MODEL.RESNETS.OUT_FEATURES": ["res5"],
    "MODEL.RESNETS.RES5_DILATION": 2,
    "MODEL.RPN.IN_FEATURES": ["c5"],
    "MODEL.ROI_HEADS.IN_FEATURES": ["c5"],
}
FPN = {
    **_STANDARD,
    "MODEL.BACKBONE.NAME": "build_resnet_fpn_backbone",
    "MODEL.RESNETS.OUT_FEATURES": ["res2", "res3", "res4", "res5"],
    "MODEL.FPN.IN_FEATURES": ["res2", "res3", "res4", "res5"],
    "MODEL.FPN.NORM": "BN",
    "MODEL.FPN.OUT_CHANNELS": 16,
    "MODEL.ANCHOR_GENERATOR.SIZES": [[8], [16], [32], [64], [128]],
    "MODEL.RPN.IN_FEATURES": ["p2", "p3", "p4", "p5", "p6"],
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 100,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 60,
    "MODEL.ROI_HEADS.IN_FEATURES": ["p2", "p3", "p4", "p5"],
}
FPN_MASK = {
    **FPN,
    "MODEL.MASK_ON": True,
    "MODEL.ROI_MASK_HEAD.NUM_CONV": 4,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 12,
    "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION": 6,
}
CASCADE = {
    **FPN_MASK,
    "MODEL.ROI_HEADS.NAME": "CascadeROIHeads",
    "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG": True,
}
RETINANET = {
    **FPN,
    "MODEL.META_ARCHITECTURE": "RetinaNet",
    "MODEL.BACKBONE.NAME": "build_retinanet_resnet_fpn_backbone",
    "MODEL.RESNETS.OUT_FEATURES": ["res3", "res4", "res5"],
    "MODEL.FPN.IN_FEATURES": ["res3", "res4", "res5"],
    "MODEL.ANCHOR_GENERATOR.SIZES": [[16, 20], [32, 40], [64, 80], [128, 160], [256, 320]],
    "MODEL.RETINANET.NUM_CLASSES": 5,
    "MODEL.RETINANET.NUM_CONVS": 2,
    "MODEL.RETINANET.SCORE_THRESH_TEST": 0.3,
}
KEYPOINTS = {
    **FPN,
    "MODEL.KEYPOINT_ON": True,
    "MODEL.ROI_HEADS.NUM_CLASSES": 1,
    "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA": 0.5,
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": (12, 12),
    "MODEL.ROI_KEYPOINT_HEAD.POOLER_RESOLUTION": 5,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.05,
}
# Windows that do not divide the maps, and one block with global attention.
VIT_SFP = {
    **FPN,
    "MODEL.BACKBONE.NAME": "build_vit_sfp_backbone",
    "MODEL.FPN.NORM": "LN",
    "MODEL.VIT.EMBED_DIM": 32,
    "MODEL.VIT.DEPTH": 4,
    "MODEL.VIT.NUM_HEADS": 4,
    "MODEL.VIT.MLP_DIM": 72,
    "MODEL.VIT.PRETRAIN_IMAGE_SIZE": 96,
    "MODEL.VIT.WINDOW_SIZE": 5,
    "MODEL.VIT.GLOBAL_BLOCKS": [2],
    "MODEL.VIT.DROP_PATH": 0.4,
}
# Rotary positions, with tokens in every block.
DINO = {
    **VIT_SFP,
    "MODEL.VIT.ROTARY": True,
    "MODEL.VIT.TOKENS": 3,
    "MODEL.VIT.KEEP_TOKENS": True,
    "MODEL.VIT.REL_POS": False,
    "MODEL.VIT.LAYER_SCALE": True,
    "MODEL.VIT.SWIGLU": True,
    "MODEL.VIT.ROPE_RESCALE": 2.0,
}
VIT_FPN = {
    **VIT_SFP,
    "MODEL.BACKBONE.NAME": "build_vit_fpn_backbone",
    "MODEL.FPN.NORM": "BN",
    "MODEL.MASK_ON": True,
    "MODEL.ROI_MASK_HEAD.NUM_CONV": 1,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 12,
    "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION": 6,
}
FCN = {
    **NARROW_R50,
    "MODEL.META_ARCHITECTURE": "SemanticSegmentor",
    "MODEL.RESNETS.OUT_FEATURES": ["res5"],
    "MODEL.RESNETS.RES5_DILATION": 2,
    "MODEL.SEM_SEG_HEAD.NAME": "FCN16sHead",
    "MODEL.SEM_SEG_HEAD.IN_FEATURES": ["res5"],
    "MODEL.SEM_SEG_HEAD.NUM_CLASSES": 5,
    "MODEL.SEM_SEG_HEAD.CONVS_DIM": 16,
    "MODEL.SEM_SEG_HEAD.NORM": "BN",
}
# Plain vision transformers, frozen and not, and a ResNet, under the heads of ADE20k's recipes.
_SEGMENTER = {
    "MODEL.META_ARCHITECTURE": "SemanticSegmentor",
    "MODEL.BACKBONE.NAME": "build_vit_backbone",
    "MODEL.SEM_SEG_HEAD.NUM_CLASSES": 5,
}
VIT_LINEAR = {
    **VIT_SFP,
    **_SEGMENTER,
    "MODEL.SEM_SEG_HEAD.NAME": "LinearHead",
    "MODEL.SEM_SEG_HEAD.IN_FEATURES": ["last_feat"],
    "MODEL.SEM_SEG_HEAD.FEATURE_NORM": True,
    "MODEL.SEM_SEG_HEAD.NORM": "",
}
VIT_LINEAR_FROZEN = {
    **VIT_LINEAR,
    "MODEL.BACKBONE.FREEZE_AT": -1,
    "MODEL.VIT.PATCH_SIZE": 14,
    "MODEL.VIT.PRETRAIN_IMAGE_SIZE": 98,
    "MODEL.VIT.DROP_PATH": 0.0,
    "MODEL.SEM_SEG_HEAD.IN_FEATURES": ["block1", "block2"],
    "MODEL.SEM_SEG_HEAD.NORM": "BN",
    "MODEL.SEM_SEG_HEAD.DROPOUT": 0.1,
}
VIT_UPERNET = {
    **VIT_SFP,
    **_SEGMENTER,
    "MODEL.SEM_SEG_HEAD.NAME": "UPerHead",
    "MODEL.SEM_SEG_HEAD.IN_FEATURES": ["block0", "block1", "block2", "block3"],
    "MODEL.SEM_SEG_HEAD.CONVS_DIM": 64,  # more than one channel per group
    "MODEL.SEM_SEG_HEAD.NORM": "GN",
    "MODEL.SEM_SEG_HEAD.DROPOUT": 0.1,
}
R50_UPERNET = {
    **FCN,
    "MODEL.RESNETS.OUT_FEATURES": ["res2", "res3", "res4", "res5"],
    "MODEL.RESNETS.RES5_DILATION": 1,
    "MODEL.SEM_SEG_HEAD.NAME": "UPerHead",
    "MODEL.SEM_SEG_HEAD.IN_FEATURES": ["res2", "res3", "res4", "res5"],
    "MODEL.SEM_SEG_HEAD.CONVS_DIM": 64,  # more than one channel per group
    "MODEL.SEM_SEG_HEAD.NORM": "GN",
}


def upernets(**families: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys of UPerNet by test: on the networks of families, without an FPN."""
    return {
        f"{family}-upernet": {
            **R50_UPERNET,
            **{k: value for k, value in keys.items() if k.startswith(f"MODEL.{family.upper()}.")},
            "MODEL.BACKBONE.NAME": f"build_{family}_backbone",
        }
        for family, keys in families.items()
    }


FIRST_NORMS = ".0.conv1.norm.running"
# Scale of the weights of what predicts.
PREDICTORS = {"cls_score": 0.1, "bbox_pred": 0.2, "objectness_logits": 0.3, "anchor_deltas": 0.05}


def task(keys: dict[str, Any]) -> CfgNode:
    """Return the embedded engine's config with these keys."""
    return merge(default_task(), keys)


def assert_same(theirs: Mapping[str, Tensor | None], ours: Mapping[str, Tensor | None]) -> None:
    assert set(theirs) == set(ours)
    different = [
        name
        for name, value in theirs.items()
        if not (ours[name] is None if value is None else torch.equal(value, ours[name]))
    ]
    assert not different, different


def merge(cfg: CfgNode, keys: dict[str, Any]) -> CfgNode:
    """Return a frozen copy of `cfg` with dotted keys set."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.merge_from_list([item for pair in keys.items() for item in pair])
    cfg.freeze()
    return cfg


def fill(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return values for all tensors of a state dict, from NumPy's legacy generator.

    They are scaled so that activations are of order one, also with these batch-norm statistics.
    """
    rng = np.random.RandomState(seed)
    filled = {}
    for name in sorted(state):
        shape, leaf = tuple(state[name].shape), name.rsplit(".", 1)[-1]
        if leaf == "num_batches_tracked":
            filled[name] = torch.zeros_like(state[name])
            continue
        if leaf == "running_var" or (leaf == "weight" and len(shape) == 1):
            value = rng.uniform(0.5, 1.5, shape)
            if ends_a_branch(name, state):
                value *= 0.3
        elif len(shape) <= 1:
            value = rng.standard_normal(shape) * 0.1
        else:
            value = rng.standard_normal(shape) * (2.0 / np.prod(shape[1:])) ** 0.5
            value *= PREDICTORS.get(name.split(".")[-2], 1.0)
        filled[name] = torch.as_tensor(value, dtype=torch.float32)
    return filled


def ends_a_branch(name: str, state: dict[str, Tensor]) -> bool:
    """Return whether this is the scale of the last batch norm before a residual sum."""
    block, _, conv = name.removesuffix(".norm.weight").rpartition(".")
    last = "conv3" if f"{block}.conv3.weight" in state else "conv2"
    return name.endswith(".norm.weight") and conv == last


def images(sizes: list[tuple[int, int]], seed: int, num_classes: int = 5) -> list[dict[str, Any]]:
    """Make training samples of (height, width) sizes: noise with bright rectangles."""
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
    """Remove the annotations of a sample."""
    return {**sample, "boxes": torch.zeros(0, 4), "classes": torch.zeros(0, dtype=torch.int64)}


def with_shapes(sample: dict[str, Any], num_keypoints: int = 17) -> dict[str, Any]:
    """Add polygons (every third of two parts) and keypoints (some hidden), also beyond the box."""
    rng = np.random.RandomState(len(sample["boxes"]))
    masks, keypoints = [], []
    for number, (x0, y0, x1, y1) in enumerate(sample["boxes"].double().tolist()):
        size = np.array([x1 - x0, y1 - y0])
        parts = []
        for _ in range(1 + (number % 3 == 0)):
            angles = np.sort(rng.uniform(0, 2 * np.pi, 7))
            corners = np.stack([np.cos(angles), np.sin(angles)], axis=1) * rng.uniform(0.2, 0.6)
            parts.append(((corners + rng.uniform(0.4, 0.6, 2)) * size + (x0, y0)).ravel())
        masks.append(parts)
        points = rng.uniform(-0.1, 1.1, (num_keypoints, 2)) * size + (x0, y0)
        points[0] = x1, y1  # on the border
        visibility = rng.randint(0, 3, (num_keypoints, 1))
        visibility[0] = 2
        keypoints.append(np.concatenate([points, visibility], axis=1) * (visibility > 0))
    points = np.array(keypoints).reshape(-1, num_keypoints, 3)
    return {**sample, "masks": masks, "keypoints": torch.as_tensor(points, dtype=torch.float32)}


def with_bitmaps(sample: dict[str, Any]) -> dict[str, Any]:
    """Replace the masks by bitmaps (G, H, W): ellipses in the objects' boxes."""
    height, width = sample["image"].shape[-2:]
    y, x = np.mgrid[:height, :width] + 0.5
    masks = [
        ((x - x0) / (x1 - x0) - 0.5) ** 2 + ((y - y0) / (y1 - y0) - 0.5) ** 2 < 0.2
        for x0, y0, x1, y1 in sample["boxes"].tolist()
    ]
    return {**sample, "masks": torch.as_tensor(np.array(masks).reshape(-1, height, width))}


def with_labels(sample: dict[str, Any], num_classes: int = 5) -> dict[str, Any]:
    """Add labels (H, W): stripes, and a part that is ignored."""
    height, width = sample["image"].shape[-2:]
    y, x = np.mgrid[:height, :width]
    labels = np.where((y < 20) & (x < 30), 255, (x // 11 + y // 17) % num_classes)
    return {**sample, "sem_seg": torch.as_tensor(labels, dtype=torch.int64)}


def one_pixel(sample: dict[str, Any]) -> dict[str, Any]:
    """Replace the objects of a sample by one of a single pixel."""
    box = torch.tensor([[37.0, 41.0, 38.0, 42.0]])
    return {**sample, "boxes": box, "classes": torch.zeros(1, dtype=torch.int64)}


def summary(
    model: nn.Module,
    losses: Callable[[list[dict[str, Any]]], dict[str, Tensor]],
    detections: Callable[[list[dict[str, Any]]], list[dict[str, Tensor]]],
    keys: dict[str, Any],
) -> dict[str, Any]:
    """Summarize a model with the weights of `fill` in numbers that do not agree by accident.

    `losses` and `detections` run the model in training and evaluation mode; `keys` built it.
    """
    feature = keys.get("MODEL.RPN.IN_FEATURES", keys.get("MODEL.SEM_SEG_HEAD.IN_FEATURES"))
    feature = feature[0] if feature else "res4"
    num_classes = keys["MODEL.ROI_HEADS.NUM_CLASSES"]
    samples = images([(141, 123), (110, 160)], seed=8, num_classes=num_classes)
    samples = [with_labels(with_shapes(sample)) for sample in samples]
    model.eval()
    pixels = (samples[0]["image"][None].float() - 110.0) / 58.0
    # An FPN wants whole cells, and its finest map is the one that everything has gone into.
    pixels = torch.nn.functional.pad(pixels, (0, 5, 0, 19)) if "p2" in feature else pixels
    with torch.no_grad():
        features = model.get_submodule("backbone")(pixels)[feature]
    found = _short(detections(samples[:1])[0])
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
    norms = {n: x.norm().item() for n, x in model.state_dict().items() if FIRST_NORMS in n}
    return {
        "features": {
            "shape": list(features.shape),
            "norm": features.norm().item(),
            "sample": features.flatten()[:: features.numel() // 16][:16].tolist(),
        },
        "losses": {name: value.item() for name, value in values.items()},
        "gradient_norm": sum(value**2 for value in gradients.values()) ** 0.5,
        "gradients": {name: gradients[name] for name in some},
        "statistics": norms,
        "detections": found,
    }


def _short(answer: dict[str, Tensor]) -> dict[str, Any]:
    """Return eight of an image's detections, with areas of masks and a few scores of pixels."""
    shorter: dict[str, Callable[[Tensor], Tensor]] = {
        "masks": lambda x: x.sum(dim=(1, 2)),
        "keypoints": lambda x: x[:, ::4],
        "sem_seg": lambda x: x[:, ::70, ::70],
    }
    return {name: shorter.get(name, Tensor.clone)(x[:8]).tolist() for name, x in answer.items()}
