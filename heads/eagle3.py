"""EAGLE-3: one decoder layer over fused target states, trained through its own unrolled steps (arXiv 2503.01840, 3).

    g_j   = fc[state_k1; state_k2; state_k3]_j                      fused target features
    x_j   = [input_norm(E(t_{j+1+s})); hidden_norm(h)]              h = g_j at step 0, a_j of step s-1 after
    u     = h + attention(x_j)                                      q, k, v map 2H; the residual is the un-normed h
    a_j   = u + mlp(post_attention_norm(u))                         recycled before the norm
    q_j   = softmax(lm_head(norm(a_j)))                             over the draft vocabulary

Training-time test: at step s row j stands at rope position j + s and attends to the step-0 keys of rows 0..j and to its
own keys of steps 1..s: exactly what a decoder sees that drafts s tokens behind row j.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DraftsmithError
from . import alignment, losses
from .base import Batch, Cache, DraftHead, Needs, StepStats, TargetParts, rms_norm
from .config import HeadConfig, default_layer_ids
from .registry import Family
from .unrolled import attend, cached_attention, lay_out, to_documents, visible_rows
from .vocab import DraftVocab

# What the family's formulas fix; a config that says otherwise belongs to another head.
_FIXED: dict[str, Any] = {
    "objective": "token",
    "last_state": "none",
    "recycled": "pre_norm",
    "concat_order": "embed_first",
    "input_norms": {"embed": "rms", "hidden": "rms"},
    "norm_before_residual": False,
}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """EAGLE-3 has nothing beyond the common part; the residual at the layer's input is always the un-normed state."""

    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in _FIXED.items():
            if (found := getattr(self, name)) != value:
                raise DraftsmithError(f"{name} = {found!r} is not what an eagle3 head computes: it must be {value!r}")


def eagle3_config(target_config: Any, vocab: DraftVocab, **identity: Any) -> Eagle3Config:
    """Derive a head's config from its target's (a transformers text config).

    Args:
        target_config: shapes, rope and norm epsilon are taken from it.
        vocab: the draft vocabulary.
        identity: target_id, target_revision, target_fingerprint, chat_template_sha256, trained_length, and optionally
            layer_ids, steps, step_decay and shapes that should differ from the target's.
    """
    heads = target_config.num_attention_heads
    values: dict[str, Any] = {
        "family": "eagle3",
        **_FIXED,
        "layer_ids": default_layer_ids(target_config.num_hidden_layers),
        "steps": 7,
        "step_decay": 0.8,
        "hidden_size": target_config.hidden_size,
        "intermediate_size": target_config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target_config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        "hidden_act": target_config.hidden_act,
        "rms_norm_eps": target_config.rms_norm_eps,
        # full rotary on the head's own head_dim, whatever share of it the target rotates
        "rope": {k: v for k, v in target_config.rope_parameters.items() if k != "partial_rotary_factor"},
        "max_position_embeddings": target_config.max_position_embeddings,
        "vocab_size": vocab.vocab_size,
        "draft_vocab_size": len(vocab),
        "draft_vocab_sha256": vocab.sha256,
        "target_layers": target_config.num_hidden_layers,
        **identity,
    }
    return Eagle3Config.from_dict(values, "eagle3 config")


