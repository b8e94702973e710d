"""Stage regenerate in this process: turns on the target's own answers, temperatures, ranks, budgets."""

from __future__ import annotations

import dataclasses
import random
import signal

import pytest
import regenerate_data
import torch
from regenerate_data import answer_bytes, answered, make_prompts, prompt_row, said, user, write_prompts
from tiny import CHATML, make_tiny_target, make_tiny_tokenizer

from draftsmith.data_recipes import regenerate as regenerate_module
from draftsmith.data_recipes.chat import ChatFormat
from draftsmith.data_recipes.collect import CollectSettings, collect
from draftsmith.data_recipes.layout import TargetInfo
from draftsmith.data_recipes.regenerate import RegenerateSettings, regenerate
from draftsmith.data_recipes.store import FeatureStore
from draftsmith.data_recipes.turns import Asking
from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request, decode
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.heads.base import Needs
from draftsmith.heads.target import Target

SETTINGS = RegenerateSettings(max_new_tokens=12, slots=4)
RECORD = CollectSettings((2, 3, 4))


@pytest.fixture(scope="module")
def info(tiny_folder):
    return TargetInfo.read(str(tiny_folder))


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    """A tiny target that says whole words alone, which are read back as they were written, and ends soon."""
    from transformers import LlamaForCausalLM

    folder = make_tiny_target(tmp_path_factory.mktemp("plain") / "target")
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), make_tiny_tokenizer()
    words = [id for piece, id in tokenizer.get_vocab().items() if piece[0] == "Ġ" and len(piece) > 1]
    with torch.no_grad():
        scale = torch.zeros(len(tokenizer), 1)
        scale[words] = 1
        scale[2] = 1.6
        model.lm_head.weight *= scale
    model.save_pretrained(folder)
    return folder


def conversations(count=20):
    draw = random.Random(3)
    words = ["fox", "ship", "winter", "dog", "story", "answer", "north", "sentence"]
    made = []
    for i in range(count):
        asks = [user(f"{' '.join(draw.choices(words, k=draw.randint(1, 6)))} {i}") for _ in range(1 + i % 4)]
        made.append([message for ask in asks for message in (ask, said("what the data set says"))])
    return made


@pytest.fixture
def data(tmp_path, tiny_target):
    make_prompts(tmp_path / "data", tiny_target.tokenizer, conversations())
    return tmp_path / "data"


def no_work():
    pytest.fail("there is nothing to do")


# One conversation, by hand: a tokenizer of words, so that every answer is read back as it was written.

