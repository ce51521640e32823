"""The registry of mechanisms: a mechanism from outside the project trains by its name alone."""

import pytest
import torch
from torch import nn

from moco.engine.checkpoint import list_checkpoints, load_checkpoint
from moco.modeling.loss import info_nce
from moco.modeling.mechanisms import MECHANISMS
from moco.modeling.mechanisms.base import Dictionary, Mechanism, StepOutput
from tests.moco.commands import pretrain as main


class Prototypes(Mechanism):
    """Fixed prototypes as dictionary; the index of an image determines its positive."""

    needs_key_view = False

    def __init__(self, encoder, T, prototypes):
        super().__init__(encoder, T)
        self.register_buffer("prototypes", nn.functional.normalize(prototypes, dim=1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def dictionary(self, batch):
        return Dictionary(self.prototypes[batch.images % len(self.prototypes)], self.prototypes.T)

    def forward(self, x_q, dictionary):
        q = self.queries(x_q)
        loss, accuracy = info_nce(q, dictionary.positive, dictionary.negatives, self.T)
        return StepOutput(loss, accuracy, q.detach())

    def update(self, passes):
        self.steps += 1


@pytest.fixture
def toy(register):
    def prototypes(cfg, encoder, num_images):
        assert num_images > 0
        return Prototypes(encoder, cfg.MOCO.T, torch.randn(cfg.MOCO.K, cfg.MOCO.DIM))

    register(MECHANISMS, prototypes)


def test_a_mechanism_from_outside_trains(toy, images, tiny, tmp_path):
    keys = {"MOCO__MECHANISM": "prototypes", "SOLVER__MAX_ITERS": 2}
    main(tiny(DATA__ROOT=images, OUTPUT_DIR=tmp_path / "run", **keys))
    state = load_checkpoint(list_checkpoints(tmp_path / "run")[-1])["state_dict"]
    assert state["module.steps"] == 2
    assert not any(name.startswith("module.encoder_k") for name in state)
