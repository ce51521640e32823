"""Metadata that files record about their networks: normalization, strides, stem, heads, name.

It is in the file itself, or in files of the Hugging Face Hub next to it (config.json,
preprocessor_config.json, open_clip_config.json). All of it is untrusted: no name is imported, and
no value chooses a path.
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
from convert.families.base import Family, families
from convert.read import at, is_array, to_tensor
from moco.common.errors import DataError, shown
from moco.common.files import read_bytes
from moco.common.pretrained import SIDECARS, sidecar
from moco.modeling.archs import VITS, ViTSpec
from moco.modeling.soundness import Triple, read_input, read_spec

CONFIGURATION, PREPROCESSOR, OPEN_CLIP = SIDECARS
MAX_BYTES = 1 << 20
FAIR_STD = (57.375, 57.12, 58.395)  # BGR
# Settings in the configuration of mmcv or mmengine, which is text.
_NUMBERS = r"\s*=\s*\[([^\]]{1,80})\]"
_MM_MEAN, _MM_STD = re.compile(r"\bmean" + _NUMBERS), re.compile(r"\bstd" + _NUMBERS)
_MM_CAFFE = re.compile(r"\bstyle\s*=\s*['\"]caffe['\"]")
_MM_BGR = re.compile(r"\b(to_rgb|bgr_to_rgb)\s*=\s*False\b")
# Dicts and keys in which training scripts save the name of the network.
_HOLDERS = ((), ("args",), ("hyper_parameters",), ("hyper_parameters", "backbone"))
_KEYS = ("arch", "architecture", "model", "model_name", "backbone", "encoder", "name")

# Settings of transformers that a family compares with the tensors, or that no tensor holds.
_OF_TRANSFORMERS = (
    "model_type",
    "hidden_size",
    "patch_size",
    "image_size",
    "hidden_act",
    "downsample_in_bottleneck",
    "downsample_in_first_stage",
)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Metadata of a file; None for what it does not record.

    Attributes:
        arch: Name of the architecture.
        metadata: Facts about the network that no tensor holds, as a family's `recognize` takes
            them.
        config: Facts in transformers' configuration, by its own names, see `FACTS`.
        channel_order: "RGB" or "BGR".
        mean, std: Pixel statistics, 0..255, in the order of `channel_order`.
        arguments: Arguments of timm's `create_model` with which `arch` was built.
        owner: Origin of the network, if it is not the one in the project's name.
        other: Differences from the documented convention of the project.
        note: Note for the report.
    """

    arch: str | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    channel_order: str | None = None
    mean: Triple | None = None
    std: Triple | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    owner: str = ""
    other: tuple[str, ...] = ()
    note: str = ""


def own_record(raw: Mapping[Any, Any]) -> Recorded:
    """Read what moco/engine/checkpoint.py records about the encoder and its input.

    Raises:
        DataError: If it is damaged.
    """
    try:
        spec = read_spec(raw)
        order, mean, std = read_input(raw)
    except DataError as error:
        raise DataError(f"a moco-transfer checkpoint with {error}") from error
    metadata: dict[str, Any]
    if isinstance(spec, ViTSpec):
        vit = VITS[spec.arch]
        metadata = {"num_heads": {vit.embed_dim: vit.num_heads}}
    else:
        metadata = {"stem": spec.stem, "width": spec.width}
    return Recorded(
        arch=spec.arch,
        metadata=metadata,
        channel_order=order,
        mean=to_255(mean),
        std=to_255(std),
    )


def timm_arguments(raw: Mapping[Any, Any]) -> Recorded:
    """Read the arguments of timm's train.py; `--mean` and `--std` override the model's own."""
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


def generic_record(raw: Mapping[Any, Any]) -> Recorded:
    """Read the metadata of an unknown project's file in the formats of known frameworks.

    These are mmcv's `meta.config`, and `args` with a mean and a standard deviation as in timm, for
    pixels 0..1 or 0..255.
    """
    if any(isinstance(at(raw, ("meta", name)), str) for name in ("config", "cfg")):
        return mm_configuration(raw)
    recorded = timm_arguments(raw)
    if not (recorded.mean and recorded.std):
        return Recorded()
    if max(recorded.mean) <= 255:
        return recorded
    mean, std = ((r / 255, g / 255, b / 255) for r, g, b in (recorded.mean, recorded.std))
    return Recorded(mean=mean, std=std)


