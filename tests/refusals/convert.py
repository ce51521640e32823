"""What `convert` and `inspect` refuse: files that are no weights, networks that are not whole."""

import gzip
import io
import json
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision import models

from tests.oracles.checkpoints import caffe2, detectron2_layout
from tests.oracles.layouts_frameworks import wrapped
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


def several(state: dict[str, Any]) -> None:
    state["bn1.bias"] *= torch.nan
    state["layer4.1.bn1.weight"] = state["layer4.1.bn1.weight"][:3]


TENSORS = rows(
    OUT,
    (tensor("layer3.1.conv2.weight", None), r"missing: .*_q\.layer3\.1\.conv2\.weight'"),
    (tensor("bn1.running_mean", None), r"missing: 'module\.encoder_q\.bn1\.running_mean'"),
    (
        query(lambda s: s.update({"layer1.0.extra": torch.zeros(1)})),
        r"1 keys.*'module\.encoder_q\.layer1\.0\.extra'",
    ),
    (
        query(lambda s: s.update({"layer1.0.conv1.bias": torch.zeros(8)})),
        r"'module\.encoder_q\.layer1\.0\.conv1\.bias'",
    ),
    (
        query(lambda s: s.update({"layer4.2.conv1.weight": torch.ones(64, 64, 3, 3)})),
        r"\[2, 2, 2, 3\] basic blocks",
    ),
    *(
        (tensor(key, change), words)
        for key, change, words in (
            ("layer2.0.conv1.weight", lambda t: t.transpose(0, 1), r"\[8, 16, 3, 3\] where"),
            ("layer1.1.bn2.bias", lambda t: t[:4], r"shape \[4\] where \[8\].*layer1\.1\.bn2"),
            ("layer1.1.bn2.bias", lambda t: t.int(), r"int32 where torch\.float32"),
            ("conv1.weight", lambda t: t.cfloat(), r"complex64 where torch\.float32.*_q\.conv1"),
            ("layer4.0.conv1.weight", lambda t: t * torch.nan, r"NaN or Inf: .*layer4\.0\.conv1"),
            ("bn1.running_var", lambda t: t / 0, r"NaN or Inf: 'module\.encoder_q\.bn1\.running"),
            ("bn1.running_var", lambda t: -t, r"negative variance: 'module\.encoder_q\.bn1"),
            ("layer2.0.conv2.weight", torch.zeros_like, r"all zero: '.*_q\.layer2\.0\.conv2\.wei"),
            ("layer2.0.bn2.weight", torch.zeros_like, r"all zero: '.*_q\.layer2\.0\.bn2\.weight'"),
            ("layer2.0.bn2.weight", 3.0, "is a float, expected a tensor"),
            ("layer2.0.bn2.weight", lambda t: t.to_sparse(), "not a dense tensor"),
            ("layer2.0.bn2.weight", lambda t: t.to("meta"), "not a dense tensor"),
            ("conv1.weight", lambda t: t[:, :1], "takes 1 channels, expected 3"),
            ("conv1.weight", lambda t: t[..., :5, :5], "is 5x5, expected 7x7 or 3x3"),
            ("conv1.weight", lambda t: t[0], r"_q\.conv1\.weight' has shape .* 4 dimensions"),
            ("conv1.weight", lambda t: t[..., :3], r"\[8, 3, 7, 3\] where \[8, 3, 7, 7\]"),
            ("layer1.0.conv2.weight", lambda t: t[:0], r"layer1\.0\.conv2\.weight' has shape \[0,"),
            ("bn1.weight", torch.zeros(1).expand(2**40), "more elements than the file holds"),
        )
    ),
    (query(several), r"not a sound ResNet-18.*_q\.bn1\.bias'.*_q\.layer4\.1\.bn1\.weight'"),
    (query(untrained), r"all 20 batch norms .* never trained.* random"),
    code=3,
)


def without_query(content: dict[str, Any]) -> None:
    state = content["state_dict"]
    for key in [key for key in state if key.startswith("module.encoder_q.")]:
        del state[key]


def second(name: str = "") -> Edit:
    """Put another network beside the first two."""
    net = make_resnet(seed=7).state_dict()
    return torch_edit("official.pth", lambda c: c.update({name: net} if name else net))


