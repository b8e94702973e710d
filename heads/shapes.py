"""Shapes of a target that nobody has loaded, and what follows from them: parameters, bytes and arithmetic of a pass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import DraftsmithError
from ..files import read_json
from .config import layer_values
from .loading import text_config
from .resolve import model_entry, model_names

_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
# What a config.json says where a layer is not the dense one that the formulas below count.
_OTHER_LAYERS = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")


@dataclass(frozen=True)
class TargetShapes:
    """A dense decoder with gated MLPs, as `configs/models/<name>.yaml` lists it.

    Attributes:
        name: as the user gave it.
        hidden, layers, heads, kv_heads, head_dim, intermediate, vocab: H, n, Hq, Hk, D, I, V.
        tie_embeddings: the output head is the embedding.
        rope_theta: base of the rope.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tie_embeddings: bool
    rope_theta: float

    @property
    def linear(self) -> int:
        """Parameters of all layers' matrices: n · (H(Hq + 2Hk)D + HqD·H + 3HI). Biases and norms are left out."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.layers * (2 * self.hidden * q + 2 * self.hidden * kv + 3 * self.hidden * self.intermediate)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, V · H; an output head of its own has as many."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters, norms included, biases not."""
        return self.linear + self.embedding * (1 if self.tie_embeddings else 2) + (2 * self.layers + 1) * self.hidden

    @property
    def read(self) -> int:
        """Parameters that one decoding pass reads whole: everything but the embedding's table."""
        return self.linear + self.embedding

    def kv_bytes(self, size: int) -> int:
        """Bytes of keys and values a token, 2 · n · Hk · D · size."""
        return 2 * self.layers * self.kv_heads * self.head_dim * size

    def flops(self, context: float, logits: bool = True) -> float:
        """Operations of one row of a pass that sees `context` keys: 2 a weight, 4·HqD a key and layer."""
        weights = self.linear + (self.embedding if logits else 0)
        return 2.0 * weights + 4.0 * self.layers * self.heads * self.head_dim * context

    def config(self) -> Any:
        """What head families read of a transformers text config."""
        return SimpleNamespace(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            hidden_act="silu",
            rms_norm_eps=1e-5,
            max_position_embeddings=4096,
            rope_parameters={"rope_theta": self.rope_theta, "rope_type": "default"},
        )


def load_shapes(model: str) -> TargetShapes:
    """Read a short name's shapes or a model folder's config.json; asks no network and loads no weights.

    Raises:
        DraftsmithError: neither of both, or layers that aren't dense.
    """
    if model in model_names():
        return TargetShapes(model, **model_entry(model)["shapes"])
    file = Path(model).expanduser() / "config.json"
    if not file.is_file():
        raise DraftsmithError(
            f"{model!r} is neither one of {', '.join(model_names())} nor a folder with a config.json: a plan is made "
            "without a network, so put the model's config.json into a folder and give that"
        )
    return _from_config(model, read_json(file), file)


def _from_config(model: str, values: dict[str, Any], file: Path) -> TargetShapes:
    text: dict[str, Any] = values.get("text_config", values)
    if other := [key for key in _OTHER_LAYERS if text.get(key)]:
        raise DraftsmithError(f"{file}: {other[0]} = {text[other[0]]}: plans count dense layers only so far")
    if "model_type" in text and not all(key in text for key in _KEYS.values()):
        own = text_config(str(file.parent), None)  # architectures with names of their own, files without defaults
        text = {**text, **{key: getattr(own, key, None) for key in _KEYS.values()}}
        text["intermediate_size"] = layer_values(own)["intermediate_size"]
    found: dict[str, int] = {name: text[key] for name, key in _KEYS.items() if isinstance(text.get(key), int)}
    if missing := [key for name, key in _KEYS.items() if name not in found]:
        raise DraftsmithError(f"{file} has no {missing[0]}: it is no decoder-only model")
    rope = text.get("rope_parameters") or {}
    shapes = TargetShapes(
        name=model,
        kv_heads=text.get("num_key_value_heads") or found["heads"],
        head_dim=text.get("head_dim") or found["hidden"] // found["heads"],
        tie_embeddings=bool(text.get("tie_word_embeddings", values.get("tie_word_embeddings", False))),
        rope_theta=float(rope.get("rope_theta") or text.get("rope_theta") or 10000.0),
        **found,
    )
    return dataclasses.replace(shapes, name=file.parent.name)
