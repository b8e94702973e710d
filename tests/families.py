"""Builders and oracles of every head family, so that a family is tested by being registered.

A new family adds one entry to FAMILIES: config values, variants, an oracle (see reference.py), and the mistakes that
can be made in it with the checks that must catch them (see mistakes.py).
`test_invariants_heads.py` fails for a registered family without an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import reference_eagle1
import reference_eagle3
import reference_eagle31
import reference_hydra
import reference_medusa
import reference_mtp
import torch
from mistakes import EAGLE1, EAGLE3, EAGLE31, HYDRA, MEDUSA, Controls
from mistakes_mtp import MTP
from reference import Document
from torch import Tensor

from draftsmith.heads.base import Batch, DraftHead, TargetParts
from draftsmith.heads.config import LayerConfig
from draftsmith.heads.registry import head_family
from draftsmith.heads.vocab import DraftVocab

VOCAB, HIDDEN, LAYERS, STEPS = 40, 16, 9, 4
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
# original lengths are small, so that the scaling acts within a few positions
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}


@dataclass(frozen=True)
class FamilyTests:
    """Config values by variant name (beside `common_config` and the family's own), the oracle, negative controls."""

    values: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    reference: ModuleType
    mistakes: Controls


FAMILIES: dict[str, FamilyTests] = {
    "eagle1": FamilyTests(
        {
            "objective": "both",
            "layer_ids": [],
            "last_state": "post",
            "recycled": "pre_norm",
            "concat_order": "embed_first",
            "input_norms": {"embed": "none", "hidden": "none"},
            "fc_bias": False,
            "feature_weight": 1.0,
            "token_weight": 0.1,
            "topk_weight": 0.0,
            "topk": 10,
            "noise": 0.1,
        },
        {
            "gqa": {},
            "mha-linear": {"num_key_value_heads": 4, "rope": LINEAR, "head_dim": 6, "fc_bias": True},
            "mqa-llama3": {"num_key_value_heads": 1, "rope": LLAMA3, "feature_weight": 0.3, "token_weight": 2.0},
            "hass": {"rope": YARN, "topk_weight": 1.0, "topk": 4},
        },
        reference_eagle1,
        EAGLE1,
    ),
    "eagle3": FamilyTests(
        {
            "objective": "token",
            "layer_ids": [2, 4, 6],
            "last_state": "none",
            "recycled": "pre_norm",
            "concat_order": "embed_first",
            "input_norms": {"embed": "rms", "hidden": "rms"},
        },
        {
            "gqa": {},
            "mha-linear": {"num_key_value_heads": 4, "rope": LINEAR, "head_dim": 6},
            "mqa-llama3": {"num_key_value_heads": 1, "rope": LLAMA3},
            "yarn": {"rope": YARN, "layer_ids": [1, 5]},
            "normed-residual": {"norm_before_residual": True},
        },
        reference_eagle3,
        EAGLE3,
    ),
    "eagle31": FamilyTests(
        {
            "objective": "token",
            "layer_ids": [2, 4, 6],
            "last_state": "none",
            "recycled": "post_norm",
            "concat_order": "embed_first",
            "input_norms": {"aux": "rms", "embed": "rms", "hidden": "rms"},
        },
        {
            "gqa": {},
            "mha-linear": {"num_key_value_heads": 4, "rope": LINEAR, "head_dim": 6},
            "mqa-llama3": {"num_key_value_heads": 1, "rope": LLAMA3},
            "yarn": {"rope": YARN, "layer_ids": [1, 5]},
        },
        reference_eagle31,
        EAGLE31,
    ),
    "hydra": FamilyTests(
        {
            "objective": "token",
            "layer_ids": [],
            "last_state": "post",
            "recycled": "post_norm",
            "concat_order": "hidden_first",
            "input_norms": {"hidden": "rms", "embed": "none"},
            "blocks": 3,
        },
        {
            "gqa": {},
            "mha-linear": {"num_key_value_heads": 4, "rope": LINEAR, "head_dim": 6, "blocks": 1},
            "mqa-llama3": {"num_key_value_heads": 1, "rope": LLAMA3},
        },
        reference_hydra,
        HYDRA,
    ),
    "medusa": FamilyTests(
        {"objective": "token", "layer_ids": [], "last_state": "post", "blocks": 1},
        {"one-block": {}, "three-blocks": {"blocks": 3}},
        reference_medusa,
        MEDUSA,
    ),
    # the same network; the target's adapter is tested in test_medusa2.py
    "medusa2": FamilyTests(
        {
            "objective": "token",
            "layer_ids": [],
            "last_state": "post",
            "blocks": 1,
            "lambda0": 0.2,
            "heads_first": 0.5,
            "ramp": False,
            "lora_rank": 4,
            "lora_alpha": 8,
        },
        {"one-block": {}},
        reference_medusa,
        MEDUSA,
    ),
    "mtp": FamilyTests(
        {
            "objective": "token",
            "layer_ids": [],
            "last_state": "post",
            "recycled": "post_norm",
            "concat_order": "embed_first",
            "input_norms": {"embed": "rms", "hidden": "rms"},
            "modules": 1,
            "step_weights": [],
        },
        {
            "gqa": {},
            "mha-linear": {"num_key_value_heads": 4, "rope": LINEAR, "head_dim": 6, "recycled": "pre_norm"},
            "mqa-llama3": {
                "num_key_value_heads": 1,
                "rope": LLAMA3,
                "concat_order": "hidden_first",
                "last_state": "pre",
            },
            "modules": {"modules": 4},
            "modules-yarn": {
                "modules": 3,
                "steps": 3,
                "num_key_value_heads": 1,
                "rope": YARN,
                "concat_order": "hidden_first",
                "last_state": "pre",
                "recycled": "pre_norm",
            },
        },
        reference_mtp,
        MTP,
    ),
}
CASES = [(family, variant) for family, tests in FAMILIES.items() for variant in tests.variants]


@dataclass
class Case:
    """A head with random weights in fp64, the target's pieces, and the family's oracle."""

    head: DraftHead
    parts: TargetParts
    reference: ModuleType

    @property
    def config(self) -> Any:
        return self.head.config

    @property
    def ids(self) -> list[int]:
        """Target ids of the draft vocabulary."""
        return self.head.vocab.target_ids.tolist()

    def weights(self) -> dict[str, Tensor]:
        """The head's parameters as independent fp64 leaves."""
        return {n: w.detach().clone().requires_grad_() for n, w in self.head.named_parameters()}


def common_config(family: str, vocab: DraftVocab, **values: Any) -> dict[str, Any]:
    """Values of a valid head config; shapes differ from each other wherever they may."""
    layer = {
        "intermediate_size": 28, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope": DEFAULT,
    }  # fmt: skip
    has_layer = issubclass(head_family(family).config, LayerConfig)
    return {
        "family": family, **(layer if has_layer else {}), "steps": STEPS, "step_decay": 0.8, "hidden_size": HIDDEN,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "vocab_size": vocab.vocab_size, "draft_vocab_size": len(vocab),
        "draft_vocab_sha256": vocab.sha256, "target_id": "test", "target_revision": None, "target_fingerprint": "0",
        "target_layers": LAYERS, "chat_template_sha256": None, "trained_length": 64,
        **FAMILIES[family].values, **values,
    }  # fmt: skip


def make_case(family: str, variant: str, *, dtype: torch.dtype = torch.float64, full_vocab: bool = False) -> Case:
    """Build a head with random weights (norms too) and random target pieces."""
    g = torch.Generator().manual_seed(7)
    chosen = torch.arange(VOCAB) if full_vocab else torch.randperm(VOCAB, generator=g)[:27].sort().values
    vocab = DraftVocab(chosen, VOCAB)
    entry = head_family(family)
    config = entry.config.from_dict(common_config(family, vocab, **FAMILIES[family].variants[variant]))
    head = entry.head(config, vocab).double()
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 1:
                weight.copy_(1.0 + 0.4 * randn(g, *weight.shape))
            else:
                weight.copy_(randn(g, *weight.shape) * 1.3 / weight.shape[1] ** 0.5)
    parts = TargetParts(randn(g, VOCAB, HIDDEN), randn(g, VOCAB, HIDDEN) * 0.7, 1.0 + 0.4 * randn(g, HIDDEN), 1e-5)
    return Case(head.to(dtype), parts.to("cpu", dtype), FAMILIES[family].reference)


def first_variant(family: str) -> str:
    return next(iter(FAMILIES[family].variants))


def first_case(family: str) -> Case:
    return make_case(family, first_variant(family))


def randn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def make_document(case: Case, answer: list[bool], seed: int = 0) -> Document:
    """A document with random tokens of the whole vocabulary and random states."""
    g = torch.Generator().manual_seed(seed)
    n, dtype = len(answer), case.parts.embed.dtype
    width = len(case.config.layer_ids) * HIDDEN
    tokens = torch.randint(0, VOCAB, (n,), generator=g).tolist()
    return Document(tokens, answer, randn(g, n, width).to(dtype), randn(g, n, HIDDEN).to(dtype))


def make_documents(case: Case, seed: int = 0) -> list[Document]:
    """A chat of two turns, a single answer, one too short for any draft, a plain text, a long one."""
    masks = [
        [0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1, 1, 1, 1],
        [0, 1],
        [1, 1, 1, 1, 1],
        [0, 1, 1, 1] * 2 + [1] * 8,
    ]
    return [make_document(case, [bool(x) for x in mask], 100 * seed + i) for i, mask in enumerate(masks)]


def pack(docs: list[Document]) -> Batch:
    """Concatenate documents."""
    lengths = [len(d.tokens) for d in docs]
    return Batch(
        torch.tensor([t for d in docs for t in d.tokens]),
        torch.tensor([a for d in docs for a in d.answer]),
        torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)]),
        torch.tensor([k for n in lengths for k in range(n)]),
        torch.cat([d.features for d in docs]),
        torch.cat([d.last for d in docs]),
    )
