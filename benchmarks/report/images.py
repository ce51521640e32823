"""Images of the HTML pages as data URLs."""

import base64
import io
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from benchmarks.report.plots import Plot
from moco.data.decode import decode

QUALITY = 70  # of JPEG
_PLAIN = " !$()*+,-./:;=?@[]^_`{|}~"  # neither special in a URL nor escaped in an attribute


def svg_source(plot: Plot) -> str:
    """Return a figure as data URL."""
    return f"data:image/svg+xml,{quote(plot.svg, safe=_PLAIN)}"


def jpeg_source(image: Image.Image | Path, side_px: int) -> str:
    """Return an image, or that of a file, as data URL, with no side longer than `side_px`."""
    image = decode(image) if isinstance(image, Path) else image.copy()
    image.thumbnail((side_px, side_px))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
