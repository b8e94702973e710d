"""What serving reads and what the model then writes, turn by turn, for any chat template.

With m the messages and i an assistant's turn:

    P_i = the template on m[:i] with the generation prompt, as serving renders it
    C_i = the template on m[:i+1]
    A_i = what the model writes behind P_i

If C_i begins with P_i, A_i is the rest of it. Otherwise the template writes another opening when it trains than when it
serves; then A_i begins where C_i has the answer's text. A_i ends with the first token that ends an answer; what the
template writes behind that (a line break, or one more end token) is no answer.

Turns are chained: where P_{i+1} begins with P_i + A_i, both are answers of one row. Where the template has rewritten
the past (thoughts taken out, another end token), a new row starts, in which A_i is no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .chat_template import Ranges, Template, any_of
from .conversation import Malformed, Message

NO_THOUGHT = "answers without the thought that the generation prompt opens are not trained on"
NOT_RENDERED = "reasoning is not rendered by the template"
TEXT_DROPPED = "text beside tool calls is not rendered by the template"
ANSWER_DROPPED = "the chat template drops or rewrites the answer's text"
NO_END = "answers end with no special token"
OPENED, CLOSED = "<think>", "</think>"

_MARKER = "Zq0answer0xJ"
_THOUGHT_GLUE = f"\n{CLOSED}\n\n"
_EMPTY_THOUGHT = re.compile(rf"{OPENED}(\s*){CLOSED}(\s*)$")


def foreign_end(token: str) -> str:
    """Return what is counted where answers end with a token that isn't known to end them."""
    return f"answers end with {token}, which is no end-of-sequence token of the model"


@dataclass(frozen=True)
class Turn:
    """One answer.

    Attributes:
        index: of its message.
        prompt, answer: P_i and A_i.
        spans: [start, end) characters of `answer` to train on; all of it where the template has no marks.
        appended: the end of `answer` that C_i doesn't have: the token that the next turn begins with.
    """

    index: int
    prompt: str
    answer: str
    spans: tuple[tuple[int, int], ...]
    appended: str


@dataclass(frozen=True)
class Answer:
    """Where an answer stands in a row: characters [start, end), of which `spans` are trained on."""

    start: int
    end: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Row:
    """The text of one row, and the answers in it that are trained on.

    Attributes:
        last: index of the message that it ends with; `appended` see `Turn`.
    """

    text: str
    answers: tuple[Answer, ...]
    last: int = 0
    appended: str = ""


@dataclass(frozen=True)
class _Thought:
    """A message's thought.

    Attributes:
        text: what was thought, stripped; empty if there is none.
        opening: of a message that has it in its content: what stands between `<think>` and the answer.
        bare: the message without it.
    """

    text: str
    opening: str | None
    bare: Message


@dataclass(frozen=True)
class _Said:
    """An answer's message, what was said before it, and the changes that its conversation is counted with."""

    history: list[Message]
    message: Message
    tools: list[dict[str, Any]] | None
    changes: dict[str, None]


