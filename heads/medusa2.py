"""Medusa-2: Medusa's heads, trained together with a LoRA adapter on the target (arXiv 2401.10774, 2.2.2 and 2.3.2).

    L = L_LM + lambda * L_M1        L_M1 = sum_s decay^s CE_s, on the states of the tuned target
                                    L_LM = KL(p || p_tuned), p the target without the adapter (self-distillation)
    lambda = lambda0                first the heads alone, for a share of the steps (two stages)
           or lambda0 * sin(pi/2 * progress), progress of the joint steps from 0 to 1

The network and the way it drafts are Medusa-1's. What changes is the target: the head drafts for the target with the
adapter, which is saved beside it, and an answer is the tuned target's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import DraftsmithError
from .adapter import TunedConfig
from .medusa import MedusaConfig, MedusaHead, medusa_values
from .registry import Family
from .vocab import DraftVocab


@dataclass(frozen=True, kw_only=True)
class Medusa2Config(MedusaConfig, TunedConfig):
    """Medusa's config, the adapter, and how the two are weighed in training."""

    lambda0: float
    """Weight of the heads' loss in what the adapter minimises."""
    heads_first: float
    """Share of the steps in which the heads alone are trained, as Medusa-1; the adapter waits."""
    ramp: bool
    """Whether the weight grows from 0 to lambda0 over the joint steps, along a quarter of a sine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lambda0 > 0:
            raise DraftsmithError(f"lambda0 {self.lambda0} must be greater than 0")
        if not 0 <= self.heads_first < 1:
            raise DraftsmithError(
                f"heads_first {self.heads_first} must be at least 0 and less than 1: it is the share of the steps "
                "without the adapter; take the head medusa1 to train none"
            )


def medusa2_config(target_config: Any, vocab: DraftVocab, **identity: Any) -> Medusa2Config:
    """Derive a head's config from its target's (a transformers text config).

    Args:
        target_config: shapes and norm epsilon are taken from it.
        vocab: the draft vocabulary.
        identity: target_id, target_revision, target_fingerprint, chat_template_sha256, trained_length, and optionally
            steps, step_decay, blocks, lambda0, heads_first, ramp, lora_rank and lora_alpha. `layer_ids` is ignored: no
            aux state is read.
    """
    values = {
        **medusa_values(target_config, vocab),
        "lambda0": 0.01, "heads_first": 0.5, "ramp": False, "lora_rank": 32, "lora_alpha": 16,
        "family": "medusa2", **identity, "layer_ids": [],
    }  # fmt: skip
    return Medusa2Config.from_dict(values, "medusa2 config")


class Medusa2Head(MedusaHead):
    """Medusa's network; the adapter is no part of it."""

    config: Medusa2Config


FAMILY = Family("medusa2", Medusa2Config, Medusa2Head)
