"""What files say of their own networks: pixels, strides, stem, heads, a name.

In the file, or in what is beside it on the Hugging Face Hub (config.json,
preprocessor_config.json). All of it is text of unknown origin: no name in it is imported, and no
value chooses a path.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.contract import IMAGENET_MEAN, IMAGENET_STD
from convert.read import at, is_array, to_tensor
from moco.common.errors import DataError, shown
from moco.common.pretrained import BESIDE
from moco.modeling.archs import VITS, ViTSpec
from moco.modeling.soundness import Triple, read_input, read_spec

CONFIGURATION, PREPROCESSOR = BESIDE
MAX_BYTES = 1 << 20
FAIR_STD = (57.375, 57.12, 58.395)  # BGR
# A configuration of mmcv's or mmengine's as text.
_NUMBERS = r"\s*=\s*\[([^\]]{1,80})\]"
_MM_MEAN, _MM_STD = re.compile(r"\bmean" + _NUMBERS), re.compile(r"\bstd" + _NUMBERS)
_MM_CAFFE = re.compile(r"\bstyle\s*=\s*['\"]caffe['\"]")
_MM_BGR = re.compile(r"\b(to_rgb|bgr_to_rgb)\s*=\s*False\b")
# Where files of training scripts have the name of their network, and by which keys.
_HOLDERS = ((), ("args",), ("hyper_parameters",), ("hyper_parameters", "backbone"))
_KEYS = ("arch", "architecture", "model", "model_name", "backbone", "encoder", "name")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a file says; None where it says nothing.

    Attributes:
        arch: of this project's encoders (moco/modeling/encoder.py).
        says: of the network, beside its tensors, in the words of a family's `recognize`.
        channel_order, mean, std: 0..255, in that order.
        owner: whose network it is, instead of the one in the project's name.
        other: ways in which the file's network is not what its project is documented to be.
        note: what a reader of the report has to know.
    """

    arch: str | None = None
    says: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    channel_order: str | None = None
    mean: Triple | None = None
    std: Triple | None = None
    owner: str = ""
    other: tuple[str, ...] = ()
    note: str = ""


def own_record(raw: Mapping[Any, Any]) -> Recorded:
    """What moco/engine/checkpoint.py writes about the encoder and its input.

    Raises DataError: it is damaged.
    """
    try:
        spec = read_spec(raw)
        order, mean, std = read_input(raw)
    except DataError as error:
        raise DataError(f"a moco-transfer checkpoint with {error}") from error
    says: dict[str, Any]
    if isinstance(spec, ViTSpec):
        vit = VITS[spec.arch]
        says = {"num_heads": {vit.embed_dim: vit.num_heads}}
    else:
        says = {"stem": spec.stem, "width": spec.width}
    return Recorded(
        arch=spec.arch,
        says=says,
        channel_order=order,
        mean=to_255(mean),
        std=to_255(std),
    )


def timm_arguments(raw: Mapping[Any, Any]) -> Recorded:
    """The arguments of timm's train.py, where `--mean` and `--std` override the model's own."""
    args = raw.get("args")
    found: dict[str, Triple] = {}
    for name in ("mean", "std"):
        values = args.get(name) if isinstance(args, Mapping) else None
        if isinstance(values, list | tuple) and len(values) == 3:
            try:
                found[name] = to_255(values)
            except (TypeError, ValueError, OverflowError) as error:
                raise DataError(f"args.{name} is not three numbers") from error
    return Recorded(mean=found.get("mean"), std=found.get("std"))


def anyones_record(raw: Mapping[Any, Any]) -> Recorded:
    """Return what the files of known frameworks say, from a file of nobody known.

    It has mmcv's `meta.config`, or `args` with a mean and a standard deviation, as timm's, of 0..1
    or of 0..255.
    """
    if any(isinstance(at(raw, ("meta", name)), str) for name in ("config", "cfg")):
        return mm_configuration(raw)
    said = timm_arguments(raw)
    if not (said.mean and said.std):
        return Recorded()
    if max(said.mean) <= 255:
        return said
    mean, std = ((r / 255, g / 255, b / 255) for r, g, b in (said.mean, said.std))
    return Recorded(mean=mean, std=std)


def mm_configuration(raw: Mapping[Any, Any]) -> Recorded:
    """The configuration in `meta`, a text: compared with the project's convention, not executed.

    Its numbers are 0..255 or 0..1.
    """
    meta = raw.get("meta")
    texts = [meta.get(name) for name in ("config", "cfg")] if isinstance(meta, Mapping) else []
    text = "\n".join(text for text in texts if isinstance(text, str))
    other = []
    if _MM_CAFFE.search(text):
        other.append("style='caffe' (the stride in the 1x1)")
    if match := _MM_BGR.search(text):
        other.append(f"{match[1]}=False (BGR)")
    for name, pattern, usual in (
        ("mean", _MM_MEAN, IMAGENET_MEAN),
        ("std", _MM_STD, IMAGENET_STD),
    ):
        for match in pattern.finditer(text):
            values = _triple(match[1])
            if values is not None and not _is(values, usual):
                other.append(f"{name}=[{match[1].strip()}]")
                break
    said = _MM_MEAN.search(text)
    note = "" if said else "meta's configuration names no mean and std: ImageNet's are assumed"
    return Recorded(other=tuple(other), note=note)


