"""A chunk of conversations as the target reads them: rows of tokens, and counts of what came of it."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from .candidates import Answers, Candidate
from .census import Census
from .chat import ChatFormat, Documents
from .chat_tokens import Document
from .conversation import Malformed
from .layout import PromptRow


class _LeftOut(Exception):
    """A conversation that is fine but not wanted; the text is the reason that is counted."""


@dataclass(frozen=True)
class Limits:
    """What rows are held to.

    Attributes:
        answers: see `Answers`.
        prompt_tokens: longest prompt that the target is asked to answer.
        tokens: documents with their own answers are cut there.
        val_every: one conversation in so many is held out for validation; see `split_of`.
    """

    answers: Answers
    prompt_tokens: int
    tokens: int
    val_every: int


@dataclass(frozen=True)
class Before:
    """What stands before a chunk.

    Attributes:
        candidates: conversations in the chunks before it.
        kept: of these, the ones that came through.
    """

    candidates: int = 0
    kept: int = 0


def split_of(place: int, kept: int, val_every: int) -> str:
    """Say what a conversation that is kept is for.

    The one at place p of the stream of candidates, from 0, is for validation where p mod val_every = 1, however the
    stream is cut into chunks and whichever others are dropped. But of those that are kept the first is always for
    training and the second for validation, so that any two have one of each kind.

    Args:
        place: p.
        kept: conversations before it that are kept.
        val_every: see `Limits`.

    Returns:
        "train" or "val".
    """
    held_out = kept == 1 if kept < 2 else place % val_every == 1
    return "val" if held_out else "train"


@dataclass
class Counts:
    """What came of some chunks.

    Attributes:
        totals: conversations, val (of these), documents, tokens, supervised_tokens. Without documents the tokens are
            those of the prompts.
        categories: conversations by category.
        censuses: by source: kept, changed and dropped in rendering; nothing is counted as read.
    """

    totals: collections.Counter[str] = field(default_factory=collections.Counter)
    categories: collections.Counter[str] = field(default_factory=collections.Counter)
    censuses: dict[str, Census] = field(default_factory=dict)

    def add(self, row: PromptRow, where: str, changes: Sequence[str]) -> None:
        """Count a conversation that is kept."""
        documents = row.documents or [{"tokens": row.prompt, "spans": []}]
        self.totals.update(
            conversations=1,
            val=int(row.split == "val"),
            documents=len(row.documents),
            tokens=sum(len(document["tokens"]) for document in documents),
            supervised_tokens=sum(end - start for document in documents for start, end in document["spans"]),
        )
        self.categories[row.category] += 1
        census = self.census(row.source)
        census.keep()
        for reason in changes:
            census.change(where, reason)

    def census(self, source: str) -> Census:
        """The counts of one source."""
        return self.censuses.setdefault(source, Census())

    def merge(self, other: Counts) -> None:
        """Add the counts of chunks that come after these."""
        self.totals.update(other.totals)
        self.categories.update(other.categories)
        for source, census in other.censuses.items():
            self.census(source).merge(census)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            **dict(self.totals),
            "categories": dict(sorted(self.categories.items())),
            "sources": {source: census.to_dict() for source, census in sorted(self.censuses.items())},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what `to_dict` gave."""
        totals = {key: value for key, value in values.items() if key not in ("categories", "sources")}
        censuses = {source: Census.from_dict(census) for source, census in values["sources"].items()}
        return cls(collections.Counter(totals), collections.Counter(values["categories"]), censuses)


def render(
    chunk: Sequence[Candidate], chat: ChatFormat, limits: Limits, before: Before
) -> tuple[list[PromptRow], Counts]:
    """Render a chunk.

    Args:
        chunk: the conversations; with answers of the target, all have messages.
        chat: the target's format.
        limits: what rows are held to.
        before: the chunks before this one; with `limits.val_every` it decides what each row is for (`split_of`).

    Returns:
        The rows that are kept, and the counts of what was changed and dropped.
    """
    conversations = [candidate.conversation for candidate in chunk]
    prompts = chat.prompts(conversations)
    documents: list[Documents | Malformed] = [Documents(rows=[]) for _ in chunk]
    if limits.answers == "dataset":
        documents = chat.documents(conversations)
    rows: list[PromptRow] = []
    counts = Counts()
    for place, (candidate, prompt, answered) in enumerate(
        zip(chunk, prompts, documents, strict=True), before.candidates
    ):
        split = split_of(place, before.kept + len(rows), limits.val_every)
        try:
            row, changes = _row(candidate, split, prompt, answered, limits)
        except Malformed as reason:
            counts.census(candidate.source).refuse(candidate.where, str(reason))
        except _LeftOut as reason:
            counts.census(candidate.source).leave_out(candidate.where, str(reason))
        else:
            rows.append(row)
            counts.add(row, candidate.where, [*candidate.conversation.changes, *changes])
    return rows, counts


def _row(
    candidate: Candidate, split: str, prompt: list[int] | Malformed, answered: Documents | Malformed, limits: Limits
) -> tuple[PromptRow, list[str]]:
    """The row, and what rendering changed."""
    if isinstance(prompt, Malformed):
        raise prompt
    if isinstance(answered, Malformed):
        raise answered
    if limits.answers == "target" and len(prompt) > limits.prompt_tokens:
        raise _LeftOut(f"a prompt of more than {limits.prompt_tokens} tokens")
    documents = [_cut(document, limits.tokens) for document in answered.rows]
    kept = [document for document in documents if document is not None]
    if answered.rows and not kept:
        raise _LeftOut(f"no answer within {limits.tokens} tokens")
    changes = list(answered.changes)
    if any(len(document.tokens) > limits.tokens for document in answered.rows):
        changes.append(f"cut at {limits.tokens} tokens")
    c = candidate.conversation
    row = PromptRow(
        candidate.id, split, candidate.source, c.category or candidate.source, c.messages, c.tools, prompt, kept
    )
    return row, changes


def _cut(document: Document, limit: int) -> dict[str, Any] | None:
    """The document's first `limit` tokens, without what stands behind their last answer; None where none is left."""
    if len(document.tokens) <= limit:
        return {"tokens": document.tokens, "spans": [list(span) for span in document.spans], "finish": "eos"}
    spans = [[start, min(end, limit)] for start, end in document.spans if start < limit]
    if not spans:
        return None
    finish = "length" if spans[-1][1] < document.spans[len(spans) - 1][1] else "eos"
    return {"tokens": document.tokens[: spans[-1][1]], "spans": spans, "finish": finish}
