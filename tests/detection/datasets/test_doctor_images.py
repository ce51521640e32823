"""`datasets doctor --images`: images for pre-training, as a folder, a list or shards."""

import tarfile
from pathlib import Path

import pytest
from PIL import Image

from detection.datasets.__main__ import main


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "images").mkdir()
    for i in range(300):
        Image.new("RGB", (20, 20), (i % 256, 90, 200)).save(tmp_path / "images" / f"{i:03}.jpg")
    return tmp_path / "images"


def test_whole(folder, capsys):
    (folder / "a.heic").touch()
    assert main(["doctor", "--images", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "300 images\n" in out and "left out by suffix: 1 file (.heic 1)" in out
    command = out.splitlines()[-1].removeprefix("next: ").split()
    assert command[:4] == ["python", "-m", "benchmarks", "pretrain"]
    assert command[-2:] == ["DATA.ROOT", str(folder)]
    assert Path(command[command.index("--config-file") + 1]).is_file()
    assert main(["doctor", "--images", str(folder), "--verify"]) == 0
    assert "300 images, all decoded" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["folder", "list", "shards"])
def test_each_bad_image_is_named(kind, folder, tmp_path, capsys):
    (folder / "003.jpg").write_bytes(b"")
    (folder / "290.jpg").write_bytes((folder / "290.jpg").read_bytes()[:400])
    root = folder
    if kind == "list":
        root = tmp_path / "list.txt"
        root.write_text("".join(f"images/{path.name}\n" for path in sorted(folder.iterdir())))
    if kind == "shards":
        root = tmp_path / "shards"
        root.mkdir()
        for part in range(3):
            with tarfile.open(root / f"{part}.tar", "w") as tar:
                for path in sorted(folder.iterdir())[part::3]:
                    tar.add(path, path.name)
    assert main(["doctor", "--images", str(root)]) == 0, "without --verify nothing is decoded"
    capsys.readouterr()
    assert main(["doctor", "--images", str(root), "--verify"]) == 3
    wrong = [line for line in capsys.readouterr().out.splitlines() if "WRONG  images" in line]
    assert len(wrong) == 3 and wrong[2].endswith("2 cannot be decoded")
    assert "003.jpg: the file is empty" in wrong[0] + wrong[1]
    assert "290.jpg: cannot be decoded" in wrong[0] + wrong[1]


def test_of_many_bad_ones_the_first_are_named(folder, capsys):
    for path in folder.iterdir():
        path.write_bytes(b"")
    assert main(["doctor", "--images", str(folder), "--verify"]) == 3
    out = capsys.readouterr().out
    assert out.count("the file is empty") == 30 and "300 cannot be decoded, the first 30" in out


def test_nothing_there(tmp_path, capsys):
    assert main(["doctor", "--images", str(tmp_path / "no")]) == 3
    assert f"WRONG  images  {tmp_path / 'no'}: no such folder" in capsys.readouterr().out
