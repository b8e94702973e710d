"""Tokens/s where more is stored, and where two processes share the work of one."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import DraftsmithError
from ..files import read_json, write_json
from ..heads.base import Batch, TargetParts
from ..heads.checkpoint import load_head, save_head
from ..heads.eagle3 import Eagle3Head
from ..heads.shapes import TargetShapes
from ..heads.target import load_parts
from ..progress import progress_bar
from .bench_work import SEED, drawn_ids, make_head, open_trainer, store_meta, take_steps, timed, upcoming, write_store
from .fit import Trainer
from .launch import torchrun_command, torchrun_environment
from .ranks import Ranks, process_group

Rates = dict[str, list[float]]
PROCESSES = 2


def tokens_by_store(
    ranks: Ranks, hidden: int, sizes: Sequence[int], rounds: int, steps: int, **train: Any
) -> dict[str, Any]:
    """Tokens/s of training on the largest store over those on the smallest, by round, in turns in one process.

    The head is as narrow as the states: little of a step is arithmetic. Stores were just written: the system has them
    in memory.

    Args:
        hidden: width of the states; sizes: tokens of each store; rounds: behind one that isn't counted, each of `steps`
            steps on every store.
        train: settings of training.

    Returns:
        median, low, high; tokens_per_s: medians by the store's tokens; read_tokens_per_s: of reading and packing alone.
    """
    shapes = TargetShapes("narrow", hidden, 8, 2, 1, hidden // 2, 2 * hidden, 512, True, 10000.0)
    rows = torch.randn(shapes.vocab, hidden, generator=torch.Generator().manual_seed(SEED))
    parts = TargetParts(rows, rows, torch.ones(hidden), 1e-5)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainers = {}
        for size in sizes:
            head = make_head(shapes.config(), parts, shapes.vocab // 2, 2)
            store = write_store(folder / str(size), size, store_meta(head), drawn_ids(head))
            trainers[str(size)] = stack.enter_context(open_trainer(head, parts, store, ranks, **train))

        def rate(name: str) -> float:
            tokens: list[int] = []
            seconds = timed(lambda: tokens.append(take_steps(trainers[name], steps)))
            return tokens[0] / seconds

        rates = _in_turns("bench stores", {name: functools.partial(rate, name) for name in trainers}, rounds)
        read = {name: _read_rate(trainer, steps) for name, trainer in trainers.items()}
    return {**_shares(rates, str(max(sizes)), str(min(sizes))), "read_tokens_per_s": read}


def _read_rate(trainer: Trainer, count: int) -> float:
    batches: list[Batch] = []
    seconds = timed(lambda: batches.extend(upcoming(trainer, count)))
    return sum(len(batch.tokens) for batch in batches) / seconds


def two_processes(
    head: Eagle3Head, location: str, revision: str | None, rounds: int, steps: int, tokens: int, **train: Any
) -> dict[str, Any]:
    """Tokens/s of two processes over those of one on as many cores, which takes the same batches by accumulation.

    Args:
        head: of the target at `location`, `revision`.
        rounds: of one run each; steps: of the optimizer, behind one that isn't counted; tokens: of the store.
        train: settings of training.

    Returns:
        median, low, high; tokens_per_s: medians by processes; threads: of each process.

    Raises:
        DraftsmithError: a process ended with an error.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {processes: max(1, cores // processes) for processes in (1, PROCESSES)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "head").mkdir()
        save_head(head, folder / "head")
        write_store(folder / "store", tokens, store_meta(head), drawn_ids(head))
        job = {"location": location, "revision": revision, "folder": name, "steps": steps}

        def rate(processes: int) -> float:
            own = {**train, "accumulation": PROCESSES // processes}
            _run({**job, "train": own}, processes, threads[processes])
            found = read_json(folder / "found.json")
            return float(found["tokens"] / found["seconds"])

        works = {str(processes): functools.partial(rate, processes) for processes in threads}
        rates = _in_turns("bench processes", works, rounds, warm_up=False)
    return {**_shares(rates, str(PROCESSES), "1"), "threads": {str(p): n for p, n in threads.items()}}


def _run(job: dict[str, Any], processes: int, threads: int) -> None:
    """Start `main` in so many processes, as a run starts its own: one alone without a launcher."""
    module, argument = f"{__package__}.bench_feed", json.dumps(job)
    command = [sys.executable, "-m", module, argument]
    if processes > 1:
        command = torchrun_command(module, [argument], processes=processes)
    environment = {**torchrun_environment(processes), "OMP_NUM_THREADS": str(threads)}
    status = subprocess.run(command, env=environment, check=False).returncode
    if status:
        raise DraftsmithError(f"the run of {processes} process(es) ended with status {status}: what it said is above")


def main() -> None:
    """One process of `two_processes`; the first writes the tokens of all and the seconds that they took."""
    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    head = load_head(folder / "head")
    assert isinstance(head, Eagle3Head)
    parts = load_parts(job["location"], job["revision"], torch.float32)
    with process_group() as ranks, open_trainer(head, parts, folder / "store", ranks, **job["train"]) as trainer:
        take_steps(trainer)
        ranks.barrier()
        started = time.perf_counter()
        tokens = take_steps(trainer, job["steps"])
        seconds = time.perf_counter() - started
        if ranks.is_main:
            write_json(folder / "found.json", {"tokens": tokens, "seconds": seconds})
        ranks.barrier()


def _in_turns(name: str, works: Mapping[str, Callable[[], float]], rounds: int, warm_up: bool = True) -> Rates:
    """What each work returns, by round; the order is turned round from round to round."""
    found: Rates = {work: [] for work in works}
    with progress_bar(name, len(works) * (rounds + warm_up), "runs") as bar:
        for number in range(rounds + warm_up):
            for work in list(works)[:: 1 if number % 2 else -1]:
                value = works[work]()
                if number or not warm_up:
                    found[work].append(value)
                bar.advance()
    return found


def _shares(rates: Rates, ours: str, theirs: str) -> dict[str, Any]:
    shares = [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "median": statistics.median(shares), "low": min(shares), "high": max(shares), "tokens_per_s": medians,
    }  # fmt: skip


if __name__ == "__main__":
    main()
