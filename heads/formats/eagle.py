"""EAGLE heads as the EAGLE repository, SpecForge, ModelOpt and speculators write them.

One row of the table a layout: names, whose copies travel along, which flags say what the head computes, and how layer
ids count. SpecForge, ModelOpt and plain exports for engines use the names of the EAGLE repository.

`d2t` holds offsets in all of them: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ..vocab import DraftVocab
from .export_layouts import layout as read_layout
from .foreign import Foreign, block_of, heads_of, listed, vocabulary

_PREFIXES = ("midlayer.", "layers.0.")
"""Beginnings of the layer's tensors in the tables of configs/engines/layouts/."""
_MOST_STATES = 8
"""Norms of states that a file may have."""
_NORMS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
_EAGLE3_FAMILIES = (
    ("eagle3", _NORMS),
    ("eagle3", {**_NORMS, "norm_before_residual": True}),
    ("eagle31", {**_NORMS, "fc_norm": True, "norm_output": True}),
)
_SAME = {"norm_output": ("norm_output", "return_hidden_post_norm")}
"""Other tools' names of a flag."""
_FIXED1 = {"use_aux_hidden_state": False, "eh_proj_before_attn": False}
_FIXED3 = {"use_aux_hidden_state": True, "eh_proj_before_attn": False, "parallel_drafting": False}
_BUFFERS = ("rotary_emb.inv_freq",)
"""Ends of names that are no weights."""
_VOCAB = ("d2t", "t2d")

_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "eagle_config"


@dataclass(frozen=True)
class Layout:
    """How one tool writes one kind of head.

    Attributes:
        name: as messages call it.
        layer: what names of the decoder layer's tensors begin with; the first is what messages say.
        table: layout in configs/engines/layouts/ whose table has the names; renamed: what this tool calls otherwise.
        copies: names of the target's own tensors that may travel along.
        families: a family and flags that it computes together, each.
        flags: what a flag is where the config says nothing.
        fixed: flags that change what is computed and that have one value in all families here, where the config names
            them.
        shapes: group of the config that holds the layer's shapes; None = the config itself.
    """

    name: str
    layer: tuple[str, ...]
    table: str
    copies: dict[str, str]
    families: tuple[tuple[str, dict[str, bool]], ...]
    flags: dict[str, bool]
    fixed: dict[str, bool] = field(default_factory=dict)
    shapes: str | None = None
    renamed: dict[str, str] = field(default_factory=dict)


_EMBED = {"embed_tokens.weight": "embed"}
_LAYOUTS = {
    "eagle1": Layout(
        "EAGLE-1 (EAGLE repository)",
        ("layers.0.",),
        "eagle1-sglang",
        {**_EMBED, "lm_head.weight": "lm_head"},
        (("eagle1", {}),),
        {},
        _FIXED1,
    ),
    "eagle3": Layout(
        "EAGLE-3 (EAGLE repository, SpecForge)",
        ("midlayer.", "layers.0."),
        "eagle3",
        _EMBED,
        _EAGLE3_FAMILIES,
        _NORMS,
        _FIXED3,
    ),
    "speculators.eagle": Layout(
        "speculators eagle",
        ("transformer.",),
        "eagle1-sglang",
        {**_EMBED, "lm_head.weight": "lm_head"},
        (("eagle1", {"layernorms": False}),),
        {"layernorms": False},
        _FIXED1,
        "transformer_layer_config",
        {"fc.weight": "fusion_fc.weight", "fc.bias": "fusion_fc.bias"},
    ),
    "speculators.eagle3": Layout(
        "speculators eagle3",
        ("layers.0.",),
        "speculators-eagle3",
        _EMBED,
        _EAGLE3_FAMILIES,
        {**_NORMS, "norm_before_residual": True},
        _FIXED3,
        "transformer_layer_config",
    ),
}

_MARKS = {
    "eagle3": (("midlayer.", "d2t", "norm.weight"), ("hidden_norm.weight",)),
    "eagle1": (("fc.weight", "layers.0."), ()),
}
"""Beginnings and ends of names that tell a layout where the config doesn't, the more telling first."""


