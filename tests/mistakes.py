"""Classic mistakes in heads: each patches the package so that named checks must fail (invariant 9).

The tables at the end say which of them a family must be safe from, and which checks of `test_negative_controls.py`
catch each; `families.py` gives every family its table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.eval.decoder.drafters.network import HeadDrafter
from draftsmith.heads import alignment, hydra, layer, mtp, unrolled
from draftsmith.heads.base import DraftHead, TargetParts, rms_norm
from draftsmith.heads.eagle1 import Eagle1Head
from draftsmith.heads.eagle3 import Eagle3Head
from draftsmith.heads.eagle31 import Eagle31Head
from draftsmith.heads.hydra import HydraHead
from draftsmith.heads.layer import DecoderLayer, RecurrentHead
from draftsmith.heads.medusa import MedusaHead

Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], None]
Controls = dict[Mistake, tuple[str, ...]]
"""Names of the checks that must fail, by the mistake."""


# --- which row is which -----------------------------------------------------------------------------------------------


def shifted_labels(patch: Patch) -> None:
    patch.setattr(alignment, "label_index", lambda rows, step: rows + 1 + step)


def labels_of_the_next_step(patch: Patch) -> None:
    patch.setattr(alignment, "label_index", lambda rows, step: rows + 3 + step)


def shifted_inputs(patch: Patch) -> None:
    patch.setattr(alignment, "input_index", lambda rows, step: rows + step)


def shifted_teacher(patch: Patch) -> None:
    patch.setattr(alignment, "teacher_index", lambda rows, step: rows + 2 + step)


def unshifted_mask(patch: Patch) -> None:
    """What EAGLE-3's trainer does: the mask of row j + s alone."""

    def supervised(answer: Tensor, documents: Tensor, steps: int) -> list[Tensor]:
        return [alignment.shift_left(answer, s, False) & (documents >= 0) for s in range(steps)]

    patch.setattr(alignment, "supervised", supervised)


def one_shift_mask(patch: Patch) -> None:
    """The mask of the label alone: trains drafts of first answer tokens, which serving never asks for."""

    def supervised(answer: Tensor, documents: Tensor, steps: int) -> list[Tensor]:
        return [alignment._follows(answer, documents, 2 + s) for s in range(steps)]

    patch.setattr(alignment, "supervised", supervised)


def misses_left_out(patch: Patch) -> None:
    """Rows outside the draft vocabulary vanish from the denominator of acceptance."""
    rows = DraftHead.supervised_rows

    def fewer(self: Any, batch: Any, steps: int | None = None) -> list[Tensor]:
        known = self.draft_ids[batch.tokens] >= 0
        return [r & alignment.shift_left(known, 2 + s, False) for s, r in enumerate(rows(self, batch, steps))]

    patch.setattr(DraftHead, "supervised_rows", fewer)


def lost_final_norm(patch: Patch) -> None:
    patch.setattr(TargetParts, "normed", lambda self, last: last)


def absolute_ids(patch: Patch) -> None:
    """d2t is read as offsets although it holds ids: column i stands for id i + ids[i]."""
    start = HeadDrafter.__init__

    def added(self: Any, head: Any, parts: Any, *rest: Any) -> None:
        start(self, head, parts, *rest)
        self.columns = (self.columns + torch.arange(len(self.columns))) % len(parts.embed)

    patch.setattr(HeadDrafter, "__init__", added)


# --- of heads with a decoder layer ------------------------------------------------------------------------------------


def later_keys(patch: Patch) -> None:
    """Attention without a mask."""
    patch.setattr(unrolled, "_hide_later", lambda scores, rows, keys: None)


def one_document(patch: Patch) -> None:
    """The pack is attended as if it were a single text, wherever a family lays out its rows."""
    lay_out = layer.lay_out

    def joined(batch: Any, rows: Any) -> Any:
        return lay_out(dataclasses.replace(batch, documents=torch.zeros_like(batch.documents)), rows)

    for module in (layer, hydra, mtp):
        patch.setattr(module, "lay_out", joined)


def lost_rope(patch: Patch) -> None:
    project = DecoderLayer.project
    patch.setattr(DecoderLayer, "project", lambda self, x, positions: project(self, x, 0 * positions))


# --- of heads that read their own states ------------------------------------------------------------------------------


def rope_in_training(patch: Patch) -> None:
    """Positions j + 2s: the step counted twice."""
    unroll, project = RecurrentHead.unroll, DecoderLayer.project
    calls = [0]

    def counted(self: Any, *args: Any) -> Any:
        calls[0] = 0
        return unroll(self, *args)

    def late(self: Any, x: Any, positions: Any) -> Any:
        calls[0] += 1
        return project(self, x, positions + calls[0] - 1)

    patch.setattr(RecurrentHead, "unroll", counted)
    patch.setattr(DecoderLayer, "project", late)


