"""The table between torchvision's and Detectron2's names of a ResNet's tensors, read both ways.

A second one takes Caffe2's names (MSRA's networks) to torchvision's.

What the table does not know is never guessed: `drop_rule` names why a key of a source is not
needed, LEFT_AT_INIT why a tensor of the target is not filled, and everything else is an error for
the caller. No I/O, no tensors.

Names: torchvision/models/resnet.py and detectron2/modeling/backbone/resnet.py; the same mapping as
the official facebookresearch/moco@7397dfe detection/convert-pretrain-to-detectron2.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

# torchvision -> Detectron2. A name is <stem module>.<tensor> or <stage>.<block>.<module>.<tensor>.
STEM_MODULES = {"conv1": "stem.conv1", "bn1": "stem.conv1.norm"}
STAGES = {"layer1": "res2", "layer2": "res3", "layer3": "res4", "layer4": "res5"}
BLOCK_MODULES = {
    "conv1": "conv1",
    "bn1": "conv1.norm",
    "conv2": "conv2",
    "bn2": "conv2.norm",
    "conv3": "conv3",
    "bn3": "conv3.norm",
    "downsample.0": "shortcut",
    "downsample.1": "shortcut.norm",
}
CONV_TENSORS = ("weight",)
# "01" would be read as block 1 and could not be read back.
_INDEX = re.compile(r"0|[1-9]\d{0,3}", re.ASCII)
NORM_TENSORS = ("weight", "bias", "running_mean", "running_var")

# Caffe2 -> torchvision, bottlenecks only: detectron2/checkpoint/c2_model_loading.py,
# convert_basic_c2_names. A name is res<stage>_<block>_<branch>_w or ..._bn_<tensor>; the stem's are
# conv1_w and res_conv1_bn_<tensor>.
CAFFE2_STAGES = {"res2": "layer1", "res3": "layer2", "res4": "layer3", "res5": "layer4"}
CAFFE2_BRANCHES = {
    "branch2a": ("conv1", "bn1"),
    "branch2b": ("conv2", "bn2"),
    "branch2c": ("conv3", "bn3"),
    "branch1": ("downsample.0", "downsample.1"),
}
# Detectron2's files keep the statistics; Detectron's fold them into scale and bias
# (facebookresearch/Detectron tools/pickle_caffe_blobs.py, remove_spatial_bn_layers).
CAFFE2_NORM_TENSORS = {
    "gamma": "weight",
    "beta": "bias",
    "running_mean": "running_mean",
    "running_var": "running_var",
}
CAFFE2_FOLDED_TENSORS = {"s": "weight", "b": "bias"}
_CAFFE2_KEY = re.compile(r"(res[2-5])_(0|[1-9]\d*)_(branch[12][abc]?)_(w|bn_\w+)")
# What a file with folded statistics leaves where BN starts: mean 0, variance 1.
FOLDED_RULE = "BN statistics (0 and 1)"

# Tensors beside a backbone that a detector has no place for: name of the rule -> (start of the key
# after the network's prefix, end of the key). An MLP head is fc.0.*, fc.2.* (moco/builder.py).
DROPPED = {
    "head": ("fc.", ""),
    "linear head": ("linear.", ""),  # of CIFAR networks
    "last linear head": ("last_linear.", ""),  # Cadene/pretrained-models.pytorch
    "numbered head": ("9.", ""),  # the last child of UNPOOLED_STAGES, after a Flatten
    "batch counter": ("", ".num_batches_tracked"),
    "average counter": ("n_averaged", ""),  # torch.optim.swa_utils.AveragedModel
}
# Keys at the top of a file whose tensors are no network, in every layout: rule -> keys.
TOP_DROPPED = {
    "optimizer": ("optimizer", "optimizers", "optimizer_states", "optim"),
    "schedule": ("lr_scheduler", "lr_schedulers", "scheduler", "schedulers"),
    "loss scaling": ("scaler", "grad_scaler", "loss_scaler", "amp", "amp_scaler", "fp16_scaler"),
    "training record": ("callbacks", "loops", "rng_state", "random_state"),
}
# Heads under the names that people give them, dropped from a plain state dict.
PLAIN_DROPPED = {
    "Detectron2's head": ("stem.fc.", ""),
    "head": ("head.", ""),
    "classifier": ("classifier.", ""),
    "projector": ("projector.", ""),
    "projection head": ("projection_head.", ""),
    "predictor": ("predictor.", ""),
    "prediction head": ("prediction_head.", ""),
    "neck": ("neck.", ""),
    "queue": ("queue", ""),
    "batch counter": ("", ".num_batches_tracked"),
}
# Tensors of the target that no source fills: name of the rule -> (start, end) of the key.
# The counter only matters to a BatchNorm with momentum None, which neither engine uses.
LEFT_AT_INIT = {"batch counter": ("", ".num_batches_tracked")}

# Numbers -> Detectron2's names, and from there torchvision's.
# nn.Sequential(*list(torchvision_resnet.children())[:-1]): 2 and 3 are ReLU and max-pool.
NUMBERED_STEM = {"0": "stem.conv1", "1": "stem.conv1.norm"}
NUMBERED_STAGES = {"4": "res2", "5": "res3", "6": "res4", "7": "res5"}
# The same of lightly's own ResNet (lightly/models/resnet.py), whose ReLU is no module, which has no
# max-pool and whose shortcuts have another name.
LIGHTLY_STAGES = {"2": "res2", "3": "res3", "4": "res4", "5": "res5"}
# Also what CIFAR ResNets call theirs: kuangliu/pytorch-cifar@49b7aa9 models/resnet.py.
SHORTCUT_BLOCK_MODULES = {
    **{name: new for name, new in BLOCK_MODULES.items() if not name.startswith("downsample")},
    "shortcut.0": "shortcut",
    "shortcut.1": "shortcut.norm",
}
# The children without the max-pool: 2 is ReLU (facebookresearch/moco, branch colab-notebook).
UNPOOLED_STAGES = {"3": "res2", "4": "res3", "5": "res4", "6": "res5"}

# Separius/SimCLRv2-Pytorch@f4c2f41 resnet.py -> torchvision. A block's module is
# net.<stage>.blocks.<block>.<module>; batch norms are the first of two in a Sequential.
SIMCLR_V2_STEM = {"net.0.0": "conv1", "net.0.1.0": "bn1"}
SIMCLR_V2_STAGES = {"1": "layer1", "2": "layer2", "3": "layer3", "4": "layer4"}
SIMCLR_V2_BLOCK_MODULES = {
    "net.0": "conv1",
    "net.1.0": "bn1",
    "net.2": "conv2",
    "net.3.0": "bn2",
    "net.4": "conv3",
    "net.5.0": "bn3",
    "projection.shortcut": "downsample.0",
    "projection.bn.0": "downsample.1",
}
_SIMCLR_V2_BLOCK = re.compile(r"net\.([1-4])\.blocks\.(\w+)\.([\w.]+)")


def to_detectron2(key: str) -> str | None:
    """Detectron2's name of a torchvision tensor, or None when the table does not have it."""
    return _translate(key, STEM_MODULES, STAGES, BLOCK_MODULES)


