"""Doctor: what is wrong with a head's directory, and what each engine would make of it.

Checks are rows of a table; each says what is wrong, what to do, and which engines mind. What engines require comes from
their contracts (`configs/engines/`), what the head is from its own record (draftsmith.json) or from the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import DraftsmithError
from .contracts import engines
from .doctor_case import (
    CHECKPOINT,
    KINDS,
    OWN,
    REFUSED,
    WEAK,
    Case,
    Finding,
    TargetFacts,
    other_class,
    read_case,
    whole,
)
from .doctor_config import (
    check_config,
    check_dtype_named,
    check_flags,
    check_medusa,
    check_residual,
    check_tie,
    check_types,
    check_verifier,
)
from .doctor_engines import (
    check_architectures,
    check_files,
    check_limits,
    check_names,
    check_shapes,
    check_values,
    readers,
    why_not,
)
from .doctor_inputs import check_layer_ids, check_positions, check_rope
from .doctor_target import check_copies, check_target, check_template, check_trained_length
from .doctor_tensors import (
    check_constant,
    check_d2t,
    check_draft_size,
    check_dtypes,
    check_finite,
    check_pickles,
    check_token_map,
    check_vocabulary_size,
    check_weights,
)
from .files import find_checkpoint
from .load import load_any, read_head

Check = Callable[[Case], Iterator[Finding]]


def check_layout(case: Case) -> Iterator[Finding]:
    """Tensors that no layout of a head has."""
    if (unknown := other_class(case.config)) is not None and case.kind is None:
        yield Finding(
            f"{unknown} is a class that vLLM has and no contract here covers: nothing of it is judged",
            f"heads that are known here: {', '.join(KINDS.values())}",
            {OWN: REFUSED},
        )
    elif case.kind is None and case.entries:
        names = ", ".join(sorted(case.entries)[:3])
        is_model = any(name.startswith("model.layers.") for name in case.entries)
        yield Finding(
            "it is a whole model without MTP modules, not a draft head"
            if is_model
            else f"its tensors are called {names}, …: no layout of a draft head has such names",
            f"give a head: {', '.join(KINDS.values())}",
            {OWN: REFUSED},
        )


def check_reader(case: Case) -> Iterator[Finding]:
    """What this toolkit's own readers say, which take nothing for granted."""
    try:
        if case.note or case.kind == CHECKPOINT:
            load_any(case.folder, None)
        else:
            read_head(case.folder)
    except DraftsmithError as error:
        said = " ".join(str(error).split()).removeprefix(f"{case.folder}: ")
        yield Finding(f"it can't be read here: {said}", "export the head again, or fetch it again", {OWN: REFUSED})


FIRST: dict[str, Check] = {
    "pickle": check_pickles,
    "weights": check_weights,
    "layout": check_layout,
    "json": check_config,
    "types": check_types,
}
"""Where one of these finds a fault, nothing else can be judged."""
CHECKS: dict[str, Check] = {
    "target": check_target,
    "vocab_size": check_vocabulary_size,
    "draft_vocab_size": check_draft_size,
    "flags": check_flags,
    "layer ids": check_layer_ids,
    "d2t": check_d2t,
    "rope": check_rope,
    "positions": check_positions,
    "residual": check_residual,
    "tie": check_tie,
    "torch_dtype": check_dtype_named,
    "verifier": check_verifier,
    "medusa": check_medusa,
    "token_map": check_token_map,
    "architectures": check_architectures,
    "limits": check_limits,
    "dtypes": check_dtypes,
    "names": check_names,
    "shapes": check_shapes,
    "finite": check_finite,
    "constant": check_constant,
    "template": check_template,
    "trained_length": check_trained_length,
    "copies": check_copies,
}
"""By name, in the order in which findings are told: what explains most comes first."""
LAST: dict[str, Check] = {"config": check_values, "files": check_files, "reader": check_reader}
"""Asked where nothing was found: they say that something is wrong, and less about what."""


