"""What the training benchmark trains: EAGLE-3 heads on documents of random states, with the trainer of `fit`."""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..data_recipes.packing import make_batch
from ..data_recipes.store import ChunkMeta, Document, FeatureStore, build_index, chunk_name, split_states, write_chunk
from ..eval.bench_data import DOCUMENT_TOKENS, SEED
from ..heads.base import Batch, TargetParts
from ..heads.eagle3 import Eagle3Head, eagle3_config
from ..heads.vocab import DraftVocab
from ..progress import Progress
from .fit import Trainer
from .ranks import Ranks
from .settings import TrainSettings

COVERAGE = 0.97
"""Share of the tokens that the draft vocabulary holds."""
_CHUNK, _VAL_EVERY = 128, 25
_STEPS = 1_000_000  # of a run that nobody takes to its end


def document_lengths(tokens: int) -> list[int]:
    """Lengths of two documents at least, the same in every run, that have `tokens` tokens or a few more together."""
    draw, total = random.Random(SEED), 0
    found: list[int] = []
    while total < tokens or len(found) < 2:
        found.append(draw.randint(*DOCUMENT_TOKENS))
        total += found[-1]
    return found


def write_store(folder: Path, tokens: int, meta: ChunkMeta, drawn: int) -> Path:
    """Make a feature store of random tokens and states; the first third of each document is its prompt.

    Args:
        folder: doesn't exist yet.
        tokens: of all documents, or a few more.
        meta: what is stored.
        drawn: token ids are drawn from the first so many.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True)
    lengths, names = document_lengths(tokens), []
    for start in range(0, len(lengths), _CHUNK):
        names.append(chunk_name(start // _CHUNK))
        numbers = range(start, min(start + _CHUNK, len(lengths)))
        made = [_document(number, lengths[number], meta, drawn) for number in numbers]
        write_chunk(folder / f"{names[-1]}.safetensors", made, meta)
    build_index(folder, names, meta.fingerprint, meta.layer_ids, "bench")
    return folder


def _document(number: int, length: int, meta: ChunkMeta, drawn: int) -> Document:
    generator = torch.Generator().manual_seed(SEED + number)
    tokens = torch.randint(drawn, (length,), generator=generator)
    states = torch.randn(length - 1, meta.layers * meta.hidden_size, generator=generator).bfloat16()
    answer = torch.arange(length) >= length // 3
    split = "train" if number % _VAL_EVERY else "val"
    return Document(f"bench-{number}", split, "bench", tokens, answer, *split_states(states, meta.hidden_size))


def make_head(config: Any, parts: TargetParts, draft_vocab: int, steps: int) -> Eagle3Head:
    """An untrained EAGLE-3 head whose draft vocabulary is the target's first tokens.

    Args:
        config: the target's transformers text config; of its vocabulary only `parts` counts.
        draft_vocab: Vd; steps: that are unrolled.
    """
    vocab = DraftVocab(torch.arange(draft_vocab), len(parts.lm_head))
    found = eagle3_config(
        config, vocab, target_id="bench", target_revision=None, target_fingerprint="bench",
        chat_template_sha256=None, trained_length=1, steps=steps,
    )  # fmt: skip
    head = Eagle3Head(found, vocab)
    head.initialise(parts, torch.Generator().manual_seed(SEED))
    return head


def store_meta(head: Eagle3Head) -> ChunkMeta:
    """What a store for this head holds."""
    c = head.config
    return ChunkMeta(c.target_fingerprint, tuple(c.layer_ids), c.hidden_size, c.vocab_size)


def drawn_ids(head: Eagle3Head) -> int:
    """From how many ids tokens are drawn, so that the draft vocabulary holds `COVERAGE` of them where that can be."""
    return min(head.config.vocab_size, round(head.config.draft_vocab_size / COVERAGE))


@contextlib.contextmanager
def open_trainer(head: Eagle3Head, parts: TargetParts, store: Path, ranks: Ranks, **train: Any) -> Iterator[Trainer]:
    """The trainer of `fit` before its first step; what it writes is gone afterwards. Collective.

    Args:
        train: settings of training; all others are those of a run.
    """
    alone = {"steps": _STEPS, "validate_documents": 1, "decode_documents": 0, "wandb": False}
    settings = TrainSettings.model_validate({**alone, **train})
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(settings, FeatureStore.open(store), parts, head, Path(folder), ranks)
        with contextlib.closing(trainer):
            trainer.state.total_steps = settings.steps
            yield trainer


def take_steps(trainer: Trainer, count: int = 1) -> int:
    """Take optimizer steps; returns the tokens that they saw, of all ranks."""
    before, bar = trainer.state.tokens, Progress("bench", None, "steps")
    for _ in range(count):
        trainer.train_step(bar)
    return trainer.state.tokens - before


def upcoming(trainer: Trainer, count: int) -> list[Batch]:
    """The next batches of a single rank, as its stream yields them."""
    position = (trainer.state.epoch, trainer.state.index)
    found = itertools.islice(trainer.plan.from_position(position), count)
    return [make_batch(trainer.store, documents, trainer.plan.max_length) for _, documents in found]


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