def mm_configuration(raw: Mapping[Any, Any]) -> Recorded:
    """Compare the configuration in `meta` with the project's convention.

    It is Python source, which is searched as text and never executed. Its mean and std are for
    pixels 0..255 or 0..1.
    """
    meta = raw.get("meta")
    texts = [meta.get(name) for name in ("config", "cfg")] if isinstance(meta, Mapping) else []
    text = "\n".join(text for text in texts if isinstance(text, str))
    other = []
    if _MM_CAFFE.search(text):
        other.append("style='caffe' (stride in the 1x1 conv)")
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
    note = (
        ""
        if _MM_MEAN.search(text)
        else "the configuration in meta has no mean and std: assuming ImageNet's"
    )
    return Recorded(other=tuple(other), note=note)


def caffe2_record(raw: Mapping[Any, Any]) -> Recorded:
    """Determine the convention of the network in a Caffe2 file, and check that biases are zero.

    MSRA's convention applies to MSRA's networks; of others only that of FAIR's X-101-32x8d is
    documented (detectron2's configs/COCO-InstanceSegmentation/mask_rcnn_X_101_32x8d_FPN_3x.yaml).

    Raises:
        DataError: If it is another ResNeXt, or a bias that the network lacks is not zero.
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
                "unsupported ResNeXt in Caffe2's names: its std and stride are not MSRA's "
                "(detectron2's mask_rcnn_X_101_32x8d_FPN_3x.yaml)"
            )
        metadata = {"stride_in_1x1": False}
        found = Recorded(owner="FAIR X-101-32x8d", std=FAIR_STD, metadata=metadata)
    for key, value in blobs.items():
        norms = ("_bn_b",) if "res_conv1_bn_s" in blobs else ()  # folded statistics
        if not str(key).endswith("_b") or str(key).endswith(("fc1000_b", *norms)):
            continue
        bias = to_tensor(key, value, "").abs()
        if bool(bias.any()) and key != "conv1_b":
            raise DataError(f"{shown(key)} is not zero, but the network has no such bias")
        if bool(bias.any()):
            note = (
                f"conv1_b (up to {float(bias.max()):.2g}) is dropped, as in Detectron2, whose "
                "networks have no such bias"
            )
            found = dataclasses.replace(found, note=note)
    return found


def read_sidecar(weights: Path) -> Recorded | None:
    """Read the configuration next to a file, or return None if there is none.

    It is that of transformers (`model_type`), timm (`architecture`) or, for its files, open_clip;
    others are ignored.

    Raises:
        DataError: If it is damaged or values have another type.
    """
    if weights.name.startswith("open_clip"):
        return _open_clip(_read(sidecar(weights, OPEN_CLIP)))
    config = _read(sidecar(weights, CONFIGURATION))
    if isinstance(config.get("architecture"), str):
        pretrained = _dict(config, "pretrained_cfg")
        pixels = _pixels(pretrained, "mean", "std", CONFIGURATION)
        metadata = {"tag": pretrained["tag"]} if isinstance(pretrained.get("tag"), str) else {}
        note = _NOTE.format(CONFIGURATION)
        arguments = timm_built(config.get("model_args"), f"{CONFIGURATION}: model_args")
        return Recorded(config["architecture"], metadata, **pixels, arguments=arguments, note=note)
    if "model_type" in config:
        return _transformers(config, _read(sidecar(weights, PREPROCESSOR)))
    return None


_NOTE = "using {} next to the file"
# Facts in transformers' configuration (models/*/configuration_*.py) -> their types; two of _SIZE
# are height and width. They are metadata under the same names, but `num_heads`.
_SIZE = int | list[int]
FACTS: dict[str, Any] = {
    **dict.fromkeys(("model_type", "hidden_act", "layer_type"), str),
    **dict.fromkeys(("hidden_size", "embed_dim", "num_hidden_layers", "intermediate_size"), int),
    **dict.fromkeys(("num_attention_heads", "num_register_tokens", "window_size"), int),
    **dict.fromkeys(("patch_size", "image_size"), _SIZE),
    **dict.fromkeys(("depths", "hidden_sizes", "num_heads"), list[int]),
    **dict.fromkeys(("layer_norm_eps", "rope_theta", "mlp_ratio", "layerscale_value"), float),
    **dict.fromkeys(("layer_scale_init_value", "pos_embed_rescale"), float),
    **dict.fromkeys(("qkv_bias", "query_bias", "key_bias", "value_bias"), bool),
    **dict.fromkeys(("use_gated_mlp", "use_swiglu_ffn", "use_absolute_embeddings"), bool),
    **dict.fromkeys(("use_relative_position_bias", "use_shared_relative_position_bias"), bool),
    **dict.fromkeys(("downsample_in_first_stage", "downsample_in_bottleneck"), bool),
}


# Keys of a configuration under which that of an image network may be, e.g. of Depth-Anything,
# MaskFormer, and VisionEncoderDecoder.
_NODES = ("backbone_config", "encoder", "vision_encoder")
_EXPECTED: dict[Any, str] = {
    **{str: "a text", float: "a number", bool: "true or false"},
    **{int: "an integer, 0..65536", _SIZE: "one or two integers, 0..65536"},
}


def _transformers(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Recorded:
    """Read transformers' configuration; of a network around one of images that of the latter."""
    inner = _dict(config, "backbone_config")
    for node, key, usual in ((config, "dilation", False), (inner, "output_stride", 32)):
        if node.get(key, usual) not in (usual, None):
            raise DataError(
                f"{CONFIGURATION}: {key} is {shown(node[key])}: the last stage of its backbone is "
                "dilated, which no detector here has"
            )
    tower = {"model_type": f"{config['model_type']}_vision_model", **_dict(config, "vision_config")}
    known = {kind for family in families() for kind in family.model_types}
    nested = [node for name in _NODES if (node := _dict(config, name)).get("model_type") in known]
    own = tower if "vision_config" in config else next(iter(nested), config)
    facts = {name: own[name] for name in FACTS if own.get(name) is not None}
    for name, value in facts.items():
        is_eps = name == "layer_norm_eps"
        if not _has_type(value, FACTS[name]) or (is_eps and not 0 < value < 1):
            expected = "0..1" if is_eps else _EXPECTED.get(FACTS[name], "a list of integers")
            raise DataError(f"{CONFIGURATION}: {name}: got {shown(value)}, expected {expected}")
    metadata = {name: value for name, value in facts.items() if name != "num_heads"}
    heads, width = facts.get("num_attention_heads"), facts.get("hidden_size")
    if heads and width:
        metadata["num_heads"] = {width: heads}
    pixels = _processed(processor)
    files = f"{CONFIGURATION} and {PREPROCESSOR}" if pixels else CONFIGURATION
    return Recorded(metadata=metadata, config=facts, **pixels, note=_NOTE.format(files))


