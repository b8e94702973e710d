"""What is special to Medusa: how its heads start, and guesses that all nodes of a depth share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoder_checks import pieces, random_head
from families import VOCAB, common_config, make_case, make_document, pack
from search_checks import COLUMNS, WIDE, make_draws, table
from search_checks import VOCAB as TOY_VOCAB
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.medusa import MedusaDrafter
from draftsmith.eval.decoder.sampling import Sampling, SlotSampling
from draftsmith.eval.decoder.search import Chain, Dynamic, Shape, Static
from draftsmith.eval.decoder.types import TokenTree
from draftsmith.eval.decoder.verify import draft_law
from draftsmith.heads.medusa import MedusaConfig, medusa_config
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train.optimizer import is_hidden_matrix
from draftsmith.train.settings import load_head_recipe

SHAPES = {"chain": Chain(4), "static": Static(WIDE), "dynamic": Dynamic(3, 4, 14)}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())

# --- the head ---------------------------------------------------------------------------------------------------------


def test_every_head_starts_as_the_targets_own_guess_and_can_leave_it() -> None:
    case = make_case("medusa", "three-blocks")
    said = case.head.initialise(case.parts, torch.Generator())
    assert said == "start: 4 heads with the target's output rows, their blocks at zero"
    batch = pack([make_document(case, [True] * 9)])
    want = case.parts.normed(batch.last) @ case.parts.lm_head[case.ids].t()
    for found in case.head.unroll(batch, case.parts, torch.arange(9), 4):
        assert torch.equal(found.readout @ found.weight.t(), want)
    torch.stack([s.num for s in case.head(batch, case.parts)]).sum().backward()
    for name, parameter in case.head.named_parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().max()) > 1e-3, f"{name} is stuck at its start"


def test_blocks_are_muons_and_output_rows_adamws() -> None:
    kinds = {n: is_hidden_matrix(n, p) for n, p in make_case("medusa", "one-block").head.named_parameters()}
    assert {n for n, muon in kinds.items() if muon} == {f"blocks.{i}.layers.0.weight" for i in range(4)}
    assert {n for n, muon in kinds.items() if not muon} == {
        *(f"blocks.{i}.layers.0.bias" for i in range(4)), *(f"lm_heads.{i}.weight" for i in range(4))
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 0}, "blocks 0 must be at least 1"),
        ({"blocks": 1.0}, "blocks = 1.0"),
        ({"last_state": "pre"}, "last_state = 'pre' is not what .*: it must be 'post'"),
        ({"layer_ids": [2, 4, 6]}, r"layer_ids = \[2, 4, 6\] is not what"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not what"),
        ({"objective": "both"}, "objective = 'both' is not what"),
    ],
)
def test_a_config_of_another_head_is_refused(change: dict[str, Any], message: str) -> None:
    vocab = DraftVocab(torch.tensor([1, 4, 5, 30]), VOCAB)
    with pytest.raises(DraftsmithError, match=message):
        MedusaConfig.from_dict(common_config("medusa", vocab, **change), "the file")


def test_the_config_comes_from_the_recipe_and_no_aux_state_is_read(tiny_target: Any) -> None:
    head = load_head_recipe("medusa1", {"head.options.blocks": 2, "head.steps": 3}).head
    vocab = DraftVocab(torch.arange(50), tiny_target.vocab_size)
    identity = {
        "target_id": "t", "target_revision": None, "target_fingerprint": "f", "chat_template_sha256": None,
        "trained_length": 64,
    }  # fmt: skip
    other = copy.deepcopy(tiny_target.config)
    other.hidden_act = "gelu"  # of the target's layers; the heads' blocks have SiLU
    config = medusa_config(other, vocab, layer_ids=[1, 3, 5], steps=head.steps, **head.options, **identity)
    assert (config.layer_ids, config.last_state, config.steps, config.blocks) == ([], "post", 3, 2)
    assert (config.step_decay, config.hidden_size, config.hidden_act) == (0.8, tiny_target.hidden_size, "silu")


# --- guesses that nodes share -----------------------------------------------------------------------------------------


class ByDepth:
    """A network whose logits [B, K, Vq] depend on the depth alone: one row for all nodes, or one for each."""

    def __init__(self, logits: Tensor, columns: list[int] | None, shared: bool) -> None:
        self.logits, self.shared = logits, shared
        self.columns = None if columns is None else torch.tensor(columns)

    def first(self, b: int) -> tuple[Tensor, None]:
        return self.logits[:, 0], None

    def expand(self, tokens: Tensor, states: Tensor | None, depth: int, seen: Tensor | None) -> tuple[Tensor, None]:
        row = self.logits[:, depth : depth + 1]
        return (row if self.shared else row.expand(-1, tokens.shape[1], -1)), None


MIXED = [
    Sampling(temperature=1.0, seed=5), Sampling(), Sampling(temperature=0.6, top_k=5), Sampling(temperature=2.0),
]  # fmt: skip
SETTINGS = {
    "greedy": [Sampling()] * 4, "mixed": MIXED, "sampled": [Sampling(temperature=0.8, top_p=0.9, seed=2)] * 4,
    "penalised": [*MIXED[:3], Sampling(temperature=1.0, repetition_penalty=1.5)],
    "penalised-greedy": [Sampling(repetition_penalty=1.3)] * 4,
}  # fmt: skip


def same_trees(a: TokenTree, b: TokenTree, vocab: int) -> None:
    """Tokens, shape, and the law that each node's children were drawn from."""
    for name in ("tokens", "parent", "depth", "valid"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.is_chain, a.deepest) == (b.is_chain, b.deepest)
    assert (a.proposal is None) == (b.proposal is None)
    if a.proposal is None or b.proposal is None:
        return
    assert torch.equal(a.proposal.drawn, b.proposal.drawn)
    assert torch.equal(a.proposal.row < 0, b.proposal.row < 0)
    assert a.proposal.width == b.proposal.width
    rows = torch.arange(len(a.tokens))
    for node in range(a.tokens.shape[1]):
        inner = a.proposal.row[:, node] >= 0
        at = torch.full_like(rows, node)
        assert torch.equal(draft_law(a.proposal, at, vocab)[inner], draft_law(b.proposal, at, vocab)[inner])


