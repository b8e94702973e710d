"""A target whose embedding or logits are not plain is refused before anything is trained from it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from target_models import save_target
from tiny import make_tiny_target

from draftsmith.data_recipes.layout import TargetInfo
from draftsmith.errors import DraftsmithError
from draftsmith.heads.architecture import target_parts
from draftsmith.heads.loading import load_model
from draftsmith.heads.losses import HiddenTeacher
from draftsmith.heads.target import Target
from draftsmith.train.joint import TunedTarget


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


def test_a_norm_that_models_of_its_type_do_not_have_is_refused(tmp_path: Path) -> None:
    target = Target.load(str(make_tiny_target(tmp_path / "target")), dtype=torch.float32, device="cpu")
    target.model.config.model_type = "olmo"
    with pytest.raises(DraftsmithError, match="the final norm of type 'olmo' has a weight"):
        target.parts()


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("gemma2", "final_logit_softcapping", None), ("gemma3", "model_type", "llama"), ("granite", "logits_scaling", 1.0),
     ("granite", "embedding_multiplier", 1.0), ("cohere", "logit_scale", 1.0), ("phimoe", "model_type", "llama"),
     ("nemotron", "model_type", "llama")],
)  # fmt: skip
def test_each_convention_that_is_missed_is_found(tmp_path: Path, name: str, field: str, value: Any) -> None:
    """Negative controls of `architecture.conventions`: pieces that leave one out aren't taken for the model's."""
    target = Target.load(str(save_target(name, tmp_path / name)), dtype=torch.float32, device="cpu")
    target.check_trainable()
    text = copy.copy(target.config)
    setattr(text, field, value)
    head, embed = target.model.get_output_embeddings(), target.model.get_input_embeddings()
    norm = target.final_norm
    wrong = target_parts(embed.weight, head.weight, norm.weight, getattr(norm, "bias", None), text)
    target.__dict__["_parts"] = wrong
    with pytest.raises(DraftsmithError, match=r"its (logits|embeddings) differ by"):
        target.check_trainable()


def test_a_config_without_a_longest_context_is_told_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    with pytest.raises(DraftsmithError, match=r"config\.json names no longest context: write max_position_embeddings"):
        TargetInfo.read(str(tmp_path))


def test_capped_logits_teach_what_the_target_says() -> None:
    """Probabilities and overlap by hand in fp64: p is the softmax of c tanh(x / c), over the whole vocabulary."""
    g = torch.Generator().manual_seed(0)
    states, weight, hidden, draft = (
        torch.randn(shape, generator=g, dtype=torch.float64) * 3 for shape in ((5, 8), (11, 8), (5, 8), (4, 8))
    )
    ids, cap = torch.tensor([1, 4, 7, 9]), 2.5
    teacher = HiddenTeacher(states, weight, ids, cap)
    whole = torch.softmax(cap * torch.tanh(states @ weight.t() / cap), -1)
    drafted = whole[:, ids] / whole[:, ids].sum(-1, keepdim=True)
    torch.testing.assert_close(teacher.probabilities(), drafted, rtol=1e-12, atol=0)
    q = torch.softmax(hidden @ draft.t(), -1)
    shared = torch.minimum(whole[:, ids], q).sum()
    found = teacher.overlap(hidden, draft, torch.arange(5))
    torch.testing.assert_close(found.double(), shared, rtol=1e-5, atol=1e-6)
    uncapped = HiddenTeacher(states, weight, ids).overlap(hidden, draft, torch.arange(5))
    assert abs(float(uncapped - found)) > 0.05


def test_capped_logits_and_an_adapter_do_not_go_together(tmp_path: Path) -> None:
    tuned = TunedTarget.__new__(TunedTarget)
    tuned.model = load_model(str(save_target("gemma2", tmp_path / "gemma2")), None, torch.float32)
    with pytest.raises(DraftsmithError, match="Gemma2ForCausalLM caps its logits at 20"):
        tuned.parts()


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
