"""Comparison of a conversion with a module of the source, by running that module.

The module is the one that was passed to the converter, or the class of transformers that a folder's
configuration names. A file determines tensors; a module determines the whole network: heads,
activations, strides, the order of the channels. Code after the last compared map is not compared.

transformers' own loader fills the class with the tensors of the file. The configuration is reduced
to the facts that were compared with the tensors: no attribute names files, code or a kernel, or
asks for memory.

Shapes: C channels, H W pixels, n tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from convert.contract import InputContract, Overrides, Pixels
from convert.facts import ANY, TRANSFORMERS, known_facts
from convert.modeling.reference import TOLERANCE
from convert.modeling.timm_network import module_size
from convert.read import flatten, is_array, to_tensor
from convert.recognize import Recognition
from moco.common.errors import DataError, UserError, format_value
from moco.modeling.soundness import fixed_image

# Tolerance of the input of the first convolution, relative to the largest value.
_AFFINE_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class ModuleCheck:
    """Result of running a module.

    Attributes:
        text: Description for the report.
        pixels: Normalization and channel order inside the module, or None.
        verified: True if the module gave all maps.
    """

    text: str
    pixels: Pixels | None = None
    verified: bool = True


@dataclasses.dataclass
class _Run:
    """Input of the first convolution in a run of a module, and the sum of each output."""

    first_input: Tensor | None = None
    sums: list[tuple[str, float]] = dataclasses.field(default_factory=list)


def check_module(
    module: nn.Module, found: Recognition, overrides: Overrides, where: str
) -> ModuleCheck:
    """Run a module on one image and compare its maps with those of the recognized network.

    The smallest submodule with all tensors of the network, or a parent if the submodule takes no
    image, is run twice, in eval mode and in float32 on the CPU. Flags, buffers and random states
    of the module are restored.

    Args:
        module: Module whose state dict was recognized.
        found: Recognized network.
        overrides: Options of the conversion.
        where: Name of the module, for messages.

    Returns:
        The modules that gave the maps, or the reason why the module could not be run.

    Raises:
        DataError: If a map is not among the outputs of the modules, or the first convolution gets
            another image.
        UserError: If the module normalizes its images, and an option says otherwise.
    """
    if any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
        return _not_verified("it has ScriptModules")
    state, architecture = found.original or found.source_network()
    family = found.contract.family
    reasons = []
    for name, part in _candidates(module, found, state):
        label = name or type(module).__name__
        for size in _sizes(family, architecture, module):
            image = fixed_image(size)
            with _runnable(part) as ready:
                if isinstance(ready, str):
                    return _not_verified(ready)
                first, problem = _run(ready, image)
                if first is None or first.first_input is None:
                    reasons.append(
                        f"{label}: {problem or 'none of its convolutions takes an image'}"
                    )
                    continue
                pixels = _input_pixels(image, first.first_input, where)
                outer = None if part is module else _root_pixels(module, image, where)
                usual, seen = _usual_size(family, architecture), first.first_input
                if size != usual and family.tokens:
                    patch = architecture.patch_size
                    if any(side // patch != usual[0] // patch for side in size):
                        raise DataError(
                            f"{where}: takes images of {size[0]} x {size[1]} px, but a square of "
                            "positions was recognized; only square grids are supported"
                        )
                    seen = seen[..., : usual[0], : usual[1]]  # patches are whole
                maps = _expected(found, architecture, state, seen)
                compared = _Comparison(maps)
                second, _ = _run(ready, image, compared.look)
                if second is None or second.sums != first.sums:
                    return _not_verified("two runs of it differ, as with random masks")
            compared.check(where, str(architecture))
            pixels = pixels or outer
            _check_options(pixels, overrides, where)
            return ModuleCheck(compared.text(label, pixels), pixels)
    return _not_verified(reasons[0] if reasons else "no part of it has all tensors")


def _not_verified(reason: str) -> ModuleCheck:
    text = f"not verified by the module: {reason[:160]}"
    return ModuleCheck(text, verified=False)


def _candidates(
    module: nn.Module, found: Recognition, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the smallest submodule that has the tensors of a network, then the parents."""
    every = module.state_dict().keys()
    names = {name for key in state for name in found.named(key).split(" + ") if name in every}
    # A file may have the names of another version of the module, few of which the module has.
    paths = [name.split(".")[:-1] for name in names if 2 * len(names) > len(state)] or [[]]
    common = [
        parts[0]
        for parts in itertools.takewhile(
            lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)
        )
    ]
    for length in range(len(common), -1, -1):
        name = ".".join(common[:length])
        yield name, module.get_submodule(name)


