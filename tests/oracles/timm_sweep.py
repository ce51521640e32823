"""Conversion of timm's networks at random weights, compared with timm's own forward pass.

    python -m tests.oracles.timm_sweep 'resnet*' 'vit_*'

Each network is built, saved as timm's train.py saves it with its name and also as a plain state
dict, and converted. A file that is converted must have the features of the network that it was
saved from; one that is refused must be refused by its name. A plain state dict has no name: what
its tensors do not determine is in the report's line `assumed`. Anything else is a silent
difference, after which the exit code is 1.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from convert.convert_to_d2 import convert_file
from convert.prove import Converted, build_backbone, proof_image, read_converted
from moco.common.errors import UserError

MAX_PARAMETERS = 400e6
TOLERANCE = 1e-5  # relative to the largest feature
# Outcomes.
EQUAL, REFUSED, ASSUMED = "equal features", "refused", "other features, as the report assumes"
UNNAMED, SILENT, FAILED = "refused without its name", "SILENT DIFFERENCE", "FAILED"
TOO_LARGE, NOT_BUILT = "not built: too large", "not built by timm"
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


def make(name: str) -> nn.Module:
    """Build a network whose features show how it computes, as those of a trained network.

    No norm or LayerScale is at its initial value; linear layers are larger than at the start of a
    training, so that attention and activations matter, and the first convolution is smaller, so
    that the epsilon of norms does.
    """
    import timm

    torch.manual_seed(0)
    net: nn.Module = timm.create_model(name, num_classes=2).eval()
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


def outcomes(name: str, max_parameters: float = MAX_PARAMETERS) -> dict[str, Outcome]:
    """Convert a network with and without its name."""
    import timm

    warnings.filterwarnings("ignore")
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in timm.create_model(name).parameters())
        if size > max_parameters:
            return dict.fromkeys(("named", "plain"), Outcome(TOO_LARGE))
        net = make(name)
    except Exception as error:  # of another library, in its optional dependencies
        return dict.fromkeys(("named", "plain"), Outcome(NOT_BUILT, reason=str(error)))
    state = net.state_dict()
    named = {"state_dict": state, "arch": name, "version": 2, "epoch": 1}
    heads = _heads(net)
    with tempfile.TemporaryDirectory() as folder:
        return {
            "named": _outcome(name, net, named, {}, Path(folder)),
            "plain": _outcome(name, net, state, heads, Path(folder)),
        }


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


def compare(name: str, net: nn.Module, converted: Converted) -> float:
    """Return the largest difference of a converted backbone's features to timm's own.

    Each feature is compared with those of timm's forward pass that have its shape. Where the
    backbone lacks class token and registers, so does timm's network.
    """
    image = proof_image(converted.contract)
    backbone = build_backbone(converted.contract)
    backbone.load_state_dict(converted.model, strict=False)
    with torch.no_grad():
        made: Mapping[str, Tensor] = backbone.eval()(image)
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
        others = [other for other in expected if other.shape == value.shape]
        if name == "stem":
            continue  # timm's is before the pooling
        scale = max(1.0, float(value.abs().max()))
        nearest = [float((other - value).abs().max()) / scale for other in others]
        largest = max(largest, min(nearest, default=float("inf")))
    return largest


def _job(task: tuple[str, float]) -> tuple[str, dict[str, Outcome]]:
    torch.set_num_threads(1)
    name, max_parameters = task
    return name, outcomes(name, max_parameters)


def sweep(
    names: Sequence[str], jobs: int = 1, max_parameters: float = MAX_PARAMETERS
) -> dict[str, dict[str, Outcome]]:
    """Convert networks in processes of 10 each, and print a line for each."""
    found = {}
    tasks = [(name, max_parameters) for name in names]
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
    lines = [f"{'outcome':44} {'named':>6} {'plain':>6}  largest relative difference"]
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    largest: dict[str, float] = collections.defaultdict(float)
    for made in found.values():
        for kind, outcome in made.items():
            counts[outcome.what][kind] += 1
            largest[outcome.what] = max(largest[outcome.what], outcome.difference)
    for what, its in sorted(counts.items()):
        lines.append(f"{what:44} {its['named']:6} {its['plain']:6}  {largest[what]:.2g}")
    return "\n".join(lines)


def main() -> int:
    """Run the sweep; the exit code is 1 after a silent difference."""
    import timm

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("patterns", nargs="+", help="patterns of timm's model names")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--max-parameters", type=float, default=MAX_PARAMETERS,
                        help="larger networks are not built")  # fmt: skip
    args = parser.parse_args()
    every = timm.list_models()
    names = [n for n in every if any(fnmatch.fnmatch(n, p) for p in args.patterns)]
    found = sweep(names, args.jobs, args.max_parameters)
    print(f"\n{len(found)} networks of timm {timm.__version__}\n{table(found)}")
    return int(any(outcome.what in WRONG for made in found.values() for outcome in made.values()))


if __name__ == "__main__":
    raise SystemExit(main())
