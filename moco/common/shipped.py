"""The configuration files that come with the project, found by name.

A checkout has them in `configs/`, an installed package in `moco/configs/`.
"""

import difflib
from pathlib import Path

from moco.common.errors import UserError, first_few
from moco.common.files import PathLike

# Where the packages are: the checkout, or site-packages.
ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = (ROOT / "setup.py").is_file() and (ROOT / "configs").is_dir()
CONFIGS = ROOT / "configs" if CHECKOUT else ROOT / "moco" / "configs"
_ENDINGS = (".yaml", ".yml")


def names() -> list[str]:
    """Every shipped file as `folder/name`, without its ending; sorted."""
    files = sorted(CONFIGS.rglob("*.yaml"))
    return [path.relative_to(CONFIGS).with_suffix("").as_posix() for path in files]


def find(name: PathLike) -> Path | None:
    """The shipped file of this name, with or without its folder and ending; None if none has it.

    Raises:
        UserError: several files of different folders have it.
    """
    wanted = _plain(name)
    found = [each for each in names() if each == wanted or each.rpartition("/")[2] == wanted]
    if len(found) > 1:
        raise UserError(f"{name}: is the name of several files; give {' or '.join(found)}")
    return CONFIGS / f"{found[0]}.yaml" if found else None


def resolve(name: PathLike) -> Path:
    """A path that exists, else the shipped file of this name.

    Raises:
        UserError: neither, with the names most like it; or several files have it.
    """
    path = Path(name).expanduser()
    found = path if path.is_file() else find(name)
    if found is None:
        known = {each.rpartition("/")[2]: each for each in names()}
        short = _plain(name).rpartition("/")[2]
        near = [known[each] for each in difflib.get_close_matches(short, known, n=3)]
        choices = first_few(near) if near else "what `moco-transfer configs` lists"
        raise UserError(
            f"{name}: no such file, and no shipped one of this name; choices are {choices}"
        )
    return found


def shown(name: PathLike) -> str:
    """How a command names a shipped file: by its path where the current folder is the checkout,
    else by its name, which is found from everywhere."""
    name = _plain(name)
    return f"configs/{name}.yaml" if CHECKOUT and Path.cwd() == ROOT else name


def _plain(name: PathLike) -> str:
    """`folder/name` without its ending, or `name`."""
    text = Path(name).as_posix().removeprefix("configs/")
    return next((text.removesuffix(end) for end in _ENDINGS if text.endswith(end)), text)
