"""Frozen backbone that runs image by image (MODEL.BACKBONE.PER_IMAGE), and the cache of its maps.

A frozen backbone in eval mode is a pure function. Detectron2 pads the images of a batch to one
size, and an image's maps depend on that padding. With PER_IMAGE each image is computed by itself,
padded only to whole cells as in an evaluation, and its maps are padded with zeros to those of the
batch. The maps of an image are then always the same, so that they can be read instead of computed:
losses, weights and AP are bitwise equal with and without the cache.

Deviation: Detectron2 computes the maps of the padded batch, whose borders differ.

Files of the cache, which several runs and processes may use at the same time:

<CACHE_DIR>/<context>/<image>.safetensors

The context is the digest of all that the maps depend on besides the image; the image is the digest
of its pixels as the mapper made them, and the precision.
"""

import hashlib
import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from detection.data.mapper import resized_size
from detection.data.pipeline import is_semantic, training_records
from detection.datasets import read_split
from detection.modeling.backbones import backbone_type
from moco.common.cfgnode import flatten
from moco.common.errors import DataError, UserError, first_few, plural
from moco.common.files import atomic_write, load_safetensors, sha256_state
from moco.common.run import provenance

logger = logging.getLogger(__name__)

FOLDER = "features"  # in OUTPUT_DIR or in the folder of a suite
_GB = 1e9
_RESCAN = 64  # writes after which the bytes of other runs are counted again
_DIGITS = 32
# Keys of MODEL that change no map.
_NO_MAPS = ("MODEL.WEIGHTS", "MODEL.BACKBONE.CACHE_GB", "MODEL.BACKBONE.CACHE_DIR")


def run_per_image(model: nn.Module, cfg: CfgNode, engine: str) -> "PerImage":
    """Have the backbone of a model compute or read the maps of each image by itself (in place).

    Args:
        model: Model of either engine with its weights loaded; names of tensors do not change.
        cfg: Configuration of the task, with MODEL.BACKBONE.PER_IMAGE.
        engine: Name of the engine.

    Returns:
        What computes the maps; it has to see the samples before the backbone gets their batch,
        which a call of the model does by itself.

    Raises:
        UserError: If a parameter of the backbone is trained.
    """
    net = network_of(cfg, model)
    # The norms of a network's output maps are trained; the part before them is frozen.
    method = "stage_maps" if hasattr(net, "stage_maps") else "forward"
    norms = tuple(f"{name}." for name in getattr(net, "norms", ()))
    trained = [n for n, p in net.named_parameters() if p.requires_grad and not n.startswith(norms)]
    if trained:
        raise UserError(
            f"MODEL.BACKBONE.PER_IMAGE True: {plural(len(trained), 'tensor')} of the backbone "
            f"would be trained ({first_few(trained)}); freeze all of it by MODEL.BACKBONE.FREEZE_AT"
        )
    backbone: Any = model.get_submodule("backbone")
    used = getattr(backbone, "in_features", None)  # of an FPN
    padding = Padding(max(backbone.size_divisibility, 1), cfg.MODEL.BACKBONE.SQUARE_PAD)
    cache = None
    if why := _why_not_cached(cfg):
        logger.info("the backbone's maps are not cached: %s", why)
    else:
        cache = FeatureCache(cache_folder(cfg) / _context(net, cfg, engine), cfg, padding)
    per_image = PerImage(net, getattr(net, method), used, padding, cache)
    model.register_forward_pre_hook(lambda _, inputs: per_image.see(inputs[0]))
    setattr(net, method, per_image)
    return per_image


def network_of(cfg: CfgNode, model: nn.Module) -> nn.Module:
    """Return the network of a model that has the weights, below any pyramid."""
    modules = dict(model.named_modules())
    names = [prefix.rstrip(".") for prefix in backbone_type(cfg.MODEL.BACKBONE.NAME).prefixes]
    return modules[max((n for n in names if n in modules and "heads" not in n), key=len)]


def cache_folder(cfg: CfgNode) -> Path:
    """Return the folder of the cache: CACHE_DIR, or a folder in OUTPUT_DIR that the run removes."""
    return Path(cfg.MODEL.BACKBONE.CACHE_DIR or Path(cfg.OUTPUT_DIR) / FOLDER)


