"""The embedded model against numbers stored from Detectron2, for machines without it."""

import json

import pytest
import torch

from detection.embedded.model import build_model
from tests.golden.regenerate_embedded import FOLDER, NETWORKS
from tests.oracles import tiny_detector as tiny

# Another processor adds in another order. Seen: 1e-5, in gradients 1e-3, which 50 batch norms
# amplify, 2e-7 in statistics, which come first, and a pixel whose score is the threshold's. A wrong
# formula shows in the second digit.
RELATIVE = {"gradients": 5e-3, "gradient_norm": 5e-3, "statistics": 1e-5}
OTHERWISE = 1e-4
PIXELS = 3


def assert_close(actual, expected, tolerance, where=""):
    if isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for name in expected:
            assert_close(actual[name], expected[name], tolerance, f"{where}/{name}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        scale = max((abs(x) for x in expected if isinstance(x, float)), default=0.0)
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            if isinstance(other, float):
                assert one == pytest.approx(other, rel=tolerance, abs=tolerance * scale), where
            else:
                assert_close(one, other, tolerance, f"{where}/{index}")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=tolerance), where
    elif where.startswith("detections/masks/"):
        assert abs(actual - expected) <= PIXELS, where
    else:
        assert actual == expected, where


@pytest.mark.stored
@pytest.mark.parametrize("name", NETWORKS)
def test_equals_detectron2s_numbers(name):
    model = build_model(tiny.task(NETWORKS[name]))
    model.load_state_dict(tiny.fill(model.state_dict(), seed=2))

    def detections(samples):
        with torch.no_grad():
            found: list[dict[str, torch.Tensor]] = model(samples)
        return found

    expected = json.loads((FOLDER / f"{name}.json").read_text())
    assert len(expected["detections"].get("scores", range(8))) == 8
    actual = tiny.summary(model, model, detections, NETWORKS[name])
    assert set(actual) == set(expected)
    for part, value in expected.items():
        assert_close(actual[part], value, RELATIVE.get(part, OTHERWISE), part)
