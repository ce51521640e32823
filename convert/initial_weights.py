"""Initial weights of pre-training and classification, from any recognized checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.families.resnet import ResNetArchitecture
from convert.families.vit import GELU, ViTArchitecture
from moco.common.command import RANDOM, convert_first
from moco.common.errors import DataError, UserError
from moco.common.pretrained import init_name
from moco.modeling.archs import ARCHS, VITS, EncoderSpec, Spec, ViTSpec, build_spec

if TYPE_CHECKING:
    from torch import Tensor

    from convert.recognize import Recognition
    from moco.engine.weights import InitialWeights

# Prefixes of the tensors that facebookresearch/moco and this project save next to the query
# encoder's backbone.
_MECHANISM_PREFIXES = ("encoder_q.fc.", "encoder_q.head.", "encoder_k.", "predictor.", "queue")


def read_initial_weights(
    file: str,
    arch: str = "",
    stem: str = "",
    width: float = 0.0,
    init: str = "",
    image_size: int = 224,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> InitialWeights:
    """Read initial weights from a file, with head, key encoder and queue of a MoCo checkpoint.

    Args:
        file: Path of a file or folder, name or address that moco/common/pretrained.py downloads, or
            `random`.
        arch: Required architecture, or `""` for the file's.
        stem: Required stem, or `""` for the file's.
        width: Required width, or 0 for the file's.
        init: Name in result tables; `""` derives it from the file.
        image_size: Side of the images that a random ViT has positions for, in px.
        mean: Mean of RGB pixels 0..255, or None for that of the file or its project.
        std: Standard deviation of RGB pixels 0..255, or None for that of the file or its project.

    Raises:
        UserError: If the network is ambiguous, not the required one, or unsupported in training.
        DataError: If the file is missing or damaged, or has no known network, one that was never
            trained, or one whose features overflow.
    """
    from convert.contract import Overrides
    from convert.read import digests, find_file, read_file
    from convert.translate import translate
    from moco.engine.weights import InitialWeights
    from moco.modeling.encoder import load_backbone
    from moco.modeling.soundness import check_network

    if file == RANDOM:
        return _random_weights(arch, stem, width, init, image_size)
    if arch in VITS:
        stem, width = "", 0.0  # defaults of keys that only ResNets have
    located = find_file(file)
    path = located.path
    objects: set[str] = set()
    raw = read_file(path, objects)
    try:
        pixels = {"mean": mean and tuple(mean), "std": std and tuple(std)}
        found = translate(path, raw, Overrides.from_options(stem=stem or None, **pixels), objects)
    except UserError as error:
        text = str(error).replace("--stem", "MODEL.STEM")
        if error.option:
            text += f"; {convert_first()}"
        raise type(error)(text) from error
    contract = found.contract
    try:
        spec = encoder_spec(contract.architecture)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    is_vit = isinstance(spec, ViTSpec)
    unlike = not is_vit and (contract.architecture.in_torchvision() or contract.bn_folded)
    if contract.pixels.channel_order != "RGB" or unlike:
        raise UserError(
            f"{path}: {contract.source}, {contract.convention()}; expected RGB pixels, the stride "
            "in the 3x3 conv, and batch norm with statistics"
        )
    try:
        pooling = _class_token(raw, found, path) if is_vit else {}
        network = load_backbone(spec, found.state | pooling)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except RuntimeError as error:  # unusual numbers of channels in a later stage
        raise DataError(f"{path}: not a whole {contract.architecture}") from error
    if not stem and getattr(spec, "stem", "") == "cifar" and _can_be_stride2(path, raw):
        raise UserError(
            f"{path}: its first convolution is 3x3 and the file does not record its stride; "
            "set MODEL.STEM (or --stem) cifar (1) or stride2 (2)"
        )
    for name, requested in {"ARCH": arch, "STEM": stem, "WIDTH": width}.items():
        if requested and requested != (got := spec.model_keys().get(name, requested)):
            raise UserError(f"MODEL.{name}: got {requested}, but {path} holds a network of {got}")
    check_network(network, str(path), contract.family.image_size(contract.architecture))
    mean, std = (
        tuple(round(value / 255, 8) for value in values)
        for values in (contract.pixels.mean, contract.pixels.std)
    )
    pixel_notes = [f"pixels: mean {mean}, std {std}, as requested"] if any(pixels.values()) else []
    name = init or located.init or _name_in_tables(path)
    if name == RANDOM:
        raise UserError(
            f"{path}: would be called {RANDOM!r} in a table; set another name with --init"
        )
    own = contract.source.startswith("moco-transfer") and isinstance(raw.get("config"), Mapping)
    return InitialWeights(
        init=name,
        spec=spec,
        state=network.state_dict(),
        extra=_mechanism_tensors(raw, path),
        mean=mean,
        std=std,
        sha256=digests(path)[0],
        source=contract.source,
        notes=(*located.notes, *found.converted.notes, *pixel_notes),
        config=raw["config"] if own else {},
        seed=raw["seed"] if own and type(raw.get("seed")) is int else 0,
    )


def _name_in_tables(path: Path) -> str:
    """Return the name of a file's weights in tables, with the folder of a numbered checkpoint."""
    name, folder = init_name(str(path)), path.resolve().parent.name
    return f"{folder}_{name}" if name.startswith("checkpoint_") and folder else name


