"""What is Hydra's own: how it starts, its recycled paths in trees of every kind, what its config refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checks import pieces, random_head
from families import common_config, make_case, make_document, make_documents, pack
from reference import Document
from search_checks import WIDE, RecordedPaths, make_draws

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.hydra import HydraDrafter
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.eval.decoder.search import Chain, Dynamic, Shape, Static
from draftsmith.heads.base import Needs
from draftsmith.heads.hydra import HydraConfig, HydraHead, hydra_config
from draftsmith.heads.target import Target, load_parts
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train.optimizer import is_hidden_matrix
from draftsmith.train.settings import load_head_recipe

IDENTITY: dict[str, Any] = {
    "target_id": "tiny", "target_revision": None, "target_fingerprint": "0" * 64, "chat_template_sha256": None,
    "trained_length": 64,
}  # fmt: skip
SHAPES = [Chain(4), Static(WIDE), Dynamic(3, 4, 14)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=["chain", "static", "dynamic"])

# --- start ------------------------------------------------------------------------------------------------------------


def new_head(target: Target, **options: Any) -> HydraHead:
    vocab = DraftVocab(torch.arange(3, 100, 2), target.vocab_size)
    return HydraHead(hydra_config(target.config, vocab, **IDENTITY, **options), vocab)


@torch.no_grad()
def test_every_head_starts_as_the_targets_output_over_the_prefix_state(tiny_target: Target, tiny_folder: Path) -> None:
    head, parts = new_head(tiny_target), load_parts(str(tiny_folder), None, torch.float32)
    said = head.initialise(parts, torch.Generator().manual_seed(0))
    assert said.startswith("start: the target's last layer")
    assert "4 heads" in said
    last, h = parts.last_layer, tiny_target.hidden_size
    assert torch.equal(head.layer.q_proj.weight, last["self_attn.q_proj.weight"])
    assert torch.equal(head.input_layernorm, last["input_layernorm.weight"])
    assert torch.equal(head.norm, parts.norm_weight)
    for s in range(4):
        z = torch.randn(5, (s + 2) * h, generator=torch.Generator().manual_seed(s))
        want = 0.1 * z[:, :h]
        torch.testing.assert_close(head.heads[s](z), want, msg="no embedding has a say yet, and no block adds anything")
        assert torch.equal(head.lm_heads[s].weight, parts.lm_head[head.vocab.target_ids])


def test_a_target_of_another_shape_gives_a_random_prefix_layer(tiny_target: Target, tiny_folder: Path) -> None:
    parts = dataclasses.replace(load_parts(str(tiny_folder), None, torch.float32), last_layer={})
    starts = []
    for seed in (0, 0, 1):
        head = new_head(tiny_target)
        assert head.initialise(parts, torch.Generator().manual_seed(seed)).startswith("random start")
        starts.append(head.layer.o_proj.weight.detach())
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_zero_blocks_learn_and_none_is_shared() -> None:
    case = make_case("hydra", "gqa")
    case.head.initialise(case.parts, torch.Generator().manual_seed(0))
    torch.stack([s.num for s in case.head.losses(pack(make_documents(case)), case.parts)]).sum().backward()
    found = dict(case.head.named_parameters())
    blocks = [n for n in found if ".blocks." in n and n.endswith("weight")]
    assert len(blocks) == case.config.steps * case.config.blocks == 12, "a shared module is listed once"
    for name, weight in found.items():
        assert weight.grad is not None
        assert float(weight.grad.abs().max()) > 1e-6, f"{name} doesn't learn from its start"


def test_output_rows_are_left_to_adamw() -> None:
    names = dict(make_case("hydra", "gqa").head.named_parameters())
    others = [n for n, w in names.items() if w.ndim == 2 and not is_hidden_matrix(n, w)]  # type: ignore[arg-type]
    assert others == [f"lm_heads.{s}.weight" for s in range(4)]


# --- trees ------------------------------------------------------------------------------------------------------------


class Recorded(RecordedPaths, HydraDrafter):
    """Keeps what it drafted from."""


@torch.no_grad()
@every_shape
@pytest.mark.parametrize("variant", ["gqa", "mha-linear"])
def test_a_node_is_drafted_given_its_own_path(shape: Shape, variant: str) -> None:
    """Logits of every expanded node are the oracle's along that path; the prefix layer's cache sees no draft."""
    case = make_case("hydra", variant)
    texts = [make_document(case, [True] * n, n) for n in (9, 2, 12)]
    drafter = Recorded(case.head, case.parts, shape)
    drafter.allocate(3, 32)
    for slot, doc in enumerate(texts):
        drafter.begin(slot, torch.tensor(doc.tokens), doc.features[:-1], doc.last[:-1])
    kept = (drafter.cache.keys, drafter.cache.values, drafter.cache.lengths, drafter.logits, drafter.state)
    before = [x.clone() for x in kept]
    drafter.propose(torch.tensor([doc.tokens[-1] for doc in texts]), make_draws([Sampling()] * 3))
    assert all(torch.equal(x, y) for x, y in zip(before, kept, strict=True)), "drafting changed what is committed"
    assert drafter.state.shape == (3, 1, case.head.state_width)
    weights = case.weights()
    for slot, doc in enumerate(texts):
        assert len(drafter.made[slot]) == shape.expanded
        for path, logits in drafter.made[slot]:
            longer = Document([*doc.tokens, *path], [], doc.features, doc.last)
            row = len(doc.tokens) - 2
            want = case.reference.draft(weights, case.config, longer, case.parts, case.ids, row, len(path) + 1)[-1]
            torch.testing.assert_close(logits, want, rtol=2e-6, atol=2e-6)


def test_no_tree_is_deeper_than_there_are_heads(tiny_target: Target) -> None:
    head = random_head(tiny_target, family="hydra")
    assert (head.most_depth, head.steps_for(9)) == (4, 4)
    with pytest.raises(DraftsmithError, match="the head drafts 4 tokens, the tree is 5 deep"):
        make_drafter(head, pieces(tiny_target), Dynamic(2, 5, 9))


# --- config -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 0}, "blocks 0 must be at least 1"),
        ({"blocks": 2.0}, "blocks = 2.0"),
        ({"layer_ids": [2, 4]}, r"layer_ids = \[2, 4\] is not what"),
        ({"last_state": "pre"}, "last_state = 'pre' is not what"),
        ({"objective": "both"}, "objective = 'both' is not what"),
        ({"recycled": "pre_norm"}, "recycled = 'pre_norm' is not what"),
        ({"concat_order": "embed_first"}, "concat_order = 'embed_first' is not what"),
        ({"input_norms": {"hidden": "rms", "embed": "rms"}}, "input_norms = .* is not what"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    vocab = DraftVocab(torch.tensor([1, 4, 5, 30]), 40)
    with pytest.raises(DraftsmithError, match=message):
        HydraConfig.from_dict(common_config("hydra", vocab, **change), "the file")


def test_the_recipe_sets_heads_and_blocks(tiny_target: Target) -> None:
    published = load_head_recipe("hydra").head
    assert (published.steps, published.step_decay, published.options) == (4, 1.0, {"blocks": 4})
    chosen = load_head_recipe("hydra", {"head.steps": 3, "head.options.blocks": 2}).head
    head = new_head(tiny_target, steps=chosen.steps, layer_ids=[1, 2, 3], **chosen.options)
    assert head.needs == Needs((), last=True)
    assert [m.shortcut.in_features // tiny_target.hidden_size for m in head.heads] == [2, 3, 4]
    assert [len(m.blocks) for m in head.heads] == [2, 2, 2]
    with pytest.raises(DraftsmithError, match="no such option of head 'hydra'; there are: blocks"):
        load_head_recipe("hydra", {"head.options.dropout": 0.2})