def layout_of(config: dict[str, Any], names: set[str], where: Path) -> Layout | None:
    """Which layout a checkpoint has, by its config and its tensors' names; None = none of these.

    Raises:
        DraftsmithError: a speculators checkpoint of another kind.
    """
    kind = config.get("speculators_model_type")
    if kind is not None:
        found = _LAYOUTS.get(f"speculators.{kind}")
        if found is None:
            known = [name.partition(".")[2] for name in _LAYOUTS if name.startswith("speculators.")]
            raise DraftsmithError(
                f"{where}: speculators_model_type = {kind!r}: no head here is of that kind, only {', '.join(known)}"
            )
        return found
    for key, (begins, ends) in _MARKS.items():
        if any(name.startswith(begins) or name.endswith(ends) for name in names):
            return _LAYOUTS[key]
    return None


def read_eagle(layout: Layout, config: dict[str, Any], tensors: dict[str, Tensor], where: Path) -> Foreign:
    """Translate a checkpoint.

    Args:
        config: of its config.json; tensors: by their names in the file; where: its folder, for messages.

    Raises:
        DraftsmithError: a tensor that the layout doesn't have; a value that no family computes, or that is missing; a
            draft vocabulary that contradicts itself.
    """
    family, flags = _family(layout, config, where)
    _refuse_fixed(layout, config, where)
    names = _names(layout, tensors)
    known = {*names.values(), *layout.copies, *(_VOCAB if "lm_head.weight" in names else ())}
    if unexpected := sorted(n for n in tensors if n not in known and not n.endswith(_BUFFERS)):
        raise DraftsmithError(
            f"{where}: {listed('unexpected tensor', unexpected)}: {layout.name} has none of that name"
        )
    found = {ours: tensors[theirs] for ours, theirs in names.items() if theirs in tensors}
    options = _layer_options(_group(layout, config, where), where)
    if (width := config.get("target_hidden_size")) not in (None, options["hidden_size"]):
        raise DraftsmithError(
            f"{where}: its layer is {options['hidden_size']} wide and reads states that are {width} wide "
            "(target_hidden_size): this is not supported, heads here are as wide as their target"
        )
    ids = read_layer_ids(config, where)
    vocab: DraftVocab | None = None
    from_target: tuple[str, ...] = ()
    if family == "eagle1":
        options["fc_bias"] = "fc.bias" in found
    else:
        options |= {} if ids is None else {"layer_ids": ids}
        options["norm_before_residual"] = flags["norm_before_residual"]
        vocab, order = _vocabulary(config, options, tensors, where)
        options["vocab_size"] = vocab.vocab_size
        if "lm_head.weight" in found:
            found["lm_head.weight"] = found["lm_head.weight"][order]
        else:
            from_target = ("lm_head.",)
    copies = {what: tensors[name] for name, what in layout.copies.items() if name in tensors}
    verifier = block_of(block_of(config, "speculators_config", where), "verifier", where).get("name_or_path")
    called = verifier if isinstance(verifier, str) else None
    return Foreign(layout.name, family, options, vocab, found, from_target, copies, names, called)


def _names(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, str]:
    """The file's name of each of our parameters."""
    begins = next((x for x in layout.layer if any(name.startswith(x) for name in tensors)), layout.layer[0])
    names = {}
    for row in read_layout(layout.table).rows:
        for i in range(_MOST_STATES if row.each else 1):
            theirs = layout.renamed.get(row.name, row.name).format(i=i)
            prefix = next((x for x in _PREFIXES if theirs.startswith(x)), None)
            if row.source is not None:
                names[row.source.format(i=i)] = theirs if prefix is None else begins + theirs.removeprefix(prefix)
    return names


def _group(layout: Layout, config: dict[str, Any], where: Path) -> dict[str, Any]:
    if layout.shapes is None:
        return config
    if not (group := block_of(config, layout.shapes, where)):
        raise DraftsmithError(f"{where}: config.json has no group {layout.shapes!r}, where the layer's shapes are")
    return group


