"""Plain text for models without a chat template: messages stand one below the other, with a blank line between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .chat_tokens import Document
from .chat_turns import Answer, Row
from .conversation import Conversation, Malformed, Message

_BETWEEN = "\n\n"


class PlainReader:
    """Reads records as plain text.

    Documents begin with the tokenizer's beginning-of-sequence token where it puts one itself; a conversation ends with
    its end-of-sequence token where it has one.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        begins = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
        self.begin: list[int] = [tokenizer.bos_token_id] if begins else []
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        """Return all that was said, and a blank line."""
        return _joined(messages, tools)

    def rows(self, conversation: Conversation) -> tuple[list[Row], list[str]]:
        """Return the row of a conversation, in which what the assistant says are the answers, or of a text.

        Raises:
            Malformed: it has tools, for which plain text has no form.
        """
        if conversation.text is not None:
            whole = Answer(0, len(conversation.text), ((0, len(conversation.text)),))
            return [Row(conversation.text, (whole,))], []
        answers = []
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                start = len(_joined(conversation.messages[:index], conversation.tools))
                end = start + len(message["content"])
                answers.append(Answer(start, end, ((start, end),)))
        text = _joined(conversation.messages, conversation.tools).removesuffix(_BETWEEN)
        return [Row(text[: answers[-1].end], tuple(answers))] if answers else [], []

    def complete(self, document: Document, conversation: Conversation) -> Document:
        """Put the tokens around a document; of a text all tokens but the first are trained on."""
        tokens = self.begin + document.tokens
        spans = [(start + len(self.begin), end + len(self.begin)) for start, end in document.spans]
        if conversation.text is not None:
            if len(tokens) < 2:
                raise Malformed("a text of one token")
            return Document(tokens, [(1, len(tokens))])
        if spans[-1][1] == len(tokens):
            tokens = tokens + self._end
            spans[-1] = spans[-1][0], len(tokens)
        return Document(tokens, spans)


def _joined(messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
    if tools or any("tool_calls" in message for message in messages):
        raise Malformed("tools, for which plain text has no form")
    return "".join(message["content"] + _BETWEEN for message in messages)
