"""What a record of a source becomes: one conversation in one shape, or the reason why there is none."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}, and where the record has them
"reasoning_content" (text), "tool_calls" ([{"type": "function", "function": {"name", "arguments": object}}]),
"name" and "tool_call_id". The content of every message is text, which is empty only beside tool calls."""


class Malformed(Exception):
    """A record that can't be used; the text is the reason that is counted."""


@dataclass(frozen=True)
class Conversation:
    """One record of a source.

    Exactly one of `messages`, `text` and `tokens` is there.

    Attributes:
        messages: what was said, as the chat template takes it.
        tools: JSON schemas of the functions that the assistant may call.
        text: plain text, for models without a chat template.
        tokens, mask: a record that is tokenised already; the mask is True on the tokens to learn.
        category: the source's own label.
        changes: what was changed to bring it into this shape: the reasons that are counted.
    """

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    mask: list[bool] | None = None
    category: str | None = None
    changes: tuple[str, ...] = ()

    @property
    def asked(self) -> str:
        """What the user says in all turns; of a record without messages its text, or its token ids."""
        if self.messages:
            return "\n".join(m["content"] for m in self.messages if m["role"] == "user")
        return self.text if self.text is not None else " ".join(map(str, self.tokens or []))


def first_prompt(messages: list[Message]) -> list[Message]:
    """Return [system?, first user turn] of normalised messages."""
    end = next(i for i, m in enumerate(messages) if m["role"] == "user")
    return messages[: end + 1]


def duplicate_key(text: str) -> str:
    """Return a text that is equal for texts that differ in case, spacing or Unicode form only."""
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()
