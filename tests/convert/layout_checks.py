"""Checks of recognized networks that several tests share."""

from torch import equal, nn

from convert.families import resnet
from convert.recognize import Recognition

IMAGENET = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


def assert_is(found: Recognition, network: nn.Module, tensors: int) -> None:
    """Assert that the backbone is bitwise this network's, of `tensors` tensors."""
    state = {
        k: v for k, v in network.state_dict().items() if resnet.ResNetFamily().to_detectron2(k)
    }
    assert len(state) == tensors
    assert found.state.keys() == state.keys()
    for key, value in state.items():
        assert equal(found.state[key], value), key


def assert_has_pixels(
    found: Recognition, pixels: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET
) -> None:
    contract = found.contract
    assert (contract.pixels.mean, contract.pixels.std) == pixels
    assert contract.pixels.channel_order == "RGB"
    assert not contract.architecture.stride_in_1x1
