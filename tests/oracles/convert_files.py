"""The files that the converter is held to (tests/golden/convert_verdicts.yaml): what it takes.

Nothing here shares a table with convert/. What it refuses is in convert_hostile.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moco.common.files import load_torch
from tests.oracles import layouts, layouts_lightning, layouts_vit
from tests.oracles.checkpoints import caffe2, detectron2_layout, official, own
from tests.oracles.layouts import wrapped
from tests.oracles.layouts_projects import LAYOUTS, made
from tests.oracles.resnets import headless, make_resnet, sgd_state


@dataclasses.dataclass(frozen=True)
class File:
    """A generated file and how it is converted.

    Attributes:
        content: Function that returns what torch.save saves, bytes to write as they are, or a
            function that writes the file.
        options: Options of convert_file.
        name: File name, which by default does not identify the content.
        sidecars: Names of files next to it -> their text.
        pickled: Protocol of pickle, instead of torch.save.
        needs: Packages that are required for the file or its verdict.
    """

    content: Callable[[], Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = "some.file"
    sidecars: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pickled: int | None = None
    needs: tuple[str, ...] = ()

    def write(self, folder: Path) -> tuple[Path, Any]:
        """Write the file; return its path and its content, to look up where tensors came from."""
        for name, text in self.sidecars.items():
            (folder / name).write_text(text)
        path, content = folder / self.name, self.content()
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif callable(content) and not isinstance(content, nn.Module):
            content(path)
            content = load_torch(path, set())
        elif self.pickled is not None:
            path.write_bytes(pickle.dumps(content, self.pickled))
        else:
            with layouts.pickles_as_main(), layouts.pickles_as_mmengine():
                torch.save(content, path)
        return path, content


def resnet(prefix: str = "", **kwargs: Any) -> dict[str, Tensor]:
    """Return a plain state dict."""
    return {prefix + key: value for key, value in make_resnet(**kwargs).state_dict().items()}


def without(state: Mapping[str, Any], *starts: str) -> dict[str, Any]:
    """Return a state without the keys that start like this."""
    return {key: value for key, value in state.items() if not key.startswith(starts)}


def changed(checkpoint: dict[str, Any], key: str, **values: Any) -> dict[str, Any]:
    """Replace values in one dict of a checkpoint; None removes, and `__` stands for a dot."""
    part = {**checkpoint[key], **{name.replace("__", "."): v for name, v in values.items()}}
    return {**checkpoint, key: {name: v for name, v in part.items() if v is not None}}


def self_supervised() -> dict[str, File]:
    """Return checkpoints of the projects' own code."""
    files = {name: File(lambda name=name: made(name).checkpoint) for name in LAYOUTS}
    linear = functools.partial(resnet, depth=50)
    return files | {
        "moco v1": File(lambda: official(1)),
        "moco v2": File(official),
        "moco v2, BGR": File(official, {"channel_order": "BGR"}),
        "moco v2, pixels given": File(
            official, {"mean": [1, 2, 3], "std": [4, 5, 6], "channel_order": "BGR"}
        ),
        "moco, unknown arch": File(lambda: {**official(), "arch": "rn18"}),
        "moco, the key encoder alone": File(
            lambda: {
                **official(),
                "state_dict": without(official()["state_dict"], "module.encoder_q."),
            },
            {"encoder": "key"},
        ),
        "moco, the CIFAR notebook": File(lambda: made("cifar notebook").checkpoint),
        "moco, one of three": File(
            lambda: {**official(), "another": resnet("module.", seed=7)}, {"encoder": "another"}
        ),
        "dino, the student alone": File(
            lambda: without(made("dino").checkpoint, "teacher"), {"encoder": "student"}
        ),
        "simclr v1 without fc": File(
            lambda: {"state_dict": without(made("simclr v1").checkpoint["state_dict"], "fc.")}
        ),
        "statistics after all weights": File(
            lambda: dict(make_resnet().named_parameters()) | dict(make_resnet().named_buffers())
        ),
        "mm's configuration agrees": File(
            lambda: {"meta": {"config": _MM_RGB}, "state_dict": linear("backbone.")}
        ),
        "mm's configuration in 0..1": File(
            lambda: {"meta": {"cfg": _MM_UNIT}, "state_dict": linear("backbone.")}
        ),
        "mm's caffe style, given": File(
            lambda: {"meta": {"cfg": _MM_CAFFE}, "state_dict": linear("backbone.")},
            {"mean": [1, 2, 3], "std": [1, 1, 1], "channel_order": "BGR", "stride_in_1x1": True},
        ),
    }


