"""Proof that a converted file is what it says: read back, inverted, and shown an image.

`read_converted` is also how the detection room opens converted weights. The source network of the
feature check is torchvision's own ResNet, the target convert/families/resnet_network.py, which
share no code.

Shapes: N = 1 image, C channels, H W pixels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torchvision.models import resnet as tv

from convert.contract import InputContract
from convert.families import keymap
from convert.families.resnet_network import FEATURES, NUM_BLOCKS, ResNet, is_bottleneck
from convert.files import describe, is_converted, names, read_file, to_tensor
from moco.common.errors import DataError
from moco.common.files import PathLike
from moco.modeling import soundness
from moco.modeling.soundness import IMAGE_SIZE_PX, fixed_image

# Both networks do the same operations in the same order, so equality is expected bit by bit; a
# backend that is not deterministic may differ by rounding, relative to the largest feature.
TOLERANCE = 1e-5

Net = TypeVar("Net", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class Converted:
    """A converted file: tensors by Detectron2's names (`stem.conv1.weight`) and their contract."""

    model: dict[str, Tensor]
    contract: InputContract
    notes: tuple[str, ...] = ()  # what a reader of a result has to know


@dataclasses.dataclass(frozen=True)
class FeatureCheck:
    """How two networks agree on one feature map."""

    stride: int  # input pixels per cell, equal in both
    max_abs_diff: float
    bitwise: bool

    def worse(self, other: FeatureCheck) -> FeatureCheck:
        """What holds for both of two comparisons of this feature."""
        difference = max(self.max_abs_diff, other.max_abs_diff)
        return FeatureCheck(self.stride, difference, self.bitwise and other.bitwise)


def read_converted(path: PathLike, raw: Any = None) -> Converted:
    """Read and check a file that convert_to_d2.py wrote for Detectron2, in any of its formats.

    `raw`: what `read_file` returned for it, when it is already open.

    Raises DataError: unreadable, not a converted file, or tensors that are missing, unknown, of
    another shape or type, not finite or all zero.
    """
    own = raw is None
    if own:
        raw = read_file(path)
    if not is_converted(raw):
        raise DataError(
            f"{path}: not a file that convert/convert_to_d2.py wrote ({describe(raw)}); "
            "convert the checkpoint first"
        )
    if not isinstance(raw["model"], dict):
        raise DataError(f"{path}: 'model' is a {type(raw['model']).__name__}, expected a dict")
    try:
        contract = InputContract.from_dict(raw["contract"])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    # What a pickle holds is not what becomes of it: both need not be in memory at once.
    values: dict[Any, Any] = raw["model"] if own else dict(raw["model"])
    model = {key: to_tensor(key, values.pop(key), str(path)) for key in list(values)}
    check_model(model, contract, str(path))
    notes = ("BN statistics start at 0 and 1: they were folded",) if contract.bn_folded else ()
    return Converted(model, contract, notes)


def build_backbone(contract: InputContract) -> ResNet:
    """The backbone that a contract describes, with all features."""
    return ResNet(
        contract.depth,
        stem=contract.stem,
        stem_out_channels=contract.stem_out_channels,
        res2_out_channels=contract.res2_out_channels,
        num_groups=contract.num_groups,
        width_per_group=contract.width_per_group,
        stride_in_1x1=contract.stride_in_1x1,
    )


def target_tensors(contract: InputContract) -> dict[str, Tensor]:
    """Every tensor of the contract's backbone by name, without memory: shapes and types only."""
    with torch.device("meta"):
        return build_backbone(contract).state_dict()


def check_model(
    model: Mapping[str, Tensor],
    contract: InputContract,
    where: str,
    named: Callable[[str], str] = str,
) -> None:
    """Check every tensor that the contract's backbone needs: there, and nothing else, and sound.

    `named`: what Detectron2's names are called in the file, for messages.

    Raises DataError with the names of all offending tensors.
    """
    expected = {k: v for k, v in target_tensors(contract).items() if not keymap.left_rule(k)}
    problems: dict[str, list[str]] = {}

    def add(problem: str, key: Any) -> None:
        problems.setdefault(problem, []).append(named(key))

    for key in expected.keys() - model.keys():
        add("missing", key)
    for key, value in model.items():
        if key not in expected:
            add("unknown", key)
        elif value.dtype != expected[key].dtype:
            add(f"{value.dtype} where {expected[key].dtype} is expected", key)
        elif value.shape != expected[key].shape:
            add(f"shape {list(value.shape)} where {list(expected[key].shape)} is expected", key)
        elif wrong := soundness.problem(key, value):
            add(wrong, key)
    if problems:
        texts = [f"{what}: {names(sorted(keys), limit=50)}" for what, keys in problems.items()]
        raise DataError(f"{where}: not a sound {contract.architecture()} ({'; '.join(texts)})")


def check_round_trip(source: Mapping[str, Tensor], converted: Converted, where: str) -> None:
    """Invert the converted names and compare with the source (torchvision's names), bit by bit.

    Raises DataError with the names that differ.
    """
    back = {keymap.from_detectron2(key) or key: value for key, value in converted.model.items()}
    wrong = [
        key
        for key in source.keys() | back.keys()
        if key not in source or key not in back or not _same_bits(source[key], back[key])
    ]
    if wrong:
        raise DataError(
            f"{where}: verification failed: read back, these tensors are not the source's: "
            f"{names(sorted(wrong), limit=50)}"
        )