def _why_not_cached(cfg: CfgNode) -> str:
    """Return why no maps are cached, or ""; a random crop or color makes every image new."""
    keys = cfg.INPUT
    if not cfg.MODEL.BACKBONE.CACHE_GB:
        return "MODEL.BACKBONE.CACHE_GB is 0"
    for name, random in (
        ("INPUT.LSJ.ENABLED", keys.LSJ.ENABLED),
        ("INPUT.CROP.ENABLED", keys.CROP.ENABLED),
        ("INPUT.MIN_SIZE_TRAIN_SAMPLING", keys.MIN_SIZE_TRAIN_SAMPLING == "range"),
        ("INPUT.SEM_SEG_CROP_SIZE", is_semantic(cfg) and keys.SEM_SEG_CROP_SIZE),
        ("INPUT.SEM_SEG_SCALE_RANGE", is_semantic(cfg) and keys.SEM_SEG_SCALE_RANGE != [1.0, 1.0]),
        ("INPUT.SEM_SEG_COLOR", is_semantic(cfg) and keys.SEM_SEG_COLOR),
    ):
        if random:
            return f"{name} {flatten(cfg)[name]} samples new pixels in every epoch"
    return ""


def _context(net: nn.Module, cfg: CfgNode, engine: str) -> str:
    """Return the digest of what the maps depend on besides the image and the precision."""
    facts = provenance()
    model = {k: v for k, v in flatten(cfg).items() if k.startswith("MODEL.") and k not in _NO_MAPS}
    content = {
        "weights": sha256_state(net.state_dict()),
        "config": {**model, "INPUT.FORMAT": cfg.INPUT.FORMAT},
        "versions": facts["versions"],
        "hardware": facts["hardware"],
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "engine": engine,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_DIGITS]


