import math

import pytest
import torch

from moco.loss import contrastive_logits, info_nce, pretext_accuracy


def test_logits_by_hand():
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    k = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    queue = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 0.0]])  # (C, K)
    logits = contrastive_logits(q, k, queue, T=0.5)
    assert logits.tolist() == [[pytest.approx(1.2), 2, 0, -2], [2, 0, 2, 0]]


def test_loss_by_hand():
    logits = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2))) / 2
    assert info_nce(logits).item() == pytest.approx(expected)


def test_uniform_logits_give_log_of_the_number_of_keys():
    assert info_nce(torch.zeros(3, 65)).item() == pytest.approx(math.log(65))


def test_accuracy_is_the_share_of_queries_nearest_to_their_key():
    logits = torch.tensor([[3.0, 1.0], [0.0, 2.0], [5.0, 4.0], [9.0, 1.0]])
    assert pretext_accuracy(logits).item() == 75
