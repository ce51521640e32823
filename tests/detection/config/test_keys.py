"""Values of keys, compared as Detectron2's files write them."""

import pytest

from detection.config.keys import same_value


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "same"),
    [
        ([1, (2, 3)], (1, [2, 3]), 0.0, True),
        ((1,), (1, 2), 0.0, False),
        (1, 1.0, 0.0, True),
        (True, 1, 0.0, False),
        (None, 0, 0.0, False),
        ([103.53], [0.406 * 255], 1e-3, True),
        ([103.53], [103.55], 1e-3, False),
        ("BN", "GN", 0.0, False),
    ],
)
def test_same_value(a, b, tolerance, same):
    assert same_value(a, b, tolerance=tolerance) is same
