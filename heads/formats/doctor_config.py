"""What doctor asks of a head's config: kinds of values, flags that the weights bear out, Medusa's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..config import fits
from .doctor_case import (
    EAGLE3,
    FUSED,
    IDS,
    LAYERED,
    MEDUSA,
    MEDUSA_HEADS,
    NESTED,
    OWN,
    REFUSED,
    SPEC_EAGLE,
    SPEC_EAGLE3,
    WEAK,
    Case,
    Finding,
    whole,
)

_COUNT, _FLAG, _NUMBER = "a number above 0", "true or false", "a number"
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "max_position_embeddings",
         "num_aux_hidden_states", "num_heads", "truncated_vocab_size", "medusa_num_heads", "medusa_num_layers"),
        (int, _COUNT),
    ),
    **dict.fromkeys(
        ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "bias",
         "tie_word_embeddings", "use_aux_hidden_state", "medusa_fc_bias", "original_lm_head", "fusion_bias"),
        (bool, _FLAG),
    ),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), (float, _NUMBER)),
    **dict.fromkeys(
        (NESTED, "transformer_layer_config", "speculators_config", "rope_scaling", "rope_parameters"),
        (dict[str, Any], "a group of values"),
    ),
    **dict.fromkeys(("architectures",), (list[str], "a list of names")),
    IDS: (list[int], "a list of numbers"),
    **dict.fromkeys(("model_type", "speculators_model_type", "torch_dtype", "hidden_act"), (str, "a word")),
}  # fmt: skip


def check_config(case: Case) -> Iterator[Finding]:
    """A directory without the config that engines ask for."""
    if not case.config and case.kind is not None:
        yield Finding(
            "config.json is missing, or holds nothing",
            "export the head again, or fetch it again",
            case.effects(REFUSED),
        )


def check_types(case: Case) -> Iterator[Finding]:
    """Values of another kind than the name asks for."""
    places = {"config.json": case.config, case.shapes_at: case.shapes, NESTED: case.nested}
    for place, group in places.items():
        for name, (hint, told) in _TYPES.items():
            value = group.get(name)
            if value is None or (fits(value, hint) and (hint is not int or value > 0)):
                continue
            yield Finding(
                f"{name} in {place} is {_short(value)}, which is not {told}",
                f"write {told} there, or export again",
                case.effects(REFUSED),
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


# --- flags ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """A flag that says whether the weights have some tensors.

    Attributes:
        tensors: pattern of their names; kinds: where; what: these tensors do.
    """

    name: str
    tensors: str
    kinds: tuple[str, ...]
    what: str


_ATTENTION = r"(?:midlayer|layers\.\d+|transformer)\.self_attn\."
FLAGS = (
    Flag("norm_before_fc", r"input_norm\.weight", FUSED, "the norm over the fused states"),
    Flag("fc_norm", r"fc_norm\.\d+\.weight", FUSED, "the norm of each state before the fusion"),
    Flag("attention_bias", _ATTENTION + r"[qkv]_proj\.bias", LAYERED, "the biases of q, k and v"),
    Flag("mlp_bias", r".+\.mlp\.\w+_proj\.bias", LAYERED, "the biases of the MLP"),
    Flag("medusa_fc_bias", r"(?:medusa_heads?\.)?blocks\.\d+\.layers\.\d+\.bias", (MEDUSA,), "the blocks' biases"),
    Flag("fusion_bias", r"fusion_fc\.bias", (SPEC_EAGLE,), "the bias of the fusion"),
)
_NOTED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "norm_output": lambda head: head.get("recycled") == "post_norm",
    "norm_before_residual": lambda head: head.get("norm_before_residual", False) is True,
}
"""Flags without a tensor, and what the head's own config says of them."""


def check_flags(case: Case) -> Iterator[Finding]:
    """Flags that the weights, the other place of the config or the head's own record contradict."""
    for flag in FLAGS:
        if case.kind in flag.kinds:
            yield from _two_places(case, flag.name)
            yield from _borne_out(case, flag)
    if case.kind in FUSED:
        if case.nested.get("use_aux_hidden_state") is False:
            yield Finding(
                f"use_aux_hidden_state is false in {NESTED}: the head is then given the target's last state alone",
                "write use_aux_hidden_state: true",
                case.effects(WEAK) | case.effects(REFUSED, OWN),
            )
        for name, truth in _NOTED.items():
            yield from _two_places(case, name)
            if case.head and (value := said(case, name)) is not None and value != truth(case.head):
                yield Finding(
                    f"{name} is {_json(value)}, and the head was trained with {_json(not value)}",
                    f"write {name}: {_json(not value)}",
                    case.effects(WEAK),
                )


def _two_places(case: Case, name: str) -> Iterator[Finding]:
    top, nested = case.shapes.get(name, case.config.get(name)), case.nested.get(name)
    if top is not None and nested is not None and top != nested:
        yield Finding(
            f"{name} is {_json(top)} in config.json and {_json(nested)} in {NESTED}: engines read one or the other",
            "write what the head was trained with at both places",
            case.effects(WEAK) | case.effects(REFUSED, OWN),
        )


