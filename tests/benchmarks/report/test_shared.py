"""Results that others can check: every bundle of results/, and what a wrong one is refused for."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.make_table import main
from benchmarks.report.bundle import read_all, read_shared, verify
from benchmarks.report.records import ABOUT_NAME, MATCHES_NAME
from moco.common.command import EPOCH
from moco.common.errors import DataError, UserError
from moco.common.run import RECORD_NAME
from moco.common.shipped import RESULTS


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.zip")), ids=lambda path: path.stem)
def test_a_shipped_result_computed_again(path):
    assert "computed again and equal" in verify(path)
    rows = [row for table in read_shared(path).tables for row in table.rows]
    # Checkpoints of one pre-training show its curve together.
    assert all(row.n >= (2 if EPOCH in row.init else 3) for row in rows)


def test_all_shipped_results_are_read():
    assert [each.name for each in read_all()] == sorted(path.stem for path in RESULTS.glob("*.zip"))


@pytest.fixture(scope="module")
def quickstart() -> Path:
    return RESULTS / "quickstart.zip"


def changed(
    source: Path,
    target: Path,
    ending: str,
    change: Callable[[bytes], bytes],
    *,
    every: bool = False,
) -> Path:
    """Copy a bundle with the last file of this ending changed, or with all of them."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        found = [name for name in old.namelist() if name.endswith(ending)]
        for name in old.namelist():
            content = old.read(name)
            mine = name in (found if every else found[-1:])
            new.writestr(name, change(content) if mine else content)
    return target


def in_json(change: Callable[[dict], None]) -> Callable[[bytes], bytes]:
    def of(content: bytes) -> bytes:
        tree = json.loads(content)
        change(tree)
        return json.dumps(tree).encode()

    return of


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda r: r["metrics"].update({"bbox/AP": 99.0}), "are of another bbox/AP"),
        (lambda r: r["config"].update({"SOLVER.BASE_LR": 9.0}), "different protocols"),
        (lambda r: r.update({"config_sha256": "0" * 64}), "protocol hash: got 0000000000000000"),
        (lambda r: r["provenance"]["data"][0].__setitem__(1, "0" * 64), "not the data"),
        (lambda r: r["metrics"].update({"bbox/AP-dots-star": 9.0}), "'bbox/AP-dots-star': not the"),
        (lambda r: r["metrics"].update({"bbox/AP50-dots-star": 9.0}), "'bbox/AP50-dots-star': not"),
        (lambda r: r["metrics"].update({"bbox/AP-dots-star": None}), "'bbox/AP-dots-star': not"),
        (lambda r: exchange(r["metrics"], "bbox/AP-dots-star", "bbox/AP-grid-square"), "bbox/AP-"),
        (
            lambda r: r.update({"seed": 9}),
            "the record is of 'random', seed 9; expected the",
        ),
    ],
)
def test_a_record_that_was_changed_is_refused(quickstart, tmp_path, change, error):
    path = changed(quickstart, tmp_path / "a.zip", RECORD_NAME, in_json(change))
    with pytest.raises(UserError, match=error):
        verify(path)


def exchange(values: dict, a: str, b: str) -> None:
    assert values[a] != values[b]
    values[a], values[b] = values[b], values[a]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda r: r.update({"weights_sha256": "0" * 64}), "weights_sha256: got 0{16}, but"),
        (lambda r: r["start"].update({"weights_sha256": None}), "weights_sha256: got 5c27bdd8"),
    ],
)
def test_a_hash_that_contradicts_another_is_refused(quickstart, tmp_path, change, error):
    def of_row(content: bytes) -> bytes:
        tree = json.loads(content)
        if tree["init"] == "moco":
            change(tree)
        return json.dumps(tree).encode()

    path = changed(quickstart, tmp_path / "a.zip", RECORD_NAME, of_row, every=True)
    with pytest.raises(UserError, match=error):
        verify(path)


