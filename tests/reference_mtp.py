"""MTP written out densely in fp64: the oracle for `heads/mtp.py`, from arXiv 2412.19437, section 2.2, and 2509.18362.

Which rows a row sees follows from decoding. One module: as EAGLE-3's training-time test. A module for each step: row
i of module s can be made once t[i+1+s] is known; behind row j, when t[j+1] is the newest, rows 0 .. j-s are there.
"""

from __future__ import annotations

from typing import Any

import torch
from reference import Document, attend, finish, frequencies, norm, project
from torch import Tensor

Weights = dict[str, Tensor]
Rows = dict[int, tuple[Tensor, Tensor]]


def state(c: Any, doc: Document, row: int, parts: Any) -> Tensor:
    """h of step 0: the target's last state, before or after its final norm."""
    last = doc.last[row]
    return {"pre": last, "post": norm(last, parts.norm_weight, parts.norm_eps)}[c.last_state]


def join(p: Weights, c: Any, embed: Tensor, hidden: Tensor, at: str) -> Tensor:
    """z: both inputs normed, in the config's order, through one matrix; `at` is the module's prefix."""
    e, h = norm(embed, p[f"{at}enorm"], c.rms_norm_eps), norm(hidden, p[f"{at}hnorm"], c.rms_norm_eps)
    order = {"embed_first": (e, h), "hidden_first": (h, e)}[c.concat_order]
    return p[f"{at}eh_proj.weight"] @ torch.cat(order)


def hand_on(p: Weights, c: Any, a: Tensor, at: str) -> Tensor:
    """What the next step reads of a."""
    return {"pre_norm": a, "post_norm": norm(a, p[f"{at}norm"], c.rms_norm_eps)}[c.recycled]


def read_out(p: Weights, c: Any, a: Tensor, parts: Any, ids: list[int], at: str) -> Tensor:
    """Draft logits [Vd]."""
    return parts.lm_head[ids] @ norm(a, p[f"{at}norm"], c.rms_norm_eps)


class Module:
    """One module's keys and values by (row, step), and what a row gives that sees some of them."""

    def __init__(self, p: Weights, c: Any, at: str) -> None:
        self.p, self.c, self.at = p, c, at
        self.rope = frequencies(c.rope, c.head_dim)
        self.z: dict[tuple[int, int], Tensor] = {}
        self.qkv: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def add(self, row: int, step: int, embed: Tensor, hidden: Tensor) -> None:
        """A row that reads these; it stands at position row + step."""
        z = join(self.p, self.c, embed, hidden, self.at)
        x = norm(z, self.p[f"{self.at}input_layernorm"], self.c.rms_norm_eps)
        self.z[row, step] = z
        self.qkv[row, step] = project(self.p, self.c, x, row + step, self.rope, f"{self.at}layer.")

    def output(self, row: int, step: int, seen: list[tuple[int, int]]) -> Tensor:
        """a of a row."""
        keys, values = (torch.stack([self.qkv[x][i] for x in seen]) for i in (1, 2))
        attended = attend(self.c, self.qkv[row, step][0], keys, values)
        return finish(self.p, self.c, self.z[row, step], attended, f"{self.at}layer.")


def modules(p: Weights, c: Any) -> list[Module]:
    """By step."""
    if c.modules == 1:
        return [Module(p, c, "")] * c.steps
    return [Module(p, c, f"depths.{s}.") for s in range(c.modules)]


def unroll(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int]) -> list[dict[int, Tensor]]:
    """Every row whose input token exists, with explicit lists of what it sees."""
    total, by_step = len(doc.tokens), modules(p, c)
    hidden = {j: state(c, doc, j, parts) for j in range(total - 1)}
    out = []
    for s, module in enumerate(by_step):
        rows = range(max(total - 1 - s, 0))  # t[j+1+s] must exist
        for j in rows:
            module.add(j, s, parts.embed[doc.tokens[j + 1 + s]], hidden[j])
        made = {}
        for j in rows:
            if c.modules == 1:
                seen = [(i, 0) for i in range(j + 1)] + [(j, n) for n in range(1, s + 1)]
            else:
                seen = [(i, s) for i in rows if i <= j - s or i == j]
            made[j] = module.output(j, s, seen)
        hidden = {j: hand_on(p, c, a, module.at) for j, a in made.items()}
        out.append({j: read_out(p, c, a, parts, ids, module.at) for j, a in made.items()})
    return out


def draft(p: Weights, c: Any, doc: Document, parts: Any, ids: list[int], row: int, steps: int) -> list[Tensor]:
    """What a decoder computes that drafts behind `row`, teacher-forced: the text arrives token by token."""
    by_step = modules(p, c) if c.modules > 1 else [Module(p, c, "")] * steps
    networks = by_step if c.modules > 1 else by_step[:1]
    kept: list[dict[int, Tensor]] = [{} for _ in networks]  # what rows of the text hand on, by module
    for newest in range(1, row + 2):  # t[newest] is there: row newest - 1 - s of module s can be made
        for s, module in enumerate(networks):
            i = newest - 1 - s
            if i < 0:
                continue
            hidden = state(c, doc, i, parts) if s == 0 else kept[s - 1][i]
            module.add(i, s, parts.embed[doc.tokens[newest]], hidden)
            seen = [(k, s) for k in range(i - s + 1)]
            a = module.output(i, s, seen if (i, s) in seen else [*seen, (i, s)])
            kept[s][i] = hand_on(p, c, a, module.at)
            if s == 0:
                first = a
    out = [read_out(p, c, first, parts, ids, networks[0].at)]
    hidden = kept[0][row]
    for s in range(1, steps):
        module = by_step[s]
        there = [x for x in module.qkv if c.modules == 1 or x[0] < row]
        module.add(row, s, parts.embed[doc.tokens[row + 1 + s]], hidden)
        a = module.output(row, s, [*there, (row, s)])
        hidden = hand_on(p, c, a, module.at)
        out.append(read_out(p, c, a, parts, ids, module.at))
    return out


def row_loss(
    c: Any, doc: Document, parts: Any, ids: list[int], row: int, step: int, logits: Tensor, state: Any
) -> Tensor:
    """Cross-entropy of the text's own token."""
    return -torch.log_softmax(logits, 0)[ids.index(doc.tokens[row + 2 + step])]
