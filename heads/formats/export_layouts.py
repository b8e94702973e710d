"""Layouts that engines load, as data: what config.json says and which tensors lie beside it, for any head.

`configs/engines/layouts/<name>.yaml` names files, values and tensors in terms of facts: `facts_of` makes them of a
head's config. In a value `$name` stands for a fact and `$name?` for one that may be left out; a tensor's shape is
written in symbols (`SYMBOLS`), its name may hold `{i}` and `{j}`, which `each` counts.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml

from ...errors import DraftsmithError

Need = Literal["required", "optional", "forbidden"]

SYMBOLS: dict[str, tuple[str, ...]] = {
    "H": ("hidden_size",),
    "I": ("intermediate_size",),
    "Q": ("num_attention_heads", "head_dim"),
    "KV": ("num_key_value_heads", "head_dim"),
    "V": ("vocab_size",),
    "Vd": ("draft_vocab_size",),
    "K": ("aux_count",),
    "steps": ("steps",),
    "blocks": ("blocks",),
}
"""Symbols in shapes, and the facts that are multiplied for each: V and Vd are the tokens of the target and of the
draft, K the states that are joined, steps and blocks Medusa's heads and their residual blocks."""

WEIGHTS = "weights"
"""Dtype of a tensor that is stored in the export's own."""


@dataclass(frozen=True)
class Wanted:
    """One tensor of a folder.

    Attributes:
        shape: of it. dtype: `WEIGHTS`, int64 or bool.
        need: whether it must, may or must not be there.
        source: name of our parameter that it holds; None where it is made of something else, or never written.
        make: how it is made; see `export._MAKERS`.
    """

    shape: tuple[int, ...]
    dtype: str
    need: Need
    source: str | None
    make: str | None

    @property
    def written(self) -> bool:
        """Whether an export holds it."""
        return self.source is not None or self.make is not None


@dataclass(frozen=True)
class Row:
    """A row of a layout's table of tensors; one for each combination of what `each` counts.

    Attributes:
        shape: in symbols, such as ("H", "2*H").
        when: fact without which there is no such tensor; one that is there all the same is unexpected.
        each: what counts: placeholder to symbol.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str = WEIGHTS
    need: Need = "required"
    source: str | None = None
    make: str | None = None
    when: str | None = None
    each: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Layout:
    """What a folder holds.

    Attributes:
        name: of its file; title: as messages call it.
        weights: file with the tensors; config: values of config.json.
        native: a copy of the target with other MTP modules (`native_mtp.write_native`): no config or tensors here.
    """

    name: str
    title: str
    weights: str
    config: dict[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    native: bool = False

    def values(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Content of config.json; raises DraftsmithError where a fact that it needs isn't known."""
        found: dict[str, Any] = fill(self.config, facts, f"the layout {self.title}")
        return found

    def place_of(self, fact: str) -> str | None:
        """Where config.json holds a fact, as "group.key"; None where it doesn't."""
        return _place_of(f"${fact}", self.config)

    def tensors(self, facts: Mapping[str, Any]) -> dict[str, Wanted]:
        """Tensors by name, in the table's order; the optional and forbidden ones, too.

        Raises:
            KeyError: a symbol, or a fact, that isn't known; of a head's whole config all are.
        """
        sizes = symbols(facts)
        found: dict[str, Wanted] = {}
        for row in self.rows:
            if row.when is not None and not facts[row.when]:
                continue
            places = [place for place, _ in row.each]
            for numbers in itertools.product(*(range(_product(symbol, sizes)) for _, symbol in row.each)):
                at: dict[str, int] = {**sizes, **dict(zip(places, numbers, strict=True))}
                shape = tuple(_product(text, sizes) for text in row.shape)
                source = None if row.source is None else row.source.format(**at)
                found[row.name.format(**at)] = Wanted(shape, row.dtype, row.need, source, row.make)
        return found


def _place_of(value: str, group: Mapping[str, Any]) -> str | None:
    for key, one in group.items():
        if one == value:
            return key
        if isinstance(one, dict) and (inner := _place_of(value, one)) is not None:
            return f"{key}.{inner}"
    return None


def layout(name: str) -> Layout:
    """Read a layout by the name of its file; raises DraftsmithError for an unknown one."""
    if name not in layout_names():
        raise DraftsmithError(f"unknown layout {name!r}; there are: {', '.join(layout_names())}")
    return _read(name)


