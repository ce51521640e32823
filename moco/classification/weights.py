"""The pre-trained network that a classification starts from. Never silently a random one.

A file is this project's (pre-training, or an earlier classification), or one of LAYOUTS. Every key
of it is a tensor of the network or dropped by a rule with a name, and every tensor of the network
is filled; anything else is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moco.classification.config import IMAGENET_MEAN, IMAGENET_STD
from moco.common.errors import DataError, UserError
from moco.common.files import PathLike, format_of, load_safetensors, load_torch, sha256_file
from moco.engine.checkpoint import CLASSIFIER_FORMAT, FORMAT, PREFIX, load_checkpoint
from moco.modeling.encoder import ARCHS, EncoderSpec, ResNet, build_backbone
from moco.modeling.soundness import (
    check_arch,
    check_network,
    check_trained,
    problem,
    read_input,
    read_spec,
)

RANDOM = "random"
ENDINGS = (".pth.tar", ".pth", ".pt", ".tar", ".pkl", ".safetensors")
HEAD = "fc."  # of any kind: projection or classifier
# Not in files of torch before 0.4.1; only a BN with momentum None reads it.
MAY_BE_MISSING = ".num_batches_tracked"
MAX_NAMED = 8


class Layout(NamedTuple):
    """A checkpoint that others write."""

    name: str
    container: str | None  # key of the state dict; None: the file is one
    prefix: str  # of the network's tensors
    dropped: tuple[str, ...] = ()  # starts of keys that belong to something else


LAYOUTS = (
    # facebookresearch/moco@7397dfe main_moco.py (the dict) and moco/builder.py (the names).
    Layout(
        "facebookresearch/moco",
        "state_dict",
        "module.encoder_q.",
        ("module.encoder_k.", "module.queue"),
    ),
    # pytorch/examples imagenet/main.py, and main_lincls.py after it.
    Layout("pytorch/examples", "state_dict", "module."),
    # torchvision/models/resnet.py: net.state_dict().
    Layout("torchvision", None, ""),
)


@dataclass(frozen=True)
class Weights:
    """Where a run starts.

    Attributes:
        init: its name in a table.
        spec: the network.
        state: the network's tensors without its head, in torchvision's names; None: random.
        mean, std: what its pixels of 0..1 are normalized by, RGB.
        sha256: of the file. source: of which layout it is.
        warnings: what a reader of the result has to know of the weights.
    """

    init: str
    spec: EncoderSpec
    state: dict[str, Tensor] | None
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    sha256: str | None = None
    source: str | None = None
    warnings: tuple[str, ...] = ()


class Own(NamedTuple):
    """The network of a checkpoint of this project, in evaluation mode, and its input (0..1)."""

    spec: EncoderSpec
    backbone: ResNet
    mean: tuple[float, ...]
    std: tuple[float, ...]
    warnings: tuple[str, ...]


def read_weights(
    checkpoint: str, arch: str = "", stem: str = "", width: float = 0.0, init: str = ""
) -> Weights:
    """The weights that the word `random` or a file stands for.

    Args:
        checkpoint: `random` or a path.
        arch, stem, width: what the network has to be; `""` and 0: as the file has it.
        init: the name in a table; `""`: the file's without its ending, with the folder's name
            before it for files called `checkpoint_*`.

    Raises:
        UserError: the network is not determined, or is not the one asked for.
        DataError: missing, damaged, of an unknown layout, not the whole of a network, or one that
            was never trained or overflows.
    """
    if checkpoint == RANDOM:
        if not arch:
            raise UserError(
                "MODEL.ARCH is not set; --checkpoint random needs to know the network, e.g. "
                f"-a resnet50 (choices are {', '.join(ARCHS)})"
            )
        return Weights(init or RANDOM, EncoderSpec(arch, stem or "imagenet", width or 1.0), None)
    path = Path(checkpoint).expanduser()
    # A plain state dict where it is safetensors.
    is_plain = format_of(path) == "safetensors"
    raw: Any = load_safetensors(path)[0] if is_plain else load_torch(path, objects=set())
    if not isinstance(raw, Mapping):
        raise DataError(f"{path}: holds {type(raw).__name__}, expected a checkpoint's dictionary")
    if raw.get("format") in (FORMAT, CLASSIFIER_FORMAT):
        own = own_network(path, load_checkpoint(path, raw["format"]))
        spec, state, mean, std = own.spec, own.backbone.state_dict(), own.mean, own.std
        source, warnings = str(raw["format"]), own.warnings
    else:
        layout, state = _foreign(path, raw)
        spec = _identify(path, state, arch, stem, width)
        source, mean, std = layout.name, IMAGENET_MEAN, IMAGENET_STD
        _, warnings = _check(path, spec, state, raw.get("arch"))
    for name, asked, got in (
        ("ARCH", arch, spec.arch),
        ("STEM", stem, spec.stem),
        ("WIDTH", width, spec.width),
    ):
        if asked and asked != got:
            raise UserError(f"MODEL.{name}: got {asked}, but {path} holds a network of {got}")
    name = init or init_name(path)
    if name == RANDOM:
        raise UserError(f"{path}: would be called {RANDOM!r} in a table; give it another --init")
    return Weights(name, spec, state, mean, std, sha256_file(path), source, warnings)


def init_name(path: Path) -> str:
    """What weights are called in a table, see `read_weights`."""
    name = path.name
    for ending in ENDINGS:
        if name.endswith(ending):
            name = name.removesuffix(ending)
            break
    folder = path.resolve().parent.name
    return f"{folder}_{name}" if name.startswith("checkpoint_") and folder else name


def own_network(path: PathLike, content: Mapping[str, Any]) -> Own:
    """The network of a checkpoint that `load_checkpoint` read, by the checks of the converter.

    Raises:
        DataError: a damaged record, tensors that do not fit it, or unsound ones.
    """
    prefix = f"{PREFIX}encoder_q." if content["format"] == FORMAT else PREFIX
    try:
        spec = read_spec(content)
        order, mean, std = read_input(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if order != "RGB":
        raise DataError(f"{path}: its network takes {order}, but images are read as RGB here")
    state = {
        name.removeprefix(prefix): _tensor(path, name, value)
        for name, value in content["state_dict"].items()
        if isinstance(name, str) and name.startswith(prefix) and not name.startswith(prefix + HEAD)
    }
    conv1 = state.get("conv1.weight")
    if conv1 is None or not conv1.dim() or conv1.shape[0] != spec.stem_channels:
        got = "no" if conv1 is None else conv1.shape[:1].numel()
        raise DataError(
            f"{path}: says width {spec.width:g}, but {prefix}conv1.weight has {got} channels "
            f"instead of {spec.stem_channels}"
        )
    if differences := _differences(state, spec):
        raise DataError(f"{path}: not a whole {spec.arch}: {_named(differences, quote=False)}")
    backbone, warnings = _check(path, spec, state, content["arch"])
    return Own(spec, backbone, mean, std, warnings)


def _check(
    path: PathLike, spec: EncoderSpec, state: Mapping[str, Tensor], arch: Any
) -> tuple[ResNet, tuple[str, ...]]:
    """The network of these tensors, in evaluation mode, and warnings; raises DataError."""
    bad = {name: wrong for name, value in state.items() if (wrong := problem(name, value))}
    warnings = check_trained(state, str(path))
    if bad:
        texts = [f"{wrong}: {name}" for name, wrong in bad.items()]
        raise DataError(f"{path}: not sound ({_named(texts, quote=False)})")
    known = ARCHS[spec.arch]
    shape = {
        "depth": int("".join(filter(str.isdigit, spec.arch.partition("_")[0]))),
        "num_groups": known.groups,
        "width_per_group": known.width_per_group,
        "stem_out_channels": spec.stem_channels,
    }
    check_arch(arch, shape, str(path), [], warnings)
    backbone = build_backbone(spec).eval()
    backbone.load_state_dict(dict(state), strict=False)  # whole, but for counters
    check_network(backbone, str(path))
    return backbone, tuple(warnings)


def _foreign(path: Path, raw: Mapping[Any, Any]) -> tuple[Layout, dict[str, Tensor]]:
    """The layout, and the network's tensors without prefix and head."""
    for layout in LAYOUTS:
        found = raw if layout.container is None else raw.get(layout.container)
        if isinstance(found, Mapping) and f"{layout.prefix}conv1.weight" in found:
            break
    else:
        inner = raw.get("state_dict", raw)
        keys = inner if isinstance(inner, Mapping) else raw
        raise DataError(
            f"{path}: unknown layout (it holds {_named(keys)}); known are checkpoints of "
            f"this project, {', '.join(known.name for known in LAYOUTS)}; or say random"
        )
    state: dict[str, Tensor] = {}
    unknown = []
    for key, value in found.items():
        name = key.removeprefix(layout.prefix) if isinstance(key, str) else ""
        if isinstance(key, str) and key.startswith(layout.dropped):
            continue
        if not isinstance(key, str) or not key.startswith(layout.prefix):
            unknown.append(key)
        elif not name.startswith(HEAD):
            state[name] = _tensor(path, key, value)
    if unknown:
        raise DataError(
            f"{path}: keys that a {layout.name} checkpoint does not have: {_named(unknown)}"
        )
    return layout, state


