"""The checkpoint layouts, most specific first: the first one that fits a file is taken.

A file is known by what is in it, never by its name; the names inside a network are a scheme of its
family (convert/families/). Above each layout: the code that writes the file and that normalizes its
pixels.
"""

from convert.layouts import (
    convnext,
    detectron2,
    lightning,
    openmmlab,
    self_supervised,
    torchvision,
    vissl,
    vit,
)

LAYOUTS = (
    *self_supervised.LAYOUTS,
    *vit.LAYOUTS,
    *vissl.LAYOUTS,
    *openmmlab.LAYOUTS,
    *lightning.LAYOUTS,
    *convnext.LAYOUTS,
    *torchvision.LAYOUTS,
    *detectron2.LAYOUTS,
)