def _family(layout: Layout, config: dict[str, Any], where: Path) -> tuple[str, dict[str, bool]]:
    """The family that computes what the flags say, and they."""
    flags = {}
    for name, default in layout.flags.items():
        said = _said(_SAME.get(name, (name,)), config, where)
        flags[name] = default if said is None else said
    for family, computed in layout.families:
        if computed == flags:
            return family, flags
    told = ", ".join(f"{name} = {value}" for name, value in flags.items())
    there = "; ".join(
        f"{heads_of(family)} has {', '.join(f'{k} = {v}' for k, v in computed.items() if v) or 'none of them'}"
        for family, computed in layout.families
    )
    raise DraftsmithError(f"{where}: a head with {told} is computed by no family here ({there})")


def _refuse_fixed(layout: Layout, config: dict[str, Any], where: Path) -> None:
    """Refuse flags by which the head computes what none here does."""
    for name, value in layout.fixed.items():
        if (said := _said((name,), config, where)) not in (None, value):
            raise DraftsmithError(f"{where}: {name} = {said}: heads here compute what {name} = {value} means")


def _said(names: tuple[str, ...], config: dict[str, Any], where: Path) -> bool | None:
    """What a config says of a flag by any of its names, None if nothing; at two places it must say the same."""
    places = {"config.json": config, f"its {_NESTED}": block_of(config, _NESTED, where)}
    said = {
        f"{name} in {place}": group[name]
        for place, group in places.items() for name in names if group.get(name) is not None
    }  # fmt: skip
    if odd := [f"{where}: {at} is {value!r}" for at, value in said.items() if not isinstance(value, bool)]:
        raise DraftsmithError(f"{odd[0]}: true or false is expected")
    if len(set(said.values())) > 1:
        raise DraftsmithError(f"{where}: {', but '.join(f'{at} is {value}' for at, value in said.items())}")
    return next(iter(said.values()), None)


_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
"""What a Llama config means that doesn't say it."""
_UNBOUNDED = ("default", "linear", "llama3")
"""Kinds of rope that the longest position doesn't change."""
_ROPES = (*_UNBOUNDED, "dynamic", "yarn", "longrope")


def _layer_options(config: dict[str, Any], where: Path) -> dict[str, Any]:
    """Shapes, norm epsilon and rope of a Llama-like layer as `LayerConfig` names them, and vocab_size.

    Raises:
        DraftsmithError: a shape is missing or none, or the layer attends to a window.
    """
    rope = read_rope(config, where)
    bound = () if rope["rope_type"] in _UNBOUNDED else ("max_position_embeddings",)
    required = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", *bound)
    shapes = {name: _count(config.get(name), name, where) for name in required}
    _refuse_window(config, where)
    heads, hidden = shapes["num_attention_heads"], shapes["hidden_size"]
    pairs = _count(config.get("num_key_value_heads") or heads, "num_key_value_heads", where)
    size = _count(config.get("head_dim") or hidden // heads, "head_dim", where)
    if (hidden % heads and not config.get("head_dim")) or heads % pairs or size % 2:
        raise DraftsmithError(
            f"{where}: {heads} query heads, {pairs} key-value heads of {size} numbers for a hidden size of {hidden} "
            "make no attention: config.json is damaged, or of another kind of layer"
        )
    rest = {name: config.get(name, default) for name, default in _DEFAULTS.items()}
    return {**shapes, "num_key_value_heads": pairs, "head_dim": size, **rest, "rope": rope}


def _count(value: Any, name: str, where: Path) -> int:
    if value is None:
        raise DraftsmithError(f"{where}: config.json has no {name}: the head's shape is not known")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DraftsmithError(f"{where}: {name} = {value!r} in config.json: a number above 0 is expected")
    return value


def _refuse_window(config: dict[str, Any], where: Path) -> None:
    """Refuse a layer that attends to the newest tokens alone; `layer_types` says more than `sliding_window`."""
    kinds, window = config.get("layer_types") or [], config.get("sliding_window")
    odd = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "full_attention"]
    if odd or (not kinds and window and config.get("use_sliding_window") is not False):
        kind = f"layer_types {odd[0]!r}, " if odd else ""
        raise DraftsmithError(
            f"{where}: its layer attends to a window of {window} tokens ({kind}sliding_window); layers here see all"
        )


