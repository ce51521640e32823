"""Weights by name, by address, from the Hub and of timm; all servers are local."""

import functools
import hashlib
import io
import json
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torchvision.models import resnet18

from convert.initial_weights import read_initial_weights
from moco.common import pretrained
from moco.common.errors import DataError, UserError
from moco.common.pretrained import ORIGIN, describe_download, find_remote, locate_weights
from tests.oracles.file_server import file_server
from tests.oracles.resnets import randomize

COMMIT = "0123456789" * 4
HUB_FILE = "/user/repo/resolve/main/model.safetensors"


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    network = resnet18()
    randomize(network)
    return network.state_dict()


@pytest.fixture(scope="module")
def content(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOCO_TRANSFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def served(content, monkeypatch):
    """Serve a file that `mine` names."""
    with file_server({"/r18.pth": content}) as served:
        digest = f"md5:{hashlib.md5(content).hexdigest()[:8]}"
        entry = {"weights": f"{served.url}/r18.pth", "hash": digest, "size_mb": 46.8}
        monkeypatch.setattr(pretrained, "inits", lambda: {"mine": entry})
        yield served


@pytest.fixture
def hub(state, monkeypatch):
    """Serve a local Hub to the Hub's own library."""
    package = pytest.importorskip("huggingface_hub")
    with file_server({HUB_FILE: save(state)}) as served:
        served.headers = {"X-Repo-Commit": COMMIT, "X-Error-Code": "EntryNotFound"}
        get = functools.partial(package.hf_hub_download, endpoint=served.url)
        monkeypatch.setattr(package, "hf_hub_download", get)
        yield served


def check_same(read, state):
    names = {name for name in state if not name.startswith("fc.") and "tracked" not in name}
    assert names <= read.keys()
    assert all(torch.equal(read[name], state[name]) for name in names)


def paths(served):
    return [path for path, _ in served.requests]


def test_a_name_is_downloaded_once_and_then_cached(served, content, cache, monkeypatch):
    address = f"{served.url}/r18.pth"
    assert describe_download("mine") == f"{address} (46.8 MB)"
    found = locate_weights("mine")
    assert (found.path.parent, found.path.read_bytes()) == (cache / "weights", content)
    assert found.path.name.startswith("mine-") and found.path.suffix == ".pth"
    assert found.init == "mine"
    (note,) = found.notes
    assert "mine" in note and address in note and hashlib.md5(content).hexdigest()[:8] in note
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    assert locate_weights("mine") == found
    assert describe_download("mine") == ""
    assert paths(served) == ["/r18.pth"]


def test_a_file_comes_before_a_name(served, tmp_path):
    (tmp_path / "mine").write_bytes(b"my own")
    found = locate_weights("mine")
    assert (found.path, found.init, found.notes) == (Path("mine"), "", ())
    assert not served.requests and describe_download("mine") == ""


def test_an_address_with_a_hash(served, content):
    digits = hashlib.sha256(content).hexdigest()
    address = f"{served.url}/r18.pth?download=true"
    found = locate_weights(f"{address}#sha256={digits}")
    assert found.init == "r18" and found.path.read_bytes() == content
    assert digits in found.origin and address in found.origin
    with pytest.raises(DataError, match="sha256"):
        locate_weights(f"{served.url}/r18.pth#sha256={digits[::-1]}")
    assert [path.name for path in found.path.parent.iterdir() if path.suffix == ".pth"] == []


def test_the_origin_of_a_copy_is_in_a_sidecar_file(tmp_path):
    copy = tmp_path / "copy.pth"
    copy.write_bytes(b"weights")
    assert locate_weights(copy).notes == ()
    Path(f"{copy}{ORIGIN}").write_text(
        "weights mine: from\x1b[31m there\n" + "x" * 5000, encoding="utf-8"
    )
    (note,) = locate_weights(copy).notes
    assert note.startswith("weights mine: from\\x1b[31m there") and len(note) < 1100


def test_the_hub(hub, state, cache, monkeypatch):
    name = "hf://user/repo/model.safetensors"
    assert describe_download(name).startswith(name)
    found = locate_weights(name)
    assert found.path.is_relative_to(cache)
    assert found.init == "repo_model"
    assert found.origin.endswith(f"{name}@{COMMIT}")
    assert describe_download(name) == ""
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    hub.requests.clear()
    assert locate_weights(name) == found
    assert locate_weights(f"{name}@{COMMIT}").path == found.path
    assert not hub.requests
    read = read_initial_weights(name)
    assert read.notes[0] == found.origin
    check_same(read.state, state)


def test_the_hubs_metadata_of_a_network_is_downloaded_with_it(hub):
    folder, _, _ = HUB_FILE.rpartition("/")
    hub.files[f"{folder.replace('main', COMMIT)}/config.json"] = b"{}"
    found = locate_weights("hf://user/repo/model.safetensors")
    assert found.path.with_name("config.json").exists()
    assert not found.path.with_name("preprocessor_config.json").exists()


def test_a_repository_of_the_hub_in_parts(hub, state, monkeypatch):
    hub.etag = "each"
    keys = sorted(state)
    parts = {"model-1.safetensors": keys[::2], "model-2.safetensors": keys[1::2]}
    index = {"weight_map": {key: name for name, some in parts.items() for key in some}}
    repo, at = HUB_FILE.rpartition("/")[0], f"/user/repo/resolve/{COMMIT}"
    hub.files = {f"{repo}/model.safetensors.index.json": json.dumps(index).encode()}
    hub.files |= {f"{at}/{name}": save({k: state[k] for k in some}) for name, some in parts.items()}
    hub.files[f"{at}/preprocessor_config.json"] = b"{}"
    assert describe_download("hf://user/repo").startswith("hf://user/repo (")
    found = locate_weights("hf://user/repo")
    assert found.init == "user_repo" and found.origin.endswith(f"/repo/{found.path.name}@{COMMIT}")
    assert found.path.with_name("preprocessor_config.json").exists()
    assert describe_download("hf://user/repo") == ""
    read = read_initial_weights("hf://user/repo")
    check_same(read.state, state)
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    hub.requests.clear()
    assert locate_weights("hf://user/repo") == found and not hub.requests
    found.path.with_name("model-2.safetensors").unlink()
    assert find_remote("hf://user/repo").cached() is None  # an interrupted download
    with pytest.raises(UserError, match="MOCO_TRANSFER_OFFLINE"):
        locate_weights("hf://user/repo")


def test_a_repository_of_the_hub_with_one_file(hub):
    assert locate_weights("hf://user/repo").path.name == "model.safetensors"
    assert [path.rpartition("/")[2] for path in paths(hub)][:2] == [
        "model.safetensors.index.json",
        "model.safetensors",
    ]
    hub.files = {}
    with pytest.raises(UserError, match=r"hf://user/repo@v1: .*Entry Not Found"):
        locate_weights("hf://user/repo@v1")


def test_an_index_of_the_hub_names_no_file_elsewhere(hub):
    index = json.dumps({"weight_map": {"a": "../../other/model.safetensors"}}).encode()
    hub.files = {f"{HUB_FILE.rpartition('/')[0]}/model.safetensors.index.json": index}
    with pytest.raises(DataError, match="expected files in its own folder"):
        locate_weights("hf://user/repo")
    assert not any("other" in path for path in paths(hub))


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
def test_an_error_of_the_hub_is_one_line(hub, code, named):
    hub.headers["X-Error-Code"] = code
    with pytest.raises(UserError, match=named) as raised:
        locate_weights("hf://user/repo/other.pth@v1")
    assert str(raised.value).startswith("hf://user/repo/other.pth@v1: ")
    assert "\n" not in str(raised.value)


def test_the_hub_offline(hub, monkeypatch):
    assert describe_download("hf://user/repo/model.safetensors")
    monkeypatch.setenv("MOCO_TRANSFER_OFFLINE", "1")
    assert describe_download("hf://user/repo/model.safetensors") == ""  # reading it is refused
    with pytest.raises(UserError, match="MOCO_TRANSFER_OFFLINE"):
        locate_weights("hf://user/repo/model.safetensors")
    assert not hub.requests


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_of_timm(hub, state, content, file):
    repo = "/timm/resnet18.tv_in1k/resolve/main"
    body = content if file.endswith(".bin") else hub.files[HUB_FILE]
    hub.files = {f"{repo}/{file}": body}
    read = read_initial_weights("timm://resnet18.tv_in1k")
    assert read.init == "resnet18.tv_in1k"
    assert f"hf://timm/resnet18.tv_in1k/{file}@{COMMIT}" in read.notes[0]
    check_same(read.state, state)
    assert paths(hub)[0] == f"{repo}/model.safetensors"  # even if both exist


def test_the_default_weights_of_a_timm_model_and_random_need_no_lookup(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail("a lookup"))
    assert find_remote("timm://resnet18").init == "resnet18.a1_in1k"  # timm's default
    assert "random" in pretrained.inits()
    assert find_remote("random") is None and describe_download("random") == ""
