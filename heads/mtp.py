"""Multi-token prediction: modules that read the target's last state and the tokens after it (arXiv 2412.19437, 2.2).

    z_j    = eh_proj [enorm(E(t_{j+1+s})); hnorm(h)]      or the other way round (`concat_order`)
    u_j    = z_j + attention(input_norm(z_j))
    a_j    = u_j + mlp(post_attention_norm(u_j))
    q_j    = softmax(lm_head(norm(a_j)))                  the target's own frozen rows; predicts t_{j+2+s}
    loss   = -log q_j[t_{j+2+s}]                          the text's own token

h at step 0 is the target's state n, before its final norm or after (`last_state`); at step s it is what step s-1 hands
on: a_j, or norm(a_j) (`recycled`). DeepSeek-V3's weights, MiMo's and FastMTP's are served with both after the norm.

`modules: 1` is one module that reads its own states (FastMTP, arXiv 2509.18362, which weighs its three steps 0.51, 0.31
and 0.18: 0.6 ** s, scaled). Step s of row j attends to the module's step-0 rows 0..j and to its own rows of steps 1..s:
see layer.py. FastMTP's training lets every step attend to all rows of that step at unchanged positions, which no
decoder does: it has no such rows of later steps in its cache. Here training sees what drafting will.

`modules: D` is a module for each of D steps, with weights, keys and values of its own (DeepSeek-V3): it drafts D
tokens. Row j of module s attends to the module's rows 0..j-s and to itself, at position j + s. Those are the rows whose
tokens are known when drafting starts behind row j: row i reads t_{i+1+s}, and t_{j+1} is the last one. For s <= 1 this
is full causal attention, as the paper has it. For s >= 2 the paper's training also shows rows j-s+1 .. j-1, whose
tokens are still drafts while decoding; rows of the text see no more than drafted ones, so that they are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .base import Batch, Cache, TargetParts, Unrolled
from .config import HeadConfig, layer_values, target_values
from .layer import RecurrentHead, last_valid, read_embeds
from .mtp_modules import FIXED, MtpConfig, MtpModule
from .readout import TargetReadout
from .registry import Family
from .unrolled import attend, cached_attention, lay_out
from .vocab import DraftVocab


def mtp_config(target_config: Any, vocab: DraftVocab, **identity: Any) -> MtpConfig:
    """Derive a head's config from its target's (a transformers text config).

    Args:
        target_config: shapes, rope and norm epsilon are taken from it.
        vocab: the draft vocabulary.
        identity: target_id, target_revision, target_fingerprint, chat_template_sha256, trained_length, and optionally
            steps, step_decay, the fields of `MtpConfig` and shapes that should differ from the target's. `layer_ids` is
            ignored: no aux state is read.

    Raises:
        DraftsmithError: values that contradict each other, or what the family computes.
    """
    values: dict[str, Any] = {
        "family": "mtp",
        "steps": 3,
        "step_decay": 0.6,
        "step_weights": [],
        "modules": 1,
        "last_state": "post",
        "recycled": "post_norm",
        "concat_order": "embed_first",
        **target_values(target_config, vocab),
        **layer_values(target_config),
        **FIXED,
        **identity,
        "layer_ids": [],
    }
    return MtpConfig.from_dict(values, "mtp config")


class MtpHead(TargetReadout):
    """What both kinds share; building one makes the kind that the config asks for."""

    hard_labels = True
    config: MtpConfig

    def __new__(cls, config: HeadConfig | None = None, *_: Any) -> MtpHead:
        """The kind is the config's; copies are made of their own class, without arguments."""
        kind: type[MtpHead] = cls
        if cls is MtpHead and isinstance(config, MtpConfig):
            kind = RecursiveMtp if config.modules == 1 else ChainedMtp
        return super().__new__(kind)

    def step_weights(self, steps: int | None = None) -> list[float]:
        """See DraftHead; the config may name them one by one."""
        named = self.config.step_weights
        if not named:
            return super().step_weights(steps)
        return [named[s] if s < len(named) else 0.0 for s in range(steps or len(named))]