def rope_in_drafting(patch: Patch) -> None:
    step = RecurrentHead.forward_step

    def late(self: Any, cache: Any, embeds: Any, hidden: Any, positions: Any, valid: Any, *seen: Any, **at: Any) -> Any:
        return step(self, cache, embeds, hidden, positions + (valid is None), valid, *seen, **at)

    patch.setattr(RecurrentHead, "forward_step", late)


def lost_diagonal(patch: Patch) -> None:
    """Rows don't see their own keys of later steps."""
    attend = layer.attend
    patch.setattr(layer, "attend", lambda q, keys, values, layout: attend(q, keys[:1], values[:1], layout))


def detached_steps(patch: Patch) -> None:
    """Gradients stop between unrolled steps."""
    finish = DecoderLayer.finish
    patch.setattr(DecoderLayer, "finish", lambda self, residual, x: finish(self, residual.detach(), x))


# --- of heads that read the target's normed state ---------------------------------------------------------------------


def pre_norm_input(patch: Patch) -> None:
    patch.setattr(DraftHead, "inputs", lambda self, aux, last, parts: last)


# --- of one family ----------------------------------------------------------------------------------------------------


def goal_of_the_row_before(patch: Patch) -> None:
    """EAGLE-1: the feature that is learned is off by one."""
    loss = Eagle1Head.feature_loss
    patch.setattr(
        Eagle1Head, "feature_loss", lambda self, found, goals, rows, *rest: loss(self, found, goals, rows - 1, *rest)
    )


