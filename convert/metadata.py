"""Metadata that files record about their networks: normalization, strides, stem, heads, name.

The metadata is in the file itself, or in files of the Hugging Face Hub next to it (config.json,
preprocessor_config.json, processor_config.json, open_clip_config.json). It is untrusted: no name is
imported, and no value chooses a path.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from convert.facts import MM, TRANSFORMERS, check_facts
from convert.facts import OPEN_CLIP as OPEN_CLIP_RECORD
from convert.families.base import Family, families, scale_to_255
from convert.families.timm import network_arguments
from convert.read import get_nested, is_array, to_tensor
from moco.common.errors import DataError, format_value
from moco.common.files import read_bytes
from moco.common.pretrained import SIDECARS, sidecar
from moco.modeling.archs import VITS, ViTSpec
from moco.modeling.soundness import Triple, is_triple, read_input, read_spec

MAX_CHARACTERS = 1 << 18  # configurations have up to 50,000
MAX_DICT_ITEMS = 1 << 17  # of all dicts together


class Settings:
    """Assignments of literals at the top of Python source.

    Literals, calls of `dict` with keywords, and names that were assigned before are read; another
    expression is an object that equals nothing.

    Args:
        source: The source.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: If it is no Python, or too long.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_CHARACTERS:
            raise ValueError("source is too long")
        self.values: dict[str, Any] = {}
        self._entries = 0
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self.values[statement.targets[0].id] = self._value(statement.value)
            elif isinstance(statement, ast.Expr):
                self.values.setdefault("", []).append(self._value(statement.value))

    def dicts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield every dict and the name or key under which it is, outer ones first, each once."""
        waiting, seen = collections.deque(self.values.items()), set[tuple[str, int]]()
        while waiting:
            key, value = waiting.popleft()
            if (key, id(value)) in seen:  # names may hold each other in many ways
                continue
            seen.add((key, id(value)))
            if isinstance(value, dict):
                yield key, value
                waiting += [(str(name), inner) for name, inner in value.items()]
            elif isinstance(value, list | tuple):
                waiting += [(key, inner) for inner in value]

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [self._value(item) for item in node.elts]
            case ast.Dict():
                keys = [None if key is None else self._value(key) for key in node.keys]
                return self._joined(zip(keys, node.values, strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[]):
                return self._joined((each.arg, each.value) for each in node.keywords)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Name() if node.id in self.values:
                return self.values[node.id]
        return object()

    def _joined(self, items: Any) -> dict[str, Any]:
        """Return a dict of texts, into which a key of None merges another one, as `**` does."""
        found: dict[str, Any] = {}
        for key, node in items:
            value = self._value(node)
            if key is None and isinstance(value, dict):
                found |= value
            elif isinstance(key, str):
                found[key] = value
        self._entries += len(found)
        if self._entries > MAX_DICT_ITEMS:
            raise ValueError("dicts are merged too often")
        return found


CONFIGURATION, PREPROCESSOR, OPEN_CLIP, PROCESSOR = SIDECARS
NEXT_TO_IT = f"{CONFIGURATION} next to it"
MAX_BYTES = 1 << 20
FAIR_STD = (57.375, 57.12, 58.395)  # BGR
# Dicts and keys in which training scripts save the name of the network.
_HOLDERS = ((), ("args",), ("hyper_parameters",), ("hyper_parameters", "backbone"))
_KEYS = ("arch", "architecture", "model", "model_name", "backbone", "encoder", "name")


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a file; None for what it does not record.

    Attributes:
        arch: Name of the architecture.
        metadata: Facts about the network that no tensor holds, as a family's `recognize` takes
            them.
        facts: Facts that the record states, by the names in the record, for `convert.facts`.
        kind: Kind of the record, a key of `convert.facts.COMPARED`, or "".
        file: Name of the record, for messages.
        channel_order: "RGB" or "BGR".
        mean, std: Pixel statistics, 0..255, in the order of `channel_order`.
        arguments: Arguments of timm's `create_model` with which `arch` was built.
        owner: Origin of the network, if it is not the one in the project's name.
        other: Differences from the documented convention of the project.
        note: Note for the report.
    """

    arch: str | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = ""
    file: str = ""
    channel_order: str | None = None
    mean: Triple | None = None
    std: Triple | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    owner: str = ""
    other: tuple[str, ...] = ()
    note: str = ""


