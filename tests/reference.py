"""What every family's oracle shares, written out densely in fp64, one document at a time.

Written from the papers' formulas alone; it shares no code with the package. `p` is a head's state dict by tensor name
in fp64, `c` its HeadConfig, of which only fields are read. A family's oracle (`reference_<family>.py`) defines

    unroll(p, c, doc, parts, ids) -> logits [Vd], or (logits, predicted feature [H]), by step and row, teacher-forced
    draft(p, c, doc, parts, ids, row, steps) -> the same of `steps` drafts behind a row, with a growing cache
    row_loss(c, doc, parts, ids, row, step, logits, state) -> one row's loss

`ids` are the target ids of the draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass
class Document:
    """tokens: T ids; answer: T bools; features [T, A*H]; last [T, H] (rows of the last token are never read)."""

    tokens: list[int]
    answer: list[bool]
    features: Tensor
    last: Tensor


@dataclass
class Step:
    """Sums of one unrolled step, as StepStats defines them; `num` is differentiable."""

    num: Tensor
    den: int = 0
    rows: int = 0
    hits: int = 0
    reached: int = 0
    kept: int = 0
    overlap: float = 0.0


def frequencies(rope: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """Rotary angle per position [dim/2] (fp64, rounded to fp32 as every model stores it) and the q/k magnitude."""
    theta, kind = rope["rope_theta"], rope.get("rope_type", "default")
    factor = rope.get("factor", 1.0)
    old = rope.get("original_max_position_embeddings", 0)
    out, size = [], 1.0
    for i in range(dim // 2):
        f = theta ** (-2 * i / dim)
        if kind == "linear":
            f = f / factor
        elif kind == "llama3":
            wave = 2 * math.pi / f
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wave > old / low:
                f = f / factor
            elif wave >= old / high:
                blend = (old / wave - low) / (high - low)
                f = (1 - blend) * f / factor + blend * f
        elif kind == "yarn":
            size = 0.1 * math.log(factor) + 1.0
            edge = [dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1)]
            lo, hi = max(math.floor(edge[0]), 0), min(math.ceil(edge[1]), dim - 1)
            ramp = min(max((i - lo) / ((hi - lo) or 0.001), 0.0), 1.0)
            f = ramp * f / factor + (1 - ramp) * f
        elif kind != "default":
            raise ValueError(kind)
        out.append(f)
    return torch.tensor(out, dtype=torch.float64).float().double(), size


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, position: int, rope: tuple[Tensor, float]) -> Tensor:
    """Rotate the halves of x [heads, D] as complex numbers by position * frequency."""
    freq, size = rope
    half = x.shape[-1] // 2
    cos, sin = torch.cos(position * freq) * size, torch.sin(position * freq) * size
    a, b = x[:, :half], x[:, half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def project(p: dict[str, Tensor], c: Any, x: Tensor, position: int, rope: Any, layer: str) -> tuple[Tensor, ...]:
    """q [Hq, D], k [Hk, D] (rotated) and v [Hk, D] of one row whose attention reads x; `layer` is a name's prefix."""
    q = (p[f"{layer}q_proj.weight"] @ x).view(c.num_attention_heads, c.head_dim)
    k = (p[f"{layer}k_proj.weight"] @ x).view(c.num_key_value_heads, c.head_dim)
    v = (p[f"{layer}v_proj.weight"] @ x).view(c.num_key_value_heads, c.head_dim)
    return rotate(q, position, rope), rotate(k, position, rope), v


def attend(c: Any, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row's attention over the keys [n, Hk, D] that it sees; [Hq*D]."""
    out = []
    for h in range(c.num_attention_heads):
        g = h * c.num_key_value_heads // c.num_attention_heads
        weight = torch.softmax(keys[:, g] @ q[h] / math.sqrt(c.head_dim), 0)
        out.append(weight @ values[:, g])
    return torch.cat(out)


def finish(p: dict[str, Tensor], c: Any, residual: Tensor, attended: Tensor, layer: str) -> Tensor:
    """Output projection and gated MLP of one row, each with its residual; [H]."""
    u = residual + p[f"{layer}o_proj.weight"] @ attended
    x = norm(u, p[f"{layer}post_attention_layernorm"], c.rms_norm_eps)
    gate = p[f"{layer}gate_proj.weight"] @ x
    return u + p[f"{layer}down_proj.weight"] @ (gate * torch.sigmoid(gate) * (p[f"{layer}up_proj.weight"] @ x))


def teacher(doc: Document, row: int, parts: Any) -> Tensor:
    """The target's logits [V] at a row, from its pre-norm last state."""
    return parts.lm_head @ norm(doc.last[row], parts.norm_weight, parts.norm_eps)


def supervised(answer: list[bool], row: int, step: int) -> bool:
    """Serving can ask for this draft iff t[j+1] ... t[j+2+s] exist and are all answer tokens."""
    return row + 2 + step < len(answer) and all(answer[row + 1 : row + 3 + step])


def pair(found: Any) -> tuple[Tensor, Any]:
    """(logits, state) of what an oracle gives for a row; state None where it gives logits alone."""
    return found if isinstance(found, tuple) else (found, None)


def soft_loss(logits: Tensor, full: Tensor, ids: list[int]) -> Tensor:
    """Cross-entropy against the teacher's law over the draft vocabulary, from its logits [V]."""
    return -(torch.softmax(full[ids], 0) * torch.log_softmax(logits, 0)).sum()


def row_loss(
    c: Any, doc: Document, parts: Any, ids: list[int], row: int, step: int, logits: Tensor, state: Any
) -> Tensor:
    """What most families learn: cross-entropy against the target's law over the draft vocabulary."""
    return soft_loss(logits, teacher(doc, row + 1 + step, parts), ids)


def losses(
    oracle: ModuleType, p: dict[str, Tensor], c: Any, docs: list[Document], parts: Any, ids: list[int]
) -> list[Step]:
    """Sums by step over all documents, of a family's oracle."""
    steps = [Step(torch.zeros((), dtype=torch.float64)) for _ in range(c.steps)]
    for doc in docs:
        by_step = oracle.unroll(p, c, doc, parts, ids)
        for j in range(len(doc.tokens)):
            alive = True
            for s, step in enumerate(steps):
                if not supervised(doc.answer, j, s):
                    break
                logits, state = pair(by_step[s][j])
                label = doc.tokens[j + 2 + s]
                full = teacher(doc, j + 1 + s, parts)
                if label in ids:
                    step.num = step.num + oracle.row_loss(c, doc, parts, ids, j, s, logits, state)
                    step.den += 1
                right = ids[int(logits.argmax())] == label
                step.rows += 1
                step.hits += right
                step.reached += alive
                alive = alive and right
                step.kept += alive
                step.overlap += float(
                    torch.minimum(torch.softmax(full, 0)[ids], torch.softmax(logits, 0)).sum().detach()
                )
    return steps
