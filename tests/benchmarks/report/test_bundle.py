"""A report in one zip file: what comes back from it, what is not in it, hostile files."""

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.make_table import main
from benchmarks.report.records import collect
from moco.common.errors import DataError, UserError
from tests.benchmarks.report.fake_runs import CONFIG, record, write_pair, write_run

HOME = "/home/somebody/secret place"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Of one task under a name of its own; one run has failed."""
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


def test_what_comes_back(suite, bundle, tmp_path, capsys):
    out = tmp_path / "out"
    for name, source in (("a", suite), ("b", bundle)):
        printed(capsys, source, "--out", out / name, "--format", "md,csv,tex")
    for name in ("table.md", "table.csv", "table.tex"):
        texts = [(out / side / name).read_text() for side in "ab"]
        texts = [re.sub(r"Runs without numbers:\n\n.*\n\n", "", text) for text in texts]
        assert texts[0] == texts[1]
        assert ("task of suite" in texts[0]) == (name == "table.md")
    assert collect([bundle, bundle]) == collect([bundle])
    # Unpacked by hand it is a folder of runs as any other.
    zipfile.ZipFile(bundle).extractall(tmp_path / "unpacked")
    for name, source in (("c", tmp_path / "unpacked"), ("d", bundle)):
        printed(capsys, source, "--out", out / name, "--format", "csv")
    assert (out / "c" / "table.csv").read_bytes() == (out / "d" / "table.csv").read_bytes()


def test_diff_with_a_bundle_is_diff_with_its_folder(suite, bundle, tmp_path, capsys):
    other = write_pair(
        tmp_path / "other",
        {"random": [20.0, 21.0], "new": [3.0]},
        config={**CONFIG, "SOLVER.BASE_LR": 0.01, "OUTPUT_DIR": "/elsewhere/out"},
        config_sha256="d" * 64,
    )
    for a, b in ((suite, other), (other, suite), (suite, suite)):
        expected = printed(capsys, "--diff", a, b)
        zipped = [bundle if side == suite else side for side in (a, b)]
        assert printed(capsys, "--diff", *zipped).splitlines()[2:] == expected.splitlines()[2:]
    assert "SOLVER.BASE_LR" in printed(capsys, "--diff", bundle, other)
    assert printed(capsys, "--diff", suite, bundle).count("same numbers") == 2 * 3


def test_the_same_bytes_without_this_machines_folders(suite, bundle, tmp_path):
    first = bundle.read_bytes()
    moved = suite.rename(tmp_path / "elsewhere")
    (moved / "runs").parent.rename(tmp_path / "mine")
    main([str(tmp_path / "mine"), "--bundle", str(bundle)])
    assert bundle.read_bytes() == first
    with zipfile.ZipFile(bundle) as archive:
        names = archive.namelist()
        texts = {name: archive.read(name).decode() for name in names}
    assert names == sorted(names) and len(names) == 3 + 4
    assert "mine/runs/task of suite/moco/seed1-abc/run.json" in names
    assert {"README.txt", "mine/suite.json", "table.html"} < set(names)
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


def test_the_bundle_is_a_zip_file(suite, tmp_path):
    for arguments in ([str(suite), "--bundle", "x.tar"], ["--diff", "a", "b", "--bundle", "x.zip"]):
        with pytest.raises(UserError, match="--bundle"):
            main(arguments)


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
    """An archive whose list says another size of its first part."""
    at = content.rindex(b"PK\1\2")
    return content[: at + 24] + struct.pack("<I", size) + content[at + 28 :]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "parent": lambda: zipped(("../../x/run.json", RECORD)),
    "parent inside": lambda: zipped(("a/../x/run.json", RECORD)),
    "absolute": lambda: zipped(("/etc/run.json", RECORD)),
    "folder": lambda: zipped(("a/run.json/", "")),
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


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bundles(tmp_path, name):
    path = tmp_path / "a" / "b.zip"
    path.parent.mkdir()
    path.write_bytes(HOSTILE[name]())
    with pytest.raises(UserError, match=re.escape(str(path))) as error:
        main(["--diff", str(path), str(path)])
    assert "\n" not in str(error.value)
    of_data = name not in ("link", "no record", "nothing")
    assert isinstance(error.value, DataError) == of_data
    assert list(tmp_path.rglob("*")) == [path.parent, path], "something was unpacked"