def own_record(raw: Mapping[Any, Any]) -> CheckpointMetadata:
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
        metadata = {"num_attention_heads": vit.num_heads}
    else:
        metadata = {"stem": spec.stem, "width": spec.width}
    return CheckpointMetadata(
        arch=spec.arch,
        metadata=metadata,
        channel_order=order,
        mean=scale_to_255(mean),
        std=scale_to_255(std),
    )


def timm_arguments(raw: Mapping[Any, Any]) -> CheckpointMetadata:
    """Read the arguments of timm's train.py; `--mean` and `--std` override the model's own."""
    args = raw.get("args")
    found: dict[str, Triple] = {}
    for name in ("mean", "std"):
        values = args.get(name) if isinstance(args, Mapping) else None
        if isinstance(values, list | tuple) and len(values) == 3:
            try:
                found[name] = scale_to_255(values)
            except (TypeError, ValueError, OverflowError) as error:
                raise DataError(f"args.{name} is not three numbers") from error
    return CheckpointMetadata(mean=found.get("mean"), std=found.get("std"))


def generic_record(raw: Mapping[Any, Any]) -> CheckpointMetadata:
    """Read the metadata of an unknown project's file in the formats of known frameworks.

    The formats are mmcv's `meta.config`, and timm's `args` with a mean and a standard deviation,
    for pixels 0..1 or 0..255.
    """
    if any(isinstance(get_nested(raw, ("meta", name)), str) for name in ("config", "cfg")):
        return mm_configuration(raw)
    recorded = timm_arguments(raw)
    if not (recorded.mean and recorded.std):
        return CheckpointMetadata()
    if max(recorded.mean) <= 255:
        return recorded
    mean, std = ((r / 255, g / 255, b / 255) for r, g, b in (recorded.mean, recorded.std))
    return CheckpointMetadata(mean=mean, std=std)


def mm_configuration(raw: Mapping[Any, Any]) -> CheckpointMetadata:
    """Read mmcv's or mmengine's configuration in `meta`: the pixels, and `model.backbone`.

    The configuration is Python source, of which literals and calls of `dict` are read and nothing
    is executed. Mean and std are for pixels 0..255 or 0..1.
    """
    meta = raw.get("meta")
    texts = [meta.get(name) for name in ("config", "cfg")] if isinstance(meta, Mapping) else []
    text = "\n".join(text for text in texts if isinstance(text, str))
    try:
        found = Settings(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return CheckpointMetadata(other=("no literals of Python",))
    pixels = {_mm_pixels(key, its) for key, its in found.dicts() if _has_pixels(its)}
    if len(pixels) > 1:
        return CheckpointMetadata(other=("several normalizations of pixels",))
    mean, std, order = next(iter(pixels), (None, None, None))
    backbone = next((its for key, its in found.dicts() if key == "backbone" and "type" in its), {})
    facts = dict(backbone)
    if isinstance(kind := facts.get("type"), str):
        facts["type"] = kind.rpartition(".")[2]  # without the library's name
    depth = facts.get("depth")
    is_deep = type(depth) is int and depth >= 50
    metadata = {"stride_in_1x1": True} if is_deep and facts.get("style") == "caffe" else {}
    note = "" if mean else "the configuration in meta has no mean and std: assuming ImageNet's"
    return CheckpointMetadata(
        metadata=metadata,
        facts=facts,
        kind=MM if facts else "",
        file="meta.config",
        channel_order=order,
        mean=mean,
        std=std,
        note=note,
    )


def _has_pixels(its: Mapping[str, Any]) -> bool:
    return all(is_triple(its.get(name)) for name in ("mean", "std"))


def _mm_pixels(key: str, its: Mapping[str, Any]) -> tuple[Triple, Triple, str]:
    """Return mean, std and channel order of one normalization, for pixels 0..255.

    By default, mmengine's data_preprocessor keeps OpenCV's BGR, and mmcv's Normalize converts to
    RGB. torchvision's Normalize, of the same name, is for pixels 0..1 and is given RGB.
    """
    told = next((its[name] for name in ("to_rgb", "bgr_to_rgb") if name in its), None)
    is_mmengine = key == "data_preprocessor"
    is_rgb = not is_mmengine if told is None else told is True
    largest = max(map(abs, (*its["mean"], *its["std"])))
    scale = 1 if is_mmengine or largest > 1 else 255
    mean, std = (tuple(round(scale * v, 6) for v in its[name]) for name in ("mean", "std"))
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), "RGB" if is_rgb else "BGR"


