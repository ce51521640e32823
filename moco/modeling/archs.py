"""Architectures and specifications of encoders; this module does not import torch."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from moco.common.errors import UserError


class Arch(NamedTuple):
    """Architecture of a ResNet.

    Attributes:
        bottleneck: Use bottleneck blocks instead of basic blocks.
        depths: Number of blocks in each stage.
        groups: Groups of a bottleneck's 3x3 convolution.
        width_per_group: Channels per group for 64 planes, as in torchvision.
    """

    bottleneck: bool
    depths: tuple[int, int, int, int]
    groups: int = 1
    width_per_group: int = 64

    @property
    def expansion(self) -> int:
        """Output channels of a block per plane."""
        return 4 if self.bottleneck else 1

    @property
    def depth(self) -> int:
        """Number in the network's name: convolutions on the longest path and the classifier."""
        return 2 + sum(self.depths) * (3 if self.bottleneck else 2)


ARCHS: dict[str, Arch] = {
    "resnet10": Arch(False, (1, 1, 1, 1)),
    "resnet18": Arch(False, (2, 2, 2, 2)),
    "resnet34": Arch(False, (3, 4, 6, 3)),
    "resnet50": Arch(True, (3, 4, 6, 3)),
    "resnet101": Arch(True, (3, 4, 23, 3)),
    # ResNeXt-50-32x8d, RX50 of table 1.
    "resnext50_32x8d": Arch(True, (3, 4, 6, 3), groups=32, width_per_group=8),
}


class ViTArch(NamedTuple):
    """Architecture of a plain vision transformer with a class token and an MLP ratio of 4."""

    embed_dim: int
    depth: int
    num_heads: int
    patch_size: int = 16  # px


# MoCo v3's ViTs have 12 heads at every width (facebookresearch/moco-v3 vits.py; vit_tiny: MAE-Lite,
# arXiv 2205.14443), while other projects use one head per 64 channels. vit_micro is for CPUs.
VITS: dict[str, ViTArch] = {
    "vit_micro": ViTArch(128, 4, 4),
    "vit_tiny": ViTArch(192, 12, 12),
    "vit_small": ViTArch(384, 12, 12),
    "vit_base": ViTArch(768, 12, 12),
}
STEMS = ("imagenet", "stride2", "cifar")
MIN_STEM_CHANNELS = 8


@dataclass(frozen=True)
class EncoderSpec:
    """Specification of a ResNet encoder.

    Attributes:
        arch: Name in `ARCHS`; `resnet10` has one basic block per stage.
        stem: `imagenet` (7x7, stride 2, max-pool: stride 4), `stride2` (3x3, stride 2, no
            max-pool) or `cifar` (3x3, stride 1, no max-pool).
        width: Multiplier of every channel count; 1 is the usual 64 channels after the stem.
            `resnet50` of width 2 and 4 is R50w2x and R50w4x of table 1.

    Raises:
        UserError: If a name is unknown, or `width` gives a fractional number of channels.
    """

    arch: str
    stem: str = "imagenet"
    width: float = 1.0

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise UserError(f"arch: got {self.arch!r}, choices are {', '.join((*ARCHS, *VITS))}")
        if self.stem not in STEMS:
            raise UserError(f"stem: got {self.stem!r}, choices are {', '.join(STEMS)}")
        channels = 64 * float(self.width)
        if not (channels.is_integer() and channels >= MIN_STEM_CHANNELS):
            raise UserError(
                f"width: got {self.width}, expected 64 * width to be an integer "
                f">= {MIN_STEM_CHANNELS}, e.g. 0.375 (24 channels)"
            )

    @classmethod
    def of_shape(
        cls, stem: str, depth: int, num_groups: int, width_per_group: int, stem_out_channels: int
    ) -> "EncoderSpec":
        """Return the specification of the ResNet that has the given tensor shapes.

        Raises:
            UserError: If no known ResNet has these shapes.
        """
        width = stem_out_channels / 64
        for name, arch in ARCHS.items():
            per_group = int(arch.width_per_group * width) if arch.bottleneck else 64
            if (arch.depth, arch.groups, per_group) == (depth, num_groups, width_per_group):
                return cls(name, stem, width)
        raise UserError(
            f"a ResNet-{depth} of {stem_out_channels} stem channels, with {num_groups} groups of "
            f"{width_per_group}; known are {', '.join(ARCHS)} of any width"
        )

    @property
    def stem_channels(self) -> int:
        """Channels after the stem."""
        return round(64 * self.width)

    @property
    def feature_dim(self) -> int:
        """Channels of the last stage, the dimension of the pooled features."""
        return 8 * self.stem_channels * ARCHS[self.arch].expansion

    @property
    def name(self) -> str:
        """Name in task names and tables, e.g. `resnet50`, `resnet50w2` or `resnet18_cifar`."""
        width = "" if self.width == 1 else f"w{self.width:g}"
        stem = "" if self.stem == "imagenet" else f"_{self.stem}"
        return f"{self.arch}{width}{stem}"

    def model_keys(self) -> dict[str, Any]:
        """Return the configuration keys under MODEL."""
        return {"ARCH": self.arch, "STEM": self.stem, "WIDTH": float(self.width)}

    def check_image(self, side_px: int, key: str) -> None:
        """Accept any image size."""