def norm_before_the_readout(patch: Patch) -> None:
    """EAGLE-1: as if the predicted feature were a state before the final norm."""

    def leave(self: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.linspace(0.5, 1.5, state.shape[-1], dtype=state.dtype)
        return rms_norm(state, weight, self.config.rms_norm_eps), state

    patch.setattr(Eagle1Head, "leave", leave)


def hidden_first(patch: Patch) -> None:
    """EAGLE-1: the two inputs side by side in the other order."""
    enter = Eagle1Head.enter
    patch.setattr(Eagle1Head, "enter", lambda self, embeds, hidden: enter(self, hidden, embeds))


def attached_steps(patch: Patch) -> None:
    """EAGLE-1: gradients flow from step to step."""
    patch.setattr(Eagle1Head, "passed_on", lambda self, state: state)


def swapped_norms(patch: Patch) -> None:
    """EAGLE-3."""
    enter = Eagle3Head.enter

    def swapped(self: Any, *args: Any) -> Any:
        a, b = self.input_layernorm, self.hidden_norm
        self._parameters.update(input_layernorm=b, hidden_norm=a)
        try:
            return enter(self, *args)
        finally:
            self._parameters.update(input_layernorm=a, hidden_norm=b)

    patch.setattr(Eagle3Head, "enter", swapped)


def post_norm_recycled(patch: Patch) -> None:
    """EAGLE-3: what 3.1 does."""
    leave = Eagle3Head.leave
    patch.setattr(Eagle3Head, "leave", lambda self, state: (leave(self, state)[0],) * 2)


def normed_residual(patch: Patch) -> None:
    """EAGLE-3: what `norm_before_residual` asks for, unasked."""
    enter = Eagle3Head.enter

    def normed(self: Any, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = enter(self, embeds, hidden)
        return x, x[..., hidden.shape[-1] :]

    patch.setattr(Eagle3Head, "enter", normed)


def pre_norm_recycled(patch: Patch) -> None:
    """EAGLE-3.1: what 3 does."""
    patch.setattr(Eagle31Head, "leave", Eagle3Head.leave)


def one_fc_norm(patch: Patch) -> None:
    """EAGLE-3.1: the first state's norm for all of them."""

    def fuse(self: Any, features: Tensor) -> Any:
        states = features.unflatten(-1, (len(self.fc_norm), -1))
        return self.fc(rms_norm(states, self.fc_norm[0], self.config.rms_norm_eps).flatten(-2))

    patch.setattr(Eagle31Head, "fuse", fuse)


def shared_blocks(patch: Patch) -> None:
    """Medusa: all heads run the first one's blocks."""
    first = property(lambda self: [self._modules["blocks"][0]] * self.config.steps)
    patch.setattr(MedusaHead, "blocks", first, raising=False)


def next_head_in_drafting(patch: Patch) -> None:
    """Medusa: heads counted from 1."""
    forward = MedusaHead.forward_step

    def late(self: Any, *args: Any, step: int = 0) -> Any:
        return forward(self, *args, step=(step + 1) % self.config.steps)

    patch.setattr(MedusaHead, "forward_step", late)


def next_output_rows_in_drafting(patch: Patch) -> None:
    """Hydra: a head's blocks with the output rows of the one after it."""
    forward = HydraHead.forward_step

    def late(self: Any, *args: Any, step: int = 0) -> Any:
        kept = self._modules["lm_heads"]
        self._modules["lm_heads"] = nn.ModuleList([*kept[1:], kept[0]])
        try:
            return forward(self, *args, step=step)
        finally:
            self._modules["lm_heads"] = kept

    patch.setattr(HydraHead, "forward_step", late)


def reversed_embeddings(patch: Patch) -> None:
    """Hydra: the newest draft first."""
    forward = hydra.ResidualBlocks.forward

    def backwards(self: Any, z: Tensor) -> Tensor:
        width = self.shortcut.out_features
        read = z[..., width:].unflatten(-1, (-1, width)).flip(-2).flatten(-2)
        return forward(self, torch.cat((z[..., :width], read), -1))

    patch.setattr(hydra.ResidualBlocks, "forward", backwards)


def rope_behind_a_prompt(patch: Patch) -> None:
    """Hydra, whose drafts have no position: committed rows behind others stand one too far."""
    forward = HydraHead.forward_step

    def late(self: Any, cache: Any, embeds: Any, hidden: Any, positions: Any, *rest: Any, **at: Any) -> Any:
        return forward(self, cache, embeds, hidden, positions + (cache.longest > 0), *rest, **at)

    patch.setattr(HydraHead, "forward_step", late)


# --- what applies to which kind of head -------------------------------------------------------------------------------

EVERY: Controls = {
    shifted_labels: ("losses",),
    shifted_teacher: ("losses",),
    one_shift_mask: ("losses",),
    misses_left_out: ("losses",),
    lost_final_norm: ("losses",),
    absolute_ids: ("drafts",),
}
SOFT_LABELS: Controls = {shifted_teacher: ("losses", "no_leak")}
READS_DRAFTS: Controls = {shifted_inputs: ("losses", "train_decode")}
HAS_LAYER: Controls = {
    later_keys: ("losses", "no_leak"),
    one_document: ("apart",),
    lost_rope: ("losses", "train_decode"),
}
READS_LAST_STATE: Controls = {pre_norm_input: ("losses", "train_decode", "drafts")}
RECURRENT: Controls = {
    **EVERY, **SOFT_LABELS, **READS_DRAFTS, **HAS_LAYER,
    rope_in_training: ("losses", "train_decode"),
    rope_in_drafting: ("train_decode", "drafts"),
    lost_diagonal: ("losses", "train_decode"),
}  # fmt: skip

EAGLE1: Controls = {
    **RECURRENT, **READS_LAST_STATE,
    goal_of_the_row_before: ("losses", "train_decode"),
    norm_before_the_readout: ("losses", "train_decode", "drafts"),
    hidden_first: ("losses", "train_decode", "drafts"),
    attached_steps: ("gradients",),
}  # fmt: skip
EAGLE3: Controls = {
    **RECURRENT,
    lost_final_norm: ("losses", "gradients"),
    detached_steps: ("gradients",),
    swapped_norms: ("losses", "gradients", "train_decode", "drafts"),
    post_norm_recycled: ("losses", "train_decode", "drafts"),
    normed_residual: ("losses", "train_decode", "drafts"),
}
EAGLE31: Controls = {
    **RECURRENT,
    detached_steps: ("gradients",),
    swapped_norms: ("losses", "train_decode", "drafts"),
    pre_norm_recycled: ("losses", "train_decode", "drafts"),
    one_fc_norm: ("losses", "train_decode", "drafts"),
}
HYDRA: Controls = {
    **EVERY, **SOFT_LABELS, **READS_DRAFTS, **HAS_LAYER, **READS_LAST_STATE,
    rope_behind_a_prompt: ("train_decode",),
    next_output_rows_in_drafting: ("train_decode", "drafts"),
    reversed_embeddings: ("losses", "train_decode", "drafts"),
}  # fmt: skip
MEDUSA: Controls = {
    **EVERY, **READS_LAST_STATE,
    labels_of_the_next_step: ("losses", "train_decode"),
    shared_blocks: ("losses", "train_decode", "drafts"),
    next_head_in_drafting: ("train_decode", "drafts"),
}  # fmt: skip
