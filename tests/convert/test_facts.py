"""Every argument of a network is perturbed: the conversion is equal, or refused by its name.

The network itself, as timm or transformers build it from the perturbed record, is run and compared.
Values that change nothing, or that the library does not build, show nothing; what was found, what
had no value, and what fails is printed.
"""

from __future__ import annotations

import collections
import inspect
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from convert.contract import Overrides
from convert.facts import ANY, COMPARED, NO_EFFECT, TRANSFORMERS
from convert.read import read_file
from convert.recognize import Recognition
from convert.source_module import check_module
from convert.translate import translate
from moco.common.errors import DataError, UserError

pytestmark = pytest.mark.slow

VIT: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2}
VIT |= {"image_size": 32, "patch_size": 8}
STAGES: dict[str, Any] = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]}
# Model types of transformers, and arguments that make them small.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "vit": {**VIT, "intermediate_size": 48},
    "dinov2": {**VIT, "mlp_ratio": 2},
    "dinov2_with_registers": {**VIT, "mlp_ratio": 2},
    "dinov3_vit": {**VIT, "intermediate_size": 48, "num_register_tokens": 2},
    "clip_vision_model": {**VIT, "intermediate_size": 48},
    "resnet": {"hidden_sizes": [32, 64, 128, 256], "depths": [3, 4, 6, 3], "embedding_size": 8},
    "swin": {"embed_dim": 12, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 3, 4], "window_size": 2},
    "convnextv2": STAGES,
    "dinov3_convnext": STAGES,
}
# Of the record itself, not of the network.
_NOT_PERTURBED = {"model_type", "transformers_version", "architectures", "_name_or_path"}
_NOT_PERTURBED |= {"return_dict"}  # without a dict of outputs its own classes fail
_WORDS = {
    "hidden_act": ["relu", "quick_gelu", "gelu_new", "silu"],
    "layer_type": ["basic", "bottleneck"],
    "pooler_act": ["relu", "gelu"],
}
_STAGED = {
    "depths": [[1, 1, 1, 2], [1, 2, 2, 1]],
    "hidden_sizes": [[8, 12, 16, 24], [64, 128, 256, 512]],
    "num_heads": [[1, 2, 4, 4], [3, 3, 3, 3]],
}


def values_for(name: str, value: Any) -> list[Any]:
    """Return other values of an argument, of the type of its own."""
    if name in _WORDS or name in _STAGED:
        return [other for other in {**_WORDS, **_STAGED}[name] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 2, value + 1]
    if isinstance(value, float):
        return [value * 10 or 0.1, value / 2 + 0.01]
    if isinstance(value, str):
        return ["another", ""]
    return [3, 0.5, True, {"a": 1}]


def randomize(net: nn.Module) -> nn.Module:
    """Set tensors that all have an effect: layer scales of 1e-6 would hide blocks."""
    generator = torch.Generator().manual_seed(0)
    for key, value in net.state_dict().items():
        if not value.is_floating_point():
            continue
        is_scale = "running_var" in key or (value.dim() == 1 and "bias" not in key)
        noise = torch.rand(value.shape, generator=generator)
        if is_scale:
            value.copy_(0.5 + noise)
        else:
            value.copy_((noise - 0.5) * (0.4 if value.dim() < 2 else 4 / value[0].numel() ** 0.5))
    return net.eval()


def ours(file: Path) -> Recognition | str:
    """Return the network as it is converted, or why it is refused."""
    try:
        found = translate(file, read_file(file), Overrides())
    except (DataError, UserError) as error:
        return str(error)
    return found


def differs(net: nn.Module, found: Recognition) -> str:
    """Return how a module differs from a converted network, or "" if all its maps are equal."""
    try:
        check = check_module(net, found, Overrides(), "the module")
    except DataError as error:
        return str(error)
    return "" if check.verified else check.text


