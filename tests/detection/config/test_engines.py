"""Engines by name: each has the whole interface, and nothing of the other is imported for it."""

import subprocess
import sys

from detection.config.engines import Engine, find_engine
from tests.detection.conftest import ROOT

INTERFACE = {name for name in (*vars(Engine), *Engine.__annotations__) if not name.startswith("_")}


def test_an_engine_has_the_interface(engine):
    assert {"default_config", "check_config", "build_model", "to_model", "loggers"} < INTERFACE
    module = find_engine(engine)
    assert {name for name in INTERFACE if hasattr(module, name)} == INTERFACE


def test_the_embedded_engine_does_without_detectron2():
    code = (
        "import sys; sys.modules['detectron2'] = None\n"
        "from detection.config.engines import find_engine\n"
        "assert find_engine('embedded').default_config(dense_pose=False).MODEL.RESNETS.DEPTH == 50"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
