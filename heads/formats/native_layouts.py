"""Where models keep MTP modules of their own, and what those compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import DraftsmithError
from ..blocks import layer_parts
from ..blocks_parts import Part, plain
from ..config import layer_values
from ..mtp_modules import MtpConfig


@dataclass(frozen=True)
class Layout:
    """One model family's.

    Attributes:
        model_types: of the text config; config_type: whose config reads it, where transformers has none of its own.
        module: beginning of the names of module i's decoder layer; n is the number of the target's layers.
        outer: a module's other tensors by our names.
        copies: the target's embedding and output rows, written once more into each module; no module has its own.
        beginning: pattern of the names that belong to modules; its group, where it has one, is the layer's number.
        count_key: the config's number of modules, 1 where it is left out; most: modules that the names leave room for.
        gemma: norms multiply by 1 + w.
        gate: attention has an output gate.
        experts: options of a mixture of experts, from the config.
        served: most tokens that engines draft with its modules; None = as many as they are told.
    """

    name: str
    model_types: tuple[str, ...]
    module: str
    outer: dict[str, str]
    beginning: str
    concat_order: Literal["embed_first", "hidden_first"]
    count_key: str
    experts: Callable[[Any], dict[str, Any]]
    copies: tuple[tuple[str, str], ...] = ()
    most: int | None = None
    gemma: bool = False
    gate: bool = False
    config_type: str | None = None
    served: int | None = None

    def prefix(self, index: int, n_layers: int) -> str:
        """Beginning of the names of one module's decoder layer."""
        return self.module.format(i=index, n=n_layers + index)

    @property
    def mark(self) -> re.Pattern[str]:
        """Names that only a module's tensors have, whichever module's."""
        found = [x.replace("{module}", self.module) for ours, x in self.outer.items() if ours != "input_layernorm"]
        return re.compile("|".join(re.sub(r"\\\{[in]\\\}", r"\\d+", re.escape(x)) for x in found))

    def parts(self, config: MtpConfig, names: Collection[str]) -> list[Part]:
        """All tensors of a head in a checkpoint that has tensors of these names."""
        found: list[Part] = []
        for i in range(config.modules):
            prefix, ours = self.prefix(i, config.target_layers), "" if config.modules == 1 else f"depths.{i}."
            for name, native in self.outer.items():
                found.append(plain(ours + name, native.format(module=prefix), norm="norm" in name))
            inside = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
            found += [part.under(f"{ours}layer.", prefix) for part in layer_parts(config, inside)]
        return found

    def options(self, config: Any, count: int, inside: Collection[str]) -> dict[str, Any]:
        """Values of MtpConfig that the layout and the target's text config fix.

        Args:
            config: a transformers config; count: how many modules.
            inside: names of the first module's tensors, behind its prefix: they say which blocks there are.

        Raises:
            DraftsmithError: the attention rotates pairs that lie apart, which no published model of the kind does.
        """
        values = layer_values(config) | {"hidden_size": config.hidden_size}
        # positions of text are the same along all three axes of a model that sees images, too
        values["rope"] = {k: v for k, v in values["rope"].items() if not k.startswith("mrope")}
        latent = "self_attn.kv_a_proj_with_mqa.weight" in inside
        attention = _latent(config) if latent else self._standard(config, inside)
        if latent:
            qk = attention["qk_nope_head_dim"] + attention["qk_rope_head_dim"]
            values |= {"head_dim": max(qk, attention["v_head_dim"]), "num_key_value_heads": config.num_attention_heads}
        experts = "mlp.gate.weight" in inside
        return {
            **values,
            "modules": count,
            **({} if count == 1 else {"steps": count}),
            "concat_order": self.concat_order,
            "last_state": "post",
            "recycled": "post_norm",
            "attention": attention,
            "mlp": {"kind": "experts", **self.experts(config)} if experts else {"kind": "gated"},
        }

    def _standard(self, config: Any, inside: Collection[str]) -> dict[str, Any]:
        rope = getattr(config, "rope_parameters", None) or {}
        return {
            "kind": "standard",
            "qk_norm": "self_attn.q_norm.weight" in inside,
            "bias": "self_attn.q_proj.bias" in inside,
            "gate": self.gate,
            "partial_rotary_factor": float(rope.get("partial_rotary_factor") or 1.0),
        }


