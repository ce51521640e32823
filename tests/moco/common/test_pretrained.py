"""Weights by name, by address, from the Hub and of timm; servers are local ones."""

import functools
import hashlib
import io
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torchvision.models import resnet18

from convert.initial_weights import read_initial_weights
from moco.common import pretrained
from moco.common.errors import DataError, UserError
from moco.common.pretrained import ORIGIN, find_remote, locate, not_downloaded
from tests.oracles.file_server import Served, file_server
from tests.oracles.resnets import randomize

COMMIT = "0123456789" * 4
HUB_FILE = "/user/repo/resolve/main/model.safetensors"


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    network = resnet18()
    randomize(network)
    return network.state_dict()


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return weights()


@pytest.fixture(scope="module")
def content(state: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOCO_TRANSFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def served(content: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with a file that `mine` names."""
    with file_server({"/r18.pth": content}) as served:
        digest = f"md5:{hashlib.md5(content).hexdigest()[:8]}"
        entry = {"weights": f"{served.url}/r18.pth", "hash": digest, "size_mb": 46.8}
        monkeypatch.setattr(pretrained, "inits", lambda: {"mine": entry})
        yield served


@pytest.fixture
def hub(state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A Hub on this machine, asked by the Hub's own library."""
    package = pytest.importorskip("huggingface_hub")
    with file_server({HUB_FILE: save(state)}) as served:
        served.headers = {"X-Repo-Commit": COMMIT, "X-Error-Code": "EntryNotFound"}
        get = functools.partial(package.hf_hub_download, endpoint=served.url)
        monkeypatch.setattr(package, "hf_hub_download", get)
        yield served


@pytest.fixture
def no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail("a lookup"))


def check_same(read: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    names = {name for name in state if not name.startswith("fc.") and "tracked" not in name}
    assert names <= read.keys()
    assert all(torch.equal(read[name], state[name]) for name in names)


def paths(served: Served) -> list[str]:
    return [path for path, _ in served.asked]


def test_a_name_is_downloaded_once_and_then_known(
    served: Served, content: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"{served.url}/r18.pth"
    assert not_downloaded("mine") == f"{address} (46.8 MB)"
    found = locate("mine")
    assert (found.path.parent, found.path.read_bytes()) == (cache / "weights", content)
    assert found.path.name.startswith("mine-") and found.path.suffix == ".pth"
    assert found.init == "mine"
    (note,) = found.notes
    assert "mine" in note and address in note and hashlib.md5(content).hexdigest()[:8] in note
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    assert locate("mine") == found
    assert not_downloaded("mine") == ""
    assert paths(served) == ["/r18.pth"]


def test_a_file_comes_before_a_name(served: Served, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"my own")
    found = locate("mine")
    assert (found.path, found.init, found.notes) == (Path("mine"), "", ())
    assert not served.asked and not_downloaded("mine") == ""


def test_random_is_nothing_to_download() -> None:
    assert "random" in pretrained.inits()
    assert find_remote("random") is None and not_downloaded("random") == ""


def test_an_address_with_a_hash(served: Served, content: bytes) -> None:
    digits = hashlib.sha256(content).hexdigest()
    address = f"{served.url}/r18.pth?download=true"
    found = locate(f"{address}#sha256={digits}")
    assert found.init == "r18" and found.path.read_bytes() == content
    assert digits in found.origin and address in found.origin
    with pytest.raises(DataError, match="sha256"):
        locate(f"{served.url}/r18.pth#sha256={digits[::-1]}")
    assert [path.name for path in found.path.parent.iterdir() if path.suffix == ".pth"] == []


def test_where_a_copy_is_from_is_beside_it(tmp_path: Path) -> None:
    copy = tmp_path / "copy.pth"
    copy.write_bytes(b"weights")
    assert locate(copy).notes == ()
    Path(f"{copy}{ORIGIN}").write_text(
        "weights mine: from\x1b[31m there\n" + "x" * 5000, encoding="utf-8"
    )
    (note,) = locate(copy).notes
    assert note.startswith("weights mine: from\\x1b[31m there") and len(note) < 1100


def test_the_hub(
    hub: Served, state: dict[str, torch.Tensor], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "hf://user/repo/model.safetensors"
    assert not_downloaded(name).startswith(name)
    found = locate(name)
    assert found.path.is_relative_to(cache)
    assert found.init == "repo_model"
    assert found.origin.endswith(f"{name}@{COMMIT}")
    assert not_downloaded(name) == ""
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    hub.asked.clear()
    assert locate(name) == found
    assert locate(f"{name}@{COMMIT}").path == found.path
    assert not hub.asked
    read = read_initial_weights(name)
    assert read.notes[0] == found.origin
    check_same(read.state, state)


def test_what_the_hub_says_of_a_network_comes_with_it(hub: Served) -> None:
    folder, _, _ = HUB_FILE.rpartition("/")
    hub.files[f"{folder.replace('main', COMMIT)}/config.json"] = b"{}"
    found = locate("hf://user/repo/model.safetensors")
    assert found.path.with_name("config.json").exists()
    assert not found.path.with_name("preprocessor_config.json").exists()


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("EntryNotFound", "Entry Not Found"),
        ("RepoNotFound", "Repository Not Found"),
        ("RevisionNotFound", "Revision Not Found"),
        ("GatedRepo", "gated repo"),
        ("", "check your connection"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: Served, code: str, named: str) -> None:
    hub.headers["X-Error-Code"] = code
    with pytest.raises(UserError, match=named) as raised:
        locate("hf://user/repo/other.pth@v1")
    assert str(raised.value).startswith("hf://user/repo/other.pth@v1: ")
    assert "\n" not in str(raised.value)


def test_the_hub_offline(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_downloaded("hf://user/repo/model.safetensors")
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    assert not_downloaded("hf://user/repo/model.safetensors") == ""  # who reads it refuses
    with pytest.raises(UserError, match="MOCO_TRANSFER_OFFLINE"):
        locate("hf://user/repo/model.safetensors")
    assert not hub.asked


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_of_timm(
    hub: Served, state: dict[str, torch.Tensor], content: bytes, file: str
) -> None:
    repo = "/timm/resnet18.tv_in1k/resolve/main"
    body = content if file.endswith(".bin") else hub.files[HUB_FILE]
    hub.files = {f"{repo}/{file}": body}
    read = read_initial_weights("timm://resnet18.tv_in1k")
    assert read.init == "resnet18.tv_in1k"
    assert f"hf://timm/resnet18.tv_in1k/{file}@{COMMIT}" in read.notes[0]
    check_same(read.state, state)
    assert paths(hub)[0] == f"{repo}/model.safetensors"  # where both are there, too


def test_the_default_weights_of_a_timm_model(no_lookups: None) -> None:
    assert find_remote("timm://resnet18").init == "resnet18.a1_in1k"  # timm's default
