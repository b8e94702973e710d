"""What training takes from a feature store: label counts, the draft vocabulary and its coverage, packed batches."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from store_samples import DOCUMENTS, TOPK, as_topk, fill

from draftsmith.data_recipes.packing import make_batch, plan_batches
from draftsmith.data_recipes.store import FeatureStore
from draftsmith.data_recipes.vocabulary import choose_vocab, coverage_lines, coverage_table, script, token_scripts
from draftsmith.errors import DraftsmithError
from draftsmith.heads import alignment
from draftsmith.heads.vocab import DraftVocab, build_vocab


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path / "features")


# --- labels and vocabulary -------------------------------------------------------------------------------------------


def test_label_counts_follow_the_alignment(folder):
    store = FeatureStore.open(folder)
    expected = torch.zeros(2, 50, dtype=torch.int64)
    for source, d in ((0, DOCUMENTS[0]), (0, DOCUMENTS[1]), (1, DOCUMENTS[3])):
        rows = alignment.supervised(d.answer, torch.zeros(len(d.tokens), dtype=torch.int64), 1)[0].nonzero().flatten()
        for row in rows.tolist():
            expected[source, d.tokens[row + 2]] += 1
    assert torch.equal(store.label_counts(), expected)
    assert expected.sum(0).nonzero().flatten().tolist() == [9, *range(11, 31)]
    assert store.label_counts("val")[1, 10] == 2
    assert not store.label_counts("test").any()
    vocab, covered = choose_vocab(store, 3, [0])
    assert vocab.target_ids.tolist() == [0, 9, 12]  # 12 twice, then the lowest id of those seen once
    total = expected.sum(0)
    assert covered == pytest.approx(float(total[vocab.target_ids].sum() / total.sum()))


def test_choosing_a_vocabulary_reads_no_chunk(folder, monkeypatch):
    from draftsmith.data_recipes import store as module

    store = FeatureStore.open(folder)
    monkeypatch.setattr(module, "Chunk", None)
    assert len(choose_vocab(store, 5, [])[0]) == 5
    assert store.trainable("train", 100) == ([0, 3], 1)


def test_trainable_documents_have_a_supervised_row_within_the_limit(folder):
    store = FeatureStore.open(folder)
    for split in ("train", "val", "test"):
        for limit in range(1, 15):
            own = [i for i in range(4) if store.split(i) == split]
            good = []
            for i in own:
                answer = store.document(i).answer[:limit]
                rows = alignment.supervised(answer, torch.zeros(len(answer), dtype=torch.int64), 1)[0]
                good += [i] * bool(rows.any())
            assert store.trainable(split, limit) == (good, len(own) - len(good)), (split, limit)


def test_coverage_by_source_and_script(folder, tiny_target):
    store = FeatureStore.open(folder)
    vocab = DraftVocab(torch.tensor([9, 11, 12, 13]), 50)
    table = coverage_table(store, vocab, tiny_target.tokenizer)
    assert table["overall"] == {"labels": 22, "tokens": 21, "coverage": pytest.approx(5 / 22)}
    assert list(table["by_source"]) == ["b", "a"]
    assert table["by_source"]["a"] == {"labels": 3, "tokens": 3, "coverage": 1.0}
    assert table["by_source"]["b"] == {"labels": 19, "tokens": 19, "coverage": pytest.approx(2 / 19)}
    assert sum(x["labels"] for x in table["by_script"].values()) == 22
    lines = coverage_lines(table)
    assert lines[0] == "draft vocabulary: 4 of 50 tokens"
    assert re.fullmatch(r"  source b +10\.53% of +19 labels, +19 tokens", lines[2])
    json.dumps(table, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" the", "Latin"), ("é", "Latin"), ("При", "Cyrillic"), ("中国", "Han"), ("々", "Han"), ("مر", "Arabic"),
        ("한", "Hangul"), ("の", "Hiragana"), ("ｶ", "Katakana"), ("Ａ", "Latin"), ("नम", "Devanagari"),
        ("3rd", "Latin"), ("12", "digits"), (" 3.", "digits"), ("٣", "digits"),
        ("...", "punctuation and symbols"), (" +=", "punctuation and symbols"), ("🙂", "punctuation and symbols"),
        ("\n\n", "white space and control"), ("\x07", "white space and control"),
        ("\ufffd", "bytes"), ("ᚠ", "other"), ("", "other"),
    ],
)  # fmt: skip
def test_scripts(text, name):
    assert script(text) == name


def test_scripts_of_tokens(tiny_target):
    tokenizer = tiny_target.tokenizer
    ids = [tokenizer.eos_token_id, *tokenizer("the", add_special_tokens=False).input_ids]
    ids += tokenizer("é", add_special_tokens=False).input_ids  # two byte tokens
    assert token_scripts(tokenizer, ids) == ["special", *["Latin"] * (len(ids) - 3), "bytes", "bytes"]


# --- packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 64, 1000])
def test_a_plan_holds_every_document_once(budget):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 300, (500,), generator=generator).tolist()
    plan = plan_batches(lengths, budget, seed=3, epoch=1)
    assert sorted(i for batch in plan for i in batch) == list(range(500))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= budget for batch in plan)
    assert plan == plan_batches(lengths, budget, seed=3, epoch=1)
    assert plan != plan_batches(lengths, budget, seed=3, epoch=2)
    assert plan != plan_batches(lengths, budget, seed=4, epoch=1)
    if budget == 1000:
        assert sum(lengths) / (len(plan) * budget) > 0.95


def test_plan_edges():
    assert plan_batches([], 10, 0, 0) == []
    assert sorted(plan_batches([20, 3], 10, 0, 0)) == [[0], [1]]
    with pytest.raises(DraftsmithError, match="token_budget 0"):
        plan_batches([1], 0, 0, 0)


def test_a_batch_packs_documents(folder):
    store = FeatureStore.open(folder)
    batch = make_batch(store, [3, 0], max_length=10)
    assert batch.tokens.tolist() == [*range(1, 11), 1, 2, 3, 10, 11, 12, 9]
    assert batch.documents.tolist() == [0] * 10 + [1] * 7
    assert batch.positions.tolist() == [*range(10), *range(7)]
    assert batch.answer.tolist() == [False] * 13 + [True] * 4
    assert torch.equal(batch.features[:9], DOCUMENTS[3].features[:9])
    assert torch.equal(batch.last[10:16], DOCUMENTS[0].last)
    assert batch.features[[9, 16]].abs().max() == 0
    assert batch.last[[9, 16]].abs().max() == 0
    assert (batch.features.dtype, batch.features.shape) == (torch.bfloat16, (17, 8))
    assert (batch.topk_ids, batch.topk_logprobs) == (None, None)


def test_a_batch_packs_topk_teachers(tmp_path):
    documents: list[Any] = [as_topk(d) for d in DOCUMENTS]
    store = FeatureStore.open(fill(tmp_path / "features", TOPK, documents))
    batch = make_batch(store, [3, 0], max_length=10).to("cpu", torch.float32)
    assert batch.last is None
    assert torch.equal(batch.topk_ids[10:16], documents[0].topk[0].long())
    assert torch.equal(batch.topk_logprobs[:9], documents[3].topk[1][:9].float())
    assert batch.topk_ids.shape == batch.topk_logprobs.shape == (17, 3)
    assert batch.features.dtype == torch.float32


def test_a_vocabulary_has_room_for_its_end_of_turn_tokens():
    counts = torch.tensor([3, 2, 1, 0])
    assert build_vocab(counts, 2, [3, 2])[0].target_ids.tolist() == [2, 3]
    with pytest.raises(
        DraftsmithError, match=r"vocabulary of 1 tokens has no room for the end-of-turn tokens \[2, 3\]"
    ):
        build_vocab(counts, 1, [3, 2])
    with pytest.raises(DraftsmithError, match="vocabulary of 0 tokens"):
        build_vocab(counts, 0)
    for wrong in ([4], [-1]):
        with pytest.raises(DraftsmithError, match="not all among the target's 4 tokens"):
            build_vocab(counts, 2, wrong)
