"""Words of a text and hashes of all runs of n words: what duplicates and overlaps are found by."""

from __future__ import annotations

import functools
import re
import unicodedata
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_CHUNK = re.compile(rf"[{_IDEOGRAPHS}]|[^\s{_IDEOGRAPHS}]+")
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)


def split(text: str) -> list[str]:
    """Return what stands between spaces; of Chinese and Japanese, which write none, each character."""
    return text.split() if text.isascii() else _CHUNK.findall(text)


def words(text: str) -> list[str]:
    """Return the words and numbers of a text in lower case, without punctuation; ideographs one by one."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def mix(values: Hashes) -> Hashes:
    """Scatter 64-bit integers over 0..2^64, one to one (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def word_hashes(words: Sequence[str]) -> Hashes:
    """Return one hash a word, [n], the same in every run and on every machine."""
    return mix(np.fromiter(map(zlib.crc32, map(str.encode, words)), dtype=np.uint64, count=len(words)))


def window_hashes(hashes: Hashes, size: int) -> Hashes:
    """Return one hash for each run of `size` words.

    Args:
        hashes: of the words in their order, [n].
        size: words a run.

    Returns:
        [max(n - size + 1, 0)]: Σ_k h[i+k]·B^k mod 2^64, equal for equal runs wherever they stand.
    """
    n = len(hashes)
    if n < size:
        return hashes[:0]
    powers, inverses = _powers(1 << n.bit_length())
    sums = np.zeros(n + 1, dtype=np.uint64)
    np.cumsum(hashes * powers[:n], out=sums[1:])
    return (sums[size:] - sums[:-size]) * inverses[: n - size + 1]


@functools.cache
def _powers(n: int) -> tuple[Hashes, Hashes]:
    """B^0 … B^(n-1), and of its inverse, mod 2^64."""

    def of(base: int) -> Hashes:
        factors = np.full(n, base, dtype=np.uint64)
        factors[0] = 1
        return np.cumprod(factors)

    return of(_BASE), of(_INVERSE)
