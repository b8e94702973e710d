"""Commands that look and change nothing: what a source's records would become, and what a draft vocabulary covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from .data_recipes.recipe import Recipe, recipe_of_source
from .run_config import RunConfig
from .stages import Run, load_tokenizer_of, prepare_settings, recipe_of

VOCABULARY_SIZES = (2048, 4096, 8192, 16384, 32768, 65536)


def report(config: RunConfig, source: str | None) -> dict[str, Any]:
    """What would become of every record, by reason, with places; see data_recipes.review.report.

    Args:
        config: names the target whose chat template renders the conversations, and the recipe where `source` is None.
        source: one source instead of the recipe.
    """
    from .data_recipes import review

    run = Run(config, writes=False)
    return review.report(_recipe(config, source), prepare_settings(run), _reader(run))


def show(config: RunConfig, source: str | None, count: int, console: Console) -> None:
    """Print `count` conversations as they are trained on, what is learned in colour."""
    from .data_recipes import review

    run = Run(config, writes=False)
    review.show(_recipe(config, source), prepare_settings(run), _reader(run), count, console)


def vocabulary(config: RunConfig, size: int | None) -> dict[str, Any]:
    """What draft vocabularies of several sizes cover of the collected answers: in all, by source and by script.

    Args:
        size: of one vocabulary; None tries several, and says the head's own.
    """
    from .data_recipes.store import FeatureStore
    from .data_recipes.vocabulary import choose_vocab, coverage_table, end_tokens

    run = Run(config, writes=False)
    store = FeatureStore.open(run.features, run.info.fingerprint)
    own, tokenizer = config.head_options.vocab_size_for(store.vocab_size), load_tokenizer_of(run)
    sizes = [size] if size else sorted({*(n for n in VOCABULARY_SIZES if n < store.vocab_size), own})
    ends = end_tokens(run.info, tokenizer)
    tables = [coverage_table(store, choose_vocab(store, n, ends)[0], tokenizer) for n in sizes]
    return {"features": str(store.folder), "head": config.head, "size_of_head": own, "vocabularies": tables}


def verify(config: RunConfig) -> Path:
    """Read all collected features and compare their checksums; returns their folder.

    Raises:
        DraftsmithError: a file or document is damaged; it is named.
    """
    from .data_recipes.store import FeatureStore

    run = Run(config, writes=False)
    store = FeatureStore.open(run.features, run.info.fingerprint)
    store.verify()
    return store.folder


def _recipe(config: RunConfig, source: str | None) -> Recipe:
    return recipe_of(config) if source is None else recipe_of_source(source)


def _reader(run: Run) -> Any:
    from .data_recipes.review import Reader

    return Reader(run.info, load_tokenizer_of(run))
