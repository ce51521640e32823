"""Facts that a record states about a network, and how each is accounted for.

A recorded fact is like a tensor: it is compared with the recognized network, it is known to change
no feature, or the file is refused by its name. `COMPARED` and `NO_EFFECT` are the tables, one per
kind of record; docs/reference/recorded-facts.md is written from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from convert.families.resnet import NUM_BLOCKS, is_bottleneck
from convert.families.swin import LAYER_NORM_EPS, PATCH_PX
from convert.families.timm import WITHOUT_EFFECT
from convert.families.vit import ACTIVATIONS, THETA
from moco.common.errors import DataError, format_value

if TYPE_CHECKING:
    from torch import Tensor

# Kinds of records.
TRANSFORMERS, OPEN_CLIP, MM, TIMM = "transformers", "open_clip", "OpenMMLab", "timm"


@dataclasses.dataclass(frozen=True)
class Fits:
    """Several values of a fact that are right for a network.

    Attributes:
        expected: Description of these values.
        accepts: Function that returns whether a recorded value, any value of JSON, is one of them.
    """

    expected: Any
    accepts: Callable[[Any], bool]


# Map from (architecture, tensors) to the right value of a fact, or to `Fits`.
Fact = Callable[[Any, "Mapping[str, Tensor]"], Any]


def _field(name: str) -> Fact:
    """Return a fact that equals a field of the architecture."""
    return lambda its, state: getattr(its, name)


def _constant(value: Any) -> Fact:
    return lambda its, state: value


# Facts that change no feature of a kind of network: with any value, and only without a value.
ANY = _constant(Fits("any", lambda value: True))
EMPTY = _constant(Fits("none", lambda value: not value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _ratio(width: Callable[[Any], int], hidden: Callable[[Any, Mapping[str, Tensor]], int]) -> Fact:
    """Return the fact of an MLP's width, recorded as a multiple of the network's width."""

    def fact(its: Any, state: Mapping[str, Tensor]) -> Fits:
        real, base = hidden(its, state), width(its)
        gated = getattr(its, "swiglu", False)

        def accepts(value: Any) -> bool:
            if not (_is_number(value) and 0 < value < 100):
                return False
            count = int(base * value)
            # DINOv2's giant: transformers models/dinov2/modeling_dinov2.py, Dinov2SwiGLUFFN.
            return real == ((int(count * 2 / 3) + 7) // 8 * 8 if gated else count)

        return Fits(f"{real / base:g}", accepts)

    return fact


def _bias(part: int) -> Fact:
    """Return the fact whether queries, keys or values have a bias; zeros count as both."""

    def fact(its: Any, state: Mapping[str, Tensor]) -> Fits:
        joined = state.get("blocks.0.attn.qkv.bias")
        has_one = joined is not None and bool(joined.chunk(3)[part].any())
        return Fits(has_one, lambda value: value is True or (value is False and not has_one))

    return fact


def _image_size(its: Any, state: Mapping[str, Tensor]) -> Any:
    """Return the fact of the image size, which need not be a multiple of the patch size."""
    if its.rotary:
        return Fits("any", lambda value: True)
    fitting = range(its.image_size, its.image_size + its.patch_size)
    return Fits(its.image_size, lambda value: any(v in fitting for v in _one_of_two(value)))


def _one_of_two(value: Any) -> list[Any]:
    """Return the side of a square, which is recorded as one number or as height and width."""
    if isinstance(value, list):
        value = value[0] if len(value) == 2 and value[0] == value[1] else None
    return [value] if type(value) is int else []


def _activation(its: Any, state: Mapping[str, Tensor]) -> Any:
    """Return the fact of the activation; DINOv2's gated MLPs have SiLU with any record."""
    if its.swiglu:
        return "silu" if its.rotary else Fits("any", lambda value: isinstance(value, str))
    return next(name for name, own in ACTIVATIONS.items() if own == its.activation)


def _square(side: Fact) -> Fact:
    """Return a fact that may be recorded as height and width."""

    def fact(its: Any, state: Mapping[str, Tensor]) -> Fits:
        own = side(its, state)
        return Fits(own, lambda value: own in _one_of_two(value))

    return fact


def _scale(its: Any, state: Mapping[str, Tensor]) -> Fits:
    """Return the fact of LayerScale's initial value; 0 and null mean no LayerScale."""
    own = its.layer_scale
    return Fits(
        "a number above 0" if own else "0 or null",
        lambda value: (value is None or _is_number(value)) and (bool(value) and value > 0) == own,
    )


