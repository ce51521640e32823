"""Pre-trained weights: resolution of a weights argument to a local file.

    my/checkpoint.pth.tar                   a file
    moco_v2_r50_800ep                       a name in configs/inits.yaml
    https://host/r50.pth#sha256=0676ba61…   an address with the file's hash (or #md5=…)
    hf://user/repo                          the network in a repository of the Hugging Face Hub
    hf://user/repo/model.safetensors@rev    a file in such a repository
    timm://resnet50.tv_in1k                 a model of timm, whose file is on the Hub
    detectron2://ImageNetPretrained/…       a backbone of Detectron2's model zoo (or catalog://)

Downloaded files are read like any other file, by moco/common/files.py; neither the Hub's library
nor timm opens them.
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
from moco.common.files import PathLike, detect_format, expand_home, open_file
from moco.common.sharded import list_files
from moco.common.shipped import CONFIGS

ENDINGS = (".pth.tar", ".pth", ".pt", ".tar", ".pkl", ".safetensors")
# Detectron2's schemes and their base addresses (detectron2/utils/file_io.py,
# detectron2/checkpoint/catalog.py). Backbones are in one folder, whole detectors next to it.
MODEL_ZOO = {
    "detectron2://": "https://dl.fbaipublicfiles.com/detectron2/",
    "catalog://": "https://dl.fbaipublicfiles.com/detectron/",
}
BACKBONES = "ImageNetPretrained/"
_CATALOG = {  # names of Detectron that differ from their addresses
    "FAIR/R-50-GN": "47261647/R-50-GN",
    "FAIR/R-101-GN": "47592356/R-101-GN",
    "FAIR/X-101-32x8d": "20171220/X-101-32x8d",
    "FAIR/X-101-64x4d": "FBResNeXt/X-101-64x4d",
    "FAIR/X-152-32x8d-IN5k": "25093814/X-152-32x8d-IN5k",
}
ORIGIN = ".origin.txt"  # ending of the sidecar file of a copy
# Names on the Hub have no two dots or dashes in a row, and none at either end.
_HUB_NAME = r"\w+(?:[.-]\w+)*"
_HUB = re.compile(rf"hf://({_HUB_NAME}/{_HUB_NAME})(?:/([^@#?\\]+))?(?:@([\w./-]+))?", re.ASCII)
_HUB_LONGEST = 96

# Files of the network in a repository of the Hub, of which the first that exists is used:
# transformers' and timm's, then open_clip's, which repositories of the former may have as well.
HUB_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)
# Metadata of a network on the Hub, downloaded with the weights if it exists.
SIDECARS = (
    *("config.json", "preprocessor_config.json", "open_clip_config.json"),
    "processor_config.json",
)


@dataclass(frozen=True)
class LocalWeights:
    """Weights in a local file.

    Attributes:
        path: Path of the file.
        init: Name in a table; "" for a path, whose file name is used.
        origin: Name, address and hash of downloaded weights, for records; "" for a user's own file.
    """

    path: Path
    init: str
    origin: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """`origin` as a note, if it is not empty."""
        return (self.origin,) if self.origin else ()


@dataclass(frozen=True)
class HttpWeights:
    """File at an https address; see `moco.common.download.download`."""

    init: str
    address: str
    digest: str = ""
    size_mb: float = 0.0  # 0: unknown

    @property
    def file(self) -> Path:
        """Path of the downloaded file, which may not exist yet."""
        ending = next((end for end in ENDINGS if self.address.endswith(end)), "")
        name = re.sub(r"[^\w.-]", "_", self.init, flags=re.ASCII)[:80]
        which = hashlib.sha256(self.address.encode()).hexdigest()[:8]
        return cache_folder() / "weights" / f"{name}-{which}{ending}"

    def cached(self) -> Path | None:
        """Return the file if this project or Detectron2 has downloaded it, else None."""
        files = [self.file]
        if self.address.startswith(tuple(MODEL_ZOO.values())):
            cache = expand_home(os.environ.get("FVCORE_CACHE", "~/.torch/iopath_cache"))
            files.append(cache / urlsplit(self.address).path.lstrip("/"))
        return next((file for file in files if is_downloaded(file, self.digest)), None)

    def fetch(self) -> tuple[Path, str]:
        """Download the file if necessary; return its path and its origin."""
        path = self.cached() or download(self.address, self.file, self.digest)
        return path, self.address + (f" ({self.digest})" if self.digest else "")


@dataclass(frozen=True)
class HubWeights:
    """File on the Hugging Face Hub, downloaded by the Hub's library to the library's cache.

    Attributes:
        init: Name in a table.
        repo: Repository, `user/name`.
        files: Candidate file names; the first that the repository has is used.
        revision: Branch, tag or commit; None for the main branch.
        size_mb: Size for messages, 0 if unknown.
    """

    init: str
    repo: str
    files: tuple[str, ...]
    revision: str | None = None
    size_mb: float = 0.0

    @property
    def address(self) -> str:
        """Address of the file, `hf://user/repo/file@revision`, or of the repository."""
        file = "" if self.files == HUB_FILES else f"/{self.files[0]}"
        return f"hf://{self.repo}{file}" + (f"@{self.revision}" if self.revision else "")

    def _where(self) -> dict[str, Any]:
        own = cache_folder() / "huggingface" if os.environ.get(CACHE) else None
        return {"repo_id": self.repo, "revision": self.revision, "cache_dir": own}

    def cached(self) -> Path | None:
        """Return the file if it has been downloaded, else None."""
        from huggingface_hub import try_to_load_from_cache as find

        found = (find(filename=file, **self._where()) for file in self.files)
        path = next((Path(path) for path in found if isinstance(path, str)), None)
        is_whole = path is not None and all(part.is_file() for part in list_files(path))
        return path if is_whole else None

    def fetch(self) -> tuple[Path, str]:
        """Download the file and its parts if necessary; return its path and origin with the commit.

        Raises:
            UserError: If a file cannot be downloaded.
            DataError: If the file is a damaged index of sharded weights.
        """
        import huggingface_hub as hub

        def get(file: str, revision: str | None) -> Path:
            where = {**self._where(), "revision": revision}
            return Path(hub.hf_hub_download(filename=file, local_files_only=is_offline(), **where))

        try:
            for file in self.files:
                try:
                    path = get(file, self.revision)
                    break
                except hub.errors.EntryNotFoundError:
                    if file == self.files[-1]:
                        raise
            commit = path.parents[file.count("/")].name  # …/snapshots/<commit>/<file>
            for part in list_files(path)[1:]:
                get(str(PurePosixPath(file).with_name(part.name)), commit)
        except (hub.errors.EntryNotFoundError, OSError, ValueError) as error:
            offline = f"{OFFLINE} is set; " if is_offline() else ""
            reason = printable(" ".join(str(error).split()))[:400]
            raise UserError(f"{self.address}: {offline}{reason}") from error
        for name in SIDECARS:
            with suppress(hub.errors.EntryNotFoundError, OSError, ValueError):
                get(str(PurePosixPath(file).with_name(name)), commit)
        return path, f"hf://{self.repo}/{file}@{commit}"


Remote = HttpWeights | HubWeights


def locate_weights(weights: PathLike) -> LocalWeights:
    """Return the local file of a weights argument, downloading it if necessary.

    A path need not exist, and may be a folder.

    Raises:
        UserError: If the argument names no weights, or the weights cannot be downloaded; see
            `find_remote` and `moco.common.download.download`.
        DataError: If the downloaded file has another hash or size than expected.
    """
    if (remote := find_remote(weights)) is not None:
        path, origin = remote.fetch()
        return LocalWeights(path, remote.init, f"weights {remote.init}: from {origin}")
    path = expand_home(weights)
    return LocalWeights(path, "", _sidecar_origin(path))


def check_weights(weights: str) -> None:
    """Check a weights argument without network access; raise the errors of `locate_weights`."""
    if find_remote(weights) is None:
        path = expand_home(weights)
        if not path.exists() and (names := similar_names_hint(weights)):
            raise DataError(f"{weights}: no such file{names}")
        if not path.is_dir():
            detect_format(path)


def similar_names_hint(name: str) -> str:
    """Return a hint for an error message with the names in `inits` that are similar to `name`."""
    near = difflib.get_close_matches(name, inits(), n=3)
    return f"; similar names are {first_few(near)}" if near else ""


def describe_download(weights: str) -> str:
    """Describe the download that a weights argument requires.

    Returns:
        Address and size; "" if nothing has to be downloaded, or if downloads are forbidden, which
        is reported where the weights are read.
    """
    remote = find_remote(weights)
    if remote is None or is_offline() or remote.cached() is not None:
        return ""
    return f"{remote.address} ({f'{remote.size_mb:g} MB' if remote.size_mb else 'size unknown'})"


def find_remote(weights: PathLike) -> Remote | None:
    """Return the remote file that a weights argument names, or None for a path.

    A name that is also an existing path is treated as a path.

    Raises:
        UserError: If the scheme or model is unknown, the address has no hash, the file is a whole
            detector, or a package is not installed.
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
        return HttpWeights(init_name(text), model_zoo_url(text))
    raise UserError(
        f"{text}: unsupported address; give a file, a name that `moco-transfer weights list` "
        "shows, https://…#sha256=…, hf://user/repo[/file], timm://model, or a name such as "
        f"detectron2://{BACKBONES}MSRA/R-50.pkl"
    )