def caffe2_record(raw: Mapping[Any, Any]) -> CheckpointMetadata:
    """Determine the convention of the network in a Caffe2 file, and check that biases are zero.

    MSRA's convention applies to MSRA's networks; of other networks only the convention of FAIR's
    X-101-32x8d is documented (detectron2's
    configs/COCO-InstanceSegmentation/mask_rcnn_X_101_32x8d_FPN_3x.yaml).

    Raises:
        DataError: If it is another ResNeXt, or a bias that the network lacks is not zero.
    """
    model = raw.get("model")
    blobs: Mapping[Any, Any] = model if isinstance(model, Mapping) else raw
    first: Any = blobs.get("res2_0_branch2a_w")
    second: Any = blobs.get("res2_0_branch2b_w")
    found = CheckpointMetadata()
    if is_array(first) and is_array(second) and first.shape[0] != second.shape[1] > 0:
        groups, width = first.shape[0] // second.shape[1], second.shape[1]
        deep = "res4_22_branch2a_w" in blobs and "res3_4_branch2a_w" not in blobs
        if not (deep and (groups, width) == (32, 8)):
            raise DataError(
                "unsupported ResNeXt in Caffe2's names: its std and stride are not MSRA's "
                "(detectron2's mask_rcnn_X_101_32x8d_FPN_3x.yaml)"
            )
        metadata = {"stride_in_1x1": False}
        found = CheckpointMetadata(owner="FAIR X-101-32x8d", std=FAIR_STD, metadata=metadata)
    for key, value in blobs.items():
        norms = ("_bn_b",) if "res_conv1_bn_s" in blobs else ()  # folded statistics
        if not str(key).endswith("_b") or str(key).endswith(("fc1000_b", *norms)):
            continue
        bias = to_tensor(key, value, "").abs()
        if bool(bias.any()) and key != "conv1_b":
            raise DataError(f"{format_value(key)} is not zero, but the network has no such bias")
        if bool(bias.any()):
            note = (
                f"conv1_b (up to {float(bias.max()):.2g}) is dropped, as in Detectron2, whose "
                "networks have no such bias"
            )
            found = dataclasses.replace(found, note=note)
    return found