class Eagle3Head(DraftHead):
    """The network; see the module's formulas. Tensors are named as engines load them."""

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        c = config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.fc = nn.Linear(len(c.layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.input_layernorm = nn.Parameter(torch.ones(c.hidden_size))
        self.hidden_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.q_proj = nn.Linear(2 * c.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)
        self.post_attention_layernorm = nn.Parameter(torch.ones(c.hidden_size))
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.act = _activation(c.hidden_act)
        inv_freq, self.rope_scaling = _rope(c)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # rope angles stay in fp32 or wider when the weights become bf16, which holds no odd position above 256
        kept = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = kept.to(self.inv_freq.device, torch.promote_types(self.inv_freq.dtype, torch.float32))
        return self

    @property
    def needs(self) -> Needs:
        """Three aux states; state n is only the teacher's."""
        return Needs(tuple(self.config.layer_ids), last=False)

    @torch.no_grad()
    def initialise(self, parts: TargetParts, generator: torch.Generator) -> str:
        """Start from the target: its output rows, its final norm, and its last layer where that has the same shapes.

        The last layer's attention fills the hidden half of q, k and v. The fusion hands on the last aux state, scaled
        down: undiminished, the residual would begin by predicting t[j+1], which the row already reads. On the default
        target this reaches in 40k tokens 1.6 x the first-draft accuracy of random matrices.
        """
        h = self.config.hidden_size
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.02, generator=generator)
        self.fc.weight.mul_(0.025)
        self.fc.weight[:, -h:] += 0.1 * torch.eye(h)
        self.lm_head.weight.copy_(parts.lm_head[self.vocab.target_ids])
        self.norm.copy_(parts.norm_weight)
        goals = {
            "input_layernorm.weight": self.hidden_norm,
            "self_attn.q_proj.weight": self.q_proj.weight[:, h:],
            "self_attn.k_proj.weight": self.k_proj.weight[:, h:],
            "self_attn.v_proj.weight": self.v_proj.weight[:, h:],
            "self_attn.o_proj.weight": self.o_proj.weight,
            "post_attention_layernorm.weight": self.post_attention_layernorm,
            "mlp.gate_proj.weight": self.gate_proj.weight,
            "mlp.up_proj.weight": self.up_proj.weight,
            "mlp.down_proj.weight": self.down_proj.weight,
        }
        layer = parts.last_layer
        misfits = [name for name, goal in goals.items() if name not in layer or layer[name].shape != goal.shape]
        if misfits:
            return f"random start: the target's last layer has no {misfits[0]} of the head's shape"
        for name, goal in goals.items():
            goal.copy_(layer[name])
        return f"start: the target's last layer ({len(goals)} tensors), output rows and final norm"

    # --- the layer ------------------------------------------------------------------------------------------------

    def _qkv(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project rows [..., H] to rotated q [..., Hq, D], k [..., Hk, D] and v [..., Hk, D]."""
        c = self.config
        x = torch.cat(
            (
                rms_norm(embeds, self.input_layernorm, c.rms_norm_eps),
                rms_norm(hidden, self.hidden_norm, c.rms_norm_eps),
            ),
            -1,
        )
        angle = positions[..., None].to(self.inv_freq.dtype) * self.inv_freq
        cos = (torch.cat((angle, angle), -1).cos() * self.rope_scaling).to(x.dtype).unsqueeze(-2)
        sin = (torch.cat((angle, angle), -1).sin() * self.rope_scaling).to(x.dtype).unsqueeze(-2)
        q = self.q_proj(x).unflatten(-1, (c.num_attention_heads, c.head_dim))
        k = self.k_proj(x).unflatten(-1, (c.num_key_value_heads, c.head_dim))
        v = self.v_proj(x).unflatten(-1, (c.num_key_value_heads, c.head_dim))
        return q * cos + _rotate(q) * sin, k * cos + _rotate(k) * sin, v

    def _finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residuals and MLP: hidden and attended [..., H] to a [..., H]."""
        u = hidden + self.o_proj(attended)
        x = rms_norm(u, self.post_attention_layernorm, self.config.rms_norm_eps)
        return u + self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))

    # --- training -------------------------------------------------------------------------------------------------

    def losses(self, batch: Batch, parts: TargetParts, *, overlap: bool = False) -> list[StepStats]:
        """Soft cross-entropy of every unrolled step; teacher probabilities are shared by the steps."""
        supervised = self.supervised_rows(batch)
        rows = supervised[0].nonzero().flatten()
        with torch.no_grad():
            teacher_states = parts.normed(batch.last)
            teacher = _probabilities(teacher_states, parts.lm_head[self.target_ids])
        stats = []
        kept = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        for s, hidden in self._unroll(batch, parts, rows):
            counted = supervised[s][rows]
            labels = batch.tokens[_inside(alignment.label_index(rows, s), batch)]
            draft_labels = self.draft_ids[labels]
            teacher_rows = _inside(alignment.teacher_index(rows, s), batch)
            in_loss = counted & (draft_labels >= 0)
            weight = self.lm_head.weight.to(hidden.dtype)
            num, guesses = losses.soft_cross_entropy(hidden, weight, teacher, teacher_rows, in_loss)
            reached, right = kept & counted, (guesses == draft_labels) & counted
            kept = kept & right
            shared = None
            if overlap:
                chosen = counted.nonzero().flatten()
                shared = losses.overlap(
                    hidden[chosen], weight, teacher_states[teacher_rows[chosen]], parts.lm_head, self.target_ids
                )
            stats.append(StepStats(num, in_loss.sum(), counted.sum(), right.sum(), reached.sum(), kept.sum(), shared))
        return stats

    @torch.no_grad()
    def matches(self, batch: Batch, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Return (right, supervised), bool [steps, T] each: whose teacher-forced guess is the text's token."""
        supervised = self.supervised_rows(batch)
        rows = supervised[0].nonzero().flatten()
        right = torch.zeros(len(supervised), len(batch.tokens), dtype=torch.bool, device=rows.device)
        for s, hidden in self._unroll(batch, parts, rows):
            labels = self.draft_ids[batch.tokens[_inside(alignment.label_index(rows, s), batch)]]
            guesses = (hidden @ self.lm_head.weight.to(hidden.dtype).t()).argmax(-1)
            right[s, rows] = (guesses == labels) & supervised[s][rows]
        return right, torch.stack(supervised)

    def _unroll(self, batch: Batch, parts: TargetParts, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (step, normed output [R, H]) for the rows that run; only keys and values see all T rows, at step 0."""
        c = self.config
        layout = lay_out(batch, rows)
        fused = self.fc(batch.features.to(self.fc.weight.dtype))
        everything = torch.arange(len(batch.tokens), device=rows.device)
        embeds = parts.embed[batch.tokens[_inside(alignment.input_index(everything, 0), batch)]]
        q, k, v = self._qkv(embeds.to(fused.dtype), fused, batch.positions)
        keys, values = to_documents(k, layout), to_documents(v, layout)
        q, hidden = q[rows], fused[rows]
        own_k: list[Tensor] = []
        own_v: list[Tensor] = []
        for s in range(c.steps):
            if s > 0:
                embeds = parts.embed[batch.tokens[_inside(alignment.input_index(rows, s), batch)]]
                q, k, v = self._qkv(embeds.to(hidden.dtype), hidden, batch.positions[rows] + s)
                own_k.append(k)
                own_v.append(v)
            attended = attend(q, keys, values, own_k, own_v, layout)
            hidden = self._finish(hidden, attended.flatten(-2))
            yield s, rms_norm(hidden, self.norm, c.rms_norm_eps)

    # --- decoding -------------------------------------------------------------------------------------------------

    def new_cache(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Cache:
        """Allocate K/V for `batch` sequences of up to `capacity` rows, drafts included."""
        shape = (batch, self.config.num_key_value_heads, capacity, self.config.head_dim)
        zeros = torch.zeros(shape, device=device, dtype=dtype)
        return Cache(zeros, zeros.clone(), torch.zeros(batch, dtype=torch.int64, device=device))

    def forward_step(
        self,
        cache: Cache,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        valid: Tensor | None,
        seen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See DraftHead.forward_step."""
        b, m = embeds.shape[:2]
        if valid is not None:
            hidden, cache.drafted = self.fc(hidden), 0
        q, k, v = self._qkv(embeds, hidden, positions)
        slots = cache.lengths[:b, None] + cache.drafted + torch.arange(m, device=embeds.device)
        longest = min(cache.longest + cache.drafted + m, cache.keys.shape[2])
        index = torch.arange(b, device=embeds.device)[:, None]
        cache.keys[index, :, slots] = k
        cache.values[index, :, slots] = v
        visible = visible_rows(cache.lengths[:b], slots, seen, longest)
        attended = cached_attention(q, cache.keys[:b, :, :longest], cache.values[:b, :, :longest], visible)
        if valid is None:
            cache.drafted += m
        else:
            pick = (valid - 1)[:, None, None]
            attended = attended.gather(1, pick.expand(-1, 1, attended.shape[-1]))
            hidden = hidden.gather(1, pick.expand(-1, 1, hidden.shape[-1]))
            cache.lengths[:b] += valid
            cache.longest += m
        state = self._finish(hidden, attended)
        return self.lm_head(rms_norm(state, self.norm, self.config.rms_norm_eps)), state


def _activation(name: str) -> Any:
    table = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
    }
    if name not in table:
        raise DraftsmithError(f"hidden_act {name!r} is unknown; there are {', '.join(table)}")
    return table[name]


def _rope(c: HeadConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] and attention scaling: the target's full-attention rope on the head's head_dim."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters=dict(c.rope),
    )
    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq.detach().clone().float(), float(rotary.attention_scaling)


def _rotate(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _inside(index: Tensor, batch: Batch) -> Tensor:
    """Clamp an index past the end; such rows are not supervised, their value is never used."""
    return index.clamp(max=len(batch.tokens) - 1)


def _probabilities(states: Tensor, weight: Tensor) -> Tensor:
    logits = states @ weight.to(states.dtype).t()
    return torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)


FAMILY = Family("eagle3", Eagle3Config, Eagle3Head)
