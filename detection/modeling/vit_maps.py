"""The four maps that arXiv 2111.11429 makes of a plain vision transformer's, for an FPN."""

from collections.abc import Mapping

from torch import Tensor, nn

# Deviation: of the group norm, whose groups 2111.11429 does not say, as in arXiv 1803.08494.
NUM_GROUPS = 32


class FourMaps(nn.Module):
    """Four maps (N, C, h, w) -> {"res2": (N, C, 4h, 4w), .., "res5": (N, C, h/2, w/2)}.

    The first by two transposed convolutions of stride 2, with group norm and GELU between them; the
    second by one; the third as it is; the last by max pooling. `strides` and `stage_channels` are
    of the results.

    Args:
        channels: C, a multiple of 32.
        stride: of the maps given, px.
    """

    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()

        def double() -> nn.ConvTranspose2d:
            return nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2)

        norm = nn.GroupNorm(NUM_GROUPS, channels)
        self.res2 = nn.Sequential(double(), norm, nn.GELU(), double())
        self.res3 = double()
        self.res4 = nn.Identity()
        self.res5 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.strides = {
            name: stride * 2**i // 4 for i, (name, _) in enumerate(self.named_children())
        }
        self.stage_channels = dict.fromkeys(self.strides, channels)

    def forward(self, maps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pairs = zip(self.named_children(), maps.values(), strict=True)
        return {name: scale(x) for (name, scale), x in pairs}
