"""Decoder layers of chosen blocks: which attention and which MLP, by the config's `attention` and `mlp`.

Each is a dictionary with a "kind" and that kind's options (`blocks_parts.py`):

    attention   standard   StandardOptions   grouped-query: norms of q and k, biases, an output gate, partial rotation
                latent     LatentOptions     keys and values from a latent (DeepSeek-V2)
    mlp         gated      GatedOptions      a Llama layer's
                experts    ExpertOptions     a mixture of experts
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import DraftsmithError
from .blocks_attention import LatentLayer, StandardLayer
from .blocks_mlp import Experts
from .blocks_parts import (
    ExpertOptions,
    GatedOptions,
    LatentOptions,
    Options,
    Part,
    StandardOptions,
    expert_parts,
    gated_parts,
    latent_parts,
    plain,
    read_options,
    standard_parts,
)
from .config import LayerConfig
from .layer import DecoderLayer


@dataclass(frozen=True)
class AttentionKind:
    """A kind of attention: its options, its layer, and the names of its tensors in a checkpoint."""

    options: type[Options]
    layer: type[DecoderLayer]
    parts: Callable[[LayerConfig, Any], list[Part]]


@dataclass(frozen=True)
class MlpKind:
    """A kind of MLP; `module` is None where the layer's own is meant."""

    options: type[Options]
    module: Callable[[LayerConfig], nn.Module] | None
    parts: Callable[[Any, Collection[str]], list[Part]]


ATTENTIONS = {
    "standard": AttentionKind(StandardOptions, StandardLayer, standard_parts),
    "latent": AttentionKind(LatentOptions, LatentLayer, latent_parts),
}
MLPS = {
    "gated": MlpKind(GatedOptions, None, gated_parts),
    "experts": MlpKind(ExpertOptions, Experts, expert_parts),
}


def make_layer(config: LayerConfig, width: int) -> DecoderLayer:
    """Build the layer that a config's `attention` and `mlp` name.

    Args:
        config: a LayerConfig that has both; see `check_blocks`.
        width: of what attention reads.
    """
    attention, mlp = _kinds(config)
    if mlp.module is None and read_options(config.to_dict()["attention"], attention.options, "attention") == _PLAIN:
        return DecoderLayer(config, width)
    return attention.layer(config, width, None if mlp.module is None else mlp.module(config))


_PLAIN = StandardOptions()
"""What a Llama layer's attention is."""


def check_blocks(config: LayerConfig) -> None:
    """Refuse a config whose `attention` or `mlp` makes no layer.

    Raises:
        DraftsmithError: an unknown kind, or options that are unknown, missing, ill-typed or don't fit; named.
    """
    values = config.to_dict()
    attention, mlp = _kinds(config)
    for field, options in (("attention", attention.options), ("mlp", mlp.options)):
        read_options(values[field], options, field).check(config)


def layer_parts(config: LayerConfig, names: Collection[str]) -> list[Part]:
    """The layer's tensors in a transformers checkpoint.

    Args:
        config: as for `make_layer`.
        names: of the checkpoint's tensors inside a layer: where experts can lie in two ways, they say in which.
    """
    attention, mlp = _kinds(config)
    values = config.to_dict()
    return [
        *attention.parts(config, read_options(values["attention"], attention.options, "attention")),
        plain("post_attention_layernorm", "post_attention_layernorm.weight", norm=True),
        *mlp.parts(read_options(values["mlp"], mlp.options, "mlp"), names),
    ]


def _kinds(config: LayerConfig) -> tuple[AttentionKind, MlpKind]:
    values = config.to_dict()
    for field, table in (("attention", ATTENTIONS), ("mlp", MLPS)):
        kind = values[field].get("kind")
        if not isinstance(kind, str) or kind not in table:
            raise DraftsmithError(f"{field}: kind {kind!r} is unknown; there are {', '.join(table)}")
    return ATTENTIONS[values["attention"]["kind"]], MLPS[values["mlp"]["kind"]]


__all__ = ["ATTENTIONS", "MLPS", "check_blocks", "layer_parts", "make_layer"]
