"""A network of timm under an FPN in both engines: every quantity, every bit, on the CPU in fp32."""

import pytest

from detection.embedded.build import build_model
from moco.common.errors import UserError
from tests.detection.parity.test_model import (
    assert_answers_equal,
    assert_training_equal,
    both,
    images,
)
from tests.oracles import tiny_detector as tiny

pytest.importorskip("timm", reason="timm is not installed")

TIMM = {
    **tiny.FPN_MASK,
    "MODEL.BACKBONE.NAME": "build_timm_fpn_backbone",
    "MODEL.TIMM.NAME": "regnety_002",
    "MODEL.TIMM.DROP_PATH": 0.3,
    "MODEL.FPN.NORM": "",
}


@pytest.mark.slow
@pytest.mark.detectron2
@pytest.mark.usefixtures("detectron2")
def test_every_quantity():
    from tests.oracles import detectron2_engine as d2

    d2.same_start(TIMM)
    theirs, ours = both(TIMM)
    samples = images(TIMM)
    assert_answers_equal(theirs, ours, samples)
    some, none, two, three, pixel = samples
    batches = [[some, two], [none, three], [three, pixel], [two, none], [two, some, none]]
    largest = assert_training_equal(theirs, ours, TIMM, batches)
    assert min(largest.values()) > 1e-3
    answers = assert_answers_equal(theirs, ours, samples)
    assert sum(len(answer["scores"]) for answer in answers) > len(answers)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (r"MODEL\.TIMM\.NAME: set it", {"MODEL.TIMM.NAME": ""}),
        (r"MODEL\.TIMM\.NAME: .*no such network", {"MODEL.TIMM.NAME": "regnetq_002"}),
        (r"MODEL\.TIMM\.NAME: .*strides \[16, 16, 16\]",
         {"MODEL.TIMM.NAME": "vit_tiny_patch16_224"}),
        (r"MODEL\.TIMM\.NAME: .*every size", {"MODEL.TIMM.NAME": "swin_tiny_patch4_window7_224"}),
        ("MODEL.TIMM.DROP_PATH", {"MODEL.TIMM.DROP_PATH": -0.1}),
        ("FREEZE_AT", {"MODEL.BACKBONE.FREEZE_AT": 1}),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(key, value):
    with pytest.raises(UserError, match=key):
        build_model(tiny.task({**TIMM, **value}))


def test_without_timm(monkeypatch):
    """One line that says what to install."""
    import sys

    from convert.families.timm_network import probe

    probe.cache_clear()
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"pip install 'moco-transfer\[timm\]'") as error:
        build_model(tiny.task(TIMM))
    assert "\n" not in str(error.value)
