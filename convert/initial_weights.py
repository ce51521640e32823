"""Any checkpoint that the converter recognizes, as the start of pre-training or of a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.families.resnet import ResNetArchitecture
from convert.families.vit import ViTArchitecture
from moco.common.command import RANDOM
from moco.common.errors import DataError, UserError
from moco.modeling.archs import VITS, EncoderSpec, Spec, ViTSpec

if TYPE_CHECKING:
    from torch import Tensor

    from convert.translate import Recognized
    from moco.engine.weights import InitialWeights

# What facebookresearch/moco and this project save beside the query encoder's backbone.
_BESIDE = ("encoder_q.fc.", "encoder_q.head.", "encoder_k.", "predictor.", "queue")


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
    """The backbone in a file; with head, key encoder and queue of a MoCo checkpoint.

    Args:
        file: a path, what moco/common/pretrained.py downloads, or `random`.
        arch: what the network has to be; `""`: as the file has it.
        stem: the same.
        width: the same; 0: as the file has it.
        init: its name in a table; `""`: see `moco.engine.weights.init_name`.
        image_size: side in px of the images that a random ViT has positions for.
        mean: of pixels 0..255, red first; None: as the file or its project has it.
        std: the same.

    Raises:
        UserError: not determined, not the requested network, or none that the trainings here have.
        DataError: missing, damaged, without a known network, never trained, or overflowing.
    """
    from convert.contract import Given
    from convert.read import digest, read_file
    from convert.translate import translate
    from moco.common.pretrained import locate
    from moco.engine.weights import InitialWeights, init_name, random_weights
    from moco.modeling.encoder import load_backbone
    from moco.modeling.soundness import check_network

    if file == RANDOM:
        return random_weights(arch, stem, width, init, image_size)
    if arch in VITS:
        stem, width = "", 0.0  # the defaults of keys that are for ResNets
    given = locate(file)
    path = given.path
    objects: set[str] = set()
    raw = read_file(path, objects)
    try:
        pixels = {"mean": mean and tuple(mean), "std": std and tuple(std)}
        found, converted = translate(path, raw, Given.of(stem=stem or None, **pixels), objects)
    except UserError as error:
        raise type(error)(str(error).replace("--stem", "MODEL.STEM")) from error
    contract = converted.contract
    try:
        spec = encoder_spec(contract.architecture)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    is_vit = isinstance(spec, ViTSpec)
    unlike = not is_vit and (contract.architecture.in_torchvision() or contract.bn_folded)
    if contract.pixels.channel_order != "RGB" or unlike:
        raise UserError(
            f"{path}: {contract.source}, {contract.convention()}; an encoder here has RGB pixels, "
            "the stride in the 3x3 conv, and batch norm with statistics"
        )
    try:
        pooling = _class_token(raw, found, path) if is_vit else {}
        network = load_backbone(spec, found.state | pooling)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except RuntimeError as error:  # other channels in a later stage
        raise DataError(f"{path}: not a whole {contract.architecture}") from error
    if not stem and getattr(spec, "stem", "") == "cifar" and _can_be_stride2(path, raw):
        raise UserError(
            f"{path}: its first convolution is 3x3 and the file does not tell the stride; "
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
    as_given = [f"pixels: mean {mean}, std {std}, as given"] if any(pixels.values()) else []
    own = contract.source.startswith("moco-transfer") and isinstance(raw.get("config"), Mapping)
    return InitialWeights(
        init=init or given.init or init_name(path),
        spec=spec,
        state=network.state_dict(),
        beside=_beside(raw, path),
        mean=mean,
        std=std,
        sha256=digest(path),
        source=contract.source,
        notes=(*given.notes, *converted.notes, *as_given),
        config=raw["config"] if own else {},
        seed=raw["seed"] if own and type(raw.get("seed")) is int else 0,
    )


def encoder_spec(architecture: Any) -> Spec:
    """The encoder of `moco.modeling` that an input contract's architecture describes.

    Raises:
        UserError: there is none.
    """
    a = architecture
    if isinstance(a, ViTArchitecture):
        if (a.mlp_dim, a.qkv_bias, a.layer_scale) != (4 * a.embed_dim, True, False):
            raise UserError(
                f"{a}, MLPs of {a.mlp_dim}: the vision transformers of the trainings here have "
                "MLPs of four times their width, a bias of queries, keys and values, no LayerScale"
            )
        return ViTSpec.of_shape(a.embed_dim, a.depth, a.num_heads, a.patch_size, a.image_size)
    if not isinstance(a, ResNetArchitecture):
        raise UserError(f"{a}: the encoders here are ResNets and vision transformers")
    return EncoderSpec.of_shape(
        a.stem, a.depth, a.num_groups, a.width_per_group, a.stem_out_channels
    )


def _class_token(raw: Any, found: Recognized, path: Path) -> dict[str, Tensor]:
    """Return the class token and final norm of the chosen network, which no detector has.

    Of a file's networks several may have these names, so they are read from the dict that the
    chosen one is in and from no other.

    Raises:
        UserError: the file does not have it.
    """
    from convert.read import at, to_tensor

    holder = at(raw, found.keys) or {}
    names = {name: found.named(name) for name in ("cls_token", "norm.weight", "norm.bias")}
    if missing := [name for name in names.values() if name not in holder]:
        raise UserError(
            f"{path}: has no {', '.join(missing)}, from which a vision transformer's image feature "
            "is taken; give the checkpoint that it was made from"
        )
    return {name: to_tensor(key, holder[key], str(path)).float() for name, key in names.items()}


def _can_be_stride2(path: Path, raw: Any) -> bool:
    from convert.contract import Given
    from convert.translate import translate

    try:
        translate(path, raw, Given.of(stem="stride2"))
    except UserError:  # the file tells the stride
        return False
    return True


def _beside(raw: Any, path: Path) -> dict[str, Tensor]:
    """Tensors of a mechanism beside its query encoder's backbone.

    Raises:
        DataError: values that no training can leave.
    """
    import torch

    from convert.read import is_array, to_tensor, unwrapped

    state = raw.get("state_dict") if isinstance(raw, Mapping) else None
    if not isinstance(state, Mapping):
        return {}
    beside = {
        name: to_tensor(key, value, str(path))
        for key, value in state.items()
        if (name := unwrapped(key)).startswith(_BESIDE) and is_array(value)
    }
    for name, x in beside.items():
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise DataError(f"{path}: not finite: {name}")
    if beside.keys() >= {"queue", "queue_ptr"}:
        queue, pointer = beside["queue"], beside["queue_ptr"]
        inside = queue.dim() == 2 and pointer.numel() == 1 and pointer.dtype == torch.long
        if not (inside and 0 <= int(pointer) < queue.shape[1]):
            raise DataError(f"{path}: queue_ptr does not point into the queue")
    return beside
