"""EAGLE-3 written out densely in fp64, one document at a time: the oracle for `heads/eagle3.py`.

Written from the formulas of arXiv 2503.01840 (section 3) alone; it shares no code with the package. `p` is a head's
state dict by tensor name in fp64, `c` its HeadConfig, of which only fields are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


def project(
    p: dict[str, Tensor], c: Any, embed: Tensor, hidden: Tensor, position: int, rope: Any
) -> tuple[Tensor, ...]:
    """q [Hq, D], k [Hk, D] (rotated) and v [Hk, D] of one row that reads a token's embedding."""
    x = torch.cat((norm(embed, p["input_layernorm"], c.rms_norm_eps), norm(hidden, p["hidden_norm"], c.rms_norm_eps)))
    q = (p["q_proj.weight"] @ x).view(c.num_attention_heads, c.head_dim)
    k = (p["k_proj.weight"] @ x).view(c.num_key_value_heads, c.head_dim)
    v = (p["v_proj.weight"] @ x).view(c.num_key_value_heads, c.head_dim)
    return rotate(q, position, rope), rotate(k, position, rope), v


def attend(c: Any, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row's attention over the keys [n, Hk, D] that it sees; [Hq*D]."""
    out = []
    for h in range(c.num_attention_heads):
        g = h * c.num_key_value_heads // c.num_attention_heads
        weight = torch.softmax(keys[:, g] @ q[h] / math.sqrt(c.head_dim), 0)
        out.append(weight @ values[:, g])
    return torch.cat(out)


def finish(p: dict[str, Tensor], c: Any, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """The recycled state a [H] and the draft logits [Vd] of one row."""
    u = hidden + p["o_proj.weight"] @ attended
    x = norm(u, p["post_attention_layernorm"], c.rms_norm_eps)
    gate = p["gate_proj.weight"] @ x
    a = u + p["down_proj.weight"] @ (gate * torch.sigmoid(gate) * (p["up_proj.weight"] @ x))
    return a, p["lm_head.weight"] @ norm(a, p["norm"], c.rms_norm_eps)


def unroll(p: dict[str, Tensor], c: Any, doc: Document, embed: Tensor) -> list[dict[int, Tensor]]:
    """Logits [Vd] by step and row, of every row whose input token exists: training-time test with an explicit mask."""
    rope = frequencies(c.rope, c.head_dim)
    total = len(doc.tokens)
    hidden = {j: p["fc.weight"] @ doc.features[j] for j in range(total - 1)}
    seen: list[tuple[int, int, Tensor, Tensor]] = []  # (step, row, key, value) of everything computed so far
    out = []
    for s in range(c.steps):
        rows = range(max(total - 1 - s, 0))  # t[j+1+s] must exist
        queries = {}
        for j in rows:
            q, k, v = project(p, c, embed[doc.tokens[j + 1 + s]], hidden[j], j + s, rope)
            queries[j] = q
            seen.append((s, j, k, v))
        logits, recycled = {}, {}
        for j in rows:
            visible = [x for x in seen if (x[0] == 0 and x[1] <= j) or (x[0] > 0 and x[1] == j)]
            attended = attend(c, queries[j], torch.stack([x[2] for x in visible]), torch.stack([x[3] for x in visible]))
            recycled[j], logits[j] = finish(p, c, hidden[j], attended)
        hidden = recycled
        out.append(logits)
    return out


def draft(p: dict[str, Tensor], c: Any, doc: Document, embed: Tensor, row: int, steps: int) -> list[Tensor]:
    """Logits [Vd] of `steps` drafts behind `row` with a growing cache, teacher-forced: what a decoder computes."""
    rope = frequencies(c.rope, c.head_dim)
    keys, values, out = [], [], []
    hidden = q = None
    for j in range(row + 1):  # committed rows, one by one
        hidden = p["fc.weight"] @ doc.features[j]
        q, k, v = project(p, c, embed[doc.tokens[j + 1]], hidden, j, rope)
        keys.append(k)
        values.append(v)
    for s in range(steps):
        if s > 0:
            q, k, v = project(p, c, embed[doc.tokens[row + 1 + s]], hidden, len(keys), rope)
            keys.append(k)
            values.append(v)
        hidden, logits = finish(p, c, hidden, attend(c, q, torch.stack(keys), torch.stack(values)))
        out.append(logits)
    return out


def teacher(doc: Document, row: int, parts: Any) -> Tensor:
    """The target's logits [V] at a row, from its pre-norm last state."""
    return parts.lm_head @ norm(doc.last[row], parts.norm_weight, parts.norm_eps)


def supervised(answer: list[bool], row: int, step: int) -> bool:
    """Serving can ask for this draft iff t[j+1] ... t[j+2+s] exist and are all answer tokens."""
    return row + 2 + step < len(answer) and all(answer[row + 1 : row + 3 + step])


def losses(p: dict[str, Tensor], c: Any, docs: list[Document], parts: Any, ids: list[int]) -> list[Step]:
    """Sums by step over all documents; `ids` are the target ids of the draft vocabulary."""
    steps = [Step(torch.zeros((), dtype=torch.float64)) for _ in range(c.steps)]
    for doc in docs:
        by_step = unroll(p, c, doc, parts.embed)
        for j in range(len(doc.tokens)):
            alive = True
            for s, step in enumerate(steps):
                if not supervised(doc.answer, j, s):
                    break
                label, logits = doc.tokens[j + 2 + s], by_step[s][j]
                full = teacher(doc, j + 1 + s, parts)
                if label in ids:
                    step.num = step.num - (torch.softmax(full[ids], 0) * torch.log_softmax(logits, 0)).sum()
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
