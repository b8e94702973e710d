"""From a recipe to the conversations that are rendered: read, normalised, sieved and mixed, as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from ..errors import DraftsmithError
from ..files import sha256_json
from .census import Census
from .conversation import Conversation, Malformed
from .duplicates import Duplicates
from .normalise import NormaliseSettings, normalise
from .overlap import EvaluationPrompts, builtin_evaluation, read_evaluation
from .recipe import Recipe, SourceSpec
from .records import Record
from .shapes import parse_record
from .sources import Source, find_source, unique_names

Answers = Literal["target", "dataset"]
"""Whose answers a head is trained on: the target's own, or those that the conversations came with."""


@dataclass(frozen=True)
class Candidate:
    """A conversation that the recipe takes, before the chat template has seen it.

    Attributes:
        id: made of the source's name and the content, so that it is the same in every run.
        source: name of the source, unique in the recipe.
        where: "file:line".
    """

    id: str
    source: str
    where: str
    conversation: Conversation


class Mixture:
    """A recipe's sources, opened.

    Attributes:
        specs: what the recipe says of each source, by its unique name.
        sources: the sources, by the same names.
        censuses: what became of each source's records; those that are candidates are not counted as kept.

    Raises:
        DraftsmithError: a source or a file of evaluation prompts doesn't exist or can't be read.
    """

    def __init__(self, recipe: Recipe, answers: Answers) -> None:
        self.recipe, self.answers = recipe, answers
        found = [find_source(spec.source, spec.revision) for spec in recipe.sources]
        names = unique_names(found)
        self.specs: dict[str, SourceSpec] = dict(zip(names, recipe.sources, strict=True))
        self.sources: dict[str, Source] = dict(zip(names, found, strict=True))
        self.censuses = {name: Census() for name in names}
        self._evaluation = [text for path in recipe.filters.keep_out for text in read_evaluation(Path(path))]
        self._evaluation += builtin_evaluation()

    def identity(self) -> dict[str, Any]:
        """Return what decides which conversations come out, and in which order."""
        return {
            "seed": self.recipe.seed,
            "sources": [
                {"name": name, **source.identity(), "weight": spec.weight, "limit": spec.limit}
                for (name, source), spec in zip(self.sources.items(), self.specs.values(), strict=True)
            ],
            "near_duplicates": self.recipe.filters.near_duplicates,
            "media": self.recipe.filters.media,
            "evaluation_sha256": sha256_json(self._evaluation),
            "answers": self.answers,
        }

    def commits(self) -> dict[str, str]:
        """Ask the hub for the commits that its datasets are to be read at, by name."""
        pinned = {name: source.pin() for name, source in self.sources.items()}
        return {name: commit for name, commit in pinned.items() if commit is not None}

    def candidates(self, commits: dict[str, str], cap: float | None) -> Iterator[Candidate]:
        """Yield the conversations; those of a source in proportion to its weight, in any first part.

        The same sources and settings give the same ones in the same order, whatever is done with them.

        Args:
            commits: see `commits`.
            cap: share of malformed records of a source above which this stops; None never does.

        Raises:
            DraftsmithError: a source can't be read, holds nothing, or too much of it is malformed.
        """
        seen = Duplicates(self.recipe.filters.near_duplicates)
        evaluation = EvaluationPrompts(self._evaluation)
        opened = {name: self._sifted(name, commits.get(name), cap, seen, evaluation) for name in self.sources}
        taken = dict.fromkeys(opened, 0)

        def behind(name: str) -> float:
            return (taken[name] + 1) / self.specs[name].weight

        while opened:
            name = min(opened, key=behind)
            limit = self.specs[name].limit
            found = next(opened[name], None) if limit is None or taken[name] < limit else None
            if found is None:
                del opened[name]
                continue
            taken[name] += 1
            yield found

    def _sifted(
        self, name: str, commit: str | None, cap: float | None, seen: Duplicates, evaluation: EvaluationPrompts
    ) -> Iterator[Candidate]:
        census, shown = self.censuses[name], self.specs[name].source
        census.revision = commit
        settings = NormaliseSettings(media=self.recipe.filters.media)
        for where, record in self.sources[name].records(self.recipe.seed, commit):
            census.read += 1
            try:
                candidate = _candidate(name, (where, record), settings)
            except Malformed as reason:
                census.refuse(where, str(reason))
                continue
            conversation = candidate.conversation
            unwanted = _unusable(conversation, self.answers) or seen.reason(conversation.asked)
            unwanted = unwanted or evaluation.reason(_turns(conversation))
            if unwanted is None:
                yield candidate
            else:
                census.leave_out(where, unwanted)
        if not census.read:
            raise DraftsmithError(f"{shown} holds no record: give conversations or prompts")
        if cap is not None:
            census.check(shown, cap)


def _candidate(name: str, record: Record, settings: NormaliseSettings) -> Candidate:
    where, value = record
    if isinstance(value, Malformed):
        raise value
    found = normalise(parse_record(value), settings)
    content = [found.messages, found.tools, found.text, found.tokens, found.mask, found.category]
    try:
        digest = sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
    except UnicodeEncodeError as error:
        raise Malformed("text that is not valid Unicode (half of a surrogate pair)") from error
    except TypeError as error:  # Parquet has dates and bytes, too
        raise Malformed("tools with values that JSON doesn't have") from error
    return Candidate(f"{name}-{digest[:16]}", name, where, found)


def _unusable(conversation: Conversation, answers: Answers) -> str | None:
    if answers == "target":
        return None if conversation.messages else "no question that the target could answer"
    answered = not conversation.messages or any(m["role"] == "assistant" for m in conversation.messages)
    return None if answered else "no answer to train on"


def _turns(conversation: Conversation) -> list[str]:
    if not conversation.messages:
        return [conversation.asked]
    return [m["content"] for m in conversation.messages if m["role"] == "user"]
