"""Drafters that grow trees with a network of their own: the shape searches, the network keeps the accepted rows."""

from __future__ import annotations

import abc
import copy

import torch
from torch import Tensor

from ....errors import DraftsmithError
from ....heads.base import Cache, DraftHead, TargetParts
from ....heads.config import LayerConfig
from ....heads.linear import can_pack, pack_linears
from ..sampling import Draws
from ..search import Shape
from ..types import Drafter, HostStep, TokenTree, Verdict, clock

# A prompt is read in pieces of so many rows, and fewer where rows x cached rows would make a larger mask than this.
_MOST_ROWS, _MOST_MASK = 512, 1 << 21


class NetworkDrafter(Drafter):
    """A drafter that is its shape's `Network`.

    Args:
        shape: how a tree grows.
        vocabulary: tokens that the network can propose.

    Attributes:
        logits: [slots, Vq] behind each sequence's root.
        state: [slots, 1, H] recycled state there; None where the network keeps its own.

    Raises:
        DraftsmithError: the shape asks for more tokens than the network has.
    """

    columns: Tensor | None = None
    logits: Tensor
    state: Tensor | None = None

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        shape.check(vocabulary)
        self.shape, self.depth, self.rows = shape, shape.depth, shape.rows

    @abc.abstractmethod
    def expand(
        self, tokens: Tensor, states: Tensor | None, depth: int, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See grow.Network."""

    def first(self, b: int) -> tuple[Tensor, Tensor | None]:
        """See grow.Network."""
        return self.logits[:b], None if self.state is None else self.state[:b]

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        """See Drafter."""
        return self.shape.grow(self, roots, draws)


def tokens_after(tree: TokenTree, verdict: Verdict) -> Tensor:
    """The token behind each node of the accepted path [B, P]: the next node's, behind the last one the bonus token."""
    after = torch.cat((tree.tokens.gather(1, verdict.path)[:, 1:], verdict.bonus[:, None]), 1)
    at_end = torch.arange(after.shape[1], device=after.device) == verdict.n_accepted[:, None]
    return torch.where(at_end, verdict.bonus[:, None], after)


def prepare_head(head: DraftHead, parts: TargetParts) -> DraftHead:
    """A frozen copy of a head for decoding: in the device and dtype of the target's parts, packed where that can be."""
    device, dtype = parts.embed.device, parts.embed.dtype
    ready = copy.deepcopy(head).to(device, dtype).eval().requires_grad_(False)
    ready.attach(parts)
    if can_pack(device, dtype):
        pack_linears(ready, keep=None)
    return ready


class HeadDrafter(NetworkDrafter):
    """An autoregressive draft head: reads the target's features of accepted rows, and its own states of drafted ones.

    Row j reads token j+1 beside the features of row j, so that after each step the head has one row for every row of
    the target's cache.

    Args:
        head: the trained head; a copy in the target's device and dtype is made for decoding.
        parts: the target's frozen pieces; their device and dtype are the decoder's.
        shape: how a tree grows.
        ready: that copy, `prepare_head(head, parts)`, where drafters that take turns share one.

    Raises:
        DraftsmithError: the shape is deeper or wider than the head can draft.
    """

    state: Tensor

    def __init__(self, head: DraftHead, parts: TargetParts, shape: Shape, ready: DraftHead | None = None) -> None:
        super().__init__(shape, head.config.draft_vocab_size)
        if head.most_depth is not None and shape.depth > head.most_depth:
            raise DraftsmithError(
                f"the head drafts {head.most_depth} tokens, the tree is {shape.depth} deep: take a shallower tree"
            )
        self.parts, self.embed = parts, parts.embed
        self.head = prepare_head(head, parts) if ready is None else ready
        self.needs, self.columns = head.needs, self.head.target_ids
        self.cache: Cache

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter."""
        config = self.head.config
        rows = capacity + self.shape.expanded
        self.cache = self.head.new_cache(slots, rows, self.embed.device, self.embed.dtype)
        self.logits = self.embed.new_zeros(slots, config.draft_vocab_size)
        self.state = self.embed.new_zeros(slots, 1, self.head.state_width)

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter: rows 0..n-1 read tokens 1..n."""
        one = slice(slot, slot + 1)
        n = len(aux)
        self.cache.lengths[slot] = 0
        pending = None if self.cache.pending is None else self.cache.pending[one]
        view = Cache(self.cache.keys[one], self.cache.values[one], self.cache.lengths[one], pending=pending)
        config = self.head.config
        masks = config.num_attention_heads // config.num_key_value_heads if isinstance(config, LayerConfig) else 1
        rows = max(1, min(_MOST_ROWS, _MOST_MASK // (masks * n)))
        for at in range(0, n, rows):
            positions = torch.arange(at, min(at + rows, n), device=aux.device)
            valid = torch.full((1,), len(positions), device=aux.device)
            part = slice(at, at + rows)
            features = self.head.inputs(aux[None, part], None if last is None else last[None, part], self.parts)
            read = tokens[None, 1 + at : 1 + at + rows]
            logits, self.state[one] = self._run(view, read, features, positions[None], valid)
        self.logits[one] = logits[:, 0]
        self.cache.longest = max(self.cache.longest, n)

    def first(self, b: int) -> tuple[Tensor, Tensor | None]:
        """See grow.Network."""
        self.cache.drafted = 0
        return super().first(b)

    def expand(
        self, tokens: Tensor, states: Tensor | None, depth: int, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See grow.Network: the row of a node at depth d stands d-1 behind the committed ones."""
        assert states is not None  # `first` gave one
        positions = (self.cache.lengths[: len(tokens), None] + depth - 1).expand_as(tokens)
        return self._run(self.cache, tokens, states, positions, None, seen, depth)

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """See Drafter: the row of each accepted node reads the token after it."""
        b, p = verdict.path.shape
        read = tokens_after(tree, verdict)
        aux, accepted = _accepted(aux, tree, verdict), None if last is None else _accepted(last, tree, verdict)
        features = self.head.inputs(aux, accepted, self.parts)
        positions = self.cache.lengths[:b, None] + torch.arange(p, device=read.device)
        self.cache.longest = max(step.lengths)  # rows past a sequence's own are written behind it, within p of this
        logits, self.state[:b] = self._run(self.cache, read, features, positions, verdict.n_accepted + 1)
        self.logits[:b] = logits[:, 0]
        self.cache.longest = max(step.lengths)

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""
        if slot != last:
            cache = self.cache
            for x in (cache.keys, cache.values, cache.lengths, cache.pending, self.logits, self.state):
                if x is not None:
                    x[slot] = x[last]

    def _run(
        self, cache: Cache, tokens: Tensor, hidden: Tensor, positions: Tensor, valid: Tensor | None,
        seen: Tensor | None = None, step: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One head pass: see DraftHead.forward_step."""
        started = clock(self.embed.device, self.timed)
        out = self.head.forward_step(cache, self.embed[tokens], hidden, positions, valid, seen, step=step)
        self.seconds += clock(self.embed.device, self.timed) - started
        return out


def _accepted(states: Tensor, tree: TokenTree, verdict: Verdict) -> Tensor:
    """Rows [B, P, F] of the accepted path of states [B, N, F]."""
    if tree.is_chain:
        return states[:, : verdict.path.shape[1]]
    return states.gather(1, verdict.path[..., None].expand(-1, -1, states.shape[-1]))
