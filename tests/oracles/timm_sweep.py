"""Conversion of timm's networks at random weights, compared with timm's own forward pass.

    python -m tests.oracles.timm_sweep 'resnet*' 'vit_*'

Each network is built, saved as timm's train.py saves it with its name and also as a plain state
dict, and converted; the module itself is handed over, too. A network that is converted must have
the features of the one that it was made from; one that is refused must be refused by its name. A
plain state dict has no name: what its tensors do not determine is in the report's line `assumed`.
Anything else is a silent difference, after which the exit code is 1. Last, the network of timm's
family is trained for one step on images of another size than its own. Of networks with more than
`--max-parameters` one with two blocks, or one in each stage, takes the place.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from convert.backbone import load_backbone
from convert.convert_to_d2 import convert_file
from convert.families.timm import EXAMPLE_PX, format_arguments
from convert.modeling.timm_network import (
    FIXED,
    TimmNetwork,
    network_maps,
    resample_tensors,
    size_problem,
)
from convert.verify import Converted, build_backbone, read_converted, verification_image
from moco.common.errors import UserError

MAX_PARAMETERS = 100e6
# Arguments of smaller networks, of which the first that timm takes is used.
SMALLER: tuple[dict[str, Any], ...] = (
    {"depth": 2},
    {"depths": (1, 1, 2, 1)},
    {"layers": [1] * 4},
    {"layers": [1] * 5},
    {"stages": (1, 1, 2, 1)},
)
TOLERANCE = 1e-5  # relative to the largest feature
# Outcomes.
EQUAL, REFUSED, ASSUMED = "equal features", "refused", "other features, as the report assumes"
UNNAMED, SILENT, FAILED = "refused without its name", "SILENT DIFFERENCE", "FAILED"
TOO_LARGE, NOT_BUILT = "not built: too large", "not built by timm"
ANY_SIZE, SQUARE, UNTRAINABLE = "trained at another size", "trained in a square", "not trainable"
KINDS = ("named", "plain", "module", "sizes")
WRONG = (UNNAMED, SILENT, FAILED)


class Outcome(NamedTuple):
    """Result of one conversion.

    Attributes:
        what: One of the outcomes above, after the family for a converted network.
        difference: Largest difference of a feature, relative to the largest feature.
        reason: Message of a refusal.
    """

    what: str
    difference: float = 0.0
    reason: str = ""


def make(name: str, **arguments: Any) -> nn.Module:
    """Build a network whose features show how it computes, as those of a trained network.

    No norm or LayerScale is at its initial value; linear layers are larger than at the start of a
    training, so that attention and activations matter, and the first convolution is smaller, so
    that the epsilon of norms does.
    """
    import timm

    torch.manual_seed(0)
    net: nn.Module = timm.create_model(name, num_classes=2, **arguments).eval()
    is_first = True
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.is_floating_point() and value.dim() == 1:
                value += 0.1 * torch.rand_like(value)
            elif value.dim() == 2 or value.shape[2:] == (1, 1):
                value.normal_(std=value.shape[1] ** -0.5)
            elif value.dim() == 4 and is_first:
                value *= 0.1
                is_first = False
    return net


def outcomes(
    name: str, max_parameters: float = MAX_PARAMETERS, kinds: Sequence[str] = KINDS
) -> dict[str, Outcome]:
    """Convert a network with and without its name, and as a module, and train it."""
    warnings.filterwarnings("ignore")
    try:
        arguments = _smaller(name, max_parameters)
        if arguments is None:
            return {
                **dict.fromkeys(kinds, Outcome(TOO_LARGE)),
                "sizes": _tried(UNTRAINABLE, _maps, name),
            }
        net = make(name, **arguments)
    except Exception as error:  # of another library, in its optional dependencies
        return dict.fromkeys(kinds, Outcome(NOT_BUILT, reason=str(error)))
    state = net.state_dict()
    record = {"model": name, "model_kwargs": arguments}
    named = {"state_dict": state, "arch": name, "args": record, "version": 2, "epoch": 1}
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], Outcome]] = {
            "named": lambda: _outcome(name, net, named, {}, Path(folder)),
            "plain": lambda: _outcome(name, net, state, _heads(net), Path(folder)),
            "module": lambda: _tried(REFUSED, _of_module, name, net),
            "sizes": lambda: _tried(UNTRAINABLE, _trained, name, arguments),
        }
        return {kind: ways[kind]() for kind in kinds}


def _smaller(name: str, max_parameters: float) -> dict[str, Any] | None:
    """Return arguments of a network of at most `max_parameters`, or None if there are none."""
    import timm

    for arguments in ({}, *SMALLER):
        try:
            with torch.device("meta"):
                net = timm.create_model(name, **arguments)
                if "layers" in arguments:  # of a network with more stages, they do not fit
                    net(torch.empty(1, *net.pretrained_cfg["input_size"]))
        except (TypeError, RuntimeError, AssertionError, ValueError, IndexError):
            if not arguments:
                raise
            continue
        if sum(p.numel() for p in net.parameters()) <= max_parameters:
            return arguments
    return None


def _tried(refusal: str, run: Callable[..., Outcome], *args: Any) -> Outcome:
    """Return the outcome of a function: what it returns, or what it raises."""
    try:
        return run(*args)
    except UserError as error:
        return Outcome(refusal, reason=str(error))
    except Exception as error:  # to go on with the next network
        return Outcome(FAILED, reason=f"{type(error).__name__}: {error}")


def _of_module(name: str, net: nn.Module) -> Outcome:
    """Hand a module over, and compare the maps."""
    backbone = load_backbone(net)
    family = backbone.contract.family.name
    converted = Converted(dict(backbone.net.state_dict()), backbone.contract)
    difference = compare(name, net, converted)
    notes = [note for note in backbone.notes if "not verified by the module" in note]
    if difference > TOLERANCE:
        return Outcome(ASSUMED if notes else SILENT, difference, "".join(notes)[-200:])
    what = f"{family}, {EQUAL}" + (", not verified by the module" if notes else "")
    return Outcome(what, difference, "".join(notes)[-200:])


def _trained(name: str, arguments: Mapping[str, Any]) -> Outcome:
    """Train timm's network for one step, on images of another size than its own."""
    built = format_arguments(arguments)
    maps = network_maps(name, built)
    stride = max(maps.strides.values())
    patch = 16 if len(maps.strides) == 1 and stride & (stride - 1) else 0
    own = maps.image_size[0]
    side = -(-EXAMPLE_PX // own) * own if len(maps.strides) > 1 else 320
    side = side if maps.sizes == FIXED else 0
    if reason := size_problem(name, built, side, patch):
        return Outcome(UNTRAINABLE, reason=f"{side or patch} px: {reason}")
    if side or patch:
        source = TimmNetwork(name, built).state_dict()
        state = resample_tensors(name, built, source, side, patch)
    net = TimmNetwork(name, built, image_size=side, patch_size=patch).train()
    if side or patch:
        net.load_state_dict(state)
    size = (side, side) if side else (5 * (patch or stride), 7 * (patch or stride))
    made = net(torch.randn(2, 3, *size))
    sum(value.square().mean() for value in made.values()).backward()
    without = [n for n, p in net.named_parameters() if p.requires_grad and p.grad is None]
    shapes = {n: [size[0] // s, size[1] // s] for n, s in net.strides.items()}
    if without or any(list(value.shape[2:]) != shapes[n] for n, value in made.items()):
        return Outcome(FAILED, reason=f"no gradient: {without[:3]}, shapes {shapes}")
    return Outcome(SQUARE if side else ANY_SIZE)


def _maps(name: str) -> Outcome:
    """Describe a network on the meta device alone."""
    maps = network_maps(name)
    return Outcome(f"shapes alone: {SQUARE if maps.sizes == FIXED else ANY_SIZE}")


def _heads(net: Any) -> dict[str, int]:
    """Return the option that a plain state dict of a vision transformer needs."""
    blocks = getattr(net, "blocks", None)
    heads = getattr(getattr(blocks[0], "attn", None), "num_heads", None) if blocks else None
    return {"num_heads": heads} if heads else {}


def _outcome(
    name: str, net: nn.Module, content: Any, options: Mapping[str, Any], folder: Path
) -> Outcome:
    file, result = folder / "some.file", folder / "out.pth"
    torch.save(content, file)
    is_named = "arch" in content
    name = name.partition(".")[0]
    try:
        try:
            report = convert_file(file, result)
        except UserError:
            if not options:
                raise
            report = convert_file(file, result, **options)
    except UserError as error:
        what = REFUSED if not is_named or name in str(error) else UNNAMED
        return Outcome(what, reason=str(error).removeprefix(f"{file}: "))
    except Exception as error:  # to go on with the next network
        return Outcome(FAILED, reason=f"{type(error).__name__}: {error}")
    difference = compare(name, net, read_converted(result))
    family = report.contract.family.name
    if difference <= TOLERANCE:
        return Outcome(f"{family}, {EQUAL}", difference)
    if report.assumed and not is_named:
        return Outcome(f"{family}, {ASSUMED}", difference, report.assumed)
    return Outcome(SILENT, difference, report.assumed)


def compare(name: str, net: Any, converted: Converted) -> float:
    """Return the largest difference of a converted backbone's features to timm's own.

    Each feature is compared with those of timm's forward pass that have its shape. Where the
    backbone lacks class token and registers, so does timm's network.
    """
    image = verification_image(converted.contract)
    backbone = build_backbone(converted.contract)
    backbone.load_state_dict(converted.model, strict=False)
    with torch.no_grad():
        made: Mapping[str, Tensor] = backbone.eval()(image)
        if converted.contract.family.name == "timm":
            ways = [_relative(made, net.forward_intermediates(image, intermediates_only=True))]
        else:
            ways = [_relative(made, expected) for expected in _features(name, net, image)]
    return min(ways, default=float("inf"))


def _features(name: str, net: Any, image: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yield the feature maps of timm's network as it is, and without the tokens of a ViT."""
    import timm

    if hasattr(net, "set_input_size") and list(image.shape[2:]) != _image_size(net):
        # By default a Swin's windows would grow with the image; shifts are those of detectors.
        windows = {}
        if isinstance(net, timm.models.SwinTransformer):
            windows = {"window_size": net.layers[0].blocks[0].window_size, "always_partition": True}
        net.set_input_size(tuple(image.shape[2:]), **windows)
    if hasattr(net, "forward_intermediates"):
        yield net.forward_intermediates(image, intermediates_only=True)
    else:
        cfg = {"state_dict": net.state_dict()}
        theirs = timm.create_model(
            name, features_only=True, pretrained=True, pretrained_cfg_overlay=cfg
        )
        yield theirs.eval()(image)
    if getattr(net, "num_prefix_tokens", 0):
        tokens = ("cls_token", "reg_token", "pos_embed")
        before = {key: getattr(net, key) for key in tokens if getattr(net, key, None) is not None}
        counts = {module: module.num_prefix_tokens for module in net.modules()
                  if hasattr(module, "num_prefix_tokens")}  # fmt: skip
        for key in ("cls_token", "reg_token"):
            setattr(net, key, None)
        if "pos_embed" in before:
            patches = net.patch_embed.num_patches
            net.pos_embed = nn.Parameter(before["pos_embed"][:, -patches:])
        for module in counts:
            module.num_prefix_tokens = 0
        yield net.forward_intermediates(image, intermediates_only=True)
        for key, value in before.items():
            setattr(net, key, value)
        for module, count in counts.items():
            module.num_prefix_tokens = count


def _image_size(net: Any) -> list[int]:
    return list(getattr(getattr(net, "patch_embed", None), "img_size", None) or ())


def _relative(made: Mapping[str, Tensor], expected: Sequence[Tensor]) -> float:
    largest = 0.0
    for name, value in made.items():
        if name == "stem":
            continue  # timm's is before the pooling
        others = [other for other in expected if other.shape == value.shape]
        scale = max(1.0, float(value.abs().max()))
        last = float((others[-1] - value).abs().max()) / scale if others else float("inf")
        largest = max(largest, last)
    return largest


def _job(task: tuple[str, float, Sequence[str]]) -> tuple[str, dict[str, Outcome]]:
    torch.set_num_threads(1)
    name, max_parameters, kinds = task
    return name, outcomes(name, max_parameters, kinds)


def sweep(
    names: Sequence[str],
    jobs: int = 1,
    max_parameters: float = MAX_PARAMETERS,
    kinds: Sequence[str] = KINDS,
) -> dict[str, dict[str, Outcome]]:
    """Convert networks in processes of 10 each, and print a line for each."""
    found = {}
    tasks = [(name, max_parameters, kinds) for name in names]
    spawn = multiprocessing.get_context("spawn")
    # A Pool would wait forever for a process that is killed for its memory.
    with ProcessPoolExecutor(jobs, spawn, max_tasks_per_child=10) as pool:
        for name, made in pool.map(_job, tasks):
            found[name] = made
            for kind, outcome in made.items():
                reason = f": {outcome.reason[-300:]}" if outcome.reason else ""
                print(f"{name:40} {kind:6} {outcome.what} {outcome.difference:.2g}{reason}",
                      flush=True)  # fmt: skip
    return found


def table(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Return the counts by outcome as a table, with the largest difference of each."""
    head = " ".join(f"{kind:>6}" for kind in KINDS)
    lines = [f"{'outcome':44} {head}  largest relative difference"]
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    largest: dict[str, float] = collections.defaultdict(float)
    for made in found.values():
        for kind, outcome in made.items():
            counts[outcome.what][kind] += 1
            largest[outcome.what] = max(largest[outcome.what], outcome.difference)
    for what, its in sorted(counts.items()):
        numbers = " ".join(f"{its[kind]:6}" for kind in KINDS)
        lines.append(f"{what:44} {numbers}  {largest[what]:.2g}")
    return "\n".join(lines)


def main() -> int:
    """Run the sweep; the exit code is 1 after a silent difference."""
    import timm

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("patterns", nargs="+", help="patterns of timm's model names")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--max-parameters", type=float, default=MAX_PARAMETERS,
                        help="larger networks are not built")  # fmt: skip
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is tried")
    args = parser.parse_args()
    every = timm.list_models()
    names = [n for n in every if any(fnmatch.fnmatch(n, p) for p in args.patterns)]
    found = sweep(names, args.jobs, args.max_parameters, args.kinds)
    print(f"\n{len(found)} networks of timm {timm.__version__}\n{table(found)}")
    return int(any(outcome.what in WRONG for made in found.values() for outcome in made.values()))


if __name__ == "__main__":
    raise SystemExit(main())
