"""torchvision's ResNets with few channels and random statistics: the sources of the layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

BLOCKS = {10: [1, 1, 1, 1], 18: [2, 2, 2, 2], 34: [3, 4, 6, 3], 50: [3, 4, 6, 3]}


def make_resnet(
    depth: int = 18, *, stem: str = "imagenet", base: int = 8, seed: int = 0
) -> tv.ResNet:
    """Torchvision's ResNet with `base` instead of 64 channels and random batch-norm statistics."""
    torch.manual_seed(seed)
    block = tv.Bottleneck if depth >= 50 else tv.BasicBlock
    net = tv.ResNet(block, [1, 1, 1, 1] if base != 64 else BLOCKS[depth], num_classes=16)
    if base != 64:
        # torchvision has no argument for it: rebuild the layers from fewer planes.
        net.inplanes = base
        net.conv1 = nn.Conv2d(3, base, 7, 2, 3, bias=False)
        net.bn1 = nn.BatchNorm2d(base)
        for i, blocks in enumerate(BLOCKS[depth]):
            stage = net._make_layer(block, base * 2**i, blocks, stride=1 if i == 0 else 2)
            setattr(net, f"layer{i + 1}", stage)
        net.fc = nn.Linear(base * 8 * block.expansion, 16)
    if stem != "imagenet":
        stride = {"cifar": 1, "stride2": 2}[stem]
        net.conv1 = nn.Conv2d(3, base, 3, stride, 1, bias=False)
        net.maxpool = nn.Identity()
    randomize(net)
    return net.eval()


def headless(depth: int = 18, *, seed: int = 0) -> tv.ResNet:
    """`make_resnet` without its classifier, as the backbone of most projects."""
    net = make_resnet(depth, seed=seed)
    net.fc = nn.Identity()
    return net


def randomize(net: nn.Module, scale: tuple[float, float] = (0.5, 1.5)) -> None:
    """Batch norms as after a training, in place; `scale`: range of their weights."""
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(*scale)
                module.bias.uniform_(-0.5, 0.5)
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.5, 1.5)
                module.num_batches_tracked.fill_(7)


def as_if_trained(net: nn.Module) -> nn.Module:
    """Change norms and biases, which are 0 and 1 in new networks, in place."""
    for value in net.state_dict().values():
        if value.is_floating_point() and value.dim() == 1:
            value += 0.1 * torch.rand_like(value)
    return net


def parallel(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict under DistributedDataParallel, whose only child is `module`."""
    wrapper = nn.Module()
    wrapper.module = model
    return wrapper.state_dict()


def sgd_state(model: nn.Module) -> dict[str, Any]:
    """SGD's state after a step that left the model as it was."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()
