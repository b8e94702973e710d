"""Records of benchmark files as questions: what the user says in each turn; answers that come with them stay unread.

A list of texts under "turns" or "prompt" is a conversation of which only the user's side is given. Fields that the
registry names (`Form.ask`) become one turn, word for word. Any other record is read as the data recipes read theirs
(`data_recipes/shapes.py`, `normalise.py`): messages, prompts, questions, instructions with input, plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..data_recipes.census import Census
from ..data_recipes.conversation import Conversation, Malformed, Message
from ..data_recipes.normalise import EMPTY, NormaliseSettings, normalise
from ..data_recipes.records import Record
from ..data_recipes.shapes import parse_record

OWN_ANSWERS = "answers between the user's turns left out: the model gives its own"
TOOLS = "ends before the assistant calls a tool"
NO_TOOLS = "tools left out"
CAME_BEFORE = "an id that came before"

_IDS = ("question_id", "task_id", "prompt_id", "id", "conversation_id")
_CATEGORIES = ("category", "class")
_LANGUAGES = ("language", "lang")
_SYSTEMS = ("system", "system_prompt")
_TURNS = ("turns", "prompt")
_FIELD = re.compile(r"\{(\w+)\}")

_SCRIPTS = {
    "ko": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "ja": "\u3040-\u30ff\u31f0-\u31ff",
    "zh": "\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0002ebef",
    "ru": "\u0400-\u052f",
    "ar": "\u0600-\u06ff\u0750-\u077f\ufb50-\ufdff\ufe70-\ufeff",
    "hi": "\u0900-\u097f",
    "th": "\u0e00-\u0e7f",
    "he": "\u0590-\u05ff",
    "el": "\u0370-\u03ff\u1f00-\u1fff",
    "en": "A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff",
}
"""The language that each script is taken for, and its letters."""
_LETTERS = {language: re.compile(f"[{letters}]") for language, letters in _SCRIPTS.items()}
_LEAST_SHARE = 0.2
"""Latin letters are in texts of all languages: any other script counts from this share of a text's letters on."""
_LEAST_KANA = 0.1
"""Share of kana among the letters of Japanese from which on Chinese characters are Japanese."""
OTHER = "other"


@dataclass(frozen=True)
class Question:
    """What is asked in one conversation.

    Attributes:
        id: unique within a benchmark, and made so that it is unique among benchmarks, too.
        turns: what the user says, turn by turn; between them the model gives its own answers.
        system: the system turn before them.
        category: the record's own, or the benchmark's.
        language: the record's own, or the benchmark's, or the one that the script tells; see `language_of`.
    """

    id: str
    turns: list[str]
    system: str | None
    category: str
    language: str


@dataclass(frozen=True)
class Form:
    """How records of one benchmark become questions.

    Attributes:
        ask: paragraphs, each with {fields} of a record that has no list of turns; one is left out where a field of it
            is missing or empty. Records that fill none are read like those of a user's own file.
        category: of records that name none; "": the benchmark's name.
        language: of records that name none; "": as the script tells.
    """

    ask: tuple[str, ...] = ()
    category: str = ""
    language: str = ""


@dataclass(frozen=True)
class _Asked:
    turns: list[str]
    system: str | None = None
    category: str | None = None
    changes: tuple[str, ...] = ()


def read_questions(records: Iterable[Record], benchmark: str, form: Form) -> tuple[list[Question], Census]:
    """Read the questions that can be asked, in the records' order.

    Args:
        benchmark: its name, which the questions' ids begin with.

    Returns:
        The questions, and counts of what became of the records: malformed ones and those whose id came before are left
        out; conversations that end early or lose answers are changed.
    """
    census, questions = Census(), dict[str, Question]()
    for where, record in records:
        census.read += 1
        try:
            asked = _asked(record, form)
        except Malformed as reason:
            census.refuse(where, str(reason))
            continue
        name = f"{benchmark}-{_id(record) or f'row{census.read}'}"
        if name in questions:
            census.leave_out(where, CAME_BEFORE)
            continue
        for change in asked.changes:
            census.change(where, change)
        census.keep()
        questions[name] = Question(
            name,
            asked.turns,
            asked.system,
            asked.category or form.category or benchmark,
            _text(record, _LANGUAGES).lower() or form.language or language_of("\n".join(asked.turns)),
        )
    return list(questions.values()), census