NETWORKS = rows(
    OUT,
    (second("state_dict_ema"), "ambiguous.* --encoder with one of query, key, state_dict_ema$"),
    (second(), "ambiguous.* --encoder with one of query, key, single$"),
    (
        torch_edit("official.pth", without_query),
        r"no query encoder \(state_dict/encoder_q\.\*\).*--encoder key",
    ),
    (
        torch_edit("official.pth", lambda c: c.update(arch="resnet50")),
        "says arch 'resnet50', but its tensors are of ResNet-18",
    ),
    code=3,
)
OWN = rows(
    "convert own.pth out.pth",
    (lambda c: c.pop("encoder"), "damaged record.*encoder"),
    (lambda c: c["input"].pop("mean"), "damaged record.*mean"),
    (lambda c: c["input"].update(std=[0.2, 0.2]), "damaged record"),
    (lambda c: c["input"].update(mean=["a", "b", "c"]), "damaged record.*'a'"),
    (lambda c: c["input"].update(channel_order="XYZ"), "channel_order: got 'XYZ'"),
    (lambda c: c["encoder"].update(stem="vgg"), "stem: got 'vgg'"),
    (lambda c: c["encoder"].update(stem="cifar"), "says stem 'cifar', but .* is 7x7"),
    (lambda c: c["input"].update(std=[0, 0, 0]), "input.std"),
    (lambda c: c["encoder"].update(width=1.0), "says width 1.0, but .*conv1.weight' has 8"),
    (lambda c: c["encoder"].update(arch="resnet34"), "says arch 'resnet34'"),
    (lambda c: c.update(format="moco-transfer/9"), "format 'moco-transfer/9' is not known"),
    code=3,
    on=partial(torch_edit, "own.pth"),
)