def test_two_rows_that_were_exchanged_are_refused(quickstart, tmp_path):
    """The names of the rows and the hashes of their weights, in all records."""
    with zipfile.ZipFile(quickstart) as archive:
        names = [name for name in archive.namelist() if name.endswith(RECORD_NAME)]
        trees = [json.loads(archive.read(name)) for name in names]
    sha256 = next(tree["weights_sha256"] for tree in trees if tree["init"] == "moco")
    other = {"moco": ("random", None), "random": ("moco", sha256)}

    def exchanged(content: bytes) -> bytes:
        tree = json.loads(content)
        if tree["kind"] == "detection":
            tree["init"], tree["weights_sha256"] = other[tree["init"]]
            tree["start"]["weights_sha256"] = tree["weights_sha256"]
        return json.dumps(tree).encode()

    path = changed(quickstart, tmp_path / "a.zip", RECORD_NAME, exchanged, every=True)
    with pytest.raises(UserError, match=r"moco/seed0-\w+: the record is of 'random', seed 0"):
        verify(path)


def test_what_is_only_recorded_is_named():
    assert verify(RESULTS / "real_small.zip").endswith(
        "AP of 40, also of each class; only recorded: bbox/APl, bbox/APm, bbox/APs"
    )


def test_other_match_records_are_refused(quickstart, tmp_path):
    with zipfile.ZipFile(quickstart) as archive:
        other = archive.read(next(n for n in archive.namelist() if n.endswith(MATCHES_NAME)))
    path = changed(quickstart, tmp_path / "a.zip", MATCHES_NAME, lambda content: other)
    with pytest.raises(UserError, match="are of another bbox/AP"):
        verify(path)


@pytest.mark.parametrize("offset", [0, 40])
def test_a_damaged_file_is_refused(quickstart, tmp_path, offset):
    """A changed byte breaks the checksum, or what zlib can read."""
    content = bytearray(quickstart.read_bytes())
    with zipfile.ZipFile(quickstart) as archive:
        info = next(i for i in archive.infolist() if i.filename == "README.txt")
    content[info.header_offset + 30 + len(info.filename) + offset] ^= 0xFF
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        verify(tmp_path / "a.zip")


def test_a_bundle_names_who_measured_it(quickstart, tmp_path):
    def drop(about: dict) -> None:
        about["measured_by"] = ""

    path = changed(quickstart, tmp_path / "a.zip", ABOUT_NAME, in_json(drop))
    with pytest.raises(DataError, match="measured_by: got ''"):
        read_shared(path)
    main([str(quickstart), "--bundle", str(tmp_path / "b.zip")])
    with pytest.raises(DataError, match="does not say who measured its results"):
        verify(tmp_path / "b.zip")
    main([str(quickstart), "--bundle", str(tmp_path / "c.zip"), "--measured-by", "Some Body"])
    assert read_shared(tmp_path / "c.zip").about.measured_by == "Some Body"


def test_results_beside_ones_own(quickstart, tmp_path, capsys):
    main([str(quickstart), "--reference"])
    shown = capsys.readouterr().out
    beside, _, ours = shown.partition("Measured by others with moco-transfer")[2].rpartition(
        "pre-train "
    )
    assert beside.count("results/quickstart.zip, measured by") == 2
    assert ours.count("measured by") == 0 and "random" in ours
    config = in_json(lambda r: r["provenance"]["data"][1].__setitem__(1, "0" * 64))
    one = tmp_path / "seed" / RECORD_NAME
    one.parent.mkdir()
    with zipfile.ZipFile(quickstart) as archive:
        last = [name for name in archive.namelist() if name.endswith(RECORD_NAME)][-1]
        one.write_bytes(config(archive.read(last)))
    main([str(one.parent), "--reference"])
    assert "Measured by others" not in capsys.readouterr().out


def test_verification_is_a_command(quickstart, capsys):
    main([str(quickstart), "--verify"])
    assert "the protocol hashes of 10 runs, AP of 10" in capsys.readouterr().out
