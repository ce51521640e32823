"""Tiny checkpoints of vision transformers in the layouts of the projects that write them.

Networks are timm's or torchvision's own classes, nested as the project nests them; the code that
writes each dict is cited next to it. Nothing here shares a table with convert/.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer

from tests.oracles.layouts_lightning import lightning_module, write_lightning

WIDTH, DEPTH, HEADS, MLP, PATCH, IMAGE = 24, 2, 3, 48, 4, 16


def randomize(net: nn.Module, seed: int) -> nn.Module:
    """Replace every parameter of a network by random numbers, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return net


def timm_vit(seed: int, width: int = WIDTH, heads: int = HEADS, **others: Any) -> nn.Module:
    """Timm's own class, which facebookresearch's projects copied."""
    from timm.models.vision_transformer import VisionTransformer as Timm

    settings = {"num_classes": 0, "mlp_ratio": MLP / WIDTH, "depth": DEPTH}
    settings |= {"img_size": IMAGE, "patch_size": PATCH} | others
    net = Timm(embed_dim=width, num_heads=heads, **settings)
    return randomize(net, seed)


def torchvision_vit(seed: int, width: int = WIDTH, heads: int = HEADS) -> VisionTransformer:
    """Torchvision's own class."""
    net = VisionTransformer(IMAGE, PATCH, DEPTH, heads, width, MLP, num_classes=5)
    randomize(net, seed)
    return net.eval()


def _under(start: str, **parts: nn.Module) -> dict[str, Tensor]:
    state = nn.ModuleDict(parts).state_dict()
    return {start + key: value for key, value in state.items()}


def ibot(width: int, heads: int) -> dict[str, Any]:
    """bytedance/ibot@564f363 main_ibot.py, train_ibot: only the student is under DDP."""
    student, teacher = (timm_vit(seed, width, heads) for seed in (0, 1))
    student.register_parameter("masked_embed", nn.Parameter(torch.randn(1, width)))
    head = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(width, 8)), "last_layer": nn.Linear(8, 4)})
    return {
        "student": _under("module.", backbone=student, head=head),
        "teacher": _under("", backbone=teacher, head=head),
        "optimizer": torch.optim.AdamW(student.parameters()).state_dict(),
        "epoch": 5,
        "args": {"arch": "vit_small"},
        "ibot_loss": {"center": torch.zeros(1, 4), "center2": torch.zeros(1, 1, 4)},
        "fp16_scaler": {"scale": 65536.0},
    }


def msn(width: int, heads: int) -> dict[str, Any]:
    """facebookresearch/msn@db0d572 src/msn_train.py, save_checkpoint and init_model."""
    nets = [timm_vit(seed, width, heads) for seed in (0, 1)]
    for net in nets:
        net.fc = nn.Sequential()
        for name in ("fc1", "fc2", "fc3"):
            net.fc.add_module(name, nn.Linear(width, width))
    encoder, target = (_under("", module=net) for net in nets)
    return {
        "encoder": encoder,
        "opt": torch.optim.AdamW(nets[0].parameters()).state_dict(),
        "prototypes": torch.randn(8, 4),
        "target_encoder": target,
        "epoch": 5,
        "loss": 1.0,
        "batch_size": 32,
        "world_size": 1,
        "lr": 1e-3,
        "temperature": 0.1,
    }


def chunked(state: dict[str, Tensor], size: int = 1) -> dict[str, Tensor]:
    """Names of facebookresearch/dinov2@02eb93a models/vision_transformer.py, BlockChunk."""
    new = {}
    for key, value in state.items():
        start, word, rest = key.partition("blocks.")
        number = rest.split(".")[0]
        new[f"{start}blocks.{int(number) // size}.{rest}" if word else key] = value
    return new


def dinov2(
    width: int, heads: int, *, in_chunks: bool, registers: int = 0, **others: Any
) -> dict[str, Any]:
    """facebookresearch/dinov2@02eb93a dinov2/train/train.py, do_test."""
    net = timm_vit(1, width, heads, init_values=1e-5, **others)
    if registers:
        net.register_parameter("register_tokens", nn.Parameter(torch.ones(1, registers, width)))
    net.register_parameter("mask_token", nn.Parameter(torch.zeros(1, width)))
    state = _under("", backbone=net, dino_head=nn.Linear(4, 4), ibot_head=nn.Linear(4, 4))
    return {"teacher": chunked(state) if in_chunks else state}


# Arguments of timm's class for its DINOv3 networks, apart from sizes; timm/models/eva.py.
DINOV3: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 4,
    "num_classes": 0,
    "global_pool": "",
    "embed_dim": 64,
    "depth": 2,
    "num_heads": 4,
    "mlp_ratio": 1.5,
    "swiglu_align_to": 8,
    "init_values": 1e-5,
    "num_reg_tokens": 4,
    "use_abs_pos_emb": False,
    "use_rot_pos_emb": True,
    "rope_type": "dinov3",
    "rope_temperature": 100,
    "rope_rotate_half": True,
    "use_fc_norm": False,
    "dynamic_img_size": True,
    "norm_layer": functools.partial(nn.LayerNorm, eps=1e-5),
}


def timm_dinov3(*, gated: bool = False, qkv_bias: bool = False, **changes: Any) -> nn.Module:
    """Timm's own class of DINOv3's transformers."""
    from timm.models.eva import Eva

    net = Eva(**{**DINOV3, "swiglu_mlp": gated, "qkv_bias": qkv_bias, **changes})
    return randomize(net, 0).eval()


