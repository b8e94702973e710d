"""DraftHead: network, losses and one cached step. Search (chains, trees) lives in eval/decoder."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..errors import DraftsmithError
from . import alignment, objectives
from .config import HeadConfig
from .losses import HiddenTeacher, LossRows, TopKTeacher, capped, mixed_losses, step_stats
from .losses import StepStats as StepStats
from .norms import layer_norm
from .norms import rms_norm as rms_norm
from .vocab import DraftVocab


@dataclass(frozen=True)
class Needs:
    """What a head (or any drafter) needs of the target's pass: aux layer ids and, if any, state n before the norm."""

    layer_ids: tuple[int, ...] = ()
    last: bool = False


@dataclass
class Batch:
    """Packed documents, T rows in all, no padding between them.

    Attributes:
        tokens: [T] int64.
        answer: [T] bool, True on answer tokens (end-of-turn included).
        documents: [T] int64, ascending document number; rows of different documents never see each other.
        positions: [T] int64, position inside the document, from 0.
        features: [T, A*H] aux states of the target in layer order, pre-norm.
        last: [T, H] state n of the target, before the final norm: the teacher's input; None where the teacher is top-k.
        seed: of whatever is random in this batch's losses (input noise): fixed by the batch's place in the plan, so
            that neither ranks nor a resumption change it; None = nothing is random.
        topk_ids, topk_logprobs: [T, k] the target's likeliest tokens after each token and their log-probabilities over
            the whole vocabulary, where `last` is None.
    """

    tokens: Tensor
    answer: Tensor
    documents: Tensor
    positions: Tensor
    features: Tensor
    last: Tensor | None
    seed: int | None = None
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Batch:
        """Move all tensors; only the states change their dtype."""
        return Batch(
            self.tokens.to(device),
            self.answer.to(device),
            self.documents.to(device),
            self.positions.to(device),
            self.features.to(device, dtype),
            None if self.last is None else self.last.to(device, dtype),
            self.seed,
            None if self.topk_ids is None else self.topk_ids.to(device),
            None if self.topk_logprobs is None else self.topk_logprobs.to(device),
        )


