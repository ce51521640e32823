"""Training steps of other projects: lightly's MoCo, and torchvision's reference detection loop.

N batch, C dimension, K length of the queue.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class LightlyStep:
    """Training step of lightly's MoCo example, with lightly's loss and momentum update.

    Args:
        encoder: Network from images to (N, C), which becomes the query encoder.
        C: Dimension of the encoder's output.
        K: Length of the queue.
        m: Momentum of the key encoder.
        T: Temperature.
        lr: Learning rate.
        autocast: Autocast dtype.
    """

    def __init__(
        self,
        encoder: nn.Module,
        C: int,
        K: int,
        m: float,
        T: float,
        lr: float,
        autocast: torch.dtype,
    ) -> None:
        from lightly.loss import NTXentLoss

        device = next(encoder.parameters()).device
        self.encoder_q, self.encoder_k = encoder, copy.deepcopy(encoder).requires_grad_(False)
        self._criterion = NTXentLoss(temperature=T, memory_bank_size=(K, C)).to(device)
        self._m, self._autocast = m, autocast
        self._optimizer = torch.optim.SGD(encoder.parameters(), lr, momentum=0.9, weight_decay=1e-4)

    def __call__(self, x_q: Tensor, x_k: Tensor, plan: Tensor) -> Tensor:
        """Do one step, as `benchmarks.speed.reference.Step` does."""
        from lightly.models.utils import update_momentum

        with torch.autocast(x_q.device.type, self._autocast):
            update_momentum(self.encoder_q, self.encoder_k, self._m)
            q = self.encoder_q(x_q)
            with torch.no_grad():
                k = self.encoder_k(x_k[plan])[torch.argsort(plan)]
            loss: Tensor = self._criterion(q, k)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


class _Scenes(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Images and targets of records, as torchvision's references/detection/coco_utils.py."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        import pycocotools.mask
        from torchvision.transforms.v2 import functional as F

        record = self._records[index]
        height, width, objects = record["height"], record["width"], record["annotations"]
        masks = []
        for each in objects:
            parts = pycocotools.mask.frPyObjects(each["segmentation"], height, width)
            masks.append(torch.as_tensor(pycocotools.mask.decode(parts)).amax(dim=2))
        image = F.to_dtype(F.pil_to_tensor(Image.open(record["file_name"])), torch.float32, True)
        boxes = torch.tensor([each["bbox"] for each in objects])
        labels = torch.tensor([each["category_id"] + 1 for each in objects])
        planes = torch.stack(masks)
        if torch.rand(()) < 0.5:
            image, planes = image.flip(-1), planes.flip(-1)
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        return image, {"boxes": boxes, "labels": labels, "masks": planes}


class TorchvisionStep:
    """Iteration of torchvision's references/detection/engine.py with Mask R-CNN R50-FPN.

    Args:
        records: Records of a split, see `detection.datasets.base.Split`.
        classes: Number of classes.
        batch: Images of an iteration.
        min_size: Shorter side of the images, in pixels.
        regions: Sampled regions of an image.
        workers: Data-loader workers.
        device: Device of the training.
        amp: Whether to use fp16 with a scaled loss, the script's --amp.
    """

    def __init__(
        self,
        records: Sequence[Mapping[str, Any]],
        classes: int,
        batch: int,
        min_size: int,
        regions: int,
        workers: int,
        device: str,
        amp: bool,
    ) -> None:
        from torchvision.models.detection import maskrcnn_resnet50_fpn

        self._device, self._amp = device, amp
        model = maskrcnn_resnet50_fpn(
            weights=None,
            weights_backbone=None,
            num_classes=classes + 1,
            trainable_backbone_layers=5,
            min_size=min_size,
            box_batch_size_per_image=regions,
        )
        self._model = model.to(device).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=1e-4, momentum=0.9)  # random weights
        self._scaler = torch.amp.GradScaler(device, enabled=amp)
        self._loader = DataLoader(
            _Scenes(records), batch, shuffle=True, num_workers=workers, collate_fn=_pairs,
            drop_last=True, persistent_workers=workers > 0,
        )  # fmt: skip
        self._batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def __call__(self) -> float:
        """Do one iteration and return its loss."""
        images, targets = next(self._batches)
        images = [image.to(self._device) for image in images]
        targets = [{key: x.to(self._device) for key, x in target.items()} for target in targets]
        with torch.autocast(self._device, torch.float16, enabled=self._amp):
            losses = self._model(images, targets)
            total = sum(losses.values())
        value = float(total.item())
        if value != value:
            raise FloatingPointError("torchvision's loss is not a number")
        self._optimizer.zero_grad()
        self._scaler.scale(total).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return value


def _pairs(items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(zip(*items, strict=True))
