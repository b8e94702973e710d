"""One form for all conversations. What each rule changed is counted by its reason.

In this order:

1. A text that is not valid Unicode refuses the record. Control characters but tab and line breaks, and byte-order
   marks, are removed; vertical tabs and form feeds become line breaks. Zero-width characters stay: emoji, Persian and
   Thai need them.
2. Images, audio, video and files refuse the record; with `media: text` they are removed and the text stays.
3. Before the user's first turn, system turns are merged to one and all others are removed.
4. The conversation ends before its first empty turn (no text that shows, no tool call), before a later system turn, and
   before a tool's turn that no call came before. An empty system turn is removed instead.
5. User or assistant turns that follow each other become one, with a blank line between; not where one calls a tool, so
   that several calls and their results stay apart.
6. What a page has left in a turn becomes the text it stands for (`page_markup.py` says what is certain); then 3 to 5
   again.

A record without a user turn is refused. Normalising twice changes nothing more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from .conversation import Conversation, Malformed, Message
from .page_markup import about_markup, may_hold_markup, plain_text

_CONTROL = bytes(c for c in range(32) if c not in b"\t\n\r") + b"\x7f"
_LINE_BREAKS = bytes.maketrans(b"\x0b\x0c", b"\n\n")
_BYTE_ORDER_MARK = "\ufeff"
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad"
_PLACEHOLDER = re.compile(r"<(?:image|audio|video)>\n?")

CONTROL = "control characters removed"
MEDIA = "images, audio or video"
MEDIA_REMOVED = "images, audio or video removed"
SYSTEM_MERGED = "system turns merged"
SYSTEM_EMPTY = "empty system turn removed"
SYSTEM_LATER = "ends before a later system turn"
LEADING = "turns before the user's first removed"
EMPTY = "ends before an empty turn"
NO_CALL = "ends before a tool's turn without a call"
MERGED = "turns of one role merged"
PAGE = "page markup removed"


@dataclass(frozen=True)
class NormaliseSettings:
    """What a recipe decides about normalising.

    Attributes:
        media: "refuse" records with images, audio, video or files, or keep their "text".
    """

    media: Literal["refuse", "text"] = "refuse"


def normalise(conversation: Conversation, settings: NormaliseSettings) -> Conversation:
    """Return the conversation by the rules above; what was changed is added to its `changes`.

    Raises:
        Malformed: with the reason why it can't be used.
    """
    if conversation.tokens is not None:
        return conversation
    changes = dict.fromkeys(conversation.changes)
    if conversation.text is not None:
        text = _clean(conversation.text, changes)
        if _is_blank(text):
            raise Malformed("an empty text")
        return replace(conversation, text=text, changes=tuple(changes))
    _check_unicode(conversation.category or "")
    if conversation.tools:
        _check_json(conversation.tools, "tools")
    messages = _without_media([_cleaned(m, changes) for m in conversation.messages], settings, changes)
    while True:
        messages = _in_order(messages, changes)
        read = _without_markup(messages)
        if read == messages:
            return replace(conversation, messages=messages, changes=tuple(changes))
        changes[PAGE] = None
        messages = read


def _cleaned(message: Message, changes: dict[str, None]) -> Message:
    if "tool_calls" in message:
        _check_json(message["tool_calls"], "tool calls")
    for key in ("name", "tool_call_id"):
        _check_unicode(message.get(key, ""))
    for key in ("content", "reasoning_content"):
        if key in message:
            text = _clean(message[key], changes)
            if text is not message[key]:
                message = {**message, key: text}
    return message


def _clean(text: str, changes: dict[str, None]) -> str:
    """Return the text itself, or what is left of it without control characters."""
    raw = _check_unicode(text)
    if len(raw.translate(None, _CONTROL)) == len(raw) and _BYTE_ORDER_MARK not in text:
        return text
    changes[CONTROL] = None
    return raw.translate(_LINE_BREAKS).translate(None, _CONTROL).decode().replace(_BYTE_ORDER_MARK, "")


def _check_json(value: Any, what: str) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError as error:  # Parquet has dates and bytes, too
        raise Malformed(f"{what} with values that JSON doesn't have") from error
    _check_unicode(text)


def _check_unicode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Malformed("text that is not valid Unicode (half of a surrogate pair)") from error


def _is_blank(text: str) -> bool:
    return not text or text.isspace() or not text.strip().strip(_INVISIBLE).strip()


def _without_media(messages: list[Message], settings: NormaliseSettings, changes: dict[str, None]) -> list[Message]:
    if not any("media" in message for message in messages):
        return messages
    if settings.media == "refuse":
        raise Malformed(MEDIA)
    changes[MEDIA_REMOVED] = None
    return [
        {key: value for key, value in message.items() if key != "media"}
        | {"content": _PLACEHOLDER.sub("", message["content"])}
        for message in messages
    ]


def _in_order(messages: list[Message], changes: dict[str, None]) -> list[Message]:
    """Apply the rules about which turn may follow which (3 to 5)."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        raise Malformed("no user turn")
    kept = _system(messages[:first], changes)
    if _is_blank(messages[first]["content"]):
        raise Malformed("the first user turn is empty")
    for message in _until_broken(messages[first:], changes):
        before = kept[-1] if kept else None
        if (
            before is not None
            and before["role"] == message["role"] != "tool"
            and not ("tool_calls" in before or "tool_calls" in message)
        ):
            kept[-1] = _merged(before, message)
            changes[MERGED] = None
        else:
            kept.append(message)
    return kept


