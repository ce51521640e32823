"""kNN classification of frozen features, a measure of their quality without training.

The protocol of InstDisc (arXiv 1805.01978, sec. 3.4), as in MoCo's CIFAR notebook: the k nearest
training images by cosine similarity s vote with weight exp(s / t).

N batch, D feature dimension, M number of training images, W processes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.common.distributed import gather_rows, rank, world_size
from moco.common.errors import DataError
from moco.data.images import Images, LabeledSets
from moco.engine.evaluation import CenterCrop, iterate_outputs

WORKER_TIMEOUT_SECONDS = 600  # time without a batch after which a worker is considered hung
MAX_SIMILARITIES = 1 << 27  # computed at once: half a gigabyte


@dataclass(frozen=True)
class KnnResult:
    """Top-1 accuracy in 0..100 and its settings; `k` is at most the number of training images."""

    top1: float
    k: int
    t: float
    num_train: int
    num_val: int
    num_classes: int

    def __str__(self) -> str:
        return (
            f"kNN top-1 {self.top1:.1f}% (k={self.k}, t={self.t}; {self.num_train} train, "
            f"{self.num_val} val images, {self.num_classes} classes, "
            f"chance {100 / self.num_classes:.1f}%)"
        )


def knn_predict(
    train: Tensor, labels: Tensor, queries: Tensor, k: int, t: float, num_classes: int
) -> Tensor:
    """Predict the classes (N,) of `queries` (N, D) from `train` (M, D) and `labels` (M,).

    Rows have unit length; 1 <= k <= M. In a tie, the lowest class wins.
    """
    similarity, nearest = (queries @ train.T).topk(k, dim=1)  # (N, k)
    votes = torch.zeros(len(queries), num_classes, device=queries.device)
    # Votes are relative to the nearest image, so that none overflows for small t.
    votes.scatter_add_(1, labels[nearest], ((similarity - similarity[:, :1]) / t).exp())
    return votes.argmax(dim=1)


def evaluate(
    backbone: nn.Module,
    data: LabeledSets,
    crop: CenterCrop,
    k: int,
    t: float,
    device: torch.device,
    workers: int = 0,
    batch: int = 64,
) -> KnnResult:
    """Compute the kNN accuracy on `data.val` with the images of `data.train` as neighbors.

    Each process encodes a share of the images, and all processes get the result. `backbone` maps
    images (N, 3, H, W) to features (N, D) and is moved to `device`.

    Raises:
        DataError: If an image cannot be decoded, or features are not finite.
    """
    num_classes = len(data.classes)
    backbone = backbone.to(device).eval()
    train = extract_features(backbone, data.train, crop, device, workers, batch)
    val = extract_features(backbone, data.val, crop, device, workers, batch)
    labels = torch.tensor(data.train_labels, device=device)
    k = min(k, len(train))
    rows = max(1, MAX_SIMILARITIES // len(train))
    predictions = [
        knn_predict(train, labels, chunk, k, t, num_classes).cpu() for chunk in val.split(rows)
    ]
    correct = torch.cat(predictions) == torch.tensor(data.val_labels)
    top1 = 100 * int(correct.sum()) / len(correct)
    return KnnResult(top1, k, t, len(train), len(val), num_classes)


def extract_features(
    backbone: nn.Module,
    images: Images,
    crop: CenterCrop,
    device: torch.device,
    workers: int,
    batch: int,
) -> Tensor:
    """Return features (M, D) of unit length, after global pooling.

    All processes call it together.
    """
    M, W = len(images), world_size()
    # Process i % W encodes image i; some are encoded twice if M is not a multiple of W.
    mine = [i % M for i in range(rank(), -(-M // W) * W, W)]
    how = batch, device, workers, WORKER_TIMEOUT_SECONDS, "kNN features"
    rows = [F.normalize(h, dim=1) for _, h in iterate_outputs(backbone, images, crop, mine, *how)]
    mine_encoded = torch.cat(rows)
    if not bool(mine_encoded.isfinite().all()):
        raise DataError("kNN: features are not finite; the weights are damaged or diverged")
    gathered = gather_rows(mine_encoded).view(W, len(mine), -1)
    return gathered.transpose(0, 1).reshape(W * len(mine), -1)[:M]