class TurnReader:
    """Finds the answers of conversations.

    Args:
        template: of the tokenizer.
        stops: tokens that end an answer.
        specials: all special tokens.
    """

    def __init__(self, template: Template, stops: Iterable[str], specials: Iterable[str]) -> None:
        stops = list(stops)
        self._template = template
        self._stop = any_of(stops)
        self._special = any_of([*stops, *specials])

    def read(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> tuple[list[Turn], list[str]]:
        """Return the answers of normalised messages, and what was done to train on them.

        Raises:
            Malformed: with the reason why none of it can be trained on.
        """
        self._check_tool_results(messages, tools)
        changes: dict[str, None] = {}
        turns = [
            self._turn(_Said(list(messages[:index]), message, tools, changes))
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        kept = [turn for turn in turns if turn is not None]
        if turns and not kept:
            raise Malformed("the generation prompt opens a thought that the answer lacks")
        return kept, list(changes)

    def _turn(self, said: _Said) -> Turn | None:
        prompt = self._template.render(said.history, said.tools, generate=True)
        thought = _thought(said.message)
        begun = self._begun_thought(prompt, said)
        opens = begun is not None and CLOSED not in begun
        if opens and not thought.text:
            said.changes[NO_THOUGHT] = None
            return None
        if begun is not None and not opens:
            said = replace(said, message=thought.bare)
        text, marks = self._template.render_marked([*said.history, said.message], said.tools)
        rest = text[len(prompt) :] if text.startswith(prompt) else None
        if opens and (rest is None or thought.text not in rest):
            turn = self._with_thought(prompt, str(begun), thought, said)
        else:
            start = self._start(text, said)[0] if rest is None else len(prompt)
            turn = self._cut(prompt, text, start, marks, said)
        if thought.text and thought.text not in turn.answer:
            said.changes[NOT_RENDERED] = None
        self._check_answer(turn.answer, thought.bare, said.changes)
        return turn

    @staticmethod
    def _check_answer(answer: str, message: Message, changes: dict[str, None]) -> None:
        calls = message.get("tool_calls", ())
        if any(call["function"]["name"] not in answer for call in calls):
            raise Malformed("the chat template drops tool calls")
        if message["content"].strip() in answer:
            return
        if not calls:
            raise Malformed(ANSWER_DROPPED)
        changes[TEXT_DROPPED] = None

    def _begun_thought(self, prompt: str, said: _Said) -> str | None:
        """Return what the generation prompt writes behind `<think>`; None where it doesn't begin a thought."""
        if OPENED not in prompt:
            return None
        added = prompt[_common(prompt, self._template.render(said.history, said.tools)) :]
        at = added.rfind(OPENED)
        return None if at < 0 else added[at + len(OPENED) :]

    def _frame(self, said: _Said) -> tuple[str, str]:
        """Return what the template writes before and behind a plain answer."""
        plain = {"role": "assistant", "content": _MARKER}
        before, marker, after = self._template.render([*said.history, plain], said.tools).partition(_MARKER)
        if not marker:
            raise Malformed(ANSWER_DROPPED)
        return before, after

    def _start(self, text: str, said: _Said) -> tuple[int, str]:
        """Return where the answer begins in a text that doesn't begin as serving does, and what stands before it."""
        before, _ = self._frame(said)
        if not text.startswith(before):
            raise Malformed("the chat template opens this answer in another way than serving and than a plain answer")
        return len(before), before

    def _cut(self, prompt: str, text: str, start: int, marks: Ranges | None, said: _Said) -> Turn:
        """Cut the answer out of C_i = `text`, from `start` to the token that ends it."""
        stop_at, end, appended = self._end(text, start, said)
        whole = end + len(appended)
        spans = [(start, whole)] if marks is None else []
        for first, last in marks or ():
            clipped = max(first, start), whole if last >= stop_at else last
            if clipped[0] < clipped[1]:
                spans.append(clipped)
        relative = tuple((first - start, last - start) for first, last in spans)
        return Turn(len(said.history), prompt, text[start:end] + appended, relative, appended)

    def _end(self, text: str, start: int, said: _Said) -> tuple[int, int, str]:
        """Return where the answer's end token begins, where it ends, and the token itself if C_i doesn't have it.

        The first stop token; else the first special token behind the answer's text; else the one that the next turn
        begins with, directly behind this one.
        """
        stop = self._stop.search(text, start)
        if stop:
            return stop.start(), stop.end(), ""
        calls = "tool_calls" in said.message
        end = len(text.rstrip()) if calls else len(text.removesuffix(self._frame(said)[1]))
        special = self._special.search(text, end)
        if special:
            said.changes[foreign_end(special.group())] = None
            return special.start(), special.end(), ""
        opening = self._next_opening(text[:end], said)
        if not opening:
            said.changes[NO_END] = None
        elif not self._stop.fullmatch(opening):
            said.changes[foreign_end(opening)] = None
        return end, end, opening

    def _next_opening(self, text: str, said: _Said) -> str:
        """Return the special token that the turn after this one begins with; empty if it doesn't."""
        next_turn = {"role": "tool" if "tool_calls" in said.message else "user", "content": _MARKER}
        try:
            longer = self._template.render([*said.history, said.message, next_turn], said.tools)
        except Malformed:  # the template has its own mind about what may follow: then nothing is known of it
            return ""
        content = (
            _thought(said.message).bare["content"].strip()
        )  # the thought may be gone: the turn is no more the last
        if longer.startswith(text):
            opening = self._special.match(longer, len(text))
        elif content in longer:
            opening = self._special.match(longer, longer.rindex(content) + len(content))
        else:
            raise Malformed(ANSWER_DROPPED)
        return opening.group() if opening else ""

    def _with_thought(self, prompt: str, begun: str, thought: _Thought, said: _Said) -> Turn:
        """Return the answer with a thought that the generation prompt opens and the template doesn't render.

        Between thought and answer stands what the record has there; of a thought in a field of its own what the
        template writes around an empty thought, or else a line break before the closing and two behind it.
        """
        said = replace(said, message=thought.bare)
        text = self._template.render([*said.history, said.message], said.tools)
        start, before = self._start(text, said)
        rest = self._cut(prompt, text, start, None, said)
        empty = _EMPTY_THOUGHT.search(before)
        glue = f"{empty[1].removeprefix(begun)}{CLOSED}{empty[2]}" if empty else _THOUGHT_GLUE
        opening = thought.text + glue if thought.opening is None else thought.opening.removeprefix(begun)
        answer = opening + rest.answer
        return Turn(rest.index, prompt, answer, ((0, len(answer)),), rest.appended)

    def _check_tool_results(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> None:
        if not any(message["role"] == "tool" for message in messages):
            return
        marked = [
            {**m, "content": f"{_MARKER}{index}E"} if m["role"] == "tool" else m for index, m in enumerate(messages)
        ]
        text = self._template.render(marked, tools)
        if any(m["role"] == "tool" and m["content"] not in text for m in marked):
            raise Malformed("the chat template drops tool results")


def chain(turns: Iterable[Turn]) -> list[Row]:
    """Return the rows of a conversation: turns stand in one row where each prompt begins with all before it."""
    rows: list[Row] = []
    for turn in turns:
        start = len(turn.prompt)
        text = turn.prompt + turn.answer
        answer = Answer(start, len(text), tuple((start + first, start + last) for first, last in turn.spans))
        if rows and turn.prompt.startswith(rows[-1].text):
            rows[-1] = Row(text, (*rows[-1].answers, answer), turn.index, turn.appended)
        else:
            rows.append(Row(text, (answer,), turn.index, turn.appended))
    return rows


def said_texts(messages: Iterable[Message], tools: list[dict[str, Any]] | None) -> Iterable[str]:
    """Yield all that messages and tools say, for a search."""
    for message in messages:
        yield message["content"]
        yield from (message[key] for key in ("reasoning_content", "name", "tool_call_id") if message.get(key))
        if message.get("tool_calls"):
            yield json.dumps(message["tool_calls"], ensure_ascii=False)
    if tools:
        yield json.dumps(tools, ensure_ascii=False)


def _thought(message: Message) -> _Thought:
    reasoning = message.get("reasoning_content", "")
    if reasoning.strip():
        return _Thought(reasoning.strip(), None, {k: v for k, v in message.items() if k != "reasoning_content"})
    head, closing, rest = message["content"].partition(CLOSED)
    inside = head.lstrip().removeprefix(OPENED)
    if not closing or OPENED in inside:
        return _Thought("", None, message)
    answer = rest.lstrip()
    opening = inside + closing + rest[: len(rest) - len(answer)]
    return _Thought(inside.strip(), opening, {**message, "content": answer})


def _common(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginnings."""
    if first.startswith(second):
        return len(second)
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