class Outcomes:
    """What perturbing an argument showed, by network and argument."""

    def __init__(self) -> None:
        self.by_argument: dict[str, list[str]] = collections.defaultdict(list)

    def add(self, argument: str, outcome: str) -> None:
        self.by_argument[argument].append(outcome)

    def check(self) -> None:
        """Print the outcomes, and fail if a difference was passed over."""
        failed = {a: o for a, o in self.by_argument.items() if any("silent" in x for x in o)}
        found = [a for a, o in self.by_argument.items() if a not in failed and set(o) - {"none"}]
        nothing = [a for a in self.by_argument if a not in failed and a not in found]
        print(f"found: {', '.join(found)}\nno value: {', '.join(nothing)}\nfails: {failed}")
        assert not failed
        assert found


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_every_key_of_a_configuration_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](**CONFIGURATIONS[kind])
    make = transformers.MODEL_MAPPING[type(config)]
    torch.manual_seed(0)
    net = make(config)
    randomize(net).save_pretrained(tmp_path)
    file, record = tmp_path / "model.safetensors", tmp_path / "config.json"
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    base = json.loads(record.read_text()) | config.to_dict()
    record.write_text(json.dumps(base))
    unchanged = ours(file)
    assert isinstance(unchanged, Recognition), unchanged
    assert not differs(net, unchanged)

    def built() -> nn.Module | None:
        try:
            return make.from_pretrained(tmp_path).eval()
        except Exception:  # whatever a class raises for a value that it lacks
            return None

    outcomes, keys = Outcomes(), [key for key in base if key not in _NOT_PERTURBED]
    for key in keys:
        for value in values_for(key, base[key]):
            record.write_text(json.dumps({**base, key: value}))
            found = ours(file)
            if isinstance(found, str):
                named = {"num_attention_heads": "num_heads"}.get(key, key) in found or key in found
                outcomes.add(key, "refused" if named else f"silent: {found} for {value}")
            elif (source := built()) is None:
                # The tensors do not fit, or the value is none: nothing there to be equal to.
                is_none = key not in compared(kind)
                outcomes.add(key, "none" if is_none else f"silent: {value} was not compared")
            elif difference := differs(source, found):
                outcomes.add(key, f"silent: {value}: {difference}")
            else:
                outcomes.add(key, "equal" if differs(source, unchanged) else "none")
    outcomes.check()
    missing = compared(kind) & set(base) - set(outcomes.by_argument)
    assert not missing, f"never perturbed: {sorted(missing)}"


def compared(kind: str) -> set[str]:
    """Return the facts of a kind of transformers that are compared with the network."""
    tables = COMPARED[TRANSFORMERS]
    family = {"clip_vision_model": "vit", "convnextv2": "convnext"}.get(kind, kind)
    family = "vit" if family.startswith(("dinov2", "dinov3_vit")) else family
    return {name for name, fact in tables[family].items() if fact is not ANY}


@pytest.mark.parametrize("table", sorted(COMPARED[TRANSFORMERS].keys() - {"", "timm_backbone"}))
def test_every_listed_fact_is_one_of_transformers(table: str) -> None:
    """A fact that no configuration has would be perturbed nowhere."""
    transformers: Any = pytest.importorskip("transformers")
    owners = (*CONFIGURATIONS, "siglip2_vision_model", "convnext", "vit_mae", "vit")
    configs = [transformers.CONFIG_MAPPING[kind]().to_dict() for kind in owners]
    every = set().union(*configs) | {"path_norm"}
    assert set(COMPARED[TRANSFORMERS][table]) <= every
    assert not set(COMPARED[TRANSFORMERS][table]) & NO_EFFECT[TRANSFORMERS]