def said(case: Case, name: str) -> bool | None:
    """What the config says of a flag; None = nothing."""
    for group in (case.shapes, case.config, case.nested):
        if group.get(name) is not None:
            return bool(group[name])
    return None


def _borne_out(case: Case, flag: Flag) -> Iterator[Finding]:
    found, value = case.named(flag.tensors), bool(said(case, flag.name))
    if found and not value:
        yield Finding(
            f"{flag.name} is {_json(said(case, flag.name))}, and the weights have {found[0]}: {flag.what} "
            "would be left out",
            f"write {flag.name}: true",
            case.effects(REFUSED) | case.effects(WEAK, "sglang"),
        )
    elif value and not found:
        yield Finding(
            f"{flag.name} is true, and the weights don't have {flag.what}",
            f"write {flag.name}: false, or export the head again",
            case.effects(REFUSED) | (case.effects(WEAK, "vllm", "sglang") if case.kind != MEDUSA else {}),
        )


def _json(value: Any) -> str:
    return "left out" if value is None else str(value).lower()


def check_residual(case: Case) -> Iterator[Finding]:
    """`norm_before_residual`, which means two things where it is left out."""
    if case.kind == SPEC_EAGLE3 and said(case, "norm_before_residual") is None:
        yield Finding(
            "norm_before_residual is left out: vLLM takes that as true here, speculators as false",
            "write what the head was trained with (false, as EAGLE-3 was published)",
            case.effects(WEAK, "vllm"),
        )


def check_tie(case: Case) -> Iterator[Finding]:
    """Output rows of its own beside a config that says they are the embedding's."""
    if case.kind in FUSED and case.config.get("tie_word_embeddings") is True and "lm_head.weight" in case.entries:
        yield Finding(
            "tie_word_embeddings is true: SGLang then reads the head out with the embedding, not with lm_head.weight",
            "write tie_word_embeddings: false",
            case.effects(WEAK, "sglang"),
        )


def check_dtype_named(case: Case) -> Iterator[Finding]:
    """`torch_dtype`, which one engine can't do without."""
    if case.kind == EAGLE3 and case.config.get("torch_dtype") is None:
        yield Finding(
            "torch_dtype is left out: TensorRT-LLM asks for it",
            "write torch_dtype: bfloat16, or what the weights are stored in",
            case.effects(REFUSED, "tensorrt-llm"),
        )


def check_verifier(case: Case) -> Iterator[Finding]:
    """The target that speculators' layout names, which vLLM serves by the head's folder alone."""
    if case.kind not in (SPEC_EAGLE, SPEC_EAGLE3):
        return
    group = case.config.get("speculators_config")
    verifier = group.get("verifier") if isinstance(group, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(named, str) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", named):
        yield Finding(
            f"verifier.name_or_path is {named!r}, no hub id: 'vllm serve' can't find the target by this folder alone",
            "write the target's hub id, or serve the target and name the head in --speculative-config",
        )


# --- Medusa ---------------------------------------------------------------------------------------------------------


def check_medusa(case: Case) -> Iterator[Finding]:
    """Numbers of networks and blocks, and keys that vLLM renames."""
    if case.kind not in (MEDUSA, MEDUSA_HEADS):
        return
    if case.kind == MEDUSA:
        for mark, own in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
            clash = [key for key in case.config if "num" in key and mark in key and key != own]
            if clash and own in case.config:
                yield Finding(
                    f"{clash[0]} in config.json: vLLM renames every key with 'num' and '{mark}' to one, which "
                    f"then overwrites {own}",
                    f"leave {clash[0]} out",
                    case.effects(REFUSED, "vllm"),
                )
    elif case.config.get("architectures") is not None:
        yield Finding(
            "config.json has architectures: TGI takes a directory for Medusa only where there are none",
            "leave architectures out",
            case.effects(REFUSED, "tgi"),
        )
    keys = ("num_heads", "num_hidden_layers") if case.kind == MEDUSA else ("medusa_num_heads", "medusa_num_layers")
    for key, there in zip(keys, networks(case), strict=True):
        value = whole(case.config.get(key))
        if there and value is not None and value != there:
            yield Finding(
                f"{key} is {value}, and the weights have {there}",
                f"write {key}: {there}",
                case.effects(REFUSED, but=(OWN,)),
            )


_BLOCK = re.compile(
    r"(?:medusa_heads?\.)?(?:blocks\.(\d{1,6})\.layers\.(\d{1,6})|(\d{1,6})\.(\d{1,6})\.linear)\.weight"
)


def networks(case: Case) -> tuple[int, int]:
    """Networks and blocks of each by the tensors' names, 0 where there are none."""
    matches = [match for name in case.entries if (match := _BLOCK.fullmatch(name))]
    places = [[int(number) for number in match.groups() if number is not None] for match in matches]
    return (1 + max(i for i, _ in places), 1 + max(j for _, j in places)) if places else (0, 0)