def read_sidecar(weights: Path) -> CheckpointMetadata | None:
    """Read the configuration next to a file, or return None if there is none.

    Configurations of transformers (`model_type`), timm (`architecture`) and, for files of that
    name, open_clip are read; others are ignored.

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
        arguments = network_arguments(config.get("model_args"), f"{CONFIGURATION}: model_args")
        return CheckpointMetadata(
            config["architecture"], metadata, **pixels, arguments=arguments, note=note
        )
    if "model_type" in config:
        # transformers 5 writes both to one file, and prefers that file when reading.
        joint = _dict(_read(sidecar(weights, PROCESSOR)), "image_processor")
        if joint:
            return _transformers(config, joint, PROCESSOR)
        return _transformers(config, _read(sidecar(weights, PREPROCESSOR)), PREPROCESSOR)
    return None


_NOTE = "using {} next to the file"
# Facts of transformers' configuration that are metadata under the same names -> their types.
USED: dict[str, Any] = {
    **{"hidden_act": str, "layer_norm_eps": float, "downsample_in_bottleneck": bool},
    "num_attention_heads": int,
}


IN_TIMM = "timm_backbone"  # transformers' kind of networks that timm builds
# Keys of a configuration under which that of an image network may be, e.g. of Depth-Anything,
# MaskFormer, and VisionEncoderDecoder.
_NODES = ("backbone_config", "encoder", "vision_encoder")
_EXPECTED = {str: "a text", float: "0..1", bool: "true or false", int: "an integer, 1..65536"}


def _transformers(
    config: Mapping[str, Any], processor: Mapping[str, Any], processor_file: str
) -> CheckpointMetadata:
    """Read transformers' configuration, or the part about the image network of a larger network."""
    inner = _dict(config, "backbone_config")
    for node, key, usual in ((config, "dilation", False), (inner, "output_stride", 32)):
        if node.get(key, usual) not in (usual, None):
            raise DataError(
                f"{CONFIGURATION}: {key} is {format_value(node[key])}: the last stage of its "
                "backbone is dilated, which no detector here has"
            )
    kind = config["model_type"]
    if not isinstance(kind, str):
        raise DataError(f"{CONFIGURATION}: model_type: got {format_value(kind)}, expected a text")
    facts = _node(config)
    # Other kinds of networks, which are refused by their type, may have lists in the same place.
    names = USED if is_known(config) else ()
    used = {name: facts[name] for name in names if facts.get(name) is not None}
    for name, value in used.items():
        if not _has_type(value, USED[name]):
            expected = _EXPECTED[USED[name]]
            raise DataError(
                f"{CONFIGURATION}: {name}: got {format_value(value)}, expected {expected}"
            )
    metadata = {"model_type": facts["model_type"], **used}
    its = facts.get("backbone")
    arch = its if facts["model_type"] == IN_TIMM and isinstance(its, str) else None
    pixels = _processed(processor, processor_file)
    files = f"{CONFIGURATION} and {processor_file}" if pixels else CONFIGURATION
    note = _NOTE.format(files)
    return CheckpointMetadata(arch, metadata, facts, TRANSFORMERS, NEXT_TO_IT, **pixels, note=note)


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration of transformers describes a network of a family."""
    kind = _node(config).get("model_type")
    return any(kind in family.model_types for family in families())


def _node(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of transformers' configuration that describes the image network."""
    if "vision_config" in config:
        kind = f"{config['model_type']}_vision_model"
        return {"model_type": kind, **_dict(config, "vision_config")}
    nested = (_dict(config, name) for name in _NODES)
    node = next((node for node in nested if "model_type" in node), config)
    name = node.get("backbone")  # DETR and others name a network of timm or the Hub here
    if isinstance(name, str) and node.get("model_type") != IN_TIMM:
        return {**_dict(node, "backbone_kwargs"), "backbone": name, "model_type": IN_TIMM}
    return node


def check_kind(recorded: CheckpointMetadata, family: Family, where: str) -> None:
    """Check that a record of transformers describes a kind of network that a family has.

    Raises:
        DataError: If the record describes another kind.
    """
    kind = recorded.facts.get("model_type", "")
    if kind in ("", IN_TIMM, *family.model_types):
        return
    its = f"its tensors are those of {family.networks.partition(' (')[0]}"
    text = f", but {its}"
    if not any(kind in each.model_types for each in families()):
        text = f", which is not supported; {its}: remove that file if it is a plain one"
    raise DataError(f"{where}: {recorded.file} describes a {format_value(kind)}{text}")


def _has_type(value: Any, kind: Any) -> bool:
    """Return whether a value has a type of `USED`, and is within its bounds."""
    if kind is float:
        return type(value) in (int, float) and 0 < value < 1
    if kind is int:
        return type(value) is int and 0 < value <= 2**16
    return type(value) is kind


