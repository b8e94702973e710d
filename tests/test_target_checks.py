"""A target whose embedding or logits are not plain is refused before anything is trained from it."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_tiny_target

from draftsmith.errors import DraftsmithError
from draftsmith.heads.target import Target


def test_a_plain_target_passes(tiny_target: Target) -> None:
    tiny_target.check_trainable()


def test_bf16_passes_too(tiny_folder: Path) -> None:
    Target.load(str(tiny_folder), dtype=torch.bfloat16, device="cpu").check_trainable()


@pytest.mark.parametrize(("what", "wrong"), [("logits", lambda x: x / 4), ("embeddings", lambda x: x * 2)])
def test_scaled_logits_or_embeddings_are_refused(tmp_path: Path, what: str, wrong: Any) -> None:
    target = Target.load(str(make_tiny_target(tmp_path / "target")), dtype=torch.float32, device="cpu")
    place = target.model.get_output_embeddings() if what == "logits" else target.model.get_input_embeddings()
    place.register_forward_hook(lambda module, args, output: wrong(output))
    with pytest.raises(DraftsmithError, match=f"its {what} differ by"):
        target.check_trainable()


def test_a_target_without_a_plain_norm_is_refused(tmp_path: Path) -> None:
    target = Target.load(str(make_tiny_target(tmp_path / "target")), dtype=torch.float32, device="cpu")
    target.config = types.SimpleNamespace(model_type="cohere")
    with pytest.raises(DraftsmithError, match="RMSNorm"):
        target.parts()


def test_states_after_decoding_use_the_models_own_attention(tiny_target: Target) -> None:
    from draftsmith.eval.decoder.drafters.plain import PlainDrafter
    from draftsmith.eval.decoder.loop import Request, decode
    from draftsmith.heads.base import Needs

    tokens = torch.arange(5, 15)[None]
    before = tiny_target.states(tokens, Needs((2,), last=True))
    list(decode(tiny_target, PlainDrafter(), [Request("a", [5, 6, 7], 4)], slots=1, capacity=16))
    after = tiny_target.states(tokens, Needs((2,), last=True))
    assert before[1] is not None
    assert after[1] is not None
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
