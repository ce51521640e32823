"""Images of the HTML pages as data URLs."""

import base64
import io
from pathlib import Path

from PIL import Image

from benchmarks.report.plots import Plot
from moco.data.decode import decode

SAMPLE_PX = 256  # maximum width and height, more than the displayed width
QUALITY = 75  # of JPEG


def svg_source(plot: Plot) -> str:
    """Return a figure as data URL."""
    return _source("svg+xml", plot.svg.encode())


def jpeg_source(image: Image.Image | Path) -> str:
    """Return an image, or that of a file, as data URL, of at most SAMPLE_PX."""
    image = decode(image) if isinstance(image, Path) else image.copy()
    image.thumbnail((SAMPLE_PX, SAMPLE_PX))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=QUALITY)
    return _source("jpeg", buffer.getvalue())


def _source(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
