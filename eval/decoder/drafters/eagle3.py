"""EAGLE-3 chain drafting: the head runs once over the accepted rows, then once for each further depth."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ....errors import DraftsmithError
from ....heads.base import Cache, DraftHead
from ....heads.linear import can_pack, pack_linears
from ..types import Drafter, TokenTree, Verdict, chain, clock


class Eagle3Drafter(Drafter):
    """Greedy chains of `depth` tokens.

    Args:
        head: the trained head; a copy in the embedding's device and dtype is made for decoding.
        embed: [V, H] the target's input embedding.
        depth: K, drafted tokens a step.
    """

    def __init__(self, head: DraftHead, embed: Tensor, depth: int) -> None:
        if depth < 1:
            raise DraftsmithError(f"the draft depth {depth} must be at least 1")
        self.head = copy.deepcopy(head).to(embed.device, embed.dtype).eval().requires_grad_(False)
        if can_pack(embed.device, embed.dtype):
            pack_linears(self.head, keep=None)
        self.embed, self.depth, self.needs = embed, depth, head.needs
        self.cache: Cache

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter."""
        device, dtype = self.embed.device, self.embed.dtype
        self.cache = self.head.new_cache(slots, capacity, device, dtype)
        self.first = torch.zeros(slots, dtype=torch.int64, device=device)
        self.state = torch.zeros(slots, 1, self.head.config.hidden_size, device=device, dtype=dtype)

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter: rows 0..n-1 read tokens 1..n."""
        one = slice(slot, slot + 1)
        n = len(aux)
        self.cache.lengths[slot] = 0
        view = Cache(self.cache.keys[one], self.cache.values[one], self.cache.lengths[one])
        valid = torch.tensor([n], device=aux.device)
        positions = torch.arange(n, device=aux.device)[None]
        guess, state = self._run(view, tokens[None, 1:], aux[None], positions, valid)
        self.first[one], self.state[one] = guess, state
        self.cache.longest = max(self.cache.longest, n)

    def propose(self, roots: Tensor) -> TokenTree:
        """See Drafter."""
        b = len(roots)
        tokens, state = [roots, self.first[:b]], self.state[:b]
        self.cache.drafted = 0
        for _ in range(self.depth - 1):
            positions = (self.cache.lengths[:b] + self.cache.drafted)[:, None]
            guess, state = self._run(self.cache, tokens[-1][:, None], state, positions, None)
            tokens.append(guess)
        return chain(torch.stack(tokens, 1))

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, lengths: list[int]) -> None:
        """See Drafter: the row of each accepted node reads the node after it, the last one the bonus token."""
        b, p = verdict.path.shape
        path_tokens = tree.tokens.gather(1, verdict.path)
        read = torch.cat((path_tokens[:, 1:], verdict.bonus[:, None]), 1)
        at_end = torch.arange(p, device=read.device) == verdict.n_accepted[:, None]
        read = torch.where(at_end, verdict.bonus[:, None], read)
        features = aux[:, :p] if tree.is_chain else aux.gather(1, verdict.path[..., None].expand(-1, -1, aux.shape[-1]))
        valid = verdict.n_accepted + 1
        positions = self.cache.lengths[:b, None] + torch.arange(p, device=read.device)
        self.cache.longest = max(lengths)  # rows past a sequence's own are written behind it, within p of this
        guess, state = self._run(self.cache, read, features, positions, valid)
        self.first[:b], self.state[:b] = guess, state
        self.cache.longest = max(lengths)

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""
        if slot != last:
            for x in (self.cache.keys, self.cache.values, self.cache.lengths, self.first, self.state):
                x[slot] = x[last]

    def _run(
        self, cache: Cache, tokens: Tensor, hidden: Tensor, positions: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One head pass: best target token [B] and recycled state [B, 1, H]."""
        started = clock(self.embed.device, self.timed)
        logits, state = self.head.forward_step(cache, self.embed[tokens], hidden, positions, valid)
        guess = self.head.target_ids[logits.argmax(-1)]
        self.seconds += clock(self.embed.device, self.timed) - started
        return guess, state


DRAFTER = Eagle3Drafter