def our_own() -> dict[str, File]:
    """Return files that moco/ and convert/ write."""
    files = {
        f"own, {stem} stem": File(lambda stem=stem: own(stem=stem))
        for stem in ("imagenet", "cifar", "stride2")
    }
    return files | {
        "own, ResNet-10 of 24 channels": File(lambda: own(depth=10, base=24)),
        "own, ResNet-50": File(lambda: own(depth=50)),
        "own classifier": File(_own_classifier),
        "converted": File(lambda: converted(official, {})),
        "converted, the key encoder": File(lambda: converted(official, {"encoder": "key"})),
        "converted, pixels given": File(lambda: converted(official, {}), {"mean": [1, 2, 3]}),
    }


def plain() -> dict[str, File]:
    """Return state dicts of no particular project, and what training scripts save with them."""
    net = make_resnet()
    optimizer = sgd_state(net)
    moments = {key: {"exp_avg": torch.ones_like(v)} for key, v in net.named_parameters()}
    files = {
        "torchvision": File(resnet),
        "torchvision, ResNet-50 without fc": File(lambda: headless(50).state_dict()),
        "numpy": File(lambda: {key: value.numpy() for key, value in resnet().items()}, pickled=5),
        "CIFAR stem": File(lambda: resnet(stem="cifar")),
        "3x3 stem of stride 2": File(lambda: resnet(stem="stride2"), {"stem": "stride2"}),
        "pytorch's tutorial": File(
            lambda: {
                "epoch": 5,
                "model_state_dict": net.state_dict(),
                "optimizer_state_dict": optimizer,
                "loss": torch.tensor(0.4, requires_grad=True),
            }
        ),
        "optimizer by names": File(
            lambda: {"model": resnet(), "o": {"state": moments, "param_groups": [{"lr": 0.1}]}}
        ),
        "optimizer in a dict": File(lambda: {"state_dict": resnet(), "g": {"sgd": optimizer}}),
        "optimizer in a list": File(lambda: {"state_dict": resnet(), "solver": [optimizer]}),
        "a dense head": File(
            lambda: {"state_dict": resnet() | {"dense.0.weight": torch.ones(16, 64, 1, 1)}}
        ),
        "leftthomas/SimCLR": File(lambda: _simclr_numbered()),
        "kuangliu/pytorch-cifar": File(
            lambda: {
                "net": {
                    key.replace("downsample", "shortcut").replace("fc.", "linear."): value
                    for key, value in resnet("module.", stem="cifar").items()
                },
                "acc": 95.4,
            }
        ),
        "lucidrains/ema-pytorch": File(
            lambda: {
                "ema": resnet("online_model.")
                | resnet("ema_model.", seed=1)
                | {"initted": torch.tensor([True]), "step": torch.tensor([3])}
            }
        ),
        "objects of any class": File(
            lambda: {
                **official(),
                "criterion": nn.CrossEntropyLoss(torch.ones(3)),
                "args": argparse.Namespace(lr=0.03),
                "window": slice(0, 2),
            }
        ),
        "marks of another type": File(
            lambda: {"state_dict": resnet(), "format": torch.ones(3), "more": torch.ones(1)}
        ),
        "lightning's encoders": File(
            lambda: {
                "pytorch-lightning_version": "1.0",
                "state_dict": resnet("encoder_q.") | resnet("encoder_k.", seed=1),
            },
            {"encoder": "state_dict.encoder_q"},
        ),
        "names that a terminal acts on": File(
            lambda: {"a\x1b[31m": resnet(), "b": resnet(seed=1)}, {"encoder": "b"}
        ),
        "two networks, one named": File(
            lambda: {"net": {"a": resnet(), "b": resnet(seed=1)}}, {"encoder": "net.b"}
        ),
        "one batch norm moved": File(lambda: _almost_untrained()),
        "half precision": File(
            lambda: {k: v.half() if v.is_floating_point() else v for k, v in resnet().items()}
        ),
        "double precision": File(
            lambda: {k: v.double() if v.is_floating_point() else v for k, v in resnet().items()}
        ),
        "zero biases": File(
            lambda: changed(official(), "state_dict", module__encoder_q__bn1__bias=torch.zeros(8))
        ),
    }
    files |= {
        "an unknown prefix": File(lambda: {"weights": resnet("trunk.of.someone.")}),
        "SimCLR v2's names under another prefix": File(
            lambda: {
                "net": {
                    f"encoder.{key}": value
                    for key, value in made("simclr v2").checkpoint["resnet"].items()
                }
            }
        ),
        "one network under two names": File(
            lambda: {"state_dict": resnet("backbone.") | resnet("features.0.")}
        ),
        "mmengine's average of anyone's network": File(
            lambda: {
                "meta": {"epoch": 3},
                "ema_state_dict": resnet("encoder.", seed=1),
                "state_dict": resnet("encoder."),
            }
        ),
        "Lightning's average of anyone's network": File(
            lambda: {
                "pytorch-lightning_version": "2.6.6",
                "current_model_state": resnet("model.net.", seed=1),
                "state_dict": resnet("model.net."),
                "averaging_state": {"n_averaged": torch.tensor(3)},
            }
        ),
    }
    for name, value in SIDECARS.items():
        for kind, make in (("official", official), ("plain", resnet)):
            files[f"{kind} and {name}"] = File(
                lambda make=make, name=name, value=value: {**make(), name: value}
            )
    for wrapper in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        files[f"under {wrapper}"] = File(
            lambda wrapper=wrapper: {"state_dict": resnet("module." + wrapper)}
        )
    for prefix in ("backbone.", "model.net.", ""):
        numbered = nn.Sequential(*list(headless().children())[:-1])
        files[f"numbered under {prefix!r}"] = File(
            lambda prefix=prefix, numbered=numbered: wrapped(
                numbered, prefix, container="resnet18_parameters"
            )
        )
    for model, average in (
        ("state_dict", "state_dict_ema"),
        ("state_dict", "ema_state_dict"),
        ("model", "model_ema"),
        ("model", "ema"),
        ("net", "swa"),
    ):
        files[f"{average} beside {model}"] = File(
            lambda model=model, average=average: {
                average: resnet("module.", seed=1),
                model: resnet("module."),
                "best_acc1": torch.tensor(1.0),
            }
        )
    return files