def _system(messages: list[Message], changes: dict[str, None]) -> list[Message]:
    """Return the one system turn of what stands before the user's first turn, if there is any."""
    systems = [m for m in messages if m["role"] == "system"]
    texts = [m["content"] for m in systems if not _is_blank(m["content"])]
    if len(systems) < len(messages):
        changes[LEADING] = None
    if len(texts) < len(systems):
        changes[SYSTEM_EMPTY] = None
    if len(texts) > 1:
        changes[SYSTEM_MERGED] = None
        return [{"role": "system", "content": "\n\n".join(texts)}]
    return [m for m in systems if not _is_blank(m["content"])]


def _until_broken(messages: list[Message], changes: dict[str, None]) -> Iterator[Message]:
    """Yield the turns from the user's first up to the one that the conversation can't go on with."""
    called = False  # whether a tool may speak: after calls, and after another tool
    for message in messages:
        role = message["role"]
        if role == "system" and _is_blank(message["content"]):
            changes[SYSTEM_EMPTY] = None
            continue
        reason = None
        if role == "system":
            reason = SYSTEM_LATER
        elif "tool_calls" not in message and _is_blank(message["content"]):
            reason = EMPTY
        elif role == "tool" and not called:
            reason = NO_CALL
        if reason is not None:
            changes[reason] = None
            return
        called = role == "tool" or "tool_calls" in message
        yield message


def _merged(first: Message, second: Message) -> Message:
    merged = {**first, "content": f"{first['content']}\n\n{second['content']}"}
    reasons = [m["reasoning_content"] for m in (first, second) if "reasoning_content" in m]
    return merged | ({"reasoning_content": "\n\n".join(reasons)} if reasons else {})


def _without_markup(messages: list[Message]) -> list[Message]:
    """Return the turns without what their page has left in them (6)."""
    if not any(m["role"] in ("user", "assistant") and may_hold_markup(m["content"]) for m in messages):
        return messages

    def subject() -> bool:
        return any(about_markup(m["content"]) for m in messages if m["role"] in ("user", "system"))

    return [
        {**m, "content": plain_text(m["content"], m["role"] == "assistant", subject)}
        if m["role"] in ("user", "assistant")
        else m
        for m in messages
    ]