@functools.cache
def inits() -> dict[str, dict[str, Any]]:
    """Return the entries of configs/inits.yaml, which documents their keys."""
    entries: dict[str, dict[str, Any]] = read_yaml(CONFIGS / "inits.yaml")["inits"]
    return entries


def init_name(weights: str) -> str:
    """Return the name in a table for a weights argument, without any lookup.

    The name is the file's name without its ending. For names of Detectron2 and the Hub, it consists
    of the last two parts, because many files are called `R-50.pkl` or `model.safetensors`.
    """
    scheme, colon, _ = weights.partition("://")
    path = Path(re.split("[#?]", weights)[0] if colon else weights)
    name = strip_ending(path.name.partition("@")[0] if scheme == "hf" else path.name)
    several = colon and scheme not in ("https", "http", "timm")
    return f"{path.parent.name}_{name}" if several else name


def strip_ending(name: str) -> str:
    """Strip the ending of weights from a file's name."""
    return name.removesuffix(next((end for end in ENDINGS if name.endswith(end)), ""))


def model_zoo_url(name: str) -> str:
    """Return the address of a Detectron2 backbone.

    Raises:
        UserError: If the name belongs to a whole detector.
    """
    scheme = next(scheme for scheme in MODEL_ZOO if name.startswith(scheme))
    rest = name.removeprefix(scheme)
    if not rest.startswith(BACKBONES):
        raise UserError(
            f"{name}: is a whole detector, not a pre-trained backbone; give {scheme}{BACKBONES}…"
        )
    file = rest.removeprefix(BACKBONES)
    file = _CATALOG.get(file, file).removesuffix(".pkl") + ".pkl"
    return MODEL_ZOO[scheme] + BACKBONES + file