def read_rope(config: dict[str, Any], where: Path) -> dict[str, Any]:
    """Rope parameters in the form of transformers 5, from it or from the older `rope_theta` and `rope_scaling`.

    Raises:
        DraftsmithError: a kind that is unknown here, or a rotation of a share of the numbers.
    """
    new = block_of(config, "rope_parameters", where)
    new = block_of(new, "full_attention", where) or new
    old = dict(new or block_of(config, "rope_scaling", where))
    kind = old.pop("rope_type", None) or old.pop("type", None) or "default"
    old.pop("type", None)
    share = [x for x in (old.pop("partial_rotary_factor", None), config.get("partial_rotary_factor")) if x is not None]
    if any(x != 1 for x in share):
        raise DraftsmithError(f"{where}: partial_rotary_factor = {share[0]}: layers here rotate all numbers of a head")
    theta = old.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if not isinstance(theta, int | float) or kind not in _ROPES:
        raise DraftsmithError(
            f"{where}: a rope of kind {kind!r} with rope_theta = {theta!r} is unknown here; there are "
            f"{', '.join(_ROPES)}"
        )
    return {"rope_type": kind, "rope_theta": float(theta), **old}


def read_layer_ids(config: dict[str, Any], where: Path) -> list[int] | None:
    """Aux layer ids as `HeadConfig` counts them, None where the config names none.

    At the top level ids count layers applied (vLLM, speculators); inside `eagle_config` they count outputs from 0
    (SGLang, SpecForge, ModelOpt), which is one less.

    Raises:
        DraftsmithError: no numbers, or both are there and name other states.
    """
    top, nested = config.get(_IDS), block_of(config, _NESTED, where).get(_IDS)
    for ids in (top, nested):
        if ids is not None and (not isinstance(ids, list) or not all(type(k) is int for k in ids)):
            raise DraftsmithError(f"{where}: {_IDS} = {ids!r} in config.json: a list of numbers is expected")
    shifted = None if nested is None else [k + 1 for k in nested]
    if top is not None and shifted is not None and top != shifted:
        raise DraftsmithError(
            f"{where}: config.json names the states {top} in {_IDS}, but {shifted} in {_NESTED} ({nested}, "
            "counted from 0 by outputs): mend the wrong one"
        )
    return shifted if top is None else top


def _vocabulary(
    config: dict[str, Any], options: dict[str, Any], tensors: dict[str, Tensor], where: Path
) -> tuple[DraftVocab, Tensor]:
    """The draft vocabulary, and in which order its rows stand in the file."""
    t2d, d2t, rows = tensors.get("t2d"), tensors.get("d2t"), tensors.get("lm_head.weight")
    full = options["vocab_size"] if t2d is None else len(t2d)
    size = _count(config.get("draft_vocab_size") or (full if rows is None else len(rows)), "draft_vocab_size", where)
    for name, tensor in (("lm_head.weight", rows), ("d2t", d2t)):
        if tensor is not None and len(tensor) != size:
            raise DraftsmithError(f"{where}: {name} has {len(tensor)} rows for a draft vocabulary of {size}")
    if size < full and (missing := [name for name, x in (("d2t", d2t), ("lm_head.weight", rows)) if x is None]):
        raise DraftsmithError(
            f"{where}: {listed('missing tensor', missing)}: the draft vocabulary has {size} of {full} tokens"
        )
    ids = torch.arange(size) + (0 if d2t is None else d2t.long())
    return vocabulary(ids, full, where, t2d)
