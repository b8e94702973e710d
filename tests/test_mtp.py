"""What is special about MTP: two kinds of heads, a module's start, modules by step in every check, wrong values."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import head_checks
import pytest
import torch
from families import VOCAB, common_config, make_case, make_document, make_documents, pack
from reference import Document
from search_checks import WIDE, RecordedPaths, make_draws

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters.mtp import MtpDrafter
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.eval.decoder.search import Chain, Dynamic, Shape, Static
from draftsmith.heads.base import Needs
from draftsmith.heads.checkpoint import load_head, save_head
from draftsmith.heads.layer import RecurrentHead
from draftsmith.heads.mtp import ChainedMtp, MtpHead, RecursiveMtp, mtp_config
from draftsmith.heads.mtp_modules import MtpConfig
from draftsmith.heads.target import Target, load_parts
from draftsmith.heads.vocab import DraftVocab
from draftsmith.pipeline import run_all
from draftsmith.run_config import resolve
from draftsmith.train.settings import load_head_recipe

IDENTITY: dict[str, Any] = {
    "target_id": "tiny", "target_revision": None, "target_fingerprint": "0" * 64, "chat_template_sha256": None,
    "trained_length": 64,
}  # fmt: skip
SHAPES = [Chain(4), Static(WIDE), Dynamic(3, 4, 14)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=["chain", "static", "dynamic"])


def new_head(target: Target, **options: Any) -> Any:
    vocab = DraftVocab(torch.arange(3, 100, 2), target.vocab_size)
    return MtpHead(mtp_config(target.config, vocab, **IDENTITY, **options), vocab)


# --- two kinds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "kind"), [("gqa", RecursiveMtp), ("modules", ChainedMtp)])
def test_the_config_says_which_kind_and_copies_are_of_it(variant: str, kind: type, tmp_path: Path) -> None:
    case = make_case("mtp", variant)
    save_head(case.head, tmp_path)
    loaded = load_head(tmp_path, torch.float64)
    for head in (case.head, copy.deepcopy(case.head), loaded, type(case.head)(case.config, case.head.vocab)):
        assert type(head) is kind
        assert head.config == case.config
    assert isinstance(case.head, RecurrentHead) == (kind is RecursiveMtp)
    assert case.head.most_depth == (None if kind is RecursiveMtp else 4)
    docs = pack(make_documents(case))
    for a, b in zip(case.head.losses(docs, case.parts), loaded.losses(docs, case.parts), strict=True):
        assert torch.equal(a.num, b.num)


def test_tensors_are_called_as_the_papers_weights_are() -> None:
    one = {n for n, _ in make_case("mtp", "gqa").head.named_parameters()}
    assert {"enorm", "hnorm", "eh_proj.weight", "input_layernorm", "layer.q_proj.weight", "norm"} <= one
    assert not any("lm_head" in n or "embed" in n for n in one), "embedding and output head are the target's"
    several = {n for n, _ in make_case("mtp", "modules").head.named_parameters()}
    assert several == {f"depths.{s}.{n}" for s in range(4) for n in one}


@torch.no_grad()
@pytest.mark.parametrize("variant", ["gqa", "modules"])
def test_layers_of_other_blocks_draft_what_they_were_trained_to(variant: str) -> None:
    """An output gate, biases, norms of queries and keys, a mixture of experts: in training as in drafting."""
    attention = {"kind": "standard", "qk_norm": True, "bias": True, "gate": True, "partial_rotary_factor": 0.5}
    experts = {
        "kind": "experts", "count": 4, "intermediate_size": 12, "top_k": 2, "router": "softmax", "normalise": True,
    }  # fmt: skip
    case = make_case("mtp", variant)
    head = MtpHead(dataclasses.replace(case.config, attention=attention, mlp=experts), case.head.vocab).double()
    generator = torch.Generator().manual_seed(0)
    for weight in head.parameters():
        weight.normal_(float(weight.ndim == 1), 0.3, generator=generator)
    case = dataclasses.replace(case, head=head)
    doc, rows = make_document(case, [True] * 14, 5), [1, 4, 8]
    drafted = head_checks.cached_drafts(case, doc, rows, 4)
    for b, row in enumerate(rows):
        for s in range(4):
            tokens = list(doc.tokens)
            tokens[row + 2 + s] = case.ids[3]
            loss = head_checks.row_loss(case, Document(tokens, doc.answer, doc.features, doc.last), row, s)
            torch.testing.assert_close(loss, -torch.log_softmax(drafted[s][0][b], 0)[3], rtol=1e-9, atol=1e-9)


# --- start ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("order", ["embed_first", "hidden_first"])
def test_the_start_is_a_tenth_of_the_state_and_the_embeddings_mix(
    order: str, tiny_target: Target, tiny_folder: Path
) -> None:
    """The layer adds nothing; neither the order of the inputs nor their scale matters; the seed decides the rest."""
    target = load_parts(str(tiny_folder), None, torch.float32)
    read, state = target.embed[torch.arange(60)], torch.randn(60, 64, generator=torch.Generator().manual_seed(1))
    normed = state / state.pow(2).mean(-1, keepdim=True).sqrt()
    mixed = []
    for seed, scale in ((0, 1.0), (0, 7.0), (1, 1.0)):
        head = new_head(tiny_target, concat_order=order)
        said = head.initialise(target, torch.Generator().manual_seed(seed))
        assert said == "start: a layer that adds nothing; output rows are the target's and stay"
        _, z = head.enter(read * scale, state * scale)
        attended = torch.ones(60, head.config.num_attention_heads * head.config.head_dim)
        assert torch.equal(head.layer.finish(z, attended), z)
        assert torch.equal(head.norm, 0.2 * target.norm_weight)
        mixed.append(z - 0.1 * normed)
    sizes = [float(m.pow(2).mean().sqrt()) for m in mixed]
    assert sizes == pytest.approx([1 / 3] * 3, rel=0.15)
    torch.testing.assert_close(mixed[0], mixed[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(mixed[0], mixed[2], atol=0.1)


@torch.no_grad()
def test_every_module_starts_and_all_its_weights_do(tiny_target: Target, tiny_folder: Path) -> None:
    attention = {"kind": "standard", "bias": True, "qk_norm": True}
    head = new_head(tiny_target, modules=2, steps=2, attention=attention)
    for name, weight in head.named_parameters():
        weight.fill_(1.0 if weight.ndim == 1 and not name.endswith("bias") else 7.0)
    said = head.initialise(load_parts(str(tiny_folder), None, torch.float32), torch.Generator().manual_seed(0))
    assert said.startswith("start: 2 modules whose layers add nothing")
    assert not any(bool((w == 7.0).any()) for w in head.parameters())
    assert not torch.equal(head.depths[0].eh_proj.weight, head.depths[1].eh_proj.weight)


def test_all_weights_learn_from_the_second_step_on() -> None:
    """The layer adds nothing at first: its last matrices learn, then all do."""
    case = make_case("mtp", "modules")
    case.head.initialise(case.parts, torch.Generator().manual_seed(0))
    for _ in range(2):
        case.head.zero_grad()
        torch.stack([s.num for s in case.head.losses(pack(make_documents(case)), case.parts)]).sum().backward()
        with torch.no_grad():
            for weight in case.head.parameters():
                assert weight.grad is not None
                weight -= 0.01 * weight.grad
    for name, weight in case.head.named_parameters():
        assert weight.grad is not None
        assert float(weight.grad.abs().max()) > 1e-6, f"{name} doesn't learn"


# --- trees ------------------------------------------------------------------------------------------------------------


class Recorded(RecordedPaths, MtpDrafter):
    """Keeps what it drafted from."""


@torch.no_grad()
@every_shape
@pytest.mark.parametrize("variant", ["gqa", "modules"])
def test_a_node_is_drafted_given_its_own_path(shape: Shape, variant: str) -> None:
    """Logits of every expanded node are the oracle's along that path, twice over; committed rows stay as they are."""
    case = make_case("mtp", variant)
    texts = [make_document(case, [True] * n, n) for n in (9, 2, 12)]
    drafter = Recorded(case.head, case.parts, shape)
    drafter.allocate(3, 32)
    for slot, doc in enumerate(texts):
        drafter.begin(slot, torch.tensor(doc.tokens), doc.features[:-1], doc.last[:-1])
    roots = torch.tensor([doc.tokens[-1] for doc in texts])
    kept = [x for x in (drafter.cache.pending, drafter.cache.lengths, drafter.logits, drafter.state) if x is not None]
    cached = (drafter.cache.keys, drafter.cache.values)
    before, before_cached = [x.clone() for x in kept], [x.clone() for x in cached]
    trees = [drafter.propose(roots, make_draws([Sampling()] * 3)) for _ in range(2)]
    assert torch.equal(trees[0].tokens, trees[1].tokens), "an earlier draft is still visible"
    assert all(torch.equal(x, y) for x, y in zip(before, kept, strict=True)), "drafting changed what is committed"
    weights = case.weights()
    for slot, doc in enumerate(texts):
        row = len(doc.tokens) - 2
        for old, new in zip(before_cached, cached, strict=True):
            assert torch.equal(old[slot, :, : row + 1], new[slot, :, : row + 1]), "drafting changed committed rows"
        assert len(drafter.made[slot]) == shape.expanded
        for path, logits in drafter.made[slot]:
            longer = Document([*doc.tokens, *path], [], doc.features, doc.last)
            want = case.reference.draft(weights, case.config, longer, case.parts, case.ids, row, len(path) + 1)[-1]
            torch.testing.assert_close(logits, want, rtol=2e-6, atol=2e-6)


