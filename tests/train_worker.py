"""A tiny training run, for tests and as a process of its own that can be killed: `python train_worker.py '<json>'`.

The JSON is a list of runs that follow each other in that process; only the last one's result is printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch


def make_store(target: Any, folder: Path, documents: int = 20, new_tokens: int = 28, seed: int = 0) -> Path:
    """Fill a feature store with the target's own greedy answers; every fifth document is held out."""
    from draftsmith.data_recipes.store import ChunkMeta, Document, build_index, split_states, write_chunk
    from draftsmith.eval.decoder.drafters.plain import PlainDrafter
    from draftsmith.eval.decoder.loop import Request, decode
    from draftsmith.heads.base import Needs
    from draftsmith.heads.config import default_layer_ids

    layer_ids = tuple(default_layer_ids(target.n_layers))
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for i in range(documents):
        length = int(torch.randint(4, 9, (1,), generator=generator))
        tokens = torch.randint(3, target.vocab_size, (length,), generator=generator).tolist()
        requests.append(Request(f"doc-{i:03d}", tokens, new_tokens))
    drafter = PlainDrafter(record=Needs(layer_ids, last=True))
    results = sorted(decode(target, drafter, requests, slots=8, capacity=64), key=lambda r: r.id)
    rows = []
    for i, r in enumerate(results):
        assert r.states is not None
        tokens = torch.tensor(r.prompt + r.tokens)
        answer = torch.arange(len(tokens)) >= len(r.prompt)
        rows.append(Document(r.id, "val" if i % 5 == 4 else "train", "made", tokens, answer,
                             *split_states(r.states, target.hidden_size)))  # fmt: skip
    folder.mkdir(parents=True)
    meta = ChunkMeta(target.fingerprint, layer_ids, target.hidden_size, target.vocab_size)
    write_chunk(folder / "chunk-00000.safetensors", rows, meta)
    build_index(folder, ["chunk-00000"], target.fingerprint, layer_ids, "test")
    return folder


def recipe(head: dict[str, Any] | None = None, **train: Any) -> Any:
    """The EAGLE-3 recipe, small and in fp32."""
    from draftsmith.train.settings import load_head_recipe

    small = {"token_budget": 96, "dtype": "float32", "warmup": 2, "log_every": 2, "seed": 1, "validate_every": 4}
    overrides = {"head": {"steps": 3, "draft_vocab_size": 280}, "train": {**small, **train}}
    overrides["head"] |= head or {}
    return load_head_recipe("eagle3", overrides)


def make_fit(store: Path, target: Path, settings: Any) -> tuple[Any, ...]:
    """Return (train settings, store, parts, head): what `fit` takes."""
    from draftsmith.heads.registry import head_family
    from draftsmith.heads.target import load_parts
    from draftsmith.train.stage import prepare_head

    config, vocab, _, opened = prepare_head(settings, str(target), None, store)
    parts = load_parts(str(target), None, torch.float32)
    head = head_family(config.family).head(config, vocab)
    head.initialise(parts, torch.Generator().manual_seed(0))
    return settings.train, opened, parts, head


def run(store: Path, target: Path, out: Path, train: dict[str, Any]) -> dict[str, Any]:
    """Fit in this process."""
    from draftsmith.train.fit import fit

    return fit(*make_fit(store, target, recipe(**train)), out, resume_command="make train")


def _signal_at_step(step: int, number: int, rank: int = 0) -> None:
    from draftsmith.train.fit import Trainer

    original = Trainer.train_step

    def train_step(self: Any, bar: Any) -> None:
        if self.state.step + 1 == step and self.ranks.rank == rank:
            os.kill(os.getpid(), number)
        original(self, bar)

    Trainer.train_step = train_step  # type: ignore[method-assign]


def _kill_in_save(count: int) -> None:
    from draftsmith.train import checkpoint

    original, calls = checkpoint.save_head, [0]

    def save_head(head: Any, folder: Path) -> None:
        original(head, folder)
        if folder.name.startswith(".step"):
            calls[0] += 1
            if calls[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_head = save_head


def main() -> None:
    from draftsmith.train.ranks import process_group

    *before, job = json.loads(sys.argv[1])
    with process_group():
        for one in before:
            run(Path(one["store"]), Path(one["target"]), Path(one["out"]), one["train"])
        _last(job)


def _last(job: dict[str, Any]) -> None:
    if "terminate_at" in job:
        _signal_at_step(job["terminate_at"], job.get("signal", signal.SIGTERM))
    if "kill_in_save" in job:
        _kill_in_save(job["kill_in_save"])
    if "rank_one_dies_at" in job:
        _signal_at_step(job["rank_one_dies_at"], signal.SIGKILL, rank=1)
    result = run(Path(job["store"]), Path(job["target"]), Path(job["out"]), job["train"])
    print(json.dumps(result))
    raise SystemExit(0)


if __name__ == "__main__":
    main()
