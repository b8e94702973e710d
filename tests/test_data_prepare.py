"""Stage prepare: rendering, the mask, splits, limits, mixtures, and what is left out."""

from __future__ import annotations

import json

import pytest
from tiny import CHATML, EOS, make_tiny_tokenizer

from draftsmith.data_recipes.builtin import builtin_prompts
from draftsmith.data_recipes.chat import document, render_prompt
from draftsmith.data_recipes.conversation import Malformed
from draftsmith.data_recipes.layout import TargetInfo, read_prompts
from draftsmith.data_recipes.prepare import PrepareSettings, prepare
from draftsmith.data_recipes.recipe import Recipe, SourceSpec
from draftsmith.errors import DraftsmithError

INFO = TargetInfo(fingerprint="f", tokenizer_sha256="t", max_positions=512)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def write(path, texts):
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(path)


def run(data, tokenizer, recipe, **settings):
    return prepare(PrepareSettings(**{"max_new_tokens": 32, **settings}), recipe, data, INFO, lambda: tokenizer)


def test_prompt_ends_where_the_assistant_speaks(tokenizer):
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    text = tokenizer.decode(render_prompt(tokenizer, messages))
    assert text == f"<|im_start|>system\nBe brief{EOS}\n<|im_start|>user\nHi{EOS}\n<|im_start|>assistant\n"


def test_without_chat_template(tokenizer):
    with pytest.raises(DraftsmithError, match="has no chat template"):
        render_prompt(make_tiny_tokenizer(chat_template=False), [{"role": "user", "content": "Hi"}])
    strict = make_tiny_tokenizer()
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    with pytest.raises(Malformed, match="the chat template refuses it: no system"):
        render_prompt(strict, [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}])


def test_mask_on_eight_tokens():
    """S S S R0 R1 R2 EOS: the answer is supervised, its end-of-turn token included."""
    tokens, answer = document([10, 11, 12], [20, 21, 22, 2])
    assert tokens == [10, 11, 12, 20, 21, 22, 2]
    assert [int(a) for a in answer] == [0, 0, 0, 1, 1, 1, 1]


def test_rows_splits_and_what_is_left_out(tmp_path, tokenizer):
    held_out = builtin_prompts("heldout")[0].text
    texts = [f"question number {i}" for i in range(60)] + ["Question  NUMBER 3", held_out.upper(), "long " * 400]
    recipe = Recipe(name="r", sources=[SourceSpec(source=write(tmp_path / "a.jsonl", texts))])
    stage = run(tmp_path / "data", tokenizer, recipe)
    rows = read_prompts(tmp_path / "data")
    assert len(rows) == len({row.id for row in rows}) == 60
    assert [i for i, row in enumerate(rows) if row.split == "val"] == [1, 26, 51]
    assert all(row.tokens == render_prompt(tokenizer, row.messages) for row in rows)
    record = stage.manifest["record"]
    left_out = {"duplicates": 1, "in the held-out or tuning prompts": 1, "longer than 480 tokens": 1}
    assert record["left_out"] == left_out
    assert (record["prompts"], record["val"]) == (60, 3)


def test_skips_redoes_and_takes_back(tmp_path, tokenizer):
    source = tmp_path / "a.jsonl"
    recipe = Recipe(name="r", sources=[SourceSpec(source=write(source, ["one", "two"]))])
    first = run(tmp_path / "data", tokenizer, recipe)
    file = tmp_path / "data" / "prompts" / "prompts.jsonl"
    before = file.read_bytes(), file.stat().st_mtime_ns
    again = prepare(PrepareSettings(max_new_tokens=32), recipe, tmp_path / "data", INFO, lambda: pytest.fail("no work"))
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert again.digest == first.digest
    write(source, ["one", "two", "three"])
    assert run(tmp_path / "data", tokenizer, recipe).digest != first.digest
    assert len(read_prompts(tmp_path / "data")) == 3
    write(source, ["one", "two"])
    prepare(PrepareSettings(max_new_tokens=32), recipe, tmp_path / "data", INFO, lambda: pytest.fail("no work"))
    assert file.read_bytes() == before[0]


def test_any_first_part_has_the_same_mixture(tmp_path, tokenizer):
    sources = [
        SourceSpec(source=write(tmp_path / "a.jsonl", [f"a {i}" for i in range(50)]), weight=3),
        SourceSpec(source=write(tmp_path / "b.jsonl", [f"b {i}" for i in range(50)]), limit=10),
    ]
    run(tmp_path / "data", tokenizer, Recipe(name="r", sources=sources))
    kinds = [row.messages[0]["content"][0] for row in read_prompts(tmp_path / "data")]
    assert [kinds[:n].count("b") for n in (4, 8, 20, 40)] == [1, 2, 5, 10]
    assert len(kinds) == 60


def test_errors(tmp_path, tokenizer):
    recipe = Recipe(name="r", sources=[SourceSpec(source=write(tmp_path / "a.jsonl", ["long " * 400]))])
    with pytest.raises(DraftsmithError, match=r"no prompt is left; left out: \{'longer than 480 tokens': 1\}"):
        run(tmp_path / "data", tokenizer, recipe)
    with pytest.raises(DraftsmithError, match="max_new_tokens 512 leaves no room"):
        run(tmp_path / "data", tokenizer, recipe, max_new_tokens=512)


def test_target_info(tiny_folder):
    info = TargetInfo.read(str(tiny_folder))
    assert info.max_positions == 512
    assert info == TargetInfo.read(str(tiny_folder))