_VIT: dict[str, Fact] = {
    "hidden_size": _field("embed_dim"),
    "num_hidden_layers": _field("depth"),
    "num_attention_heads": _field("num_heads"),
    "intermediate_size": _field("mlp_dim"),
    "mlp_ratio": _ratio(lambda its: its.embed_dim, lambda its, state: its.mlp_dim),
    "hidden_act": _activation,
    "layer_norm_eps": _field("layer_norm_eps"),
    "patch_size": _square(_field("patch_size")),
    "image_size": _image_size,
    "num_patches": lambda its, state: (its.image_size // its.patch_size) ** 2,
    "num_channels": _constant(3),
    "num_register_tokens": lambda its, state: its.registers or max(its.tokens - 1, 0),
    "qkv_bias": _field("qkv_bias"),
    "query_bias": _bias(0),
    "key_bias": _bias(1),
    "value_bias": _bias(2),
    "proj_bias": _constant(True),
    "mlp_bias": _constant(True),
    "use_swiglu_ffn": _field("swiglu"),
    "use_gated_mlp": _field("swiglu"),
    "rope_theta": _constant(THETA),
    # Values before and during training.
    **dict.fromkeys(("layerscale_value", "pos_embed_jitter", "pos_embed_rescale"), ANY),
    **dict.fromkeys(("pos_embed_shift", "use_mask_token", "mask_ratio"), ANY),
    # Parts after the blocks, or beside them.
    **dict.fromkeys(("encoder_stride", "pooler_act", "pooler_output_size"), ANY),
    **dict.fromkeys(("projection_dim", "vision_use_head", "norm_pix_loss"), ANY),
    **dict.fromkeys(("decoder_hidden_size", "decoder_intermediate_size"), ANY),
    **dict.fromkeys(("decoder_num_attention_heads", "decoder_num_hidden_layers"), ANY),
}
_RESNET: dict[str, Fact] = {
    "depths": lambda its, state: list(NUM_BLOCKS[its.depth]),
    "embedding_size": _field("stem_out_channels"),
    "hidden_sizes": lambda its, state: [its.res2_out_channels * 2**i for i in range(4)],
    "layer_type": lambda its, state: "bottleneck" if is_bottleneck(its.depth) else "basic",
    "hidden_act": _constant("relu"),
    "downsample_in_first_stage": _constant(False),
    "downsample_in_bottleneck": _field("stride_in_1x1"),
    "num_channels": _constant(3),
}
_SWIN: dict[str, Fact] = {
    "embed_dim": _field("embed_dim"),
    "hidden_size": lambda its, state: its.dims[-1],
    "depths": lambda its, state: list(its.depths),
    "num_heads": lambda its, state: list(its.num_heads),
    "num_layers": _constant(4),
    "window_size": _field("window_size"),
    "patch_size": _constant(PATCH_PX),
    "num_channels": _constant(3),
    "mlp_ratio": _ratio(
        lambda its: its.embed_dim,
        lambda its, state: state["layers.0.blocks.0.mlp.fc1.weight"].shape[0],
    ),
    "qkv_bias": _field("qkv_bias"),
    "hidden_act": _constant("gelu"),
    "layer_norm_eps": _constant(LAYER_NORM_EPS),
    "use_absolute_embeddings": _constant(False),
    # Maps may have any size; `path_norm` is in Microsoft's files, and no code reads it.
    **dict.fromkeys(("image_size", "encoder_stride", "path_norm"), ANY),
}
_CONVNEXT: dict[str, Fact] = {
    "depths": lambda its, state: list(its.depths),
    "hidden_sizes": lambda its, state: list(its.dims),
    "num_stages": _constant(4),
    "patch_size": _constant(4),
    "num_channels": _constant(3),
    "hidden_act": _constant("gelu"),
    "layer_scale_init_value": _scale,
    "image_size": ANY,
    "layer_norm_eps": ANY,  # of the final norm, which no detector has
}
_OPEN_CLIP: dict[str, Fact] = {
    "width": _field("embed_dim"),
    "layers": _field("depth"),
    "head_width": lambda its, state: its.embed_dim // its.num_heads,
    "mlp_ratio": _ratio(lambda its: its.embed_dim, lambda its, state: its.mlp_dim),
    "patch_size": _square(_field("patch_size")),
    "image_size": _image_size,
    "ls_init_value": lambda its, state: Fits(
        "a number" if its.layer_scale else "null", lambda value: its.layer_scale
    ),
    "no_ln_pre": lambda its, state: not its.pre_norm,
    "quick_gelu": lambda its, state: its.activation == "quick_gelu",
    **dict.fromkeys(("act_kwargs", "norm_kwargs"), EMPTY),
    # Attention of other kinds, with or without further tensors.
    **dict.fromkeys(("qk_norm", "scaled_cosine_attn", "scale_heads"), _constant(False)),
    **dict.fromkeys(("scale_attn_inner", "scale_attn", "scale_fc"), _constant(False)),
    "block_type": _constant(Fits("default", lambda value: value in (None, "default", "custom"))),
    # Positions are in the file, whatever they were computed from.
    **dict.fromkeys(("pos_embed_type", "patch_dropout"), ANY),
    # Parts after the blocks.
    **dict.fromkeys(("attentional_pool", "attn_pooler_queries", "attn_pooler_heads"), ANY),
    **dict.fromkeys(("final_ln_after_pool", "pool_type", "output_tokens"), ANY),
}
# Of OpenMMLab's ResNet (mmdetection mmdet/models/backbones/resnet.py, mmpretrain mmpretrain/models/
# backbones/resnet.py).
_MM_RESNET: dict[str, Fact] = {
    "type": lambda its, state: "ResNet" if its.num_groups == 1 else "ResNeXt",
    "depth": _field("depth"),
    "groups": _field("num_groups"),
    "base_channels": lambda its, state: its.res2_out_channels // (4 if _deep(its) else 1),
    "stem_channels": _field("stem_out_channels"),
    "in_channels": _constant(3),
    "num_stages": _constant(4),
    "strides": _constant(Fits([1, 2, 2, 2], lambda value: list(value) == [1, 2, 2, 2])),
    "dilations": _constant(Fits([1, 1, 1, 1], lambda value: list(value) == [1] * 4)),
    "style": lambda its, state: Fits(
        "caffe" if its.stride_in_1x1 else "pytorch",
        lambda value: value == ("caffe" if its.stride_in_1x1 else "pytorch") or not _deep(its),
    ),
    **dict.fromkeys(("deep_stem", "avg_down"), _constant(False)),
    "norm_cfg": _constant(
        Fits(
            "BN of eps 1e-5",
            lambda value: (
                value.get("type") in ("BN", "SyncBN", "naiveSyncBN", "MMSyncBN")
                and value.get("eps", 1e-5) == 1e-5
            ),
        )
    ),
    **dict.fromkeys(("conv_cfg", "dcn", "plugins"), EMPTY),
    "act_cfg": _constant(Fits("ReLU", lambda value: value.get("type") == "ReLU")),
    "stage_with_dcn": _constant(Fits("none", lambda value: not any(value))),
    **dict.fromkeys(("base_width", "width_per_group"), _field("width_per_group")),
    "expansion": lambda its, state: 4 if _deep(its) else 1,
    **dict.fromkeys(("out_indices", "frozen_stages", "norm_eval", "with_cp"), ANY),
    **dict.fromkeys(("zero_init_residual", "pretrained", "init_cfg", "drop_path_rate"), ANY),
    "contract_dilation": ANY,  # of stages with a dilation
}


def _deep(its: Any) -> bool:
    return is_bottleneck(its.depth)


# Facts by kind of record and of network: the family's name, or a type of transformers that differs
# from its family; "" has the facts of all networks.
COMPARED: dict[str, dict[str, dict[str, Fact]]] = {
    TRANSFORMERS: {
        "": {"pruned_heads": EMPTY},
        # The name is compared with timm's network, see `convert.families.timm.check_names`.
        "timm_backbone": {
            **dict.fromkeys(("backbone", "features_only", "use_pretrained_backbone"), ANY),
            **dict.fromkeys(("freeze_batch_norm_2d", "use_timm_backbone"), ANY),
            "num_channels": _constant(3),
            "in_chans": _constant(3),
            "output_stride": _constant(32),
        },
        "vit": _VIT,
        "resnet": _RESNET,
        "swin": _SWIN,
        "convnext": _CONVNEXT,
        "dinov3_convnext": {**_CONVNEXT, "layer_norm_eps": _field("layer_norm_eps")},
    },
    OPEN_CLIP: {
        "vit": _OPEN_CLIP,
        # With timm_model_name, which takes the place of the others.
        "timm": dict.fromkeys(
            (
                *("timm_model_name", "timm_model_pretrained", "timm_pool", "timm_proj"),
                *("timm_proj_bias", "timm_drop", "timm_drop_path", "patch_dropout"),
                *("image_size", "patch_size", "width", "layers", "head_width", "mlp_ratio"),
            ),
            ANY,
        ),
    },
    MM: {"resnet": _MM_RESNET},
}
# Facts that change no feature of any network, in eval mode.
NO_EFFECT: dict[str, frozenset[str]] = {
    TRANSFORMERS: frozenset(
        (
            # the class and its heads
            *("architectures", "id2label", "label2id", "num_labels", "problem_type", "model_type"),
            *("classifier_dropout", "semantic_loss_ignore_index", "finetuning_task"),
            # dropout and initial values
            *("attention_dropout", "attention_probs_dropout_prob", "dropout", "drop_path_rate"),
            *("hidden_dropout_prob", "initializer_factor", "initializer_range"),
            # outputs
            *("apply_layernorm", "out_features", "out_indices", "output_attentions"),
            *("output_hidden_states", "reshape_hidden_states", "return_dict", "stage_names"),
            # execution
            *("chunk_size_feed_forward", "dtype", "gradient_checkpointing", "torch_dtype"),
            *("attn_implementation", "use_bfloat16", "use_cache", "torchscript"),
            # origin
            *("name_or_path", "transformers_version", "revision"),
            # text generation, which transformers 4 writes for every network
            *("add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "bos_token_id"),
            *("cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty"),
            *("do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id"),
            *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"),
            *("is_decoder", "is_encoder_decoder", "length_penalty", "max_length", "min_length"),
            *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences"),
            *("output_scores", "pad_token_id", "prefix", "remove_invalid_values"),
            *("repetition_penalty", "return_dict_in_generate", "sep_token_id"),
            *("suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss"),
            *("tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p"),
            *("typical_p",),
        )
    ),
    OPEN_CLIP: frozenset(),
    MM: frozenset(),
    # Arguments of timm's `create_model`; all others are given to timm, whose signatures decide.
    TIMM: WITHOUT_EFFECT,
}


def known_facts(kind: str, family: str, model_type: str = "") -> dict[str, Fact]:
    """Return the facts that a kind of record may state about a network of a family."""
    tables = COMPARED[kind]
    return {**tables.get("", {}), **tables.get(model_type or family, tables.get(family, {}))}


def check_facts(
    kind: str,
    facts: Mapping[str, Any],
    network: tuple[str, Any, Mapping[str, Tensor]],
    where: str,
) -> None:
    """Account for every fact of a record.

    A value of None stands for the default of the code that reads the record.

    Args:
        kind: Kind of the record, a key of `COMPARED`.
        facts: The record: values by name.
        network: Family of the recognized network, its architecture, and its tensors by the
            family's names.
        where: Name of the record, for messages.

    Raises:
        DataError: If a fact contradicts the network, or its effect is not known.
    """
    family, architecture, state = network
    known = known_facts(kind, family, facts.get("model_type", ""))
    for name, value in facts.items():
        if value is None or name in NO_EFFECT[kind] or str(name).startswith("_"):
            continue
        plain = isinstance(value, list) and len(value) < 9 and all(type(v) is int for v in value)
        got = value if plain else format_value(value)
        if name not in known:
            raise DataError(
                f"{where} has {format_value(name)} {got}, whose effect is not known here; "
                "remove it from the record if it changes no feature"
            )
        expected = known[name](architecture, state)
        fits = expected if isinstance(expected, Fits) else _equal(expected)
        if not _accepts(fits, value):
            raise DataError(f"{where} has {name} {got}, but its tensors have {fits.expected}")


def _equal(expected: Any) -> Fits:
    return Fits(expected, lambda value: bool(value == expected))


def _accepts(fits: Fits, value: Any) -> bool:
    """Return whether a value fits; values of another type do not."""
    try:
        return fits.accepts(value) is True
    except (AttributeError, TypeError, ValueError, OverflowError):
        return False
