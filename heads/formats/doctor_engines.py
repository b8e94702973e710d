"""What the engines' contracts ask of a directory: the model class, limits, names and shapes of tensors, values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .contracts import Contract, contract, engines
from .doctor_case import (
    CHECKPOINT,
    EAGLE1,
    EAGLE3,
    FUSED,
    KIND_OF_LAYOUT,
    LAYERED,
    MEDUSA,
    NATIVE,
    OWN,
    REFUSED,
    SPEC_EAGLE,
    SPEC_EAGLE3,
    WEAK,
    Case,
    Finding,
    whole,
)
from .doctor_config import FLAGS, networks, said
from .doctor_inputs import rope_of
from .doctor_tensors import true_vocabulary
from .export_layouts import SYMBOLS, Layout, Wanted, facts_of, layout
from .native_mtp import find_layout

_HEADS = {
    EAGLE1: "eagle1", SPEC_EAGLE: "eagle1", EAGLE3: "eagle3", SPEC_EAGLE3: "eagle3", NATIVE: "mtp",
}  # fmt: skip
"""A head of each kind by its name in configs/heads/; those that aren't here are Medusa's."""
_ALSO_KNOWN = {
    ("vllm", "eagle3"): ("LlamaForCausalLM", "Eagle3LlamaForCausalLM"),
    ("tensorrt-llm", "eagle3"): ("EAGLE3LlamaForCausalLM",),
    ("vllm", "eagle1-vllm"): ("EagleLlamaForCausalLM",),
    ("sglang", "eagle1-sglang"): ("Qwen2ForCausalLMEagle", "MistralForCausalLMEagle"),
    ("speculators", "speculators-eagle3"): ("Eagle3DraftModel",),
    ("vllm", "speculators-eagle3"): ("Eagle3DraftModel",),
}
"""Names of classes that an engine takes beside the one that exports have."""
_SILENT = {"norm_before_residual", "rope_type", "embed_scale"}
"""Facts outside an engine's limits that it loads all the same."""
_BUFFERS = ("rotary_emb.inv_freq",)
_TOLD_ELSEWHERE = ("d2t", "t2d", "token_map")
"""Tensors that other checks judge by what they hold."""


def head_name(case: Case) -> str:
    """The head's name in configs/heads/, or its family's."""
    named = case.note.get("head") or case.head.get("family")
    if isinstance(named, str):
        return named
    if case.kind in FUSED and (said(case, "fc_norm") or said(case, "norm_output")):
        return "eagle3.1"
    return _HEADS.get(case.kind or "", "medusa1")


def layouts(case: Case) -> dict[str, Layout]:
    """By engine, the layout that it takes the directory for; of an export only the one it was written in."""
    if case.kind is None or case.kind == CHECKPOINT:
        return {}
    found, noted = {}, case.note.get("layout")
    for engine in engines():
        one = contract(engine, head_name(case))
        name = str(one.layout_name)
        if one.supported and KIND_OF_LAYOUT[name] == case.kind and noted in (None, name) and not _elsewhere(case, one):
            found[engine] = one.layout
    if case.kind == SPEC_EAGLE3:
        found["vllm"] = layout("speculators-eagle3")
    return dict(sorted(found.items()))


def _elsewhere(case: Case, one: Contract) -> list[str]:
    """Why an engine that takes MTP modules doesn't take this target's."""
    if case.kind != NATIVE:
        return []
    found = find_layout(case.folder)
    return one.problems({"native_layout": None if found is None else found.name})


def readers(case: Case) -> tuple[str, ...]:
    """Engines that read this kind of directory, and this toolkit."""
    return (*layouts(case), OWN)


def why_not(case: Case, engine: str) -> str:
    """Why an engine isn't among the readers."""
    one = contract(engine, head_name(case))
    if one.reason is not None:
        return one.reason
    if problems := _elsewhere(case, one):
        return problems[0]
    return f"it reads {one.layout.title}: draftsmith export RUN --engine {engine} writes that"


