"""What transformers' architectures call the pieces that are needed of them, and how each applies them.

A head meets three pieces of its target: embedding, final norm and output head. Architectures scale the first and the
last, and norm in their own ways; `target_parts` folds that in, so that for every target

    state 0 = embed[token] (+ a position's row, where positions are learnt)
    logits  = cap(lm_head · norm(state n)),   cap(x) = c · tanh(x / c) where the architecture has one, else x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import DraftsmithError
from .base import TargetParts
from .weights import PLAIN


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an answer, as the model and its tokenizer name them."""
    found: list[int] = []
    for value in (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        model.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token not in found:
                found.append(token)
    return found


def text_decoder(model: Any) -> Any:
    """The text decoder of a causal model; Llama-4's says that it is its own."""
    body = model.get_decoder()
    return model.model if body is model else body


# What architectures call their list of decoder layers and the norm behind it.
_LAYERS, _NORMS = ("layers", "h", "blocks"), ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f")


def layers_and_norm(body: Any, n_layers: int) -> tuple[nn.ModuleList, Any]:
    """A text decoder's list of layers and the norm behind it; raises DraftsmithError where there is none."""
    body = getattr(body, "decoder", body)  # OPT
    layers = next((x for x in (getattr(body, name, None) for name in _LAYERS) if x is not None), None)
    norm = next((x for x in (getattr(body, name, None) for name in _NORMS) if x is not None), None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != n_layers or norm is None:
        raise DraftsmithError(
            f"{type(body).__name__} has no plain list of decoder layers followed by a norm; "
            "this model can't be a target yet"
        )
    return layers, norm


def context(config: Any) -> tuple[int, str]:
    """Most positions of a sequence, and why they are fewer than the model's own.

    Rope types that choose their angles by the longest sequence of a pass are kept on the near side of the boundary:
    beyond it, every key that is cached already would have to be computed again.
    """
    most = getattr(config, "max_position_embeddings", None) or 2**31  # none: positions without a limit (ALiBi)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(r for r in rope.values() if isinstance(r, dict))):  # one, or one for each kind of layer
        if one.get("rope_type") in ("longrope", "dynamic"):
            near = one.get("original_max_position_embeddings") or most
            reason = (
                f" (up to there its {one['rope_type']!r} rope keeps one set of angles; the model's own limit is {most})"
            )
            return min(most, near), reason
    return most, ""


@dataclass(frozen=True)
class Conventions:
    """How an architecture applies its embedding, final norm and output head.

    Attributes:
        embed_scale: of the embedding's rows; rounded: it is a number of the model's dtype before it multiplies.
        norm: kind of the final norm; norm_eps: its epsilon.
        norm_shift: what is added to the stored norm weight; norm_weight: there is a stored one.
        rounded_late: an RMSNorm's weight multiplies before the state is rounded to the model's dtype, not behind it.
        logit_scale: of the logits before they are capped; softcap: c of cap(x), None where nothing is capped.
    """

    embed_scale: float
    rounded: bool
    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_shift: float
    norm_weight: bool
    rounded_late: bool
    logit_scale: float
    softcap: float | None


# What a config says by the names of its fields: factors of the embedding and of the logits, and their exponents.
_EMBED_FACTORS = ("embedding_multiplier", "scale_emb")
_LOGIT_FACTORS = {"logit_scale": 1, "logits_scaling": -1}
_EPSILONS: tuple[tuple[str, Literal["rms", "layer"]], ...] = (
    ("rms_norm_eps", "rms"), ("layer_norm_eps", "layer"), ("layer_norm_epsilon", "layer"), ("norm_epsilon", "layer"),
    ("norm_eps", "layer"),
)  # fmt: skip

# What configs don't say, by model_type.
_GEMMA = ("gemma", "gemma2", "gemma3_text", "vaultgemma")
_SQRT_SCALED = {*_GEMMA, "gemma4_text"}
_ROUNDED = {*_SQRT_SCALED, "minicpm3"}
_SHIFTED = {*_GEMMA, "nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
_ROUNDED_LATE = {
    *_SQRT_SCALED, "afmoe", "flex_olmo", "gpt_oss", "helium", "olmo2", "olmo3", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text",
}  # fmt: skip
_WEIGHTLESS = {"olmo"}
_LAYER_NORMED = {"phimoe"}  # its epsilon is called that of an RMSNorm
_LOGITS_MULTIPLIED = {"hyperclovax"}  # by what the other configs of that name divide by
_FIXED_EPSILON = {"olmo": 1e-5, "opt": 1e-5}


def conventions(config: Any) -> Conventions:
    """Read a transformers text config; raises DraftsmithError where it names no epsilon of a norm."""
    kind: str = config.model_type
    scale = config.hidden_size**0.5 if kind in _SQRT_SCALED else 1.0
    for name in _EMBED_FACTORS:
        scale *= _factor(config, name)
    logits = 1.0
    for name, power in _LOGIT_FACTORS.items():
        logits *= _factor(config, name) ** (1 if kind in _LOGITS_MULTIPLIED else power)
    norm, eps = _epsilon(config)
    return Conventions(
        embed_scale=scale,
        rounded=kind in _ROUNDED,
        norm="layer" if kind in _LAYER_NORMED else norm,
        norm_eps=eps,
        norm_shift=1.0 if kind in _SHIFTED else 0.0,
        norm_weight=kind not in _WEIGHTLESS,
        rounded_late=kind in _ROUNDED_LATE,
        logit_scale=logits,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _factor(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    return 1.0 if value is None else float(value)


def _epsilon(config: Any) -> tuple[Literal["rms", "layer"], float]:
    for name, kind in _EPSILONS:
        if (value := getattr(config, name, None)) is not None:
            return kind, float(value)
    if config.model_type in _FIXED_EPSILON:
        return "layer", _FIXED_EPSILON[config.model_type]
    raise DraftsmithError(
        f"the config of {config.model_type!r} names no epsilon of a norm ({', '.join(n for n, _ in _EPSILONS)}): "
        "which norm stands before its output head is unknown, so it can't be trained for"
    )


def plain_weight(module: Any, what: str) -> Tensor:
    """The weight of an embedding or output head, de-quantised where its tensor class can do that.

    Raises:
        DraftsmithError: there is no matrix of plain numbers.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and type(weight) not in (Tensor, nn.Parameter) and weight.is_floating_point():
        weight = weight.dequantize()
    if not isinstance(weight, Tensor) or weight.dtype not in PLAIN:
        raise DraftsmithError(
            f"the {what} of this target is quantised in a form that heads can't read: keep it out of the quantisation"
        )
    return weight


def refuse_bias(bias: Tensor | None, config: Any) -> None:
    """Refuse an output head with a bias, for which draft heads have no place."""
    if bias is not None:
        raise DraftsmithError(
            f"targets of type {config.model_type!r} whose output head adds a bias can't be trained for: draft heads "
            "read out without one"
        )


_FUSED = {
    "self_attn.qkv_proj.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}


def last_layer(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """A decoder layer's tensors as a plain layer has them, for heads that start from it.

    Norm weights become those that multiply. Where a norm behind attention has the name that others give to the one
    before the MLP (Gemma-2's), the latter takes it. Matrices that are stored as one (Phi-3's) become their parts.
    """
    shift = conventions(config).norm_shift
    shifted = {name for name, x in tensors.items() if shift and name.endswith("norm.weight")}
    found = {name: x.float() + shift if name in shifted else x for name, x in tensors.items()}
    before_mlp = found.pop("pre_feedforward_layernorm.weight", None)
    if before_mlp is not None:
        found["post_attention_layernorm.weight"] = before_mlp
    heads = config.num_attention_heads
    queries = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    for whole, names in _FUSED.items():
        if (fused := found.pop(whole, None)) is not None:
            first = queries if len(names) == 3 else len(fused) // 2  # keys and values share what is left
            rest = (len(fused) - first) // (len(names) - 1)
            found |= dict(zip(names, fused.split([first] + [rest] * (len(names) - 1)), strict=True))
    return found


def target_parts(
    embed: Tensor, lm_head: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, config: Any
) -> TargetParts:
    """Fold what an architecture does to its pieces into them.

    Args:
        embed: [V, H] as stored, in the dtype of the model; lm_head: [V, H] as stored.
        norm_weight, norm_bias: [H] of the final norm as stored, None where it has none.
        config: the model's text config.

    Raises:
        DraftsmithError: embedding and output head aren't both H wide, or the norm isn't what the config says.
    """
    how = conventions(config)
    shape = (lm_head.shape[0], config.hidden_size)
    if lm_head.shape != shape or embed.ndim != 2 or embed.shape[1] != config.hidden_size:
        raise DraftsmithError(
            f"targets of type {config.model_type!r} with an embedding of {list(embed.shape)} and an output head of "
            f"{list(lm_head.shape)} can't be trained for: both must hold rows of hidden_size {config.hidden_size} "
            "(if they are quantised, keep them out of it)"
        )
    if (norm_weight is None) == how.norm_weight:
        raise DraftsmithError(
            f"the final norm of type {config.model_type!r} has {'no' if norm_weight is None else 'a'} weight, which "
            "is not what models of that type have: it can't be trained for"
        )
    weight = embed.new_ones(config.hidden_size) if norm_weight is None else norm_weight
    if how.norm_shift:  # LayerNorms of that kind add in the model's dtype; others wider: bf16 would round 1 + w
        wide = torch.promote_types(weight.dtype, torch.float32) if how.norm == "rms" else weight.dtype
        weight = weight.to(wide) + how.norm_shift
    factor = torch.tensor(how.embed_scale, dtype=embed.dtype) if how.rounded else how.embed_scale
    return TargetParts(
        embed if how.embed_scale == 1.0 else embed * factor,
        lm_head if how.logit_scale == 1.0 else lm_head * how.logit_scale,
        weight,
        how.norm_eps,
        norm=how.norm,
        norm_bias=norm_bias,
        softcap=how.softcap,
        rounded_late=how.rounded_late,
    )
