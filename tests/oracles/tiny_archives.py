"""Generated datasets in archives as they are published: the names and folders of the official ones.

With an `archives.yaml` whose sizes and hashes are theirs.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import yaml
from PIL import Image
from scipy.io import savemat

from detection.datasets import download
from tests.oracles.tiny_ade import write_ade
from tests.oracles.tiny_cityscapes import write_cityscapes
from tests.oracles.tiny_coco import write_coco
from tests.oracles.tiny_lvis import write_lvis
from tests.oracles.tiny_voc import VOC_NAMES, write_voc
from tests.oracles.tiny_voc_seg import write_voc_seg

# With and without a mask in VOC2012.
VOC_TRAIN, VOC_VAL = ["2012_000000", "2012_000001"], ["2012_000002", "2012_000003"]
SBD_ONLY = ["2012_000004", "2012_000005", "2012_000006"]


def tiny_archives(name: str, folder: Path) -> dict[str, bytes]:
    """Return the archives of a dataset by file name; `folder` is for its files."""
    dataset = download.datasets()[name]
    if name == "voc2007":
        write_voc(folder / "first" / "VOC2007", {"trainval": 3}, names=VOC_NAMES)
        write_voc(folder / "both" / "VOC2007", {"trainval": 3, "test": 2}, names=VOC_NAMES)
        first, second = dataset.archives
        files = _files(first, folder / "first")
        others = {n: b for n, b in _files(second, folder / "both").items() if n not in files}
        return {first.name: packed(first.name, files), second.name: packed(second.name, others)}
    if name.startswith("voc2012"):
        _write_voc2012(folder)
    elif name == "coco2017":
        write_coco(folder, {"train2017": 3, "val2017": 2}, keypoints=True)
    elif name == "densepose":
        splits = {"train2014": 2, "valminusminival2014": 2, "minival2014": 2}
        write_coco(folder, splits, densepose=True, crowd=False)
    elif name.startswith("lvis"):
        write_lvis(folder, {"train": 3, "val": 2}, version=name.removeprefix("lvis_"))
    elif name == "bccd":
        write_voc(folder / "bccd", {"trainval": 3, "test": 2})
    elif name == "raccoon":
        write_voc(folder / "raccoon", {"train": 5})
        for old, new in {"Annotations": "annotations", "JPEGImages": "images"}.items():
            (folder / "raccoon" / old).rename(folder / "raccoon" / new)
    elif name == "facemask":
        write_coco(folder / "facemask", {"train2017": 3, "val2017": 2}, crowd=False)
        coco = folder / "facemask" / "coco"
        for split in ("train", "val"):
            file = coco / "annotations" / f"instances_{split}2017.json"
            file.rename(file.with_name(f"custom_{split}.json"))
        for part in coco.iterdir():
            part.rename(folder / "facemask" / part.name)
    elif name == "ade20k":
        write_ade(folder, {"train": 3, "val": 2})
    else:
        write_cityscapes(folder, {"train": 2, "val": 2}, train_ids=False)
    made = {}
    for archive in dataset.archives:
        if archive.takes:
            made[archive.name] = packed(archive.name, _files(archive, folder))
        else:
            file = folder / archive.folder / archive.complete[0]
            made[archive.name] = file.read_bytes()
    return made


def packed(name: str, files: dict[str, bytes]) -> bytes:
    """Return an archive in the format of the ending of `name`, with a README in it."""
    buffer = io.BytesIO()
    files = {"README": b"read me", **files}
    if name.endswith(".zip"):
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, content in files.items():
                archive.writestr(path, content)
        return buffer.getvalue()
    with tarfile.open(fileobj=buffer, mode="w:gz" if name.endswith("gz") else "w") as tar:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def write_facts(contents: dict[str, bytes], file: Path) -> None:
    """Write archives.yaml with the sizes and hashes of `contents`, where the real one has any."""
    facts = yaml.safe_load(download.FILE.read_text())
    for name, content in contents.items():
        archive = facts["archives"][name]
        if archive["size"]:
            archive["size"] = len(content)
        if archive["hash"]:
            algorithm = archive["hash"].partition(":")[0]
            archive["hash"] = f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"
        if archive.get("contents"):
            archive["contents"] = f"sha256:{_contents(archive, content)}"
        archive.pop("about", None)
    file.write_text(yaml.safe_dump(facts), encoding="utf-8")


def _contents(archive: dict, content: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        taken = {n: file.read(n) for n in file.namelist() if n.startswith((*archive["takes"],))}
    names = {n.split("/", archive["strip"])[-1]: hashlib.sha256(c) for n, c in taken.items()}
    lines = [f"{name} {digest.hexdigest()}\n" for name, digest in sorted(names.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _files(archive: download.Archive, folder: Path) -> dict[str, bytes]:
    """Name in the archive → content."""
    stripped = "".join(f"{part}/" for part in archive.takes[0].split("/")[: archive.strip])
    root = folder / ("sbd" if archive.prepare == "train_aug" else archive.folder)
    files = {stripped + p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
    return {n: p.read_bytes() for n, p in files.items() if n.startswith(archive.takes)}


def _write_voc2012(folder: Path) -> None:
    """Boxes, masks of VOC_TRAIN and VOC_VAL; SBD's masks of some of them, and of SBD_ONLY."""
    root, sbd = folder / "VOC2012", folder / "sbd"
    write_voc(root, {"train": 2, "val": 1}, names=VOC_NAMES)
    write_voc_seg(folder, {"train": 2, "val": 2, "sbd": 3})
    lists = root / "ImageSets"
    for kind in ("Main", "Segmentation"):
        both = [(lists / kind / f"{split}.txt").read_text() for split in ("train", "val")]
        (lists / kind / "trainval.txt").write_text("".join(both))
    (lists / "Segmentation" / "sbd.txt").unlink()
    (sbd / "cls").mkdir(parents=True)
    for image_id in [VOC_TRAIN[0], VOC_VAL[0], *SBD_ONLY]:
        mask = np.array(Image.open(root / "SegmentationClass" / f"{image_id}.png"))
        mask[mask == 255] = 0  # SBD has no borders
        content = {"Segmentation": mask, "CategoriesPresent": np.unique(mask)}
        savemat(sbd / "cls" / f"{image_id}.mat", {"GTcls": content})
        if image_id in SBD_ONLY:
            (root / "SegmentationClass" / f"{image_id}.png").unlink()
    (sbd / "train.txt").write_text(f"{VOC_TRAIN[0]}\n{SBD_ONLY[0]}\n")
    (sbd / "val.txt").write_text(f"{VOC_VAL[0]}\n{SBD_ONLY[1]}\n{SBD_ONLY[2]}\n")
    shutil.rmtree(root / "SegmentationClassAug", ignore_errors=True)
