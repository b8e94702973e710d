"""Options of the attention and MLP blocks, and what transformers' checkpoints call their tensors.

Names of ours are those inside a `DecoderLayer`, names of theirs those inside a decoder layer. Most tensors are the same
in both; a `Part` says how the others are laid out.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Size, Tensor

from ..errors import DraftsmithError
from .config import LayerConfig, fits

Move = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Part:
    """Tensors that a checkpoint lays out in its own way.

    Attributes:
        ours, native: their names here and there.
        read: of theirs ours; write: of ours theirs. Both only move numbers.
        norm: the weight of a norm, as it multiplies; some checkpoints store it less 1.
    """

    ours: tuple[str, ...]
    native: tuple[str, ...]
    read: Move = list
    write: Move = list
    norm: bool = False

    def under(self, ours: str, native: str) -> Part:
        """The same with both names behind a prefix."""
        return Part(
            tuple(ours + x for x in self.ours), tuple(native + x for x in self.native), self.read, self.write, self.norm
        )


def plain(ours: str, native: str, *, norm: bool = False) -> Part:
    """A tensor that is the same in both."""
    return Part((ours,), (native,), norm=norm)


def native_shapes(parts: Sequence[Part], tensors: Mapping[str, Tensor]) -> dict[str, Size]:
    """Shapes of a checkpoint's tensors by their names in it, from ours."""
    found: dict[str, Size] = {}
    for part in parts:
        written = part.write([tensors[name].detach().to("meta") for name in part.ours])
        found |= {name: x.shape for name, x in zip(part.native, written, strict=True)}
    return found


# --- options --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StandardOptions:
    """Grouped-query attention.

    Attributes:
        qk_norm: RMSNorm over a head's numbers of q and k, before they are rotated (Qwen3).
        bias: q, k, v and the gate have biases (Qwen2).
        gate: what attention gives is multiplied by sigmoid(W x) before the output projection (Qwen3-Next).
        partial_rotary_factor: share of a head's numbers, from the first, that are rotated.
    """

    qk_norm: bool = False
    bias: bool = False
    gate: bool = False
    partial_rotary_factor: float = 1.0

    def check(self, config: LayerConfig) -> None:
        """Refuse a share that rotates no pairs; raises DraftsmithError."""
        share, dim = self.partial_rotary_factor, config.head_dim
        count = int(dim * share) if 0 < share <= 1 else 0
        if count < 2 or count % 2:
            raise DraftsmithError(
                f"attention: partial_rotary_factor = {share} of head_dim {dim} rotates {count} numbers: it must be an "
                f"even count from 2 to {dim}"
            )