def _named(name: str) -> HttpWeights:
    init = inits()[name]
    address = init["weights"]
    if address is None:
        raise UserError(f"{name}: no weights are published; give the path of your own file")
    if address.startswith(tuple(MODEL_ZOO)):
        address = model_zoo_url(address)
    return HttpWeights(name, address, init.get("hash", ""), init.get("size_mb", 0.0))


def _web(text: str) -> HttpWeights:
    address, _, fragment = text.partition("#")
    check_address(address)
    algorithm, equals, digits = fragment.partition("=")
    if not equals:
        raise UserError(
            f"{text}: an address needs the file's hash, from its authors' page or `sha256sum "
            f"FILE`: {address}#sha256=…"
        )
    check_digest(digest := f"{algorithm}:{digits}".lower())
    return HttpWeights(init_name(address), address, digest)


def _hub(text: str) -> HubWeights:
    match = _HUB.fullmatch(text)
    if (
        not match
        or len(match[1]) > _HUB_LONGEST
        or match[1].endswith(ENDINGS)  # a file without its repository
        or {"", ".", ".."} & set((match[2] or "file").split("/"))
    ):
        raise UserError(
            f"{text}: expected hf://user/repo or hf://user/repo/file, both with or without "
            "@revision"
        )
    return HubWeights(init_name(text), match[1], (match[2],) if match[2] else HUB_FILES, match[3])


def _timm(model: str) -> HubWeights:
    import timm

    found: Any = None
    reason = "timm has no such model on the Hub"
    try:
        found = timm.models.get_pretrained_cfg(model)
    except RuntimeError as error:  # timm has the model, but not this tag
        found, reason = None, str(error).rstrip(".")
    if found is None or not found.hf_hub_id:
        near = difflib.get_close_matches(model, timm.list_pretrained(), n=3)
        hint = f"; similar models are {first_few(near)}" if near else ""
        raise UserError(f"timm://{model}: {reason}{hint}")
    repo, _, revision = found.hf_hub_id.partition("@")
    files = ("model.safetensors", found.hf_hub_filename or "pytorch_model.bin")
    return HubWeights(f"{found.architecture}.{found.tag}", repo, files, revision or None)


def sidecar(weights: Path, name: str) -> Path:
    """Return the path of a metadata file next to weights.

    Next to a copy of weights, the metadata's name starts with the name of the copy.
    """
    own = Path(f"{weights}.{name}")
    return own if own.is_file() else weights.with_name(name)


def _sidecar_origin(path: Path) -> str:
    """Read the origin that a suite stores next to its copy of downloaded weights."""
    with suppress(OSError, ValueError), open_file(f"{path}{ORIGIN}", "r", encoding="utf-8") as file:
        return printable(file.read(1000).strip())
    return ""
