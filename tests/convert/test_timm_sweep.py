"""Some of timm's networks through the sweep: equal features, or refused by name."""

from __future__ import annotations

import pytest

from tests.oracles import timm_sweep
from tests.oracles.timm_sweep import EQUAL, REFUSED, UNTRAINABLE, WRONG, Outcome, outcomes, table

# Larger networks have two blocks, or one in each stage; the sweep's command takes them whole, and
# MViT, which has no argument for that (see test_timm_network.py).
MAX_PARAMETERS = 20e6
# Networks by what becomes of them with their name recorded.
NETWORKS = {
    "convnext_atto": f"convnext, {EQUAL}",
    "convnextv2_atto": f"convnext, {EQUAL}",
    "convnext_atto_ols": f"timm, {EQUAL}",
    "convnext_atto_rms": f"timm, {EQUAL}",
    "test_convnext": f"timm, {EQUAL}",  # GELU by tanh
    "test_convnext3": f"timm, {EQUAL}",
    "resnet10t": f"timm, {EQUAL}",
    "resnet18": f"resnet, {EQUAL}",
    "resnet18d": f"timm, {EQUAL}",
    "resnetblur18": f"timm, {EQUAL}",
    "seresnet18": f"timm, {EQUAL}",
    "test_resnet": f"timm, {EQUAL}",
    "test_efficientnet": f"timm, {EQUAL}",
    "test_nfnet": f"timm, {EQUAL}",
    "swin_tiny_patch4_window7_224": f"swin, {EQUAL}",
    "swin_s3_tiny_224": f"timm, {EQUAL}",
    "deit_tiny_patch16_224": f"vit, {EQUAL}",
    "vit_tiny_patch16_224": f"vit, {EQUAL}",
    "test_vit": f"vit, {EQUAL}",
    "test_vit3": f"timm, {EQUAL}",
    "test_mambaout": f"timm, {EQUAL}",
    "test_coatnet": f"timm, {EQUAL}",
    "test_maxvit": f"timm, {EQUAL}",
    "hiera_tiny_224": f"timm, {EQUAL}",
    "deit_tiny_distilled_patch16_224": f"timm, {EQUAL}",
    "eva02_tiny_patch14_224": f"timm, {EQUAL}",
    "xcit_nano_12_p16_224": f"timm, {EQUAL}",
    "mobilenetv4_conv_small": f"timm, {EQUAL}",
    "levit_128s": REFUSED,
    "pit_ti_224": REFUSED,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_timm(name: str) -> None:
    made = outcomes(name, MAX_PARAMETERS)
    assert made["named"].what == NETWORKS[name], made
    assert not {outcome.what for outcome in made.values()} & {*WRONG}, made
    is_equal = made["module"].what.endswith(EQUAL)
    assert is_equal == (NETWORKS[name] != REFUSED), made
    assert (made["sizes"].what == UNTRAINABLE) == (NETWORKS[name] == REFUSED), made


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch16_dinov3",
        "vit_small_patch16_dinov3_qkvb",
        "vit_small_plus_patch16_dinov3",
        "vit_small_plus_patch16_dinov3_qkvb",
        "convnext_tiny",  # its names are those of DINOv3's
        "eva02_tiny_patch14_224",
        "eva02_small_patch14_224",
        "vit_small_patch16_rope_224",
        "vit_small_patch16_rope_mixed_224",
        "vit_small_patch16_rope_ape_224",
        "vit_small_patch16_rope_mixed_ape_224",
        "vit_pe_core_tiny_patch16_384",
    ],
)
def test_networks_with_rotary_positions_are_right_or_refused(name: str) -> None:
    made = outcomes(name, MAX_PARAMETERS, kinds=("named", "plain"))
    assert not {outcome.what for outcome in made.values()} & {*WRONG}, made


@pytest.mark.slow
def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The converted network is compared with another one's features."""
    other = timm_sweep.make("resnet18")
    with monkeypatch.context() as patch:
        patch.setattr(timm_sweep, "_features", lambda name, net, image: [
            [2 * value for value in other.forward_intermediates(image, intermediates_only=True)]
        ])  # fmt: skip
        made = outcomes("resnet18", kinds=("named", "plain"))
    assert made["named"].what == timm_sweep.SILENT
    assert made["plain"].what == f"resnet, {timm_sweep.ASSUMED}"


def test_the_table_counts() -> None:
    one = {"named": Outcome(REFUSED), "plain": Outcome(f"vit, {EQUAL}", 2e-7)}
    lines = table({"a": one, "b": {**one, "named": Outcome(f"vit, {EQUAL}", 1e-7)}}).splitlines()
    assert [line.split()[-5:] for line in lines[1:]] == [
        ["1", "0", "0", "0", "0"],
        ["1", "2", "0", "0", "2e-07"],
    ]
