"""Small files by name that the rows of refused inputs read, and ways to damage them."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision.models import resnet as tv

from benchmarks.__main__ import main
from tests.oracles.broken_coco import write_good
from tests.oracles.checkpoints import official, own
from tests.oracles.resnets import make_resnet, randomize
from tests.oracles.tiny_cityscapes import write_cityscapes
from tests.oracles.tiny_coco import write_coco
from tests.oracles.tiny_voc import VOC_NAMES, write_voc
from tests.oracles.tiny_voc_seg import write_voc_seg

Edit = Callable[[Path], object]


def _saved(make: Callable[[], Any]) -> Callable[[Path], object]:
    return lambda path: torch.save(make(), path)


def _images(folder: Path, number: int = 9) -> None:
    folder.mkdir()
    for i in range(number):
        Image.new("RGB", (20 + i, 30), (i, 9, 99)).save(folder / f"{i}.jpg")


def _labeled(folder: Path) -> None:
    for split in ("train", "val"):
        for name in ("blue", "red"):
            (folder / split).mkdir(parents=True, exist_ok=True)
            _images(folder / split / name, 4)


# Names of the rows' files; a name is made for a row that mentions it.
FILES: dict[str, Callable[[Path], object]] = {
    "images": _images,
    "labeled": _labeled,
    "official.pth": _saved(official),
    "own.pth": _saved(own),
    "plain.pth": _saved(lambda: make_resnet().state_dict()),
    "voc": lambda path: write_voc(path, {"trainval": 6, "test": 3}),
}


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def catalogs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Detectron2's catalogs, and what is in them."""
    if sys.modules.get("detectron2") is None:
        return []
    from detectron2.data import DatasetCatalog, MetadataCatalog

    return [(each.data, dict(each.data)) for each in (DatasetCatalog, MetadataCatalog)]


