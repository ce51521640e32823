"""Corruptions of test images, from the package imagecorruptions.

They are the 15 of Hendrycks and Dietterich (2019, arXiv 1903.12261), which Michaelis et al. (2019,
arXiv 1907.07484) apply to detection. The random seed of an image is computed from its id, so every
model, engine and run sees the same pixels.

Deviation: imagecorruptions 1.1.2 (2020) uses names that NumPy, scikit-image and setuptools have
removed since. Stand-ins are given to this package alone, and its salt-and-pepper noise gets a seed.
"""

import contextlib
import functools
import importlib.util
import io
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from fvcore.common.config import CfgNode
from numpy.typing import NDArray
from PIL import Image

from detection.datasets.base import Record, require_package
from detection.datasets.files import OpenURL, read_image
from moco.common.errors import DataError, UserError

GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
NAMES = tuple(name for names in GROUPS.values() for name in names)
SEVERITIES = (1, 2, 3, 4, 5)
PACKAGE = "imagecorruptions"


def parse_corruption(text: str) -> tuple[str, int]:
    """Parse INPUT.CORRUPTION into name and severity.

    Raises:
        UserError: If the value is invalid or the package is not installed.
    """
    name, _, severity = text.partition(".")
    if name not in NAMES or severity not in map(str, SEVERITIES):
        raise UserError(
            f"INPUT.CORRUPTION: got {text!r}, expected NAME.SEVERITY like fog.3; severities are 1 "
            f"to 5, names {', '.join(NAMES)}"
        )
    require_package(PACKAGE, "corruptions", "INPUT.CORRUPTION: needs")
    return name, int(severity)


def corrupt(pixels: NDArray[np.uint8], name: str, severity: int, seed: int) -> NDArray[np.uint8]:
    """Corrupt an RGB image (H, W, 3) of at least 32 px per side."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result: NDArray[np.uint8] = _package().corrupt(pixels, severity, name)
        return result
    finally:
        np.random.set_state(state)


def find_failing() -> dict[str, str]:
    """Return the corruptions that fail with the installed package versions, and their errors."""
    pixels, found = np.full((64, 64, 3), 128, np.uint8), {}
    for name in NAMES:
        try:
            corrupt(pixels, name, 3, 0)
        except Exception as error:  # other versions of the package may raise any kind
            found[name] = f"{type(error).__name__}: {error}"
    return found


@dataclass(frozen=True)
class CorruptionMapper:
    """Mapper that reads the corrupted image in place of the record's own."""

    mapper: Callable[..., Any]
    name: str
    severity: int
    open_url: OpenURL | None = None

    def __call__(self, record: Record, params: Any) -> dict[str, Any]:
        """Corrupt the record's image and map it.

        Raises:
            DataError: If the image cannot be read or corrupted.
        """
        path = record["file_name"]
        pixels = np.asarray(read_image(path, self.open_url))
        seed = zlib.crc32(str(record.get("image_id", Path(path).stem)).encode())
        try:
            pixels = corrupt(pixels, self.name, self.severity, seed)
        except Exception as error:  # the package raises many kinds
            raise DataError(f"{path}: cannot apply {self.name} ({error})") from error
        with NamedTemporaryFile(suffix=".png") as file:  # lossless
            Image.fromarray(pixels).save(file, "PNG", compress_level=1)
            file.flush()
            sample = self.mapper({**record, "file_name": file.name}, params)
        return {**sample, "file_name": path}


def add_corruption(
    mapper: Callable[..., Any], cfg: CfgNode, open_url: OpenURL | None = None
) -> Callable[..., Any]:
    """Wrap a mapper of test images by INPUT.CORRUPTION, if that is set."""
    text = cfg.INPUT.CORRUPTION
    return CorruptionMapper(mapper, *parse_corruption(text), open_url) if text else mapper


@functools.cache
def _package() -> Any:
    import skimage.color
    import skimage.filters
    import skimage.util

    def resource_filename(module: str, name: str) -> str:
        spec = importlib.util.find_spec(module)
        return str(Path(spec.origin if spec and spec.origin else "").parent / name)

    resources = ModuleType("pkg_resources")
    resources.resource_filename = resource_filename  # type: ignore[attr-defined]
    before = sys.modules.get(resources.__name__)
    sys.modules[resources.__name__] = resources
    try:
        import imagecorruptions
        import imagecorruptions.corruptions as own
    finally:
        del sys.modules[resources.__name__]
        if before is not None:
            sys.modules[resources.__name__] = before

    def gaussian(image: Any, sigma: Any, multichannel: bool = False, **more: Any) -> Any:
        axis = -1 if multichannel else None
        return skimage.filters.gaussian(image, sigma, channel_axis=axis, **more)

    def random_noise(image: Any, **more: Any) -> Any:
        return skimage.util.random_noise(image, rng=np.random.randint(1 << 31), **more)

    own.np = SimpleNamespace(**{**vars(np), "float_": np.float64})
    own.gaussian = gaussian
    own.sk = SimpleNamespace(color=skimage.color, util=SimpleNamespace(random_noise=random_noise))
    return imagecorruptions
