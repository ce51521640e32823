"""ConvNeXt under an FPN: what test_model.py has not."""

import pytest
import torch
from torchvision.ops import StochasticDepth

from detection.embedded.build import build_model
from moco.common.errors import UserError
from tests.detection.parity.test_model import CONVNEXT, CONVNEXT_V2
from tests.oracles import tiny_detector as tiny
from tests.oracles.small_tasks import assert_same_run, run


def test_the_first_parts_are_frozen():
    model = build_model(tiny.task(CONVNEXT_V2))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    parts = tuple(f"backbone.bottom_up.{part}." for part in ("stem", "stages.0"))
    assert frozen == {name for name in model.state_dict() if name.startswith(parts)}


def test_drop_path_follows_the_seed_and_is_off_in_evaluation():
    torch.manual_seed(0)
    model = build_model(tiny.task(CONVNEXT))
    network, x = model.backbone.bottom_up, torch.randn(4, 3, 64, 64)
    rates = [round(m.p, 6) for m in network.modules() if isinstance(m, StochasticDepth)]
    assert rates == [0, 0.1, 0.2, 0.3, 0.4, 0.5]

    def run(seed):
        torch.manual_seed(seed)
        return network(x)["res5"]

    with torch.no_grad():
        assert torch.equal(run(1), run(1))
        assert not torch.equal(run(1), run(2))
        network.eval()
        assert torch.equal(run(1), run(2))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MODEL.CONVNEXT", {"MODEL.CONVNEXT.DIMS": [8, 12, 16]}),
        ("DROP_PATH", {"MODEL.CONVNEXT.DROP_PATH": 1.0}),
        ("MODEL.FPN.IN_FEATURES", {"MODEL.FPN.IN_FEATURES": ["res3", "res4", "res5"]}),
        ("FREEZE_AT", {"MODEL.BACKBONE.FREEZE_AT": 6}),
        ("ROI_HEADS.NAME", {"MODEL.ROI_HEADS.NAME": "Res5ROIHeads"}),
    ],
)
def test_keys_that_it_cannot_honor(key, value):
    with pytest.raises(UserError, match=key):
        build_model(tiny.task({**CONVNEXT, **value}))


@pytest.mark.slow
@pytest.mark.detectron2
@pytest.mark.usefixtures("detectron2")
def test_the_coco_task_trains_alike(data_of, tmp_path):
    """The official recipe's task file, narrow and for two iterations."""
    from convert.families.convnext_architecture import ConvNeXtArchitecture
    from convert.families.convnext_network import ConvNeXt

    task, dims = "coco/mask_rcnn_ConvNeXt_T_FPN_3x", [16, 24, 32, 40]
    a = ConvNeXtArchitecture((3, 3, 9, 3), tuple(dims), True, False, 1e-6)
    torch.save(tiny.fill(ConvNeXt(a).state_dict(), seed=1), tmp_path / "a.file")
    data_of(task)
    folders = {engine: tmp_path / engine for engine in ("detectron2", "embedded")}
    opts = ("MODEL.CONVNEXT.DIMS", dims, "SOLVER.PRECISION", "fp32", "SOLVER.AMP.ENABLED", False)
    records = [
        run(task, tmp_path / "a.file", out, engine, *opts) for engine, out in folders.items()
    ]
    assert_same_run(*folders.values())
    assert records[0].metrics.keys() == records[1].metrics.keys()
    assert records[0].recipe["recipe"] == "COCO ConvNeXt-T FPN, 3x"
