"""A decoder layer of the head's own, and the heads that draft one token after the other with one.

    x_j, r_j = enter(E(t_{j+1+s}), h)         what attention reads, and the residual; h = the target's features at
                                              step 0, the state of step s-1 after
    u_j      = r_j + attention(x_j)
    a_j      = u_j + mlp(post_attention_norm(u_j))
    y_j, h_j = leave(a_j)                     what the output weight multiplies, and what the next step reads

At step s row j stands at rope position j + s and attends to the step-0 keys of rows 0..j and to its own keys of steps
1..s: exactly what a decoder sees that drafts s tokens behind row j ("training-time test", arXiv 2503.01840, 3.2).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import DraftsmithError
from . import alignment
from .base import Batch, Cache, DraftHead, TargetParts, Unrolled, inside, rms_norm
from .config import HeadConfig, LayerConfig
from .unrolled import Layout, attend, cached_attention, lay_out, visible_rows
from .vocab import DraftVocab


class DecoderLayer(nn.Module):
    """Attention and MLP of a Llama layer; what it reads and its residual come from outside.

    Other attentions derive from it (`blocks.py`); another MLP is handed in.

    Args:
        config: the layer's shapes.
        width: of what attention reads.
        mlp: in the place of the gated MLP, [..., H] to [..., H].

    Attributes:
        rotary: how many numbers of a head's are rotated.
        gate_proj, up_proj, down_proj, act: the gated MLP's, where no other is handed in.
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act: Callable[[Tensor], Tensor]

    def __init__(self, config: LayerConfig, width: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        c = self.config = config
        self.rotary = c.head_dim
        self.add_attention(width)
        self.post_attention_layernorm = nn.Parameter(torch.ones(c.hidden_size))
        self.mlp = mlp
        if mlp is None:
            add_gated_mlp(self, c.hidden_size, c.intermediate_size, activation(c.hidden_act))
        inv_freq, self.rope_scaling = _rope(c, self.rotary)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # rope angles stay in fp32 or wider when the weights become bf16, which holds no odd position above 256
        kept = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = kept.to(self.inv_freq.device, torch.promote_types(self.inv_freq.dtype, torch.float32))
        return self

    def add_attention(self, width: int) -> None:
        """Make what attention multiplies by."""
        c = self.config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(width, q, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., 1, rotary] of positions [...]."""
        angle = positions[..., None].to(self.inv_freq.dtype) * self.inv_freq
        cos = (torch.cat((angle, angle), -1).cos() * self.rope_scaling).to(dtype).unsqueeze(-2)
        sin = (torch.cat((angle, angle), -1).sin() * self.rope_scaling).to(dtype).unsqueeze(-2)
        return cos, sin

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project rows [..., W] to rotated q [..., Hq, D], k [..., Hk, D] and v [..., Hk, D]."""
        c = self.config
        cos, sin = self.angles(positions, x.dtype)
        q = self.q_proj(x).unflatten(-1, (c.num_attention_heads, c.head_dim))
        k = self.k_proj(x).unflatten(-1, (c.num_key_value_heads, c.head_dim))
        v = self.v_proj(x).unflatten(-1, (c.num_key_value_heads, c.head_dim))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def gated(self, attended: Tensor, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """What attention gives [R, Hq*D] after the layer's gate, where it has one.

        Args:
            x: [R, W] what attention read; rows: [R] its rows that attended, where x has more.
        """
        return attended

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residuals and MLP: residual [..., H] and attended [..., Hq*D] to [..., H]."""
        u = residual + self.o_proj(attended)
        return u + self.feed_forward(rms_norm(u, self.post_attention_layernorm, self.config.rms_norm_eps))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The MLP, [..., H] to [..., H]."""
        out: Tensor = gated_mlp(self, x) if self.mlp is None else self.mlp(x)
        return out

    def new_cache(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Cache:
        """Allocate K/V for `batch` sequences of up to `capacity` rows, drafts included."""
        shape = (batch, self.config.num_key_value_heads, capacity, self.config.head_dim)
        zeros = torch.zeros(shape, device=device, dtype=dtype)
        return Cache(zeros, zeros.clone(), torch.zeros(batch, dtype=torch.int64, device=device))

    def cached(
        self, cache: Cache, x: Tensor, residual: Tensor, positions: Tensor, valid: Tensor | None, seen: Tensor | None
    ) -> Tensor:
        """Run rows behind the cached ones; see DraftHead.forward_step for what is what.

        Args:
            x: [B, M, W]; residual: [B, M, H].

        Returns:
            [B, 1, H] of each sequence's last valid row; of draft rows all: [B, M, H].
        """
        b, m = x.shape[:2]
        if valid is not None:
            cache.drafted = 0
        q, k, v = self.project(x, positions)
        slots = cache.lengths[:b, None] + cache.drafted + torch.arange(m, device=x.device)
        longest = min(cache.longest + cache.drafted + m, cache.keys.shape[2])
        index = torch.arange(b, device=x.device)[:, None]
        cache.keys[index, :, slots] = k
        cache.values[index, :, slots] = v
        visible = visible_rows(cache.lengths[:b], slots, seen, longest)
        attended = cached_attention(q, cache.keys[:b, :, :longest], cache.values[:b, :, :longest], visible)
        if valid is None:
            cache.drafted += m
        else:
            attended, residual, x = (last_valid(y, valid) for y in (attended, residual, x))
            cache.lengths[:b] += valid
            cache.longest += m
        return self.finish(residual, self.gated(attended, x))

    def start_from(self, layer: dict[str, Tensor], columns: slice, extra: dict[str, Tensor] | None = None) -> str:
        """Copy a target's decoder layer.

        Args:
            layer: its tensors by their names in it.
            columns: which part of what attention reads takes the layer's own q, k and v; the rest stays as it is.
            extra: the head's own tensors by the name of the layer's that they start from.

        Returns:
            A line that says whether it could be done.
        """
        goals = {
            "self_attn.q_proj.weight": self.q_proj.weight[:, columns],
            "self_attn.k_proj.weight": self.k_proj.weight[:, columns],
            "self_attn.v_proj.weight": self.v_proj.weight[:, columns],
            "self_attn.o_proj.weight": self.o_proj.weight,
            "post_attention_layernorm.weight": self.post_attention_layernorm,
            "mlp.gate_proj.weight": self.gate_proj.weight,
            "mlp.up_proj.weight": self.up_proj.weight,
            "mlp.down_proj.weight": self.down_proj.weight,
            **(extra or {}),
        }
        misfits = [name for name, goal in goals.items() if name not in layer or layer[name].shape != goal.shape]
        if misfits:
            return f"random start: the target's last layer has no {misfits[0]} of the head's shape"
        for name, goal in goals.items():
            goal.copy_(layer[name])
        return f"start: the target's last layer ({len(goals)} tensors)"


class RecurrentHead(DraftHead, abc.ABC):
    """A head with one decoder layer that reads its own states: see the module's formulas.

    Subclasses make `layer` and say what goes in and comes out.

    Attributes:
        checkpointing: in training keep only what goes from step to step, and run each step again in backward.
    """

    config: LayerConfig
    layer: DecoderLayer
    checkpointing: bool = False

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        if not isinstance(config, LayerConfig):
            raise TypeError(f"{type(self).__name__} needs a LayerConfig, not {type(config).__name__}")

    @abc.abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Map the `inputs` [..., F] of committed rows to the first hidden state [..., H]."""

    @abc.abstractmethod
    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., W] and the residual [..., H], of embeddings and hidden states [..., H]."""

    @abc.abstractmethod
    def leave(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the output weight multiplies, and what the next step reads, of the layer's output [..., H]."""

    @abc.abstractmethod
    def output_weight(self, parts: TargetParts) -> Tensor:
        """The output weight [Vd, H] in training."""

    @abc.abstractmethod
    def logits(self, readout: Tensor) -> Tensor:
        """Draft logits [..., Vd] in decoding, after `attach`."""

    def noisy(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Inputs [T, F] with the noise that the family trains with."""
        return inputs

    def passed_on(self, state: Tensor) -> Tensor:
        """What of a step's recycled state the next step's gradient sees."""
        return state

    def unroll(self, batch: Batch, parts: TargetParts, rows: Tensor, steps: int) -> Iterator[Unrolled]:
        """See DraftHead; only keys and values see all T rows, at step 0."""
        layout = lay_out(batch, rows)
        weight = self.output_weight(parts)
        inputs = self.noisy(self.inputs(batch.features, batch.last, parts), batch)
        hidden = self.fuse(inputs.to(self.layer.post_attention_layernorm.dtype))
        keys: tuple[Tensor, ...] = ()
        values: tuple[Tensor, ...] = ()
        for _ in range(steps):
            arguments = (batch, parts, layout, hidden, keys, values)
            if self.checkpointing and torch.is_grad_enabled():
                # no step draws anything: there is no state of a generator to keep
                found = checkpoint(self._step, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                found = self._step(*arguments)
            readout, recycled, k, v = found
            keys, values = (*keys, k), (*values, v)
            yield Unrolled(readout, weight, recycled)
            hidden = self.passed_on(recycled)

    def _step(
        self,
        batch: Batch,
        parts: TargetParts,
        layout: Layout,
        hidden: Tensor,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One unrolled step.

        Args:
            hidden: [T, H] at step 0, [R, H] after.
            keys, values: of the steps before.

        Returns:
            readout and recycled state of the rows that run; the step's keys and values.
        """
        s, rows = len(keys), layout.rows
        read = rows if s > 0 else torch.arange(len(batch.tokens), device=rows.device)
        x, residual = self.enter(read_embeds(batch, parts, read, s, hidden), hidden)
        q, k, v = self.layer.project(x, batch.positions[read] + s)
        if s == 0:
            q, residual = q[rows], residual[rows]
        attended = attend(q, (*keys, k), (*values, v), layout).flatten(-2)
        attended = self.layer.gated(attended, x, rows if s == 0 else None)
        readout, recycled = self.leave(self.layer.finish(residual, attended))
        return readout, recycled, k, v

    def new_cache(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Cache:
        """See DraftHead."""
        return self.layer.new_cache(batch, capacity, device, dtype)

    def forward_step(
        self,
        cache: Cache,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        valid: Tensor | None,
        seen: Tensor | None = None,
        *,
        step: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """See DraftHead."""
        if valid is not None:
            hidden = self.fuse(hidden)
        x, residual = self.enter(embeds, hidden)
        readout, recycled = self.leave(self.layer.cached(cache, x, residual, positions, valid, seen))
        return self.logits(readout), recycled


def add_gated_mlp(module: Any, hidden: int, inner: int, act: Callable[[Tensor], Tensor]) -> None:
    """Give a module the weights of `gated_mlp`: hidden H, inner width, the function."""
    module.gate_proj = nn.Linear(hidden, inner, bias=False)
    module.up_proj = nn.Linear(hidden, inner, bias=False)
    module.down_proj = nn.Linear(inner, hidden, bias=False)
    module.act = act


def gated_mlp(module: Any, x: Tensor) -> Tensor:
    """down(act(gate x) * up x), [..., H] to [..., H], with a module's weights."""
    out: Tensor = module.down_proj(module.act(module.gate_proj(x)) * module.up_proj(x))
    return out


def last_valid(x: Tensor, valid: Tensor) -> Tensor:
    """Row valid - 1 of each sequence: [B, 1, W] of x [B, M, W]."""
    return x.gather(1, (valid - 1)[:, None, None].expand(-1, 1, x.shape[-1]))


def read_embeds(batch: Batch, parts: TargetParts, rows: Tensor, step: int, like: Tensor) -> Tensor:
    """Embeddings [R, H] of the tokens that rows read at a step, in the dtype of `like`."""
    return parts.embed[batch.tokens[inside(alignment.input_index(rows, step), batch)]].to(like.dtype)


def activation(name: str) -> Any:
    """The function that a config's `hidden_act` names; raises DraftsmithError for an unknown one."""
    table = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    }
    if name not in table:
        raise DraftsmithError(
            f"hidden_act {name!r} is unknown; there are {', '.join(table)}. A head without a layer of its own, such as "
            "medusa1, needs none"
        )
    return table[name]


def _rope(c: LayerConfig, dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim/2] and attention scaling: the target's full-attention rope on `dim` numbers a head."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        head_dim=dim,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters=dict(c.rope),
    )
    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq.detach().clone().float(), float(rotary.attention_scaling)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., D] by angles [..., D]: number i and i + D/2 are a pair."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


__all__ = [
    "DecoderLayer", "RecurrentHead", "activation", "add_gated_mlp", "gated_mlp", "last_valid", "read_embeds", "rotate",
]  # fmt: skip