def caffe2_record(raw: Mapping[Any, Any]) -> Recorded:
    """The convention of the network that a Caffe2 file holds, whose biases have to be zero.

    MSRA's is documented for MSRA's networks; of others, FAIR's X-101-32x8d is
    (detectron2's configs/COCO-InstanceSegmentation/mask_rcnn_X_101_32x8d_FPN_3x.yaml).
    """
    model = raw.get("model")
    blobs: Mapping[Any, Any] = model if isinstance(model, Mapping) else raw
    first: Any = blobs.get("res2_0_branch2a_w")
    second: Any = blobs.get("res2_0_branch2b_w")
    found = Recorded()
    if is_array(first) and is_array(second) and first.shape[0] != second.shape[1] > 0:
        groups, width = first.shape[0] // second.shape[1], second.shape[1]
        deep = "res4_22_branch2a_w" in blobs and "res3_4_branch2a_w" not in blobs
        if not (deep and (groups, width) == (32, 8)):
            raise DataError(
                "a ResNeXt in Caffe2's names; its std and the place of its stride are not MSRA's "
                "(detectron2's mask_rcnn_X_101_32x8d_FPN_3x.yaml), so it is not read"
            )
        says = {"stride_in_1x1": False}
        found = Recorded(owner="FAIR X-101-32x8d", std=FAIR_STD, says=says)
    for key, value in blobs.items():
        norms = ("_bn_b",) if "res_conv1_bn_s" in blobs else ()  # folded statistics
        if not str(key).endswith("_b") or str(key).endswith(("fc1000_b", *norms)):
            continue
        bias = to_tensor(key, value, "").abs()
        if bool(bias.any()) and key != "conv1_b":
            raise DataError(f"{shown(key)} is not zero, and the network has no place for it")
        if bool(bias.any()):
            note = (
                f"conv1_b (up to {float(bias.max()):.2g}) is dropped, as Detectron2 does: its "
                "networks have no place for it"
            )
            found = dataclasses.replace(found, note=note)
    return found


def read_beside(weights: Path) -> Recorded | None:
    """What the configuration beside a file says of its network; None: there is none.

    It is transformers' (`model_type`) or timm's (`architecture`); another's is as if none.

    Raises DataError: damaged, or values of another kind.
    """
    config = _read(weights.with_name(CONFIGURATION))
    said = "config.json beside the file is taken"
    if "model_type" in config:
        heads, width = (_count(config, name) for name in ("num_attention_heads", "hidden_size"))
        names = ("hidden_size", "patch_size", "image_size", "hidden_act")
        says = {name: config[name] for name in names if name in config}
        if heads and width:
            says["num_heads"] = {width: heads}
        eps = config.get("layer_norm_eps")
        if eps is not None:
            if type(eps) is not float or not 0 < eps < 1:
                raise DataError(f"{CONFIGURATION}: layer_norm_eps: got {shown(eps)}, expected 0..1")
            says["layer_norm_eps"] = eps
        processor = _read(weights.with_name(PREPROCESSOR))
        pixels = _pixels(processor, "image_mean", "image_std", PREPROCESSOR)
        if pixels:
            said = "config.json and preprocessor_config.json beside the file are taken"
        return Recorded(says=says, **pixels, note=said)
    if isinstance(config.get("architecture"), str):
        its = config.get("pretrained_cfg")
        pixels = _pixels(its if isinstance(its, Mapping) else {}, "mean", "std", CONFIGURATION)
        return Recorded(arch=config["architecture"], **pixels, note=said)
    return None


def _read(path: Path) -> Mapping[str, Any]:
    """The object in a file of JSON, empty where there is no file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path}: more than {MAX_BYTES} bytes, which no configuration has")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); delete it or download it again") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: got a {type(value).__name__}, expected an object")
    return value


def _count(config: Mapping[str, Any], name: str) -> int:
    """A whole number, 0 where there is none."""
    value = config.get(name, 0)
    if type(value) is not int or not 0 <= value <= 2**16:
        raise DataError(f"{CONFIGURATION}: {name}: got {shown(value)}, expected a whole number")
    return value


def _pixels(values: Mapping[str, Any], mean: str, std: str, file: str) -> dict[str, Any]:
    """Fields of `Recorded`, 0..255, from numbers of 0..1; empty where there are none."""
    found = {}
    for field, name in (("mean", mean), ("std", std)):
        three = values.get(name)
        if three is None:
            return {}
        if not (
            isinstance(three, list)
            and len(three) == 3
            and all(type(v) in (int, float) and math.isfinite(v) for v in three)
        ):
            raise DataError(f"{file}: {name}: got {shown(three)}, expected three numbers")
        found[field] = tuple(round(255 * value, 6) for value in three)
    return found


def recorded_names(raw: Any, beside: str | None) -> dict[str, str]:
    """Return where a network is named → the name without owner and tag, in small letters.

    Args:
        beside: as a configuration beside the file has it.
    """
    found = {} if beside is None else {"config.json beside it": beside}
    for holder in _HOLDERS:
        for key in _KEYS if holder else _KEYS[:2]:
            if isinstance(name := at(raw, (*holder, key)), str):
                found[".".join((*holder, key))] = name
    return {
        where: name.strip().lower().rpartition("/")[2].partition(".")[0]
        for where, name in found.items()
    }


def _is(values: Triple, usual: Triple) -> bool:
    """Whether numbers are the usual ones, on either scale."""
    return any(
        all(abs(v * scale - u) < 1e-3 * u for v, u in zip(values, usual, strict=True))
        for scale in (1, 255)
    )


def _triple(text: str) -> Triple | None:
    try:
        first, second, third = (float(part) for part in text.split(",") if part.strip())
    except ValueError:
        return None
    return (first, second, third)


def to_255(values: Any) -> Triple:
    """Three numbers of 0..1 as of pixels 0..255."""
    red, green, blue = (round(float(value) * 255, 6) for value in values)
    return (red, green, blue)
