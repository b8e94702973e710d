"""The benchmark of training: EAGLE-3 for a target on a CPU, with the trainer of a run, on random states."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import DraftsmithError
from ..eval.bench import Bench
from ..eval.bench_data import Aim
from ..heads.base import TargetParts
from ..heads.target import Target
from ..progress import progress_bar
from .bench_feed import tokens_by_store, two_processes
from .bench_memory import activation_peak, live_bytes_ratio
from .bench_roofline import roofline_share
from .bench_work import drawn_ids, make_head, open_trainer, store_meta, write_store
from .ranks import Ranks, process_group

AIMS = {
    "roofline_share": Aim(">=", 0.6),
    "live_bytes_ratio": Aim("<=", 1.2),
    "activations_by_vocabulary": Aim("<=", 1.1),
    "tokens_by_store": Aim(">=", 0.85),
    "two_processes": Aim(">=", 0.85),
}
_STORED_BATCHES = 16


@dataclass(frozen=True)
class TrainBenchSettings:
    """What is trained, and how much of it.

    Attributes:
        unrolled: steps of the head; draft_vocab: its vocabulary, or all of the target's where that is smaller.
        token_budget: tokens of a batch.
        rounds: of one optimizer step against its products; profiled: steps behind them.
        vocabularies: of target and draft, whose activations are compared.
        stored_tokens: of the stores that are compared, with states of `store_hidden` numbers; store_rounds, of
            store_steps steps each.
        process_rounds: runs of one and of two processes, of process_steps steps each.
    """

    unrolled: int = 5
    draft_vocab: int = 8192
    token_budget: int = 1024
    rounds: int = 9
    profiled: int = 3
    vocabularies: tuple[int, ...] = (8192, 32768, 131072)
    stored_tokens: tuple[int, ...] = (10_000, 1_000_000)
    store_hidden: int = 32
    store_rounds: int = 5
    store_steps: int = 50
    process_rounds: int = 3
    process_steps: int = 6

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            for one in value if isinstance(value, tuple) else [value]:
                least = 4 if name == "store_hidden" else 8 if name == "token_budget" else 1
                if one < least:
                    raise DraftsmithError(f"bench.{name} = {value} must be at least {least}")
        if self.store_hidden % 4:
            raise DraftsmithError(f"bench.store_hidden = {self.store_hidden} must be a multiple of 4: two heads rotate")


def bench_train(target: Target, settings: TrainBenchSettings) -> dict[str, Any]:
    """Measure training steps of an EAGLE-3 head with its default settings, in the target's dtype.

    - roofline_share: tokens/s over those at which the network's and the losses' matrix products alone run; `where` has
      the parts of a step.
    - live_bytes_ratio: bytes of live tensors at the peak over what a plan adds up.
    - activations_by_vocabulary: activations at the peak with the largest over those with the smallest, where target and
      draft have as many tokens.
    - tokens_by_store: tokens/s with many stored tokens over those with few.
    - two_processes: tokens/s over those of one process on the same cores.

    Returns:
        Figures as {median, low, high} with "aim" and whether the median has "met" it, and what that spread is of.

    Raises:
        DraftsmithError: the target isn't on a CPU, or heads can't be trained for it.
    """
    if target.device.type != "cpu":
        raise DraftsmithError(
            f"bench train is for CPUs, the target is on {target.device}: hide the GPUs with CUDA_VISIBLE_DEVICES=''"
        )
    parts = target.parts()
    head = make_head(target.config, parts, min(settings.draft_vocab, target.vocab_size), settings.unrolled)
    train = {"token_budget": settings.token_budget, "dtype": str(target.dtype).removeprefix("torch.")}
    tokens = settings.token_budget * _STORED_BATCHES
    processes = two_processes(
        head, target.id, target.revision, settings.process_rounds, settings.process_steps, tokens, **train
    )
    figures: dict[str, dict[str, Any]] = {}
    with process_group() as ranks, tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder) / "store", tokens, store_meta(head), drawn_ids(head))
        with open_trainer(head, parts, store, ranks, **train) as trainer:
            figures["roofline_share"] = roofline_share(trainer, settings.rounds, settings.profiled)
            figures["live_bytes_ratio"] = live_bytes_ratio(trainer)
        del head, trainer
        figures["activations_by_vocabulary"] = _by_vocabulary(target, parts, settings, ranks, train)
        figures["tokens_by_store"] = tokens_by_store(
            ranks, settings.store_hidden, settings.stored_tokens, settings.store_rounds, settings.store_steps, **train
        )
    figures["two_processes"] = processes
    return {
        "figures": {name: {**figure, **_judged(name, figure["median"])} for name, figure in figures.items()},
        "spread": "median, least, most of rounds; bytes are counted once",
    }


def _by_vocabulary(
    target: Target, parts: TargetParts, settings: TrainBenchSettings, ranks: Ranks, train: dict[str, Any]
) -> dict[str, Any]:
    """Activations at the peak of one step with each vocabulary, on the same tokens."""
    found: dict[str, int] = {}
    sizes = sorted(settings.vocabularies)
    with progress_bar("bench vocabularies", len(sizes), "vocabularies") as bar:
        for size in sizes:
            rows = parts.lm_head[torch.arange(size) % len(parts.lm_head)]
            other = dataclasses.replace(parts, embed=rows, lm_head=rows)
            head = make_head(target.config, other, size, settings.unrolled)
            with tempfile.TemporaryDirectory() as folder:
                tokens = 2 * settings.token_budget
                store = write_store(Path(folder) / "store", tokens, store_meta(head), sizes[0])
                with open_trainer(head, other, store, ranks, **train) as trainer:
                    found[str(size)] = activation_peak(trainer)
            bar.advance()
    ratio = max(found.values()) / min(found.values())
    return {"median": ratio, "low": ratio, "high": ratio, "bytes": found}


def _judged(name: str, median: float) -> dict[str, Any]:
    aim = AIMS[name]
    met = median >= aim.bound if aim.sign == ">=" else median <= aim.bound
    return {"aim": f"{aim.sign} {aim.bound:g}", "met": met}


TRAIN_BENCH = Bench(TrainBenchSettings, bench_train)
