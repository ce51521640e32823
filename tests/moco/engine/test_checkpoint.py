"""Checkpoints: names, removal of old ones, search for the newest."""

import re

import pytest

from moco.common.errors import DataError
from moco.engine.checkpoint import (
    FORMAT,
    POINTER_NAME,
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)


def content(**changes):
    mappings = {key: {} for key in ("state_dict", "optimizer", "encoder", "input", "config")}
    numbers = {"epoch": 1, "step": 3, "seed": 0, "num_images": 10, "seconds": 1.0}
    return {**mappings, **numbers, "arch": "resnet10", "format": FORMAT, **changes}


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def test_names_sort_by_time(tmp_path):
    times = (0, 5), (0,), (1, 20), (1, 100), (1,), (9999,), (10000,)
    in_order = [checkpoint_name(*time) for time in times]
    assert in_order[1] == "checkpoint_0000.pth.tar"
    for name in [*reversed(in_order), "checkpoint_best.pth.tar", ".tmp-checkpoint_0003.pth.tar"]:
        (tmp_path / name).touch()
    assert names(tmp_path) == in_order


def test_keeps_the_newest_and_the_milestones(tmp_path):
    for epoch in range(6):
        (tmp_path / checkpoint_name(epoch)).touch()
        (tmp_path / checkpoint_name(epoch, 10 * epoch + 5)).touch()
    remove_old_checkpoints(tmp_path, keep=2, milestone_epochs=2)
    kept = [checkpoint_name(e) for e in (1, 3)] + [checkpoint_name(5, 55), checkpoint_name(5)]
    assert names(tmp_path) == kept
    remove_old_checkpoints(tmp_path, keep=2, milestone_epochs=0)
    assert names(tmp_path) == kept[2:]


def test_named_checkpoints_are_never_removed(tmp_path):
    """The file just written may be among the oldest names, if a user added newer ones."""
    for epoch in range(5):
        (tmp_path / checkpoint_name(epoch)).touch()
    written, good = checkpoint_name(1), checkpoint_name(0)
    remove_old_checkpoints(tmp_path, keep=2, milestone_epochs=0, never=(written, good))
    assert names(tmp_path) == [good, written, checkpoint_name(3), checkpoint_name(4)]


def test_newest_skips_unreadable_files(tmp_path, capsys):
    """The one that the pointer names is read first, and then the newest of the others."""
    assert newest_checkpoint(tmp_path, load_checkpoint) is None
    for epoch in range(2):
        save_checkpoint(tmp_path / checkpoint_name(epoch), content(step=epoch))
    whole = (tmp_path / checkpoint_name(1)).read_bytes()
    (tmp_path / checkpoint_name(2)).write_bytes(whole[: len(whole) // 2])
    (tmp_path / checkpoint_name(3)).write_bytes(b"")
    (tmp_path / checkpoint_name(4)).write_text("not a checkpoint")
    for pointer, skipped in (
        (checkpoint_name(1), []),
        (checkpoint_name(3), ["0003", "0004", "0002"]),
        ("../elsewhere.pth.tar", ["last", "0004", "0003", "0002"]),
    ):
        (tmp_path / POINTER_NAME).write_text(pointer)
        path, state = newest_checkpoint(tmp_path, load_checkpoint)
        assert (path.name, state["step"]) == (checkpoint_name(1), 1)
        warnings = capsys.readouterr().out.splitlines()
        assert all(line.startswith("warning: ") for line in warnings)
        found = [re.search(r"/(?:checkpoint_)?(\d{4}|last)", line)[1] for line in warnings]
        assert found == skipped
    for epoch in range(2):
        (tmp_path / checkpoint_name(epoch)).unlink()
    (tmp_path / POINTER_NAME).unlink()
    with pytest.raises(DataError, match=r"can be read; the newest: .*0004"):
        newest_checkpoint(tmp_path, load_checkpoint)
