"""The built-in prompts: many, distinct, balanced, and never shared between training and measuring."""

import re
import time
from collections import Counter
from itertools import pairwise

import pytest

from draftsmith.data_recipes import builtin
from draftsmith.data_recipes.builtin import CAP, Lists, Prompt, Template, builtin_prompts, load_templates, normalise

REQUIRED = {
    "writing", "role_play", "reasoning", "maths", "coding", "extraction", "stem", "humanities", "summarising",
    "translation", "planning", "everyday_advice",
}  # fmt: skip


@pytest.fixture(scope="module")
def train() -> list[Prompt]:
    return builtin_prompts("train")


@pytest.fixture(scope="module")
def others() -> list[Prompt]:
    return builtin_prompts("tuning") + builtin_prompts("heldout")


def grams(text: str, n: int = 8) -> set[tuple[str, ...]]:
    words = normalise(text).split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def test_counts(train: list[Prompt]) -> None:
    assert len(train) >= 9_000
    assert len(load_templates()) >= 450
    assert len(builtin_prompts("heldout")) == 80
    assert len(builtin_prompts("tuning")) == 20
    assert set(builtin.categories()) >= REQUIRED


def test_all_prompts_differ_after_normalising(train: list[Prompt], others: list[Prompt]) -> None:
    repeated = [text for text, n in Counter(normalise(p.text) for p in train + others).items() if n > 1]
    assert not repeated


def test_ids_are_unique_and_name_their_category(train: list[Prompt], others: list[Prompt]) -> None:
    assert len({p.id for p in train + others}) == len(train) + len(others)
    assert all(re.fullmatch(rf"{p.category}-[0-9a-f]{{10}}", p.id) for p in train + others)


def test_two_calls_agree(train: list[Prompt]) -> None:
    load_templates.cache_clear()
    assert builtin_prompts("train") == train


@pytest.mark.parametrize("start", [0, 300, 1_200, 6_000])
def test_any_stretch_of_300_has_every_category(train: list[Prompt], start: int) -> None:
    shares = Counter(p.category for p in train[start : start + 300])
    assert set(shares) == set(builtin.categories())
    assert max(shares.values()) <= 3 * min(shares.values())


def test_a_prefix_takes_each_template_once_before_any_twice(train: list[Prompt]) -> None:
    origin = {text: (t.category, t.key) for t in load_templates() for _, text in t.fillings()}
    first = [origin[p.text] for p in train[:500]]
    assert len(set(first)) == len(first)
    assert all(a[0] != b[0] for a, b in pairwise(first))


def test_measuring_prompts_share_nothing_with_training(train: list[Prompt], others: list[Prompt]) -> None:
    trained = set().union(*(grams(p.text) for p in train))
    shared = {p.id: grams(p.text) & trained for p in others if grams(p.text) & trained}
    assert not shared
    assert not {normalise(p.text) for p in others} & {normalise(p.text) for p in train}


def test_tuning_and_heldout_share_nothing() -> None:
    tuning = set().union(*(grams(p.text) for p in builtin_prompts("tuning")))
    assert not tuning & set().union(*(grams(p.text) for p in builtin_prompts("heldout")))


@pytest.mark.parametrize("split", ["tuning", "heldout"])
def test_standalone_splits_cover_the_twelve_categories_evenly(split: builtin.Split) -> None:
    shares = Counter(p.category for p in builtin_prompts(split))
    assert set(shares) == REQUIRED
    assert max(shares.values()) - min(shares.values()) <= 1


def test_near_copies_are_capped() -> None:
    for template in load_templates():
        topics = [topic for topic, _ in template.fillings()]
        where = f"{template.category}/{template.key}"
        assert template.topical_slots, f"{where} has no topical slot"
        assert 8 <= len(topics) <= CAP, f"{where} gives {len(topics)} prompts"
        assert len({frozenset(topic) for topic in topics}) == len(topics), f"{where} repeats a topic"
        for values in zip(*topics, strict=True):  # a list is walked through before a value returns
            uses = Counter(values)
            assert max(uses.values()) <= 2 + CAP // len(uses), f"{where} leans on one value"