def text(name: str, content: str | bytes) -> Edit:
    """Write a file."""

    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def gone(*names: str) -> Edit:
    """Remove files and folders."""

    def remove(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def folder_of(name: str) -> Edit:
    """Make an empty folder."""
    return lambda folder: (folder / name).mkdir(parents=True)


def pipe(name: str) -> Edit:
    return lambda folder: os.mkfifo(folder / name)


def saved(name: str, content: object) -> Edit:
    """Save with torch what is given, or what a function makes."""
    return lambda folder: torch.save(content() if callable(content) else content, folder / name)


def pickled(name: str, content: object) -> Edit:
    """Return a pickle as Python 2 wrote it."""
    return lambda folder: (folder / name).write_bytes(
        pickle.dumps(content() if callable(content) else content, protocol=2)
    )


def plain(name: str, **network: Any) -> Edit:
    """Save a small ResNet-10's tensors as any program does."""
    return lambda folder: torch.save(make_resnet(depth=10, **network).state_dict(), folder / name)


def resnext() -> dict[str, torch.Tensor]:
    net = tv.ResNet(tv.Bottleneck, [3, 4, 6, 3], groups=32, width_per_group=4)
    randomize(net)
    return dict(net.state_dict())


def move(name: str, to: str) -> Edit:
    return lambda folder: (folder / name).rename(folder / to)


def torch_edit(name: str, change: Callable[[Any], object]) -> Edit:
    """Change what is in a checkpoint."""

    def edit(folder: Path) -> None:
        content = torch.load(folder / name, weights_only=True)
        change(content)
        torch.save(content, folder / name)

    return edit


def json_edit(name: str, change: Callable[[Any], object]) -> Edit:
    """Change what is in a JSON file."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def both(*edits: Edit) -> Edit:
    """Return an edit that makes several, one after the other."""

    def edit(folder: Path) -> None:
        for each in edits:
            each(folder)

    return edit


def query(change: Callable[[dict[str, Any]], object], name: str = "official.pth") -> Edit:
    """Change the query encoder's tensors, whose names are given without what is before them."""
    start = "module.encoder_q."

    def edit(content: dict[str, Any]) -> None:
        state = content["state_dict"]
        mine = {k.removeprefix(start): state.pop(k) for k in list(state) if k.startswith(start)}
        change(mine)
        state.update({start + key: value for key, value in mine.items()})

    return torch_edit(name, edit)


def tensor(key: str, change: Any, name: str = "official.pth") -> Edit:
    """Replace a tensor of the query encoder, or with None remove it."""

    def edit(state: dict[str, Any]) -> None:
        if change is None:
            del state[key]
        else:
            state[key] = change(state[key]) if callable(change) else change

    return query(edit, name)


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {key: 0.3 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def _pair(key: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{key}.weight": shape, f"{key}.bias": shape[:1]}


def vit(width: int = 24, depth: int = 2, side: int = 4) -> dict[str, torch.Tensor]:
    """Return a vision transformer in timm's names, of patches of 4 px in images of 4 * side px."""
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, 1 + side * side, width)}
    shapes |= _pair("patch_embed.proj", width, 3, 4, 4)
    for i in range(depth):
        parts = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        parts |= {"mlp.fc1": (3 * width, width), "mlp.fc2": (width, 3 * width)}
        parts |= {"norm1": (width,), "norm2": (width,)}
        for part, shape in parts.items():
            shapes |= _pair(f"blocks.{i}.{part}", *shape)
    return _random({**shapes, **_pair("norm", width), **_pair("head", 5, width)})


def convnext(depths: tuple[int, ...] = (1, 2, 1, 1)) -> dict[str, torch.Tensor]:
    """Return a ConvNeXt in timm's names, of 8 to 24 channels."""
    dims = (8, 12, 16, 24)
    shapes = {**_pair("stem.0", 8, 3, 4, 4), **_pair("stem.1", 8)}
    for i, (d, depth) in enumerate(zip(dims, depths, strict=True)):
        if i:
            shapes |= _pair(f"stages.{i}.downsample.0", dims[i - 1])
            shapes |= _pair(f"stages.{i}.downsample.1", d, dims[i - 1], 2, 2)
        for j in range(depth):
            block = f"stages.{i}.blocks.{j}"
            shapes |= {f"{block}.gamma": (d,), **_pair(f"{block}.conv_dw", d, 1, 7, 7)}
            shapes |= {**_pair(f"{block}.norm", d), **_pair(f"{block}.mlp.fc1", 4 * d, d)}
            shapes |= _pair(f"{block}.mlp.fc2", d, 4 * d)
    return _random({**shapes, **_pair("head.norm", dims[-1]), **_pair("head.fc", 5, dims[-1])})


def untrained(state: dict[str, torch.Tensor], part: str = "") -> None:
    """Set scales and shifts to what they begin with."""
    for key, value in state.items():
        if value.dim() == 1 and part in key:
            state[key] = torch.full_like(value, float(key.endswith(("weight", "running_var"))))


FILES |= {"vit.pth": _saved(vit), "convnext.pth": _saved(convnext)}


def words(keys: Mapping[str, object]) -> str:
    """`KEY VALUE` pairs of a command line."""
    return " ".join(f"{key} {shlex.quote(str(value))}" for key, value in keys.items())


def _converted(depth: int) -> Callable[[Path], object]:
    """Write a ResNet of a quarter of the width by the real conversion."""

    def make(path: Path) -> None:
        torch.save(own(depth=depth, base=16), path.with_suffix(".tar"))
        main(["convert", str(path.with_suffix(".tar")), str(path)])

    return make


def _small() -> dict[str, Any]:
    """Return a checkpoint of a small pre-training of this project."""
    content = own(depth=10, stem="stride2", base=8)
    return {**content, "num_images": 9, "seconds": 1.0, "config": {"AUG.CROP_PX": 16}}


def _inaturalist(folder: Path) -> None:
    """Three images for training and one for validation, and the lists of both."""
    categories = [{"id": number, "name": str(number)} for number in (7, 2)]
    numbers = {"train2018": (0, 1, 2), "val2018": (3,)}
    for name, images in numbers.items():
        content: dict[str, Any] = {"info": {}, "categories": categories}
        content["images"] = [{"id": i, "file_name": _of_inaturalist(i)} for i in images]
        kinds = [{"id": i, "image_id": i, "category_id": (7, 2)[i % 2]} for i in images]
        for i in images:
            path = folder / _of_inaturalist(i)
            path.parent.mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(path)
        (folder / f"{name}.json").write_text(json.dumps({**content, "annotations": kinds}))


def _of_inaturalist(number: int) -> str:
    return f"train_val2018/Plantae/{number}/x.png"


FILES |= {
    "moco.pth.tar": _saved(_small),
    "inat": _inaturalist,
    "r18.pth": _converted(18),
    "r50.pth": _converted(50),
    "coco": lambda path: write_coco(path.parent, {"train2017": 4, "val2017": 3}),
    "cityscapes": lambda path: write_cityscapes(path.parent, {"train": 4, "val": 2}),
    "VOC2007": lambda path: write_voc(path, {"trainval": 2, "test": 1}, names=VOC_NAMES),
    "VOC2012": lambda path: write_voc_seg(path.parent, {"train_aug": 4, "val": 3}),
    "one": lambda path: write_one(path),
    "set": lambda path: write_good(path),
}

SIZE = "<size><width>60</width><height>40</height><depth>3</depth></size>"


def box(*sides: object) -> str:
    tags = zip(("xmin", "ymin", "xmax", "ymax"), sides, strict=False)
    return f"<bndbox>{''.join(f'<{tag}>{side}</{tag}>' for tag, side in tags)}</bndbox>"


def obj(name: str = "red", inside: str = box(1, 1, 10, 10)) -> str:
    return f"<object><name>{name}</name>{inside}</object>"


def write_one(root: Path, body: str = SIZE + obj(), image: str = "1.jpg") -> Path:
    """Write a dataset of one image of 60x40 px whose annotation contains `body`."""
    for part in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / part).mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text("1\n")
    Image.new("RGB", (60, 40)).save(root / "JPEGImages" / image)
    (root / "Annotations" / "1.xml").write_text(f"<annotation>{body}</annotation>")
    return root
