"""Evaluation prompts are kept out of training: conversations that ask one, or hold a long piece of one, are found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import DraftsmithError
from .builtin import builtin_prompts
from .conversation import Conversation, Malformed
from .records import read_records, record_files
from .shapes import parse_record
from .shingles import window_hashes, word_hashes, words

LONGEST = 13
"""Words in a row that, shared with an evaluation prompt, are no coincidence (Brown et al. 2020, appendix C)."""
SHORTEST = 5
"""Prompts of fewer words are part of many texts: a conversation counts only if it opens with nothing else."""
_FILTER = 1 << 20


class EvaluationPrompts:
    """The prompts that heads are measured on.

    A conversation overlaps when its first user turn is such a prompt, when the user's words hold a whole prompt of 5 to
    12 words, or when they share 13 words in a row with a longer one. Case, punctuation and spacing don't count.

    Args:
        texts: the prompts.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._whole: set[str] = set()
        runs: dict[int, set[int]] = {}
        for text in texts:
            found = words(text)
            if len(found) < SHORTEST:
                self._whole.add(" ".join(found))
            else:
                size = min(len(found), LONGEST)
                runs.setdefault(size, set()).update(window_hashes(word_hashes(found), size).tolist())
        self._runs = {size: _Runs(runs[size]) for size in sorted(runs)}

    def reason(self, turns: Sequence[str]) -> str | None:
        """Say how the user's turns overlap, or return None."""
        asked = [words(turn) for turn in turns]
        if asked and len(asked[0]) < SHORTEST and " ".join(asked[0]) in self._whole:
            return "an evaluation prompt"
        hashes = word_hashes([word for turn in asked for word in turn])
        for size, runs in self._runs.items():
            if runs.hold(window_hashes(hashes, size)):
                return (
                    f"shares {LONGEST} words with an evaluation prompt" if size == LONGEST else "an evaluation prompt"
                )
        return None


class _Runs:
    """A set of hashes, with a table of bits in front that spares almost every look-up."""

    def __init__(self, hashes: set[int]) -> None:
        self._hashes = hashes
        self._bits = np.zeros(_FILTER, dtype=bool)
        self._bits[np.fromiter(hashes, dtype=np.uint64, count=len(hashes)) & np.uint64(_FILTER - 1)] = True

    def hold(self, hashes: npt.NDArray[np.uint64]) -> bool:
        maybe = hashes[self._bits[hashes & np.uint64(_FILTER - 1)]]
        return any(value in self._hashes for value in maybe.tolist())


def builtin_evaluation() -> list[str]:
    """The built-in prompts that heads are evaluated and tuned on."""
    return [prompt.text for split in ("heldout", "tuning") for prompt in builtin_prompts(split)]


def read_evaluation(path: Path) -> list[str]:
    """Read the first user turns of a file or folder of evaluation prompts; a later turn alone is no such prompt.

    Of a record without messages its text is the prompt. Prompts without a word are left aside.

    Raises:
        DraftsmithError: a record can't be read, or asks nothing: a prompt that is overlooked would be trained on.
    """
    texts = []
    for file in record_files(path):
        for where, record in read_records(file, str(file)):
            try:
                if isinstance(record, Malformed):
                    raise record
                asked = _asked(parse_record(record))
            except Malformed as reason:
                raise DraftsmithError(
                    f"{where}: {reason}: mend the evaluation prompts, or leave them out of keep_out"
                ) from reason
            if words(asked):
                texts.append(asked.encode(errors="replace").decode())  # halves of surrogate pairs
    return texts


def _asked(conversation: Conversation) -> str:
    if conversation.text is not None:
        return conversation.text
    for message in conversation.messages:
        if message["role"] == "user":
            return str(message["content"])
    raise Malformed("nothing is asked")