def _processed(processor: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return channel order, mean and std for pixels 0..255 of transformers' image processors.

    The processors compute (pixel * rescale_factor - mean) / std; flags `do_…` turn steps off.
    """
    if any(processor.get(name) for name in ("rescale_offset", "offset")):
        raise DataError(f"{file}: pixels with an offset are not supported")
    factor = processor.get("rescale_factor", 1 / 255)
    if type(factor) not in (int, float) or not 0 < factor <= 1:
        raise DataError(f"{file}: rescale_factor: got {format_value(factor)}, expected 0..1")
    scale = 1 / factor if processor.get("do_rescale", True) else 1.0
    if processor.get("do_normalize") is False:
        pixels: dict[str, Any] = {"mean": (0.0,) * 3, "std": (round(scale, 6),) * 3}
    else:
        pixels = _pixels(processor, "image_mean", "image_std", file, scale)
    if pixels and processor.get("do_flip_channel_order"):
        pixels["channel_order"] = "BGR"
    return pixels


def _open_clip(config: Mapping[str, Any]) -> CheckpointMetadata | None:
    """Read open_clip's configuration (src/open_clip/model.py, CLIPVisionCfg)."""
    model = _dict(config, "model_cfg")
    if not (vision := _dict(model, "vision_cfg")):
        return None
    pixels = _pixels(_dict(config, "preprocess_cfg"), "mean", "std", OPEN_CLIP)
    note = _NOTE.format(OPEN_CLIP)
    name = vision.get("timm_model_name")
    if isinstance(name, str):
        check_facts(OPEN_CLIP_RECORD, vision, ("timm", None, {}), OPEN_CLIP)
        return CheckpointMetadata(name, **pixels, note=note)
    width, heads = vision.get("width", 768), vision.get("head_width", 64)
    for name, value in {"width": width, "head_width": heads}.items():
        if not _has_type(value, int):
            expected = _EXPECTED[int]
            raise DataError(f"{OPEN_CLIP}: {name}: got {format_value(value)}, expected {expected}")
    quick_gelu = model.get("quick_gelu") is True
    metadata = {
        "num_attention_heads": max(1, width // heads),
        "hidden_act": "quick_gelu" if quick_gelu else "gelu",
    }
    facts = {**vision, "quick_gelu": quick_gelu}
    file = f"{OPEN_CLIP} next to it"
    return CheckpointMetadata(None, metadata, facts, OPEN_CLIP_RECORD, file, **pixels, note=note)


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
    """Return mean and std for pixels 0..255, given for 0..255 / scale; empty if missing."""
    found = {}
    for field, name in (("mean", mean), ("std", std)):
        three = values.get(name)
        if three is None:
            return {}
        if not is_triple(three):
            raise DataError(f"{file}: {name}: got {format_value(three)}, expected three numbers")
        found[field] = tuple(round(scale * value, 6) for value in three)
    return found


_ARGUMENTS = "model_kwargs"  # in `args` of timm's train.py, in Lightning's `hyper_parameters`


def recorded_arguments(raw: Any, sidecar: CheckpointMetadata | None) -> dict[str, dict[str, Any]]:
    """Return the arguments of timm's `create_model` by place, as `recorded_names` returns names.

    Raises:
        DataError: If they are damaged.
    """
    found = {} if sidecar is None else {NEXT_TO_IT: dict(sidecar.arguments)}
    for holder in _HOLDERS[1:]:
        where = ".".join((*holder, _ARGUMENTS))
        arguments = network_arguments(get_nested(raw, (*holder, _ARGUMENTS)), where)
        if holder == ("args",) and get_nested(raw, ("args", "bn_eps")) is not None:  # --bn-eps
            arguments |= network_arguments({"bn_eps": get_nested(raw, ("args", "bn_eps"))}, "args")
        found |= {".".join((*holder, key)): arguments for key in _KEYS}
        if holder == ("args",):  # timm's train.py repeats the name at the top level
            found |= dict.fromkeys(_KEYS[:2], arguments)
    return {place: arguments for place, arguments in found.items() if arguments}


def recorded_names(raw: Any, sidecar: str | None, *, tags: bool = False) -> dict[str, str]:
    """Return the recorded names of a network by place, in lower case, without the owner.

    Args:
        raw: Contents of the file.
        sidecar: Name in the configuration next to the file, or None.
        tags: Keep timm's tags of weights, e.g. ".tv_in1k".
    """
    found = {} if sidecar is None else {NEXT_TO_IT: sidecar}
    for holder in _HOLDERS:
        for key in _KEYS if holder else _KEYS[:2]:
            if isinstance(name := get_nested(raw, (*holder, key)), str):
                found[".".join((*holder, key))] = name
    names = {where: name.strip().lower().rpartition("/")[2] for where, name in found.items()}
    return names if tags else {where: name.partition(".")[0] for where, name in names.items()}