REWRITES = (  # takes earlier thoughts out
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENS = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>")


def dialogue(template=CHATML, turns=0, positions=512, asks=("the fox", "a ship", "in winter"), **fields):
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    asking = Asking(tokenizer, ChatFormat(tokenizer, stop_ids=[2]), turns, 16, positions, frozenset({2}))
    messages = [m for ask in asks for m in (user(ask), said("not this"))]
    row = prompt_row(7, messages, asking.format.prompt([messages[0]]), **fields)
    return asking.begin(row), tokenizer


def answer(going, tokenizer, text, finish="eos"):
    going.take(tokenizer.encode(text, add_special_tokens=False) + [2] * (finish == "eos"), finish)


def marked(row, tokenizer):
    """The document's text with the answers in double brackets."""
    text, at = "", 0
    for start, end in row.spans:
        text += tokenizer.decode(row.tokens[at:start]) + "[[" + tokenizer.decode(row.tokens[start:end]) + "]]"
        at = end
    return text + tokenizer.decode(row.tokens[at:])


def test_turns_become_one_document_by_hand():
    going, tokenizer = dialogue()
    assert going.name == "asks/007"
    answer(going, tokenizer, "runs home")
    assert going.name == "asks/007/2"
    assert tokenizer.decode(going.prompt) == (
        "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\nruns home<|im_end|>\n"
        "<|im_start|>user\na ship<|im_end|>\n<|im_start|>assistant\n"
    )
    answer(going, tokenizer, "sails")
    answer(going, tokenizer, "to the nor", finish="length")
    assert going.prompt is None
    (row,) = going.rows()
    assert (row.id, row.source, row.finish) == ("asks/007", "asks", "length")
    assert marked(row, tokenizer) == (
        "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n[[runs home<|im_end|>]]\n"
        "<|im_start|>user\na ship<|im_end|>\n<|im_start|>assistant\n[[sails<|im_end|>]]\n"
        "<|im_start|>user\nin winter<|im_end|>\n<|im_start|>assistant\n[[to the nor]]"
    )
    assert going.ended is None  # the last turn was answered


def test_a_template_that_rewrites_gives_a_document_a_turn():
    going, tokenizer = dialogue(REWRITES)
    answer(going, tokenizer, "<think>well</think>runs home")
    answer(going, tokenizer, "sails")  # nothing to rewrite here: the third turn goes on
    answer(going, tokenizer, "cold")
    first, second = going.rows()
    assert (first.id, second.id) == ("asks/007/1", "asks/007/2")
    assert marked(first, tokenizer) == (
        "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n[[<think>well</think>runs home<|im_end|>]]"
    )
    assert marked(second, tokenizer) == (
        "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\nruns home<|im_end|>\n"
        "<|im_start|>user\na ship<|im_end|>\n<|im_start|>assistant\n[[sails<|im_end|>]]\n"
        "<|im_start|>user\nin winter<|im_end|>\n<|im_start|>assistant\n[[cold<|im_end|>]]"
    )


def test_a_thought_that_the_prompt_opens_is_read_whole():
    going, tokenizer = dialogue(OPENS)
    answer(going, tokenizer, "well</think>runs home")
    assert "assistant\n<think>well</think>runs home<|im_end|>" in tokenizer.decode(going.prompt)


@pytest.mark.parametrize(
    ("options", "finish", "reason"),
    [
        ({}, "length", "an answer was cut"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "eos", "it has tools, which nobody runs here"),
        ({"positions": 40}, "eos", "the target's context is full"),
        ({"asks": ("the fox", "<|im_end|>")}, "eos", "text that spells the special token <|im_end|>"),
    ],
)
def test_conversations_that_end_early(options, finish, reason):
    going, tokenizer = dialogue(**options)
    answer(going, tokenizer, "runs home", finish)
    assert (going.prompt, going.ended) == (None, reason)
    assert len(going.rows()) == 1


def test_as_many_turns_as_asked_for():
    for turns, spans in ((1, 1), (2, 2), (5, 3), (0, 3)):
        going, tokenizer = dialogue(turns=turns)
        while going.prompt is not None:
            answer(going, tokenizer, "runs home")
        assert len(going.rows()[0].spans) == spans


def test_other_template_kwargs_than_prepare_had(tiny_target):
    asking = Asking(tiny_target.tokenizer, ChatFormat(tiny_target.tokenizer), 0, 16, 512, frozenset({2}))
    with pytest.raises(DraftsmithError, match="asks/001 is not what the chat template gives now"):
        asking.begin(prompt_row(1, conversations()[1], [1, 2, 3]))


# The stage.


def test_turns_of_the_stage_are_the_targets_own(data, plain_folder):
    """Every answer against transformers' generate on its own prompt; features against a forward pass."""
    target = Target.load(str(plain_folder), dtype=torch.float32, device="cpu")
    info = TargetInfo.read(str(plain_folder))
    settings = dataclasses.replace(SETTINGS, turns=0)
    record = regenerate(settings, data, info, lambda: target, record=RECORD).manifest["record"]
    rows = answered(data)
    for row in rows[::2]:
        for start, end in row.spans:
            prompt = torch.tensor([row.tokens[:start]])
            with target.attention():
                made = target.model.generate(prompt, max_new_tokens=12, do_sample=False)[0, start:]
            assert row.tokens[start:end] == made.tolist()
    assert record["answers"] == sum(len(row.spans) for row in rows) > 25
    assert record["documents"] == len(rows) == 20  # ChatML leaves what was said as it is
    assert record["ended_early"]["an answer was cut"] > 0
    assert collect(RECORD, data, info, no_work).manifest["record"]["documents"] == len(rows)
    store = FeatureStore.open(data / "features", info.fingerprint, RECORD.layer_ids)
    assert store.ids == [row.id for row in rows]
    for i in range(0, len(store), 3):
        document = store.document(i)
        aux, last = target.states(document.tokens[None], Needs(RECORD.layer_ids, last=True))
        torch.testing.assert_close(document.features, aux[0, :-1].bfloat16(), rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(document.last, last[0, :-1].bfloat16(), rtol=2**-7, atol=1e-3)


def test_sampling_is_keyed_by_conversation(data, info, tiny_target, tmp_path):
    settings = dataclasses.replace(SETTINGS, temperatures=[0.0, 0.8, 1.2], seed=9)
    record = regenerate(settings, data, info, lambda: tiny_target).manifest["record"]
    groups = record["by_temperature"]
    assert set(groups) == {"0.0", "0.8", "1.2"}
    assert sum(group["answers"] for group in groups.values()) == 20
    for row in answered(data)[::4]:
        (start, _), temperature = row.spans[0], settings.temperature(row.id)
        request = Request(row.id, row.tokens[:start], 12, Sampling(temperature, seed=9))
        (alone,) = decode(tiny_target, PlainDrafter(), [request], slots=1, capacity=200)
        assert row.tokens[start:] == alone.tokens
    greedy = tmp_path / "greedy"
    make_prompts(greedy, tiny_target.tokenizer, conversations())
    regenerate(SETTINGS, greedy, info, lambda: tiny_target)
    same = [a.tokens == b.tokens for a, b in zip(answered(data), answered(greedy), strict=True)]
    assert [settings.temperature(row.id) == 0 for row in answered(data)] == same


def test_wrong_temperatures(data, info):
    for wrong in ([], [0.0, -1.0], [float("inf")]):
        with pytest.raises(DraftsmithError, match="temperature"):
            regenerate(dataclasses.replace(SETTINGS, temperatures=wrong), data, info, no_work)


def test_tokenised_records_are_skipped_and_counted(tmp_path, info, tiny_target):
    rows = [prompt_row(i, [], [] if i % 2 else [1, 5, 6, 7 + i]) for i in range(8)]
    rows += [prompt_row(i, [], []) for i in range(8, 12)]
    write_prompts(tmp_path / "data", rows, chunk=4)
    record = regenerate(SETTINGS, tmp_path / "data", info, lambda: tiny_target, record=RECORD).manifest["record"]
    assert (record["chunks"], record["answers"], record["skipped"]) == (3, 4, 8)
    assert collect(RECORD, tmp_path / "data", info, no_work).manifest["record"]["documents"] == 4
    write_prompts(tmp_path / "none", [prompt_row(0, [], [])])
    with pytest.raises(DraftsmithError, match="holds no answer: no record has a prompt"):
        regenerate(SETTINGS, tmp_path / "none", info, lambda: tiny_target)


# Ranks.


def test_ranks_make_the_same_files(data, info, tiny_target, tmp_path):
    regenerate(SETTINGS, data, info, lambda: tiny_target, record=RECORD)
    shared = tmp_path / "shared"
    make_prompts(shared, tiny_target.tokenizer, conversations())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regenerate_module, "STALLED_S", 0.0)
        patch.setattr(regenerate_module, "_POLL_S", 0.01)
        settings = dataclasses.replace(SETTINGS)
        with pytest.raises(DraftsmithError, match=r"chunk-00001\.jsonl and 0 other chunks .* start rank 1 again"):
            regenerate(settings, shared, info, lambda: tiny_target, record=RECORD, rank=0, world=2)
    assert set(answer_bytes(shared)) == {"chunk-00000.jsonl", "chunk-00002.jsonl"}
    stage = regenerate(SETTINGS, shared, info, lambda: tiny_target, record=RECORD, rank=1, world=2)
    assert stage.manifest is None  # only rank 0 finishes it
    stage = regenerate(SETTINGS, shared, info, no_work, record=RECORD, rank=0, world=2)
    assert stage.manifest["record"]["answers"] == 20
    assert answer_bytes(shared) == answer_bytes(data)
    for path in (data / "features").glob("chunk-*"):
        assert path.read_bytes() == (shared / "features" / path.name).read_bytes()


def test_ranks_within_a_budget(data, info, tiny_target, monkeypatch):
    """Rank 0 waits for rank 1 until that has left its chunk for a larger budget."""
    monkeypatch.setattr(regenerate_module, "STALLED_S", 0.0)
    monkeypatch.setattr(regenerate_module, "_POLL_S", 0.01)
    settings, minutes = dataclasses.replace(SETTINGS, max_new_tokens=2), 1e-6
    with pytest.raises(DraftsmithError, match="start rank 1 again"):
        regenerate(settings, data, info, lambda: tiny_target, minutes, rank=0, world=2)
    assert list(answer_bytes(data)) == ["chunk-00000.jsonl"]
    regenerate(settings, data, info, no_work, minutes, rank=1, world=2)
    record = regenerate(settings, data, info, no_work, minutes, rank=0, world=2).manifest["record"]
    assert (record["chunks"], record["chunks_planned"], record["minutes"]) == (1, 3, minutes)
    record = regenerate(settings, data, info, lambda: tiny_target).manifest["record"]  # alone, without a limit
    assert (record["chunks"], record["answers"], record["minutes"]) == (3, 20, None)


def test_a_rank_is_killed_and_started_again(tmp_path, forks):
    """Two processes at once; rank 1 dies twice where a file would appear, and comes back."""
    target = make_tiny_target(tmp_path / "target", layers=4, hidden=32, heads=2, kv_heads=1)
    tokenizer = make_tiny_tokenizer()

    def start(data, rank, world, kill=None):
        settings = dataclasses.replace(SETTINGS, turns=2, temperatures=[0.0, 1.0])
        args = (settings, str(target), str(data), rank, world, kill)
        child = forks.Process(target=regenerate_data.run_rank, args=args)
        child.start()
        return child

    whole, shared = tmp_path / "whole", tmp_path / "shared"
    for data in (whole, shared):
        make_prompts(data, tokenizer, conversations(24), chunk=4)
    alone = start(whole, 0, 1)
    first = start(shared, 0, 2)
    for kill in (2, 3):  # a chunk is two files: its time, its answers
        second = start(shared, 1, 2, kill)
        second.join(60)
        assert second.exitcode == -signal.SIGKILL
    second = start(shared, 1, 2)
    for child in (second, first, alone):
        child.join(60)
        assert child.exitcode == 0
    assert answer_bytes(shared) == answer_bytes(whole)
    assert len(answer_bytes(whole)) == 6
