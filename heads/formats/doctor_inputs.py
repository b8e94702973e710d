"""What doctor asks of the states and positions that a head reads: layer ids, rope, longest context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .doctor_case import FUSED, IDS, LAYERED, NESTED, OWN, REFUSED, SPEC_EAGLE3, WEAK, Case, Finding, whole

# --- layer ids ------------------------------------------------------------------------------------------------------


def check_layer_ids(case: Case) -> Iterator[Finding]:
    """Aux layer ids: at the top level layers applied, inside `eagle_config` outputs from 0, which is one less."""
    if case.kind not in FUSED:
        return
    top, nested = case.config.get(IDS), case.nested.get(IDS)
    if apart := list(_disagreeing(case, top, nested)):
        yield from apart
        return
    said = top if top is not None else None if nested is None else [k + 1 for k in nested]
    if said is not None:
        yield from _ill_formed(case, said)
        yield from _counted(case, said)
    yield from _left_out(case, top, nested, said)


def _disagreeing(case: Case, top: list[int] | None, nested: list[int] | None) -> Iterator[Finding]:
    if top is None or nested is None or [k + 1 for k in nested] == top:
        return
    truth = case.head.get("layer_ids", top)
    if nested == top:
        cause = f"{NESTED} names the layers {nested}, the numbers of the top level: inside it they count outputs from 0"
    else:
        cause = f"config.json names the layers {top}, {NESTED} {nested}, which are {[k + 1 for k in nested]} there"
    yield Finding(
        cause,
        f"write {truth} at the top level and {_less(truth)} in {NESTED}",
        (case.effects(WEAK, "vllm") if top != truth else {})
        | (case.effects(WEAK, "sglang") if [k + 1 for k in nested] != truth else {})
        | case.effects(REFUSED, OWN),
    )


def _ill_formed(case: Case, said: list[int]) -> Iterator[Finding]:
    n, truth = case.layers, case.head.get("layer_ids")
    told, fix, everyone = f"the layer ids {said}", "export the head again with its own ids", case.effects(WEAK)
    if len(set(said)) < len(said):
        yield Finding(
            f"{told} name a layer twice: vLLM drops the second and reads fewer states",
            fix,
            everyone | case.effects(REFUSED, "vllm", OWN),
        )
    elif said != sorted(said):
        yield Finding(
            f"{told} don't ascend: vLLM sorts them, fc's columns stay", fix, everyone | case.effects(REFUSED, OWN)
        )
    elif n is not None and n in said:
        yield Finding(
            f"{told} have the target's last state, {n}: engines give it before or after the final norm",
            f"train on inner layers, 1 to {n - 1}",
            everyone | case.effects(REFUSED, OWN),
        )
    elif said and (min(said) < 1 or (n is not None and max(said) > n)):
        most = "its layers" if n is None else f"1 to {n - 1}"
        yield Finding(f"{told} aren't inner states of the target, {most}", fix, case.effects(REFUSED))
    elif isinstance(truth, list) and said != truth and len(said) == len(truth):
        yield Finding(
            f"config.json names the layers {said}, and the head was trained on {truth}",
            f"write {truth} at the top level and {_less(truth)} in {NESTED}",
            everyone,
        )


def _less(ids: list[Any]) -> list[Any]:
    return [k - 1 if isinstance(k, int) else k for k in ids]


def _counted(case: Case, said: list[int]) -> Iterator[Finding]:
    """How many states fc reads."""
    fc, width, count = case.entries.get("fc.weight"), case.width, case.config.get("num_aux_hidden_states")
    columns = fc.shape[1] if fc is not None and len(fc.shape) == 2 else None
    if columns and width and columns != len(said) * width:
        many = f"{columns // width} states" if columns % width == 0 else f"{columns / width:.2f} states"
        yield Finding(
            f"{len(said)} layer ids {said}, and fc.weight reads {many} of {width} numbers",
            "name as many layers as the head was trained on",
            case.effects(REFUSED),
        )
    elif count is not None and count != len(said):
        yield Finding(
            f"num_aux_hidden_states is {count}, and {len(said)} layers are named: vLLM sizes fc by it",
            f"write num_aux_hidden_states: {len(said)}",
            case.effects(REFUSED, "vllm"),
        )
    elif count is None and len(said) != 3:
        yield Finding(
            f"{len(said)} layers are named and num_aux_hidden_states isn't there: vLLM takes 3",
            f"write num_aux_hidden_states: {len(said)}",
            case.effects(REFUSED, "vllm"),
        )


def _left_out(case: Case, top: list[int] | None, nested: list[int] | None, said: list[int] | None) -> Iterator[Finding]:
    """Engines that read the place where nothing stands take the default."""
    n, truth = case.layers, said or case.head.get("layer_ids")
    readers = {"vllm": top, "speculators": top} | ({} if case.kind == SPEC_EAGLE3 else {"sglang": nested})
    blind = [engine for engine, ids in readers.items() if ids is None and engine in case.engines]
    if not blind or not isinstance(truth, list) or n is None:
        return
    default = [2, n // 2, n - 3]
    if truth != default:
        there = "at the top level" if top is None else f"in {NESTED}"
        yield Finding(
            f"no layer ids {there}: engines that look there take {default}, and the head was trained on {truth}",
            f"write {truth} at the top level and {_less(truth)} in {NESTED}",
            case.effects(WEAK, *blind),
        )


# --- positions ------------------------------------------------------------------------------------------------------

_DEFAULT_THETA = 10000.0
_INJECTED = {"factor": 32.0, "original_max_position_embeddings": 2048}
"""What ModelOpt's export writes as yarn unless it is told otherwise."""


