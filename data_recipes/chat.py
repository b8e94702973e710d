"""Prompts as the target reads them, and which tokens of a document are the target's own words.

`ChatFormat` renders with the tokenizer's own chat template, whatever it does; no template is known by its
name. `chat_turns.py` defines what an answer is; `chat_shapes.py` finds the same faster, `chat_tokens.py` its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from typing import Any, Protocol

from ..errors import DraftsmithError
from .chat_plain import PlainReader
from .chat_shapes import ShapeReader
from .chat_template import Template, any_of
from .chat_tokens import Document, RowEncoder
from .chat_turns import Row, TurnReader, chain, said_texts
from .conversation import Conversation, Malformed, Message, first_prompt

_THOUGHT = "<think>\nShort.\n</think>\n\n"
_PROBES = [
    [
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": f"{thought}Quite well."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": f"{thought}Even better."},
    ]
    for thought in ("", _THOUGHT)
]
"""What every chat template can render: a plain one, and one for templates that open a thought."""


@dataclass(frozen=True)
class Documents:
    """What a conversation gives to train on.

    Attributes:
        rows: one where the template leaves what was said as it is, else up to one an answer; in the order of turns.
        changes: what was done to train on it: the reasons that are counted.
    """

    rows: list[Document]
    changes: tuple[str, ...] = ()


class _Reader(Protocol):
    """How conversations become text; `begin` are the tokens before it."""

    begin: list[int]

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str: ...

    def rows(self, conversation: Conversation) -> tuple[list[Row], list[str]]: ...

    def complete(self, document: Document, conversation: Conversation) -> Document: ...


class ChatReader:
    """Reads conversations with a chat template.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        variables: what the template is rendered with beside messages and tools (`enable_thinking`).
        stops, specials: see `TurnReader`.
        today: see `Template`.
    """

    def __init__(
        self, tokenizer: Any, variables: dict[str, Any], stops: list[str], specials: list[str], today: date | None
    ) -> None:
        self.begin: list[int] = []
        self._template = Template(tokenizer, variables, today)
        self._turns = TurnReader(self._template, stops, specials)
        self._shapes = ShapeReader(self._template, self._turns)

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        """Return what serving renders."""
        return self._template.render(messages, tools, generate=True)

    def rows(self, conversation: Conversation) -> tuple[list[Row], list[str]]:
        """Return the rows of a conversation, and its changes.

        Raises:
            Malformed: with the reason why there are none.
        """
        if conversation.text is not None:
            raise Malformed("plain text, which the chat template has no place for")
        read = None if conversation.tools else self._shapes.read(conversation.messages)
        if read is not None:
            return read
        turns, changes = self._turns.read(conversation.messages, conversation.tools)
        return chain(turns), changes

    def complete(self, document: Document, conversation: Conversation) -> Document:
        """Return the document: the template has written all of it."""
        return document


class ChatFormat:
    """Conversations as one target reads and writes them.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template and a fast implementation.
        template_kwargs: variables of the template (`enable_thinking`), the same as serving will use.
        stop_ids: tokens that end the model's answers (its generation configuration), beside the tokenizer's own
            end-of-sequence token. Only added tokens are looked for, as all models' are.
        plain_text: train a model without a chat template on plain text: messages stand one below the other, with a
            blank line between.
        today: the date that templates which ask for it are told; None: of the day on which this is made.

    Raises:
        DraftsmithError: the tokenizer has no chat template (and `plain_text` isn't chosen), or it can't be read, or the
            tokenizer has no fast implementation.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template_kwargs: dict[str, Any] | None = None,
        stop_ids: Sequence[int] = (),
        plain_text: bool = False,
        today: date | None = None,
    ) -> None:
        self._name = tokenizer.name_or_path or type(tokenizer).__name__
        self._size = len(tokenizer)
        self._encoder = RowEncoder(tokenizer)
        added = tokenizer.added_tokens_decoder
        ends = dict.fromkeys([*stop_ids, tokenizer.eos_token_id])
        stops = [added[id].content for id in ends if id in added]
        specials = [token.content for token in added.values() if token.special]
        self._spelled = any_of([*stops, *specials])
        self._reader: _Reader
        if plain_text:
            self._reader = PlainReader(tokenizer)
        elif not getattr(tokenizer, "chat_template", None):
            raise _no_template(tokenizer)
        else:
            self._reader = ChatReader(tokenizer, template_kwargs or {}, stops, specials, today)
        self._checked = plain_text

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Render messages that end with a user's or a tool's turn, up to where the assistant starts to speak.

        Raises:
            Malformed: the template refuses them, or a text spells a special token.
        """
        self._refuse_spelled(said_texts(messages, tools))
        return self._reader.begin + self._encoder.encode([self._reader.prompt(messages, tools)])[0]

    def prompts(self, conversations: Sequence[Conversation]) -> list[list[int] | Malformed]:
        """Render the first prompt of each: [system?, first user turn]; empty for records of text or tokens."""
        texts: list[str | Malformed | None] = []
        for conversation in conversations:
            try:
                messages = first_prompt(conversation.messages) if conversation.messages else []
                self._refuse_spelled(said_texts(messages, conversation.tools))
                texts.append(self._reader.prompt(messages, conversation.tools) if messages else None)
            except Malformed as reason:
                texts.append(reason)
        tokens = iter(self._encoder.encode([text for text in texts if isinstance(text, str)]))
        begin = self._reader.begin
        return [begin + next(tokens) if isinstance(text, str) else [] if text is None else text for text in texts]

    def documents(self, conversations: Sequence[Conversation]) -> list[Documents | Malformed]:
        """Render conversations with their own answers: what to train on, or why there is nothing.

        Raises:
            DraftsmithError: the template gives no sound mask for any conversation (see `check`).
        """
        self.check()
        return self._documents(conversations)

    def check(self) -> None:
        """Try the template on a plain conversation of two turns; `documents` does so before its first.

        A mask that is empty, or that covers the first prompt or all tokens, is an error of the template or of the
        settings where even that has it; a single conversation that has it is malformed.

        Raises:
            DraftsmithError: naming the tokenizer and what was seen.
        """
        if self._checked:
            return
        plain, thinking = self._documents([Conversation(messages=messages) for messages in _PROBES])
        if isinstance(plain, Malformed) and isinstance(thinking, Malformed):
            raise DraftsmithError(
                f"the chat template of {self._name} gives no loss mask, not even for 'How are you?' / 'Quite well.': "
                f"{plain}. Mend the template (chat_template.jinja in the model's folder), or train on answers of the "
                f"target's own, which need none"
            )
        self._checked = True

    def _documents(self, conversations: Sequence[Conversation]) -> list[Documents | Malformed]:
        read = [self._rows(conversation) for conversation in conversations]
        rows = [row for found in read if not isinstance(found, Malformed) for row in found[0]]
        encoded = iter(self._encoder.documents(rows))
        documents: list[Documents | Malformed] = []
        for conversation, found in zip(conversations, read, strict=True):
            try:
                if isinstance(found, Malformed):
                    raise found
                # all of them are drawn before one may raise: the next conversation's stand behind them
                drawn = [next(encoded) for _ in found[0]]
                whole = [document for row in drawn for document in _sound(row)]
                documents.append(self._finished(conversation, whole, found[1]))
            except Malformed as reason:
                documents.append(reason)
        return documents

    def _rows(self, conversation: Conversation) -> tuple[list[Row], list[str]] | Malformed:
        if conversation.tokens is not None:
            return [], []
        try:
            self._refuse_spelled(said_texts(conversation.messages, conversation.tools))
            self._refuse_spelled([conversation.text or ""])
            return self._reader.rows(conversation)
        except Malformed as reason:
            return reason

    def _finished(self, conversation: Conversation, found: list[Document], changes: list[str]) -> Documents:
        """Return what a conversation gives, with its masks checked."""
        if conversation.tokens is not None:
            found = [self._tokenised(conversation.tokens, conversation.mask)]
        else:
            found = [self._reader.complete(document, conversation) for document in found]
        if not found:
            raise Malformed("no token of it is an answer")
        if any(document.spans[0][0] == 0 for document in found):
            raise Malformed("the answers begin with the first token, before any prompt")
        return Documents(found, tuple(changes))

    def _tokenised(self, tokens: list[int], mask: list[bool] | None) -> Document:
        if mask is None or len(mask) != len(tokens):
            raise Malformed("tokens without a mask of the same length")
        for token in tokens:
            if not 0 <= token < self._size:
                raise Malformed(f"token {token} is outside the tokenizer's {self._size}")
        if not any(mask):
            raise Malformed("no token of it is an answer")
        edges = [i for i, (a, b) in enumerate(pairwise([False, *mask, False])) if a != b]
        return Document(tokens, list(zip(edges[::2], edges[1::2], strict=True)))

    def _refuse_spelled(self, texts: Iterable[str]) -> None:
        """Refuse texts that would be encoded as special tokens, as no user can send them."""
        found = self._spelled.search("\0".join(texts))
        if found:
            raise Malformed(f"text that spells the special token {found.group()}")


def _sound(encoded: list[Document] | Malformed) -> list[Document]:
    if isinstance(encoded, Malformed):
        raise encoded
    return encoded


def _no_template(tokenizer: Any) -> DraftsmithError:
    return DraftsmithError(
        f"the tokenizer of {tokenizer.name_or_path} has no chat template: draft heads are trained on chat answers; "
        f"give an instruct model, or put a chat_template.jinja into the model's folder"
    )


def render_prompt(
    tokenizer: Any, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Render messages with the tokenizer's own chat template, up to where the assistant starts to speak.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: [{"role", "content"}], ending with a user turn.
        template_kwargs: what the template is given beside the messages.

    Returns:
        Token ids, the generation prompt included.

    Raises:
        DraftsmithError: the tokenizer has no chat template.
        Malformed: the template refuses these messages (some allow no system turn).
    """
    import jinja2

    if not getattr(tokenizer, "chat_template", None):
        raise _no_template(tokenizer)
    try:
        ids = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},  # the stage that asks counts what is too long
            **(template_kwargs or {}),
        )
    except jinja2.exceptions.TemplateError as error:
        raise Malformed(f"the chat template refuses it: {error}") from error
    return list(ids)


def document(prompt: Sequence[int], answer: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Return the tokens of prompt + answer and the mask that is True on the answer (its end-of-turn token included)."""
    return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
