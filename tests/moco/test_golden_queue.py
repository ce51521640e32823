import json

import pytest

from tests.golden.regenerate_queue import GOLDEN, losses


def test_twenty_steps_reproduce_the_stored_curve():
    """Float64, so that another CPU's kernels differ far less than any change of the algorithm."""
    assert losses() == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-8)