def _forms(group: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Rope of a config in the older form and in transformers 5's, each None where it says nothing."""
    scaling = group.get("rope_scaling")
    old = None
    if group.get("rope_theta") is not None or scaling:
        old = _plain_rope(scaling or {}, group.get("rope_theta"))
    new = group.get("rope_parameters")
    if new and isinstance(new.get("full_attention"), dict):
        new = new["full_attention"]
    return old, (_plain_rope(new, None) if new else None)


def rope_of(case: Case) -> dict[str, Any]:
    """What a config says of its rope, the older form first; its theta is None where it is left out."""
    old, new = _forms(case.shapes)
    return old or new or _plain_rope({}, None)


def _plain_rope(values: dict[str, Any], theta: Any) -> dict[str, Any]:
    """One spelling of a rope: its kind, theta (None = left out) and what else is said."""
    left_out = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    rest = {k: float(v) if isinstance(v, int) else v for k, v in values.items() if k not in left_out and v is not None}
    theta = theta if values.get("rope_theta") is None else values["rope_theta"]
    kind = values.get("rope_type") or values.get("type") or "default"
    return {"rope_type": kind, "rope_theta": float(theta) if isinstance(theta, int | float) else None, **rest}


def check_rope(case: Case) -> Iterator[Finding]:
    """The rope that the head was trained with, in a form that every engine reads."""
    if case.kind not in LAYERED:
        return
    old, new = _forms(case.shapes)
    noted = case.head.get("rope")
    known = noted if isinstance(noted, dict) else case.target.rope if case.target else None
    truth = None if known is None else _plain_rope(known, None)
    whose = "the head was trained with" if isinstance(noted, dict) else "the target has"
    fix, everyone = f"write the rope that {whose} in both forms, rope_theta and rope_parameters", case.effects(WEAK)
    found = rope_of(case)
    if old and new and _differs(old, new):
        place = _differs(old, new)
        yield Finding(
            f"rope_theta and rope_scaling say {place} {old.get(place)}, rope_parameters says "
            f"{new.get(place)}: engines read one or the other",
            fix,
            everyone,
        )
    elif found["rope_theta"] is None and (truth is None or truth["rope_theta"] != _DEFAULT_THETA):
        told = "" if truth is None else f", and {whose} {truth['rope_theta']:g}"
        yield Finding(f"no rope_theta: engines take {_DEFAULT_THETA:g}{told}", fix, everyone)
    elif found["rope_type"] == "yarn" and _is_injected(found) and (truth is None or truth["rope_type"] != "yarn"):
        yield Finding(
            "rope_scaling is yarn with factor 32 over 2048: ModelOpt's export puts that in, no head is trained with it",
            "write rope_scaling: null, or what the head was trained with",
            everyone,
        )
    elif truth is not None and (place := _differs(found, truth)):
        yield Finding(f"{place} is {found.get(place)}, and {whose} {truth.get(place)}", fix, everyone)


def _is_injected(rope: dict[str, Any]) -> bool:
    return all(rope.get(name) == value for name, value in _INJECTED.items())


def _differs(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first value of a rope that differs, "" = none; a theta that is left out is the default one."""
    for name in dict.fromkeys((*one, *other)):
        a, b = ((_DEFAULT_THETA if x is None and name == "rope_theta" else x) for x in (one.get(name), other.get(name)))
        if a != b and not (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-6 * abs(b)):
            return name
    return ""


def check_positions(case: Case) -> Iterator[Finding]:
    """The longest context, which engines take from the draft's config, too."""
    if case.kind not in LAYERED:
        return
    found = whole(case.shapes.get("max_position_embeddings"))
    most = case.target.positions if case.target else whole(case.head.get("max_position_embeddings"))
    if most is None or (found is not None and found >= most):
        return
    said = "is left out, which means 2048" if found is None else f"is {found}"
    if found is None and most <= 2048:
        return
    yield Finding(
        f"max_position_embeddings {said}, and the target takes {most}: longer texts fail or accept less",
        f"write max_position_embeddings: {most}",
        case.effects(WEAK),
    )
