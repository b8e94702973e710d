"""From the shapes that conversations are published in to one, or a reason why not.

`parse_record` reads the record and maps names (those of messages: `messages.py`); it judges nothing. Contents may be
empty, roles may repeat, and a message that came with images, audio, video or files carries "media": True until
`normalise.normalise` has decided about it.

`SHAPES` is the registry: the first shape that fits a record reads it. What goes with any shape: "system" or
"system_prompt" (becomes the first turn), "tools" or "functions", "category" or "class", "images" and their like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .conversation import Conversation, Malformed, Message
from .messages import SPEAKERS, read_message, read_messages, read_side, read_tools, turn, without_filled
from .records import TableRow

Json = dict[str, Any]

_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_MASKS = ("loss_mask", "assistant_masks", "labels")
_IGNORED_LABEL = -100
_ASKED = {  # what holds the question: what may hold its answer, the best first
    "prompt": ("completion", "response", "answer", "output"),
    "question": ("response", "answer", "output"),
    "query": ("response", "answer", "output"),
    "problem": ("solution", "response", "answer"),
    "instruction": ("output", "response", "completion", "answer"),
    "inputs": ("targets",),
    "input": ("output",),
}
_BESIDE = ("context", "input")  # what the question is about, behind it
_WHOLE = ("prompt", *_BESIDE)  # what nothing is put behind
FILLED = "empty keys of table columns removed"


@dataclass(frozen=True)
class Shape:
    """One way in which records are published.

    Attributes:
        keys: what tells it, as the user reads it where nothing fits.
        fits: whether a record has this shape.
        parse: reads a record that fits; raises `Malformed`.
    """

    keys: str
    fits: Callable[[Json], bool]
    parse: Callable[[Json], Conversation]


def parse_record(record: Any) -> Conversation:
    """Return what a record of any known shape holds: a text (a prompt), a list of messages, or an object.

    Raises:
        Malformed: with the reason.
    """
    if isinstance(record, str):
        return Conversation(messages=[turn("user", record)])
    if isinstance(record, list):
        return Conversation(messages=read_messages(record))
    if not isinstance(record, dict):
        raise Malformed(f"a {type(record).__name__} instead of a conversation")
    own = without_filled(record) if isinstance(record, TableRow) else record
    filled = () if own is record else (FILLED,)
    record = own
    shape = next((shape for shape in SHAPES if shape.fits(record)), None)
    if shape is None:
        found = ", ".join(sorted(repr(str(key)[:20]) for key in record)[:5])
        raise Malformed(f"nothing under a known key ({'; '.join(s.keys for s in SHAPES)}), only under: {found}")
    conversation = shape.parse(record)
    if conversation.messages:
        _add_system(record, conversation.messages)
    if any(record.get(key) for key in _MEDIA):
        if not conversation.messages:
            raise Malformed("images, audio or video beside plain text")
        conversation.messages[0]["media"] = True
    category = record.get("category") or record.get("class")
    return replace(
        conversation,
        tools=read_tools(record),
        category=category.strip() or None if isinstance(category, str) else None,
        changes=(*filled, *conversation.changes),
    )


def _add_system(record: Json, messages: list[Message]) -> None:
    for key in ("system", "system_prompt"):
        text = record.get(key)
        if text is not None and not isinstance(text, str):
            raise Malformed(f"'{key}' is a {type(text).__name__}, not text")
        if text and text.strip() and messages[0] != turn("system", text):
            messages.insert(0, turn("system", text))


def _tokenised(record: Json) -> Conversation:
    """Read token ids and what to learn of them, as a mask or as labels that are not shifted."""
    tokens = record["input_ids"] if isinstance(record.get("input_ids"), list) else record["tokens"]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise Malformed("token ids that are not whole numbers")
    key = next((key for key in _MASKS if isinstance(record.get(key), list)), None)
    if key is None:
        raise Malformed(f"token ids without a mask ({', '.join(_MASKS)})")
    values = record[key]
    if len(values) != len(tokens):
        raise Malformed(f"token ids and {key} of different lengths")
    if key == "labels":
        mask = [label != _IGNORED_LABEL for label in values]
        if any(label != token for label, token, kept in zip(values, tokens, mask, strict=True) if kept):
            raise Malformed("labels that are not the token ids at their own places")
    elif all(value in (0, 1) for value in values):
        mask = [bool(value) for value in values]
    else:
        raise Malformed(f"{key} with other values than 0 and 1")
    if not any(mask):
        raise Malformed("a mask that leaves nothing to learn")
    return Conversation(tokens=tokens, mask=mask)


def _chat(record: Json) -> Conversation:
    return Conversation(messages=read_messages(_chat_list(record) or []))


def _chat_list(record: Json) -> list[Any] | None:
    values = (record.get(key) for key in ("messages", "conversations", "conversation"))
    return next((value for value in values if isinstance(value, list)), None)


def _preferred(record: Json) -> Conversation:
    """Read a preference pair: the chosen side, which may repeat the question or not."""
    chosen = read_side(record["chosen"], "assistant", "chosen")
    if any(message["role"] == "user" for message in chosen):
        return Conversation(messages=chosen)
    asked = _asked(record)
    if asked is None:
        raise Malformed("'chosen' without what was asked")
    return Conversation(messages=[*_question(record, asked), *chosen])


def _tree(record: Json) -> Conversation:
    """Read a tree of replies (OASST) along the best-ranked reply of each node; of no rank, the first."""
    node, branches = record["prompt"], False
    messages: list[Message] = []
    while node is not None:
        role, text = node.get("role"), node.get("text")
        if node.get("deleted"):
            raise Malformed("a tree whose first message is deleted")
        messages.append(read_message({"role": role, "content": text}))
        replies = node.get("replies") if isinstance(node.get("replies"), list) else []
        replies = [reply for reply in replies if isinstance(reply, dict) and not reply.get("deleted")]
        branches = branches or len(replies) > 1
        node = min(replies, key=_rank, default=None)
    return Conversation(messages=messages, changes=("other branches of the tree left aside",) if branches else ())


def _rank(reply: Json) -> float:
    rank = reply.get("rank")
    return rank if isinstance(rank, int) else float("inf")


def _alternating(record: Json) -> Conversation:
    texts = [record["data"]] if isinstance(record["data"], str) else record["data"]
    if texts and isinstance(texts[0], dict):
        return Conversation(messages=read_messages(texts))
    if not texts or not all(isinstance(text, str) for text in texts):
        raise Malformed("'data' is not text or a list of texts")
    return Conversation(messages=[turn(SPEAKERS[i % 2], text) for i, text in enumerate(texts)])


def _user_turns(record: Json) -> Conversation:
    turns = record["turns"]
    if turns and isinstance(turns[0], dict):
        return Conversation(messages=read_messages(turns))
    if not turns or not isinstance(turns[0], str):
        raise Malformed("'turns' is not a list with a first turn")
    later = ("user turns without answers left aside after the first",) if len(turns) > 1 else ()
    return Conversation(messages=[turn("user", turns[0])], changes=later)


def _question_and_answer(record: Json) -> Conversation:
    asked = _asked(record)
    assert asked is not None
    messages = _question(record, asked)
    instances = record.get("instances")  # Self-Instruct: one task, several inputs with their outputs
    instances = instances if isinstance(instances, list) else []
    if instances and isinstance(instances[0], dict):
        record = instances[0]
        messages = _with_context(messages, record)
    answer = next((key for key in _ASKED[asked] if record.get(key) is not None), None)
    if answer is not None:
        messages += read_side(record[answer], "assistant", answer)
    later = ("instances of the task left aside after the first",) if len(instances) > 1 else ()
    return Conversation(messages=messages, changes=later)


def _asked(record: Json) -> str | None:
    if record.get("instruction") is not None and record.get("output") is not None:
        return "instruction"  # a prompt beside them is what Alpaca makes of them, some with the answer in it
    return next((key for key in _ASKED if record.get(key) is not None), None)


def _question(record: Json, asked: str) -> list[Message]:
    messages = read_side(record[asked], "user", asked)
    if asked not in _WHOLE:
        messages = _with_context(messages, record)
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Malformed("'history' is not a list of pairs")
    sides = [(role, text) for pair in history for role, text in zip(SPEAKERS, pair, strict=True)]
    return [*(message for role, text in sides for message in read_side(text, role, "history")), *messages]


def _with_context(messages: list[Message], record: Json) -> list[Message]:
    beside = [record[key] for key in _BESIDE if isinstance(record.get(key), str) and record[key].strip()]
    content = "\n\n".join([messages[-1]["content"], *beside])
    return [*messages[:-1], {**messages[-1], "content": content}]


def _text_and_code(record: Json) -> Conversation:
    return Conversation(
        messages=[*read_side(record["text"], "user", "text"), *read_side(record["code"], "assistant", "code")]
    )


def _plain_text(record: Json) -> Conversation:
    return Conversation(text=record["text"])


SHAPES = (
    Shape(
        f"input_ids or tokens with {', '.join(_MASKS)}",
        lambda r: (
            isinstance(r.get("input_ids"), list)
            or (isinstance(r.get("tokens"), list) and any(isinstance(r.get(key), list) for key in _MASKS))
        ),
        _tokenised,
    ),
    Shape("messages, conversations, conversation", lambda r: _chat_list(r) is not None, _chat),
    Shape("chosen", lambda r: r.get("chosen") is not None, _preferred),
    Shape("prompt with replies", lambda r: isinstance(r.get("prompt"), dict), _tree),
    Shape(", ".join(_ASKED), lambda r: _asked(r) is not None, _question_and_answer),
    Shape("turns", lambda r: isinstance(r.get("turns"), list), _user_turns),
    Shape("data", lambda r: isinstance(r.get("data"), str | list), _alternating),
    Shape("text with code", lambda r: isinstance(r.get("text"), str) and "code" in r, _text_and_code),
    Shape("text", lambda r: isinstance(r.get("text"), str), _plain_text),
)
