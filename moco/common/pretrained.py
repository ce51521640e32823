"""Pre-trained weights wherever they are: what names them becomes a file of this machine.

    my/checkpoint.pth.tar                   a file
    moco_v2_r50_800ep                       a name of configs/inits.yaml
    https://host/r50.pth#sha256=0676ba61…   an address, and the file's hash (or #md5=…)
    hf://user/repo/model.safetensors@rev    a file of the Hugging Face Hub
    timm://resnet50.tv_in1k                 a model of timm, whose file is on the Hub
    detectron2://ImageNetPretrained/…       a backbone of Detectron2's model zoo (or catalog://)

What is downloaded is read as any other file, by moco/common/files.py: neither the Hub's library nor
timm opens it.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from moco.common.cfgnode import read_yaml
from moco.common.command import RANDOM
from moco.common.download import (
    CACHE,
    OFFLINE,
    cache_folder,
    check_address,
    check_digest,
    download,
    is_downloaded,
    is_offline,
)
from moco.common.errors import DataError, UserError, first_few, printable
from moco.common.files import PathLike, format_of
from moco.common.shipped import CONFIGS

ENDINGS = (".pth.tar", ".pth", ".pt", ".tar", ".pkl", ".safetensors")
# Detectron2's names: the scheme and what its addresses start with (detectron2/utils/file_io.py,
# detectron2/checkpoint/catalog.py). Backbones are in one folder, whole detectors beside it.
MODEL_ZOO = {
    "detectron2://": "https://dl.fbaipublicfiles.com/detectron2/",
    "catalog://": "https://dl.fbaipublicfiles.com/detectron/",
}
BACKBONES = "ImageNetPretrained/"
_CATALOG = {  # those of Detectron's names that are not their addresses
    "FAIR/R-50-GN": "47261647/R-50-GN",
    "FAIR/R-101-GN": "47592356/R-101-GN",
    "FAIR/X-101-32x8d": "20171220/X-101-32x8d",
    "FAIR/X-101-64x4d": "FBResNeXt/X-101-64x4d",
    "FAIR/X-152-32x8d-IN5k": "25093814/X-152-32x8d-IN5k",
}
ORIGIN = ".origin.txt"  # ending of a file beside a copy
# Names of the Hub have no two dots or dashes together, and none at an end.
_HUB_NAME = r"\w+(?:[.-]\w+)*"
_HUB = re.compile(rf"hf://({_HUB_NAME}/{_HUB_NAME})/([^@#?\\]+)(?:@([\w./-]+))?", re.ASCII)
_HUB_LONGEST = 96

# What a repository of the Hub says of its network, downloaded with the weights where it exists.
BESIDE = ("config.json", "preprocessor_config.json")


@dataclass(frozen=True)
class LocalWeights:
    """Weights in a file of this machine.

    Attributes:
        init: their name in a table; empty for a path, whose name it is.
        origin: for records, their name, and the address they came from with its hash; empty for a
            file of the user's own.
    """

    path: Path
    init: str
    origin: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """`origin` as a note, if there is one."""
        return (self.origin,) if self.origin else ()


@dataclass(frozen=True)
class Web:
    """A file behind an address; see `moco.common.download.download`."""

    init: str
    address: str
    digest: str = ""
    size_mb: float = 0.0  # 0: not known

    @property
    def file(self) -> Path:
        """Where it is, or will be."""
        ending = next((end for end in ENDINGS if self.address.endswith(end)), "")
        name = re.sub(r"[^\w.-]", "_", self.init, flags=re.ASCII)[:80]
        which = hashlib.sha256(self.address.encode()).hexdigest()[:8]
        return cache_folder() / "weights" / f"{name}-{which}{ending}"

    def cached(self) -> Path | None:
        """The file if it has been downloaded, also by Detectron2."""
        files = [self.file]
        if self.address.startswith(tuple(MODEL_ZOO.values())):
            cache = Path(os.environ.get("FVCORE_CACHE", "~/.torch/iopath_cache")).expanduser()
            files.append(cache / urlsplit(self.address).path.lstrip("/"))
        return next((file for file in files if is_downloaded(file, self.digest)), None)

    def fetch(self) -> tuple[Path, str]:
        """The file, downloaded if need be, and where it is from."""
        path = self.cached() or download(self.address, self.file, self.digest)
        return path, self.address + (f" ({self.digest})" if self.digest else "")


@dataclass(frozen=True)
class Hub:
    """A file of the Hugging Face Hub, downloaded by its library to its own cache.

    Attributes:
        files: the first of them that the repository has is taken.
        revision: a branch, tag or commit; None: the main branch.
    """

    init: str
    repo: str
    files: tuple[str, ...]
    revision: str | None = None
    size_mb: float = 0.0

    @property
    def address(self) -> str:
        return f"hf://{self.repo}/{self.files[0]}" + (f"@{self.revision}" if self.revision else "")

    def _where(self) -> dict[str, Any]:
        own = cache_folder() / "huggingface" if os.environ.get(CACHE) else None
        return {"repo_id": self.repo, "revision": self.revision, "cache_dir": own}

    def cached(self) -> Path | None:
        """The file if it has been downloaded."""
        from huggingface_hub import try_to_load_from_cache as find

        found = (find(filename=file, **self._where()) for file in self.files)
        return next((Path(path) for path in found if isinstance(path, str)), None)

    def fetch(self) -> tuple[Path, str]:
        """The file, downloaded if need be, and where it is from, with the commit."""
        import huggingface_hub as hub

        get = functools.partial(hub.hf_hub_download, local_files_only=is_offline())
        for file in self.files:
            try:
                path = Path(get(filename=file, **self._where()))
                break
            except (hub.errors.EntryNotFoundError, OSError, ValueError) as error:
                if isinstance(error, hub.errors.EntryNotFoundError) and file != self.files[-1]:
                    continue
                offline = f"{OFFLINE} is set; " if is_offline() else ""
                reason = printable(" ".join(str(error).split()))[:400]
                raise UserError(f"{self.address}: {offline}{reason}") from error
        commit = path.parents[file.count("/")].name  # …/snapshots/<commit>/<file>
        for name in BESIDE:
            beside = str(PurePosixPath(file).with_name(name))
            with suppress(hub.errors.EntryNotFoundError, OSError, ValueError):
                get(filename=beside, **self._where() | {"revision": commit})
        return path, f"hf://{self.repo}/{file}@{commit}"


Remote = Web | Hub


def locate(weights: PathLike) -> LocalWeights:
    """The file that a weights argument names, downloaded if need be; a path need not exist.

    Raises:
        UserError, DataError: as `find_remote` and `moco.common.download.download`.
    """
    if (remote := find_remote(weights)) is not None:
        path, origin = remote.fetch()
        return LocalWeights(path, remote.init, f"weights {remote.init}: from {origin}")
    path = Path(weights).expanduser()
    return LocalWeights(path, "", _origin_beside(path))


def check_weights(weights: str) -> None:
    """Check a weights argument in a moment, without a network; raises as `locate`."""
    if find_remote(weights) is None:
        path = Path(weights).expanduser()
        if not path.exists() and (names := like(weights)):
            raise DataError(f"{weights}: no such file{names}")
        format_of(path)


def like(name: str) -> str:
    """For an error: names of `inits` like one that is none."""
    near = difflib.get_close_matches(name, inits(), n=3)
    return f"; names like it are {first_few(near)}" if near else ""


def not_downloaded(weights: str) -> str:
    """What would have to be downloaded for a weights argument, for people; `""`: nothing, or it
    is forbidden, as who reads them says."""
    remote = find_remote(weights)
    if remote is None or is_offline() or remote.cached() is not None:
        return ""
    return f"{remote.address} ({f'{remote.size_mb:g} MB' if remote.size_mb else 'size unknown'})"


def find_remote(weights: PathLike) -> Remote | None:
    """What a weights argument names, None for a path. Whatever exists under that path is a path.

    Raises:
        UserError: an unknown scheme, an address without a hash, a whole detector, an unknown model,
            a package that is not installed.
    """
    text = os.fspath(weights)
    scheme, colon, rest = text.partition("://")
    if not colon:
        known = text in inits() and text != RANDOM
        return _named(text) if known and not Path(text).exists() else None
    if scheme in ("https", "http"):
        return _web(text)
    if scheme == "hf":
        return _hub(text)
    if scheme == "timm":
        return _timm(rest)
    if f"{scheme}://" in MODEL_ZOO:
        return Web(init_name(text), model_zoo_url(text))
    raise UserError(
        f"{text}: this address is not read; give a file, a name that `moco-transfer weights list` "
        "shows, https://…#sha256=…, hf://user/repo/file, timm://model, or a name such as "
        f"detectron2://{BACKBONES}MSRA/R-50.pkl"
    )


@functools.cache
def inits() -> dict[str, dict[str, Any]]:
    """The entries of configs/inits.yaml, which describes their keys."""
    entries: dict[str, dict[str, Any]] = read_yaml(CONFIGS / "inits.yaml")["inits"]
    return entries


def init_name(weights: str) -> str:
    """What a table calls the weights of an argument; nothing is looked up.

    A file's name without its ending. Of Detectron2's and the Hub's names the last two parts, as
    many files are called `R-50.pkl` or `model.safetensors`.
    """
    scheme, colon, _ = weights.partition("://")
    path = Path(re.split("[#?]", weights)[0] if colon else weights)
    name = without_ending(path.name.partition("@")[0] if scheme == "hf" else path.name)
    several = colon and scheme not in ("https", "http", "timm")
    return f"{path.parent.name}_{name}" if several else name


def without_ending(name: str) -> str:
    """A file's name without the ending of weights."""
    return name.removesuffix(next((end for end in ENDINGS if name.endswith(end)), ""))


