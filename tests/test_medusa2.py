"""Medusa-2: what a step computes, the joint loss and its gradients, how far a target has moved."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from families import make_case
from test_adapter import moved
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import Batch, TargetParts
from draftsmith.heads.medusa2 import Medusa2Config, Medusa2Head
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train import joint
from draftsmith.train.joint import JointStep, TunedTarget, answer_rows, kl_divergence, measured_divergence, phase

RANK, ALPHA, STEPS, V, H = 3, 5, 3, 37, 24


def config_of(**values: Any) -> Medusa2Config:
    config = make_case("medusa2", "one-block").config
    assert isinstance(config, Medusa2Config)
    return dataclasses.replace(config, **values)


# --- what a step computes ---------------------------------------------------------------------------------------------


def test_the_heads_come_first_and_then_the_weight_is_lambda0() -> None:
    config = config_of(heads_first=0.3)
    found = [phase(i, 10, config) for i in range(10)]
    assert [p.joint for p in found] == [False] * 3 + [True] * 7
    assert [p.adapter for p in found] == [0.0] * 3 + [1.0] * 7
    assert [p.weight for p in found] == [0.0] * 3 + [0.2] * 7


def test_the_ramp_is_a_quarter_of_a_sine_over_the_joint_steps() -> None:
    found = [phase(i, 12, config_of(heads_first=0.25, ramp=True)).weight for i in range(12)]
    assert found[:3] == [0.0] * 3
    assert found[3:] == pytest.approx([0.2 * math.sin(math.pi / 2 * i / 9) for i in range(9)])
    assert phase(0, 4, config_of(heads_first=0.0, ramp=True)).weight == 0.0


def test_a_pilot_takes_both_kinds_of_step_in_turn_and_moves_no_adapter() -> None:
    found = [phase(i, None, config_of()) for i in range(4)]
    assert [(p.joint, p.adapter) for p in found] == [(True, 0.0), (False, 0.0)] * 2


@pytest.mark.parametrize(
    ("values", "match"),
    [({"lambda0": 0.0}, "lambda0 0.0 must be greater than 0"), ({"heads_first": 1.0}, "take the head medusa1"),
     ({"heads_first": -0.1}, "heads_first -0.1"), ({"lora_rank": 0}, "lora_rank 0"), ({"lora_alpha": 0}, "lora_alpha"),
     ({"blocks": 0}, "blocks 0"), ({"layer_ids": [2]}, "layer_ids")],
)  # fmt: skip
def test_a_config_that_cannot_be_trained_is_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(DraftsmithError, match=match):
        config_of(**values)


def test_the_divergence_is_that_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "rows_per_chunk", lambda *_: 3)
    g = torch.Generator().manual_seed(0)
    hidden, goal, weight = (torch.randn(n, 6, generator=g, dtype=torch.float64) for n in (8, 8, 11))
    hidden.requires_grad_()
    total, equal = kl_divergence(hidden, goal, weight)
    (total * 3).backward()
    again = hidden.detach().clone().requires_grad_()
    p, q = torch.softmax(goal @ weight.t(), -1), torch.softmax(again @ weight.t(), -1)
    want = (p * torch.log(p / q)).sum()
    (want * 3).backward()
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(hidden.grad, again.grad)
    assert int(equal) == int((p.argmax(-1) == q.argmax(-1)).sum())
    assert 0 < int(equal) < 8
    assert kl_divergence(goal, goal, weight)[0] == 0


def test_a_measured_divergence_is_that_of_fp32_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of states and weights in bf16, whose own logits tie and hide what is measured."""
    monkeypatch.setattr(joint, "rows_per_chunk", lambda *_: 5)
    monkeypatch.setattr(joint, "_TOKENS", 300)
    g = torch.Generator().manual_seed(0)
    weight, goal = torch.randn(1000, 64, generator=g).bfloat16(), torch.randn(12, 64, generator=g).bfloat16() * 2
    hidden = (goal.float() + torch.randn(12, 64, generator=g) * 0.04).bfloat16()
    p, q = (torch.softmax(x.double() @ weight.double().t(), -1) for x in (goal, hidden))
    same = int((p.argmax(-1) == q.argmax(-1)).sum())
    total, equal = measured_divergence(hidden, goal, weight)
    assert float(total) == pytest.approx(float((p * torch.log(p / q)).sum()), rel=1e-4)
    assert int(equal) == same
    rough = kl_divergence(hidden, goal, weight)
    assert float(rough[0]) != pytest.approx(float(total), rel=1e-2), "bf16 logits would do as well"
    assert [float(x) for x in measured_divergence(goal, goal, weight)] == [0.0, 12.0]


