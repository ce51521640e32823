"""Environment of the Python processes that this project starts with `python -m`."""

import os
import sysconfig

from moco.common.shipped import ROOT


def own_modules() -> dict[str, str]:
    """Return variables that make `python -m` import this project's modules, never namesakes.

    `python -m` searches the current folder first, and a clone of the official MoCo also has a
    `moco/` and a `detection/`. A checkout that is not installed is only found through that folder.
    """
    paths = [] if str(ROOT) == sysconfig.get_path("purelib") else [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    path = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {"PYTHONSAFEPATH": "1", **path}
