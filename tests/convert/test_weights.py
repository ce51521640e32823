"""The command that lists and fetches weights by name, and the commands that take such names."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.inspect_weights import main as inspect
from convert import weights
from convert.convert_to_d2 import main as convert
from convert.verify import read_converted
from moco.common import pretrained
from moco.common.run import read_record
from tests.moco.classification.classify_runs import write_labeled
from tests.moco.commands import knn
from tests.oracles.file_server import Served, file_server
from tests.oracles.resnets import make_resnet

ENTRY = {
    "source": "torchvision",
    "contract": {
        "channel_order": "RGB",
        "pixel_mean": [123.675, 116.28, 103.53],
        "pixel_std": [58.395, 57.12, 57.375],
        "stride_in_1x1": False,
    },
}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any) -> Iterator[Served]:
    """Serve a ResNet-18 that is named `mine`."""
    content = save(make_resnet(18, base=64).state_dict()).read_bytes()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    monkeypatch.setenv("MOCO_TRANSFER_CACHE", str(tmp_path / "cache"))
    with file_server({"/r18.pth": content}) as served:
        entry = {**ENTRY, "weights": f"{served.url}/r18.pth", "hash": digest}
        monkeypatch.setattr(pretrained, "inits", lambda: {"mine": entry})
        monkeypatch.setattr(weights, "inits", lambda: {"mine": entry})
        yield served


def test_list_and_fetch(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights.main(["list"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mine")]
    assert row.split()[-1] == "no"
    weights.main(["fetch", "mine"])
    file = capsys.readouterr().out.split(": ")[1].strip()
    assert Path(file).read_bytes() == served.files["/r18.pth"]
    weights.main(["list"])
    out = capsys.readouterr().out
    assert "torchvision" in out and "103.53" in out and str(tmp_path / "cache") in out
    (row,) = [line for line in out.splitlines() if line.startswith("mine")]
    assert row.split()[-1] == "yes"


def test_the_shipped_list(capsys: pytest.CaptureFixture[str]) -> None:
    weights.main(["list"])
    out = capsys.readouterr().out
    assert all(name in out for name in weights.fetchable())
    assert "md5:a04e12f8" in out and "sha256:0676ba61, 102.5 MB" in out


def test_convert_and_inspect(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{served.url}/r18.pth"
    convert(["mine", str(tmp_path / "r18.pth")])
    assert address in capsys.readouterr().out
    inspect(["mine"])
    assert address in capsys.readouterr().out
    assert len(served.requests) == 1
    assert read_converted(tmp_path / "r18.pth").contract.source == "torchvision"


@pytest.mark.slow
def test_knn_with_weights_by_name(served: Served, tmp_path: Path) -> None:
    data = write_labeled(tmp_path / "data", {"train": (2, 2, 2), "val": (2, 2, 2)})
    output = tmp_path / "knn"
    knn(["--checkpoint", "mine", "--data", str(data), "--k", "2", "--output", str(output)])
    record = read_record(output / "run.json")
    assert record.init == "mine" and f"{served.url}/r18.pth" in record.notes[0]
    assert record.weights_sha256 == hashlib.sha256(served.files["/r18.pth"]).hexdigest()