def meta(name: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        shapes = models.get_model(name).state_dict()
    return {key: torch.tensor(1.0).expand(value.shape) for key, value in shapes.items()}


LENET = nn.Sequential(OrderedDict(conv1=nn.Conv2d(3, 6, 5))).state_dict()
OTHER = models.ResNet(models.resnet.BasicBlock, [1, 2, 1, 1], num_classes=2).state_dict()
OURS = {"backbone/" + key: value for key, value in make_resnet().state_dict().items()}
ZOO = {"model": {"stem.conv1.weight": ONE, "res2.0.conv1.weight": ONE}, "__author__": "ACME"}
# What it looks like → keys that say so.
LOOKALIKES = {
    "a ConvNeXt": "downsample_layers.0.0.weight stages.0.0.depthwise_conv.weight",
    "a RegNet": "stem.0.weight trunk_output.block1.block1-0.f.a.0.weight",
    "a RegNet.": "stem.conv.weight s1.b1.conv1.conv.weight",
    "MoCo v3's transformer": "patch_embed.proj.0.weight blocks.0.norm1.weight",
    "CLIP's ResNet": "visual.conv1.weight visual.conv3.weight visual.layer1.0.conv1.weight "
    "visual.attnpool.positional_embedding",
    "CLIP's vision": "visual.class_embedding visual.transformer.resblocks.0.ln_1.weight",
    "in transformers' names": "resnet.embedder.embedder.convolution.weight "
    "resnet.encoder.stages.0.layers.0.layer.0.convolution.weight",
}
DETECTORS = (
    "backbone.body. rpn.head.conv.0.0.weight roi_heads.box_head.fc6.weight",
    "backbone.body. head.classification_head.conv.0.0.weight",
    "backbone.0.body. class_embed.weight",
    "backbone. rpn_head.rpn_conv.weight",
)
IJEPA = ("patch_embed.proj.weight", "pos_embed", "blocks.0.norm1.weight")
IJEPAS, OTHERS = ({f"module.{k}": x * torch.ones(4, 3, 2, 2) for k in IJEPA} for x in (1, 2))


def detector(keys: str) -> dict[str, Tensor]:
    start, *heads = keys.split()
    return wrapped(make_resnet(), start) | {key: torch.ones(2, 2, 3, 3) for key in heads}


UNKNOWN = rows(
    "convert x.pth out.pth",
    *(
        (saved("x.pth", partial(meta, name)), r"unknown layout \(top level: 'features")
        for name in ("alexnet", "mobilenet_v3_small", "efficientnet_b0", "densenet121")
    ),
    (saved("x.pth", OTHER), r"\[1, 2, 1, 1\] basic blocks, not one of ResNet-\[10, 18, 34, 50, 1"),
    (saved("x.pth", LENET), "unknown layout"),
    (
        saved("x.pth", {"epoch": 1, "state_dict": OURS}),
        "unknown layout .*'epoch', 'state_dict'.*'backbone/conv1.weight'.*116 more.*docs/guides",
    ),
    (saved("x.pth", {"\x1b[31mred\n": ONE}), "unknown layout"),
    *(
        (saved("x.pth", value), "unknown layout")
        for value in ([], torch.ones(3), 7, "text", {}, {"state_dict": {}})
    ),
    (
        saved("x.pth", {"model": {"backbone.stem.conv1.weight": ONE}, "iteration": 9}),
        "a detection model.*--eval-only",
    ),
    (
        saved("x.pth", ZOO),
        "without an input contract.* give --mean --std --channel-order --stride-in-1x1 as its",
    ),
    *(
        (saved("x.pth", raw), f"unknown layout: .*{words.rstrip('.')}.*ResNets.*docs/guides")
        for words, keys in LOOKALIKES.items()
        for state in [{key: torch.ones(4, 3, 3, 3) for key in keys.split()}]
        for raw in (state, {"state_dict": state})
    ),
    *(
        (saved("x.pth", raw), "^(?!.*--eval-only).*a whole detector")
        for keys in DETECTORS
        for state in [detector(keys)]
        for raw in (state, {"model": state}, {"state_dict": state})
    ),
    (
        saved("x.pth", {"encoder": IJEPAS, "target_encoder": OTHERS}),
        "--encoder with one of encoder, target_encoder, and --num-heads",
    ),
    (folder_of("x.pth"), r"x\.pth: .*a folder"),
    (pipe("x.pth"), "is a pipe"),  # and does not wait for somebody who writes into it
    code=3,
)
CAFFE2 = {"conv1_w": np.ones(3), "res2_0_branch2a_w": np.ones(3)}


def blobs(change: Callable[[dict[str, Any]], object], **options: bool) -> Edit:
    def content() -> dict[str, Any]:
        made = caffe2(make_resnet(50), **options)
        change(made)
        return made

    return pickled("x.pkl", content)


def d2(change: Callable[[dict[str, Any]], object]) -> Edit:
    def content() -> dict[str, Any]:
        made = detectron2_layout(make_resnet(50))
        change(made["model"])
        return made

    return pickled("x.pkl", content)


PICKLES = rows(
    "convert x.pkl out.pth",
    (pickled("x.pkl", CAFFE2), r"Caffe2 weights, but not of MSRA's networks \('conv1_w'"),
    (pickled("x.pkl", {"blobs": CAFFE2, "cfg": "x"}), r"a detection model of Detectron \(Caffe2\)"),
    (
        blobs(lambda b: b.update(caffe2(make_resnet(50), folded=True))),
        "53 keys .*'res2_0_branch1_bn_s'",
    ),
    (
        blobs(lambda b: b.update(res3_1_branch2b_bn_running_mean=np.ones(16)), folded=True),
        "1 keys .*'res3_1_branch2b_bn_running_mean'",
    ),
    *(
        (blobs(change), words)
        for change, words in (
            (lambda b: b.pop("res4_1_branch2b_w"), r"missing: 'layer3\.1\.conv2\.weight'"),
            (lambda b: b.pop("res_conv1_bn_running_var"), r"missing: 'bn1\.running_var'"),
            (lambda b: b.pop("res5_2_branch2c_bn_beta"), r"missing: 'layer4\.2\.bn3\.bias'"),
            (lambda b: b.update(res2_0_branch2a_gn_s=np.ones(8)), "'res2_0_branch2a_gn_s'"),
            (lambda b: b.update(res2_00_branch2a_w=np.ones(8)), "'res2_00_branch2a_w'"),
            (lambda b: b.update(res2_0_branch2d_w=np.ones(8)), "'res2_0_branch2d_w'"),
            (lambda b: b.update(res2_0_branch2a_bn_riv=np.ones(8)), "'res2_0_branch2a_bn_riv'"),
            (lambda b: b.update(pred_w=np.ones(8)), "'pred_w'"),
            (lambda b: b.update(rpn_cls_logits_w=np.ones(8)), "'rpn_cls_logits_w'"),
            (lambda b: b.update(res2_0_branch2a_b=np.ones(8)), "'res2_0_branch2a_b' is not zero"),
            (lambda b: b.update(res2_0_branch2a_bn_b=np.ones(8)), "_branch2a_bn_b' is not zero"),
            (lambda b: b.update(conv1_w=b["conv1_w"] * np.nan), "NaN or Inf: 'conv1_w'"),
            (lambda b: b.update(conv1_w=b["conv1_w"].astype("i4")), "int32 where torch.float32"),
        )
    ),
    (
        d2(lambda m: m.pop("res3.0.shortcut.norm.running_mean")),
        r"missing: 'res3\.0\.shortcut\.norm\.running_mean'",
    ),
    (d2(lambda m: m.update({"proposal.weight": np.ones(1)})), r"1 keys .*'proposal\.weight'"),
    code=3,
)


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
# What people take for weights.
NO_WEIGHTS = (
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "this is a git-lfs pointer"),
    (b"epoch,loss\n1,2\n", "this is a text file"),
    ("Größe: 1\n".encode() * 99, "this is a text file"),
    (b"<!DOCTYPE html><html>", "this is a web page"),
    (b"\n<html><body>", "this is a web page"),
    (gzip.compress(b"x" * 100), "this is compressed by gzip"),
    (b"\xff\xd8\xff\xe0\x00\x10JFIF" + bytes(100), "this is a JPEG image"),
    (b"\x89PNG\r\n\x1a\n" + bytes(100), "this is a PNG image"),
    (b"\x89HDF\r\n\x1a\n" + bytes(100), "this is an HDF5 file"),
    (b"\x93NUMPY\x01\x00" + bytes(100), "this is one numpy array"),
    (zipped("conv1.weight.npy"), "this is an archive of numpy arrays"),
    (zipped("model.pth"), "this is a zip archive of other files: unpack it"),
    (zipped("folder/model.pth"), "this is a zip archive of other files: unpack it"),
    (tarred(), "this is a tar archive: unpack it"),
    (zipped("model.pth")[:-100], r"damaged \(cut off: copied or downloaded in part\?"),
    (torch_bytes()[:2000], r"damaged \(cut off: copied or downloaded in part\?"),
    (bytes(FLIPPED), r"damaged \(Bad CRC-32"),
    (torch_bytes() + b"more", r"weights\.file: "),
    *((content, r"weights\.file: ") for content in (b"", bytes(4096), b"PK\x03\x04" + bytes(4096))),
)
FILES = [
    row
    for command in ("convert weights.file out.pth", "inspect weights.file")
    for row in rows(
        command, *((text("weights.file", raw), words) for raw, words in NO_WEIGHTS), code=3
    )
]
INDEX = "model.safetensors.index.json"
PART = "model-00001-of-00002.safetensors"
BLOCKS = {f"blocks.{i}.norm1.weight": torch.ones(4) for i in range(2)}