# Networks of timm, and arguments that make them small.
IN_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3},
    "vit_base_patch16_clip_224": {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3},
    "resnet18": {"channels": [16, 32, 64, 128]},
    "swin_tiny_patch4_window7_224": {
        **{"img_size": 64, "window_size": 2, "depths": [1, 1, 2, 1], "embed_dim": 24},
    },
    "convnext_atto": {"depths": [1, 1, 1, 1], "dims": [16, 24, 32, 40]},
}
# Values of arguments that signatures do not show, or not the type of.
WRITTEN: dict[str, list[Any]] = {
    "act_layer": ["relu", "gelu", "quick_gelu", "silu"],
    "norm_layer": ["layernorm2d", "batchnorm2d", "layernorm", "rmsnorm"],
    "norm_eps": [1e-2, 1e-5],
    "bn_eps": [1e-1, 1e-3],
    "bn_momentum": [0.5, 0.01],
    "pad_type": ["same", ""],
    "block_args": [{"attn_layer": "se"}, {"attn_layer": "eca"}],
    "global_pool": ["avg", "max", ""],
    "img_size": [96, [96, 64]],
    "output_stride": [16, 8],
    "aa_layer": ["blurpool", "avgpool"],
    "stem_type": ["deep", "deep_tiered"],
    "pos_embed": ["none", "learn"],
    "embed_layer": ["patch_embed", "hybrid"],
    "mlp_layer": ["mlp", "swiglu"],
    "block_fn": ["block", "parallel"],
    "attn_layer": ["attention", "diff"],
    "act_kwargs": [{"inplace": True}, {}],
    "weight_init": ["jax", "moco"],
    "window_size": [4, 3],
    "patch_size": [8, 32],
    "class_token": [False, True],
    "reg_tokens": [1, 4],
    "num_heads": [6, 2],
    "depths": [[1, 1, 1, 2], [2, 1, 1, 1]],
    "dims": [[8, 16, 24, 32], [16, 16, 16, 16]],
    "channels": [[8, 16, 32, 64], [16, 32, 64, 64]],
    "layers": [[1, 1, 1, 1], [2, 2, 2, 1]],
    "kernel_sizes": [3, 5],
    "cardinality": [2, 4],
    "qkv_bias": [False, True],
    "head_dim": [8, 16],
    "in_chans": [1, 4],
    "fix_stem": [True, False],
}
_CLASSES = {
    "vit": "timm.models.vision_transformer:VisionTransformer",
    "resnet": "timm.models.resnet:ResNet",
    "swin": "timm.models.swin_transformer:SwinTransformer",
    "convnext": "timm.models.convnext:ConvNeXt",
}


def arguments_of(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a network of timm and values of each: of its classes, and written."""
    cls = pkgutil.resolve_name(_CLASSES[name.rstrip("0123456789").partition("_")[0]])
    known = inspect.signature(cls).parameters
    for argument in dict.fromkeys([*known, *WRITTEN]):
        default = getattr(known.get(argument), "default", None)
        usual = None if default is inspect.Parameter.empty else default
        for value in WRITTEN.get(argument) or values_for(argument, usual):
            yield argument, value


@pytest.mark.parametrize("name", IN_TIMM)
def test_every_argument_of_a_network_of_timm(name: str, tmp_path: Path) -> None:
    """As recorded by timm's `save_for_hf`, with the tensors of the network that it built.

    A network of other tensors may be refused for these.
    """
    timm: Any = pytest.importorskip("timm")
    outcomes, base = Outcomes(), IN_TIMM[name]
    pixels = {"mean": [0.5] * 3, "std": [0.25] * 3}
    usual = shapes_of(timm.create_model(name, **base))
    for argument, value in [("num_classes", 1000), *arguments_of(name)]:
        try:
            torch.manual_seed(0)
            net = randomize(timm.create_model(name, **{**base, argument: value}))
            net(torch.rand(1, 3, *size_of(net)))
        except Exception:  # whatever timm raises for a value that this network cannot have
            outcomes.add(argument, "none")
            continue
        record = {"architecture": name, "model_args": {**base, argument: value}}
        (tmp_path / "config.json").write_text(json.dumps({**record, "pretrained_cfg": pixels}))
        save_file(net.state_dict(), tmp_path / "model.safetensors")
        found = ours(tmp_path / "model.safetensors")
        if isinstance(found, str):
            names = (argument, "--activation") if argument == "act_layer" else (argument,)
            by_name = any(text in found for text in names) or shapes_of(net) != usual
            outcomes.add(argument, "refused" if by_name else f"silent: {found} for {value}")
        elif difference := differs(net, found):
            outcomes.add(argument, f"silent: {value}: {difference}")
        else:
            outcomes.add(argument, "equal")
    outcomes.check()
    assert outcomes.by_argument["num_classes"][0] == "equal"
    assert set(WRITTEN) <= set(outcomes.by_argument)


def shapes_of(net: nn.Module) -> dict[str, Any]:
    return {key: value.shape for key, value in net.state_dict().items()}


def size_of(net: Any) -> tuple[int, int]:
    size = getattr(getattr(net, "patch_embed", None), "img_size", None) or (64, 64)
    return (size[0], size[1])
