"""Refusals of `convert` and `inspect`: files without weights, options, damaged networks.

tests/golden/convert_verdicts.yaml has the verdicts on all damaged networks. The rows here check
for each kind that the command prints the verdict and leaves no file.
"""

import gzip
import io
import json
import tarfile
import zipfile
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.oracles.checkpoints import caffe2
from tests.oracles.refused_files import (
    Edit,
    both,
    folder_of,
    pickled,
    pipe,
    query,
    saved,
    tensor,
    text,
    torch_edit,
    untrained,
)
from tests.oracles.resnets import make_resnet
from tests.refusals.rows import Row, rows

OUT = "convert official.pth out.pth"
ONE = torch.ones(1)
ZOO = {"model": {"stem.conv1.weight": ONE, "res2.0.conv1.weight": ONE}, "__author__": "ACME"}


def several(state: dict[str, Any]) -> None:
    state["bn1.bias"] *= torch.nan
    state["layer4.1.bn1.weight"] = state["layer4.1.bn1.weight"][:3]


def folded_and_not() -> dict[str, Any]:
    content = caffe2(make_resnet(50), folded=True)
    return content | {"res3_1_branch2b_bn_running_mean": np.ones(16)}


NETWORKS = [
    *rows(
        OUT,
        (tensor("layer3.1.conv2.weight", None), r"missing: .*_q\.layer3\.1\.conv2\.weight'"),
        (query(several), r"not a sound ResNet-18.*_q\.bn1\.bias'.*_q\.layer4\.1\.bn1\.weight'"),
        (query(untrained), r"all 20 batch norms .* never trained.* random"),
        (
            torch_edit("official.pth", lambda c: c.update(ema=make_resnet(seed=7).state_dict())),
            "ambiguous.* --encoder with one of query, key, ema$",
        ),
        code=3,
    ),
    *rows(
        "convert own.pth out.pth",
        (lambda c: c["input"].pop("mean"), "damaged record.*mean"),
        (lambda c: c.update(format="moco-transfer/9"), "unsupported format 'moco-transfer/9'"),
        code=3,
        on=partial(torch_edit, "own.pth"),
    ),
    *rows(
        "convert x.pth out.pth",
        (saved("x.pth", {"\x1b[31mred\n": ONE}), "unknown layout"),
        (saved("x.pth", [ONE]), "unknown layout"),
        (
            saved("x.pth", {"model": {"backbone.stem.conv1.weight": ONE}, "iteration": 9}),
            "a detection model.*--eval-only",
        ),
        (saved("x.pth", ZOO), "without an input contract.* give --mean --std --channel-order"),
        (folder_of("x.pth"), r"x\.pth: .*a folder"),
        (pipe("x.pth"), "is a pipe"),  # It does not block on the pipe.
        code=3,
    ),
    *rows(
        "convert x.pkl out.pth",
        (pickled("x.pkl", {"conv1_w": np.ones(3)}), r"x\.pkl: "),
        (pickled("x.pkl", folded_and_not), "1 keys .*'res3_1_branch2b_bn_running_mean'"),
        code=3,
    ),
    *rows(
        "convert vit.pth out.pth --num-heads 3",
        (torch_edit("vit.pth", lambda s: s.pop("pos_embed")), "pos_embed"),
        code=3,
    ),
    *rows(
        "convert vit.pth out.pth",
        (
            torch_edit("vit.pth", lambda s: s.update(arch="unheard_of")),
            "transformer named 'unheard_of' of width .*--num-heads",
        ),
        code=2,
    ),
    *rows(
        "convert convnext.pth out.pth",
        (
            torch_edit("convnext.pth", lambda s: s.pop("stages.2.blocks.0.norm.bias")),
            "stages.2.blocks.0.norm.bias",
        ),
        code=3,
    ),
]


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, bytes(1000))
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("model.pth"))
    return buffer.getvalue()


def torch_bytes() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(1000)}, buffer)
    return buffer.getvalue()