def model_zoo_url(name: str) -> str:
    """The address behind Detectron2's name of a backbone; raises UserError: a whole detector."""
    scheme = next(scheme for scheme in MODEL_ZOO if name.startswith(scheme))
    rest = name.removeprefix(scheme)
    if not rest.startswith(BACKBONES):
        raise UserError(
            f"{name}: a whole detector, not a pre-trained backbone; give {scheme}{BACKBONES}…"
        )
    file = rest.removeprefix(BACKBONES)
    file = _CATALOG.get(file, file).removesuffix(".pkl") + ".pkl"
    return MODEL_ZOO[scheme] + BACKBONES + file


def _named(name: str) -> Web:
    init = inits()[name]
    address = init["weights"]
    if address is None:
        raise UserError(f"{name}: nobody publishes it; give the path of your own file")
    if address.startswith(tuple(MODEL_ZOO)):
        address = model_zoo_url(address)
    return Web(name, address, init.get("hash", ""), init.get("size_mb", 0.0))


def _web(text: str) -> Web:
    address, _, fragment = text.partition("#")
    check_address(address)
    algorithm, equals, digits = fragment.partition("=")
    if not equals:
        raise UserError(
            f"{text}: an address needs the file's hash, from its authors' page or `sha256sum "
            f"FILE`: {address}#sha256=…"
        )
    check_digest(digest := f"{algorithm}:{digits}".lower())
    return Web(init_name(address), address, digest)


