"""DraftHead: network, losses and one cached step. Search (chains, trees) lives in eval/decoder."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import alignment
from .config import HeadConfig
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
        last: [T, H] state n of the target, before the final norm: the teacher's input.
    """

    tokens: Tensor
    answer: Tensor
    documents: Tensor
    positions: Tensor
    features: Tensor
    last: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Batch:
        """Move all tensors; only the states change their dtype."""
        return Batch(
            self.tokens.to(device),
            self.answer.to(device),
            self.documents.to(device),
            self.positions.to(device),
            self.features.to(device, dtype),
            self.last.to(device, dtype),
        )


@dataclass(frozen=True)
class TargetParts:
    """The frozen pieces of the target that training needs.

    Attributes:
        embed: [V, H] input embedding weight (any scaling of the target already applied).
        lm_head: [V, H] output weight.
        norm_weight: [H] final RMSNorm weight, as it multiplies (Gemma's 1 + w already added).
        norm_eps: epsilon of that norm.
        last_layer: weights of the last decoder layer by their names in it; empty where they aren't wanted. A head may
            start from them.
    """

    embed: Tensor
    lm_head: Tensor
    norm_weight: Tensor
    norm_eps: float
    last_layer: dict[str, Tensor] = field(default_factory=dict)

    def normed(self, last: Tensor) -> Tensor:
        """Apply the final norm to state n [..., H]; computed in fp32, returned in the input's dtype."""
        return rms_norm(last, self.norm_weight, self.norm_eps)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TargetParts:
        """Move to a device and dtype."""
        return TargetParts(
            self.embed.to(device, dtype),
            self.lm_head.to(device, dtype),
            self.norm_weight.to(device, dtype),
            self.norm_eps,
            {name: x.to(device, dtype) for name, x in self.last_layer.items()},
        )


@dataclass
class StepStats:
    """Sums over the rows of one unrolled step; all tensors are scalars on the batch's device.

    Attributes:
        num: differentiable loss sum over the supervised rows inside the draft vocabulary.
        den: their count.
        rows: supervised rows, tokens outside the draft vocabulary included.
        hits: rows whose first guess is the text's token.
        reached: rows whose guesses at all earlier steps were right, too (denominator of the conditional acceptance).
        kept: rows whose guesses up to and including this step are right.
        overlap: sum of min(p, q) over the rows, p of the full vocabulary; only when asked for.
    """

    num: Tensor
    den: Tensor
    rows: Tensor
    hits: Tensor
    reached: Tensor
    kept: Tensor
    overlap: Tensor | None = None


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


class DraftHead(nn.Module, abc.ABC):
    """A family's network.

    Args:
        config: the family's config.
        vocab: the draft vocabulary whose hash the config holds.
    """

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab
        self.target_ids: Tensor
        self.draft_ids: Tensor
        self.register_buffer("target_ids", vocab.target_ids.clone(), persistent=False)
        self.register_buffer("draft_ids", vocab.to_draft(), persistent=False)

    @property
    @abc.abstractmethod
    def needs(self) -> Needs:
        """What the head's input takes of the target's pass."""

    @abc.abstractmethod
    def initialise(self, parts: TargetParts, generator: torch.Generator) -> str:
        """Set the starting weights, from the target's where the family says so; returns a line that says how."""

    @abc.abstractmethod
    def losses(self, batch: Batch, parts: TargetParts, *, overlap: bool = False) -> list[StepStats]:
        """Teacher-forced losses of all unrolled steps; see alignment.py for which row predicts what."""

    @abc.abstractmethod
    def matches(self, batch: Batch, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Return (right, supervised), bool [steps, T] each: whose teacher-forced guess is the text's token."""

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
    ) -> tuple[Tensor, Tensor]:
        """Run rows through the head with its cache.

        Args:
            embeds: [B, M, H] target embeddings of the tokens that the rows read.
            hidden: [B, M, F] the target's features of committed rows (F = A*H); [B, M, H] of draft rows: the state
                that the row of the node above gave.
            positions: [B, M] rope positions.
            valid: [B] number of committed rows among M (they are appended and stay), or None for draft rows: appended
                behind the committed rows and the D drafted ones until the next committed call.
            seen: bool [B, M, D+M], which draft rows each new draft row sees, itself included; all see the committed
                rows. None = every row before it, as in a chain.

        Returns:
            logits [B, 1, Vd] and recycled state [B, 1, H] of each sequence's last valid row; of draft rows all:
            [B, M, Vd] and [B, M, H].
        """

    def supervised_rows(self, batch: Batch) -> list[Tensor]:
        """One bool [T] per step; the rows that count in acceptance."""
        return alignment.supervised(batch.answer, batch.documents, self.config.steps)

    def loss_counts(self, batch: Batch) -> Tensor:
        """Supervised rows inside the draft vocabulary by step, int64 [steps]: the loss's denominators."""
        counts = []
        for s, rows in enumerate(self.supervised_rows(batch)):
            labels = alignment.shift_left(batch.tokens, 2 + s)
            counts.append((rows & (self.draft_ids[labels] >= 0)).sum())
        return torch.stack(counts)

    def step_weights(self) -> list[float]:
        """Weight of each step in the loss."""
        return [self.config.step_decay**s for s in range(self.config.steps)]

    def forward(self, batch: Batch, parts: TargetParts) -> list[StepStats]:
        """Alias of `losses`, so that engines which wrap modules can call the head."""
        return self.losses(batch, parts)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32 (fp64 stays), returned in x's dtype: x / sqrt(mean(x^2) + eps) * weight."""
    y = x if x.dtype == torch.float64 else x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype)).to(x.dtype)
