"""Last import of the server of processes (processes.py): what they would else do once each."""

import gc

from PIL import Image

Image.init()
gc.freeze()  # a collection would visit, and thereby copy, every object that was imported