@dataclass(frozen=True)
class ViTSpec:
    """Specification of a vision transformer encoder.

    Attributes:
        arch: Name in `VITS`.
        image_size: Side in pixels of the images that fit the position embedding.

    Raises:
        UserError: If the name is unknown, or `image_size` is not a multiple of the patch size.
    """

    arch: str
    image_size: int = 224

    def __post_init__(self) -> None:
        if self.arch not in VITS:
            raise UserError(f"arch: got {self.arch!r}, choices are {', '.join(VITS)}")
        patch = VITS[self.arch].patch_size
        if self.image_size < patch or self.image_size % patch:
            raise UserError(
                f"AUG.CROP_PX: got {self.image_size}, expected a multiple of the {patch} px of "
                f"{self.arch}'s patches"
            )

    @classmethod
    def of_shape(
        cls, embed_dim: int, depth: int, num_heads: int, patch_size: int, image_size: int
    ) -> "ViTSpec":
        """Return the specification of the vision transformer that has the given tensor shapes.

        Raises:
            UserError: If no known vision transformer has these shapes.
        """
        for name, arch in VITS.items():
            if arch == (embed_dim, depth, num_heads, patch_size):
                return cls(name, image_size)
        known = ", ".join(
            f"{name} ({a.depth} blocks, width {a.embed_dim}, {a.num_heads} heads)"
            for name, a in VITS.items()
        )
        raise UserError(
            f"a ViT of {depth} blocks, width {embed_dim}, {num_heads} heads, patches of "
            f"{patch_size} px; known are {known}, of patches of 16 px"
        )

    @property
    def feature_dim(self) -> int:
        """Dimension of the class token."""
        return VITS[self.arch].embed_dim

    @property
    def name(self) -> str:
        """Name in task names and tables."""
        return self.arch

    def model_keys(self) -> dict[str, Any]:
        """Return the configuration keys under MODEL."""
        return {"ARCH": self.arch}

    def check_image(self, side_px: int, key: str) -> None:
        """Raise UserError naming `key` if images do not fit the position embedding."""
        if side_px != self.image_size:
            raise UserError(
                f"{key}: got {side_px}, but the position embedding of this {self.arch} is for "
                f"images of {self.image_size} px; set {self.image_size}"
            )


Spec = EncoderSpec | ViTSpec


def build_spec(arch: str, stem: str, width: float, image_size: int) -> Spec:
    """Return the specification for MODEL.ARCH, STEM and WIDTH, and images of AUG.CROP_PX.

    Raises:
        UserError: If a value is invalid (see `EncoderSpec` and `ViTSpec`), or a vision transformer
            has a stem or a width.
    """
    if arch not in VITS:
        return EncoderSpec(arch, stem, width)
    if (stem, width) != ("imagenet", 1.0):
        raise UserError(
            f"MODEL.STEM {stem}, MODEL.WIDTH {width:g}: {arch} has neither; they are for ResNets"
        )
    return ViTSpec(arch, image_size)