def index(state: dict[str, str]) -> Edit:
    return text(INDEX, json.dumps({"metadata": {"total_size": 9}, "weight_map": state}))


def sharded(name: str) -> Edit:
    listed = dict.fromkeys(BLOCKS, name) | {"norm.weight": "model-00002-of-00002.safetensors"}
    return both(saved(name, BLOCKS), index(listed))


GIVE_INDEX = r"2 of the 3 tensors .* give model\.safetensors\.index\.json"
SHARDS = [
    *(
        row
        for command in (f"convert {INDEX} out.pth", f"inspect {INDEX}")
        for row in rows(command, (index({"a": PART}), f"{PART} is not beside it"), code=3)
    ),
    *rows(f"convert {PART} out.pth", (saved(PART, BLOCKS), "part 1 of 2; give the index"), code=3),
    *(
        row
        for name in (PART, "renamed.pth")
        for row in rows(f"convert {name} out.pth", (sharded(name), GIVE_INDEX), code=3)
    ),
]
CONVENTION = {
    "--mean": "103.53 116.28 123.675",
    "--std": "1 1 1",
    "--channel-order": "BGR",
    "--stride-in-1x1": "yes",
}
OPTIONS = [
    *rows(
        "convert",
        ("official.pth", "INPUT and OUTPUT are needed"),
        ("--inspect official.pth official.pth", "--inspect"),
        ("official.pth out.pth --no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("plain.pth out.pth --encoder key", "--encoder key: .* torchvision .* with one network"),
        ("plain.pth out.pth --stem cifar", "--stem cifar: .*can only have imagenet"),
        ("own.pth out.pth --stem cifar", "--stem cifar: .*can only have imagenet"),
        ("official.pth out.pth --mean 0.485 0.456 0.406", r"pixel_mean.*scale 0\.\.1"),
        ("official.pth out.pth --stride-in-1x1 yes", "ResNet of basic blocks, without 1x1"),
        ("official.pth official.pth", "is the input itself"),
        ("official.pth plain.pth", "not the output of an earlier conversion.*"),
        ("official.pth images", r"must end in \.pth or \.pkl or \.safe"),
        *(
            (f"official.pth {n}", r"must end in \.pth or \.pkl or \.safe")
            for n in ("out", "out.pt")
        ),
        *((f"official.pth out.{n}", r"must end in \.pth or \.") for n in ("PTH", "pth.tar")),
        ("official.pth out.pkl --to torchvision", r"for torchvision must end in \.pth or \.safet"),
        ("official.pth out.pth --to caffe", "--to: invalid choice: 'caffe'"),
        ("vit.pth out.pth", "--num-heads"),
        ("vit.pth out.pth --num-heads 5", "--num-heads 5"),
        ("vit.pth out.pth --num-heads 3 --stem cifar", "--stem: .*--num-heads"),
        ("vit.pth out.pth --num-heads 3 --to torchvision", "--to torchvision"),
    ),
    *rows(
        "convert vit.pth out.pth --num-heads 3",
        ("--image-size 18", "--image-size 18.*patch size 4"),
        ("--image-size 4096", "--image-size 4096"),
        ("--patch-size 0", "--patch-size 0"),
        ("--patch-size 100", "--patch-size 100"),
        ("--patch-rule bicubic", "--patch-rule.*--patch-size"),
        ("--patch-rule best --patch-size 8", "best.*pseudo-inverse.*bicubic"),
        ("--fold-layer-scale yes", "--fold-layer-scale.*no LayerScale"),
    ),
    *rows(
        OUT,
        (lambda at: (at / "out.pth").mkdir(), "is a folder"),
        (lambda at: (at / "out.pth").symlink_to(at / "official.pth"), "is the input itself"),
        (lambda at: (at / "out.pth").hardlink_to(at / "official.pth"), "is the input itself"),
        (text("out.pth", "chapter 1"), "not the output of an earlier conversion"),
    ),
    *rows("convert nowhere.pth out.pth", ("", "nowhere.pth: does not exist"), code=3),
    *rows("inspect nowhere.pth", ("", "nowhere.pth: does not exist"), code=3),
    *rows("convert images out.pth", ("", "a folder without checkpoint"), code=3),
    *rows(
        "convert x.pkl out.pth --to torchvision",
        (blobs(lambda b: None), "torchvision has no such network"),
    ),
]
# Of nobody's weights the convention is given whole.
ACME = saved("acme.pth", lambda: detectron2_layout(make_resnet(50), author="ACME"))
for flag in CONVENTION:
    given = " ".join(f"{name} {value}" for name, value in CONVENTION.items() if name != flag)
    words = f"without an input contract.* give {flag} as its"
    OPTIONS += rows(f"convert acme.pth out.pth {given}", (ACME, words), code=3)


def vit_update(**changes: Tensor) -> Edit:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return torch_edit("vit.pth", lambda state: state.update(named))


FAMILIES = [
    *rows(
        "convert vit.pth out.pth --num-heads 3",
        (torch_edit("vit.pth", lambda s: s.pop("pos_embed")), "pos_embed"),
        (vit_update(pos_embed=torch.ones(1, 15, 24)), "15 positions"),
        (vit_update(patch_embed__proj__weight=torch.ones(24, 1, 4, 4)), "RGB"),
        (torch_edit("vit.pth", lambda s: s.pop("blocks.1.mlp.fc2.bias")), r"blocks\.1\.mlp\.fc2"),
        (torch_edit("vit.pth", lambda s: untrained(s, ".norm")), "never trained"),
        code=3,
    ),
    *rows(
        "convert convnext.pth out.pth",
        (lambda s: s.update({"stem.2.weight": torch.ones(8)}), "stem.2.weight"),
        (lambda s: s.pop("stages.1.blocks.0.conv_dw.weight"), r"stages\.1\.blocks\.0\.con"),
        (lambda s: [s.pop(k) for k in list(s) if "stages.1.blocks.0" in k], "stages.1.bl"),
        (lambda s: [s.pop(k) for k in list(s) if "stages.3" in k], r"stages\.3\.blocks\.0"),
        (lambda s: s.update({"stem.0.weight": torch.ones(8, 3, 2, 2)}), "stem.0.weight"),
        (lambda s: s.pop("stages.2.blocks.0.norm.bias"), "stages.2.blocks.0.norm.bias"),
        (untrained, "never trained"),
        code=3,
        on=partial(torch_edit, "convnext.pth"),
    ),
]
CONVERT: list[Row] = [*TENSORS, *NETWORKS, *OWN, *UNKNOWN, *PICKLES, *FILES, *SHARDS, *OPTIONS]
CONVERT += FAMILIES