def language_of(text: str) -> str:
    """The language that a text's script is mostly used for; "other" where no script of `_SCRIPTS` tells one.

    Languages that share a script aren't told apart: Latin letters are "en", Cyrillic ones "ru".
    """
    counts = {language: len(letters.findall(text)) for language, letters in _LETTERS.items()}
    if counts["ja"] and counts["ja"] >= _LEAST_KANA * (counts["ja"] + counts["zh"]):
        counts["ja"] += counts.pop("zh")
    latin, letters = counts.pop("en"), sum(map(str.isalpha, text))
    language = max(counts, key=lambda name: counts[name])
    if counts[language] and counts[language] >= _LEAST_SHARE * letters:
        return language
    return "en" if latin > letters / 2 else OTHER


def _asked(record: Any, form: Form) -> _Asked:
    """Return what a record asks.

    Raises:
        Malformed: with the reason why it can't be asked.
    """
    if isinstance(record, Malformed):
        raise record
    turns = _given_turns(record, form) if isinstance(record, dict) else None
    if turns is None:
        return _from_conversation(parse_record(record))
    kept: list[str] = []
    for turn in turns:
        if not isinstance(turn, str):
            raise Malformed(f"a turn that is a {type(turn).__name__}, not text")
        if not turn.strip():
            break
        kept.append(turn)
    if not kept:
        raise Malformed("the first user turn is empty")
    system = _text(record, _SYSTEMS)
    _check_unicode([system, *kept])
    return _Asked(
        kept, system or None, _text(record, _CATEGORIES).strip(), (EMPTY,) if len(kept) < len(turns) else ()
    )  # fmt: skip


def _given_turns(record: Mapping[str, Any], form: Form) -> list[Any] | None:
    """The user's turns of a record that has nothing else; None for records of any other shape."""
    for key in _TURNS:
        turns = record.get(key)
        if isinstance(turns, list) and not any(isinstance(turn, dict) for turn in turns):
            return turns
    filled = [_FIELD.sub(lambda field: record[field[1]], part) for part in form.ask if _has_fields(record, part)]
    return ["\n\n".join(filled)] if filled else None


def _has_fields(record: Mapping[str, Any], part: str) -> bool:
    return all(_text(record, (name,)) for name in _FIELD.findall(part))


def _from_conversation(conversation: Conversation) -> _Asked:
    if conversation.tokens is not None:
        raise Malformed("token ids, which a chat template has no place for")
    if conversation.text is not None:
        message = {"role": "user", "content": conversation.text}
        conversation = replace(conversation, text=None, messages=[message])
    conversation = normalise(conversation, NormaliseSettings())
    changes = dict.fromkeys(conversation.changes)
    said = _until_tools(conversation.messages)
    if len(said) < len(conversation.messages):
        changes[TOOLS] = None
    if conversation.tools:
        changes[NO_TOOLS] = None
    turns = [m["content"] for m in said if m["role"] == "user"]
    if len(turns) > 1 and any(m["role"] == "assistant" for m in said):
        changes[OWN_ANSWERS] = None
    system = next((m["content"] for m in said if m["role"] == "system"), None)
    return _Asked(turns, system, conversation.category, tuple(changes))


def _until_tools(messages: list[Message]) -> list[Message]:
    """The turns up to the first one that another model's call of a tool has made."""
    end = next((i for i, m in enumerate(messages) if m["role"] == "tool" or "tool_calls" in m), len(messages))
    return messages[:end]


def _id(record: Any) -> str:
    """The record's own id, "" where it has none; "/" is what the turns of a question are numbered behind."""
    if not isinstance(record, dict):
        return ""
    found = next((record[key] for key in _IDS if type(record.get(key)) in (int, str) and record[key] != ""), "")
    return str(found).replace("%", "%25").replace("/", "%2F")


def _text(record: Any, keys: Iterable[str]) -> str:
    """The first of these fields that holds text that shows; "" where none does."""
    values = (record.get(key) for key in keys) if isinstance(record, dict) else ()
    return next((value for value in values if isinstance(value, str) and value.strip()), "")


def _check_unicode(texts: Iterable[str]) -> None:
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        raise Malformed("text that is not valid Unicode (half of a surrogate pair)") from error
