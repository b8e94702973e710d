"""Attentions beside a Llama layer's: with norms, biases, an output gate or partial rotation, and by latents."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import rms_norm
from .blocks_parts import LatentOptions, StandardOptions, read_options
from .layer import DecoderLayer, rotate

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the model's own is: DeepSeek's published code gives them none."""


class StandardLayer(DecoderLayer):
    """Grouped-query attention with the options of `StandardOptions`."""

    def add_attention(self, width: int) -> None:
        """See DecoderLayer."""
        c = self.config
        o = self.options = read_options(c.to_dict()["attention"], StandardOptions, "attention")
        self.rotary = int(c.head_dim * o.partial_rotary_factor)
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(width, q, bias=o.bias)
        self.k_proj = nn.Linear(width, kv, bias=o.bias)
        self.v_proj = nn.Linear(width, kv, bias=o.bias)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)
        if o.gate:
            self.o_gate = nn.Linear(width, q, bias=o.bias)
        if o.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(c.head_dim))
            self.k_norm = nn.Parameter(torch.ones(c.head_dim))

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See DecoderLayer."""
        c = self.config
        q = self.q_proj(x).unflatten(-1, (c.num_attention_heads, c.head_dim))
        k = self.k_proj(x).unflatten(-1, (c.num_key_value_heads, c.head_dim))
        v = self.v_proj(x).unflatten(-1, (c.num_key_value_heads, c.head_dim))
        if self.options.qk_norm:
            q, k = rms_norm(q, self.q_norm, c.rms_norm_eps), rms_norm(k, self.k_norm, c.rms_norm_eps)
        cos, sin = self.angles(positions, x.dtype)
        return self._turned(q, cos, sin), self._turned(k, cos, sin), v

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first `rotary` numbers."""
        return torch.cat((rotate(x[..., : self.rotary], cos, sin), x[..., self.rotary :]), -1)

    def gated(self, attended: Tensor, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """See DecoderLayer."""
        if not self.options.gate:
            return attended
        return attended * torch.sigmoid(self.o_gate(x if rows is None else x[rows]))


class LatentLayer(DecoderLayer):
    """Multi-head latent attention; see `LatentOptions`.

        c_q = norm(W_qa x),  [q_nope; q_rope] = W_qb c_q           a head each
        [c_kv; k_rope] = W_kva x,  [k_nope; v] = W_kvb norm(c_kv)  k_rope is one for all heads
        q = [q_nope; R q_rope],  k = [k_nope; R k_rope]            R rotates the pairs (0, 1), (2, 3), ...

    Scores are q · k * m^2 / sqrt(D_qk), with yarn's m = 0.1 * mscale_all_dim * ln(factor) + 1. Keys and values are
    cached as heads read them, not as latents: all of one width, the config's head_dim, behind zeros where one is
    narrower. That width is what attention divides by, so q carries what is left of the scale.
    """

    def add_attention(self, width: int) -> None:
        """See DecoderLayer."""
        c = self.config
        o = self.options = read_options(c.to_dict()["attention"], LatentOptions, "attention")
        self.rotary, heads, qk = o.qk_rope_head_dim, c.num_attention_heads, o.qk_nope_head_dim + o.qk_rope_head_dim
        if o.q_lora_rank is None:
            self.q_proj = nn.Linear(width, heads * qk, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, o.q_lora_rank, bias=o.bias)
            self.q_a_layernorm = nn.Parameter(torch.ones(o.q_lora_rank))
            self.q_b_proj = nn.Linear(o.q_lora_rank, heads * qk, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, o.kv_lora_rank + o.qk_rope_head_dim, bias=o.bias)
        self.kv_a_layernorm = nn.Parameter(torch.ones(o.kv_lora_rank))
        self.kv_b_proj = nn.Linear(o.kv_lora_rank, heads * (o.qk_nope_head_dim + o.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * o.v_head_dim, c.hidden_size, bias=o.bias)
        self.q_scale = (c.head_dim / qk) ** 0.5 * _yarn_scale(c.rope) ** 2

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See DecoderLayer."""
        o, heads = self.options, self.config.num_attention_heads
        if o.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(rms_norm(self.q_a_proj(x), self.q_a_layernorm, _LATENT_EPS))
        q_nope, q_rope = q.unflatten(-1, (heads, -1)).split([o.qk_nope_head_dim, o.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([o.kv_lora_rank, o.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(rms_norm(latent, self.kv_a_layernorm, _LATENT_EPS)).unflatten(-1, (heads, -1))
        k_nope, v = kv.split([o.qk_nope_head_dim, o.v_head_dim], -1)
        cos, sin = self.angles(positions, x.dtype)
        q_rope = rotate(_pairs_apart(q_rope), cos, sin)
        k_rope = rotate(_pairs_apart(k_rope.unsqueeze(-2)), cos, sin).expand(*k_nope.shape[:-1], -1)
        q, k = torch.cat((q_nope, q_rope), -1) * self.q_scale, torch.cat((k_nope, k_rope), -1)
        return self._widened(q), self._widened(k), self._widened(v)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """See DecoderLayer."""
        c = self.config
        own = attended.unflatten(-1, (c.num_attention_heads, c.head_dim))[..., : self.options.v_head_dim]
        return super().finish(residual, own.flatten(-2))

    def _widened(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self.config.head_dim - x.shape[-1]))


def _pairs_apart(x: Tensor) -> Tensor:
    """Bring the pairs (0, 1), (2, 3), ... to where `rotate` takes them."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def _yarn_scale(rope: dict[str, object]) -> float:
    """Yarn's m; 1 without scaling."""
    share, factor = rope.get("mscale_all_dim", 0), rope.get("factor", 1)
    assert isinstance(share, int | float)
    assert isinstance(factor, int | float)
    scaled = rope["rope_type"] != "default" and share and factor > 1
    return 0.1 * share * math.log(factor) + 1.0 if scaled else 1.0
