"""This toolkit's own checkpoints as a start for another run."""

from __future__ import annotations

from pathlib import Path

from ...errors import DraftsmithError
from ..adapter import TunedConfig
from ..checkpoint import CONFIG, load_head
from ..config import HeadConfig
from .foreign import Foreign

_IDENTITY = {
    "family", "format_version", "target_id", "target_revision", "target_fingerprint", "target_layers",
    "chat_template_sha256", "draft_vocab_size", "draft_vocab_sha256",
}  # fmt: skip
_TRAINING = {
    "steps", "step_decay", "step_weights", "trained_length", "feature_weight", "token_weight", "topk_weight", "topk",
    "noise",
}  # fmt: skip
"""Values that say how a head learns, not what it computes: the new run's own."""


def read_own(folder: Path) -> tuple[Foreign, HeadConfig]:
    """Read a checkpoint strictly; returns it with its whole config.

    Raises:
        DraftsmithError: see `load_head`; or the head was trained together with its target.
    """
    head = load_head(folder)
    if isinstance(head.config, TunedConfig):
        raise DraftsmithError(
            f"{folder}: a {head.config.family} head drafts for its target with the adapter beside it: it is no start "
            "for another run; take a head that was trained on the target as it is"
        )
    left_out = _IDENTITY | (_TRAINING if head.most_depth is None else _TRAINING - {"steps"})
    options = {name: value for name, value in head.config.to_dict().items() if name not in left_out}
    tensors = {name: parameter.detach() for name, parameter in head.named_parameters()}
    found = Foreign(f"draftsmith {CONFIG}", head.config.family, options, head.vocab, tensors)
    return found, head.config