@dataclass(frozen=True)
class Diagnosis:
    """What doctor found.

    Attributes:
        folder: that was examined; layout: of its head, as people call it.
        exported_for: the engines that it was exported for; empty for a head from elsewhere.
        findings: faults and remarks, what explains most first.
        verdicts: by engine, and for this toolkit's own decoder ("draftsmith"), in words.
        states: the same in a word: "loads", WEAK, REFUSED or "other" (not for this engine, or not judged).
        facts: what the directory says of its head.
    """

    folder: Path
    layout: str
    exported_for: list[str]
    findings: list[Finding]
    verdicts: dict[str, str]
    states: dict[str, str]
    facts: dict[str, Any]

    def passed(self, engine: str) -> bool:
        """Whether an engine loads the head, and nothing says that it may accept less."""
        return self.states.get(engine) == "loads"

    @property
    def ok(self) -> bool:
        """Whether the engines pass that the head was exported for; of a head from elsewhere, any engine."""
        if self.exported_for:
            return all(self.passed(engine) for engine in self.exported_for)
        others = [engine for engine, state in self.states.items() if state != "other" and engine != OWN] or [OWN]
        return any(self.passed(engine) for engine in others)

    def adding(self, finding: Finding | None, **facts: Any) -> Diagnosis:
        """The same with facts that were found later, and what they show to be wrong; engines that minded before keep
        their verdict."""
        found = replace(self, facts={**self.facts, **facts})
        if finding is None:
            return found
        minding = [engine for engine in finding.effects if self.states[engine] == "loads"]
        return replace(
            found,
            findings=[*self.findings, finding],
            states={**self.states, **{engine: finding.effects[engine] for engine in minding}},
            verdicts={**self.verdicts, **{engine: _verdict(finding, finding.effects[engine]) for engine in minding}},
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON for programs."""
        return {
            "folder": str(self.folder),
            "layout": self.layout,
            "exported_for": self.exported_for,
            "ok": self.ok,
            "passed": {engine: self.passed(engine) for engine in self.states},
            "verdicts": self.verdicts,
            "findings": [
                {"check": f.check, "cause": f.cause, "fix": f.fix, "effects": dict(f.effects)} for f in self.findings
            ],
            "facts": self.facts,
        }

    def lines(self) -> list[str]:
        """The same for people."""
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.facts.items() if value is not None)
        lines = [f"{self.folder}: {self.layout}", f"  {told}"] if told else [f"{self.folder}: {self.layout}"]
        for number, finding in enumerate(self.findings, 1):
            kind = "" if finding.is_fault else "remark: "
            lines += [f"{number}. {finding.check}: {kind}{finding.cause}", f"   fix: {finding.fix}"]
        width = max(map(len, self.verdicts))
        lines += [f"{engine:{width}}  {verdict}" for engine, verdict in self.verdicts.items()]
        return lines


def diagnose(folder: Path, target_folder: Path | TargetFacts | None = None) -> Diagnosis:
    """Examine the directory of a head: an export, a head from elsewhere, a checkpoint or a run of this toolkit.

    No code of the directory runs: pickled files are named and never opened.

    Args:
        target_folder: of the model that it drafts for, or what was read of it; None leaves out what only the target can
            tell.

    Raises:
        DraftsmithError: `folder` is no directory, or the target's isn't one of a model. Whatever is wrong inside the
            head's directory is a finding instead.
    """
    if not folder.is_dir():
        raise DraftsmithError(f"{folder} is no folder: give the directory of an exported head, or of a run")
    target = TargetFacts.read(target_folder) if isinstance(target_folder, Path) else target_folder
    case = read_case(find_checkpoint(str(folder)), target)
    case = replace(case, engines=readers(case))
    return judge(case, list(_findings(case)))


def _findings(case: Case) -> Iterator[Finding]:
    if case.damage:
        yield from case.damage
        return
    for table in (FIRST, CHECKS, LAST):
        found = [replace(finding, check=name) for name, check in table.items() for finding in check(case)]
        yield from found
        if any(finding.is_fault for finding in found):
            return


def judge(case: Case, findings: list[Finding]) -> Diagnosis:
    """What each engine makes of the findings."""
    verdicts, states = {}, {}
    unjudged = other_class(case.config) is not None and case.kind is None
    unreadable = bool(case.damage) or (case.kind is None and not unjudged)
    faults = [finding for finding in findings if finding.is_fault]
    for engine in (*engines(), OWN):
        own = faults if unreadable else [f for f in faults if engine in f.effects]
        refusing = next((f for f in own if unreadable or f.effects[engine] == REFUSED), None)
        if refusing is not None:
            states[engine], verdicts[engine] = REFUSED, _verdict(refusing, REFUSED)
        elif own:
            states[engine], verdicts[engine] = WEAK, _verdict(own[0], WEAK)
        elif engine in case.engines:
            states[engine] = verdicts[engine] = "loads"
        elif unjudged:
            states[engine], verdicts[engine] = "other", f"not judged: {faults[0].cause}"
        else:
            states[engine], verdicts[engine] = "other", f"not for this engine: {why_not(case, engine)}"
    layout = KINDS.get(case.kind or "", "no head of a known layout")
    return Diagnosis(case.folder, layout, exported_for(case), findings, verdicts, states, facts(case))


def _verdict(finding: Finding, effect: str) -> str:
    weak = "accepts too little" if finding.check == "acceptance" else "may accept less"
    told = {REFUSED: "refused", WEAK: f"loads, but {weak}"}[effect]
    return f"{told}: {finding.cause}; fix: {finding.fix}"


def exported_for(case: Case) -> list[str]:
    """Engines that an export serves by its own record."""
    return [engine for engine in case.note.get("serves") or () if engine in engines()]


def facts(case: Case) -> dict[str, Any]:
    """What a directory says of its head, for its first lines."""
    head = case.head
    dtypes = sorted({str(x.dtype) for name, x in case.entries.items() if name not in ("d2t", "t2d", "token_map")})
    return {
        "target": head.get("target_id"),
        "trained_length": whole(head.get("trained_length")),
        "layer_ids": head.get("layer_ids") or None,
        "draft_vocabulary": case.rows("lm_head.weight", "lm_heads.0.weight"),
        "tensors": len(case.entries),
        "parameters": sum(math.prod(x.shape) for x in case.entries.values()),
        "dtype": "/".join(dtypes) or None,
    }


__all__ = ["CHECKS", "FIRST", "LAST", "Check", "Diagnosis", "Finding", "diagnose", "exported_for", "judge"]
