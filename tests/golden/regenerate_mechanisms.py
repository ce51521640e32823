"""Losses of 20 seeded steps of each mechanism, in float64 on the CPU.

    python -m tests.golden.regenerate_mechanisms NAME

writes NAME_20_steps.json next to this file (queue, end_to_end, memory_bank, memory_bank_nce,
moco_v3, moco_v3_vit). Run it only if a change of the numbers is intended, and commit it alone.
"""

import json
import sys
from pathlib import Path

import torch
from fvcore.common.config import CfgNode

from moco.engine.solver import LearningRate, Length
from moco.modeling.archs import EncoderSpec, ViTSpec
from moco.modeling.encoder import build_encoder
from moco.modeling.mechanisms.base import Mechanism
from moco.modeling.mechanisms.end_to_end import EndToEnd
from moco.modeling.mechanisms.memory_bank import MemoryBank
from moco.modeling.mechanisms.moco_v3 import MoCoV3
from moco.modeling.mechanisms.momentum_queue import MomentumQueue
from moco.modeling.shuffle_bn import shuffle_plan
from tests.oracles.training import train_step

FOLDER = Path(__file__).parent
NAMES = ("queue", "end_to_end", "memory_bank", "memory_bank_nce", "moco_v3", "moco_v3_vit")
STEPS, N, K, G, SCENES = 20, 12, 40, 3, 24  # 12 does not divide 40


def golden(name: str) -> Path:
    """Return the file of the stored curve."""
    return FOLDER / f"{name}_20_steps.json"


def build(name: str) -> Mechanism:
    """Build a mechanism with a narrow ResNet-10, or with the smallest ViT."""
    if name.startswith("moco_v3"):
        vit = name.endswith("vit")
        spec = ViTSpec("vit_micro", 16) if vit else EncoderSpec("resnet10", "stride2", 0.125)
        encoder = build_encoder(spec, 8, mlp=False)
        return MoCoV3(encoder, 8, 16, 0.9, 0.2, 3 if vit else 2, predictor_norm=vit)
    encoder = build_encoder(EncoderSpec("resnet10", "stride2", 0.125), 8, mlp=True, bn_splits=G)
    if name == "queue":
        return MomentumQueue(encoder, dim=8, K=K, m=0.9, T=0.2)
    if name == "end_to_end":
        return EndToEnd(encoder, T=0.2)
    loss, negatives = ("nce", 6) if name.endswith("nce") else ("info_nce", K)
    return MemoryBank(encoder, 8, SCENES, K=negatives, momentum=0.5, T=0.2, loss=loss)


def losses(name: str) -> list[float]:
    """Return images that can be learned: each is one of 24 fixed noises under fresh noise."""
    torch.manual_seed(0)
    # Drawn in float64, too: without AVX2, torch draws float32 numbers that are off by 1e-6, which
    # 20 steps of end_to_end make 20%.
    torch.set_default_dtype(torch.float64)
    try:
        model = build(name)
    finally:
        torch.set_default_dtype(torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=1e-4)
    base = {"memory_bank_nce": 0.0005, "moco_v3_vit": 0.01}.get(name, 0.1)
    keys = {"BASE_LR": base, "SCHEDULE": "cosine", "LR_UPDATE": "iter", "WARMUP_ITERS": 4}
    rate = LearningRate(CfgNode(keys), Length(STEPS, steps_per_epoch=5))
    scenes = torch.randn(SCENES, 3, 16, 16, dtype=torch.float64)
    curve = []
    for step in range(STEPS):
        images = torch.randperm(SCENES)[:N]
        chosen = scenes[images]
        x_q, x_k = (chosen + 0.3 * torch.randn_like(chosen) for _ in range(2))
        optimizer.param_groups[0]["lr"] = rate(step)
        plan = shuffle_plan(N, G, seed=0, step=step) if model.needs_key_view else None
        x_k = x_k if model.needs_key_view else x_k[:0]
        out = train_step(
            model, optimizer, x_q, x_k, plan, images.tolist(), step, progress=(step + 1) / STEPS
        )
        curve.append(out.loss.item())
    return curve


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen_name in sys.argv[1:]:
        golden(chosen_name).write_text(json.dumps(losses(chosen_name), indent=1) + "\n")
        print(f"wrote {golden(chosen_name)}")