def dinov3_state(net: nn.Module) -> dict[str, Tensor]:
    """facebookresearch/dinov3 dinov3/models/vision_transformer.py: names of a network without bias.

    Biases are zero where the mask is not, as in the published networks.
    """
    state = {re.sub(r"gamma_(\d)", r"ls\1.gamma", k): v for k, v in net.state_dict().items()}
    width = state["cls_token"].shape[2]
    state["storage_tokens"] = state.pop("reg_token")
    state["mask_token"] = torch.zeros(1, width)
    for key in [key for key in state if key.endswith("attn.qkv.weight")]:
        mask = torch.ones(3 * width)
        mask[width : 2 * width] = 0
        state[key.replace("weight", "bias")] = 1 - mask
        state[key.replace("weight", "bias_mask")] = mask
    rope: Any = net.get_submodule("rope")
    state["rope_embed.periods"] = rope.periods.bfloat16()
    return state


def dinov3(width: int, heads: int) -> dict[str, Any]:
    """facebookresearch/dinov3 dinov3/train/train.py, do_test (teacher_checkpoint.pth)."""
    state = dinov3_state(timm_dinov3(embed_dim=width, num_heads=heads))
    heads_of = _under("", dino_head=nn.Linear(4, 4), ibot_head=nn.Linear(4, 4))
    return {"teacher": {f"backbone.{name}": x for name, x in state.items()} | heads_of}


def solo_mae(width: int, heads: int) -> dict[str, Any]:
    """vturrisi/solo-learn@9187ea3 solo/methods/mae.py in Lightning's dict."""
    decoder = nn.ModuleDict({"decoder_embed": nn.Linear(4, 4), "decoder_pred": nn.Linear(4, 4)})
    decoder.register_parameter("mask_token", nn.Parameter(torch.ones(1, 1, 4)))
    parts = {"backbone": timm_vit(0, width, heads), "classifier": nn.Linear(4, 4)}
    state = _under("", **parts, decoder=decoder)
    return {"state_dict": state, "pytorch-lightning_version": "2.1.2", "epoch": 5}


def lightly(kind: str, width: int, heads: int, path: Path) -> None:
    """Write a checkpoint of a LightningModule with lightly's real backbones.

    lightly-ai/lightly benchmarks/imagenet/vitb16/{dino,ibot,mae}.py and
    examples/pytorch_lightning/msn.py.
    """
    from lightly.models import modules
    from lightly.models.modules.masked_autoencoder import MAEBackbone, MAEDecoder

    def linear() -> nn.Module:
        return nn.Linear(4, 4)

    def masked(seed: int) -> nn.Module:
        net = modules.MaskedVisionTransformerTIMM(vit=timm_vit(seed, width, heads))
        return randomize(net, seed)

    def masked_torchvision(seed: int) -> nn.Module:
        vit = torchvision_vit(seed, width, heads)
        return randomize(modules.MaskedVisionTransformerTorchvision(vit=vit), seed)

    parts: dict[str, nn.Module] = {
        "dino": lambda: {
            "backbone": masked(0),
            "projection_head": linear(),
            "student_backbone": masked(1),
            "student_projection_head": linear(),
        },
        "ibot": lambda: {
            "teacher_backbone": masked(0),
            "student_backbone": masked(1),
            "student_head": linear(),
            "student_cls_head": linear(),
            "teacher_patch_head": linear(),
            "cls_criterion": linear(),
        },
        "mae": lambda: {
            "backbone": randomize(MAEBackbone.from_vit(torchvision_vit(0, width, heads)), 0),
            "decoder": MAEDecoder(17, 1, 1, width, 8, 8, 48),
            "online_classifier": linear(),
        },
        "msn example": lambda: {
            "backbone": masked_torchvision(0),
            "projection_head": linear(),
            "anchor_backbone": masked_torchvision(1),
            "anchor_projection_head": linear(),
        },
    }[kind]()
    write_lightning(lightning_module(parts), path)


class _ClipBlock(nn.Module):
    def __init__(self, activation: nn.Module, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, MLP))
        self.mlp.add_module("gelu", activation)
        self.mlp.add_module("c_proj", nn.Linear(MLP, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        y = x + self.mlp(self.ln_2(x))
        return y


class ClipTower(nn.Module):
    """An image tower whose parts have the names of openai/CLIP and open_clip.

    openai/CLIP@d05afc4 clip/model.py, mlfoundations/open_clip@89fb801 src/open_clip/transformer.py.
    """

    def __init__(self, activation: nn.Module, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, PATCH, PATCH, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.positional_embedding = nn.Parameter(torch.zeros(1 + (IMAGE // PATCH) ** 2, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.proj = nn.Parameter(torch.zeros(width, 7))
        blocks = [_ClipBlock(activation, width, heads) for _ in range(DEPTH)]
        self.transformer = nn.ModuleDict({"resblocks": nn.Sequential(*blocks)})

    def forward(self, image: Tensor) -> Tensor:
        """Return the tokens after the last block: (N, 3, H, W) -> (N, 1 + h w, C)."""
        x = self.conv1(image).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(x), 1, -1)
        x = self.ln_pre(torch.cat([first, x], dim=1) + self.positional_embedding)
        x = self.transformer["resblocks"](x)
        return x


def two_towers(tower: nn.Module) -> dict[str, Tensor]:
    """Return a state dict of openai/CLIP or open_clip: this image tower and a text tower."""
    text = nn.ModuleDict(
        {
            "token_embedding": nn.Embedding(9, 8),
            "ln_final": nn.LayerNorm(8),
            "transformer": nn.ModuleDict(
                {"resblocks": nn.ModuleList([nn.ModuleDict({"ln_1": nn.LayerNorm(8)})])}
            ),
        }
    )
    others = {"positional_embedding": torch.ones(5, 8), "text_projection": torch.ones(8, 7)}
    others["logit_scale"] = torch.ones(())
    return {**_under("", visual=tower), **text.state_dict(), **others}