@dataclass(frozen=True)
class Padding:
    """Padding of an image by itself: to multiples of a number of px, or to a square if not 0."""

    divisor: int
    square: int

    def __call__(self, height: int, width: int) -> tuple[int, int]:
        """Return the padded height and width."""
        sides = (self.square or height, self.square or width)
        padded_height, padded_width = (-(-side // self.divisor) * self.divisor for side in sides)
        return padded_height, padded_width


class PerImage:
    """Function from a batch of images to the maps of a frozen network, image by image.

    Args:
        net: Network, which is kept in eval mode.
        maps: Its function from images (N, 3, H, W) to maps by name.
        used: Names of the maps that are used; None for all.
        padding: Padding of an image.
        cache: Cache of the maps, if any.
    """

    def __init__(
        self,
        net: nn.Module,
        maps: Any,
        used: Sequence[str] | None,
        padding: Padding,
        cache: "FeatureCache | None",
    ) -> None:
        self._net, self._maps, self._used, self._cache = net, maps, used, cache
        self._padding = padding
        self._images: list[Tensor] = []

    def see(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Keep the images (3, H, W) uint8 of the samples that the backbone gets next."""
        self._images = [sample["image"] for sample in samples]

    @torch.no_grad()
    def __call__(self, batch: Tensor) -> dict[str, Tensor]:
        """Return the maps (N, C, h, w) of normalized and padded images (N, 3, H, W)."""
        self._net.eval()  # `model.train()` also reaches a frozen network
        found = [self._of_one(x, batch[i : i + 1]) for i, x in enumerate(self._images)]
        return {name: _stack([maps[name] for maps in found]) for name in found[0]}

    def _of_one(self, image: Tensor, padded: Tensor) -> Mapping[str, Tensor]:
        height, width = self._padding(*image.shape[-2:])
        padded = padded[..., :height, :width]
        kind = padded.device.type
        precise = not torch.is_autocast_enabled(kind)
        dtype = padded.dtype if precise else torch.get_autocast_dtype(kind)
        name = f"{_digest(image)}-{str(dtype).removeprefix('torch.')}"
        if self._cache and (maps := self._cache.read(name)) is not None:
            return {key: value.to(padded.device) for key, value in maps.items()}
        maps = self._maps(padded.contiguous())
        computed = {key: maps[key] for key in self._used or maps}
        if self._cache:
            self._cache.write(name, computed, height * width)
        return computed


def _digest(image: Tensor) -> str:
    pixels = image.cpu().contiguous()
    shape = f"{tuple(pixels.shape)} {pixels.dtype}\n".encode()
    return hashlib.sha256(shape + pixels.numpy().tobytes()).hexdigest()[:_DIGITS]


def _stack(maps: Sequence[Tensor]) -> Tensor:
    """Stack maps (1, C, h, w), padded with zeros at the right and bottom."""
    height, width = (max(x.shape[axis] for x in maps) for axis in (-2, -1))
    batch = maps[0].new_zeros(len(maps), maps[0].shape[1], height, width)
    for target, x in zip(batch, maps, strict=True):
        target[:, : x.shape[-2], : x.shape[-1]].copy_(x[0])
    return batch


class FeatureCache:
    """Maps by name of an image, in a folder that other runs may read and write as well.

    Args:
        folder: Folder of the context.
        cfg: Configuration of the task, for the limit and the forecast.
        padding: Padding of an image, for the forecast.
    """

    def __init__(self, folder: Path, cfg: CfgNode, padding: Padding) -> None:
        self._folder = folder
        # Of training and test images. They are read here, as trainings soon forget the records.
        self._pixels = [[math.prod(padding(*size)) for size in part] for part in image_sizes(cfg)]
        self._limit = cfg.MODEL.BACKBONE.CACHE_GB * _GB
        self._is_full = False
        self._writes = self._bytes = 0

    def read(self, name: str) -> dict[str, Tensor] | None:
        """Return the maps of an entry; None if there is none, or it is damaged."""
        path = self._path(name)
        if not path.is_file():
            return None
        try:
            maps, metadata = load_safetensors(path)
        except DataError:
            return None
        # safetensors does not keep the order of the maps.
        checksum, *names = metadata.get("maps", "").split() or [""]
        ordered = {name: maps[name] for name in names if name in maps}
        return ordered if checksum == _checksum(ordered) else None

    def write(self, name: str, maps: Mapping[str, Tensor], pixels: int) -> None:
        """Write an entry unless the cache is full; `pixels` are those of the padded image."""
        from safetensors.torch import save

        kept = {key: value.detach().cpu().contiguous() for key, value in maps.items()}
        size = sum(value.nbytes for value in kept.values())
        if self._is_full:
            return
        if self._writes % _RESCAN == 0:
            self._bytes = self._bytes_of_all_runs()
        if self._writes == 0:
            self._log_forecast(kept, pixels)
        if self._bytes + size > self._limit:
            self._stop(f"CACHE_GB {self._limit / _GB:g} is reached")
            return
        content = save(kept, {"maps": " ".join([_checksum(kept), *kept])})
        try:
            atomic_write(self._path(name), lambda file: file.write(content))
        except UserError as error:
            self._stop(str(error))
        self._writes, self._bytes = self._writes + 1, self._bytes + size

    def _stop(self, why: str) -> None:
        self._is_full = True
        logger.warning("feature cache: %s; further maps are computed each time", why)

    def _bytes_of_all_runs(self) -> int:
        found = 0
        for path in self._folder.parent.glob("*/*.safetensors"):
            with suppress(FileNotFoundError):  # another run may remove its cache
                found += path.stat().st_size
        return found

    def _log_forecast(self, maps: Mapping[str, Tensor], pixels: int) -> None:
        size = sum(value.nbytes for value in maps.values())
        in_fp32 = 4 * sum(value.numel() for value in maps.values())  # as tests compute
        train, test = self._pixels
        logger.info(
            "feature cache: %s, forecast: %.4g GB for %s (MODEL.BACKBONE.CACHE_GB %g)",
            self._folder,
            (sum(train) * size + sum(test) * in_fp32) / pixels / _GB,
            plural(len(train) + len(test), "image"),
            self._limit / _GB,
        )

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"


def _checksum(maps: Mapping[str, Tensor]) -> str:
    checksum = 0
    for name, value in maps.items():
        data = value.reshape(-1).view(torch.uint8).numpy().data
        checksum = zlib.crc32(data, zlib.crc32(name.encode(), checksum))
    return f"{checksum:08x}"


def image_sizes(cfg: CfgNode) -> list[list[tuple[int, int]]]:
    """Return the sizes of the different images that a run shows to the backbone: training, test.

    A training image counts once for each training size and each direction of the random flip.
    """
    keys, flips = cfg.INPUT, 1 if cfg.INPUT.RANDOM_FLIP == "none" else 2
    short = [keys.SEM_SEG_SIZE] if is_semantic(cfg) else keys.MIN_SIZE_TRAIN
    train, test = training_records(cfg), read_split(cfg.DATASETS.TEST[0], cfg).records
    return [
        [
            resized_size((record["height"], record["width"]), side, limit)
            for record in records
            for side in sides
        ]
        for records, sides, limit in (
            (train, [*short] * flips, keys.MAX_SIZE_TRAIN),
            (test, [keys.MIN_SIZE_TEST], keys.MAX_SIZE_TEST),
        )
    ]
