"""The ways to decode that are compared: plain decoding, what needs no training, trained heads, unions of two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..heads import adapter
from ..heads.base import DraftHead
from ..heads.checkpoint import load_head
from ..heads.target import Target
from ..progress import say
from .decoder.drafters import make_drafter
from .decoder.drafters.plain import PlainDrafter
from .decoder.drafters.prompt_lookup import PromptLookupDrafter
from .decoder.drafters.union import UnionDrafter
from .decoder.types import Drafter
from .schemes import DEFAULT_TREE, SCHEMES, SchemeOptions, build_drafter, default_tree, read_tree
from .trained import Trained
from .tune import PLAIN

SHOWN_DEPTHS = 4
"""Depths of acceptance that are shown."""
JOINED = "lookahead"
"""The scheme without training that Prompt Lookup joins, too, where that is asked for."""


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        target: the model, or the model as it was tuned with a head.
        baseline: name of plain decoding of that very target.
        tree: text of the trees, where they can be chosen.
        facts: what the result says of it before anything is measured.
    """

    name: str
    target: Target
    drafter: Drafter
    baseline: str
    tree: str | None
    facts: dict[str, Any]

    def joined(self) -> Way:
        """This way with what Prompt Lookup finds in its trees; the two take turns, so they may share a drafter."""
        union = UnionDrafter(self.drafter, PromptLookupDrafter())
        return dataclasses.replace(self, name=f"{self.name} + prompt-lookup", drafter=union)


def ways_of(
    target: Target,
    heads: Sequence[Trained],
    tuned: Callable[[Path], Target],
    draft_model: str | None = None,
    with_prompt_lookup: bool = False,
) -> list[Way]:
    """Plain decoding first, then what needs no training, then heads; a tuned target brings its own plain decoding.

    Args:
        tuned: loads the target with an adapter's folder merged in.
        draft_model: also draft with this small model.
        with_prompt_lookup: join looked-up drafts to the trees of the fastest head, and of `JOINED`. A union adds one
            chain to a tree, so Lookahead, which drafts several, can only be the tree that is added to.

    Raises:
        DraftsmithError: a head or draft model that doesn't fit the target.
    """
    ways = [Way(PLAIN, target, PlainDrafter(), PLAIN, None, {"kind": PLAIN})]
    for name, scheme in SCHEMES.items():
        options = SchemeOptions(draft_model=draft_model if scheme.needs == "draft_model" else None)
        if name != PLAIN and (scheme.needs is None or scheme.needs in options.given()):
            tree = DEFAULT_TREE if "tree" in scheme.takes else None
            ways.append(Way(name, target, build_drafter(name, target, options), PLAIN, tree, {"kind": "training-free"}))
            ways += [ways[-1].joined()] if with_prompt_lookup and name == JOINED else []
    first = fastest(heads)
    for trained in heads:
        own, baseline = target, PLAIN
        if trained.adapter is not None:
            own, baseline = tuned(trained.adapter), f"plain ({trained.name})"
            ways.append(Way(baseline, own, PlainDrafter(), baseline, None, {"kind": PLAIN}))
        ways.append(_with_head(trained, own, baseline))
        ways += [ways[-1].joined()] if with_prompt_lookup and trained is first else []
    return ways


def fastest(heads: Sequence[Trained]) -> Trained | None:
    """The head with the largest speed-up in its report; None without any head."""
    return max(heads, key=lambda head: head.report.get("summary", {}).get("speedup") or 0.0, default=None)


def training_of(head: Trained) -> dict[str, Any]:
    """What is said of a head's training; minutes are None while it is not finished."""
    record = head.record or {}
    return {
        "train_minutes": record["train_seconds"] / 60 if "train_seconds" in record else None,
        "drift": record.get("drift"),
    }


def _with_head(trained: Trained, target: Target, baseline: str) -> Way:
    head = load_head(trained.checkpoint)
    target.check_head(head.config)
    tree = trained.tree or default_tree(head.most_depth)
    for remark in trained.remarks():
        say(f"{trained.name} {remark}: it is compared as it is, with {tree}")
    drafter = make_drafter(head, target.parts(), read_tree(tree, trained.checkpoint))
    facts = {
        "kind": "head",
        "family": head.config.family,
        "parameters": _parameters(head, trained.adapter),
        **training_of(trained),
    }
    return Way(trained.name, target, drafter, baseline, tree, facts)


def _parameters(head: DraftHead, tuned: Path | None) -> int:
    """Numbers that were trained: the head's, and those of the adapter beside it."""
    count = sum(p.numel() for p in head.parameters())
    if tuned is not None:
        from safetensors import safe_open

        with safe_open(tuned / adapter.WEIGHTS, "pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no mapping
    return count
