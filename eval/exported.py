"""Acceptance of an exported head, decoded from its directory, beside that of the checkpoint that it was made of."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import DraftsmithError
from ..heads.base import DraftHead
from ..heads.checkpoint import load_head
from ..heads.formats.about import About, read_about
from ..heads.formats.doctor import Diagnosis, Finding, diagnose
from ..heads.formats.doctor_case import OWN, REFUSED, WEAK
from ..heads.formats.files import find_checkpoint
from ..heads.formats.load import load_any
from ..heads.formats.run_source import find_source
from ..heads.loading import resolve_folder
from ..heads.resolve import require_reachable, resolve_target
from ..heads.target import Target
from ..progress import say
from .benchmarks import builtin_set
from .decoder.drafters import make_drafter
from .decoder.loop import Request, decode, rows_needed
from .decoder.search import Chain
from .metrics import Acceptance, acceptance
from .trained import adapter_of

PROMPTS, NEW_TOKENS, DEPTH = 4, 48, 4
"""Held-out prompts that are decoded, the longest answer to each, and the chain's K (less where a head drafts less)."""
TOLERANCE = 0.01
"""Most that tau may differ from the run's: the weights are the same bits, so on a CPU it doesn't at all."""
IMPLAUSIBLE = 1.1
"""A trained head's tau lies above this; tau 1 is what a head has that is right by chance alone."""
SUSPECTS = "alignment, mask, norms, rope, layer ids"
"""Where an acceptance near none comes from, the likeliest first."""


def examine(folder: Path, model: str | None, runs: Path = Path("runs")) -> Diagnosis:
    """Diagnose a head's directory; with its target, decode a few prompts from it, too.

    Args:
        model: the target: a short name, a hub id or a folder; None leaves out what only the target can tell.
        runs: where the run lies that the directory was exported from, if it is still there.

    Raises:
        DraftsmithError: see `diagnose`; or there is no such target.
    """
    if model is None:
        return diagnose(folder)
    source = require_reachable(resolve_target(model, notify=say))
    location = resolve_folder(source.location, None if source.is_local else source.revision)
    diagnosis = diagnose(folder, location)
    if diagnosis.states[OWN] == REFUSED:
        return diagnosis
    inside = find_checkpoint(str(folder))
    adapter = adapter_of(inside)
    try:
        target = Target.load(str(location), adapter=adapter)
    except DraftsmithError as error:
        if adapter is None:  # the target itself
            raise
        effects = {**_minding(diagnosis), OWN: REFUSED}
        fix = "export the head again, or fetch it again"
        return diagnosis.adding(Finding(f"its adapter isn't merged: {error}", fix, effects, check="reader"))
    try:
        head = load_any(inside, target)
    except DraftsmithError as error:
        fix = "give the target that it was trained for"
        return diagnosis.adding(Finding(f"it isn't decoded: {error}", fix, {OWN: REFUSED}, check="reader"))
    return _decoded(diagnosis, inside, target, head, runs)


def _minding(diagnosis: Diagnosis) -> dict[str, str]:
    """WEAK for every engine that reads such a head: what a fault does that shows in decoding alone."""
    return dict.fromkeys((engine for engine, state in diagnosis.states.items() if state != "other"), WEAK)


def _decoded(diagnosis: Diagnosis, folder: Path, target: Target, head: DraftHead, runs: Path) -> Diagnosis:
    """Decode with the directory's head, and with the run's where it is found; tell what they show."""
    depth = min(DEPTH, head.most_depth or DEPTH)
    room = target.max_positions - depth - 1
    prompts = builtin_set("heldout", target.tokenizer, limit=PROMPTS, max_new_tokens=NEW_TOKENS, room=room)
    found = accepted(target, head, prompts.requests, depth)
    about = read_about(folder)
    run = None if about is None else run_checkpoint(folder, about, runs)
    before: Acceptance | None = None
    if run is not None and about is not None:
        dtype: torch.dtype = getattr(torch, about.dtype)
        before = accepted(target, load_head(run, dtype), prompts.requests, depth)
    facts: dict[str, Any] = {"chain": depth, "prompts": len(prompts.requests), "tau": round(found.tau, 3)}
    if before is not None:
        facts |= {"run": str(run), "run_tau": round(before.tau, 3)}
    return diagnosis.adding(_told(found, before, _minding(diagnosis)), **facts)


def _told(found: Acceptance, before: Acceptance | None, minding: dict[str, str]) -> Finding | None:
    """What acceptance shows to be wrong, None = nothing."""
    if before is not None and abs(found.tau - before.tau) > TOLERANCE:
        return Finding(
            f"tau {found.tau:.2f} from this directory, {before.tau:.2f} from the run's own checkpoint in its dtype",
            f"export the head again; where that doesn't help, look at {SUSPECTS}, in this order",
            minding,
            check="acceptance",
        )
    if found.tau < IMPLAUSIBLE:
        return Finding(
            f"tau {found.tau:.2f}: hardly any draft is accepted",
            f"look at {SUSPECTS}, in this order; or the head isn't trained yet",
            minding,
            check="acceptance",
        )
    return None


def accepted(target: Target, head: DraftHead, requests: Sequence[Request], depth: int) -> Acceptance:
    """Acceptance of chains of `depth`, greedy, all requests at once."""
    drafter = make_drafter(head, target.parts(), Chain(depth))
    capacity = rows_needed(requests, drafter)
    return acceptance([r.steps for r in decode(target, drafter, requests, slots=len(requests), capacity=capacity)])


def run_checkpoint(folder: Path, about: About, runs: Path) -> Path | None:
    """The checkpoint that a directory was exported from, None where it isn't there any more, or has other weights.

    It is looked for below `runs` and below the folders that the directory lies in.
    """
    name, weights = about.provenance.get("run"), about.provenance.get("weights_sha256")
    if not isinstance(name, str) or not isinstance(weights, str):
        return None
    for home in (runs, *folder.resolve().parents):
        if (home / name).is_dir():
            with contextlib.suppress(DraftsmithError):  # a run without its checkpoint
                source = find_source(home / name)
                if source.weights_sha256 == weights:
                    return source.checkpoint
    return None