@dataclass(frozen=True, kw_only=True)
class LatentOptions:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        q_lora_rank: rank of the query's latent; None = q is projected at once.
        kv_lora_rank: of the latent of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: numbers of a head's q and k that aren't rotated, and that are.
        v_head_dim: of its v.
        bias: the projections to latents and the output's have biases.
    """

    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False

    def check(self, config: LayerConfig) -> None:
        """Refuse sizes that are none, or that don't fit the layer's; raises DraftsmithError."""
        ranks = {} if self.q_lora_rank is None else {"q_lora_rank": self.q_lora_rank}
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        _positive("attention", ranks | {name: getattr(self, name) for name in names})
        if self.qk_rope_head_dim % 2:
            raise DraftsmithError(f"attention: qk_rope_head_dim = {self.qk_rope_head_dim} must be even: pairs rotate")
        heads, qk = config.num_attention_heads, self.qk_nope_head_dim + self.qk_rope_head_dim
        wide = max(qk, self.v_head_dim)
        if config.num_key_value_heads != heads or config.head_dim != wide:
            raise DraftsmithError(
                f"attention of kind 'latent' has a key for each of its {heads} heads, as wide as q and k ({qk}) or v "
                f"({self.v_head_dim}): num_key_value_heads = {config.num_key_value_heads} must be {heads}, head_dim = "
                f"{config.head_dim} must be {wide}"
            )


@dataclass(frozen=True, kw_only=True)
class GatedOptions:
    """The MLP of a Llama layer: it has no options."""

    def check(self, config: LayerConfig) -> None:
        """Nothing can be wrong."""


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """A mixture of experts, each a gated MLP.

    Attributes:
        count, intermediate_size: how many, and their inner width; top_k: how many a row goes through.
        router: "softmax" over all experts (Qwen3-MoE), or "sigmoid" of each (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
        normalise: the chosen ones' weights sum to 1; scaling: they are multiplied by this.
        groups, top_groups: a row chooses among the experts of its best groups; a group is as good as its best two.
        correction_bias: [count] what balances the load, added where experts are chosen and nowhere else. No gradient
            reaches it, so it is no weight.
        shared_size: inner width of an MLP that every row goes through, 0 = none; shared_gate: times sigmoid(w x).
    """

    count: int
    intermediate_size: int
    top_k: int
    router: Literal["softmax", "sigmoid"]
    normalise: bool
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    correction_bias: list[float] | None = None
    shared_size: int = 0
    shared_gate: bool = False

    def check(self, config: LayerConfig) -> None:
        """Refuse counts that don't fit each other; raises DraftsmithError."""
        names = ("count", "intermediate_size", "top_k", "groups", "top_groups")
        _positive("mlp", {name: getattr(self, name) for name in names})
        if self.shared_size < 0:
            raise DraftsmithError(f"mlp: shared_size = {self.shared_size} must be 0, for none, or more")
        if self.count % self.groups or self.top_groups > self.groups:
            raise DraftsmithError(
                f"mlp: groups = {self.groups} must divide count = {self.count}, and top_groups = {self.top_groups} be "
                f"1 to {self.groups}"
            )
        size = self.count // self.groups
        if self.top_k > size * self.top_groups or (self.groups > 1 and size < 2):
            raise DraftsmithError(
                f"mlp: top_k = {self.top_k} must be 1 to the {size * self.top_groups} experts of {self.top_groups} "
                f"groups, and groups have two or more (these have {size})"
            )
        bias = self.correction_bias
        if bias is not None and len(bias) != self.count:
            raise DraftsmithError(f"mlp: correction_bias has {len(bias)} numbers, not count = {self.count}")
        if not all(math.isfinite(x) for x in (self.scaling, *(bias or ()))):
            raise DraftsmithError(f"mlp: scaling = {self.scaling} and correction_bias must be finite numbers")
        if self.shared_gate and not self.shared_size:
            raise DraftsmithError("mlp: shared_gate = True needs a shared MLP: give shared_size")


def _positive(where: str, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        if value < 1:
            raise DraftsmithError(f"{where}: {name} = {value} must be at least 1")


class Options(Protocol):
    """Any of these."""

    def check(self, config: LayerConfig) -> None:
        """Refuse values that make no layer of the config's shapes; raises DraftsmithError."""


Kind = TypeVar("Kind", bound=Options)


def read_options(values: Mapping[str, Any], kind: type[Kind], where: str) -> Kind:
    """Build options strictly from a config's dictionary; its "kind" is left out.

    Raises:
        DraftsmithError: an unknown, missing or ill-typed key, named.
    """
    given = {name: value for name, value in values.items() if name != "kind"}
    hints, known = typing.get_type_hints(kind), {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(known)):
        raise DraftsmithError(f"{where}: unknown key {unknown[0]!r}; there are {', '.join(known) or 'none'}")
    if missing := [name for name, f in known.items() if name not in given and f.default is MISSING]:
        raise DraftsmithError(f"{where}: key {missing[0]!r} is missing")
    if wrong := [name for name, value in given.items() if not fits(value, hints[name])]:
        raise DraftsmithError(f"{where}: {wrong[0]} = {given[wrong[0]]!r} is not of type {hints[wrong[0]]}")
    return kind(**given)


# --- names ----------------------------------------------------------------------------------------------------------


def standard_parts(config: LayerConfig, o: StandardOptions) -> list[Part]:
    """Of grouped-query attention; a gate's rows lie behind each head's rows of q."""
    kinds = ("weight", "bias") if o.bias else ("weight",)
    parts = [plain(f"{x}_proj.{kind}", f"self_attn.{x}_proj.{kind}") for kind in kinds for x in "kv"]
    for kind in kinds:
        if o.gate:
            split, join = _beside(config.head_dim)
            parts.append(Part((f"q_proj.{kind}", f"o_gate.{kind}"), (f"self_attn.q_proj.{kind}",), split, join))
        else:
            parts.append(plain(f"q_proj.{kind}", f"self_attn.q_proj.{kind}"))
    if o.qk_norm:
        parts += [plain(f"{x}_norm", f"self_attn.{x}_norm.weight", norm=True) for x in "qk"]
    return [*parts, plain("o_proj.weight", "self_attn.o_proj.weight")]


def latent_parts(config: LayerConfig, o: LatentOptions) -> list[Part]:
    """Of multi-head latent attention."""
    low = o.q_lora_rank is not None
    weights = [*(("q_a_proj", "q_b_proj") if low else ("q_proj",)), "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    norms = [*(("q_a_layernorm",) if low else ()), "kv_a_layernorm"]
    biases = [*(("q_a_proj",) if low else ()), "kv_a_proj_with_mqa", "o_proj"] if o.bias else []
    return [
        *(plain(f"{x}.weight", f"self_attn.{x}.weight") for x in weights),
        *(plain(f"{x}.bias", f"self_attn.{x}.bias") for x in biases),
        *(plain(x, f"self_attn.{x}.weight", norm=True) for x in norms),
    ]


def gated_parts(o: GatedOptions, names: Collection[str]) -> list[Part]:
    """Of the MLP of a Llama layer."""
    return [plain(f"{x}.weight", f"mlp.{x}.weight") for x in _MLP]


def expert_parts(o: ExpertOptions, names: Collection[str]) -> list[Part]:
    """Of experts, which checkpoints hold one by one or as stacks: as `names` has them."""
    parts = [plain("mlp.router", "mlp.gate.weight")]
    if STACKED in names:
        parts += [plain("mlp.gate_up", STACKED), plain("mlp.down", "mlp.experts.down_proj")]
    else:
        each = [tuple(f"mlp.experts.{e}.{x}.weight" for e in range(o.count)) for x in _MLP]
        pairs = tuple(name for pair in zip(*each[:2], strict=True) for name in pair)
        parts += [
            Part(("mlp.gate_up",), pairs, _stack_pairs, _split_pairs),
            Part(("mlp.down",), each[2], lambda x: [torch.stack(list(x))], lambda x: list(x[0].unbind())),
        ]
    if o.shared_size:
        shared = "shared_expert" if o.shared_gate else "shared_experts"
        parts += [plain(f"mlp.shared.{x}.weight", f"mlp.{shared}.{x}.weight") for x in _MLP]
    if o.shared_gate:
        parts.append(plain("mlp.shared_gate.weight", "mlp.shared_expert_gate.weight"))
    return parts


STACKED = "mlp.experts.gate_up_proj"
"""Of a checkpoint that holds its experts as stacks; its shape is ours."""
CORRECTION = "mlp.gate.e_score_correction_bias"
"""Where a checkpoint has `ExpertOptions.correction_bias`."""
_MLP = ("gate_proj", "up_proj", "down_proj")


def _beside(dim: int) -> tuple[Move, Move]:
    """Split and join two tensors whose first dimension lies in turns of `dim`."""

    def split(native: Sequence[Tensor]) -> list[Tensor]:
        both = native[0].unflatten(0, (-1, 2, dim))
        return [both[:, i].flatten(0, 1) for i in range(2)]

    def join(ours: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack([x.unflatten(0, (-1, dim)) for x in ours], 1).flatten(0, 2)]

    return split, join


def _stack_pairs(native: Sequence[Tensor]) -> list[Tensor]:
    """[E, 2I, H] of E times gate [I, H] and up [I, H]."""
    return [torch.stack(list(native)).unflatten(0, (-1, 2)).flatten(1, 2)]


def _split_pairs(ours: Sequence[Tensor]) -> list[Tensor]:
    return list(ours[0].unflatten(1, (2, -1)).flatten(0, 1).unbind())
