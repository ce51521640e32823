"""Reference implementation: a plain transcription of the official code (facebookresearch/moco).

The loader applies torchvision's transforms to one PIL image after the other. The step is in float32
and the default memory layout, with einsum logits, a copy of the queue, cross-entropy, and a Python
loop for the momentum update. The tests compare the step with this project's.

N batch, C dimension, K length of the queue.
"""

import copy
import random

import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def transform(kind: str, crop_px: int = 224) -> T.Compose:
    """Return the augmentation `v1` or `v2` (--aug-plus)."""
    crop = T.RandomResizedCrop(crop_px, scale=(0.2, 1.0))
    gray = T.RandomGrayscale(p=0.2)
    if kind == "v1":
        colors = [gray, T.ColorJitter(0.4, 0.4, 0.4, 0.4)]
    else:
        jitter = T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8)
        colors = [jitter, gray, T.RandomApply([T.Lambda(blur)], p=0.5)]
    return T.Compose(
        [crop, *colors, T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)]
    )


def blur(image: Image.Image) -> Image.Image:
    """Blur with a random radius."""
    return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(0.1, 2.0)))


def loader(root: str, kind: str, batch: int) -> "DataLoader[tuple[list[Tensor], Tensor]]":
    """Return a loader of two views (N, 3, 224, 224) without worker processes."""
    once = transform(kind)
    dataset = ImageFolder(root, lambda image: [once(image), once(image)])
    return DataLoader(dataset, batch_size=batch)


def loss_and_accuracy(
    q: Tensor, k: Tensor, queue: Tensor, T: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss, and the top-1 and top-5 accuracy in percent of the positives."""
    positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
    negative = torch.einsum("nc,ck->nk", [q, queue.clone().detach()])
    logits = torch.cat([positive, negative], dim=1)  # (N, 1 + K)
    logits /= T
    labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
    loss = nn.CrossEntropyLoss()(logits, labels)
    with torch.no_grad():
        _, nearest = logits.topk(min(5, logits.shape[1]), 1, True, True)
        correct = nearest.t().eq(labels.view(1, -1))
        top1, top5 = (correct[:k].reshape(-1).float().sum() * 100 / len(q) for k in (1, 5))
    return loss, top1, top5


@torch.no_grad()
def momentum_update(encoder_k: nn.Module, encoder_q: nn.Module, m: float) -> None:
    """Update the key encoder parameter by parameter, with a new tensor for each."""
    for q, k in zip(encoder_q.parameters(), encoder_k.parameters(), strict=True):
        k.data = k.data * m + q.data * (1.0 - m)


class Step:
    """Training step of one process, with the momentum update at its start.

    Args:
        encoder: Network from images to (N, C), which becomes the query encoder.
        queue: Keys (C, K).
        m: Momentum of the key encoder.
        T: Temperature.
        lr: Learning rate.
        autocast: Autocast dtype; None: float32, as in the official code.
    """

    def __init__(
        self,
        encoder: nn.Module,
        queue: Tensor,
        m: float,
        T: float,
        lr: float,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.encoder_q, self.encoder_k = encoder, copy.deepcopy(encoder).requires_grad_(False)
        self.queue, self.pointer = queue, torch.zeros(1, dtype=torch.long, device=queue.device)
        self._m, self._T, self._autocast = m, T, autocast
        self._optimizer = torch.optim.SGD(encoder.parameters(), lr, momentum=0.9, weight_decay=1e-4)

    def __call__(self, x_q: Tensor, x_k: Tensor, plan: Tensor) -> Tensor:
        """Return the loss of two views (N, 3, H, W); `plan` (N,) is the order of the keys in BN."""
        device = x_q.device.type
        with torch.autocast(device, self._autocast, enabled=self._autocast is not None):
            q = F.normalize(self.encoder_q(x_q), dim=1)
            with torch.no_grad():
                momentum_update(self.encoder_k, self.encoder_q, self._m)
                k = F.normalize(self.encoder_k(x_k[plan]), dim=1)
                k = k[torch.argsort(plan)]
            loss, _, _ = loss_and_accuracy(q, k, self.queue, self._T)
            start = int(self.pointer)  # the new keys replace the oldest; N divides K
            self.queue[:, start : start + len(k)] = k.T
            self.pointer[0] = (start + len(k)) % self.queue.shape[1]
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()