def encoder_spec(architecture: Any) -> Spec:
    """Return the encoder of `moco.modeling` for the architecture of an input contract.

    Raises:
        UserError: If there is none.
    """
    a = architecture
    if isinstance(a, ViTArchitecture):
        others = a.layer_scale or a.swiglu or a.rotary or a.tokens > 0 or a.pre_norm
        parts = a.mlp_dim, a.activation, a.qkv_bias, a.patch_bias, others
        if parts != (4 * a.embed_dim, GELU, True, True, False):
            raise UserError(
                f"{a}, MLPs of {a.mlp_dim}: expected a vision transformer with MLPs of four times "
                "its width, exact GELU, a bias of queries, keys and values, and no LayerScale, "
                "SwiGLU, rotary positions, registers or norm before the blocks"
            )
        return ViTSpec.of_shape(a.embed_dim, a.depth, a.num_heads, a.patch_size, a.image_size)
    if not isinstance(a, ResNetArchitecture):
        raise UserError(f"{a}: expected a ResNet or a vision transformer")
    return EncoderSpec.of_shape(
        a.stem, a.depth, a.num_groups, a.width_per_group, a.stem_out_channels
    )


def _class_token(raw: Any, found: Recognition, path: Path) -> dict[str, Tensor]:
    """Return the class token and final norm of the chosen network, which detectors drop.

    Several networks of a file may have these names, so only the dict of the chosen network is read.

    Raises:
        UserError: If one of the tensors is missing.
    """
    from convert.read import get_nested, to_tensor

    holder = get_nested(raw, found.keys) or {}
    names = {name: found.named(name) for name in ("cls_token", "norm.weight", "norm.bias")}
    if missing := [name for name in names.values() if name not in holder]:
        raise UserError(
            f"{path}: {', '.join(missing)} is missing, which the image feature of a vision "
            "transformer needs; give the checkpoint that it was made from"
        )
    return {name: to_tensor(key, holder[key], str(path)).float() for name, key in names.items()}


def _can_be_stride2(path: Path, raw: Any) -> bool:
    from convert.contract import Overrides
    from convert.translate import translate

    try:
        translate(path, raw, Overrides.from_options(stem="stride2"))
    except UserError:  # the file records the stride
        return False
    return True


def _mechanism_tensors(raw: Any, path: Path) -> dict[str, Tensor]:
    """Return the tensors of a mechanism other than the backbone of the query encoder.

    Raises:
        DataError: If values are not finite or the queue pointer is out of range.
    """
    import torch

    from convert.read import is_array, strip_wrappers, to_tensor

    state = raw.get("state_dict") if isinstance(raw, Mapping) else None
    if not isinstance(state, Mapping):
        return {}
    tensors = {
        name: to_tensor(key, value, str(path))
        for key, value in state.items()
        if (name := strip_wrappers(key)).startswith(_MECHANISM_PREFIXES) and is_array(value)
    }
    for name, x in tensors.items():
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise DataError(f"{path}: not finite: {name}")
    if tensors.keys() >= {"queue", "queue_ptr"}:
        queue, pointer = tensors["queue"], tensors["queue_ptr"]
        inside = queue.dim() == 2 and pointer.numel() == 1 and pointer.dtype == torch.long
        if not (inside and 0 <= int(pointer) < queue.shape[1]):
            raise DataError(f"{path}: queue_ptr does not point into the queue")
    return tensors


def _random_weights(
    arch: str, stem: str, width: float, init: str, image_size: int
) -> InitialWeights:
    """Return weights that stand for the random initialization of a network.

    An empty `stem` means `imagenet`, and a `width` of 0 means 1; `init` must be empty or `random`.
    """
    if not arch:
        raise UserError(
            f"MODEL.ARCH is not set; {RANDOM} weights need a network, e.g. -a resnet50 "
            f"(choices are {', '.join((*ARCHS, *VITS))})"
        )
    from moco.engine.weights import InitialWeights

    spec = build_spec(arch, stem or "imagenet", width or 1.0, image_size)
    if init not in ("", RANDOM):
        raise UserError(f"--init {init}: random weights are called {RANDOM!r} in a table; omit it")
    return InitialWeights(RANDOM, spec)
