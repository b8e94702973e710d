"""The draft vocabulary of a feature store, and how much of the answers it covers: by source, and by script.

Both take seconds: counts of all labels were made when the store was collected, and no document is read.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..heads.vocab import DraftVocab, build_vocab, coverage
from .layout import TargetInfo
from .store import FeatureStore

_SCRIPTS = {
    name: name.title()
    for name in (
        "LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "HEBREW", "ARABIC", "DEVANAGARI", "BENGALI", "GURMUKHI", "GUJARATI",
        "TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "SINHALA", "THAI", "LAO", "TIBETAN", "MYANMAR", "GEORGIAN",
        "ETHIOPIC", "KHMER", "HANGUL", "HIRAGANA", "KATAKANA",
    )
} | {"CJK": "Han", "IDEOGRAPHIC": "Han"}  # fmt: skip
"""Script of a letter by the word with which its Unicode name begins."""
_KINDS = (("N", "digits"), ("PS", "punctuation and symbols"), ("ZC", "white space and control"))
"""Groups of tokens without a letter, by their characters' general categories; the first that fits."""


def choose_vocab(store: FeatureStore, size: int, always: Sequence[int]) -> tuple[DraftVocab, float]:
    """Choose the `size` tokens that are most often the label of a supervised training row.

    Args:
        store: the collected documents.
        size: draft vocabulary size; clipped to the target's.
        always: ids that are in whatever their count: `end_tokens`.

    Returns:
        The vocabulary and its coverage of the counted labels, 0..1.
    """
    return build_vocab(store.label_counts("train").sum(0), size, list(always))


def end_tokens(info: TargetInfo, tokenizer: Any) -> list[int]:
    """Tokens that end an answer, by the tokenizer, the model's config or its generation config.

    They are in every draft vocabulary: a head must be able to propose the end.
    """
    return sorted({*info.stop_ids, tokenizer.eos_token_id} - {None})


def coverage_table(store: FeatureStore, vocab: DraftVocab, tokenizer: Any) -> dict[str, Any]:
    """How much of the labels of supervised training rows a vocabulary covers.

    Args:
        tokenizer: the target's: it gives the tokens' texts.

    Returns:
        size and vocab_size; overall; by_source and by_script, each {name: figures}, the most frequent first. Figures
        are labels (counted), tokens (distinct ones among them), and coverage (share of the labels, 0..1).
    """
    counts = store.label_counts("train")
    total = counts.sum(0)
    seen = total.nonzero().flatten().tolist()
    by_script: dict[str, Tensor] = {}
    for token, name in zip(seen, token_scripts(tokenizer, seen), strict=True):
        by_script.setdefault(name, torch.zeros_like(total))[token] = total[token]
    by_source = dict(zip(store.sources, counts, strict=True))
    return {
        "size": len(vocab),
        "vocab_size": vocab.vocab_size,
        "overall": _figures(total, vocab),
        **{
            key: {name: _figures(x, vocab) for name, x in sorted(groups.items(), key=lambda g: -int(g[1].sum()))}
            for key, groups in (("by_source", by_source), ("by_script", by_script))
        },
    }


def coverage_lines(table: dict[str, Any]) -> list[str]:
    """What `coverage_table` found, as lines of text."""
    lines = [f"draft vocabulary: {table['size']:,} of {table['vocab_size']:,} tokens"]
    groups = {"": {"all": table["overall"]}, "source": table["by_source"], "script": table["by_script"]}
    for group, rows in groups.items():
        for name, found in rows.items():
            share = f"{found['coverage']:>8.2%} of {found['labels']:>12,} labels, {found['tokens']:>7,} tokens"
            lines.append(f"  {f'{group} {name}'.strip():<34} {share}")
    return lines


def token_scripts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The script of each token's text.

    A script's name, that of the first letter; of tokens without letters "digits", "punctuation and symbols" or "white
    space and control"; "bytes" where a token is no whole character; "special"; "other" for scripts that are not told
    apart.
    """
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    texts = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    return ["special" if i in special else script(text) for i, text in zip(ids, texts, strict=True)]


def script(text: str) -> str:
    """The script of a token's text; see `token_scripts`."""
    if "\N{REPLACEMENT CHARACTER}" in text:
        return "bytes"
    letter = next((c for c in text if c.isalpha()), None)
    if letter is not None:
        # full-width and half-width forms are named by those words first
        words = [w for w in unicodedata.name(letter, "").replace("-", " ").split() if not w.endswith("WIDTH")]
        return _SCRIPTS.get(words[0], "other") if words else "other"
    categories = {unicodedata.category(c)[0] for c in text}
    return next((name for letters, name in _KINDS if categories & set(letters)), "other")


def _figures(counts: Tensor, vocab: DraftVocab) -> dict[str, Any]:
    return {
        "labels": int(counts.sum()),
        "tokens": int((counts > 0).sum()),
        "coverage": float(coverage(counts, vocab)),
    }