def _tensor(path: PathLike, key: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
        raise DataError(f"{path}: {key[:80]!r} is a {type(value).__name__}, expected dense numbers")
    if value.is_complex() or (not value.is_floating_point() and not key.endswith(MAY_BE_MISSING)):
        raise DataError(f"{path}: {key[:80]!r} is of {value.dtype}, expected floating point")
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise DataError(f"{path}: {key[:80]!r} claims more elements than the file holds for it")
    return value


def _identify(
    path: Path, state: Mapping[str, Tensor], arch: str, stem: str, width: float
) -> EncoderSpec:
    """The network whose tensors have these names and shapes, all of them."""
    conv1 = state["conv1.weight"]
    if conv1.dim() != 4 or conv1.shape[0] % 8:
        raise DataError(f"{path}: conv1.weight is of shape {list(conv1.shape)}, not a ResNet's")
    if conv1.shape[-1] == 3 and not stem:
        raise UserError(
            f"{path}: its first convolution is 3x3 and the file does not tell the stride; "
            "set MODEL.STEM cifar (1) or stride2 (2)"
        )
    specs = [
        EncoderSpec(name, stem or "imagenet", width or conv1.shape[0] / 64)
        for name in ([arch] if arch else ARCHS)
    ]
    differences = {spec: _differences(state, spec) for spec in specs}
    best = min(specs, key=lambda spec: len(differences[spec]))
    if differences[best]:
        raise DataError(
            f"{path}: not a whole {best.arch} of width {best.width:g} with the {best.stem} stem: "
            f"{_named(differences[best], quote=False)}"
        )
    return best


def _differences(state: Mapping[str, Tensor], spec: EncoderSpec) -> list[str]:
    """What is missing, unexpected, or of another shape than in the network."""
    with torch.device("meta"):
        wanted = build_backbone(spec).state_dict()
    missing = [
        f"{name} is missing"
        for name in wanted
        if name not in state and not name.endswith(MAY_BE_MISSING)
    ]
    unexpected = [f"{name[:80]!r} is unexpected" for name in state if name not in wanted]
    shapes = [
        f"{name} is of shape {list(state[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in state and state[name].shape != tensor.shape
    ]
    return missing + unexpected + shapes


def _named(items: Sequence[Any] | Mapping[Any, Any], quote: bool = True) -> str:
    """The first of many; escaped, because they come from a stranger's file."""
    words = [repr(item)[:80] if quote else str(item) for item in items]
    more = f" and {len(words) - MAX_NAMED} more" if len(words) > MAX_NAMED else ""
    return ", ".join(words[:MAX_NAMED]) + more or "nothing"