@dataclass(frozen=True)
class TargetParts:
    """The frozen pieces of the target that heads need, in training and in decoding; `architecture.py` makes them.

    Attributes:
        embed: [V, H] input embedding weight (any scaling of the target already applied).
        lm_head: [V, H] output weight (any scaling of the logits already applied).
        norm_weight: [H] final norm's weight, as it multiplies (Gemma's 1 + w already added).
        norm_eps: epsilon of that norm.
        last_layer: weights of the last decoder layer by their names in it; empty where they aren't wanted. A head may
            start from them.
        norm: kind of the final norm; rounded_late: see `rms_norm`; norm_bias: [H] what a LayerNorm adds, or None.
        softcap: logits are c · tanh(x / c) of x = lm_head · normed; None where they aren't capped. Heads that read out
            with `lm_head` stay linear: the likeliest tokens are the same.
    """

    embed: Tensor
    lm_head: Tensor
    norm_weight: Tensor
    norm_eps: float
    last_layer: dict[str, Tensor] = field(default_factory=dict)
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: Tensor | None = None
    softcap: float | None = None
    rounded_late: bool = False

    def normed(self, last: Tensor) -> Tensor:
        """Apply the final norm to state n [..., H]; computed in fp32, returned in the input's dtype."""
        if self.norm == "rms":
            return rms_norm(last, self.norm_weight, self.norm_eps, self.rounded_late)
        return layer_norm(last, self.norm_weight, self.norm_bias, self.norm_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """The target's logits [..., V] from `normed` states [..., H], capped in fp32 or wider where it caps them."""
        return capped(normed @ self.lm_head.t(), self.softcap)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TargetParts:
        """Move to a device and dtype; the norm's pieces stay in fp32 or wider: bf16 would round 1 + w."""
        wide, embed = torch.promote_types(dtype, torch.float32), self.embed.to(device, dtype)
        return replace(
            self,
            embed=embed,
            lm_head=embed if self.lm_head is self.embed else self.lm_head.to(device, dtype),
            norm_weight=self.norm_weight.to(device, wide),
            norm_bias=None if self.norm_bias is None else self.norm_bias.to(device, wide),
            last_layer={name: x.to(device, dtype) for name, x in self.last_layer.items()},
        )


@dataclass
class Cache:
    """A head's own K/V: [B, Hk, S, D] each, with `lengths` [B] committed rows; draft rows lie behind them."""

    keys: Tensor
    values: Tensor
    lengths: Tensor
    longest: int = 0
    """Host-side upper bound of `lengths`; the caller lowers it when it knows better."""
    drafted: int = 0
    """Draft rows that lie behind the committed ones; the next committed call, or the caller, sets it back to 0."""
    pending: Tensor | None = None
    """[B, P, H] states that the next committed rows read beside their inputs; None where a head needs none."""


@dataclass
class Unrolled:
    """What a head computes at one unrolled step for the R rows that run.

    Attributes:
        readout: [R, W] what the output weight multiplies; weight: [Vd, W]. Their product is the draft's logits.
        state: [R, H] predicted feature of the target, where the family has one.
    """

    readout: Tensor
    weight: Tensor
    state: Tensor | None = None


class DraftHead(nn.Module, abc.ABC):
    """A family's network.

    Args:
        config: the family's config.
        vocab: the draft vocabulary whose hash the config holds.

    Attributes:
        hard_labels: the family's own objective is the text's own tokens; else the target's distribution over the draft
            vocabulary.
        objective: weights of what is learnt (see `objectives`): the family's own, until `learn` says otherwise.
        most_depth: deepest draft that the head can make; None = it drafts from its own drafts without end.
        state_width: width of the recycled state behind a committed row.
    """

    hard_labels: ClassVar[bool] = False

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab
        self.objective = {"ce" if self.hard_labels else "soft_ce": 1.0}
        self.target_ids: Tensor
        self.draft_ids: Tensor
        self.register_buffer("target_ids", vocab.target_ids.clone(), persistent=False)
        self.register_buffer("draft_ids", vocab.to_draft(), persistent=False)

    @property
    def needs(self) -> Needs:
        """What the head's input takes of the target's pass."""
        return Needs(tuple(self.config.layer_ids), last=self.config.last_state != "none")

    @property
    def most_depth(self) -> int | None:
        """See the class."""
        return None

    @property
    def state_width(self) -> int:
        """See the class."""
        return self.config.hidden_size

    def inputs(self, aux: Tensor, last: Tensor | None, parts: TargetParts) -> Tensor:
        """Target features that a committed row reads: aux states, or state n under the config's norm policy, or both.

        Args:
            aux: [..., A*H] aux states (ignored by a head without any); last: [..., H] state n before the final norm.
        """
        pieces = [aux] if self.config.layer_ids else []
        if self.config.last_state != "none":
            assert last is not None  # `needs` asks for it
            pieces.append(parts.normed(last) if self.config.last_state == "post" else last)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    @abc.abstractmethod
    def initialise(self, parts: TargetParts, generator: torch.Generator) -> str:
        """Set the starting weights, from the target's where the family says so; returns a line that says how."""

    def attach(self, parts: TargetParts) -> None:
        """Take the target's frozen weights that decoding needs, as modules that are no part of the checkpoint."""

    @abc.abstractmethod
    def unroll(self, batch: Batch, parts: TargetParts, rows: Tensor, steps: int) -> Iterator[Unrolled]:
        """Run rows [R] (packed indices, ascending) teacher-forced through `steps` steps; see alignment.py.

        Row j of step s must be what the s-th cached draft step behind row j computes.
        """

    @abc.abstractmethod
    def new_cache(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Cache:
        """Allocate the head's K/V for decoding."""

    @abc.abstractmethod
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
        """Run rows through the head with its cache.

        Args:
            embeds: [B, M, H] target embeddings of the tokens that the rows read.
            hidden: [B, M, F] `inputs` of committed rows; of draft rows the state [B, M, S] that the row of the node
                above gave.
            positions: [B, M] rope positions.
            valid: [B] number of committed rows among M (they are appended and stay), or None for draft rows: appended
                behind the committed rows and the D drafted ones until the next committed call.
            seen: bool [B, M, D+M], which draft rows each new draft row sees, itself included; all see the committed
                rows. None = every row before it, as in a chain.
            step: 0 for committed rows; s for rows that read a token drafted at depth s.

        Returns:
            logits [B, 1, Vd] and recycled state [B, 1, S] of each sequence's last valid row; of draft rows all:
            [B, M, Vd] and [B, M, S].
        """

    # --- training: the same for every family -----------------------------------------------------------------------

    def learn(self, objective: Mapping[str, float]) -> None:
        """Lay weights of objectives over those that the head has; 0 takes one out. A feature loss stays as it is.

        Raises:
            DraftsmithError: see `objectives.checked`.
        """
        self.objective = objectives.checked({**self.objective, **objective})

    def losses(
        self,
        batch: Batch,
        parts: TargetParts,
        *,
        overlap: bool = False,
        steps: int | None = None,
        scales: Sequence[float] | None = None,
    ) -> list[StepStats]:
        """Teacher-forced sums of all unrolled steps; see alignment.py for which row predicts what.

        Args:
            overlap: also sum min(p, q), and keep which rows are right.
            steps: how many; None = as many as are trained.
            scales: see `losses.mixed_losses`.
        """
        supervised = self.supervised_rows(batch, steps)
        rows = supervised[0].nonzero().flatten()
        with torch.no_grad():  # a target that is trained, too, learns nothing from being the teacher
            states = None if batch.last is None else parts.normed(batch.last)
            teacher = self._teacher(batch, states, parts)
        places = []  # known before the steps run, so that a device isn't waited for between them
        for s, counted in enumerate(supervised):
            labels = self.draft_ids[batch.tokens[inside(alignment.label_index(rows, s), batch)]]
            in_loss = counted[rows] & (labels >= 0)
            at = in_loss.nonzero().flatten()
            places.append((at, in_loss, labels[at], inside(alignment.teacher_index(rows, s), batch)))
        chosen: list[LossRows] = []
        extras, overlaps = [], []
        for s, found in enumerate(self.unroll(batch, parts, rows, len(supervised))):
            at, in_loss, labels, teacher_rows = places[s]
            chosen.append(LossRows(at, found.readout[at], found.weight, labels, teacher_rows[at]))
            extras.append(None if states is None else self.feature_loss(found, states, teacher_rows, in_loss))
            if overlap:
                seen, weight = supervised[s][rows].nonzero().flatten(), found.weight.to(found.readout.dtype)
                overlaps.append(teacher.overlap(found.readout[seen], weight, teacher_rows[seen]))
        sums, guesses = mixed_losses(chosen, self.objective, teacher, self.teacher_weights, scales)
        nums = [num if extra is None else num + extra for num, extra in zip(sums.unbind(), extras, strict=True)]
        return step_stats(nums, [x[rows] for x in supervised], chosen, guesses, overlaps)

    def feature_loss(self, found: Unrolled, goals: Tensor, rows: Tensor, in_loss: Tensor) -> Tensor | None:
        """Loss on the predicted feature, summed over the rows that are in the loss; None where a family has none.

        Args:
            goals: [T, H] the target's states after the final norm; rows: [R] which of them each row predicts.
            in_loss: [R] bool.
        """
        return None

    def teacher_weights(self, probabilities: Tensor) -> Tensor:
        """Weights w [T, Vd] of the loss -sum_v w[v] log q[v], from the target's probabilities [T, Vd]."""
        return probabilities

    @torch.no_grad()
    def matches(self, batch: Batch, parts: TargetParts, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """Return (right, supervised), bool [steps, T] each: whose teacher-forced guess is the text's token."""
        ranks, supervised = self.label_ranks(batch, parts, 1, steps)
        return ranks == 0, supervised

    @torch.no_grad()
    def label_ranks(
        self, batch: Batch, parts: TargetParts, width: int, steps: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """At which place the text's token stands among a row's guesses.

        Args:
            width: how many guesses are looked at.

        Returns:
            int64 [steps, T]: 0 = the best guess, -1 = none of the first `width`, or not supervised; and who is
            supervised, bool [steps, T].
        """
        supervised = self.supervised_rows(batch, steps)
        rows = supervised[0].nonzero().flatten()
        ranks = torch.full((len(supervised), len(batch.tokens)), -1, dtype=torch.int64, device=rows.device)
        for s, found in enumerate(self.unroll(batch, parts, rows, len(supervised))):
            labels = self.draft_ids[batch.tokens[inside(alignment.label_index(rows, s), batch)]]
            logits = found.readout @ found.weight.to(found.readout.dtype).t()
            guesses = (
                logits.argmax(-1, keepdim=True) if width == 1 else logits.topk(min(width, logits.shape[-1])).indices
            )
            hit = (guesses == labels[:, None]) & supervised[s][rows][:, None]
            ranks[s, rows] = torch.where(hit.any(1), hit.int().argmax(1), -1)
        return ranks, torch.stack(supervised)

    def _teacher(self, batch: Batch, states: Tensor | None, parts: TargetParts) -> HiddenTeacher | TopKTeacher:
        if states is not None:
            return HiddenTeacher(states, parts.lm_head, self.target_ids, parts.softcap)
        self.require_states("none of them")
        if batch.topk_ids is None or batch.topk_logprobs is None:
            raise ValueError("a batch needs the target's last states or its top-k tokens")
        return TopKTeacher(batch.topk_ids, batch.topk_logprobs, self.draft_ids, len(self.vocab))

    def require_states(self, found: str) -> None:
        """Refuse training data without the target's last states, where the head or its loss reads them.

        Args:
            found: what the data holds instead.

        Raises:
            DraftsmithError: the head reads them.
        """
        if self.needs.last or type(self).feature_loss is not DraftHead.feature_loss:
            raise DraftsmithError(
                f"heads of family {self.config.family!r} learn from the target's last states, and the features hold "
                f"{found}: collect them with collect.teacher = 'hidden'"
            )

    def supervised_rows(self, batch: Batch, steps: int | None = None) -> list[Tensor]:
        """One bool [T] per step; the rows that count in acceptance."""
        return alignment.supervised(batch.answer, batch.documents, steps or self.config.steps)

    def loss_counts(self, batch: Batch) -> Tensor:
        """Supervised rows inside the draft vocabulary by step, int64 [steps]: the loss's denominators."""
        counts = []
        for s, rows in enumerate(self.supervised_rows(batch)):
            labels = alignment.shift_left(batch.tokens, 2 + s)
            counts.append((rows & (self.draft_ids[labels] >= 0)).sum())
        return torch.stack(counts)

    def step_weights(self, steps: int | None = None) -> list[float]:
        """Weight of each step in the loss; 0 beyond those that are trained."""
        trained = self.config.steps
        return [self.config.step_decay**s if s < trained else 0.0 for s in range(steps or trained)]

    def steps_for(self, depth: int) -> int:
        """Steps to unroll where drafts up to `depth` are of interest beside the trained ones."""
        wanted = max(self.config.steps, depth)
        return wanted if self.most_depth is None else min(wanted, self.most_depth)

    def forward(self, batch: Batch, parts: TargetParts) -> list[StepStats]:
        """Alias of `losses`, so that engines which wrap modules can call the head."""
        return self.losses(batch, parts)


def inside(index: Tensor, batch: Batch) -> Tensor:
    """Clamp an index past the end; such rows are not supervised, their value is never used."""
    return index.clamp(max=len(batch.tokens) - 1)
