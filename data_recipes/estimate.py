"""The data stages on paper: how many rows, how many bytes on the disk, how much memory they take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import DraftsmithError
from ..files import read_json
from ..heads.shapes import TargetShapes
from ..manifest import MANIFEST
from .layout import FEATURES, PROMPTS

TOKENS, ANSWER_SHARE = 1300, 0.7
"""Tokens of a conversation and the share that is answers, where nothing is known. EAGLE's published features of
ShareGPT, 740 GB for 68,000 conversations at 8 KiB a token, are 1,300 tokens each; the share is assumed."""
TOPK = 64
"""Tokens of the teacher that are stored where not all of its state is, and `collect.topk` says nothing else."""
_LINE = 24 + 64
"""Bytes of a document's line in a chunk's table, and about those of its id, split and source in the header."""


@dataclass(frozen=True)
class Corpus:
    """What is trained on.

    Attributes:
        documents, tokens, answer_tokens: sums.
        longest: tokens of the longest document; documents are cut to it in training.
        counted: where the numbers come from: a folder, or assumptions.
    """

    documents: int
    tokens: int
    answer_tokens: int
    longest: int
    counted: str

    @property
    def rows(self) -> int:
        """Rows of states: nothing reads those of a document's last token."""
        return self.tokens - self.documents

    @property
    def supervised(self) -> float:
        """Share of the tokens whose row is supervised at step 0: it reads and predicts an answer token."""
        return max(0.0, (self.answer_tokens - self.documents) / self.tokens)


def assumed_corpus(conversations: int, tokens: int, answer_share: float, longest: int) -> Corpus:
    """A corpus of which only means are known."""
    if not 0 < answer_share <= 1:
        raise DraftsmithError(f"answer_share = {answer_share} must be above 0 and at most 1")
    if conversations < 1 or tokens < 2:
        raise DraftsmithError(f"{conversations} conversations of {tokens} tokens are nothing to train on")
    total = conversations * tokens
    return Corpus(conversations, total, round(answer_share * total), longest, "given means")


def counted_corpus(data: Path, new_tokens: int, longest: int, most: int) -> Corpus:
    """Count a data folder: its features where they are collected, else its prompts, with answers of a given length.

    Args:
        new_tokens: of an answer that isn't there yet; longest: of a document, against the mean; most: its tokens.

    Raises:
        DraftsmithError: not even prompts are prepared there.
    """
    if (data / FEATURES / MANIFEST).exists():
        found = read_json(data / FEATURES / MANIFEST)["record"]
        counts, where = (found["documents"], found["tokens"], found["answer_tokens"]), str(data / FEATURES)
    elif (data / PROMPTS / MANIFEST).exists():
        found = read_json(data / PROMPTS / MANIFEST)["record"]
        if found["documents"]:  # the data's own answers are trained on
            counts, where = (found["documents"], found["tokens"], found["supervised_tokens"]), str(data / PROMPTS)
        else:
            answers = found["conversations"] * new_tokens
            counts = (found["conversations"], found["tokens"] + answers, answers)
            where = f"{data / PROMPTS}, answers of {new_tokens} tokens"
    else:
        raise DraftsmithError(f"{data} holds neither features nor prompts: run 'draftsmith prepare' first")
    return Corpus(*counts, min(most, longest * counts[1] // counts[0]), where)


# Bytes of a row's states by how they are stored: A aux states and the last one of H numbers each, or of the last one
# the K likeliest tokens, an id in int32 and a log-probability in fp16.
STORAGES = {
    "bf16": lambda aux, h, k: (aux + 1) * h * 2,
    "int8": lambda aux, h, k: (aux + 1) * (h + 2),  # one fp16 scale a state
    "bf16+topk": lambda aux, h, k: aux * h * 2 + k * 6,
    "int8+topk": lambda aux, h, k: aux * (h + 2) + k * 6,
    "online": lambda aux, h, k: 0,
}


def storage(dtype: str, teacher: str) -> str:
    """Name in `STORAGES` of what `collect.dtype` and `collect.teacher` ask for."""
    return dtype if teacher == "hidden" else f"{dtype}+topk"


def disk(corpus: Corpus, shapes: TargetShapes, aux: int, topk: int = TOPK) -> dict[str, dict[str, float]]:
    """Bytes of features by storage, see `features_bytes`; of shapes only the width of a state counts."""
    return features_bytes(corpus, shapes.hidden, aux, topk)


def features_bytes(corpus: Corpus, hidden: int, aux: int, topk: int) -> dict[str, dict[str, float]]:
    """Bytes of features by storage: `row` of states, and `all` with token ids, masks and headers.

    Args:
        hidden: width of a state; aux: stored aux layers; topk: stored tokens of the teacher.
    """
    fixed = 5 * corpus.tokens + _LINE * corpus.documents  # a token's id and its place in the mask
    found = {}
    for name, row in STORAGES.items():
        states = row(aux, hidden, topk)
        found[name] = {"row": float(states), "all": float(corpus.rows * states + (fixed if states else 0))}
    return found


def target_bytes(shapes: TargetShapes, size: int, packed: bool) -> float:
    """Bytes of the loaded target.

    Args:
        size: bytes of a number.
        packed: a CPU in fp32 packs its linear layers: what the plain ones freed stays with the process, and the output
            head is kept in both forms.
    """
    if not packed:
        return float(shapes.params * size)
    untied = 0 if shapes.tie_embeddings else shapes.embedding
    return float(size * (2 * shapes.linear + 2 * shapes.embedding + untied))


def regenerate_memory(
    shapes: TargetShapes, aux: int, size: int, *, slots: int, length: int, chunk_tokens: int
) -> dict[str, float]:
    """Bytes beside the target's while it answers and records its states.

    Args:
        aux: recorded aux layers; size: bytes of a number.
        slots: sequences at a time; length: cache rows of each; chunk_tokens: of a chunk's documents.

    Returns:
        `kv`: the arena; `logits`: of a step, with two fp32 copies; on the host `states`, recorded of running sequences,
        and `chunk`, those of finished ones.
    """
    state = (aux + 1) * shapes.hidden * 2.0
    return {
        "kv": float(slots * length * shapes.kv_bytes(size)),
        "logits": float(slots * shapes.vocab * (size + 2 * 4)),
        "states": slots * length * state,
        "chunk": chunk_tokens * state,
    }


def collect_memory(shapes: TargetShapes, aux: int, size: int, token_budget: int) -> dict[str, float]:
    """Bytes beside the target's while states are computed.

    Args:
        aux: stored aux layers; size: bytes of a number; token_budget: rows of a pass.

    Returns:
        `activations`: what one layer's forward holds, and captured states, once more joined; on the host `states`, as
        they are written.
    """
    wide = 2 * shapes.intermediate + (shapes.heads + 2 * shapes.kv_heads) * shapes.head_dim + 4 * shapes.hidden
    state = (aux + 1) * shapes.hidden
    return {
        "activations": float(token_budget * size * (wide + 2 * state)),
        "states": token_budget * state * 2.0,
    }
