"""Stage `prepare`: a recipe becomes prompts/prompts.jsonl, tokenised for the target."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from ..files import sha256_json
from ..manifest import Stage
from ..progress import progress_bar, say
from .builtin import builtin_prompts, normalise
from .chat import render_prompt
from .conversation import Malformed, Prompt, duplicate_key
from .layout import PROMPTS, PromptRow, TargetInfo, write_rows
from .recipe import Recipe, SourceSpec
from .sources import Census, open_source, source_identity

VERSION = 1


@dataclass(frozen=True)
class PrepareSettings:
    """Settings of the stage.

    Attributes:
        max_prompt_tokens: longer prompts are left out; less where the target's context asks for it.
        max_new_tokens: room that an answer needs in the target's context.
        val_every: one prompt in so many is held out for validation.
        malformed_cap: share of malformed records of a source above which the stage stops.
    """

    max_prompt_tokens: int = 1024
    max_new_tokens: int = 256
    val_every: int = 25
    malformed_cap: float = 0.1


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
        The finished stage; its record counts prompts, and what was left out by reason with places.

    Raises:
        DraftsmithError: a source can't be read, too much of it is malformed, no prompt is left, no chat template.
    """
    limit = min(settings.max_prompt_tokens, info.max_positions - settings.max_new_tokens)
    if limit < 1:
        raise DraftsmithError(
            f"max_new_tokens {settings.max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{info.max_positions} tokens: choose less"
        )
    held_out = [p.text for split in ("heldout", "tuning") for p in builtin_prompts(split)]
    stage = Stage.open(data / PROMPTS, "prepare", VERSION, {
        "seed": recipe.seed,
        "sources": [{**source_identity(s), "weight": s.weight, "limit": s.limit} for s in recipe.sources],
        "held_out_sha256": sha256_json(held_out),
        "tokenizer_sha256": info.tokenizer_sha256,
        "max_prompt_tokens": limit,
        "val_every": settings.val_every,
    })  # fmt: skip
    path = stage.folder / "prompts.jsonl"
    if stage.manifest is not None and path.exists():
        return stage
    sieve = _Sieve(load_tokenizer(), limit, {normalise(text) for text in held_out})
    censuses = [Census() for _ in recipe.sources]
    with progress_bar("prepare", unit="prompts") as bar:
        rows: list[PromptRow] = []
        for prompt, tokens in _mix(recipe, censuses, settings.malformed_cap, sieve.tokens):
            # the second of each group, so that the smallest data has one of each kind
            split = "val" if len(rows) % settings.val_every == 1 % settings.val_every else "train"
            rows.append(PromptRow(prompt.id, split, prompt.category, prompt.messages, tokens))
            bar.advance()
    if not rows:
        raise DraftsmithError(f"recipe {recipe.name}: no prompt is left; left out: {dict(sieve.left_out)}")
    write_rows(path, rows)
    _report(recipe, censuses, sieve.left_out, len(rows))
    stage.finish(
        prompts=len(rows),
        val=sum(row.split == "val" for row in rows),
        tokens=sum(len(row.tokens) for row in rows),
        left_out=dict(sorted(sieve.left_out.items())),
        sources={s.source: c.to_dict() for s, c in zip(recipe.sources, censuses, strict=True)},
        categories=dict(sorted(collections.Counter(row.category for row in rows).items())),
    )
    return stage


class _Sieve:
    """Tokenises prompts and lets through those that are new, short enough and not held out."""

    def __init__(self, tokenizer: Any, limit: int, held_out: set[str]) -> None:
        self.tokenizer, self.limit, self.held_out = tokenizer, limit, held_out
        self.seen: set[str] = set()
        self.left_out: collections.Counter[str] = collections.Counter()

    def tokens(self, prompt: Prompt) -> list[int] | None:
        key = duplicate_key(prompt.messages)
        if key in self.seen:
            self.left_out["duplicates"] += 1
            return None
        self.seen.add(key)
        if normalise(prompt.text) in self.held_out:
            self.left_out["in the held-out or tuning prompts"] += 1
            return None
        try:
            tokens = render_prompt(self.tokenizer, prompt.messages)
        except Malformed as reason:
            self.left_out[str(reason)] += 1
            return None
        if len(tokens) > self.limit:
            self.left_out[f"longer than {self.limit} tokens"] += 1
            return None
        return tokens


def _mix(
    recipe: Recipe, censuses: list[Census], cap: float, sift: Callable[[Prompt], list[int] | None]
) -> Iterator[tuple[Prompt, list[int]]]:
    """Take prompts from the sources in proportion to their weights, so that any first part has the same mixture."""
    opened = [
        _sifted(open_source(spec, recipe.seed, census, cap), sift)
        for spec, census in zip(recipe.sources, censuses, strict=True)
    ]
    taken = [0] * len(opened)
    active = list(range(len(opened)))

    def behind(i: int) -> float:
        return (taken[i] + 1) / recipe.sources[i].weight

    while active:
        i = min(active, key=behind)
        found = None if _full(recipe.sources[i], taken[i]) else next(opened[i], None)
        if found is None:
            active.remove(i)
            continue
        taken[i] += 1
        yield found
    # a source that its limit stopped never came to its own check
    for spec, census in zip(recipe.sources, censuses, strict=True):
        census.check(spec.source, cap)


def _sifted(
    prompts: Iterator[Prompt], sift: Callable[[Prompt], list[int] | None]
) -> Iterator[tuple[Prompt, list[int]]]:
    for prompt in prompts:
        tokens = sift(prompt)
        if tokens is not None:
            yield prompt, tokens


def _full(source: SourceSpec, taken: int) -> bool:
    return source.limit is not None and taken >= source.limit


def _report(recipe: Recipe, censuses: list[Census], left_out: collections.Counter[str], kept: int) -> None:
    for source, census in zip(recipe.sources, censuses, strict=True):
        for line in census.lines():
            say(f"prepare: {source.source}: malformed: {line}")
    for reason, count in left_out.most_common():
        say(f"prepare: left out {count}: {reason}")
    say(f"prepare: {kept:,} prompts")
