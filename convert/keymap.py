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
from collections.abc import Mapping

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

# Tensors of a torchvision ResNet that a detector has no place for: name of the rule -> (start of
# the key, end of the key). An MLP head is fc.0.*, fc.2.* (moco/builder.py).
DROPPED = {
    "head": ("fc.", ""),
    "batch counter": ("", ".num_batches_tracked"),
}
# Tensors of the target that no source fills: name of the rule -> (start, end) of the key.
# The counter only matters to a BatchNorm with momentum None, which neither engine uses.
LEFT_AT_INIT = {"batch counter": ("", ".num_batches_tracked")}


def to_detectron2(key: str) -> str | None:
    """Detectron2's name of a torchvision tensor, or None when the table does not have it."""
    return _translate(key, STEM_MODULES, STAGES, BLOCK_MODULES)


def from_detectron2(key: str) -> str | None:
    """Torchvision's name of a Detectron2 tensor, or None; the inverse of `to_detectron2`."""
    return _translate(key, _inverse(STEM_MODULES), _inverse(STAGES), _inverse(BLOCK_MODULES))


def keep_torchvision(key: str) -> str | None:
    """The name itself where the table has it: the source's names are torchvision's."""
    return key if to_detectron2(key) else None


def from_caffe2(key: str) -> str | None:
    """Torchvision's name of a tensor of Detectron2's Caffe2 files, or None."""
    return _from_caffe2(key, CAFFE2_NORM_TENSORS)


def from_caffe2_folded(key: str) -> str | None:
    """Torchvision's name of a tensor of Detectron's Caffe2 files, or None."""
    return _from_caffe2(key, CAFFE2_FOLDED_TENSORS)


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


def _translate(
    key: str, stem: Mapping[str, str], stages: Mapping[str, str], block: Mapping[str, str]
) -> str | None:
    module, _, tensor = key.rpartition(".")
    stage, _, rest = module.partition(".")
    index, _, part = rest.partition(".")
    if module in stem:
        new_module = stem[module]
        names = (module, new_module)
    # str(int()): "01" would be read as block 1 and could not be read back.
    elif stage in stages and index.isdecimal() and index == str(int(index)) and part in block:
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
