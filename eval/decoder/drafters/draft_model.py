"""An independent small model drafts for a large one of the same tokenizer (arXiv 2211.17192, 2302.01318)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....errors import DraftsmithError
from ....heads.base import Needs
from ....heads.target import Target
from ..cache import TreeCache
from ..prefill import Prefill
from ..probe import forward_with_cache, kv_shapes
from ..search import Shape
from ..types import HostStep, TokenTree, Verdict, clock, pack_bits
from .network import NetworkDrafter, tokens_after

# Words, digits, accents, another script, an emoji, code and blanks: where tokenizers of one vocabulary differ.
_PROBE = "The quick brown fox: 3.14159, naïve 東京 🙂\n\tfor (i = 0; i < 10; ++i) {}  "


class DraftModelDrafter(NetworkDrafter):
    """A draft model with a cache of its own.

    After each step it runs the accepted tokens and the bonus token, all sequences in one pass; nothing that it computed
    for drafted rows is kept. So it holds for any tree, also one to which others have added nodes. Logits beyond the
    target's vocabulary (models pad theirs differently) are cut off: what the target lacks is never proposed.

    Args:
        target: the model that it drafts for.
        draft: the model that drafts, on the target's device and in its dtype.
        shape: how a tree grows.

    Raises:
        DraftsmithError: another tokenizer, device or dtype, or a shape wider than the vocabulary.
    """

    def __init__(self, target: Target, draft: Target, shape: Shape) -> None:
        check_same_tokenizer(target, draft)
        for what, theirs, own in (
            ("device", target.device, draft.device),
            ("dtype", target.dtype, draft.dtype),
        ):
            if theirs != own:
                raise DraftsmithError(
                    f"the draft model {draft.id!r} has {what} {own}, the target {theirs}: load it with the target's"
                )
        self.vocabulary = min(target.vocab_size, draft.vocab_size)
        super().__init__(shape, self.vocabulary)
        self.draft, self.context = draft, draft.max_positions
        self.cache: TreeCache

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter."""
        draft = self.draft
        # the root has a row here, which it hasn't in the target's cache
        room = capacity + 1 + self.shape.expanded
        self.cache = TreeCache(kv_shapes(draft), slots, room, draft.device, draft.dtype)
        self.prefill = Prefill(draft, self.cache, Needs(), {})
        self.logits = torch.zeros(slots, self.vocabulary, device=draft.device, dtype=draft.dtype)
        self.drafted = torch.empty(slots, 0, dtype=torch.int64, device=draft.device)

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter: all tokens run, the first emitted one included."""
        self.cache.clear(slot)
        started = clock(self.draft.device, self.timed)
        (filled,) = self.prefill.run(slot, [tokens.tolist()])
        self.seconds += clock(self.draft.device, self.timed) - started
        self.logits[slot] = filled.logits[0, : self.vocabulary]

    def first(self, b: int) -> tuple[Tensor, Tensor | None]:
        """See grow.Network."""
        self.drafted = self.drafted.new_empty(b, 0)
        return super().first(b)

    def expand(
        self, tokens: Tensor, states: Tensor | None, depth: int, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See grow.Network: a node at depth d stands d-1 behind the committed rows, the root among them."""
        earlier = self.drafted.shape[1]
        self.drafted = torch.cat((self.drafted, torch.full_like(tokens, depth - 1)), 1)
        return self._run(tokens, self.drafted, None if seen is None else pack_bits(seen), earlier), None

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """See Drafter: rows behind a sequence's own accepted ones run beside them and are not kept."""
        read = tokens_after(tree, verdict)
        b, p = read.shape
        logits = self._run(read, torch.arange(p, device=read.device).expand(b, p), None)
        new = [after + 1 - before for after, before in zip(step.lengths, self.cache.host_lengths, strict=False)]
        self.cache.keep(b, None, verdict.n_accepted + 1, new)
        at = verdict.n_accepted[:, None, None].expand(-1, 1, self.vocabulary)
        self.logits[:b] = logits.gather(1, at)[:, 0]

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""
        self.cache.copy(last, slot, self.cache.host_lengths[last])
        self.prefill.moved(last, slot)
        self.logits[slot] = self.logits[last]

    def _run(self, tokens: Tensor, depth: Tensor, ancestors: Tensor | None, earlier: int = 0) -> Tensor:
        """One pass of new rows behind the cached ones: logits [B, M, Vq]."""
        started = clock(self.draft.device, self.timed)
        with self.cache.step(0, len(tokens), depth, ancestors, earlier) as context:
            # drafts past the end of the context are cut by the loop; positions must only exist
            positions = context.positions.clamp(max=self.draft.max_positions - 1)
            logits = forward_with_cache(self.draft, tokens, positions, self.cache)
        self.seconds += clock(self.draft.device, self.timed) - started
        return logits[..., : self.vocabulary]


def check_same_tokenizer(target: Target, draft: Target) -> None:
    """Refuse a draft model to which a token id means something else than to the target.

    Raises:
        DraftsmithError: names the first difference: a token, or how the probe text is split.
    """
    theirs, own = target.tokenizer, draft.tokenizer
    way_out = "a draft model must share the target's tokenizer"
    names = f"the draft model {draft.id!r} and the target {target.id!r}"
    wanted, found = theirs.get_vocab(), own.get_vocab()
    if wanted != found:
        differing = [t for t in wanted.keys() | found.keys() if wanted.get(t) != found.get(t)]
        token = min(differing, key=lambda t: (min(wanted.get(t, 1 << 31), found.get(t, 1 << 31)), t))
        raise DraftsmithError(
            f"{names} differ in {len(differing)} tokens: {token!r} is {_id(found.get(token))} to the draft model, "
            f"{_id(wanted.get(token))} to the target; {way_out}"
        )
    ids = [tokenizer.encode(_PROBE, add_special_tokens=False) for tokenizer in (theirs, own)]
    if ids[0] != ids[1]:
        at = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
        raise DraftsmithError(
            f"{names} split the same text differently: token {at} of {_PROBE!r} is {_id((ids[1] + [None])[at])} "
            f"to the draft model, {_id((ids[0] + [None])[at])} to the target; {way_out}"
        )


def _id(value: Any) -> str:
    return "missing" if value is None else f"id {value}"
