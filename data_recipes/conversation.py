"""From the shapes that conversations are published in to a list of messages, or a reason why not."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}"""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_LIST_KEYS = ("messages", "conversations", "conversation")
_SHAPES = "messages, conversations, prompt, turns"


class Malformed(Exception):
    """A record that gives no prompt; the text is the reason that is counted."""


@dataclass(frozen=True)
class Prompt:
    """What the target is asked: an optional system message and the first user turn.

    Attributes:
        id: unique within a recipe and the same in every run: made of the source's name and the text.
        category: the source's own label, or the source's name.
    """

    id: str
    category: str
    messages: list[Message]

    @property
    def text(self) -> str:
        """The user's words."""
        return self.messages[-1]["content"]


def parse_conversation(record: Any) -> list[Message]:
    """Return the messages of a record of any known shape.

    Known: a string; a list of messages; {"messages"} or {"conversations"} with role/content or from/value;
    {"prompt"} (text or messages, a completion beside it is left aside); {"turns"} (user turns).

    Raises:
        Malformed: with the reason.
    """
    if isinstance(record, str):
        return [_message("user", record)]
    if isinstance(record, list):
        return _messages(record)
    if not isinstance(record, dict):
        raise Malformed(f"a {type(record).__name__} instead of a conversation")
    for key in _LIST_KEYS:
        if isinstance(record.get(key), list):
            messages = _messages(record[key])
            break
    else:
        messages = _prompt_or_turns(record)
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [_message("system", system), *messages]
    return messages


def first_prompt(messages: list[Message]) -> list[Message]:
    """Return [system?, first user turn]; what stands before the user's first words is left out.

    Raises:
        Malformed: there is no user turn, or it is empty.
    """
    system = [m for m in messages[:1] if m["role"] == "system" and m["content"].strip()]
    user = next((m for m in messages if m["role"] == "user"), None)
    if user is None:
        raise Malformed("no user turn")
    if not user["content"].strip():
        raise Malformed("the first user turn is empty")
    return [*system, user]


def duplicate_key(messages: list[Message]) -> str:
    """Return a text that is equal for prompts that differ in case, spacing or Unicode form only."""
    text = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def _prompt_or_turns(record: dict[str, Any]) -> list[Message]:
    if "prompt" in record:
        prompt = record["prompt"]
        if isinstance(prompt, list):
            return _messages(prompt)
        if not isinstance(prompt, str):
            raise Malformed(f"'prompt' is a {type(prompt).__name__}, not text or messages")
        return [_message("user", prompt)]
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise Malformed("'turns' is not a list with a first turn")
        return [_message("user", turns[0])]
    raise Malformed(f"none of the known keys ({_SHAPES})")


def _messages(items: list[Any]) -> list[Message]:
    if not items:
        raise Malformed("a conversation without messages")
    messages = []
    for item in items:
        if not isinstance(item, dict):
            raise Malformed("a message that is not an object")
        role = item.get("role", item.get("from"))
        content = item.get("content", item.get("value"))
        if not isinstance(role, str):
            raise Malformed("a message without role or from")
        if role.lower() not in _ROLES:
            raise Malformed(f"unknown role {role[:20]!r}")
        messages.append(_message(_ROLES[role.lower()], content))
    return messages


def _message(role: str, content: Any) -> Message:
    if content is None and role in ("assistant", "tool"):  # a call of a tool has no text; no prompt needs it
        content = ""
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(content, str):
        raise Malformed("a message whose content is not text")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise Malformed("text that is not valid Unicode (half of a surrogate pair)") from error
    return {"role": role, "content": content}


def _joined(parts: list[Any]) -> str:
    """Join the text parts of a content list; any other kind of part is refused."""
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise Malformed("a message with parts that are not text")
        text = part.get("text", part.get("value"))
        if not isinstance(text, str):
            raise Malformed("a message whose content is not text")
        texts.append(text)
    return "\n".join(texts)
