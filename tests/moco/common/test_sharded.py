"""Folders of torch.distributed.checkpoint, compared with what torch makes of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moco.common.errors import DataError
from moco.common.sharded import list_files, read_distributed
from tests.oracles.payloads import Payload, saved


def make() -> dict[str, Any]:
    torch.manual_seed(0)
    model = {"conv1.weight": torch.randn(8, 3, 2, 2), "scale": torch.tensor(2.0)}
    return {
        "model": model,
        "optim": {"state": {"conv1.weight": {"exp_avg": torch.randn(3).half()}}},
        "epoch": 3,
    }


def write_chunks(
    folder: Path, size: tuple[int, ...], chunks: list[tuple[tuple[int, ...], torch.Tensor]]
) -> Path:
    """Write a tensor `w` in pieces, one a file, as several processes do."""
    folder.mkdir(exist_ok=True)
    pieces, storage = [], {}
    for rank, (offset, value) in enumerate(chunks):
        content = saved(value.clone())
        (folder / f"__{rank}_0.distcp").write_bytes(content)
        pieces.append(ChunkStorageMetadata(torch.Size(offset), value.shape))
        index = MetadataIndex("model.w", torch.Size(offset), rank)
        storage[index] = _StorageInfo(f"__{rank}_0.distcp", 0, len(content))
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), pieces)
    metadata = Metadata({"model.w": entry}, {"model.w": ("model", "w")}, storage)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder / ".metadata"


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, item in value.items() for k, v in flat(item, f"{name}/{key}").items()}


def test_torch_makes_the_same_of_it(tmp_path: Path) -> None:
    dcp.save(make(), checkpoint_id=tmp_path / "a", no_dist=True)
    torch.manual_seed(0)
    whole = torch.randn(5, 4)
    write_chunks(tmp_path / "b", (5, 4), [((0, 0), whole[:3]), ((3, 0), whole[3:])])
    for name in "ab":
        dcp_to_torch_save(tmp_path / name, tmp_path / "whole.pth")
        expected = flat(torch.load(tmp_path / "whole.pth", weights_only=True))
        objects: set[str] = set()
        read = flat(read_distributed(tmp_path / name / ".metadata", objects))
        assert not objects and read.keys() == expected.keys() and len(read) > 3 * (name == "a")
        for key, value in expected.items():
            assert type(value) is type(read[key])
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(read[key])), key
    names = [file.name for file in list_files(tmp_path / "b" / ".metadata")]
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def changed(path: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def info(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(info(m), "relative_path", "../x"), "names file '../x', expected files"),
        (lambda m: setattr(info(m), "relative_path", "none"), "its part none is missing"),
        (lambda m: setattr(info(m), "length", 1 << 40), "declares more bytes of __0_0.distcp than"),
        (lambda m: setattr(info(m), "offset", -1), "dcp_to_torch .* out.pth"),
        (lambda m: setattr(info(m), "relative_path", "__1_0.distcp"), "declares more bytes"),
        (lambda m: setattr(info(m), "transform_descriptors", ["zstd"]), "compressed.*dcp_to_torch"),
        (lambda m: m.storage_data.clear(), "dcp_to_torch"),
        (lambda m: m.storage_data.popitem(), "no whole tensor is at 'model.w'"),
        (lambda m: m.planner_data.update({"model.w": ("k",) * 40}), "dcp_to_torch"),
        (lambda m: m.planner_data.update({"model.w": 5}), "dcp_to_torch"),
        (
            lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size((4, 5))),
            "no whole",
        ),
        (
            lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size((9, 9))),
            "no whole",
        ),
    ],
)
def test_metadata_that_lies(change: Any, words: str, tmp_path: Path) -> None:
    path = write_chunks(
        tmp_path / "x", (5, 4), [((0, 0), torch.ones(3, 4)), ((3, 0), torch.ones(2, 4))]
    )
    changed(path, change)
    with pytest.raises(DataError, match=words) as error:
        read_distributed(path, set())
    assert "\n" not in str(error.value)


def test_expanded_pieces_would_take_more_memory_than_the_file(tmp_path: Path) -> None:
    path = write_chunks(tmp_path / "x", (2, 1 << 20), [((i, 0), torch.ones(1, 1)) for i in (0, 1)])
    for rank in (0, 1):
        piece = saved(torch.ones(1, 1).expand(1, 1 << 20))
        (tmp_path / "x" / f"__{rank}_0.distcp").write_bytes(piece)
    changed(path, lambda m: [setattr(i, "length", len(piece)) for i in m.storage_data.values()])
    with pytest.raises(DataError, match="no whole tensor"):
        read_distributed(path, set())


@pytest.mark.parametrize("how", ["reduce", "state"])
def test_payloads_do_not_run(how: str, tmp_path: Path) -> None:
    """Neither in the metadata, nor in a value; torch runs the former."""
    payload = Payload(tmp_path / "marker", how)
    path = write_chunks(tmp_path / "x", (1,), [((0,), torch.ones(1))])
    content = saved({"a": payload})
    (tmp_path / "x" / "__1_0.distcp").write_bytes(content)

    def hide(metadata: Any) -> None:
        metadata.storage_data[MetadataIndex("v")] = _StorageInfo("__1_0.distcp", 0, len(content))
        metadata.state_dict_metadata["v"] = dcp.metadata.BytesStorageMetadata()
        metadata.version = payload

    changed(path, hide)
    objects: set[str] = set()
    assert torch.equal(read_distributed(path, objects)["model"]["w"], torch.ones(1))
    assert any(name.endswith(".open") for name in objects)
    assert not (tmp_path / "marker").exists()
    pickle.loads(path.read_bytes())
    assert (tmp_path / "marker").exists()