def _hub(text: str) -> Hub:
    match = _HUB.fullmatch(text)
    if not match or len(match[1]) > _HUB_LONGEST or {"", ".", ".."} & set(match[2].split("/")):
        raise UserError(f"{text}: expected hf://user/repo/file or hf://user/repo/file@revision")
    return Hub(init_name(text), match[1], (match[2],), match[3])


def _timm(model: str) -> Hub:
    import timm

    found: Any = None
    reason = "timm has no such model on the Hub"
    try:
        found = timm.models.get_pretrained_cfg(model)
    except RuntimeError as error:  # it has the model, and no such tag
        found, reason = None, str(error).rstrip(".")
    if found is None or not found.hf_hub_id:
        near = difflib.get_close_matches(model, timm.list_pretrained(), n=3)
        hint = f"; models like it are {first_few(near)}" if near else ""
        raise UserError(f"timm://{model}: {reason}{hint}")
    repo, _, revision = found.hf_hub_id.partition("@")
    files = ("model.safetensors", found.hf_hub_filename or "pytorch_model.bin")
    return Hub(f"{found.architecture}.{found.tag}", repo, files, revision or None)


def _origin_beside(path: Path) -> str:
    """What a suite writes beside its copy of weights that were downloaded, see `LocalWeights`."""
    with suppress(OSError, ValueError), open(f"{path}{ORIGIN}", encoding="utf-8") as file:
        return printable(file.read(1000).strip())
    return ""