@every_shape
@pytest.mark.parametrize("columns", [None, COLUMNS])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_shared_row_grows_the_tree_of_equal_rows(
    shape: Shape, columns: list[int] | None, settings: list[Sampling]
) -> None:
    logits = table(6, TOY_VOCAB if columns is None else len(columns), 16).unflatten(0, (4, 4))
    roots = torch.tensor([3, 9, 4, 7])
    shared, apart = (
        shape.grow(ByDepth(logits, columns, together), roots, make_draws(settings)) for together in (True, False)
    )
    same_trees(shared, apart, TOY_VOCAB)
    penalised = any(s.repetition_penalty != 1 for s in settings)
    if shared.proposal is not None and not penalised:
        assert shared.proposal.q.shape[1] == shape.depth, "a row for each depth"


@torch.no_grad()
@every_shape
@pytest.mark.parametrize("variant", ["one-block", "three-blocks"])
def test_drafts_are_the_oracles(shape: Shape, variant: str) -> None:
    """Greedy and drawn trees of sequences of different length."""
    case = make_case("medusa", variant)
    texts = [make_document(case, [True] * n, n) for n in (9, 4, 12)]
    drafter = make_drafter(case.head, case.parts, shape)
    assert isinstance(drafter, MedusaDrafter)
    drafter.allocate(3, 32)
    for slot, doc in enumerate(texts):
        drafter.begin(slot, torch.tensor(doc.tokens), doc.features[:-1], doc.last[:-1])
    args = (case.weights(), case.config)
    found = [case.reference.draft(*args, d, case.parts, case.ids, len(d.tokens) - 2, 4) for d in texts]
    oracle = ByDepth(torch.stack([torch.stack(x) for x in found]), case.ids, shared=False)
    roots = torch.tensor([doc.tokens[-1] for doc in texts])
    slots = SlotSampling(3, VOCAB, torch.device("cpu"))
    for settings in ([Sampling()] * 3, MIXED[:3]):
        for slot, setting in enumerate(settings):
            slots.begin(slot, f"r{slot}", setting, torch.tensor([1]))
        draws = slots.draws(0, 3, 20 + torch.arange(3))
        got, want = drafter.propose(roots, draws), shape.grow(oracle, roots, draws)
        assert torch.equal(got.tokens, want.tokens)
        if want.proposal is not None and got.proposal is not None:
            for node in range(shape.rows):
                laws = [draft_law(x, torch.full((3,), node), VOCAB) for x in (got.proposal, want.proposal)]
                inner = want.proposal.row[:, node] >= 0
                torch.testing.assert_close(laws[0][inner], laws[1][inner])


def test_a_tree_deeper_than_there_are_heads_is_refused(tiny_target: Any) -> None:
    head = random_head(tiny_target, family="medusa")
    with pytest.raises(DraftsmithError, match="the head drafts 5 tokens, the tree is 6 deep"):
        make_drafter(head, pieces(tiny_target), Chain(6))
