"""A look at a recipe's data before any work: what would become of its records, and how samples are rendered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..errors import DraftsmithError
from .candidates import Mixture
from .layout import PromptRow, TargetInfo
from .prepare import PrepareSettings, chunks, merged, record
from .recipe import Recipe
from .rows import Before, Counts, render

_KINDS = ("malformed", "left_out", "changed")
SUPERVISED, CONTEXT = "green", "dim"


@dataclass(frozen=True)
class Reader:
    """Who the data is for.

    Attributes:
        info: the target.
        tokenizer: its tokenizer.
    """

    info: TargetInfo
    tokenizer: Any


def report(recipe: Recipe, settings: PrepareSettings, reader: Reader) -> dict[str, Any]:
    """Read all of a recipe and count what would become of its records; nothing is written.

    Args:
        recipe: which sources; `recipe.recipe_of_source` makes one of a single source.
        settings: as the stage takes them.
        reader: whose chat template the conversations are rendered with.

    Returns:
        The counts as in the stage's manifest, and: recipe, stops (by source, what the stage would stop with: too much
        of it is malformed).

    Raises:
        DraftsmithError: a source can't be read at all.
    """
    mixture = Mixture(recipe, settings.answers)
    counts = Counts()
    for _, counted in _rendered(mixture, settings, reader):
        counts.merge(counted)
    censuses = merged(mixture, counts)
    stops = {}
    for name, census in censuses.items():
        try:
            census.check(mixture.specs[name].source, settings.malformed_cap)
        except DraftsmithError as error:
            stops[name] = str(error)
    return {"recipe": recipe.name, "stops": stops, **record(counts, censuses)}


def print_report(found: dict[str, Any], console: Console) -> None:
    """Print the table of a report: a line a source, below it one a reason, the commonest first."""
    table = Table("source", "records", "what became of them")
    table.add_column("for example", overflow="fold")
    for name, census in found["sources"].items():
        table.add_row(Text(name), f"{census['records']:,}", "read", census["revision"] or "")
        table.add_row("", f"{census['kept']:,}", "kept", "")
        for kind in _KINDS:
            for reason, tally in sorted(census[kind].items(), key=lambda item: (-item[1]["count"], item[0])):
                places = ", ".join(tally["examples"])
                table.add_row("", f"{tally['count']:,}", Text(f"{kind.replace('_', ' ')}: {reason}"), Text(places))
        table.add_section()
    console.print(table)
    for message in found["stops"].values():
        console.print(Text(f"The stage would stop: {message}"))
    if not found["stops"]:
        console.print("The stage would run through.")


def show(recipe: Recipe, settings: PrepareSettings, reader: Reader, count: int, console: Console) -> None:
    """Print the first `count` conversations as they are trained on: supervised tokens green, all others dim.

    Raises:
        DraftsmithError: no conversation can be rendered; the reasons are named.
    """
    mixture = Mixture(recipe, settings.answers)
    counts = Counts()
    rows: list[PromptRow] = []
    for made, counted in _rendered(mixture, settings, reader):
        counts.merge(counted)
        rows += made
        if len(rows) >= count:
            break
    if not rows:
        lines = [line for census in merged(mixture, counts).values() for line in census.lines()]
        raise DraftsmithError(f"{recipe.name}: no conversation can be shown: {'; '.join(lines)}")
    for number, row in enumerate(rows[:count], 1):
        console.print(sample(row, reader.tokenizer, f"{number} of {min(count, len(rows))}: {row.id}"))


def sample(row: PromptRow, tokenizer: Any, title: str) -> Group:
    """Return one conversation for the screen, a panel a document; of a prompt for the target the prompt."""
    panels = []
    for document in row.documents or [{"tokens": row.prompt, "spans": []}]:
        tokens, spans = document["tokens"], document["spans"]
        supervised = sum(end - start for start, end in spans)
        share = f"{supervised:,} of {len(tokens):,} tokens supervised ({supervised / max(len(tokens), 1):.0%})"
        what = share if row.documents else f"{len(tokens):,} tokens; the target answers"
        panels.append(Panel(coloured(tokens, spans, tokenizer), title=Text(title), subtitle=what))
    return Group(*panels)


def coloured(tokens: list[int], spans: list[list[int]], tokenizer: Any) -> Text:
    """Return the text of tokens, coloured by whether a span holds them."""
    edges = [0, *itertools.chain.from_iterable(spans), len(tokens)]
    # a piece alone may be decoded otherwise than within its text, so pieces are cut out of the whole
    places = [len(tokenizer.decode(tokens[:edge], skip_special_tokens=False)) for edge in edges]
    whole = tokenizer.decode(tokens, skip_special_tokens=False)
    text = Text()
    for number, (start, end) in enumerate(itertools.pairwise(places)):
        text.append(whole[start:end], style=SUPERVISED if number % 2 else CONTEXT)
    return text


def _rendered(mixture: Mixture, settings: PrepareSettings, reader: Reader) -> Iterator[tuple[list[PromptRow], Counts]]:
    """Rows and counts by chunk."""
    chat = settings.chat(reader.info, reader.tokenizer)
    before = Before()
    for chunk in chunks(mixture.candidates(mixture.commits(), cap=None), settings.chunk):
        rows, counts = render(chunk, chat, settings.limits(reader.info), before)
        before = Before(before.candidates + len(chunk), before.kept + len(rows))
        yield rows, counts