def check_configuration(
    config: Mapping[str, Any], family: Family, architecture: Any, where: str
) -> list[str]:
    """Compare transformers' configuration with a network that its tensors were recognized as.

    Args:
        config: `Recorded.config`.
        family: Family of the network.
        architecture: Its architecture.
        where: Name of the file, for messages.

    Returns:
        A warning if the configuration is that of another kind of network than are known here.

    Raises:
        DataError: If both contradict each other.
    """
    start, kind = f"{where}: {CONFIGURATION} next to it", config.get("model_type")
    owners = [each.name for each in families() if kind in each.model_types]
    if owners and family.name not in owners:
        raise DataError(f"{start} is of a {kind}, but its tensors are those of a {architecture}")
    for name, value in family.configured(architecture).items():
        if (got := config.get(name, value)) not in (value, [value, value]):
            text = got if isinstance(got, list) else shown(got)
            raise DataError(f"{start} has {name} {text}, but its tensors have {value}")
    if kind is None or owners:
        return []
    return [f"{CONFIGURATION} is of a {shown(kind)}, which is not known here: see what is assumed"]


def _has_type(value: Any, kind: Any) -> bool:
    """Return whether a value has a type of `FACTS`; integers are bounded."""
    if isinstance(value, list):
        return kind in (list[int], _SIZE) and 0 < len(value) < 9 and all(map(_is_count, value))
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return _is_count(value) if kind in (int, _SIZE) else type(value) is kind


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 2**16