SIDECARS = {
    "best_acc1": torch.tensor(71.5),
    "rng": torch.zeros(5056, dtype=torch.uint8),
    "cuda_rng_state": [torch.zeros(16, dtype=torch.uint8)],
    "best_prec1": torch.tensor(71.5),
    "class_weights": torch.ones(10),
    "keys": torch.ones(16, 32),
    "metrics": {"top1": torch.tensor(1.0), "confusion": torch.ones(10, 10)},
    "samples": torch.ones(4, 3, 8, 8),
    "head": {"weight": torch.ones(10, 64), "bias": torch.ones(10)},
    "shadow": [torch.ones(8, 3, 7, 7)],  # torch_ema: tensors without names
}


def of_detectron2() -> dict[str, File]:
    """Return files that Detectron2 publishes, and that its converters write."""
    r50 = functools.partial(make_resnet, 50)
    files = {
        "MSRA": File(lambda: caffe2(r50()), pickled=2),
        "MSRA, folded": File(lambda: caffe2(r50(), folded=True), pickled=2),
        "MSRA, with its author": File(
            lambda: {"model": caffe2(r50()), "__author__": "Caffe2"}, pickled=5
        ),
        "MSRA, zero biases and doubles": File(
            lambda: {
                **caffe2(r50()),
                "conv1_b": caffe2(r50())["conv1_b"] * 0,
                "res2_0_branch2a_b": caffe2(r50())["conv1_b"] * 0,
                "res2_0_branch2a_w_momentum": caffe2(r50())["conv1_b"],
                "conv1_w": caffe2(r50())["conv1_w"].astype("f8"),
            },
            pickled=2,
        ),
        "nobody's, all given": File(
            lambda: detectron2_layout(r50(), author="ACME"),
            {"mean": [103.53, 116.28, 123.675], "std": [1, 1, 1]}
            | {"channel_order": "BGR", "stride_in_1x1": True},
        ),
    }
    for author in (
        "torchvision",
        "MOCO",
        "OpenSelfSup",
        "MMSelfSup",
        "Yonglong",
        "solo-learn",
    ):
        files[f"author {author}"] = File(
            lambda author=author: detectron2_layout(make_resnet(), author)
        )
    return files


