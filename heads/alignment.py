"""Which row predicts which token: the one place that knows.

Row j holds the target's states after reading t[0..j]. The head starts when t[j+1] is known, so at unrolled step s row j
reads token t[j+1+s] and predicts t[j+2+s]; its teacher is the target's distribution at row j+1+s. Supervised iff
t[j+1] ... t[j+2+s] are all answer tokens of the same document: the drafts that serving can ask for (t[j+1] comes from
the target's own pass, so t[j+1] itself must be an answer token).

    index j          0   1   2   3   4   5   6   7
    t[j]             S   S   S   R0  R1  R2  EOS pad
    answer           0   0   0   1   1   1   1   0
    supervised, s=0  0   0   1   1   1   0   0   0      rows that predict R1, R2, EOS
    supervised, s=1  0   0   1   1   0   0   0   0
"""

from __future__ import annotations

import torch
from torch import Tensor


def shift_left(x: Tensor, by: int, fill: int | float | bool = 0) -> Tensor:
    """Return y with y[..., j] = x[..., j+by] and `fill` past the end; x is [..., T]."""
    if by == 0:
        return x
    y = torch.full_like(x, fill)
    if by < x.shape[-1]:
        y[..., :-by] = x[..., by:]
    return y


def input_index(rows: Tensor, step: int) -> Tensor:
    """Index of the token that rows [R] read at `step`: j + 1 + s."""
    return rows + 1 + step


def label_index(rows: Tensor, step: int) -> Tensor:
    """Index of the token that rows [R] predict at `step`: j + 2 + s."""
    return rows + 2 + step


def teacher_index(rows: Tensor, step: int) -> Tensor:
    """Index of the target's row whose distribution rows [R] learn at `step`: j + 1 + s."""
    return rows + 1 + step


def supervised(answer: Tensor, documents: Tensor, steps: int) -> list[Tensor]:
    """Return one bool [T] per step: which rows are supervised.

    Args:
        answer: [T] bool, True on answer tokens (the end-of-turn token included).
        documents: [T] int, the document of each row; rows of different documents never see each other. -1 = padding.
        steps: number of unrolled steps.

    The sets are nested: a row supervised at step s is supervised at every step before.
    """
    same = answer & (documents >= 0)
    run = _follows(same, documents, 1)
    rows = []
    for s in range(steps):
        run = run & _follows(same, documents, 2 + s)
        rows.append(run)
    return rows


def _follows(answer: Tensor, documents: Tensor, by: int) -> Tensor:
    return shift_left(answer, by, False) & (shift_left(documents, by, -2) == documents)