class RecursiveMtp(MtpModule, MtpHead, RecurrentHead):
    """One module for all steps."""

    config: MtpConfig

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        self.build()

    def initialise(self, parts: TargetParts, generator: torch.Generator) -> str:
        """See MtpModule.start."""
        self.start(parts, generator)
        return "start: a layer that adds nothing; output rows are the target's and stay"

    def fuse(self, features: Tensor) -> Tensor:
        """The target's state as it is."""
        return features


class _Depth(MtpModule):
    """One of several modules."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        self.build()


class ChainedMtp(MtpHead):
    """A module for each step.

    All modules share the cache's slots: slot p of module s holds its row p - s, which reads the same token as row p of
    module 0, at the same position. So as many committed rows go into every module; each reads the states that the one
    before it made one slot earlier, the first of them from the call before (`Cache.pending`). Slots before s hold no
    row. Module s's keys and values are heads s * Hk .. (s+1) * Hk - 1.

    Attributes:
        depths: the modules by step.
        checkpointing: see RecurrentHead.
    """

    checkpointing: bool = False

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        self.depths = nn.ModuleList(_Depth(self.config) for _ in range(self.config.modules))

    @property
    def most_depth(self) -> int:
        """One draft a module."""
        return self.config.modules

    def initialise(self, parts: TargetParts, generator: torch.Generator) -> str:
        """See MtpModule.start: each module by itself."""
        for depth in self._by_step:
            depth.start(parts, generator)
        return f"start: {len(self.depths)} modules whose layers add nothing; output rows are the target's and stay"

    def unroll(self, batch: Batch, parts: TargetParts, rows: Tensor, steps: int) -> Iterator[Unrolled]:
        """See DraftHead; all T rows go through every module but the last: the next one's keys come from them."""
        weight = self.output_weight(parts)
        hidden = self.inputs(batch.features, batch.last, parts).to(self._by_step[0].norm.dtype)
        for s in range(steps):
            run = rows if s == steps - 1 else torch.arange(len(batch.tokens), device=rows.device)
            arguments = (batch, parts, run, hidden, s)
            if self.checkpointing and torch.is_grad_enabled():
                # no step draws anything: there is no state of a generator to keep
                readout, hidden = checkpoint(self._step, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                readout, hidden = self._step(*arguments)
            yield Unrolled(readout if run is rows else readout[rows], weight)

    def _step(self, batch: Batch, parts: TargetParts, run: Tensor, hidden: Tensor, s: int) -> tuple[Tensor, Tensor]:
        """What module s gives rows `run` [R] to read out and to hand on; `hidden` is [T, H]."""
        depth, every = self._by_step[s], torch.arange(len(hidden), device=hidden.device)
        x, residual = depth.enter(read_embeds(batch, parts, every, s, hidden), hidden)
        q, k, v = depth.layer.project(x, batch.positions + s)
        attended = attend_behind(q[run], k, v, batch, run, s).flatten(-2)
        return depth.leave(depth.layer.finish(residual[run], depth.layer.gated(attended, x, run)))

    def new_cache(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Cache:
        """See DraftHead."""
        count = len(self.depths)
        one = self._by_step[0].layer.new_cache(batch, capacity, device, dtype)
        pending = torch.zeros(batch, count - 1, self.config.hidden_size, device=device, dtype=dtype)
        keys, values = (x.repeat(1, count, 1, 1) for x in (one.keys, one.values))
        return Cache(keys, values, one.lengths, pending=pending)

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
        """See DraftHead; a draft row sees no other drafts: they have no rows in its module, so `seen` has no say."""
        if valid is not None:
            readout, recycled = self._commit(cache, embeds, hidden, positions, valid)
        else:
            newest = cache.lengths[: len(embeds), None] - 1
            readout, recycled = self._run(cache, step, embeds, hidden, positions, newest)
        return self.logits(readout), recycled

    def _commit(
        self, cache: Cache, embeds: Tensor, hidden: Tensor, positions: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Append rows in every module; readout and recycled state of module 0's last valid row, [B, 1, H] each."""
        b, m = embeds.shape[:2]
        slots = cache.lengths[:b, None] + torch.arange(m, device=embeds.device)
        readout, made = self._run(cache, 0, embeds, hidden, positions, slots)
        last = last_valid(readout, valid), last_valid(made, valid)
        assert cache.pending is not None  # new_cache gives it
        for s in range(1, len(self.depths)):
            before = cache.pending[:b, s - 1 : s]
            hidden = torch.cat((before, made[:, :-1]), 1).masked_fill((slots < s)[..., None], 0.0)
            before.copy_(last_valid(made, valid))
            if s < len(self.depths) - 1:
                _, made = self._run(cache, s, embeds, hidden, positions, slots - s)
            else:  # nothing reads what the last module makes of committed rows
                self._write(cache, s, self._by_step[s].enter(embeds, hidden)[0], positions)
        cache.lengths[:b] += valid
        cache.longest += m
        cache.drafted = 0
        return last

    def _run(
        self, cache: Cache, s: int, embeds: Tensor, hidden: Tensor, positions: Tensor, newest: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run rows [B, M] of module s in the slots behind the committed ones.

        Args:
            newest: [B, M] or [B, 1] the last slot that each row sees beside its own.

        Returns:
            What all of them give to read out and to hand on, [B, M, H] each.
        """
        depth = self._by_step[s]
        x, residual = depth.enter(embeds, hidden)
        q, keys, values, slots = self._write(cache, s, x, positions)
        at = torch.arange(keys.shape[2], device=x.device)
        visible = ((at >= s) & (at <= newest[..., None])) | (at == slots[..., None])
        attended = depth.layer.gated(cached_attention(q, keys, values, visible), x)
        return depth.leave(depth.layer.finish(residual, attended))

    def _write(self, cache: Cache, s: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Put rows [B, M] that module s's attention reads behind the committed ones.

        Returns:
            Their queries, the module's keys and values up to them, and their slots [B, M].
        """
        b, m = x.shape[:2]
        q, k, v = self._by_step[s].layer.project(x, positions)
        heads = slice(s * k.shape[2], (s + 1) * k.shape[2])
        keys, values = cache.keys[:b, heads], cache.values[:b, heads]
        slots = cache.lengths[:b, None] + torch.arange(m, device=x.device)
        index = torch.arange(b, device=x.device)[:, None]
        keys[index, :, slots] = k
        values[index, :, slots] = v
        longest = min(cache.longest + m, keys.shape[2])
        return q, keys[:, :, :longest], values[:, :, :longest], slots

    @property
    def _by_step(self) -> list[MtpModule]:
        return list(self.depths)  # type: ignore[arg-type]  # nothing else is in it


def attend_behind(q: Tensor, k: Tensor, v: Tensor, batch: Batch, rows: Tensor, behind: int) -> Tensor:
    """Attention of rows j over the rows 0 .. j-`behind` of their documents and over themselves.

    Args:
        q: [R, Hq, D] of the rows [R]; k, v: [T, Hk, D] of all.

    Returns:
        [R, Hq, D].
    """
    if behind == 0:
        return attend(q, [k], [v], lay_out(batch, rows))
    far = (batch.positions[rows] >= behind).nonzero().flatten()
    own = rows[far]
    seen = attend(q[far], (k, k[own]), (v, v[own]), lay_out(batch, own - behind))
    alone = v[rows].repeat_interleave(q.shape[1] // v.shape[1], 1)
    return alone.index_copy(0, far, seen)


FAMILY = Family("mtp", MtpConfig, MtpHead)  # type: ignore[type-abstract]  # its __new__ makes one of two kinds