# --- config -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules": 0}, "modules 0 must be at least 1"),
        ({"modules": 3}, "modules = 3 and steps = 4: every step has a module"),
        ({"modules": 2.0}, "modules = 2.0"),
        ({"step_weights": [0.5, 0.5]}, r"step_weights = \[0.5, 0.5\] must be 4 numbers above 0"),
        ({"step_weights": [1.0, 0.0, 1.0, 1.0]}, "must be 4 numbers above 0"),
        ({"step_weights": [1.0, float("nan"), 1.0, 1.0]}, "must be 4 numbers above 0"),
        ({"step_weights": 0.5}, "step_weights = 0.5"),
        ({"last_state": "none"}, "last_state = 'none' is not what an mtp head computes"),
        ({"recycled": "none"}, "recycled = 'none' is not what an mtp head computes"),
        ({"concat_order": "none"}, "concat_order = 'none' is not what an mtp head computes"),
        ({"layer_ids": [2, 4]}, r"layer_ids = \[2, 4\] is not what"),
        ({"objective": "both"}, "objective = 'both' is not what"),
        ({"input_norms": {"embed": "rms", "hidden": "none"}}, "input_norms = .* is not what"),
        ({"attention": "standard"}, "attention = 'standard'"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message) as error:
        MtpConfig.from_dict(common_config("mtp", DraftVocab(torch.tensor([1, 4, 5, 30]), VOCAB), **change), "the file")
    assert "\n" not in str(error.value)


