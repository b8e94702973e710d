"""A tokenizer's chat template: rendering, and which texts of the messages change what it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import date
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from ..errors import DraftsmithError
from .conversation import Malformed, Message

Ranges = list[tuple[int, int]]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the same form that transformers looks for
_CLOCK = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")
_LONGEST_REASON = 160
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
_HARMLESS = frozenset({"strip", "lstrip", "rstrip", "get"})
"""Methods whose text arguments don't say that the template looks for that text in a message: what is stripped is seen
in what comes out, and `get` names a key."""
_VALUES = nodes.Name | nodes.Getattr | nodes.Getitem | nodes.Filter


class _GenerationTag(Extension):
    """Reads `{% generation %}` as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """The chat template of a tokenizer, with the variables it is rendered with.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        variables: what the template is given beside messages and tools.
        today: the date that `strftime_now` writes, so that the same conversation is always the same text; None: of
            the day on which this is made.

    Attributes:
        name: of the tokenizer, for messages.
        marked: whether `{% generation %}` marks say what the assistant wrote.
        parts, wholes: texts that it looks for in messages, and that it compares messages with.
        compares_messages: whether it compares values with each other, so that equal messages may be rendered otherwise.
    """

    def __init__(self, tokenizer: Any, variables: dict[str, Any], today: date | None = None) -> None:
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        self._tokenizer = tokenizer
        self._variables = {**tokenizer.special_tokens_map, **variables}
        self._today = today or date.today()
        try:
            source = tokenizer.get_chat_template(None, None)
            tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag]).parse(source)
        except (jinja2.TemplateError, ValueError) as error:
            raise DraftsmithError(f"the chat template of {self.name} can't be read: {error}") from error
        self.marked = bool(_MARKED.search(source))
        self.parts, self.wholes = _looked_for(tree)
        self.compares_messages = any(all(isinstance(side, _VALUES) for side in sides) for sides in _equations(tree))

    def render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, *, generate: bool = False
    ) -> str:
        """Return the messages as text; with `generate` up to where the assistant starts to speak.

        Raises:
            Malformed: the template refuses them.
        """
        return self._render(messages, tools, generate, marks=False)[0]

    def render_marked(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> tuple[str, Ranges | None]:
        """Return the messages as text, and its [start, end) ranges within `{% generation %}` marks.

        The ranges are None where the template has no marks.

        Raises:
            Malformed: the template refuses them.
        """
        return self._render(messages, tools, generate=False, marks=self.marked)

    def _render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, generate: bool, marks: bool
    ) -> tuple[str, Ranges | None]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, ranges = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=_told(self._tokenizer.get_chat_template(None, tools), self._today),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=generate,
                **self._variables,
            )
        except _REFUSALS as error:
            raise Malformed(
                f"the chat template refuses it: {' '.join(str(error).split())[:_LONGEST_REASON]}"
            ) from error
        return texts[0], [tuple(r) for r in ranges[0]] if marks else None


@lru_cache(maxsize=8)
def _told(source: str, today: date) -> str:
    """Return the template with this date in place of each `strftime_now("…")`.

    In its text, because transformers takes no function among a template's variables. A format that isn't a constant
    keeps asking the clock.
    """
    return _CLOCK.sub(lambda call: json.dumps(today.strftime(call[2]), ensure_ascii=False), source)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the longest of the texts that stands somewhere; of no texts one that is never found."""
    ordered = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _looked_for(tree: nodes.Template) -> tuple[frozenset[str], frozenset[str]]:
    """Return the texts that the template looks for in others, and those that it compares others with.

    What it also reads as a key of a message (`"content" in message`) is not looked for in texts.
    """
    parts: set[str] = set()
    wholes = {text for sides in _equations(tree) for side in sides for text in _texts(side)}
    for comparison in tree.find_all(nodes.Compare):
        for operand in comparison.ops:
            if operand.op in ("in", "notin"):
                parts |= _texts(comparison.expr)
                wholes |= _texts(operand.expr)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr not in _HARMLESS:
            parts |= {text for argument in call.args for text in _texts(argument)}
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name == "replace":
            parts |= {text for argument in filtered.args for text in _texts(argument)}
    keys = {item.attr for item in tree.find_all(nodes.Getattr)}
    keys |= {text for item in tree.find_all(nodes.Getitem) for text in _texts(item.arg)}
    return frozenset(parts - keys - {""}), frozenset(wholes - {""})


def _equations(tree: nodes.Template) -> Iterable[tuple[nodes.Expr, nodes.Expr]]:
    for comparison in tree.find_all(nodes.Compare):
        for operand in comparison.ops:
            if operand.op in ("eq", "ne"):
                yield comparison.expr, operand.expr


def _texts(node: nodes.Node) -> set[str]:
    """Return the constant texts of a node: itself, or the items of a list."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return {text for item in node.items for text in _texts(item)}
    return {node.value} if isinstance(node, nodes.Const) and isinstance(node.value, str) else set()
