"""What tests of plans share: heads with weights in shapes of their own, and what autograd keeps of their losses."""

from __future__ import annotations

import torch

from draftsmith.heads.base import Batch, DraftHead, TargetParts
from draftsmith.heads.config import default_layer_ids
from draftsmith.heads.costs import planned_head
from draftsmith.heads.named import head_names
from draftsmith.heads.shapes import TargetShapes
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train.settings import load_head_recipe

SMALL = TargetShapes("small", 96, 8, 6, 2, 16, 256, 512, False, 10000.0)
TRAINED = [name for name in head_names() if load_head_recipe(name).weights_of is None]


def meta_head(name: str, shapes: TargetShapes, draft_vocab: int) -> DraftHead:
    """The head of a file in configs/heads, without memory."""
    settings = load_head_recipe(name).head
    return planned_head(
        shapes,
        settings.family,
        layer_ids=default_layer_ids(shapes.layers),
        steps=settings.steps,
        draft_vocab_size=draft_vocab,
        options=settings.options,
    )


def real_head(name: str, shapes: TargetShapes, draft_vocab: int) -> DraftHead:
    """The same with weights, drawn small."""
    planned = meta_head(name, shapes, draft_vocab)
    head = type(planned)(planned.config, DraftVocab(torch.arange(draft_vocab), shapes.vocab))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in head.parameters():
            p.normal_(0.0, 0.02, generator=generator)
    return head


def batch(head: DraftHead, shapes: TargetShapes, documents: int, length: int, prompt: int) -> Batch:
    """Documents of equal length whose first `prompt` tokens are no answer."""
    total, aux = documents * length, len(head.config.layer_ids)
    generator = torch.Generator().manual_seed(1)
    position = torch.arange(length).repeat(documents)
    return Batch(
        tokens=torch.randint(head.config.draft_vocab_size, (total,), generator=generator),
        answer=position >= prompt,
        documents=torch.arange(documents).repeat_interleave(length),
        positions=position,
        features=torch.randn(total, aux * shapes.hidden, generator=generator),
        last=torch.randn(total, shapes.hidden, generator=generator),
    )


def parts(shapes: TargetShapes) -> TargetParts:
    """Random frozen parts of the target."""
    generator = torch.Generator().manual_seed(2)
    embed, lm_head = (torch.randn(shapes.vocab, shapes.hidden, generator=generator) for _ in range(2))
    return TargetParts(embed, lm_head, torch.ones(shapes.hidden), 1e-5)


def kept_bytes(head: DraftHead, data: Batch, target: TargetParts, dtype: torch.dtype) -> int:
    """Bytes of the tensors that autograd holds after the losses, each storage once, weights and inputs left out."""
    known = {x.untyped_storage().data_ptr() for x in [*head.parameters(), *head.buffers(), *vars(target).values(),
             *vars(data).values()] if isinstance(x, torch.Tensor)}  # fmt: skip
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known and storage.data_ptr() not in found:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(x)  # else a freed storage's address would be met again
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        if dtype == torch.float32:
            head.losses(data, target, scales=head.step_weights())
        else:
            with torch.autocast("cpu", dtype):
                head.losses(data.to("cpu", dtype), target.to("cpu", dtype), scales=head.step_weights())
    return sum(found.values())
