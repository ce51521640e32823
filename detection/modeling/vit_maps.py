"""Four maps of different strides from a plain vision transformer, for an FPN (arXiv 2111.11429)."""

from collections.abc import Mapping

from torch import Tensor, nn

# Deviation: 2111.11429 does not state the groups of its group norm; 32 is from arXiv 1803.08494.
NUM_GROUPS = 32


class FourMaps(nn.Module):
    """Scaling of four maps (N, C, h, w): {"res2": (N, C, 4h, 4w), .., "res5": (N, C, h/2, w/2)}.

    The first is scaled by two transposed convolutions of stride 2, with a norm and GELU between
    them, the second by one, and the last by max pooling; the third is unchanged. `strides` and
    `stage_channels` are those of the results.

    Args:
        channels: C, a multiple of 32 with the group norm.
        stride: Stride of the input maps, px.
        norm: Norm between the two transposed convolutions; by default a group norm.
    """

    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]

    def __init__(self, channels: int, stride: int, norm: nn.Module | None = None) -> None:
        super().__init__()

        def double() -> nn.ConvTranspose2d:
            return nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2)

        norm = norm or nn.GroupNorm(NUM_GROUPS, channels)
        self.res2 = nn.Sequential(double(), norm, nn.GELU(), double())
        self.res3 = double()
        self.res4 = nn.Identity()
        self.res5 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.strides = {
            name: stride * 2**i // 4 for i, (name, _) in enumerate(self.named_children())
        }
        self.stage_channels = dict.fromkeys(self.strides, channels)

    def forward(self, maps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scale four maps, in their order, to res2..res5."""
        pairs = zip(self.named_children(), maps.values(), strict=True)
        return {name: scale(x) for (name, scale), x in pairs}