def _usual_size(family: Any, architecture: Any) -> tuple[int, int]:
    """Return the size of the image for a comparison.

    For networks of windows it is square, because a map of a single window is not shifted, and
    libraries differ in maps that are a single window in one direction.
    """
    size: tuple[int, int] = family.image_size(architecture)
    return (min(size), min(size)) if family.is_windowed else size


def _sizes(family: Any, architecture: Any, module: Any) -> list[tuple[int, int]]:
    """Return the sizes of images to try: the usual one, then sizes that the module declares."""
    declared = [
        getattr(getattr(module, "patch_embed", None), "img_size", None),
        getattr(getattr(module, "config", None), "image_size", None),
        getattr(module, "image_size", None),
        module_size(module),
    ]
    sizes = [_usual_size(family, architecture)]
    for value in declared:
        pair = [value, value] if isinstance(value, int) else value
        if isinstance(pair, list | tuple) and len(pair) == 2 and all(type(x) is int for x in pair):
            sizes.append((pair[0], pair[1]))
    return list(dict.fromkeys(size for size in sizes if 0 < min(size) and max(size) <= 1024))


@contextmanager
def _runnable(part: nn.Module) -> Iterator[nn.Module | str]:
    """Provide a module in eval mode and in float32 on the CPU, or the reason why it cannot be run.

    A module of another type or device is copied. Changes by a run are restored.
    """
    modules = list(part.modules())
    tensors = [*part.parameters(), *part.buffers()]
    usual = all(t.device.type == "cpu" and t.dtype == torch.float32
                for t in tensors if t.is_floating_point())  # fmt: skip
    if not usual:
        try:
            part = copy.deepcopy(part).float().cpu()
        except (RuntimeError, TypeError) as error:
            yield f"no copy of it can be made ({_short(error)})"
            return
        modules = list(part.modules())
    flags = [each.training for each in modules]
    buffers = [(each, name, value, value.clone()) for each in modules
               for name, value in each._buffers.items() if value is not None]  # fmt: skip
    states = random.getstate(), np.random.get_state()
    try:
        part.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield part
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for each, flag in zip(modules, flags, strict=True):
            each.training = flag
        for each, name, value, before in buffers:
            each._buffers[name] = value
            if not torch.equal(value, before):
                value.copy_(before)


