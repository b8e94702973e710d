"""What transformers' architectures call the pieces that are needed of them: layers, final norm, context, end tokens."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import DraftsmithError


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an answer, as the model and its tokenizer name them."""
    found: list[int] = []
    for value in (
        getattr(model.generation_config, "eos_token_id", None),
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token not in found:
                found.append(token)
    return found


def text_decoder(model: Any) -> Any:
    """The text decoder of a causal model; Llama-4's says that it is its own."""
    body = model.get_decoder()
    return model.model if body is model else body


# What architectures call their list of decoder layers and the norm behind it.
_LAYERS, _NORMS = ("layers", "h", "blocks"), ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f")


def layers_and_norm(body: Any, n_layers: int) -> tuple[nn.ModuleList, Any]:
    """A text decoder's list of layers and the norm behind it; raises DraftsmithError where there is none."""
    body = getattr(body, "decoder", body)  # OPT
    layers = next((x for x in (getattr(body, name, None) for name in _LAYERS) if x is not None), None)
    norm = next((x for x in (getattr(body, name, None) for name in _NORMS) if x is not None), None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != n_layers or norm is None:
        raise DraftsmithError(
            f"{type(body).__name__} has no plain list of decoder layers followed by a norm; "
            "this model can't be a target yet"
        )
    return layers, norm


def context(config: Any) -> tuple[int, str]:
    """Most positions of a sequence, and why they are fewer than the model's own.

    Rope types that choose their angles by the longest sequence of a pass are kept on the near side of the boundary:
    beyond it, every key that is cached already would have to be computed again.
    """
    most = getattr(config, "max_position_embeddings", None) or 2**31  # none: positions without a limit (ALiBi)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(r for r in rope.values() if isinstance(r, dict))):  # one, or one for each kind of layer
        if one.get("rope_type") in ("longrope", "dynamic"):
            near = one.get("original_max_position_embeddings") or most
            reason = (
                f" (up to there its {one['rope_type']!r} rope keeps one set of angles; the model's own limit is {most})"
            )
            return min(most, near), reason
    return most, ""
