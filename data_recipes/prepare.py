"""Stage `prepare`: a recipe becomes prompts/chunk-NNNNN.jsonl, tokenised for the target.

Which conversations a chunk holds follows from the recipe alone, before any is rendered. A stage that was killed reads
and sieves them all again and renders the chunks that are not there; beside each chunk a small JSON file has its counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from ..files import read_json, write_json
from ..manifest import Stage
from ..progress import progress_bar, say
from .candidates import Answers, Candidate, Mixture
from .census import Census
from .chat import ChatFormat
from .layout import PROMPTS, TargetInfo, write_rows
from .recipe import Recipe
from .rows import Before, Counts, Limits, render

VERSION = 3
_COMMITS = "commits.json"


@dataclass(frozen=True)
class PrepareSettings:
    """Settings of the stage.

    Attributes:
        max_prompt_tokens: longer prompts are left out; less where the target's context asks for it.
        max_new_tokens: room that an answer of the target needs in its context.
        max_tokens: documents with their own answers are cut there, or where the target's context ends.
        val_every: one conversation in so many is held out for validation.
        malformed_cap: share of malformed records of a source above which the stage stops.
        chunk: conversations a chunk, the unit that is finished or not in every data stage.
        answers: train on the "target"'s own answers, or on the "dataset"'s. Its conversations without an answer are
            left out then.
        template_kwargs: what the chat template is given beside the messages.
        plain_text: the tokenizer has no chat template, and none is wanted.
    """

    max_prompt_tokens: int = 1024
    max_new_tokens: int = 256
    max_tokens: int = 4096
    val_every: int = 25
    malformed_cap: float = 0.1
    chunk: int = 128
    answers: Answers = "target"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    plain_text: bool = False

    def limits(self, info: TargetInfo) -> Limits:
        """Return what rows are held to for this target.

        Raises:
            DraftsmithError: an answer leaves no room for a prompt.
        """
        prompt = min(self.max_prompt_tokens, info.max_positions - self.max_new_tokens)
        if self.answers == "target" and prompt < 1:
            raise DraftsmithError(
                f"max_new_tokens {self.max_new_tokens} leaves no room for a prompt in the target's context of "
                f"{info.max_positions} tokens: choose less"
            )
        return Limits(self.answers, prompt, min(self.max_tokens, info.max_positions), self.val_every)

    def chat(self, info: TargetInfo, tokenizer: Any, today: date | None = None) -> ChatFormat:
        """Return the target's format; `today` as `ChatFormat` has it."""
        return ChatFormat(
            tokenizer, template_kwargs=self.template_kwargs, stop_ids=info.stop_ids, plain_text=self.plain_text,
            today=today,
        )  # fmt: skip


def prepare(
    settings: PrepareSettings, recipe: Recipe, data: Path, info: TargetInfo, load_tokenizer: Callable[[], Any]
) -> Stage:
    """Make `data/prompts` where it isn't there yet.

    Args:
        settings: limits.
        recipe: which sources.
        data: the data folder, `runs/<model>/data/<recipe>`.
        info: the target.
        load_tokenizer: called only when there is work.

    Returns:
        The finished stage; its record counts records by source, what was changed and dropped by reason with places,
        and documents and tokens.

    Raises:
        DraftsmithError: a source can't be read, too much of it is malformed, nothing is left, no chat template.
    """
    limits = settings.limits(info)
    mixture = Mixture(recipe, settings.answers)
    stage = Stage.open(data / PROMPTS, "prepare", VERSION, _identity(settings, limits, mixture, info))
    if _is_done(stage):
        return stage
    commits = _commits(stage.folder, mixture)
    chat = settings.chat(info, load_tokenizer(), began_on(data))
    counts = Counts()
    made = 0
    with progress_bar("prepare", unit="conversations") as bar:
        for chunk in chunks(mixture.candidates(commits, settings.malformed_cap), settings.chunk):
            before = Before(made * settings.chunk, counts.totals["conversations"])
            counts.merge(_rendered(stage.folder, made, chunk, chat, limits, before))
            made += 1
            bar.advance(len(chunk))
    censuses = merged(mixture, counts)
    for name, census in censuses.items():
        for line in census.lines():
            say(f"prepare: {name}: {line}")
    if not counts.totals["conversations"]:
        lines = [line for census in censuses.values() for line in census.lines()]
        raise DraftsmithError(f"recipe {recipe.name}: no conversation is left: {'; '.join(lines)}")
    for name, census in censuses.items():
        census.check(mixture.specs[name].source, settings.malformed_cap)
    say(f"prepare: {counts.totals['conversations']:,} conversations, {counts.totals['tokens']:,} tokens")
    stage.finish(chunks=made, **record(counts, censuses))
    return stage