def test_templates_do_not_repeat_each_other() -> None:
    frames = Counter(normalise(t.text) for t in load_templates())
    assert not [frame for frame, n in frames.items() if n > 1]


def test_no_slot_is_left_and_text_is_clean(train: list[Prompt], others: list[Prompt]) -> None:
    for prompt in train + others:
        assert not re.search(r"\{[a-z_]+(\.\d)?\}|\{\d+\.\.\d+", prompt.text), prompt
        assert prompt.text == prompt.text.strip(), prompt
        assert 2 <= len(prompt.text.split()) <= 400, prompt


def test_lists_hold_distinct_texts_and_all_are_used() -> None:
    used: set[str] = set()
    lists: dict[str, tuple[str, ...]] = {}
    for template in load_templates():
        lists |= {name: tuple(values) for name, values in {**template.lists.topics, **template.lists.styles}.items()}
        used |= set(re.findall(r"\{([a-z_]+)", template.text))
    for name, values in lists.items():
        assert all(isinstance(value, str) for value in values), name
        assert len(set(values) - {""}) == len([v for v in values if v]), f"{name} holds a value twice"
        used |= {inner for value in values for inner in re.findall(r"\{([a-z_]+)(?:\.\d)?\}", value)}
    assert not set(lists) - used


def test_some_prompts_are_short_and_some_carry_a_passage(train: list[Prompt]) -> None:
    lengths = [len(p.text.split()) for p in train]
    assert sum(n <= 10 for n in lengths) >= 1_000
    assert sum(n >= 60 for n in lengths) >= 800


COLOURS = Lists(
    topics={"colour": ["red", "blue", "green"], "thing": ["{colour} cup", "hat"]},
    styles={"tone": ["kind", "dry"]},
)


def texts(template: Template) -> list[str]:
    return [text for _, text in template.fillings()]


def test_filling_rules() -> None:
    same = Template("demo", "same", "{colour} is {colour}, not {colour.2}", COLOURS)
    for text in texts(same):
        a, b, c = re.fullmatch(r"(\w+) is (\w+), not (\w+)", text).groups()  # type: ignore[union-attr]
        assert a == b != c
    assert len(texts(same)) == 3
    assert len(texts(Template("demo", "style", "a {tone} {colour}", COLOURS))) == 3, "a style makes no new prompt"
    assert any("cup" in t and "{" not in t for t in texts(Template("demo", "nested", "my {thing}", COLOURS)))
    for text in texts(Template("demo", "number", "{10..30/10} {colour} and {5..6}", COLOURS)):
        assert re.fullmatch(r"(10|20|30) \w+ and [56]", text)


def test_content_alone_decides() -> None:
    """Moving a template or the values of a list changes no prompt; a new template leaves the others alone."""
    turned = Lists(topics={n: v[::-1] for n, v in COLOURS.topics.items()}, styles=COLOURS.styles)
    template = Template("demo", "key", "a {colour} {thing}, {tone}", COLOURS)
    assert template.fillings() == Template("demo", "key", template.text, turned).fillings()


def test_order_of_files_and_templates_does_not_matter(train: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    templates = load_templates()
    monkeypatch.setattr(builtin, "load_templates", lambda: templates[::-1])
    assert builtin_prompts("train") == train
    monkeypatch.setattr(builtin, "load_templates", lambda: templates[5:])
    assert {p.id for p in builtin_prompts("train")} <= {p.id for p in train}


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="no list named 'shade'"):
        Template("demo", "key", "a {shade}", COLOURS).fillings()
    with pytest.raises(ValueError, match=r"defined twice: \['colour'\]"):
        COLOURS.extended({"topics": {"colour": ["pink"]}})
    with pytest.raises(ValueError, match="'dev'"):
        builtin_prompts("dev")  # type: ignore[arg-type]


def test_loading_is_fast() -> None:
    load_templates.cache_clear()
    started = time.process_time()
    builtin_prompts("train")
    assert time.process_time() - started < 3, "about half a second on a quiet machine"