def from_detectron2(key: str) -> str | None:
    """Torchvision's name of a Detectron2 tensor, or None; the inverse of `to_detectron2`."""
    return _translate(key, _inverse(STEM_MODULES), _inverse(STAGES), _inverse(BLOCK_MODULES))


def keep_torchvision(key: str) -> str | None:
    """The name itself where the table has it, or None; `shortcut` is taken for `downsample`."""
    name = _translate(key, STEM_MODULES, STAGES, SHORTCUT_BLOCK_MODULES)
    return from_detectron2(name) if name else key if to_detectron2(key) else None


def from_caffe2(key: str) -> str | None:
    """Torchvision's name of a tensor of Detectron2's Caffe2 files, or None."""
    return _from_caffe2(key, CAFFE2_NORM_TENSORS)


def from_caffe2_folded(key: str) -> str | None:
    """Torchvision's name of a tensor of Detectron's Caffe2 files, or None."""
    return _from_caffe2(key, CAFFE2_FOLDED_TENSORS)


def from_numbered(key: str) -> str | None:
    """Torchvision's name of a tensor of `nn.Sequential(*list(resnet.children())[:-1])`, or None."""
    name = _translate(key, NUMBERED_STEM, NUMBERED_STAGES, BLOCK_MODULES)
    return from_detectron2(name) if name else None


def from_lightly(key: str) -> str | None:
    """Torchvision's name of a tensor of lightly's own ResNet as an nn.Sequential, or None."""
    name = _translate(key, NUMBERED_STEM, LIGHTLY_STAGES, SHORTCUT_BLOCK_MODULES)
    return from_detectron2(name) if name else None


def from_unpooled(key: str) -> str | None:
    """Torchvision's name of a tensor of a ResNet's children without the max-pool, or None."""
    name = _translate(key, NUMBERED_STEM, UNPOOLED_STAGES, BLOCK_MODULES)
    return from_detectron2(name) if name else None