def _run(
    part: nn.Module, image: Tensor, look: Callable[[str, Tensor], None] = lambda name, value: None
) -> tuple[_Run | None, str]:
    """Run a module on an image, and call `look` with each output and the name of its module.

    `look` is called at once, because later operations may change an output in place.
    """
    run, handles = _Run(), []

    def keep_input(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if run.first_input is None and inputs and isinstance(inputs[0], Tensor):
            run.first_input = inputs[0].clone()

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for value in _tensors(output):
                run.sums.append((name, float(value.double().sum())))
                look(name, value)

        return hook

    for name, each in part.named_modules():
        handles.append(each.register_forward_hook(keep(name)))
        if isinstance(each, nn.Conv2d) and each.in_channels == 3:
            handles.append(each.register_forward_pre_hook(keep_input))
    try:
        part(image.clone())
    except Exception as error:
        return None, f"its forward needs more than an image ({_short(error)})"
    finally:
        for handle in handles:
            handle.remove()
    return run, ""


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {format_value(' '.join(str(error).split()), 80)}"


def _tensors(output: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the floating-point tensors in the output of a module, in lists and dicts as well."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif depth and isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value, depth - 1)
    elif depth and isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value, depth - 1)


def _expected(
    found: Recognition, architecture: Any, state: Mapping[str, Tensor], image: Tensor
) -> dict[str, Tensor]:
    """Return the maps of the recognized network with the source's tokens, (H W, C) by feature."""
    family = found.contract.family
    _, maps = family.source_features(architecture, state, found.tokens, image)
    if not (family.tokens or family.is_windowed):
        return {name: value[0].flatten(1).T for name, value in maps.items()}
    count = {name: value[0].numel() // value.shape[-1] for name, value in maps.items()}
    if family.tokens:  # without the tokens in front
        front = sum(value.shape[1] for value in found.tokens.values())
        count = {name: number - front for name, number in count.items()}
    return {name: value.reshape(-1, value.shape[-1])[-count[name] :]
            for name, value in maps.items()}  # fmt: skip


_ANY = " (its tokens in another order)"  # e.g. Hiera's tokens, which are sorted by windows


class _Comparison:
    """Search for maps among the outputs of modules.

    Args:
        maps: Maps by feature, (H W, C).
    """

    def __init__(self, maps: Mapping[str, Tensor]) -> None:
        self.maps = maps
        self.nearest: dict[str, tuple[float, str]] = {}

    def look(self, name: str, output: Tensor) -> None:
        """Compare an output in NCHW or NHWC, or tokens after other tokens, in any order."""
        for feature, expected in self.maps.items():
            for value in _as_tokens(output, *expected.shape):
                scale = max(1.0, float(expected.abs().max()))
                for order in ("", _ANY):
                    pair = (_sorted(value), _sorted(expected)) if order else (value, expected)
                    difference = float((pair[0] - pair[1]).abs().max()) / scale
                    if difference < self.nearest.get(feature, (float("inf"), ""))[0]:
                        self.nearest[feature] = (difference, name + order)
                    if difference <= TOLERANCE:
                        break

    def check(self, where: str, architecture: str) -> None:
        """Raise DataError if a map is not among the outputs."""
        for feature in self.maps:
            difference, name = self.nearest.get(feature, (float("inf"), ""))
            if not difference <= TOLERANCE:
                nearest = (
                    f"the nearest output, of {name}, differs by {difference:.2g}"
                    if name
                    else "no module gives a map of its size"
                )
                raise DataError(
                    f"{where}: has the tensors of a {architecture}, but computes something else: "
                    f"{nearest} at {feature}"
                )

    def text(self, label: str, pixels: Pixels | None) -> str:
        """Describe the modules that gave the maps, and changes of the image inside them."""
        largest = max(difference for difference, _ in self.nearest.values())
        pairs = ", ".join(f"{feature} by {self.nearest[feature][1]}" for feature in self.maps)
        inside = (
            "" if pixels is None else "; it changes its image itself, see the contract's pixels"
        )
        return (
            f"compared with {label} itself, run on one image: {pairs} (difference up to "
            f"{largest:.2g}, relative to the largest value of a map){inside}"
        )


def _sorted(tokens: Tensor) -> Tensor:
    """Sort tokens, (T, C), by their sums."""
    return tokens[tokens.double().sum(dim=1).argsort()]


def _as_tokens(output: Tensor, count: int, channels: int) -> Iterator[Tensor]:
    """Yield the interpretations of an output as `count` tokens of `channels` channels."""
    if output.dim() == 4 and len(output) == 1:
        if output.shape[1] == channels and output[0, 0].numel() == count:
            yield output[0].flatten(1).T
        if output.shape[3] == channels and output[0, :, :, 0].numel() == count:
            yield output[0].flatten(0, 1)
    elif output.dim() == 3 and output.shape[2] == channels and 1 in output.shape[:2]:
        tokens = output.flatten(0, 1)
        if len(tokens) >= count:
            yield tokens[-count:]


def _input_pixels(image: Tensor, got: Any, where: str) -> Pixels | None:
    """Return the normalization that a module applies before the first convolution, or None.

    Raises:
        DataError: If the image is changed otherwise than by a permutation and a normalization of
            the channels.
    """
    if got.shape != image.shape:
        raise DataError(
            f"{where}: resizes or pads its images from {list(image.shape[2:])} to "
            f"{list(got.shape[2:])} before the first convolution; give the network inside it"
        )
    if torch.equal(got, image):
        return None
    order, means, stds = [], [], []
    for channel in got[0].double():
        fits = [
            (*_fit_line(source, channel), number) for number, source in enumerate(image[0].double())
        ]
        error, slope, offset, number = min(fits)
        if not (error <= _AFFINE_TOLERANCE * float(channel.abs().max()) and slope > 0):
            raise DataError(
                f"{where}: the first convolution does not get the image but something else, which "
                "no mean, std and order of channels describe; give the network inside it"
            )
        order.append(number)
        means.append(round(-offset / slope, 6))
        stds.append(round(1 / slope, 6))
    name = {(0, 1, 2): "RGB", (2, 1, 0): "BGR"}.get((order[0], order[1], order[2]))
    if name is None:
        raise DataError(
            f"{where}: permutes the channels of its images to {order}, expected RGB or BGR"
        )
    scale = 255 if max(*map(abs, means), *stds) <= 1 + 1e-6 else 1
    if max(map(abs, means)) < 1e-5 and max(abs(std - 1) for std in stds) < 1e-5:
        return Pixels((0, 0, 0), (1, 1, 1), name)  # a permutation alone
    a, b = ([round(scale * x, 3) for x in values] for values in (means, stds))
    return Pixels((a[0], a[1], a[2]), (b[0], b[1], b[2]), name)


def _root_pixels(module: nn.Module, image: Tensor, where: str) -> Pixels | None:
    """Return the normalization that the whole module applies, or None if it takes no image.

    Raises:
        DataError: As `_input_pixels`.
    """
    with _runnable(module) as ready:
        run = None if isinstance(ready, str) else _run(ready, image)[0]
    if run is None or run.first_input is None:
        return None
    return _input_pixels(image, run.first_input, where)


def _fit_line(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Return the largest residual, the slope and the offset of the line y = slope x + offset."""
    dx, dy = x - x.mean(), y - y.mean()
    slope = float((dx * dy).sum() / (dx * dx).sum())
    offset = float(y.mean()) - slope * float(x.mean())
    return float((slope * x + offset - y).abs().max()), slope, offset


def with_pixels(contract: InputContract, inside: Pixels | None) -> InputContract:
    """Return the contract with the normalization and channel order inside the module, if any."""
    if inside is None:
        return contract
    pixels = inside
    if _only_permutes(inside):
        pixels = contract.pixels.with_channel_order(inside.channel_order)
    return dataclasses.replace(contract, pixels=pixels)


def _only_permutes(pixels: Pixels) -> bool:
    """Return whether a module permutes the channels of its images without a normalization."""
    return pixels.std == (1.0, 1.0, 1.0) and pixels.mean == (0.0, 0.0, 0.0)


def _check_options(pixels: Pixels | None, overrides: Overrides, where: str) -> None:
    if pixels is None:
        return
    names = ["channel_order"] if _only_permutes(pixels) else ["channel_order", "mean", "std"]
    for name in names:
        given, own = getattr(overrides, name), getattr(pixels, name)
        if given is not None and (
            given != own if isinstance(own, str) else not np.allclose(given, own, atol=0.01)
        ):
            raise UserError(
                f"{name}: got {given}, but {where} itself has {own}, before its first convolution; "
                "leave it out"
            )


# No limit of seconds, because a verdict must not depend on the machine. ViT-L has 304 million.
MAX_PARAMETERS = 350_000_000
# Tensors of parts after the blocks, which a file may lack.
_LATER = re.compile(
    r"(pooler|head|(post_)?layer_?norm|norm|decoder)\b|.*(mask_token|position_ids)$"
)


def check_source(
    module: nn.Module | None, raw: Any, found: Recognition, overrides: Overrides, where: str
) -> tuple[Recognition, ModuleCheck]:
    """Compare a network with the module that was passed, or with the class of transformers.

    Args:
        module: Module whose tensors were recognized, or None for a file with a configuration of
            transformers.
        raw: Contents of the file.
        found: Recognized network.
        overrides: Options of the conversion.
        where: Name of the file or the module, for messages.

    Returns:
        The network, without properties that the module confirms in `assumed`, and the result.

    Raises:
        DataError, UserError: See `check_module`.
    """
    if module is None:
        made = _load_by_transformers(raw, found, where)
        if isinstance(made, str):
            text = f"not verified by the class of transformers: {made}"
            return found, ModuleCheck(text, verified=False)
        module, where = made, f"{where}: transformers' {type(made).__name__}"
    check = check_module(module, found, overrides, where)
    if check.verified:  # a module determines everything but the pixels
        pixels = "" if check.pixels else found.assumed_pixels
        found = dataclasses.replace(found, assumed=pixels, assumed_pixels=pixels)
    return found, check


def _load_by_transformers(raw: Any, found: Recognition, where: str) -> nn.Module | str:
    """Return the network that transformers loads from a file, or the reason why it does not."""
    if not importlib.util.find_spec("transformers"):
        return "transformers is not installed"
    parameters = sum(value.numel() for value in found.source_network()[0].values())
    if parameters > MAX_PARAMETERS:
        return f"it has more than {MAX_PARAMETERS // 10**6} million parameters"
    names = {part for key in found.state for part in found.named(key).split(" + ")}
    entries = [entry for entry in flatten(raw, where) if is_array(entry.value)]
    inside = {entry.name.rpartition("/")[2]: entry.value for entry in entries
              if entry.keys[:-1] == found.keys}  # fmt: skip
    kind = found.configuration["model_type"]
    # Other facts, such as the width of a pooler, could ask for any amount of memory.
    own = known_facts(TRANSFORMERS, found.contract.family.name, kind)
    facts = {name: value for name, value in found.configuration.items()
             if own.get(name, ANY) is not ANY and value is not None}  # fmt: skip
    return _fill_class(kind, facts, inside, names, where)


def _fill_class(
    kind: str, facts: Mapping[str, Any], arrays: Mapping[str, Any], names: set[str], where: str
) -> nn.Module | str:
    import transformers
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        config = transformers.CONFIG_MAPPING[kind](**facts)
        make: Any = transformers.MODEL_MAPPING[type(config)]
        lost: set[str] = set()
        starts = itertools.accumulate(f"{part}." for part in min(names).split(".")[:-1])
        for prefix in ["", *starts]:  # the class may be inside another network
            if not all(name.startswith(prefix) for name in names):
                break
            tensors = {key.removeprefix(prefix): _tensor(key, value, where)
                       for key, value in arrays.items() if key.startswith(prefix)}  # fmt: skip
            net, info = make.from_pretrained(
                None, config=config, state_dict=tensors, output_loading_info=True
            )
            lost = {key for key in info["missing_keys"] if not _LATER.match(key)}
            if not lost:
                module: nn.Module = net.eval()
                return module
        return f"its {kind} lacks {len(lost)} of the tensors, such as {min(lost)}"
    except Exception as error:  # classes raise any exception for an invalid configuration
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _tensor(key: str, value: Any, where: str) -> Tensor:
    tensor = to_tensor(key, value, where)
    return tensor.float() if tensor.is_floating_point() else tensor
