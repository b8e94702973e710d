"""Conversations that ask what an earlier one asked: the same, or nearly so; found in a stream, in little memory."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from .conversation import duplicate_key
from .shingles import Hashes, mix, split, window_hashes, word_hashes

SHINGLE = 5
"""Words of a shingle; a text of fewer is one shingle."""
PERMUTATIONS = 128
"""Minima of a signature: its estimate of a Jaccard similarity of 0.8 is off by 0.035 (one standard deviation)."""
_RECALL = 0.99
_SHINGLES_AT_ONCE = 1024
_COLUMNS = 8
_SIGNATURES = 1 << 14


class Duplicates:
    """What was asked so far. About 0.5 KB a conversation with near-duplicates, 0.1 KB without.

    Args:
        near: Jaccard similarity of the sets of 5-word shingles, 0..1, from which on a text counts as a duplicate of an
            earlier one; None finds equal texts only.
    """

    def __init__(self, near: float | None) -> None:
        self._seen: set[int] = set()
        self._near = NearDuplicates(near) if near is not None else None

    def reason(self, text: str) -> str | None:
        """Say why `text` is a duplicate, or note it and return None.

        Texts are equal when they differ in case, spacing or Unicode form only.
        """
        key = duplicate_key(text)
        digest = int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
        if digest in self._seen:
            return "duplicate"
        self._seen.add(digest)
        if self._near is not None and self._near.seen(shingles(key)):
            return "near-duplicate"
        return None


def shingles(key: str) -> Hashes:
    """Return hashes of all runs of five words of a text, or one of the whole text where it is shorter."""
    hashes = word_hashes(split(key))
    return window_hashes(hashes, min(SHINGLE, max(len(hashes), 1)))


class NearDuplicates:
    """Signatures of sets, and an index that finds those which are similar to a new one.

    MinHash (Broder 1997): with random permutations of the hashes, the share of permutations under which two sets have
    the same minimum estimates |A ∩ B| / |A ∪ B|. The index is banded (locality-sensitive hashing): sets that agree in
    all rows of a band meet in a bucket, and then the whole signatures, one byte a minimum, are compared.

    A bucket that is full takes no more: the pair has as many further chances as there are bands.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.rows = max(r for r in range(1, PERMUTATIONS + 1) if r == 1 or _found(threshold, r) >= _RECALL)
        self.bands = PERMUTATIONS // self.rows
        numbers = np.arange(1, PERMUTATIONS + 1, dtype=np.uint64)
        self._factors = mix(numbers)[:, None] | np.uint64(1)
        self._weights = mix(numbers + np.uint64(PERMUTATIONS)) | np.uint64(1)
        self._tags = np.zeros((1 << 10, _COLUMNS), dtype=np.uint32)
        self._owners = np.full((1 << 10, _COLUMNS), -1, dtype=np.int32)
        self._signatures: list[npt.NDArray[np.uint8]] = []
        self._count = 0

    def seen(self, hashes: Hashes) -> bool:
        """Whether a set is similar to one that came before; if not, it is noted. An empty set is similar to none.

        Args:
            hashes: of the set's members, [n], repetitions allowed.
        """
        if not len(hashes):
            return False
        tags, signature = self._signature(hashes)
        buckets = tags & np.uint32(len(self._tags) - 1)
        owners = self._owners[buckets]
        similar = owners[(self._tags[buckets] == tags[:, None]) & (owners >= 0)]
        if any(self._similarity(signature, owner) >= self.threshold for owner in set(similar.tolist())):
            return True
        self._add(signature, tags, buckets, owners)
        return False

    def _signature(self, hashes: Hashes) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """A tag for each band, [bands], and a byte for each minimum, [PERMUTATIONS]."""
        minima = mix(self._minima(hashes))
        used = self.bands * self.rows
        folded = (minima[:used] * self._weights[:used]).reshape(self.bands, self.rows).sum(axis=1)
        return (mix(folded) >> np.uint64(32)).astype(np.uint32), (minima >> np.uint64(56)).astype(np.uint8)

    def _minima(self, hashes: Hashes) -> Hashes:
        """[PERMUTATIONS]; a permutation is a multiplication by an odd number mod 2^64, of what `mix` has scattered."""
        scattered = mix(hashes)
        parts = [
            (self._factors * scattered[at : at + _SHINGLES_AT_ONCE]).min(axis=1)
            for at in range(0, len(scattered), _SHINGLES_AT_ONCE)
        ]
        return np.min(parts, axis=0)

    def _similarity(self, signature: npt.NDArray[np.uint8], owner: int) -> float:
        block, row = divmod(owner, _SIGNATURES)
        equal = float(np.count_nonzero(self._signatures[block][row] == signature)) / PERMUTATIONS
        return (equal - 1 / 256) / (1 - 1 / 256)  # bytes of unequal minima are equal by chance

    def _add(
        self,
        signature: npt.NDArray[np.uint8],
        tags: npt.NDArray[np.uint32],
        buckets: npt.NDArray[np.uint32],
        owners: npt.NDArray[np.int32],
    ) -> None:
        if self._count % _SIGNATURES == 0:
            self._signatures.append(np.empty((_SIGNATURES, PERMUTATIONS), dtype=np.uint8))
        self._signatures[-1][self._count % _SIGNATURES] = signature
        columns = (owners < 0).argmax(axis=1)
        free = owners[np.arange(len(owners)), columns] < 0
        self._tags[buckets[free], columns[free]] = tags[free]
        self._owners[buckets[free], columns[free]] = self._count
        self._count += 1
        if 4 * self.bands * self._count > 3 * self._tags.size:
            self._grow()

    def _grow(self) -> None:
        """Twice as many buckets: the next bit of an entry's tag says which half it goes to; its column stays."""
        upper = (self._tags & np.uint32(len(self._tags))) != 0
        self._tags = np.concatenate([self._tags, self._tags])
        self._owners = np.concatenate(
            [np.where(upper, np.int32(-1), self._owners), np.where(upper, self._owners, np.int32(-1))]
        )


def _found(similarity: float, rows: int) -> float:
    """Chance that two sets of this similarity meet in at least one band of so many rows."""
    return float(1 - (1 - similarity**rows) ** (PERMUTATIONS // rows))
