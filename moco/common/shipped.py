"""Files that the project ships, found by name, and the folder of the project's modules.

The files are in `configs/` and `results/` of a checkout, and in these folders of `moco/` in an
installed package.
"""

import difflib
import os
import sysconfig
from pathlib import Path

from moco.common.errors import UserError, first_few
from moco.common.files import PathLike, expand_home

# Folder that contains the packages: the checkout, or site-packages.
ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = (ROOT / "setup.py").is_file() and (ROOT / "configs").is_dir()
_DATA = ROOT if CHECKOUT else ROOT / "moco"
CONFIGS, RESULTS = _DATA / "configs", _DATA / "results"
_ENDINGS = (".yaml", ".yml")


def names() -> list[str]:
    """Return the names of all shipped files as sorted `folder/name`, without their ending."""
    files = sorted(CONFIGS.rglob("*.yaml"))
    return [path.relative_to(CONFIGS).with_suffix("").as_posix() for path in files]


def find(name: PathLike) -> Path | None:
    """Return the shipped file with a name, or None.

    The name may omit the folder and the ending.

    Raises:
        UserError: If several files have the name.
    """
    wanted = _plain(name)
    found = [each for each in names() if each == wanted or each.rpartition("/")[2] == wanted]
    if len(found) > 1:
        raise UserError(f"{name}: is the name of several files; give {' or '.join(found)}")
    return CONFIGS / f"{found[0]}.yaml" if found else None


def resolve(name: PathLike) -> Path:
    """Return a path if it is a file, else the shipped file with that name; see `find`.

    Raises:
        UserError: If no file is found (the message lists similar names), or several shipped files
            have the name.
    """
    path = expand_home(name)
    found = path if path.is_file() else find(name)
    if found is None:
        known = {each.rpartition("/")[2]: each for each in names()}
        short = _plain(name).rpartition("/")[2]
        near = [known[each] for each in difflib.get_close_matches(short, known, n=3)]
        choices = first_few(near) if near else "what `moco-transfer configs` lists"
        raise UserError(
            f"{name}: no such file, and no shipped file of this name; choices are {choices}"
        )
    return found


def display_name(name: PathLike) -> str:
    """Return the path of a shipped file in the checkout, else its name, for use in a command."""
    name = _plain(name)
    return f"configs/{name}.yaml" if CHECKOUT and Path.cwd() == ROOT else name


def _plain(name: PathLike) -> str:
    """Strip `configs/` and the ending from a name."""
    text = Path(name).as_posix().removeprefix("configs/")
    return next((text.removesuffix(end) for end in _ENDINGS if text.endswith(end)), text)


def own_modules() -> dict[str, str]:
    """Return environment variables with which `python -m` imports the modules of this project.

    `python -m` searches the current folder first, and a clone of the official MoCo also has a
    `moco/` and a `detection/`. A checkout that is not installed is only found through that folder.
    """
    paths = [] if str(ROOT) == sysconfig.get_path("purelib") else [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    path = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {"PYTHONSAFEPATH": "1", **path}