def test_a_value_that_the_family_fixes_is_not_overruled(tiny_target: Target) -> None:
    for name, value in (("objective", "feature"), ("input_norms", {"embed": "none", "hidden": "none"})):
        with pytest.raises(DraftsmithError, match=f"{name} = .* is not what .* mtp head computes"):
            new_head(tiny_target, **{name: value})
    assert new_head(tiny_target, layer_ids=[1, 2]).config.layer_ids == []


def test_the_recipe_sets_modules_orders_and_weights(tiny_target: Target) -> None:
    published = load_head_recipe("mtp").head
    config = new_head(
        tiny_target, steps=published.steps, step_decay=published.step_decay, layer_ids=[1, 2, 3], **published.options
    ).config
    assert config == new_head(tiny_target).config, "the file's options are the family's own defaults"
    chosen = load_head_recipe(
        "mtp",
        {
            "head.steps": 4,
            "head.options": {
                "modules": 4, "concat_order": "hidden_first", "last_state": "pre", "recycled": "pre_norm",
                "step_weights": [0.5, 0.3, 0.1, 0.1],
            },
        },
    ).head  # fmt: skip
    head = new_head(tiny_target, steps=chosen.steps, step_decay=chosen.step_decay, **chosen.options)
    assert head.needs == Needs((), last=True)
    assert (head.config.concat_order, head.config.last_state, head.config.recycled) == (
        "hidden_first",
        "pre",
        "pre_norm",
    )
    assert head.step_weights() == [0.5, 0.3, 0.1, 0.1]
    assert head.step_weights(6) == [0.5, 0.3, 0.1, 0.1, 0.0, 0.0]
    assert head.step_weights(2) == [0.5, 0.3]


def test_steps_weigh_as_in_fastmtp(tiny_target: Target) -> None:
    """Its weights are powers of 0.6, but for scale and rounding."""
    weights = new_head(tiny_target).step_weights()
    assert [round(w / sum(weights), 2) for w in weights] == [0.51, 0.31, 0.18]


def test_a_run_with_a_module_for_each_step_ends_with_a_report(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the prompts to the held-out answers: states, training, validation, output check; trees as deep as it is."""
    asked = tmp_path / "mine.jsonl"
    asked.write_text("".join(f'{{"prompt": "write about the {x}"}}\n' for x in ("ship", "fox", "dog", "home", "north")))
    flags = {"model": str(tiny_folder), "data": asked, "runs": tmp_path / "runs", "head": "mtp", "minutes": 1.0}
    two = ["head.steps=2", "head.options.modules=2"]
    with pytest.raises(DraftsmithError, match=r"chain:3 is 3 deep, the head drafts 2 tokens: .*eval.trees=\[chain:2\]"):
        run_all(resolve("run", flags, None, [*two, "eval.trees=[chain:1,chain:3]"]))
    assert not list((tmp_path / "runs").glob("*/*"))
    config = resolve(
        "run", flags, None,
        [
            *two, "head.options.step_weights=[0.7,0.3]", "prepare.val_every=4",
            "prepare.chunk=8", "regenerate.max_new_tokens=12", "train.steps=4", "train.validate_every=4",
            "train.token_budget=256", "train.warmup=2", "eval.prompts=2",
            "eval.max_new_tokens=8", "eval.tuning_prompts=2", "eval.tuning_new_tokens=6", "eval.timed_prompts=1",
            "eval.timed_new_tokens=6",
        ],
    )  # fmt: skip
    report = run_all(config)
    assert report["head"]["modules"] == 2
    assert report["head"]["step_weights"] == [0.7, 0.3]
    assert report["summary"]["output_check"] == "identical"
    assert [row["tree"] for row in report["tuning"]["table"]] == ["chain:1", "chain:2"]
    assert "left out: chain:3; the head drafts 2 tokens" in "".join(capsys.readouterr())