def known_facts(case: Case) -> dict[str, Any]:
    """What layouts and limits need to know: of an export by its own record, else by config and tensors."""
    target = {} if case.target is None else {"embed_scale": case.target.embed_scale}
    if case.head:
        return facts_of(case.head, dtype=case.note.get("dtype"), **target)
    shapes, truth = case.shapes, true_vocabulary(case)
    heads, hidden = whole(shapes.get("num_attention_heads")), whole(shapes.get("hidden_size"))
    vocab = truth[0] if truth else whole(shapes.get("vocab_size")) or case.rows("lm_heads.0.weight")
    values: dict[str, Any] = {
        **{name: shapes[name] for name in ("hidden_act", "intermediate_size") if shapes.get(name) is not None},
        **{name: bool(said(case, name)) for name in ("norm_before_residual", "fc_norm", "norm_output")},
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": whole(shapes.get("num_key_value_heads")) or heads,
        "head_dim": whole(shapes.get("head_dim")) or (hidden // heads if hidden and heads else None),
        "vocab_size": vocab,
        "draft_vocab_size": (case.rows("lm_head.weight") if case.kind in FUSED else None) or vocab,
        "fc_bias": "fc.bias" in case.entries,
    }
    if case.kind in FUSED:
        columns = case.entries["fc.weight"].shape[1:] if "fc.weight" in case.entries else ()
        values["aux_count"] = columns[0] // case.width if columns and case.width else None
    elif case.kind not in LAYERED:
        values["steps"], values["blocks"] = networks(case)
        values["hidden_size"] = hidden or case.rows("blocks.0.layers.0.weight", "0.0.linear.weight")
    rope = rope_of(case) if case.kind in LAYERED else None
    known = {name: value for name, value in values.items() if value is not None}
    return facts_of(known, **target, **({"rope_type": rope["rope_type"]} if rope else {}))


def check_architectures(case: Case) -> Iterator[Finding]:
    """The class that engines look up."""
    named = case.config.get("architectures") or []
    for engine, one in layouts(case).items():
        known = [*one.config.get("architectures", ()), *_ALSO_KNOWN.get((engine, one.name), ())]
        if known and not one.native and not set(named) & set(known):
            title = contract(engine, head_name(case)).title
            yield Finding(
                f"architectures is {named or 'left out'}: {title} knows such a head as {known[0]}",
                f"write architectures: [{known[0]}]",
                case.effects(REFUSED, engine),
            )


def check_limits(case: Case) -> Iterator[Finding]:
    """What an engine's class can't compute."""
    facts = known_facts(case)
    for engine in layouts(case):
        for limit in contract(engine, head_name(case)).limits:
            if (told := limit.broken(facts)) is not None:
                effect = WEAK if limit.fact in _SILENT else REFUSED
                yield Finding(told, "take another engine, or train within its limits", case.effects(effect, engine))


# --- tensors --------------------------------------------------------------------------------------------------------


def _wanted(case: Case) -> tuple[dict[str, dict[str, Wanted]], list[str]]:
    """Tensors that each engine's layout has, by engine; and facts that are missing for that."""
    facts = known_facts(case)
    found: dict[str, dict[str, Wanted]] = {}
    unknown: list[str] = []
    for engine, one in layouts(case).items():
        if one.native:
            continue
        try:
            found[engine] = one.tensors(facts)
        except KeyError as error:
            # a condition that isn't known hangs on the vocabulary
            names = SYMBOLS.get(str(error.args[0]), ("vocab_size",))
            unknown += [name for name in names if facts.get(name) is None]
    return found, list(dict.fromkeys(unknown))


def _called(case: Case) -> dict[str, str]:
    """The file's name of each tensor by the layouts' name of it."""
    found = {}
    for name in case.entries:
        plain = re.sub(r"^layers\.0\.", "midlayer.", name) if case.kind == EAGLE3 else name
        plain = re.sub(r"^medusa_heads?\.", "", plain)
        if not plain.endswith(_BUFFERS):
            found[plain] = name
    return found


def _is_told_elsewhere(case: Case, name: str) -> bool:
    """Whether another check names a tensor: by what it holds, or with the flag that contradicts all of its kind."""
    odd = [x.tensors for x in FLAGS if case.kind in x.kinds and bool(case.named(x.tensors)) != bool(said(case, x.name))]
    return name in _TOLD_ELSEWHERE or any(re.fullmatch(pattern, name) for pattern in odd)


_TEXTS = {
    ("missing", "lm_head.weight"): (
        "lm_head.weight is missing: engines read the head out with the target's rows, or with none",
        "export the head again: its output rows are always written",
    ),
    ("missing", "fc.bias"): (
        "fc.bias is missing: SGLang's class has one and leaves it as memory left it",
        "write zeros, or export with --engine sglang",
    ),
    ("forbidden", "fc.bias"): (
        "fc.bias is there, and vLLM's class has none",
        "train with head.options.fc_bias=false; SGLang loads it",
    ),
    ("forbidden", "norm.weight"): (
        "norm.weight is there: an EAGLE-1 head has no norm behind its layer",
        "leave it out, if the head was trained without it",
    ),
    ("forbidden", "layers.0.input_layernorm.weight"): (
        "layers.0.input_layernorm.weight is there: an EAGLE-1 head has no norm before its layer",
        "leave it out, if the head was trained without it",
    ),
}
"""Causes and fixes of single tensors that say more than their names."""
_ORDER = ("missing", "forbidden", "unexpected")
_KINDER: dict[tuple[str, str], str | None] = {
    ("missing", "vllm"): WEAK,
    ("missing", "sglang"): WEAK,
    ("forbidden", "sglang"): WEAK,
    ("unexpected", "sglang"): None,
    ("unexpected", "tensorrt-llm"): None,
    ("unexpected", "tgi"): None,
}
"""What engines do that don't refuse such tensors: vLLM and SGLang leave EAGLE weights that are missing as memory left
them, and some pass over names that they don't know."""
_KINDER_MEDUSA = {**_KINDER, ("missing", "vllm"): REFUSED, ("unexpected", "vllm"): None}


def check_names(case: Case) -> Iterator[Finding]:
    """Tensors that are missing, and tensors that no class has a place for."""
    wanted, unknown = _wanted(case)
    if unknown:
        yield Finding(
            f"{case.shapes_at} has no {unknown[0]}: the head's shape isn't known",
            f"write {unknown[0]}",
            case.effects(REFUSED),
        )
    called = _called(case)
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for engine, tensors in wanted.items():
        wrong = {
            "missing": [name for name, x in tensors.items() if x.need == "required" and name not in called],
            "forbidden": [name for name, x in tensors.items() if x.need == "forbidden" and name in called],
            "unexpected": [name for name in called if name not in tensors],
        }
        for what, names in wrong.items():
            told = tuple(name for name in names if not _is_told_elsewhere(case, name))
            if told:
                groups.setdefault((what, told), []).append(engine)
    for (what, wanting), minding in sorted(groups.items(), key=lambda group: _ORDER.index(group[0][0])):
        yield _named(case, what, wanting, minding, everyone=len(minding) == len(wanted))


def _named(case: Case, what: str, names: tuple[str, ...], minding: list[str], everyone: bool) -> Finding:
    """One finding about tensors that the same engines mind; this toolkit minds what all do."""
    kinder = _KINDER_MEDUSA if case.kind == MEDUSA else _KINDER
    minds = {engine: kinder.get((what, engine), REFUSED) for engine in [*minding, *([OWN] if everyone else [])]}
    effects = {engine: effect for engine, effect in minds.items() if effect is not None}
    file = [_called(case).get(name, name) for name in names]
    more = f" ({len(names)} in all: {', '.join(file[:3])}{', …' if len(file) > 3 else ''})" if len(names) > 1 else ""
    default = {
        "missing": (f"{file[0]} is missing{more}", "export the head again, or fetch it again"),
        "forbidden": (f"{file[0]} is there{more}: this layout has none", f"leave {file[0]} out"),
        "unexpected": (f"{file[0]} is a name that the layout doesn't have{more}", f"rename it, or leave {file[0]} out"),
    }[what]
    cause, fix = _TEXTS.get((what, names[0]), default)
    return Finding(cause if cause in default else cause + more, fix, effects)


def check_shapes(case: Case) -> Iterator[Finding]:
    """Tensors of other shapes than config and layout make them."""
    wanted, called = _wanted(case)[0], _called(case)
    wrong: dict[str, tuple[list[int], tuple[int, ...]]] = {}
    for tensors in wanted.values():
        for name, one in tensors.items():
            if name in called and tuple(case.entries[called[name]].shape) != one.shape:
                wrong.setdefault(called[name], (list(case.entries[called[name]].shape), one.shape))
    if wrong:
        name, (there, asked) = next(iter(wrong.items()))
        yield Finding(
            f"{name} has the shape {there}, and config and layout ask for {list(asked)} ({len(wrong)} in all)",
            "export the head again; where only config.json is wrong, mend it",
            case.effects(REFUSED),
        )


def check_files(case: Case) -> Iterator[Finding]:
    """Files that the export lists and that aren't there as it wrote them."""
    for name, size in (case.note.get("files") or {}).items():
        path = case.folder / name
        there = path.stat().st_size if path.is_file() else None
        if there != size:
            said = "is missing" if there is None else f"has {there:,} bytes"
            yield Finding(
                f"{name} {said}, and the export wrote {size:,}",
                "export the head again, or fetch it again",
                case.effects(WEAK, but=(OWN,)),
            )


# --- values ---------------------------------------------------------------------------------------------------------


def check_values(case: Case) -> Iterator[Finding]:
    """Values of an export's config.json that are others than its own record makes them."""
    made = layouts(case)
    if not case.note.get("layout") or not made:
        return
    one = next(iter(made.values()))
    for place, asked in _leaves(one.config, known_facts(case)):
        found: Any = case.config
        for key in place:
            found = found.get(key) if isinstance(found, dict) else None
        if not _same(found, asked):
            yield Finding(
                f"{'.'.join(place)} is {found!r} in config.json, and the export wrote {asked!r}",
                f"write {asked!r}, or export the head again",
                case.effects(WEAK, but=(OWN,)),
            )


def _leaves(value: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Values of a layout's config by their place, those whose facts are known."""
    for key, one in value.items():
        if isinstance(one, dict):
            yield from (((key, *place), asked) for place, asked in _leaves(one, facts))
        elif isinstance(one, str) and one.startswith("$"):
            if not one.endswith("?") and facts.get(one[1:]) is not None:
                yield (key,), facts[one[1:]]
        elif not isinstance(one, list) or not any(isinstance(x, dict) for x in one):
            yield (key,), one


def _same(found: Any, asked: Any) -> bool:
    if isinstance(asked, float) and isinstance(found, int | float) and not isinstance(found, bool):
        return abs(found - asked) <= 1e-6 * abs(asked)
    return bool(found == asked)
