"""Losses of 20 seeded steps of the momentum queue, in float64 on the CPU.

    python -m tests.golden.regenerate_queue

writes queue_20_steps.json beside this file. To be run only when a change of the numbers is meant,
and committed on its own.
"""

import json
from pathlib import Path

import torch

from moco.encoder import EncoderSpec, build_encoder
from moco.mechanisms.momentum_queue import MomentumQueue
from moco.schedule import LearningRate
from moco.shuffle_bn import shuffle_plan

GOLDEN = Path(__file__).parent / "queue_20_steps.json"
STEPS, N, K, G = 20, 12, 40, 3  # 12 does not divide 40


def losses() -> list[float]:
    """Each picture is one of 24 fixed noises under fresh noise: there is something to learn."""
    torch.manual_seed(0)
    encoder = build_encoder(EncoderSpec("resnet10", "stride2", 0.125), 8, mlp=True, bn_splits=G)
    model = MomentumQueue(encoder, dim=8, K=K, m=0.9, T=0.2).double()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    rate = LearningRate(0.1, "cosine", STEPS, steps_per_epoch=5, per_epoch=False, warmup_iters=4)
    scenes = torch.randn(24, 3, 16, 16, dtype=torch.float64)
    curve = []
    for step in range(STEPS):
        chosen = scenes[torch.randperm(24)[:N]]
        x_q, x_k = (chosen + 0.3 * torch.randn_like(chosen) for _ in range(2))
        optimizer.param_groups[0]["lr"] = rate(step)
        out = model(x_q, x_k, shuffle_plan(N, G, seed=0, step=step))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        model.update(out.keys)
        curve.append(out.loss.item())
    return curve


if __name__ == "__main__":
    torch.set_num_threads(1)
    GOLDEN.write_text(json.dumps(losses(), indent=1) + "\n")
    print(f"wrote {GOLDEN}")
