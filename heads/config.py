"""HeadConfig: everything that training, decoding and export must agree on.

Written once inside every checkpoint; nobody derives a field again. A plain dataclass with a strict `from_dict`, so that
`heads/` needs no schema library.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from ..errors import DraftsmithError
from ..files import read_json, write_json

if TYPE_CHECKING:
    from .vocab import DraftVocab

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The part that every family shares; families add fields in a subclass.

    Layer ids count decoder layers applied: 0 is the embedding as it enters layer 0, n is the input of the final norm.
    """

    family: str
    format_version: int = FORMAT_VERSION
    objective: Literal["token", "feature", "both"]
    layer_ids: list[int]
    """Captured aux states, ascending and distinct, 0 < k < n."""
    last_state: Literal["pre", "post", "none"]
    """What the head's INPUT takes of state n: before or after the final norm, or nothing."""
    steps: int
    """Unrolled steps in training; heads that draft one token after the other may decode deeper."""
    step_decay: float
    """Weight of step s in the loss is step_decay ** s."""

    hidden_size: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    draft_vocab_sha256: str

    target_id: str
    target_revision: str | None
    target_fingerprint: str
    target_layers: int
    chat_template_sha256: str | None
    trained_length: int

    def __post_init__(self) -> None:
        ids = self.layer_ids
        if ids != sorted(set(ids)) or any(not 0 < k < self.target_layers for k in ids):
            raise DraftsmithError(
                f"layer_ids {ids} must be ascending, distinct and between 1 and {self.target_layers - 1} "
                f"(the target has {self.target_layers} layers)"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise DraftsmithError(
                f"draft_vocab_size {self.draft_vocab_size} must be between 1 and the vocabulary, {self.vocab_size}"
            )
        if self.steps < 1:
            raise DraftsmithError(f"steps {self.steps} must be at least 1")

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "head config") -> Self:
        """Build strictly: an unknown, missing or ill-typed key is an error that names it and `where`."""
        hints = typing.get_type_hints(cls)
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise DraftsmithError(f"{where}: unknown key {unknown[0]!r}; {cls.__name__} has {', '.join(known)}")
        for name, f in known.items():
            if name not in values:
                if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                    raise DraftsmithError(f"{where}: key {name!r} is missing")
            elif not fits(values[name], hints[name]):
                raise DraftsmithError(f"{where}: {name} = {values[name]!r} is not of type {f.type}")
        if values.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
            raise DraftsmithError(
                f"{where}: format_version {values['format_version']} is not {FORMAT_VERSION}; "
                "use the draftsmith version that wrote it"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the plain JSON form that `from_dict` reads."""
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        write_json(path, self.to_dict())


@dataclass(frozen=True, kw_only=True)
class LayerConfig(HeadConfig):
    """What a head with a decoder layer of its own adds: the layer's shapes, and what goes into it."""

    recycled: Literal["pre_norm", "post_norm", "none"]
    """Which of the head's own states is fed back as the next step's hidden input."""
    concat_order: Literal["embed_first", "hidden_first", "none"]
    input_norms: dict[str, Literal["rms", "none"]]
    """Norm policy of each input by name, e.g. {"embed": "rms", "hidden": "rms"}."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: dict[str, Any]
    """The target's full-attention rope parameters (`rope_type`, `rope_theta`, scaling fields)."""


def require(config: HeadConfig, fixed: dict[str, Any]) -> None:
    """Refuse a config whose values are not what its family computes; raises DraftsmithError naming the value."""
    article = "an" if config.family[0] in "aeiou" else "a"
    for name, value in fixed.items():
        if (found := getattr(config, name)) != value:
            raise DraftsmithError(
                f"{name} = {found!r} is not what {article} {config.family} head computes: it must be {value!r}"
            )


# What architectures call what a head takes over; the first name that is there and says something counts.
_NAMES = {
    "hidden_act": ("hidden_activation", "hidden_act", "activation_function", "activation"),
    "rms_norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "max_position_embeddings": ("max_position_embeddings", "max_seq_len"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "moe_intermediate_size"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
}
# Other names of the same function, as transformers defines them.
_SAME_ACT = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
_DEFAULT_ACT, _DEFAULT_EPS, _DEFAULT_THETA = "silu", 1e-5, 10000.0
"""Of a head whose target's config says nothing: MPT, OPT, and all with learnt positions or ALiBi."""


def _said(target_config: Any, what: str) -> Any:
    """What a target's config says under one of the names of a thing, None if nothing."""
    found = (getattr(target_config, name, None) for name in _NAMES[what])
    return next((value for value in found if value is not None), None)


def target_values(target_config: Any, vocab: DraftVocab) -> dict[str, Any]:
    """Values of `HeadConfig` that follow from the target's transformers text config and the draft vocabulary.

    Raises:
        DraftsmithError: the target names no longest context.
    """
    act, positions = _said(target_config, "hidden_act"), _said(target_config, "max_position_embeddings")
    if positions is None:
        raise DraftsmithError(
            f"the config of {target_config.model_type!r} names no longest context: write max_position_embeddings "
            "into its config.json"
        )
    return {
        "hidden_size": target_config.hidden_size,
        "hidden_act": _DEFAULT_ACT if act is None else _SAME_ACT.get(act, act),
        "rms_norm_eps": _said(target_config, "rms_norm_eps") or _DEFAULT_EPS,
        "max_position_embeddings": positions,
        "vocab_size": vocab.vocab_size,
        "draft_vocab_size": len(vocab),
        "draft_vocab_sha256": vocab.sha256,
        "target_layers": target_config.num_hidden_layers,
    }


def layer_values(target_config: Any) -> dict[str, Any]:
    """Shapes of `LayerConfig` that follow from the target's text config: a layer like one of its own.

    A mixture of experts is drafted for by a dense layer, of the width that `intermediate_size` says; a config without
    any width means 4 H, as GPT-2's does.
    """
    heads = target_config.num_attention_heads
    head_dim = getattr(target_config, "head_dim", None) or target_config.hidden_size // heads
    return {
        "intermediate_size": _said(target_config, "intermediate_size") or 4 * target_config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": _said(target_config, "num_key_value_heads") or heads,
        "head_dim": head_dim,
        "rope": _rope(target_config, head_dim),
    }


def _rope(target_config: Any, head_dim: int) -> dict[str, Any]:
    """The rope of the target's full attention, on all of the head's own head_dim, whatever share the target rotates.

    Factors by frequency (longrope) that are as many as the target rotates are stretched over all frequencies.
    """
    rope = getattr(target_config, "rope_parameters", None) or {}
    by_kind = {kind: one for kind, one in rope.items() if isinstance(one, dict)}
    if by_kind:
        rope = by_kind.get("full_attention") or next(iter(by_kind.values()))
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": _DEFAULT_THETA}
    found |= {k: v for k, v in rope.items() if v is not None and k != "partial_rotary_factor"}
    if found["rope_type"] == "proportional":  # of a share of the frequencies; of all, it is one of these
        found["rope_type"] = "linear" if "factor" in found else "default"
    for name in ("short_factor", "long_factor"):
        if name in found and len(found[name]) != head_dim // 2:
            found[name] = _stretched(found[name], head_dim // 2)
    return found


def _stretched(values: list[float], count: int) -> list[float]:
    """As many values, linear between the given ones, the ends kept."""
    places = [i * (len(values) - 1) / (count - 1) for i in range(count)]
    below = [min(int(x), len(values) - 2) for x in places]
    return [values[i] + (x - i) * (values[i + 1] - values[i]) for i, x in zip(below, places, strict=True)]


def load_config(path: Path) -> HeadConfig:
    """Read a head's config file and build the subclass that its `family` names."""
    from .registry import head_family

    values = read_json(path)
    if not isinstance(values, dict) or "family" not in values:
        raise DraftsmithError(f"{path}: not a head config: no 'family'")
    return head_family(values["family"]).config.from_dict(values, str(path))


def fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of a field's type; true and false are no numbers."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in args
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, a) for a in args)
    if origin is list:
        return isinstance(value, list) and all(fits(v, args[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    return isinstance(value, hint)


def default_layer_ids(n_layers: int) -> list[int]:
    """Three aux layers: 2, n//2, n-3 (EAGLE-3); evenly spaced in 1..n-1 for n < 7.

    Raises:
        DraftsmithError: the target has fewer than four layers, so three distinct ids don't exist.
    """
    if n_layers >= 7:
        return [2, n_layers // 2, n_layers - 3]
    if n_layers < 4:
        raise DraftsmithError(f"a target with {n_layers} layers has no three distinct inner states; EAGLE-3 needs 4")
    return [1, 1 + (n_layers - 2) // 2, n_layers - 1]


_READ_THREE = {"eagle3", "eagle31"}
"""Families whose input is three aux states."""


def stored_layer_ids(n_layers: int, family: str) -> list[int]:
    """Aux layers that features hold where none are asked for: `default_layer_ids`.

    A target with fewer than four layers gives all that it has; families that read three then raise a DraftsmithError.
    """
    return default_layer_ids(n_layers) if n_layers >= 4 or family in _READ_THREE else list(range(1, n_layers))


__all__ = [
    "FORMAT_VERSION", "HeadConfig", "LayerConfig", "default_layer_ids", "fits", "layer_values", "load_config",
    "require", "stored_layer_ids", "target_values",
]  # fmt: skip
