"""Heads with random weights in runs' folders, and what they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from test_adapter import make_adapter, moved
from torch import Tensor
from warm_checks import Place, make_head

from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.network import prepare_head
from draftsmith.eval.decoder.loop import Request, StepLog, decode, rows_needed
from draftsmith.eval.decoder.search import parse_shape
from draftsmith.heads.base import DraftHead, TargetParts
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.medusa2 import Medusa2Head, medusa2_config

TREE = f"static:{','.join(map(str, range(80)))},0.0,0.1,1.0"
"""Half the draft vocabulary wide, so that some drafts of a random head are right."""


def random_head(target: Any, family: str, full: bool = False, **values: Any) -> Any:
    """A head of the tiny target; its shapes are not the target's, its vocabulary is every other token."""
    return make_head(Place(Path(), target, None, Path()), family, full, **values)


def make_run(runs: Path, head: DraftHead, name: str) -> Path:
    """runs/tiny/<name> with the head as its best checkpoint; returns the run's folder."""
    folder = runs / "tiny" / name
    best = folder / "train" / "checkpoints" / "best"
    best.mkdir(parents=True)
    save_head(head, best)
    return folder


def make_tuned_run(runs: Path, folder: Path, target: Any) -> tuple[Path, Medusa2Head]:
    """runs/tiny/medusa2 with a Medusa-2 head and the adapter that moves its target, whose folder is given."""
    plain = random_head(target, "medusa")
    run = make_run(runs, plain, "medusa2")
    best = run / "train" / "checkpoints" / "best"
    sha = moved(make_adapter(folder)).save(best / "adapter")
    same = {k: v for k, v in plain.config.to_dict().items() if k in ("steps", "blocks") or k.startswith("target_")}
    values = {**same, "chat_template_sha256": target.template_sha256, "trained_length": 64, "adapter_sha256": sha}
    del values["target_layers"]
    head = Medusa2Head(medusa2_config(target.config, plain.vocab, lora_rank=4, lora_alpha=8, **values), plain.vocab)
    head.load_state_dict(plain.state_dict())
    save_head(head, best)
    return run, head


@torch.no_grad()
def drafts(head: DraftHead, parts: TargetParts) -> list[Tensor]:
    """Logits behind five rows and behind one drafted after them, in the parts' dtype, from the same random states."""
    ready = prepare_head(head, parts)
    dtype, g = parts.embed.dtype, torch.Generator().manual_seed(11)
    h = head.config.hidden_size

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    embeds, aux, last = randn(1, 5, h), randn(1, 5, len(head.config.layer_ids) * h), randn(1, 5, h)
    cache = ready.new_cache(1, 8, torch.device("cpu"), dtype)
    hidden = ready.inputs(aux, last if head.needs.last else None, parts)
    first, state = ready.forward_step(cache, embeds, hidden, torch.arange(5)[None], torch.tensor([5]))
    second, _ = ready.forward_step(cache, randn(1, 1, h), state, torch.tensor([[5]]), None, step=1)
    return [first, second]


def accepted(target: Any, head: DraftHead, shape: str = TREE) -> list[tuple[list[int], list[StepLog]]]:
    """Tokens and steps of three answers."""
    drafter = make_drafter(head, target.parts(), parse_shape(shape))
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, target.vocab_size, (8,), generator=g).tolist() for _ in range(3)]
    requests = [Request(str(i), prompt, 14) for i, prompt in enumerate(prompts)]
    found = decode(target, drafter, requests, slots=3, capacity=rows_needed(requests, drafter))
    return [(r.tokens, r.steps) for r in sorted(found, key=lambda r: r.id)]