def chunks(candidates: Iterator[Candidate], size: int) -> Iterator[list[Candidate]]:
    """Yield the conversations in lists of `size`; the last may be shorter."""
    while chunk := list(itertools.islice(candidates, size)):
        yield chunk


def merged(mixture: Mixture, counts: Counts) -> dict[str, Census]:
    """Return what became of each source's records, from reading and from rendering."""
    for name, census in mixture.censuses.items():
        census.merge(counts.census(name))
    return mixture.censuses


def record(counts: Counts, censuses: dict[str, Census]) -> dict[str, Any]:
    """Return the JSON form of all counts."""
    return {
        **{key: value for key, value in counts.to_dict().items() if key != "sources"},
        "supervised_share": round(counts.totals["supervised_tokens"] / max(counts.totals["tokens"], 1), 4),
        "sources": {name: census.to_dict() for name, census in censuses.items()},
    }


def _identity(settings: PrepareSettings, limits: Limits, mixture: Mixture, info: TargetInfo) -> dict[str, Any]:
    own = {"max_tokens": limits.tokens, "stop_ids": list(info.stop_ids)}
    return {
        **mixture.identity(),
        "tokenizer_sha256": info.tokenizer_sha256,
        "template_kwargs": settings.template_kwargs,
        "plain_text": settings.plain_text,
        "val_every": settings.val_every,
        "chunk": settings.chunk,
        **({"max_prompt_tokens": limits.prompt_tokens} if settings.answers == "target" else own),
    }


def _is_done(stage: Stage) -> bool:
    if stage.manifest is None:
        return False
    return all(path.exists() for i in range(stage.manifest["record"]["chunks"]) for path in _paths(stage.folder, i))


def began_on(data: Path) -> date | None:
    """Return the day on which the prompts of `data` were begun, which templates are told; None if nothing says it."""
    path = data / PROMPTS / _COMMITS
    told = read_json(path).get("date") if path.exists() else None
    return date.fromisoformat(told) if told else None


def commits_of(data: Path) -> dict[str, str]:
    """Return the commits that the datasets of `data` were read at, by their sources' names; {} if nothing says it."""
    path = data / PROMPTS / _COMMITS
    return dict(read_json(path)["commits"]) if path.exists() else {}


def _commits(folder: Path, mixture: Mixture) -> dict[str, str]:
    """The datasets' commits: those that an earlier call of this stage began with."""
    path = folder / _COMMITS
    if not path.exists():
        write_json(path, {"date": date.today().isoformat(), "commits": mixture.commits()})
    commits: dict[str, str] = read_json(path)["commits"]
    return commits


def _rendered(
    folder: Path, number: int, chunk: list[Candidate], chat: ChatFormat, limits: Limits, before: Before
) -> Counts:
    """Render a chunk where it isn't there yet; returns its counts."""
    rows_path, counts_path = _paths(folder, number)
    if rows_path.exists() and counts_path.exists():
        return Counts.from_dict(read_json(counts_path))
    rows, counts = render(chunk, chat, limits, before)
    write_rows(rows_path, rows)
    write_json(counts_path, counts.to_dict())
    return counts


def _paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"chunk-{number:05d}.jsonl", folder / f"chunk-{number:05d}.json"
