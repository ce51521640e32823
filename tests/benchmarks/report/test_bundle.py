"""A report in one zip file: what comes back from it, what is not in it, hostile files."""

import io
import json
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.make_table import main
from benchmarks.report.analysis import ERROR_TYPES
from benchmarks.report.plots import Plot
from benchmarks.report.records import EVIDENCE, MATCHES_NAME, collect, read_bundle
from benchmarks.report.report import make_tables
from detection.data.corruptions import NAMES
from detection.evaluation.metrics import ERRORS_NAME, ROBUSTNESS_NAME
from moco.common.errors import DataError, UserError
from moco.common.run import METRICS_NAME
from tests.benchmarks.report.fake_runs import CONFIG, record, write_run
from tests.benchmarks.report.test_bootstrap import write_matched

HOME = "/home/somebody/secret place"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Write a suite of one task with a name of its own and a failed run."""
    root = tmp_path / "somebody" / "mine"
    for init, ap in (("random", 10.0), ("moco", 20.0)):
        for seed in range(2):
            write_run(
                root / "runs" / "task of suite" / init / f"seed{seed}-abc",
                losses=[2.0, 1.0],
                **{"init": init, "seed": seed, "metrics": {"bbox/AP": ap + seed}},
                **{"weights_source": f"{HOME}/x.pth", "notes": [f"see {tmp_path}/log: it is long"]},
                weights_sha256=None if init == "random" else "a" * 64,
                config={
                    **CONFIG,
                    "OUTPUT_DIR": f"{HOME}/out",
                    "DATASETS.VOC_DIR": f"{tmp_path}/VOC2007",
                },
                provenance={"command": f"{tmp_path}/train_net.py --x={tmp_path}/y a/b", "git": "1"},
            )
    write_run(
        root / "runs" / "task of suite" / "bad" / "seed0-abc",
        **{"init": "bad", "status": "failed", "notes": [f"{tmp_path}/suite.log: nan"]},
    )
    (root / "suite.json").write_text("{}")
    return root


@pytest.fixture
def bundle(suite: Path, tmp_path: Path) -> Path:
    main([str(suite), "--bundle", str(tmp_path / "shared.zip")])
    return tmp_path / "shared.zip"


def printed(capsys: pytest.CaptureFixture[str], *argv: Path | str) -> str:
    capsys.readouterr()
    main([str(argument) for argument in argv])
    return capsys.readouterr().out


@pytest.mark.slow
def test_what_comes_back(suite, bundle, tmp_path):
    found = collect([bundle])
    assert collect([bundle, bundle]) == found
    assert {run.suite_task for run in found.transfer} == {"task of suite"}
    # Unpacked by hand, it is a folder of runs like any other.
    zipfile.ZipFile(bundle).extractall(tmp_path / "unpacked")
    for source in (suite, tmp_path / "unpacked"):
        [own], [theirs] = (make_tables(collect([path])) for path in (source, bundle))
        assert (own.title, own.rows[1].cells) == ("task of suite", theirs.rows[1].cells)
        assert [row.gaps for row in own.rows] == [row.gaps for row in theirs.rows]


def test_evidence_comes_back(tmp_path, monkeypatch):
    """Intervals over images, error types, robustness and the proof, on the page as elsewhere."""
    for init, quality in (("random", 0.3), ("moco", 0.7)):
        for seed in range(2):
            folder = write_matched(tmp_path / "runs", init, seed, quality)
            types = dict.fromkeys(ERROR_TYPES, 10 * quality + seed)
            [run] = collect([folder]).transfer
            made = {"run": run.digest, "ap50": 1.0, "delta": types}
            (folder / ERRORS_NAME).write_text(json.dumps(made))
            corrupted = {name: {"bbox/AP": 20 * quality} for name in NAMES}
            content = {"run": run.digest, "severity": 3, "clean": run.record.metrics}
            content |= {"corrupted": corrupted, "failing": {"fog": f"no {HOME}/fog.so"}}
            (folder / ROBUSTNESS_NAME).write_text(json.dumps(content))
            half = run.record.iterations // 2 - 1
            lines = {"iteration": 9, "total_loss": 2.0}, {"iteration": half, "bbox/AP": 3.0}
            (folder / METRICS_NAME).write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    monkeypatch.setattr(Plot, "svg", "<svg/>")
    both = ["--bootstrap", "100", "--format", "md,csv,tex,html"]
    bundle = tmp_path / "b.zip"
    main([str(tmp_path / "runs"), *both, "--out", str(tmp_path / "a"), "--bundle", str(bundle)])
    with zipfile.ZipFile(bundle) as archive:
        page = archive.read("table.html").decode()
        assert not any(b"somebody" in archive.read(name) for name in archive.namelist())
    for path in (tmp_path / "runs").rglob("*.*"):
        path.unlink()
    again = tmp_path / "again.zip"
    main([str(bundle), *both, "--out", str(tmp_path / "b"), "--bundle", str(again)])
    for name in ("table.md", "table.csv", "table.tex"):
        texts = [(tmp_path / side / name).read_text() for side in "ab"]
        assert texts[0] == texts[1], name
    for text in ((tmp_path / "a" / "table.md").read_text(), page):
        assert "120 bootstrap resamples" in text and "TIDE" in text and "severity 3" in text
        assert "AP at" in text and "50% of the schedule" in text
        assert "only the weights differ (config" in text
    assert "only the weights of moco and random differ: equal" in page
    with zipfile.ZipFile(bundle) as one, zipfile.ZipFile(again) as two:
        names = {name for name in one.namelist() if name.startswith("moco")}
        assert len(names) == 2 * 5
        assert not any(b"loss" in one.read(name) for name in names if METRICS_NAME in name)
        assert {n: one.read(n) for n in names} == {n: two.read(n) for n in names}


def test_the_same_bytes_without_this_machines_folders(suite, bundle, tmp_path):
    first = bundle.read_bytes()
    moved = suite.rename(tmp_path / "elsewhere")
    (moved / "runs").parent.rename(tmp_path / "mine")
    main([str(tmp_path / "mine"), "--bundle", str(bundle)])
    assert bundle.read_bytes() == first
    with zipfile.ZipFile(bundle) as archive:
        names = archive.namelist()
        texts = {name: archive.read(name).decode() for name in names}
    assert names == sorted(names) and len(names) == 4 + 4
    assert "mine/runs/task of suite/moco/seed1-abc/run.json" in names
    assert {"README.txt", "mine/suite.json", "table.html"} < set(names)
    [comparison] = re.findall('href="(compare-[^"]*)"', texts["table.html"])[:1]
    assert comparison in names
    for text in texts.values():
        assert "somebody" not in text and "secret" not in text and str(tmp_path) not in text
    one = json.loads(texts["mine/runs/task of suite/moco/seed1-abc/run.json"])
    assert one["provenance"]["command"] == "train_net.py --x=y a/b"
    assert one["notes"] == ["see log: it is long"] and one["weights_source"] == "x.pth"
    assert one["config"] == {**CONFIG, "OUTPUT_DIR": "out", "DATASETS.VOC_DIR": "VOC2007"}
    page = texts["table.html"]
    assert page.count("data:image/svg+xml") == 3 and "failed: suite.log: nan" in page
    assert "mine/runs/task of suite/moco/seed1-abc" in page


def test_runs_of_several_places_keep_apart(tmp_path, capsys):
    for place in ("x", "y"):
        write_run(tmp_path / place / "run", seed=int(place == "y"))
    main([str(tmp_path / "x"), str(tmp_path / "y"), "--bundle", str(tmp_path / "b.zip")])
    names = [
        str(run.folder.relative_to(tmp_path)) for run in collect([tmp_path / "b.zip"]).transfer
    ]
    assert names == ["b.zip/x/run", "b.zip/y/run"]


def zipped(*members: tuple[str, str | bytes], **changes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            for key, value in changes.items():
                setattr(info, key, value)
            archive.writestr(info, content)
    return buffer.getvalue()


RECORD = json.dumps({**vars(record())})


def claiming(content: bytes, size: int) -> bytes:
    """Change the size of the last part in the central directory of an archive."""
    at = content.rindex(b"PK\1\2")
    return content[: at + 24] + struct.pack("<I", size) + content[at + 28 :]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "parent": lambda: zipped(("../../x/run.json", RECORD)),
    "parent inside": lambda: zipped(("a/../x/run.json", RECORD)),
    "absolute": lambda: zipped(("/etc/run.json", RECORD)),
    "folder": lambda: zipped(("a/run.json/", "")),
    "twice": lambda: zipped(("a/run.json", RECORD), ("a//run.json", RECORD)),
    "dots": lambda: zipped(("a/./run.json", RECORD)),
    "link": lambda: zipped(("a/run.json", "/etc/passwd"), external_attr=0o120777 << 16),
    "no record": lambda: zipped(("a/run.json", "[" * 100_000)),
    "bomb": lambda: zipped(("a/run.json", b" " * (65 << 20))),
    "claims less": lambda: claiming(zipped(("a/run.json", RECORD)), 10),
    "claims more": lambda: claiming(zipped(("a/run.json", RECORD)), 1 << 30),
    "not a zip": lambda: b"PK",
    "empty": lambda: b"",
    "cut off": lambda: zipped(("a/run.json", RECORD))[:-30],
    "bytes follow": lambda: zipped(("a/run.json", RECORD)) + b"#!/bin/sh\n" * 9,
    "nothing": lambda: zipped(("table.html", "<script>")),
}


BAD_EVIDENCE: dict[str, Callable[[], bytes]] = {
    "deep": lambda: zipped(("a/run.json", RECORD), (f"a/{ERRORS_NAME}", "[" * 100_000)),
    "bomb": lambda: zipped(("a/run.json", RECORD), (f"a/{ERRORS_NAME}", b" " * (2 << 20))),
    "claims less": lambda: claiming(
        zipped((f"a/{ERRORS_NAME}", json.dumps({"delta": {}})), ("a/run.json", RECORD)), 10
    ),
    "another thing": lambda: zipped(("a/run.json", RECORD), (f"a/{ROBUSTNESS_NAME}", "3")),
    "not text": lambda: zipped(("a/run.json", RECORD), (f"a/{METRICS_NAME}", b"\xff{")),
}


@pytest.mark.parametrize("name", BAD_EVIDENCE)
def test_hostile_evidence(tmp_path, name):
    path = tmp_path / "b.zip"
    path.write_bytes(BAD_EVIDENCE[name]())
    with pytest.raises(UserError, match=re.escape(str(path))):
        main([str(path), "--out", str(tmp_path / "out"), "--format", "md"])


def test_hostile_match_records(tmp_path, monkeypatch, capsys):
    """Pickles, other names and too much of them: no intervals, and nothing runs."""
    pickled, path = io.BytesIO(), tmp_path / "b.zip"
    np.savez(pickled, metric=np.array([print], dtype=object), images=np.array(["1"]))
    for content in (pickled.getvalue(), b"", b"PK"):
        path.write_bytes(zipped(("a/run.json", RECORD), (f"a/{MATCHES_NAME}", content)))
        assert "match records of seed 0 cannot be read" in printed(
            capsys, path, "--bootstrap", "100"
        )
    other = zipped(("a/run.json", RECORD), (f"a/../a/{MATCHES_NAME}", b""), (MATCHES_NAME, b""))
    path.write_bytes(other)
    assert "no match records" in printed(capsys, path, "--bootstrap", "100")
    path.write_bytes(zipped(("a/run.json", RECORD), (f"a/{MATCHES_NAME}", b"x" * 100)))
    monkeypatch.setitem(EVIDENCE, MATCHES_NAME, 99)
    [run] = collect([path]).transfer
    with pytest.raises(DataError, match="99 bytes"):
        run.read(MATCHES_NAME)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_part_that_is_larger_than_it_says(tmp_path, method):
    """Refused without the memory for what it would unpack to."""
    large = io.BytesIO()
    with zipfile.ZipFile(large, "w", method) as archive:
        archive.writestr("a/run.json", b" " * (60 << 20))
    path = tmp_path / "b.zip"
    path.write_bytes(claiming(large.getvalue(), 10))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="damaged"):
            read_bundle(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bundles(tmp_path, name):
    path = tmp_path / "a" / "b.zip"
    path.parent.mkdir()
    path.write_bytes(HOSTILE[name]())
    with pytest.raises(UserError, match=re.escape(str(path))) as error:
        main([str(path)])
    assert "\n" not in str(error.value)
    of_data = name not in ("link", "no record", "nothing")
    assert isinstance(error.value, DataError) == of_data
    assert list(tmp_path.rglob("*")) == [path.parent, path], "something was unpacked"
