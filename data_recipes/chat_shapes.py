"""Rows of plain conversations at the price of two renderings.

The rows of conversations with the same roles differ in the contents alone, unless the template looks into them. So the
rows are worked out once, on markers instead of contents (`chat_turns.py`), and kept as the glue between the contents. A
conversation is then rendered as the template has it, and its text is taken apart by that glue, which says where the
answers are. What could make it different is worked out turn by turn instead: tools, calls, thoughts, contents that hold
a text which the template looks for, a text that the glue doesn't fit, a last prompt that isn't what the rows have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .chat_template import Template, any_of
from .chat_turns import CLOSED, OPENED, Answer, Row, TurnReader, chain
from .conversation import Malformed, Message

_SHAPES_KEPT = 256
_LONGEST_SHAPE = 48  # messages: working out a shape renders all its beginnings, which few longer conversations pay back
_ROLES = frozenset({"system", "user", "assistant"})
_MARKER = re.compile(r"Zq(\d+)xJ")
_SPACES = ("", "\n \n", " \n ")

Place = tuple[int, int]
"""A piece of glue, and characters behind its beginning."""


@dataclass(frozen=True)
class _Shape:
    """A row on markers.

    Attributes:
        last, appended: see `Row`.
        glue: what stands before, between and behind the contents.
        order: which message's content stands behind each piece of glue but the last.
        answers: (start, end, spans) of each answer.
    """

    last: int
    appended: str
    glue: tuple[str, ...]
    order: tuple[int, ...]
    answers: tuple[tuple[Place, Place, tuple[tuple[Place, Place], ...]], ...]

    def fit(self, text: str, contents: Sequence[str]) -> Row | None:
        """Return the row that begins `text`; None if it isn't this glue with these contents between."""
        if not text.startswith(self.glue[0]):
            return None
        begins = [0]
        at = len(self.glue[0])
        for glue, index in zip(self.glue[1:], self.order, strict=True):
            for content in _as_rendered(contents[index]):
                end = at + len(content)
                if text.startswith(content, at) and text.startswith(glue, end):
                    break
            else:
                return None
            begins.append(end)
            at = end + len(glue)

        def place(where: Place) -> int:
            return begins[where[0]] + where[1]

        answers = (
            Answer(place(start), place(end), tuple((place(a), place(b)) for a, b in spans))
            for start, end, spans in self.answers
        )
        return Row(text[:at], tuple(answers), self.last, self.appended)


@dataclass(frozen=True)
class _Known:
    """The rows of conversations with certain roles.

    Attributes:
        changes: see `TurnReader.read`.
        keeps_space: whether space around contents is treated alike in the last turn and in those before it.
    """

    shapes: list[_Shape]
    changes: list[str]
    keeps_space: bool


class ShapeReader:
    """Reads the rows of plain conversations.

    Args:
        template: of the tokenizer.
        turns: works out the rows of a shape.
    """

    def __init__(self, template: Template, turns: TurnReader) -> None:
        self._template = template
        self._turns = turns
        self._looked_for = any_of([*template.parts, OPENED, CLOSED])
        self._shapes = lru_cache(maxsize=_SHAPES_KEPT)(self._work_out)

    def read(self, messages: Sequence[Message]) -> tuple[list[Row], list[str]] | None:
        """Return the rows of a conversation without tools, and its changes; None if it is to be read turn by turn.

        Raises:
            Malformed: the template refuses it.
        """
        contents = [message["content"] for message in messages]
        if not self._is_plain(messages, contents):
            return None
        known = self._shapes(tuple(message["role"] for message in messages))
        if known is None or not (known.keeps_space or all(content == content.strip() for content in contents)):
            return None
        rows = self._fitted(known.shapes, messages, contents)
        if rows is None:
            return None
        prompt = self._template.render(messages[: rows[-1].last], generate=True)
        return (rows, known.changes) if rows[-1].text[: rows[-1].answers[-1].start] == prompt else None

    def _fitted(self, shapes: list[_Shape], messages: Sequence[Message], contents: Sequence[str]) -> list[Row] | None:
        rows = []
        for shape in shapes:
            row = shape.fit(self._template.render(messages[: shape.last + 1]) + shape.appended, contents)
            if row is None:
                return None
            rows.append(row)
        return rows

    def _is_plain(self, messages: Sequence[Message], contents: Sequence[str]) -> bool:
        return (
            len(messages) <= _LONGEST_SHAPE
            and all(len(message) == 2 and message["role"] in _ROLES for message in messages)
            and not any(content.isspace() or not content for content in contents)
            and not self._looked_for.search("\0".join(contents))
            and not any(content.strip() in self._template.wholes for content in contents)
            and not (self._template.compares_messages and len(set(contents)) < len(contents))
        )

    def _work_out(self, roles: tuple[str, ...]) -> _Known | None:
        shapes: list[_Shape] = []
        fits = []
        for space in _SPACES:
            contents = [f"{space}Zq{index}xJ{space}" for index in range(len(roles))]
            messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
            try:
                turns, changes = self._turns.read(messages, None)
            except Malformed:  # said again, in the conversation's own words, where it is read turn by turn
                return None
            rows = chain(turns)
            if not shapes:
                found = [_shape(row) for row in rows]
                shapes = [shape for shape in found if shape is not None]
                if not shapes or len(shapes) < len(found):
                    return None
            fits.append(self._fitted(shapes, messages, contents) == rows)
        return _Known(shapes, changes, keeps_space=all(fits[1:])) if fits[0] else None


def _as_rendered(content: str) -> tuple[str, ...]:
    """Return a content as templates write it: most as it is, many without the space around it."""
    return content, content.strip(), content.lstrip("\n"), content.rstrip(), content.lstrip(), content.strip("\n")


def _shape(row: Row) -> _Shape | None:
    """Return the glue of a row on markers; None if answers can't be told by it."""
    pieces = _MARKER.split(row.text)
    glue, order = tuple(pieces[::2]), tuple(map(int, pieces[1::2]))
    if not all(glue[1:]):  # without glue behind it a content has no certain end
        return None
    ends = [0]
    for piece, index in zip(glue, order, strict=False):
        ends.append(ends[-1] + len(piece) + len(f"Zq{index}xJ"))

    def place(at: int) -> Place | None:
        found = [k for k, begin in enumerate(ends) if begin <= at <= begin + len(glue[k])]
        return (found[0], at - ends[found[0]]) if found else None

    answers = []
    for answer in row.answers:
        places = [place(at) for at in (answer.start, answer.end, *(at for span in answer.spans for at in span))]
        known = [where for where in places if where is not None]
        if len(known) < len(places):
            return None
        answers.append((known[0], known[1], tuple(zip(known[2::2], known[3::2], strict=True))))
    return _Shape(row.last, row.appended, glue, order, tuple(answers))
