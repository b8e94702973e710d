"""What doctor asks of a head beside its target: is it this one's, as wide, with the same template?"""

from __future__ import annotations

from collections.abc import Iterator

from .doctor_case import EAGLE1, EAGLE3, FUSED, LAYERED, OWN, REFUSED, WEAK, Case, Finding, whole
from .load import QUANTISED, ROUNDING, apart


def check_target(case: Case) -> Iterator[Finding]:
    """A head of another target."""
    target, noted = case.target, case.head.get("target_fingerprint")
    if target is None:
        return
    widths = {"hidden_size": whole(case.shapes.get("hidden_size")), "target_hidden_size": case.width}
    wrong = {name: width for name, width in widths.items() if width not in (None, target.hidden_size)}
    if isinstance(noted, str) and noted != target.fingerprint:
        yield Finding(
            f"the head was trained for {case.head.get('target_id')} (fingerprint {noted[:8]}), and {target.name} is "
            f"another model ({target.fingerprint[:8]})",
            "give the target that it was trained for, or train a head for this one",
            case.effects(WEAK) | case.effects(REFUSED, OWN),
        )
    elif wrong:
        name, width = next(iter(wrong.items()))
        yield Finding(
            f"{name} is {width}, and the target's states are {target.hidden_size} wide",
            "give the target that the head was trained for",
            case.effects(REFUSED),
        )


def check_template(case: Case) -> Iterator[Finding]:
    """Another chat template than the one that the head's texts were rendered with."""
    noted, target = case.head.get("chat_template_sha256"), case.target
    if target is None or not case.head or noted == target.template_sha256:
        return
    yield Finding(
        f"the chat template was {_hash(noted)} in training, and the target's is {_hash(target.template_sha256)}",
        "serve with the template of the training, or train on texts in this one",
        case.effects(WEAK),
    )


def _hash(value: object) -> str:
    return "none" if value is None else f"{str(value)[:8]}…"


def check_trained_length(case: Case) -> Iterator[Finding]:
    """A length of the training texts that the head's own context contradicts."""
    length, most = whole(case.head.get("trained_length")), whole(case.head.get("max_position_embeddings"))
    if case.head and (length is None or (most is not None and length > most)):
        yield Finding(
            f"trained_length is {case.head.get('trained_length')!r}, and the target takes {most} tokens: what was "
            "trained isn't known",
            "export the head again from its run",
            case.effects(WEAK),
        )


def check_copies(case: Case) -> Iterator[Finding]:
    """Embedding and output rows that travel along: a copy of the target's is bytes, another one is a mistake.

    Heads here read the target's own, so a multiple of them does; engines read the rows as they are.
    """
    if case.target is None or case.kind not in LAYERED:
        return
    from ..weights import EMBEDDING, OUTPUT_HEAD, WeightReader

    reader = WeightReader(case.target.folder)
    patterns = {"embed_tokens.weight": EMBEDDING}
    if case.kind not in FUSED:  # a fused head's output rows are its own
        patterns["lm_head.weight"] = OUTPUT_HEAD if reader.has_output_head else EMBEDDING
    for name, pattern in patterns.items():
        if name not in case.entries:
            continue
        own = reader.find(pattern, f"what {name} is a copy of")
        if own is None or own.shape != case.entries[name].shape:
            continue
        distance, factor = apart(case.tensor(name), own)
        bound = QUANTISED if case.target.quantised else ROUNDING
        if distance > bound or abs(factor - 1.0) > bound:
            told, effects = f"is {factor:.4g} times the target's", case.effects(WEAK, "sglang")
            if distance > bound:
                told = f"differs from the target's by {distance:.1%} of its size"
                effects |= case.effects(REFUSED, OWN)
            yield Finding(
                f"{name} {told}: SGLang takes the target's, vLLM this",
                f"leave {name} out, unless the head was trained with it",
                effects,
            )
        elif case.kind in (EAGLE1, EAGLE3):
            size = (case.entries[name].stop - case.entries[name].start) / 1e6
            yield Finding(f"{name} is a copy of the target's ({size:,.1f} MB)", f"leave {name} out: engines share it")