def _processed(processor: Mapping[str, Any]) -> dict[str, Any]:
    """Return channel order, mean and std for pixels 0..255 of transformers' image processors.

    They compute (pixel * rescale_factor - mean) / std, and leave out the steps that `do_…` says.
    """
    if any(processor.get(name) for name in ("rescale_offset", "offset")):
        raise DataError(f"{PREPROCESSOR}: pixels with an offset are not supported")
    factor = processor.get("rescale_factor", 1 / 255)
    if type(factor) not in (int, float) or not 0 < factor <= 1:
        raise DataError(f"{PREPROCESSOR}: rescale_factor: got {shown(factor)}, expected 0..1")
    scale = 1 / factor if processor.get("do_rescale", True) else 1.0
    if processor.get("do_normalize") is False:
        pixels: dict[str, Any] = {"mean": (0.0,) * 3, "std": (round(scale, 6),) * 3}
    else:
        pixels = _pixels(processor, "image_mean", "image_std", PREPROCESSOR, scale)
    if pixels and processor.get("do_flip_channel_order"):
        pixels["channel_order"] = "BGR"
    return pixels


def _open_clip(config: Mapping[str, Any]) -> Recorded | None:
    """Read open_clip's configuration (src/open_clip/model.py, CLIPVisionCfg)."""
    model = _dict(config, "model_cfg")
    if not (vision := _dict(model, "vision_cfg")):
        return None
    if changed := [name for name, value in vision.items() if name.endswith("_kwargs") and value]:
        raise DataError(
            f"{OPEN_CLIP}: vision_cfg has {shown(changed[0])}, which changes the network in a way "
            "that is not supported"
        )
    pixels = _pixels(_dict(config, "preprocess_cfg"), "mean", "std", OPEN_CLIP)
    note = _NOTE.format(OPEN_CLIP)
    if isinstance(vision.get("timm_model_name"), str):
        return Recorded(arch=vision["timm_model_name"], **pixels, note=note)
    names = {"width": "hidden_size", "layers": "num_hidden_layers"}
    names |= {name: name for name in ("patch_size", "image_size")}
    metadata = {new: vision[name] for name, new in names.items() if name in vision}
    heads = vision.get("head_width", 64)
    for name, value in {**metadata, "head_width": heads}.items():
        if not _has_type(value, _SIZE) or not value:
            raise DataError(f"{OPEN_CLIP}: {name}: got {shown(value)}, expected integers")
    if type(width := metadata.get("hidden_size")) is int and type(heads) is int:
        metadata["num_heads"] = {width: width // heads}
    metadata["hidden_act"] = "quick_gelu" if model.get("quick_gelu") is True else "gelu"
    metadata["recorded_in"] = OPEN_CLIP
    return Recorded(metadata=metadata, **pixels, note=note)


def _dict(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _read(path: Path) -> Mapping[str, Any]:
    """Read the object in a JSON file; empty if there is no file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_BYTES:
        raise DataError(
            f"{path}: configuration of more than {MAX_BYTES} bytes, which is not supported"
        )
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); delete it or download it again") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: got a {type(value).__name__}, expected an object")
    return value


def _pixels(
    values: Mapping[str, Any], mean: str, std: str, file: str, scale: float = 255
) -> dict[str, Any]:
    """Return mean and std for pixels 0..255 from those for 0..255 / scale; empty if missing."""
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
        found[field] = tuple(round(scale * value, 6) for value in three)
    return found


# Arguments of timm's `create_model` that name files or other code, or ask for another kind of
# module. A record that sets one is no description of a network.
_NOT_OF_A_NETWORK = (
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"),
    *("features_only", "out_indices", "feature_cls", "scriptable", "exportable", "no_jit"),
    *("device", "dtype"),
)
# Arguments that change no feature in eval mode.
_NO_EFFECT = (
    *("num_classes", "drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop_rate"),
    *("pos_drop_rate", "patch_drop_rate", "weight_init", "head_init_scale", "strict_img_size"),
)
_MAX_NUMBER, _MAX_DEPTH = 2**16, 256  # a network of more blocks takes long to describe
NEXT_TO_IT = f"{CONFIGURATION} next to it"
_ARGUMENTS = "model_kwargs"  # of timm's train.py in `args`, of Lightning's in `hyper_parameters`


def timm_built(recorded: Any, where: str) -> dict[str, Any]:
    """Return the recorded arguments of `timm.create_model` that may change features.

    They are given to timm, whose signatures decide which ones there are, so they may hold numbers,
    truth values, texts and lists of them alone.

    Args:
        recorded: Value in the record; None if there is none.
        where: Name of the record, for messages.

    Raises:
        DataError: If it is no mapping, or an argument is not one of a network.
    """
    if recorded is None:
        return {}
    if not isinstance(recorded, Mapping):
        raise DataError(f"{where}: got {shown(recorded)}, expected arguments by name")
    found = {}
    for name, value in recorded.items():
        if (name in _NOT_OF_A_NETWORK and not value) or name in _NO_EFFECT:
            continue
        limit = _MAX_DEPTH if "depth" in str(name) or "layers" in str(name) else _MAX_NUMBER
        is_text = isinstance(name, str) and name not in _NOT_OF_A_NETWORK
        if not (is_text and _is_plain_value(value, limit)):
            raise DataError(f"{where} has {shown(name)}, which is not supported as it is set there")
        found[name] = value
    return found


def _is_plain_value(value: Any, limit: int) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64 and all(_is_plain_value(item, limit) for item in value)
    if isinstance(value, int | float):
        return math.isfinite(value) and abs(value) <= limit
    return value is None or (isinstance(value, str) and len(value) <= 100)


def recorded_arguments(raw: Any, sidecar: Recorded | None) -> dict[str, dict[str, Any]]:
    """Return timm's arguments of the networks that `recorded_names` finds, by the same places.

    Raises:
        DataError: If they are damaged.
    """
    found = {} if sidecar is None else {NEXT_TO_IT: dict(sidecar.arguments)}
    for holder in _HOLDERS[1:]:
        where = ".".join((*holder, _ARGUMENTS))
        arguments = timm_built(at(raw, (*holder, _ARGUMENTS)), where)
        found |= {".".join((*holder, key)): arguments for key in _KEYS}
        if holder == ("args",):  # timm's train.py repeats the name beside them
            found |= dict.fromkeys(_KEYS[:2], arguments)
    return {place: arguments for place, arguments in found.items() if arguments}


def recorded_names(raw: Any, sidecar: str | None, *, tags: bool = False) -> dict[str, str]:
    """Return the recorded names of a network by place, lower case, without owner.

    Args:
        raw: Contents of the file.
        sidecar: Name in the configuration next to the file, or None.
        tags: Keep timm's tags of weights, e.g. ".tv_in1k".
    """
    found = {} if sidecar is None else {NEXT_TO_IT: sidecar}
    for holder in _HOLDERS:
        for key in _KEYS if holder else _KEYS[:2]:
            if isinstance(name := at(raw, (*holder, key)), str):
                found[".".join((*holder, key))] = name
    names = {where: name.strip().lower().rpartition("/")[2] for where, name in found.items()}
    return names if tags else {where: name.partition(".")[0] for where, name in names.items()}


def _is(values: Triple, usual: Triple) -> bool:
    """Return whether numbers are the usual ones, for pixels 0..255 or 0..1."""
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
    """Scale three numbers for pixels 0..1 to pixels 0..255."""
    red, green, blue = (round(float(value) * 255, 6) for value in values)
    return (red, green, blue)