def by_packages() -> dict[str, File]:
    """Return files that lightly, Lightning and timm write themselves."""
    lightly, vits = layouts_lightning.lightly, layouts_vit.lightly
    kinds = ("moco example", "dino example", "smog example", "vicregl example")
    files = {
        f"lightly, {kind}": File(
            lambda kind=kind: functools.partial(lightly, kind), needs=("lightly",)
        )
        for kind in (*kinds, "swav", "simclr", "mocov2", "byol", "dino")
    }
    files |= {
        f"lightly, ViT by {kind}": File(
            lambda kind=kind: functools.partial(vits, kind, 384, 6), needs=("lightly",)
        )
        for kind in ("dino", "ibot", "mae", "msn example")
    }
    files["lightly's own ResNet"] = File(
        lambda: layouts_lightning.lightly_own_resnet, needs=("lightly",)
    )
    for ema in (False, True):
        files[f"timm's saver, ema {ema}"] = File(
            lambda ema=ema: lambda path: layouts_lightning.timm_saver(path.parent, ema=ema),
            name="last.pth.tar",
        )
    return files


_MM_RGB = (
    "img_norm_cfg = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True)"
)
_MM_UNIT = "img_norm_cfg = dict(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])"
_MM_CAFFE = "model = dict(backbone=dict(type='ResNet', depth=50, style='caffe'))"


def converted(make: Callable[[], Any], options: Mapping[str, Any]) -> Callable[[Path], None]:
    """Return a function that writes the conversion of `make()`."""
    from convert.convert_to_d2 import convert_file

    def write(path: Path) -> None:
        source, result = path.with_name("source"), path.with_name("result.pth")
        torch.save(make(), source)
        convert_file(source, result, **options)
        result.rename(path)

    return write


def _own_classifier() -> dict[str, Any]:
    checkpoint = own()
    state = {
        key.replace("encoder_q.", ""): value
        for key, value in checkpoint["state_dict"].items()
        if key.startswith("module.encoder_q.")
    }
    return {**checkpoint, "state_dict": state, "format": "moco-transfer-classifier/1"}


def _simclr_numbered() -> dict[str, Any]:
    """Numbered children without a max-pool, and a projection."""
    net = make_resnet(stem="cifar")
    children = [m for n, m in net.named_children() if n not in ("maxpool", "fc")]
    return wrapped(nn.Sequential(*children), "f.") | {"g.0.weight": torch.ones(16, 64)}


def _almost_untrained() -> dict[str, Tensor]:
    net = untrained()
    net.bn1.running_mean[0] = 0.5
    return net.state_dict()


def untrained() -> Any:
    """Return a ResNet whose batch norms are as initialized."""
    net = make_resnet()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
    return net
