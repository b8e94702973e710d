"""Duplicates and overlap with evaluation prompts, against exact sets of shingles."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

from draftsmith.data_recipes import builtin
from draftsmith.data_recipes.duplicates import Duplicates, NearDuplicates, shingles
from draftsmith.data_recipes.overlap import EvaluationPrompts, builtin_evaluation, read_evaluation
from draftsmith.data_recipes.shingles import split, window_hashes, word_hashes, words
from draftsmith.errors import DraftsmithError

VOCABULARY = [f"word{i}" for i in range(3000)]


def text_of(draw, n=200):
    return [draw.choice(VOCABULARY) for _ in range(n)]


def altered(draw, original, changes):
    copy = list(original)
    for place in draw.sample(range(len(copy)), changes):
        copy[place] = draw.choice(VOCABULARY)
    return copy


def jaccard(first, second):
    """Of the sets of 5-word runs, from the texts themselves."""
    a, b = ({tuple(text[i : i + 5]) for i in range(len(text) - 4)} for text in (first, second))
    return len(a & b) / len(a | b)


def test_words():
    assert split("a  b,\nc") == ["a", "b,", "c"]
    assert split("你好 world!") == ["你", "好", "world!"]
    assert words("Don’t STOP, e\u0301t\u00e9: 3.5") == ["don", "t", "stop", "été", "3", "5"]
    assert words("日本語とEnglish") == [*"日本語と", "english"]


@pytest.mark.parametrize("size", [1, 5, 13])
def test_runs_are_equal_exactly_where_the_words_are(size):
    draw = random.Random(size)
    text = [draw.choice("abc") for _ in range(400)]
    hashes = window_hashes(word_hashes(text), size)
    runs = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
    assert len(hashes) == len(runs)
    assert len(set(zip(runs, hashes.tolist(), strict=True))) == len(set(runs)) == len(set(hashes.tolist()))
    assert len(window_hashes(word_hashes(text[: size - 1]), size)) == 0


def test_hashes_are_the_same_on_every_machine():
    """The formula in Python's own integers: h[i] + h[i+1]·B mod 2^64, h the SplitMix64 finaliser of a word's CRC-32."""

    def mix(v):
        v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        v = (v ^ (v >> 27)) * 0x94D049BB133111EB % 2**64
        return v ^ (v >> 31)

    a, b, c = (mix(zlib.crc32(word)) for word in (b"the", b"fox", b"runs"))
    expected = [(a + b * 0x9E3779B97F4A7C15) % 2**64, (b + c * 0x9E3779B97F4A7C15) % 2**64]
    assert window_hashes(word_hashes(["the", "fox", "runs"]), 2).tolist() == expected


def test_equal_texts():
    seen = Duplicates(near=None)
    assert seen.reason("Café  now?") is None
    assert seen.reason("cafe\u0301 NOW?\n") == "duplicate"
    assert seen.reason("Café now!") is None
    assert seen.reason("") is None
    assert seen.reason(" ") == "duplicate"


def test_near_duplicates():
    draw = random.Random(0)
    base = text_of(draw)
    seen = Duplicates(near=0.8)
    assert seen.reason(" ".join(base)) is None
    assert seen.reason(" ".join([*base[:100], "other", *base[101:]])) == "near-duplicate"
    half = altered(draw, base, 20)
    assert jaccard(base, half) < 0.5
    assert seen.reason(" ".join(half)) is None
    assert seen.reason("what is 3 + 4") is None
    assert seen.reason("what is 3 - 4") is None
    assert seen.reason("hi") is None


def test_the_estimate_is_the_jaccard_similarity():
    """128 minima: unbiased, and at most 0.044 standard error (0.5 is the worst case)."""
    draw, index, errors = random.Random(1), NearDuplicates(0.8), []
    for number in range(200):
        first = text_of(draw)
        second = altered(draw, first, draw.randrange(40))
        index.seen(shingles(" ".join(first)))
        estimate = index._similarity(NearDuplicates(0.8)._signature(shingles(" ".join(second)))[1], number)
        errors.append(estimate - jaccard(first, second))
    assert index._count == 200
    assert abs(np.mean(errors)) < 0.01
    assert np.std(errors) < 0.05


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_found_and_spared(threshold):
    """Among thousands of others, pairs well above the threshold are found and pairs well below it are not."""
    draw, index = random.Random(2), NearDuplicates(threshold)
    pairs = []
    while len(pairs) < 60:
        first = text_of(draw, 100)
        second = altered(draw, first, draw.randrange(12))
        if abs(jaccard(first, second) - threshold) > 0.12 or first == second:
            pairs.append((first, second))
    pairs += [(first, first) for first in (text_of(draw, 100) for _ in range(5))]
    assert not any(index.seen(shingles(" ".join(first))) for first, _ in pairs)
    assert not any(index.seen(shingles(" ".join(text_of(draw, 40)))) for _ in range(1500))
    assert len(index._tags) > 1 << 10  # the index has grown, and lost nothing
    wrong = [p for p in pairs if index.seen(shingles(" ".join(p[1]))) != (jaccard(*p) >= threshold)]
    assert wrong == []


def test_short_and_long_texts():
    index = NearDuplicates(1.0)
    assert (index.rows, index.bands) == (128, 1)
    assert not index.seen(shingles(""))
    assert not index.seen(shingles(""))  # nothing is like nothing
    assert not index.seen(shingles("two words"))
    assert index.seen(shingles("two words"))
    long = " ".join(map(str, range(20_000)))
    assert not index.seen(shingles(long))
    assert index.seen(shingles(long))


def test_memory_and_determinism():
    def fill():
        draw, index = random.Random(3), NearDuplicates(0.8)
        seen = [index.seen(shingles(" ".join(text_of(draw, 8)))) for _ in range(3000)]
        return index, seen

    (first, seen), (second, again) = fill(), fill()
    assert seen == again
    assert np.array_equal(first._owners, second._owners)
    entries = first._count * first.bands
    assert np.count_nonzero(first._owners >= 0) > 0.9 * entries
    assert first._tags.nbytes + first._owners.nbytes <= 4 / 3 * 2 * 8 * entries


def test_overlap():
    long = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    prompts = EvaluationPrompts(["Who are you?", "What is the capital of France?", long])
    held = "shares 13 words with an evaluation prompt"
    cases = {
        ("who are YOU",): "an evaluation prompt",
        ("who are you and why",): None,
        ("hello", "who are you?"): None,
        ("hello", "Tell me: what is the capital, of France"): "an evaluation prompt",
        ("what is the capital of Spain",): None,
        (" ".join(["zero", *long.split()[1:14], "end"]),): held,
        (" ".join(["zero", *long.split()[1:13], "end"]),): None,
        (" ".join(long.split()[:13]).upper(),): held,
        ("",): None,
        (): None,
    }
    assert {turns: prompts.reason(turns) for turns in cases} == cases


def test_overlap_against_exact_runs():
    draw = random.Random(4)
    letters = [[draw.choice("abcd") for _ in range(draw.randrange(5, 30))] for _ in range(20)]
    prompts = EvaluationPrompts([" ".join(text) for text in letters])
    runs = {tuple(text[i : i + 13]) for text in letters for i in range(max(len(text) - 12, 1))}
    found = 0
    for _ in range(300):
        text = [draw.choice("abcd") for _ in range(60)]
        expected = any(tuple(text[i : i + size]) in runs for size in range(5, 14) for i in range(len(text) - size + 1))
        assert (prompts.reason([" ".join(text)]) is not None) == expected
        found += expected
    assert 0 < found < 300


def test_builtin_training_prompts_are_all_kept_and_evaluation_prompts_all_found():
    prompts = EvaluationPrompts(builtin_evaluation())
    assert all(prompts.reason([text]) for text in builtin_evaluation())
    assert [p.text for p in builtin.builtin_prompts("train") if prompts.reason([p.text])] == []


def test_reading_evaluation_prompts(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"turns": ["First question here", "And then?"]}\n{"question": "Second \\ud83d", "answer": "1"}\n')
    assert read_evaluation(path) == ["First question here", "Second ?"]
    path.write_text('{"text": "Third asked as text"}\n{"prompt": " ?! "}\n{"text": ""}\n')
    assert read_evaluation(path) == ["Third asked as text"]
    path.write_text('{"turns": ["First"]}\n{"input_ids": [1, 2], "loss_mask": [0, 1]}\n')
    with pytest.raises(DraftsmithError, match=r"e\.jsonl:2: nothing is asked: mend the evaluation prompts"):
        read_evaluation(path)
    path.write_text('{"turns": ["First"]}\n{"nothing": 1}\n')
    with pytest.raises(DraftsmithError, match=r"e\.jsonl:2: .*mend the evaluation prompts"):
        read_evaluation(path)


def test_real_evaluation_files(test_data):
    found = {
        name: len(read_evaluation(test_data / "eval" / name)) for name in ("spec_bench.jsonl", "HumanEval.jsonl.gz")
    }
    assert found == {"spec_bench.jsonl": 480, "HumanEval.jsonl.gz": 164}