@functools.cache
def layout_names() -> list[str]:
    """Layouts that have a file."""
    return sorted(f.name.removesuffix(".yaml") for f in _folder().iterdir() if f.name.endswith(".yaml"))


@functools.cache
def _read(name: str) -> Layout:
    values = yaml.safe_load((_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    return Layout(
        name,
        values["title"],
        values.get("weights", ""),
        values.get("config", {}),
        tuple(_row(row) for row in values.get("tensors", [])),
        tuple(values.get("notes", [])),
        values.get("native", False),
    )


def _row(values: dict[str, Any]) -> Row:
    each = tuple(values.get("each", {}).items())
    rest = {key: value for key, value in values.items() if key not in ("shape", "from", "each")}
    return Row(shape=tuple(values["shape"]), source=values.get("from"), each=each, **rest)


def _folder() -> Any:
    return resources.files(__package__.partition(".")[0]) / "configs" / "engines" / "layouts"


# --- facts ------------------------------------------------------------------------------------------------------------

_FLAGS = ("norm_before_residual", "fc_norm", "norm_output", "fc_bias")
"""Flags that only some families have; the others compute what False means."""


def facts_of(values: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """What layouts, limits and serve commands say of a head.

    Args:
        values: of a head's config (`HeadConfig.to_dict`), or as many of them as are known of another tool's head.
        more: facts that no head's config holds: dtype ("bfloat16"), depth (tokens to draft), target_architectures,
            bos_token_id, eos_token_id, pad_token_id, embed_scale, native_layout.

    Returns:
        All these, and what follows from them: aux_count (K), layer_outputs (layer ids as outputs from 0), reduced (the
        draft has fewer tokens than the target), rope_type, rope_theta, rope_scaling (None for plain rope) and
        rope_parameters.
    """
    facts: dict[str, Any] = {**dict.fromkeys(_FLAGS, False), **values}
    ids = facts.get("layer_ids")
    if ids is not None:
        facts |= {"aux_count": len(ids), "layer_outputs": [k - 1 for k in ids]}
    if facts.get("draft_vocab_size") and facts.get("vocab_size"):
        facts["reduced"] = facts["draft_vocab_size"] < facts["vocab_size"]
    rope = facts.get("rope")
    if rope is not None:
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        facts |= {
            "rope_type": rope["rope_type"],
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else scaling,
            "rope_parameters": dict(rope),
        }
    return {**facts, **more}


def symbols(facts: Mapping[str, Any]) -> dict[str, int]:
    """The symbols whose facts are known."""
    known: dict[str, list[Any]] = {symbol: [facts.get(name) for name in names] for symbol, names in SYMBOLS.items()}
    return {symbol: math.prod(sizes) for symbol, sizes in known.items() if all(type(size) is int for size in sizes)}


def _product(text: str, sizes: Mapping[str, int]) -> int:
    """What an expression such as 2*H means; raises KeyError for a symbol whose facts aren't known."""
    parts = text.split("*")
    return math.prod(int(part) if part.isdigit() else sizes[part] for part in parts)


_MISSING = object()


def fill(value: Any, facts: Mapping[str, Any], who: str) -> Any:
    """Put facts into their places in a value of any depth; keys whose `$name?` isn't known or is None are left out.

    Args:
        who: needs them, for the message.

    Raises:
        DraftsmithError: a fact that is needed isn't known.
    """
    filled = _fill(value, facts, who)
    return None if filled is _MISSING else filled


def _fill(value: Any, facts: Mapping[str, Any], who: str) -> Any:
    if isinstance(value, dict):
        found = {key: _fill(one, facts, who) for key, one in value.items()}
        return {key: one for key, one in found.items() if one is not _MISSING}
    if isinstance(value, list):
        return [one for one in (_fill(x, facts, who) for x in value) if one is not _MISSING]
    if not isinstance(value, str) or not value.startswith("$"):
        return value
    name, optional = value[1:].removesuffix("?"), value.endswith("?")
    if optional and facts.get(name) is None:
        return _MISSING
    if name not in facts:
        raise DraftsmithError(f"{who} needs {name}, which isn't known here: give the target (--model), too")
    return facts[name]


__all__ = [
    "SYMBOLS", "WEIGHTS", "Layout", "Need", "Row", "Wanted", "facts_of", "fill", "layout", "layout_names", "symbols",
]  # fmt: skip
