"""A conversation with the target: what each turn asks after the target's own answers, and the documents it gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from .chat import ChatFormat
from .chat_turns import OPENED
from .conversation import Malformed, Message, first_prompt
from .layout import DocumentRow, PromptRow, read_prompts


@dataclass(frozen=True)
class Asking:
    """How conversations are gone through.

    Attributes:
        tokenizer: the target's.
        format: its chat template, as `prepare` used it; None where only first turns are asked.
        turns: how many user turns are asked; 0 = all.
        max_new_tokens: most tokens of an answer.
        max_positions: the target's longest context: a turn whose answer may not fit is not asked.
        stop_ids: tokens that end an answer.
    """

    tokenizer: Any
    format: ChatFormat | None
    turns: int
    max_new_tokens: int
    max_positions: int
    stop_ids: frozenset[int]

    def begin(self, row: PromptRow) -> Dialogue:
        """Return the conversation of a row, ready to ask its first prompt.

        Raises:
            DraftsmithError: `prepare` rendered the prompt in another way.
        """
        if self.format is None or not row.messages:
            return Dialogue(row, self, [])
        first = first_prompt(row.messages)
        later = [m for m in row.messages[len(first) :] if m["role"] == "user"]
        later = later[: self.turns - 1] if self.turns else later
        if later and self.format.prompt(first, row.tools) != row.prompt:
            raise DraftsmithError(
                f"the prompt of {row.id} is not what the chat template gives now: give 'regenerate' the "
                f"template_kwargs of 'prepare', or run 'draftsmith prepare' again"
            )
        return Dialogue(row, self, later)


class Dialogue:
    """One conversation on its way.

    Attributes:
        row: what it is made of.
        turn: number of the present turn, from 1.
        prompt: tokens that are to be answered; None once it has ended.
        ended: why it ended before its last turn; None where it did not. Reasons are counted.
        documents: what it has given so far, without ids.
    """

    def __init__(self, row: PromptRow, asking: Asking, later: Sequence[Message]) -> None:
        self.row, self.asking = row, asking
        self.turn = 1
        self.prompt: list[int] | None = row.prompt
        self.ended: str | None = None
        self.documents: list[dict[str, Any]] = []
        self._later = list(later)
        self._messages = first_prompt(row.messages) if later else []

    @property
    def name(self) -> str:
        """Id of the present turn: with the seed it decides its draws."""
        return self.row.id if self.turn == 1 else f"{self.row.id}/{self.turn}"

    def take(self, answer: Sequence[int], finish: str) -> None:
        """Note the answer to the present prompt and go on to the next turn, if there is one.

        Args:
            answer: its tokens, at least one; the end-of-turn token included where it ended by itself.
            finish: "eos" or "length".
        """
        assert self.prompt is not None
        start = len(self.prompt)
        tokens, span = [*self.prompt, *answer], [start, start + len(answer)]
        before = self.documents[-1] if self.documents else None
        # a template that rewrites what was said earlier makes the next turn another document
        if before is not None and self.prompt[: len(before["tokens"])] == before["tokens"]:
            before |= {"tokens": tokens, "spans": [*before["spans"], span], "finish": finish}
        else:
            self.documents.append({"tokens": tokens, "spans": [span], "finish": finish})
        self.prompt = self._next(answer, finish) if self._later else None
        self.turn += 1

    def end(self, reason: str) -> None:
        """Ask nothing more."""
        self.prompt, self.ended = None, reason

    def rows(self) -> list[DocumentRow]:
        """The documents with their ids."""
        several = len(self.documents) > 1
        return [
            DocumentRow(f"{self.row.id}/{i}" if several else self.row.id, self.row.split, self.row.source, **document)
            for i, document in enumerate(self.documents, 1)
        ]

    def _next(self, answer: Sequence[int], finish: str) -> list[int] | None:
        """Tokens of the next user turn behind this answer; None where the conversation ends here."""
        asking = self.asking
        assert asking.format is not None
        if finish == "length":
            self.ended = "an answer was cut"
            return None
        if self.row.tools:
            self.ended = "it has tools, which nobody runs here"
            return None
        self._messages = [*self._messages, {"role": "assistant", "content": self._said(answer)}, self._later.pop(0)]
        try:
            prompt = asking.format.prompt(self._messages, self.row.tools)
        except Malformed as error:
            self.ended = str(error)
            return None
        if len(prompt) + asking.max_new_tokens > asking.max_positions:
            self.ended = "the target's context is full"
            return None
        return prompt

    def _said(self, answer: Sequence[int]) -> str:
        """The answer's text as the template takes it: without the end-of-turn token, thoughts whole."""
        tokenizer, stop = self.asking.tokenizer, self.asking.stop_ids
        words = answer[:-1] if answer[-1] in stop else answer
        text: str = tokenizer.decode(list(words), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert self.prompt is not None
        opening: str = tokenizer.decode(self.prompt[-8:], skip_special_tokens=False)
        # some generation prompts open the thought; templates that drop earlier thoughts look for the whole of it
        return OPENED + text if opening.rstrip().endswith(OPENED) else text


def asked_rows(path: Path) -> tuple[list[PromptRow], int]:
    """Return the rows of a chunk of prompts that can be asked, and how many can't: they came tokenised."""
    rows = read_prompts(path)
    asked = [row for row in rows if row.prompt]
    return asked, len(rows) - len(asked)


def ended_early(dialogues: Iterable[Dialogue]) -> dict[str, int]:
    """Count by reason the conversations that gave answers and ended before their last turn."""
    return dict(Counter(d.ended for d in dialogues if d.ended is not None and d.documents))
