"""Environment of the Python processes that this project starts with `python -m`."""

import os
import sysconfig

from moco.common.shipped import ROOT


def own_modules() -> dict[str, str]:
    """Variables with which `python -m` finds this project's modules, and no others of their names.

    It looks into the current folder first, and a clone of the official MoCo has a `moco/` and a
    `detection/`, too. A checkout that is not installed is found by nothing else than that folder.
    """
    paths = [] if str(ROOT) == sysconfig.get_path("purelib") else [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    path = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {"PYTHONSAFEPATH": "1", **path}