def from_simclr_v2(key: str) -> str | None:
    """Torchvision's name of a tensor of SimCLRv2-Pytorch's bottleneck ResNets, or None."""
    module, _, tensor = key.rpartition(".")
    name = SIMCLR_V2_STEM.get(module)
    if match := _SIMCLR_V2_BLOCK.fullmatch(module):
        stage, block, part = match.groups()
        part = SIMCLR_V2_BLOCK_MODULES.get(part)
        name = part and f"{SIMCLR_V2_STAGES[stage]}.{block}.{part}"
    return keep_torchvision(f"{name}.{tensor}") if name else None


def drop_rule(key: str) -> str | None:
    """Name of the rule that drops this torchvision key, or None."""
    return first_rule(key, DROPPED)


def left_rule(key: str) -> str | None:
    """Name of the rule that leaves this Detectron2 key at its initial value, or None."""
    return first_rule(key, LEFT_AT_INIT)


def first_rule(key: str, rules: Mapping[str, tuple[str, str]]) -> str | None:
    """Name of the first of `rules` (name -> start, end) that a key falls under, or None."""
    for name, (start, end) in rules.items():
        if key.startswith(start) and key.endswith(end):
            return name
    return None


def original(rename: Callable[[str], str | None], name: str, shortcut: bool) -> str:
    """What a torchvision name is called where `rename` translates from; the inverse of `rename`.

    `shortcut`: the source says `shortcut` for `downsample`. SimCLR v2's and Caffe2's names have no
    inverse here: theirs is torchvision's.
    """
    blocks = SHORTCUT_BLOCK_MODULES if shortcut else BLOCK_MODULES
    tables = {
        keep_torchvision: (STEM_MODULES, STAGES, blocks),
        from_numbered: (NUMBERED_STEM, NUMBERED_STAGES, BLOCK_MODULES),
        from_lightly: (NUMBERED_STEM, LIGHTLY_STAGES, SHORTCUT_BLOCK_MODULES),
        from_unpooled: (NUMBERED_STEM, UNPOOLED_STAGES, BLOCK_MODULES),
    }
    new = to_detectron2(name)
    if new is None or rename is from_detectron2:
        return new or name
    if rename not in tables:
        return name
    return _translate(new, *map(_inverse, tables[rename])) or name


def is_own(rename: Callable[[str], str | None], key: str) -> bool:
    """Whether a key has the name of a part of the backbone where `rename` translates from.

    If `rename` does not know it, the network is another one: nothing beside it is called so.
    """
    return OWN.get(rename, _ANY_OWN).match(key) is not None


def _translate(
    key: str, stem: Mapping[str, str], stages: Mapping[str, str], block: Mapping[str, str]
) -> str | None:
    module, _, tensor = key.rpartition(".")
    stage, _, rest = module.partition(".")
    index, _, part = rest.partition(".")
    if module in stem:
        new_module = stem[module]
        names = (module, new_module)
    elif stage in stages and _INDEX.fullmatch(index) and part in block:
        new_module = f"{stages[stage]}.{index}.{block[part]}"
        names = (part, block[part])
    else:
        return None
    is_norm = any(name.endswith(".norm") for name in names)
    if tensor not in (NORM_TENSORS if is_norm else CONV_TENSORS):
        return None
    return f"{new_module}.{tensor}"


def _from_caffe2(key: str, norm_tensors: Mapping[str, str]) -> str | None:
    if key == "conv1_w":
        return "conv1.weight"
    stem_start = "res_conv1_bn_"
    if key.startswith(stem_start):
        tensor = norm_tensors.get(key.removeprefix(stem_start))
        return f"bn1.{tensor}" if tensor else None
    match = _CAFFE2_KEY.fullmatch(key)
    if match is None or match[3] not in CAFFE2_BRANCHES:
        return None
    conv, norm = CAFFE2_BRANCHES[match[3]]
    block = f"{CAFFE2_STAGES[match[1]]}.{match[2]}"
    if match[4] == "w":
        return f"{block}.{conv}.weight"
    tensor = norm_tensors.get(match[4].removeprefix("bn_"))
    return f"{block}.{norm}.{tensor}" if tensor else None


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in table.items()}


_ANY_OWN = re.compile(
    r"(conv|bn|layer)\d|(downsample|shortcut|stem)\b|res(\d|_conv)|net\.\d", re.ASCII
)
# Where modules are numbered, what comes after the last stage is a head.
OWN: dict[Callable[[str], str | None], re.Pattern[str]] = {
    # Files for detectors: every name beside the backbone may be a part of one.
    from_detectron2: re.compile(""),
    from_caffe2: re.compile(""),
    from_caffe2_folded: re.compile(""),
    from_numbered: re.compile(r"[0-7]\."),
    from_lightly: re.compile(r"[0-5]\."),
    from_unpooled: re.compile(r"[0-6]\."),
}