FLIPPED = bytearray(torch_bytes())
FLIPPED[len(FLIPPED) // 2] ^= 1
# Files that users mistake for weights.
NO_WEIGHTS = (
    (b"epoch,loss\n1,2\n", "this is a text file"),
    ("Größe: 1\n".encode() * 99, "this is a text file"),
    (b"\n<html><body>", "this is a web page"),
    (gzip.compress(b"x" * 100), "this is compressed by gzip"),
    (b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(100), "this is a JPEG image"),
    (b"\x89PNG\r\n\x1a\n" + bytes(100), "this is a PNG image"),
    (b"\x89HDF\r\n\x1a\n" + bytes(100), "this is an HDF5 file"),
    (b"\x93NUMPY\x01\x00" + bytes(100), "this is one numpy array"),
    (zipped("conv1.weight.npy"), "this is an archive of numpy arrays"),
    (zipped("model.pth"), "this is a zip archive of other files: unpack it"),
    (tarred(), "this is a tar archive: unpack it"),
    (zipped("model.pth")[:-100], r"damaged \(cut off: copied or downloaded in part\?"),
    (torch_bytes()[:2000], r"damaged \(cut off: copied or downloaded in part\?"),
    (bytes(FLIPPED), r"damaged \(Bad CRC-32"),
    (torch_bytes() + b"more", r"weights\.file: "),
    *((content, r"weights\.file: ") for content in (b"", bytes(4096), b"PK\x03\x04" + bytes(4096))),
)
FILES = [
    row
    for command, step in (("convert weights.file out.pth", 1), ("inspect weights.file", 5))
    for row in rows(
        command, *((text("weights.file", raw), words) for raw, words in NO_WEIGHTS[::step]), code=3
    )
]
INDEX = "model.safetensors.index.json"
PART = "model-00001-of-00002.safetensors"
BLOCKS = {f"blocks.{i}.norm1.weight": torch.ones(4) for i in range(2)}


def sharded(name: str) -> Edit:
    listed = dict.fromkeys(BLOCKS, name) | {"norm.weight": "model-00002-of-00002.safetensors"}
    content = {"metadata": {"total_size": 9}, "weight_map": listed}
    return both(saved(name, BLOCKS), text(INDEX, json.dumps(content)))


GIVE_INDEX = r"2 of the 3 tensors .* give model\.safetensors\.index\.json"
SHARDS = [
    row
    for name in (PART, "renamed.pth")
    for row in rows(f"convert {name} out.pth", (sharded(name), GIVE_INDEX), code=3)
]
OPTIONS = [
    *rows(
        "convert",
        ("official.pth", "required: OUTPUT"),
        ("official.pth out.pth --no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("plain.pth out.pth --encoder key", "--encoder key: .*torchvision.* a single network"),
        ("plain.pth out.pth --stem cifar", "--stem cifar: .*can only have imagenet"),
        ("own.pth out.pth --stem cifar", "--stem cifar: .*can only have imagenet"),
        ("official.pth out.pth --mean 0.485 0.456 0.406", r"pixel_mean.*scale 0\.\.1"),
        ("official.pth out.pth --stride-in-1x1 yes", "ResNet of basic blocks, which have no 1x1"),
        ("official.pth official.pth", "output is the input file"),
        ("official.pth plain.pth", "not the output of an earlier conversion.*"),
        ("official.pth images", r"must end in \.pth or \.pkl or \.safe"),
        *(
            (f"official.pth out{n}", r"must end in \.pth or \.pkl or \.safe")
            for n in ("", ".pt", ".PTH", ".pth.tar")
        ),
        ("official.pth out.pkl --to torchvision", r"for torchvision must end in \.pth or \.safet"),
        ("official.pth out.pth --to caffe", "--to: invalid choice: 'caffe'"),
        ("vit.pth out.pth", "--num-heads"),
        ("vit.pth out.pth --num-heads 3 --stem cifar", "--stem: .*--num-heads"),
        ("vit.pth out.pth --num-heads 3 --to torchvision", "--to torchvision"),
    ),
    *rows(
        OUT,
        (lambda at: (at / "out.pth").mkdir(), "is a folder"),
        (lambda at: (at / "out.pth").symlink_to(at / "official.pth"), "output is the input file"),
        (lambda at: (at / "out.pth").hardlink_to(at / "official.pth"), "output is the input file"),
        (text("out.pth", "chapter 1"), "not the output of an earlier conversion"),
    ),
    *rows("convert nowhere.pth out.pth", ("", "nowhere.pth: does not exist"), code=3),
    *rows("inspect nowhere.pth", ("", "nowhere.pth: does not exist"), code=3),
    *rows("convert images out.pth", ("", "a folder without weights"), code=3),
    *rows(
        "convert x.pkl out.pth --to torchvision",
        (pickled("x.pkl", lambda: caffe2(make_resnet(50))), "torchvision has no such network"),
    ),
]
CONVERT: list[Row] = [*NETWORKS, *FILES, *SHARDS, *OPTIONS]
