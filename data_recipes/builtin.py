"""The project's own prompts: hand-written templates filled from hand-written lists.

``prompts/<category>.yaml`` holds the templates of one category, ``prompts/slots.yaml`` the lists that all
categories share. A template is a text with slots::

    {animal}      a value of the list ``animal``; the same value wherever the prompt says ``{animal}``
    {animal.2}    another value of the same list (``.3`` a third)
    {12..95}      a whole number from 12 to 95, drawn anew at each place; ``{10..90/5}`` goes in fives

Lists stand under ``topics`` (what the prompt is about) or ``styles`` (tone, length, wording). Two prompts of one
template always differ in a topic, and a template gives at most ``CAP`` prompts: it walks once through each
list in an order of its own before a value returns. Values may hold slots themselves.

Everything is keyed by content, nothing by position in a file: adding or moving a template leaves the ids and texts
of the others as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from importlib import resources
from itertools import count
from typing import Any, Literal

import yaml

Split = Literal["train", "tuning", "heldout"]

CAP = 24
"""Most prompts one template contributes."""

_SHARED, _STANDALONE = "slots", ("tuning", "heldout")
_SLOT = re.compile(r"\{([a-z][a-z_]*)(?:\.([2-9]))?\}")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)(?:/(\d+))?\}")
_MAX_NESTING = 3


@dataclass(frozen=True)
class Prompt:
    """One user message that opens a conversation."""

    id: str
    category: str
    text: str


@dataclass(frozen=True)
class Lists:
    """The values that slots are filled with, by list name."""

    topics: Mapping[str, Sequence[str]] = field(default_factory=dict)
    styles: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def values(self, name: str) -> Sequence[str]:
        """The values of one list."""
        try:
            return self.topics[name] if name in self.topics else self.styles[name]
        except KeyError:
            raise ValueError(f"no list named {name!r}; there are {sorted({*self.topics, *self.styles})}") from None

    def extended(self, document: Mapping[str, Any]) -> Lists:
        """These lists and those of one YAML document, whose names must be new."""
        topics, styles = document.get("topics") or {}, document.get("styles") or {}
        if twice := ({*topics} & {*styles}) | ({*topics, *styles} & {*self.topics, *self.styles}):
            raise ValueError(f"lists defined twice: {sorted(twice)}")
        return Lists({**self.topics, **topics}, {**self.styles, **styles})


@dataclass(frozen=True)
class Template:
    """A text with slots; ``key`` is unique within its category."""

    category: str
    key: str
    text: str
    lists: Lists = field(repr=False)

    @property
    def topical_slots(self) -> tuple[str, ...]:
        """The slots, as written in the text, that say what the prompt is about."""
        return tuple(dict.fromkeys(m[0] for m in _SLOT.finditer(self.text) if m[1] in self.lists.topics))

    def fillings(self) -> list[tuple[tuple[str, ...], str]]:
        """Up to ``CAP`` pairs (values of the topical slots, finished text); no two have the same set of values."""
        slots = [slot for slot in map(_SLOT.fullmatch, self.topical_slots) if slot]
        orders: dict[tuple[str, int], list[str]] = {}
        found: dict[frozenset[str], tuple[tuple[str, ...], str]] = {}
        for index in range(4 * CAP):
            topics = tuple(self._value(slot, index, orders) for slot in slots)
            if frozenset(topics) not in found:  # "compare a fox and a bat" is "compare a bat and a fox"
                found[frozenset(topics)] = topics, self._fill(index, orders)
            if len(found) == CAP:
                break
        return list(found.values())

    def _value(self, slot: re.Match[str], index: int, orders: dict[tuple[str, int], list[str]]) -> str:
        values = self.lists.values(slot[1])
        cycle, position = divmod(index, len(values))
        if (slot[1], cycle) not in orders:
            seed = f"{self.category}/{self.key}/{slot[1]}/{cycle}/"
            orders[slot[1], cycle] = sorted(values, key=lambda value: _digest(seed + value))
        return orders[slot[1], cycle][(position + int(slot[2] or 1) - 1) % len(values)]

    def _fill(self, index: int, orders: dict[tuple[str, int], list[str]]) -> str:
        text, places = self.text, count()
        for _ in range(_MAX_NESTING):
            text = _SLOT.sub(lambda slot: self._value(slot, index, orders), text)

        def number(match: re.Match[str]) -> str:
            choices = range(int(match[1]), int(match[2]) + 1, int(match[3] or 1))
            return str(choices[int(_digest(f"{self.category}/{self.key}/{index}/{next(places)}"), 16) % len(choices)])

        return _RANGE.sub(number, text).strip()


def builtin_prompts(split: Split) -> list[Prompt]:
    """The prompts of one split, in a fixed order of which any prefix is a balanced sample.

    Categories are interleaved in proportion to their size; within a category each template gives its first prompt
    before any gives its second.
    """
    if split == "train":
        ranked = [
            (rank, _digest(template.category + "/" + template.key), _prompt(template.category, text))
            for template in load_templates()
            for rank, (_, text) in enumerate(template.fillings())
        ]
        return _interleave(prompt for _, _, prompt in sorted(ranked, key=lambda entry: entry[:2]))
    if split not in _STANDALONE:
        raise ValueError(f"no built-in split named {split!r}; there are train, tuning, heldout")
    document = _read(split)
    return _interleave(_prompt(category, text.strip()) for category in document for text in document[category])


@cache
def load_templates() -> tuple[Template, ...]:
    """All templates, by category and key as the files have them."""
    shared = Lists().extended(_read(_SHARED))
    templates = []
    for category in categories():
        document = _read(category)
        lists = shared.extended(document)
        templates += [Template(category, key, text, lists) for key, text in document["templates"].items()]
    return tuple(templates)


@cache
def categories() -> tuple[str, ...]:
    """The categories of the training prompts, one YAML file each."""
    stems = (entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))
    return tuple(sorted(stem for stem in stems if stem not in (_SHARED, *_STANDALONE)))


def normalise(text: str) -> str:
    """Lower case, words and numbers only: prompts equal after this count as one."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _interleave(prompts: Iterable[Prompt]) -> list[Prompt]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    placed = [((i + 0.5) / len(group), prompt) for group in groups.values() for i, prompt in enumerate(group)]
    return [prompt for _, prompt in sorted(placed, key=lambda entry: (entry[0], entry[1].category))]


def _prompt(category: str, text: str) -> Prompt:
    return Prompt(f"{category}-{_digest(text)[:10]}", category, text)


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _folder() -> Any:
    return resources.files(__package__).joinpath("prompts")


def _read(stem: str) -> dict[str, Any]:
    text = _folder().joinpath(f"{stem}.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is ten times faster where PyYAML has it
    document = yaml.load(text, Loader=loader)
    if not isinstance(document, dict):
        raise ValueError(f"prompts/{stem}.yaml: a mapping is expected")
    return document