def _latent(config: Any) -> dict[str, Any]:
    if not getattr(config, "rope_interleave", True):
        raise DraftsmithError("rope_interleave = false: latent attention is known with interleaved rotation alone")
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"kind": "latent", **{name: getattr(config, name) for name in names}, "bias": config.attention_bias}


def _sigmoid_experts(config: Any) -> dict[str, Any]:
    return {
        "count": config.n_routed_experts,
        "intermediate_size": config.moe_intermediate_size,
        "top_k": config.num_experts_per_tok,
        "router": "sigmoid",
        "normalise": config.norm_topk_prob,
        "scaling": config.routed_scaling_factor,
        "groups": config.n_group,
        "top_groups": config.topk_group,
        "shared_size": config.moe_intermediate_size * (config.n_shared_experts or 0),
    }


def _softmax_experts(config: Any) -> dict[str, Any]:
    return {
        "count": config.num_experts,
        "intermediate_size": config.moe_intermediate_size,
        "top_k": config.num_experts_per_tok,
        "router": "softmax",
        "normalise": getattr(config, "norm_topk_prob", True),  # Qwen3.5 always does
        "shared_size": config.shared_expert_intermediate_size,
        "shared_gate": True,
    }


def _no_experts(config: Any) -> dict[str, Any]:
    raise DraftsmithError("the MTP module has a mixture of experts, which no model of its kind has")


_DEEPSEEK_NAMES = {
    "enorm": "{module}enorm.weight",
    "hnorm": "{module}hnorm.weight",
    "eh_proj.weight": "{module}eh_proj.weight",
    "input_layernorm": "{module}input_layernorm.weight",
    "norm": "{module}shared_head.norm.weight",
}
_QWEN_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj.weight": "mtp.fc.weight",
    "input_layernorm": "{module}input_layernorm.weight",
    "norm": "mtp.norm.weight",
}
_MIMO_NAMES = {
    "enorm": "{module}token_layernorm.weight",
    "hnorm": "{module}hidden_layernorm.weight",
    "eh_proj.weight": "{module}input_proj.weight",
    "input_layernorm": "{module}input_layernorm.weight",
    "norm": "{module}final_layernorm.weight",
}
_COPIES = (("embed", "{module}embed_tokens.weight"), ("lm_head", "{module}shared_head.head.weight"))


def _deepseek(name: str) -> Layout:
    return Layout(
        name, (name,), "model.layers.{n}.", _DEEPSEEK_NAMES, r"model\.layers\.(\d+)\.", "embed_first",
        "num_nextn_predict_layers", _sigmoid_experts, _COPIES,
    )  # fmt: skip


def _qwen(name: str, model_types: tuple[str, ...], count_key: str) -> Layout:
    return Layout(
        name, model_types, "mtp.layers.{i}.", _QWEN_NAMES, r"mtp\.", "embed_first", count_key, _softmax_experts,
        most=1, gemma=True, gate=True,
    )  # fmt: skip


_QWEN3_5 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

LAYOUTS = (
    _deepseek("deepseek_v3"),
    _deepseek("glm4_moe"),
    _qwen("qwen3_next", ("qwen3_next",), "num_nextn_predict_layers"),
    _qwen("qwen3_5", _QWEN3_5, "mtp_num_hidden_layers"),
    # MiMo is a Qwen2 with modules; where transformers is to load it without code of its own, its config says so
    Layout(
        "mimo", ("mimo", "qwen2"), "model.mtp_layers.{i}.", _MIMO_NAMES, r"model\.mtp_layers\.", "hidden_first",
        "num_nextn_predict_layers", _no_experts, config_type="qwen2", served=1,
    ),
)  # fmt: skip
"""Each model type is one layout's."""


__all__ = ["LAYOUTS", "Layout"]