def test_the_target_answers_from_the_row_before_each_answer_token() -> None:
    answer = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    batch = Batch(answer.long(), answer, documents, documents, answer[:, None], answer[:, None])
    # the first token of document 1 has nothing before it
    assert answer_rows(batch).int().tolist() == [1, 1, 0, 0, 1, 0, 1, 0]


# --- the joint loss against a dense one -------------------------------------------------------------------------------


def tiny_model() -> Any:
    """A Llama of two layers in fp64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=V, hidden_size=H, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
            )
        ).double()  # fmt: skip
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(
                    torch.randn_like(weight) * 1.5 / H**0.5 if weight.ndim == 2 else 1 + torch.rand_like(weight)
                )
    return model.eval()


def joint_step(**values: Any) -> JointStep:
    model = tiny_model()
    vocab = DraftVocab(torch.arange(0, V, 2), V)
    config = config_of(
        steps=STEPS, hidden_size=H, vocab_size=V, draft_vocab_size=len(vocab), draft_vocab_sha256=vocab.sha256,
        target_layers=2, lora_rank=RANK, lora_alpha=ALPHA, heads_first=0.0, **values,
    )  # fmt: skip
    head = Medusa2Head(config, vocab).double()
    tuned = TunedTarget(model, config, 3)
    moved(tuned.adapter)
    parts: TargetParts = tuned.parts()
    head.initialise(parts, torch.Generator())
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn(weight.shape, generator=g, dtype=torch.float64) * 0.3)
    return JointStep(head, parts, torch.float32, tuned)  # fp32: no autocast


def make_batch(lengths: tuple[int, ...] = (9, 4, 12, 5), seed: int = 1) -> Batch:
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])
    answer = (positions > 2) & (torch.rand(total, generator=g) < 0.9)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    stored = torch.randn(total, H, generator=g, dtype=torch.float64)
    tokens = torch.randint(0, V, (total,), generator=g)
    return Batch(tokens, answer, documents, positions, stored.repeat(1, 3), stored)


def dense_losses(
    leaves: dict[str, Tensor], head: dict[str, Tensor], batch: Batch, ids: list[int]
) -> tuple[Tensor, Tensor]:
    """KL_LM and L_heads, document by document, with W + (alpha / rank) B A written into a plain model."""
    model = tiny_model()
    weights = dict(model.named_parameters())
    for name in [n for n in leaves if n.endswith("lora_A.weight")]:
        plain = name.removeprefix("base_model.model.").replace("lora_A.", "")
        weights[plain] = (
            weights[plain].detach() + ALPHA / RANK * leaves[name.replace("lora_A", "lora_B")] @ leaves[name]
        )
    kl, rows = torch.zeros((), dtype=torch.float64), 0
    num, den = [torch.zeros((), dtype=torch.float64) for _ in range(STEPS)], [0] * STEPS
    for d in range(int(batch.documents[-1]) + 1):
        here = batch.documents == d
        tokens, answer = batch.tokens[here], batch.answer[here].tolist()
        with torch.no_grad():
            original = model(input_ids=tokens[None]).logits[0]
        out = torch.func.functional_call(
            model, weights, kwargs={"input_ids": tokens[None], "output_hidden_states": True}
        )
        for j in range(len(tokens) - 1):
            if answer[j + 1]:
                p, q = torch.softmax(original[j], 0), torch.softmax(out.logits[0, j], 0)
                kl, rows = kl + (p * (p.log() - q.log())).sum(), rows + 1
            for s in range(STEPS):
                if j + 2 + s >= len(tokens) or not all(answer[j + 1 : j + 3 + s]) or int(tokens[j + 2 + s]) not in ids:
                    continue
                x = out.hidden_states[-1][0, j]  # transformers' last entry is normed
                z = head[f"blocks.{s}.layers.0.weight"] @ x + head[f"blocks.{s}.layers.0.bias"]
                logits = head[f"lm_heads.{s}.weight"] @ (x + z * torch.sigmoid(z))
                num[s] = num[s] - torch.log_softmax(logits, 0)[ids.index(int(tokens[j + 2 + s]))]
                den[s] += 1
    return kl / rows, torch.stack([0.8**s * n / d for s, (n, d) in enumerate(zip(num, den, strict=True))]).sum()


def test_loss_and_gradients_of_heads_and_adapter_equal_a_dense_computation() -> None:
    step, batch = joint_step(), make_batch()
    assert step.enter(4, 8) == 1.0
    loss, sums = step(batch, step.loss_counts(batch), 2.0)
    loss.backward()
    leaves = {n: p.detach().clone().requires_grad_() for n, p in step.tuned.adapter.parameters.items()}
    head = {n: p.detach().clone().requires_grad_() for n, p in step.head.named_parameters()}
    kl, own_loss = dense_losses(leaves, head, batch, step.head.vocab.target_ids.tolist())
    torch.testing.assert_close(loss, 2.0 * (kl + own_loss), rtol=1e-7, atol=0.0)  # transformers' norms compute in fp32
    wanted = torch.autograd.grad(2.0 * (kl + 0.2 * own_loss), list(leaves.values()), retain_graph=True)
    wanted += torch.autograd.grad(2.0 * own_loss, list(head.values()))
    own = {**step.tuned.adapter.parameters, **dict(step.head.named_parameters())}
    for name, want in zip([*leaves, *head], wanted, strict=True):
        found = own[name].grad
        assert found is not None, f"{name} has no gradient"
        assert float(want.abs().max()) > 1e-7, name
        error = float((found - want).abs().max() / want.abs().max())
        assert error < 2e-6, f"gradient of {name} differs from the dense one by {error:.2g} of its size"
    assert sums.shape == (STEPS + 1, 6)
    assert sums[-1, :3].tolist() == pytest.approx([float(sums[-1, 0]), *[int(answer_rows(batch).sum())] * 2])
    assert float(sums[-1, 0]) > 0.01


def test_validation_measures_how_far_the_target_has_moved() -> None:
    step, batch = joint_step(), make_batch()
    leaves = {n: p.detach() for n, p in step.tuned.adapter.parameters.items()}
    head = {n: p.detach() for n, p in step.head.named_parameters()}
    kl, _ = dense_losses(leaves, head, batch, step.head.vocab.target_ids.tolist())
    ((total, rows),) = step.extra_sums(step.seen(batch)).tolist()
    assert rows == int(answer_rows(batch).sum())
    assert total / rows == pytest.approx(float(kl.detach()), rel=1e-6)
    for weight in step.tuned.adapter.parameters.values():
        weight.data.zero_()
    assert float(step.extra_sums(step.seen(batch))[0, 0]) == 0.0


def test_two_batches_add_up_to_the_loss_over_both() -> None:
    step, one, two = joint_step(), make_batch((9, 4)), make_batch((12, 5), 7)
    step.enter(4, 8)
    counts = step.loss_counts(one) + step.loss_counts(two)
    both = dataclasses.replace(
        one,
        documents=torch.cat((one.documents, two.documents + 2)),
        **{
            n: torch.cat((getattr(one, n), getattr(two, n)))
            for n in ("tokens", "answer", "positions", "features", "last")
        },
    )
    torch.testing.assert_close(step.loss_counts(both), counts)
    with torch.no_grad():
        parts = [step(b, counts, 1.0) for b in (one, two)]
        whole = step(both, counts, 1.0)
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(parts[0][1] + parts[1][1], whole[1])


def test_heads_alone_are_medusa_1_on_stored_states() -> None:
    step, batch = joint_step(), make_batch()
    step.phase = dataclasses.replace(step.phase, joint=False)
    counts = step.loss_counts(batch)
    loss, sums = step(batch, counts, 1.0)
    loss.backward()
    stats = step.head.losses(batch, step.parts)
    want = sum(0.8**s * float(x.num.detach()) / int(x.den) for s, x in enumerate(stats))
    assert float(loss.detach()) == pytest.approx(want)
    assert all(p.grad is None for p in step.tuned.adapter.parameters.values())
    assert not sums[-1].any()


@torch.no_grad()
def test_documents_side_by_side_are_as_each_alone() -> None:
    step, batch = joint_step(), make_batch((3, 30, 2, 29, 7))
    together, seen = step.tuned.states(batch), step.seen(batch)
    assert torch.equal(seen.last, together)
    assert torch.equal(seen.features, batch.features)
    original = step.tuned.original_states(batch)
    assert (original - together).abs().max() > 0.1
    for d in range(5):
        here = batch.documents == d
        named = ("tokens", "answer", "documents", "positions", "features", "last")
        part = {name: getattr(batch, name)[here] for name in named}
        torch.testing.assert_close(step.tuned.states(Batch(**part)), together[here], rtol=1e-9, atol=1e-9)
    plain = tiny_model().model(input_ids=batch.tokens[None, 3:33]).last_hidden_state[0]
    torch.testing.assert_close(step.parts.normed(original[3:33]), plain, rtol=1e-6, atol=1e-6)


def test_the_engine_gets_heads_and_adapter_and_nothing_of_the_target() -> None:
    step = joint_step()
    mine = {id(p) for p in [*step.head.parameters(), *step.tuned.adapter.parameters.values()]}
    assert {id(p) for p in step.parameters()} == mine
    assert all(p.requires_grad for p in step.parameters())


def test_steps_of_both_kinds_count_by_their_share() -> None:
    step = joint_step()
    step.config = dataclasses.replace(step.config, heads_first=0.75)
    assert step.mean_seconds([1.0, 5.0, 2.0, 5.0, 3.0, 8.0]) == pytest.approx(0.75 * 2.0 + 0.25 * 6.0)
