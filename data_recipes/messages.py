"""From the names that messages, tool calls and tools go by to those of the chat templates."""

from __future__ import annotations

import json
from typing import Any

from .conversation import Malformed, Message

Json = dict[str, Any]

SPEAKERS = ("user", "assistant")

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
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
}
_CALL_ROLES = ("function_call", "tool_call")  # ShareGPT: the text of the turn is the call's JSON
_PAIRS = (("human", "assistant"), ("user", "assistant"), ("input", "output"))
_ARGUMENTS = ("arguments", "parameters", "input")  # OpenAI, Llama, Anthropic
_BESIDE_ARGUMENTS = frozenset({"name", "type", "id", "index", "function", *_ARGUMENTS})
_REASONING = ("reasoning_content", "reasoning", "thinking")
_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("thinking", "reasoning"), "reasoning"),
    **dict.fromkeys(("image", "image_url", "input_image", "audio", "audio_url", "input_audio"), "media"),
    **dict.fromkeys(("video", "video_url", "file", "input_file"), "media"),
    "tool_call": "call",
}
_PART_TEXTS = ("text", "value", "thinking", "reasoning")


def turn(role: str, text: str) -> Message:
    """Return a message that is a text alone."""
    return {"role": role, "content": text}


def read_side(value: Any, role: str, key: str) -> list[Message]:
    """Read what one side says: a text, or messages."""
    if isinstance(value, list):
        return read_messages(value)
    if value is not None and not isinstance(value, str):
        raise Malformed(f"'{key}' is a {type(value).__name__}, not text or messages")
    return [turn(role, value or "")]


def read_messages(items: list[Any]) -> list[Message]:
    """Read a list of messages, or of pairs ({"human", "assistant"}).

    Raises:
        Malformed: with the reason.
    """
    if not items:
        raise Malformed("a conversation without messages")
    messages: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise Malformed("a message that is not an object")
        pair = None if "role" in item or "from" in item else next((p for p in _PAIRS if p[0] in item), None)
        if pair is None:
            messages.append(read_message(item))
            continue
        messages += [turn("system", item["system"])] if isinstance(item.get("system"), str) else []
        for key, role in zip(pair, SPEAKERS, strict=True):
            messages += read_side(item[key], role, key) if key in item else []
    return messages


def read_message(item: Json) -> Message:
    """Read one message: role/content or from/value, as chat completions or ShareGPT write it.

    Raises:
        Malformed: with the reason.
    """
    name = item.get("role", item.get("from"))
    if not isinstance(name, str):
        raise Malformed("a message without role or from")
    name = name.lower()
    if name not in _ROLES:
        raise Malformed(f"unknown role {name[:20]!r}")
    content = next((item[key] for key in ("content", "value", "text") if item.get(key) is not None), "")
    message = turn(_ROLES[name], "")
    if name in _CALL_ROLES:
        message["tool_calls"] = _calls(content)
    elif isinstance(content, str):
        message["content"] = content
    elif isinstance(content, list):
        _read_parts(content, message)
    else:
        raise Malformed("a message whose content is not text")
    if len(item) > 2 or not message["content"]:
        _read_fields(item, message)
    return message


def _read_parts(parts: list[Any], message: Message) -> None:
    """Read a content list: texts are joined by line breaks, as serving engines do."""
    texts: dict[str, list[str]] = {"text": [], "reasoning": [], "call": []}
    for part in parts:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        if not isinstance(part, dict):
            raise Malformed("a content part that is not an object")
        kind = _PARTS.get(str(part.get("type")))
        if kind is None:
            raise Malformed(f"a content part of unknown type {str(part.get('type'))[:20]!r}")
        if kind == "media":
            message["media"] = True
            continue
        text = next((part[key] for key in _PART_TEXTS if isinstance(part.get(key), str)), None)
        if text is None:
            raise Malformed("a content part without its text")
        texts[kind].append(text)
    message["content"] = "\n".join(texts["text"])
    if texts["reasoning"]:
        message["reasoning_content"] = "\n".join(texts["reasoning"])
    if texts["call"]:
        message["tool_calls"] = [call for text in texts["call"] for call in _calls(text)]


def _read_fields(item: Json, message: Message) -> None:
    calls = item.get("tool_calls") or item.get("function_call")
    if calls:
        message["tool_calls"] = _calls(calls)
    if message["role"] == "assistant":
        reasoning = next(
            (item[key] for key in _REASONING if isinstance(item.get(key), str) and item[key].strip()), None
        )
        if reasoning is not None:
            message["reasoning_content"] = reasoning
    elif "tool_calls" in message:
        raise Malformed("a tool call that is not the assistant's")
    for key in ("name", "tool_call_id"):
        if isinstance(item.get(key), str) and item[key]:
            message[key] = item[key]


def _calls(value: Any) -> list[Json]:
    """Read tool calls: one or a list, objects or their JSON, bare or below "function"."""
    value = _decoded(value, "a tool call that is not JSON")
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Malformed("a tool call without a name")
        arguments = next((function[key] for key in _ARGUMENTS if function.get(key) is not None), None)
        if arguments is None and any(function[key] is not None for key in function.keys() - _BESIDE_ARGUMENTS):
            raise Malformed(f"a tool call whose arguments are not under {', '.join(_ARGUMENTS)}")
        arguments = _decoded(arguments, "tool call arguments that are not JSON") if arguments else {}
        if not isinstance(arguments, dict):
            raise Malformed("tool call arguments that are not an object")
        read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append({**read, "id": call["id"]} if isinstance(call.get("id"), str) else read)
    return calls


def without_filled(record: Json) -> Json:
    """Return a row of a table without what its columns have put into tools and calls.

    A column has one form for all rows: an object gets each key that any row's has, None where it has none itself.
    Texts of JSON are as they were written. The record itself is left as it is, and returned where nothing is in it.
    """
    found: Json = {}
    for key, value in record.items():
        if key in ("tools", "functions"):
            found[key] = _dropped(value)
        elif isinstance(value, list):
            found[key] = [_with_own_arguments(item) if isinstance(item, dict) else item for item in value]
    found = {key: value for key, value in found.items() if value != record[key]}
    return {**record, **found} if found else record


def _with_own_arguments(message: Json) -> Json:
    for key in ("tool_calls", "function_call", "content", "value"):  # the last two are a call's where the role is
        calls = message.get(key)
        if isinstance(calls, list):
            message = {**message, key: [_own_arguments(call) for call in calls]}
        elif isinstance(calls, dict):
            message = {**message, key: _own_arguments(calls)}
    return message


def _own_arguments(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    own = {key: _dropped(value) if key in _ARGUMENTS else value for key, value in call.items()}
    return {**own, "function": _own_arguments(own["function"])} if isinstance(own.get("function"), dict) else own


def _dropped(value: Any) -> Any:
    """Return a value without the keys, at any depth, that are None."""
    if isinstance(value, dict):
        return {key: _dropped(item) for key, item in value.items() if item is not None}
    return [_dropped(item) for item in value] if isinstance(value, list) else value


def read_tools(record: Json) -> list[Json] | None:
    """Read the functions that come with a record: a list or its JSON, each bare or below "function".

    Raises:
        Malformed: with the reason.
    """
    value = _decoded(record.get("tools") or record.get("functions") or [], "tools that are not JSON")
    tools = []
    for tool in value if isinstance(value, list) else [value]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Malformed("a tool without a name")
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if k != "type"}})
    return tools or None


def _decoded(value: Any, reason: str) -> Any:
    """Return a JSON value: itself, or what its text holds, however often it was written as text."""
    while isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise Malformed(reason) from error
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