def check_features(
    source: Mapping[str, Tensor],
    converted: Converted,
    where: str,
    *,
    stride_in_1x1: bool = False,
    detectron2: Callable[[], Mapping[str, Tensor] | None] | None = None,
) -> dict[str, FeatureCheck]:
    """Show one fixed image to the source's network and to the target backbones, in eval mode.

    Args:
        stride_in_1x1: the source's, from its documentation; the contract may not decide it.
        detectron2: `Detectron2Backbone.features` where Detectron2's own backbone is asked, too.

    Returns the agreement at the stem and res2..res5, of the worse one where there are two target
    backbones. Raises DataError at the first feature whose stride or values differ.
    """
    contract, image = converted.contract, fixed_image()
    with torch.no_grad():
        expected = _features(_filled(lambda: _torchvision(contract, stride_in_1x1), source), image)
        backbone = _filled(lambda: build_backbone(contract), converted.model)
        targets: dict[str, Mapping[str, Tensor]] = {"the embedded backbone": backbone(image)}
    theirs = detectron2() if detectron2 is not None else None
    if theirs is not None:
        targets["Detectron2's backbone"] = theirs
    worst: dict[str, FeatureCheck] = {}
    for target, actual in targets.items():
        for name in FEATURES:
            failed = f"{where}: verification failed at {name} of {target}"
            check = _compare(expected[name], actual[name], backbone.strides[name], failed)
            worst[name] = check.worse(worst.get(name, check))
    return worst


def _compare(expected: Tensor, actual: Tensor, stride: int, failed: str) -> FeatureCheck:
    size = [pixels // stride for pixels in IMAGE_SIZE_PX]
    if not list(expected.shape[2:]) == list(actual.shape[2:]) == size:
        raise DataError(
            f"{failed}: source {list(expected.shape)} and converted {list(actual.shape)} do not "
            f"both have stride {stride}"
        )
    if expected.shape[1] != actual.shape[1]:
        raise DataError(
            f"{failed}: {expected.shape[1]} channels in the source, {actual.shape[1]} converted"
        )
    soundness.check_features(expected, failed)
    difference = float((expected - actual).abs().max())
    # Written so that a NaN fails.
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise DataError(f"{failed}: features differ by up to {difference:g}")
    return FeatureCheck(stride, difference, _same_bits(expected, actual))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # As integers: 0.0 == -0.0 and NaN != NaN are questions of value, not of bits.
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def _filled(build: Callable[[], Net], state: Mapping[str, Tensor]) -> Net:
    """Build a network without memory of its own and give it `state`'s tensors; eval mode."""
    with torch.device("meta"):
        net = build()
    counters = {
        key: torch.zeros((), dtype=torch.int64) for key in net.state_dict() if keymap.left_rule(key)
    }
    net.load_state_dict({**state, **counters}, strict=True, assign=True)
    return net.eval()


def _torchvision(contract: InputContract, stride_in_1x1: bool) -> tv.ResNet:
    """torchvision's ResNet of a contract's architecture, without fc."""
    block: type[tv.Bottleneck | tv.BasicBlock]
    block = tv.Bottleneck if is_bottleneck(contract.depth) else tv.BasicBlock
    blocks = NUM_BLOCKS[contract.depth]
    planes = contract.res2_out_channels // block.expansion
    # torchvision counts the width of a group for 64 planes.
    width, rest = 64, 0
    if is_bottleneck(contract.depth):
        width, rest = divmod(64 * contract.width_per_group, planes)
    if rest or contract.res2_out_channels % block.expansion:
        raise DataError(
            f"cannot verify: no torchvision ResNet has {contract.res2_out_channels} channels in "
            f"res2 beside {contract.num_groups} groups of {contract.width_per_group}"
        )
    net = tv.ResNet(block, list(blocks), groups=contract.num_groups, width_per_group=width)
    net.fc = nn.Identity()
    channels = contract.stem_out_channels
    if contract.stem != "imagenet":
        stride = {"cifar": 1, "stride2": 2}[contract.stem]
        net.conv1 = nn.Conv2d(3, channels, 3, stride, 1, bias=False)
        net.maxpool = nn.Identity()
    elif channels != 64:
        net.conv1 = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
    if (channels, planes) != (64, 64):
        # torchvision has no argument for the number of channels, only this builder of stages.
        net.bn1 = nn.BatchNorm2d(channels)
        net.inplanes = channels
        for i, count in enumerate(blocks):
            stage = net._make_layer(block, planes * 2**i, count, stride=1 if i == 0 else 2)
            setattr(net, f"layer{i + 1}", stage)
    if stride_in_1x1:
        # As in He et al.'s first ResNets; torchvision has no argument for it.
        for module in net.modules():
            if isinstance(module, tv.Bottleneck):
                module.conv1.stride, module.conv2.stride = module.conv2.stride, (1, 1)
    return net


def _features(net: tv.ResNet, image: Tensor) -> dict[str, Tensor]:
    """Outputs of torchvision's own forward, under Detectron2's names of the stages."""
    features: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            features[name] = output

        return hook

    net.maxpool.register_forward_hook(keep("stem"))
    for layer, stage in keymap.STAGES.items():
        net.get_submodule(layer).register_forward_hook(keep(stage))
    net(image)
    return features
