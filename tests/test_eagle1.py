"""What is special about EAGLE-1 and HASS: the loss's parts, the noise, the frozen output rows, wrong config values."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Case, common_config, make_case, make_document, make_documents, pack

from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import Batch
from draftsmith.heads.checkpoint import load_head, save_head
from draftsmith.heads.eagle1 import Eagle1Config, Eagle1Head, eagle1_config
from draftsmith.heads.target import Target, load_parts
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train.settings import load_head_recipe

VOCAB = DraftVocab(torch.tensor([1, 4, 5, 30]), 40)
IDENTITY = {
    "target_id": "tiny",
    "target_revision": None,
    "target_fingerprint": "0" * 64,
    "chat_template_sha256": None,
    "trained_length": 64,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_weight": -0.5}, "feature_weight = -0.5 must be 0 or more"),
        ({"noise": float("nan")}, "noise = nan must be 0 or more"),
        ({"feature_weight": 0.0}, "feature_weight = 0.0, token_weight = 0.1.* give both a weight above 0"),
        ({"token_weight": 0.0}, "token_weight = 0.0, topk_weight = 0.0.* give both a weight above 0"),
        ({"topk": 0}, "topk = 0 must be at least 1; topk_weight = 0 leaves"),
        ({"layer_ids": [2]}, r"layer_ids = \[2\] is not what an eagle1 head computes: it must be \[\]"),
        ({"last_state": "pre"}, "last_state = 'pre' is not what an eagle1 head computes: it must be 'post'"),
        ({"objective": "token"}, "objective = 'token' is not what"),
        ({"fc_bias": 1}, "fc_bias = 1 is not of type bool"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message) as error:
        Eagle1Config.from_dict(common_config("eagle1", VOCAB, **change), "the file")
    assert "\n" not in str(error.value)


def test_a_config_comes_from_the_target_and_the_recipe(tiny_target: Target) -> None:
    """Every option of the YAML files is a field; the store's layers are none of the head's."""
    vocab = DraftVocab(torch.arange(9), tiny_target.vocab_size)
    made = {}
    for name in ("eagle1", "eagle2", "hass"):
        head = load_head_recipe(name).head
        made[name] = eagle1_config(
            tiny_target.config, vocab, layer_ids=[1, 2, 3], steps=head.steps, step_decay=head.step_decay,
            **head.options, **IDENTITY,
        )  # fmt: skip
        assert set(head.options) <= {f.name for f in dataclasses.fields(Eagle1Config)}
    assert made["eagle1"] == made["eagle2"] == eagle1_config(tiny_target.config, vocab, **IDENTITY)
    assert made["eagle1"].layer_ids == []
    assert (made["hass"].steps, made["hass"].topk_weight, made["hass"].topk) == (3, 1.0, 10)
    assert Eagle1Head(made["eagle1"], vocab).needs.layer_ids == ()
    assert Eagle1Head(made["eagle1"], vocab).needs.last


# --- the start --------------------------------------------------------------------------------------------------------


def new_head(target: Target, **options: Any) -> Eagle1Head:
    vocab = DraftVocab(torch.arange(3, 100, 2), target.vocab_size)
    return Eagle1Head(eagle1_config(target.config, vocab, **options, **IDENTITY), vocab)


def test_the_start_is_a_tenth_of_the_feature_and_the_embeddings_mix(tiny_target: Target, tiny_folder: Path) -> None:
    """The layer adds nothing; the scale of the target's embeddings doesn't matter; the seed decides the rest."""
    parts = load_parts(str(tiny_folder), None, torch.float32)
    head = new_head(tiny_target, fc_bias=True)
    read = parts.embed[torch.arange(60)]
    feature = parts.normed(torch.randn(60, tiny_target.hidden_size, generator=torch.Generator().manual_seed(1)))
    weights, mixed = [], []
    for seed, scale in ((0, 1.0), (0, 7.0), (1, 1.0)):
        louder = dataclasses.replace(parts, embed=parts.embed * scale)
        said = head.initialise(louder, torch.Generator().manual_seed(seed))
        assert said == "start: a layer that adds nothing; output rows are the target's and stay"
        z, residual = head.enter(read * scale, feature)
        assert z is residual
        attended = torch.ones(60, head.config.num_attention_heads * head.config.head_dim)
        assert torch.equal(head.layer.finish(residual, attended), residual)
        mixed.append((z - 0.1 * feature).detach())
        weights.append(head.layer.q_proj.weight.detach().clone())
    sizes = [float(m.pow(2).mean().sqrt() / parts.norm_weight.pow(2).mean().sqrt()) for m in mixed]
    assert sizes == pytest.approx([1 / 3] * 3, rel=0.15)
    torch.testing.assert_close(mixed[0], mixed[1])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# --- the loss ---------------------------------------------------------------------------------------------------------


def with_config(case: Case, **changes: Any) -> Case:
    """The same weights under other options."""
    head = copy.deepcopy(case.head)
    head.config = dataclasses.replace(case.config, **changes)
    return Case(head, case.parts, case.reference)


def batch_of(case: Case) -> Batch:
    return pack(make_documents(case))


def test_the_loss_is_the_weighted_sum_of_its_parts() -> None:
    """Linear in the three weights; the top-K term over the whole vocabulary is the token term."""
    case = make_case("eagle1", "gqa")

    def total(**weights: float) -> float:
        head = with_config(case, **weights).head
        return sum(float(s.num.detach()) for s in head.losses(batch_of(case), case.parts))

    base = total(feature_weight=1.0, token_weight=1.0)
    feature = total(feature_weight=2.0, token_weight=1.0) - base
    token = total(feature_weight=1.0, token_weight=2.0) - base
    top = total(feature_weight=1.0, token_weight=1.0, topk_weight=1.0, topk=3) - base
    everything = total(feature_weight=1.0, token_weight=1.0, topk_weight=1.0, topk=1000) - base
    assert base == pytest.approx(feature + token)
    assert 0 < top < token
    assert everything == pytest.approx(token)
    assert feature > 0


def test_noise_comes_from_the_batchs_seed_alone() -> None:
    case = make_case("eagle1", "gqa")
    quiet = batch_of(case)
    batches = [dataclasses.replace(quiet, seed=seed) for seed in (3, 3, 4)]
    clean = case.head.inputs(quiet.features, quiet.last, case.parts)
    noise = [case.head.noisy(clean, b) - clean for b in batches]
    assert torch.equal(case.head.noisy(clean, quiet), clean), "without a seed nothing is random"
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    assert 0.095 < float(noise[0].max()) <= 0.1
    assert -0.1 <= float(noise[0].min()) < -0.095
    assert abs(float(noise[0].mean())) < 0.01
    silent = with_config(case, noise=0.0).head
    assert torch.equal(silent.noisy(clean, batches[0]), clean)
    sums = [[float(s.num.detach()) for s in case.head.losses(b, case.parts)] for b in (*batches, quiet)]
    assert sums[0] == sums[1]
    assert len({tuple(s) for s in sums}) == 3, "training must read the noise"


def test_noise_leaves_the_goals_alone() -> None:
    """A head that is all wrong by a constant: the distance to the goals has no noise in it."""
    case = with_config(make_case("eagle1", "gqa"), steps=1)
    with torch.no_grad():
        for weight in case.head.parameters():
            weight.zero_()
    batch = batch_of(case)
    quiet, noisy = (case.head.losses(b, case.parts)[0].num for b in (batch, dataclasses.replace(batch, seed=5)))
    assert torch.equal(quiet, noisy)


def test_no_gradient_flows_from_step_to_step() -> None:
    """HASS: what a step reads of the one before is a constant."""
    case = make_case("eagle1", "hass")
    batch = batch_of(case)
    rows = case.head.supervised_rows(batch)[0].nonzero().flatten()
    states = [found.state for found in case.head.unroll(batch, case.parts, rows, 3)]
    assert states[0] is not None
    assert states[2] is not None
    states[0].retain_grad()
    states[2].sum().backward()
    assert states[0].grad is None
    assert case.head.fc.weight.grad is not None


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full_vocab", [False, True])
def test_output_rows_are_the_targets_and_never_saved(tmp_path: Path, full_vocab: bool) -> None:
    case = make_case("eagle1", "mha-linear", full_vocab=full_vocab)
    names = {n for n, _ in case.head.named_parameters()}
    drafting = copy.deepcopy(case.head)
    drafting.attach(case.parts)
    state = torch.randn(5, case.config.hidden_size, dtype=torch.float64)
    assert torch.equal(drafting.logits(state), state @ case.parts.lm_head[case.head.vocab.target_ids].t())
    assert not any(p.requires_grad for n, p in drafting.named_parameters() if n not in names)
    save_head(case.head, tmp_path)
    loaded = load_head(tmp_path, torch.float64)
    assert {n for n, _ in loaded.named_parameters()} == names
    assert not any("lm_head" in n or "norm.weight" in n for n in names)
    loaded.attach(case.parts)
    doc = make_document(case, [True] * 8)
    batch = pack([doc])
    for a, b in zip(case.head.losses(batch, case.parts), loaded.losses(batch, case.parts), strict=True):
        assert torch.equal(a.num, b.num)
    assert torch.equal(loaded.logits(state), drafting.logits(state))
