"""What a head can learn at a row, by name; any of them can be mixed by weights.

Of a row, q = softmax(readout @ weight.T) is the draft's law and p the target's, a softmax over the draft vocabulary.
Each objective's gradient by the logits is a sum of a few forms (a = sum_v min(p, q), m[v] = [q[v] < p[v]]):

    soft_ce  -sum_v w[v] log q[v]     sum(w) q - w                      w = p: KL(p || q) but for a constant
    ce       -log q[token]            q - onehot(token)                 the text's own token
    tv       1/2 sum_v |p - q|        q (sum_v q m - m)                 = 1 - a: the share of drafts that are refused
    lk       -log a                   q (sum_v q m - m) / a

a is the expected acceptance of a draft drawn from q (arXiv 2211.17192, corollary 3.6); total variation as a draft's
objective is DistillSpec's (2310.08461), -log a the LK loss without parameters (2602.23881, LK^alpha): its gradient
doesn't vanish where p and q have little in common. With a fixed weight, that paper's mixture of KL and TV is a mixture
of soft_ce and tv here. Where the draft vocabulary is a part of the target's, the drafts' true acceptance lies below a:
p is renormalised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DraftsmithError


class Laws:
    """The draft's law and the teacher's at n rows, and what objectives share of them.

    Args:
        logits: [n, Vd] of the draft, fp32 or wider; overwritten.
        p: [n, Vd] the teacher's probabilities; w: [n, Vd] weights of its tokens in `soft_ce`; both None where no
            objective reads the teacher.
        labels: [n, 1] draft ids of the text's tokens.
    """

    def __init__(self, logits: Tensor, p: Tensor | None, w: Tensor | None, labels: Tensor) -> None:
        self.log_q = logits.sub_(torch.logsumexp(logits, -1, keepdim=True))
        self._p, self._w, self.labels = p, w, labels

    @property
    def p(self) -> Tensor:
        """The teacher's probabilities."""
        assert self._p is not None  # the objective says that it reads the teacher
        return self._p

    @property
    def w(self) -> Tensor:
        """The teacher's weights."""
        assert self._w is not None  # as above
        return self._w

    @cached_property
    def q(self) -> Tensor:
        """The draft's probabilities, in the memory of `log_q`, which is gone with the first call."""
        q = self.log_q.exp_()
        del self.log_q
        return q

    @cached_property
    def below(self) -> Tensor:
        """m, bool [n, Vd]: where the draft gives a token less than the teacher does."""
        return self.q < self.p

    @cached_property
    def given(self) -> Tensor:
        """sum_v q m, [n, 1]."""
        return (self.q * self.below).sum(-1, keepdim=True)

    @cached_property
    def acceptance(self) -> Tensor:
        """a = sum_v min(p, q), [n, 1]."""
        return torch.minimum(self.p, self.q).sum(-1, keepdim=True)

    @cached_property
    def taught(self) -> Tensor:
        """Whether the teacher says anything at all, bool [n, 1]; a row of which no top-k token is drafted has p = 0."""
        return self.p.sum(-1, keepdim=True) > 0


class Term(NamedTuple):
    """An objective at n rows; numbers or [n, 1].

    The gradient by the logits is q · (law + shared · m) - teacher · w - label · onehot.
    """

    value: Tensor
    law: Tensor | float
    shared: Tensor | float = 0.0
    teacher: float = 0.0
    label: float = 0.0


class Objective(NamedTuple):
    """A loss that can be mixed: whether it needs the teacher, and how it is computed."""

    reads_teacher: bool
    term: Callable[[Laws], Term]


def _soft_cross_entropy(laws: Laws) -> Term:
    with torch.autocast(laws.w.device.type, enabled=False):  # it would round both to bf16
        value = -torch.bmm(laws.w[:, None], laws.log_q[:, :, None])[:, 0]  # without a product [n, Vd] in memory
    return Term(value, law=laws.w.sum(-1, keepdim=True), teacher=1.0)


def _cross_entropy(laws: Laws) -> Term:
    return Term(-laws.log_q.gather(1, laws.labels), law=1.0, label=1.0)


def _total_variation(laws: Laws) -> Term:
    return Term((1.0 - laws.acceptance) * laws.taught, law=laws.given, shared=-1.0)


def _negative_log_acceptance(laws: Laws) -> Term:
    a = laws.acceptance.clamp(min=torch.finfo(laws.acceptance.dtype).tiny)
    return Term(-a.log() * laws.taught, law=laws.given / a, shared=-1.0 / a)


OBJECTIVES: dict[str, Objective] = {
    # those that read log q come first: q takes its memory
    "soft_ce": Objective(True, _soft_cross_entropy),
    "ce": Objective(False, _cross_entropy),
    "tv": Objective(True, _total_variation),
    "lk": Objective(True, _negative_log_acceptance),
}


def checked(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights of the objectives that count, in the table's order; those of weight 0 are left out.

    Raises:
        DraftsmithError: an unknown objective, a weight that is no number from 0 up, or nothing left to learn.
    """
    for name, weight in weights.items():
        if name not in OBJECTIVES:
            raise DraftsmithError(f"there is no objective {name!r}; there are: {', '.join(OBJECTIVES)}")
        if not 0 <= weight < float("inf"):
            raise DraftsmithError(f"objective {name} has weight {weight}: give a number from 0 up")
    chosen = {name: float(weights[name]) for name in OBJECTIVES if weights.get(name, 0) > 0}
    if not chosen:
        given = ", ".join(f"{name} = {weight}" for name, weight in weights.items()) or "none"
        raise DraftsmithError(
            f"no objective has a weight above 0 ({given}): give one to any of {', '.join(OBJECTIVES)}"
        )
    return chosen


def mixed(laws: Laws, objective: Mapping[str, float], wanted: bool) -> tuple[Tensor, Tensor | None]:
    """Sum over n rows of the weighted objectives, a scalar, and where wanted its gradient by the logits [n, Vd]."""
    value = laws.log_q.new_zeros(())
    law: Tensor | float = 0.0
    shared: Tensor | float = 0.0
    teacher = label = 0.0
    for name, weight in objective.items():
        term = OBJECTIVES[name].term(laws)
        value = value + weight * term.value.sum()
        law, shared = law + weight * term.law, shared + weight * term.shared
        teacher, label = teacher + weight * term.teacher, label + weight * term.label
    if not wanted:
        return value, None
    overlaps = isinstance(shared, Tensor) or shared != 0.0
    d = laws.q.mul_(torch.where(laws.below, law + shared, law) if overlaps else law)
    if teacher:
        d.sub_(laws.w, alpha=teacher)
    if label:
        d.scatter_add_(1, laws.labels, d.new_full((), -label).expand(laws.labels.shape))
    return value, d
