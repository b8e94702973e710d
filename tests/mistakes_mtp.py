"""Classic mistakes in MTP heads, as in `mistakes.py`: of one module for all steps, and of a module for each."""

from __future__ import annotations

from typing import Any

import torch
from mistakes import (
    EVERY,
    HAS_LAYER,
    READS_DRAFTS,
    RECURRENT,
    Controls,
    Patch,
    detached_steps,
    labels_of_the_next_step,
    pre_norm_input,
    shifted_teacher,
)
from torch import Tensor

from draftsmith.heads import mtp, mtp_modules
from draftsmith.heads.base import rms_norm
from draftsmith.heads.mtp import ChainedMtp
from draftsmith.heads.mtp_modules import MtpModule


def swapped_inputs(patch: Patch) -> None:
    """The two inputs side by side in the other order."""
    patch.setitem(mtp_modules.ORDERS, "embed_first", mtp_modules.ORDERS["hidden_first"])


def lost_embedding_norm(patch: Patch) -> None:
    """The embedding as it is."""

    def enter(self: Any, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        eps = self.config.rms_norm_eps
        z = self.eh_proj(torch.cat((embeds, rms_norm(hidden, self.hnorm, eps)), -1))
        return rms_norm(z, self.input_layernorm, eps), z

    patch.setattr(MtpModule, "enter", enter)


def normed_residual(patch: Patch) -> None:
    """The residual is what attention reads."""
    enter = MtpModule.enter
    patch.setattr(MtpModule, "enter", lambda self, *args: (enter(self, *args)[0],) * 2)


def module_output_recycled(patch: Patch) -> None:
    """The state before the norm is handed on."""
    leave = MtpModule.leave
    patch.setattr(MtpModule, "leave", lambda self, state: (leave(self, state)[0], state))


def rope_in_module_drafting(patch: Patch) -> None:
    """Drafted rows stand one too far."""
    run = ChainedMtp.forward_step

    def late(self: Any, cache: Any, embeds: Any, hidden: Any, positions: Any, valid: Any, *seen: Any, **at: Any) -> Any:
        return run(self, cache, embeds, hidden, positions + (valid is None), valid, *seen, **at)

    patch.setattr(ChainedMtp, "forward_step", late)


def rows_before_the_newest(patch: Patch) -> None:
    """Modules by step: in training a row sees rows of its module whose tokens are drafts while decoding."""
    attend = mtp.attend_behind
    patch.setattr(mtp, "attend_behind", lambda q, k, v, batch, rows, by: attend(q, k, v, batch, rows, max(by - 1, 0)))


def committed_rows_see_all(patch: Patch) -> None:
    """Modules by step: committed rows see all rows of their module before them."""
    run = ChainedMtp._run

    def wide(self: Any, cache: Any, s: int, *args: Any) -> Any:
        *others, newest = args
        return run(self, cache, s, *others, newest if newest.shape[1] == 1 else newest + s)

    patch.setattr(ChainedMtp, "_run", wide)


def lost_pending_states(patch: Patch) -> None:
    """Modules by step: the first row of a call reads nothing of the call before."""
    commit = ChainedMtp._commit

    def forgetful(self: Any, cache: Any, *args: Any) -> Any:
        cache.pending.zero_()
        return commit(self, cache, *args)

    patch.setattr(ChainedMtp, "_commit", forgetful)


def one_module(patch: Patch) -> None:
    """Modules by step: all steps run the first one's weights."""
    patch.setattr(ChainedMtp, "_by_step", property(lambda self: [self.depths[0]] * len(self.depths)))


_MTP: Controls = {
    swapped_inputs: ("losses", "train_decode", "drafts"),
    lost_embedding_norm: ("losses", "train_decode", "drafts"),
    normed_residual: ("losses", "train_decode", "drafts"),
    module_output_recycled: ("losses", "train_decode", "drafts"),
    pre_norm_input: ("losses", "train_decode"),  # the drafts' target has a norm without weights, which hnorm repeats
}
MTP: Controls = {
    **RECURRENT, **_MTP,
    shifted_teacher: ("losses",),  # of what is measured; the label is the text's own token
    labels_of_the_next_step: ("losses", "train_decode"),
    detached_steps: ("gradients",),
}  # fmt: skip
MTP_MODULES: Controls = {
    **EVERY, **READS_DRAFTS, **HAS_LAYER, **_MTP,
    labels_of_the_next_step: ("losses", "train_decode"),
    detached_steps: ("gradients",),
    rope_in_module_drafting: ("train_decode",),
    rows_before_the_newest: ("losses", "train_decode"),
    committed_rows_see_all: ("train_decode",),
    lost_pending_states: ("train_decode",),
    one_module: ("losses", "train_decode", "drafts"),
}  # fmt: skip
