"""Running a target with our cache, and the check at load time that it really reads the tree."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ...heads.target import Target
from . import attention
from .cache import ShapeProbe, TreeCache
from .types import TokenTree


def forward_with_cache(
    target: Target, tokens: Tensor, positions: Tensor, cache: Any, *, logits_to_keep: int = 0
) -> Tensor:
    """One target pass; logits [B, N, V], or of the last `logits_to_keep` rows only."""
    model = target.model
    if model.config._attn_implementation != attention.NAME:
        model.set_attn_implementation(attention.NAME)
    keyword = _cache_keyword(type(target.body))
    output = model(
        input_ids=tokens, position_ids=positions, use_cache=True, logits_to_keep=logits_to_keep, **{keyword: cache}
    )
    logits: Tensor = output.logits
    return logits


def _cache_keyword(body: Any) -> str:
    """transformers renamed `past_key_values` to `cache`: pick by the body's signature."""
    if body not in _KEYWORDS:
        names = inspect.signature(inspect.unwrap(body.forward)).parameters
        _KEYWORDS[body] = "cache" if "cache" in names else "past_key_values"
    return _KEYWORDS[body]


_KEYWORDS: dict[type, str] = {}


def kv_shapes(target: Target) -> list[tuple[int, int, int]]:
    """(kv heads, key dim, value dim) of every layer; measured once a target, with the probe of `check_target`."""
    if target not in _SHAPES:
        check_target(target)
    return _SHAPES[target]


_SHAPES: weakref.WeakKeyDictionary[Target, list[tuple[int, int, int]]] = weakref.WeakKeyDictionary()


@torch.inference_mode()
def check_target(target: Target) -> None:
    """Compare a tree pass over our cache with plain one-path forwards and refuse a model that disagrees.

    The prompt is longer than the sliding window where there is a small one; two sequences of different length, an
    8-node tree each.

    Raises:
        DraftsmithError: names what differs: the attention function is not called, keys of other layers, or the logits.
    """
    name = type(target.model).__name__
    if not hasattr(target.model, "set_attn_implementation"):
        raise DraftsmithError(f"{name} has no exchangeable attention: it can't be verified in a tree")
    rope = getattr(target.config, "rope_parameters", None) or {}
    for one in (rope, *(r for r in rope.values() if isinstance(r, dict))):  # one, or one for each kind of layer
        if one.get("rope_type") in ("longrope", "dynamic"):
            raise DraftsmithError(
                f"{name}: rope type {one['rope_type']!r} changes with the longest sequence of a pass; not supported yet"
            )
    _SHAPES[target] = _record_shapes(target, name)
    worst, scale = _tree_against_paths(target)
    limit = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.15
    if not worst <= limit * max(scale, 1.0):
        _SHAPES.pop(target)
        raise DraftsmithError(
            f"{name}: logits of a tree pass differ from plain forwards by {worst:.3g} (logits reach {scale:.3g}): "
            "the model does not take its visibility from the attention interface; it can't be a target"
        )


def _record_shapes(target: Target, name: str) -> list[tuple[int, int, int]]:
    probe = ShapeProbe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    with target.attention():
        target.model(input_ids=token, use_cache=True, **{_cache_keyword(type(target.body)): probe})
    if sorted(probe.shapes) != list(range(target.n_layers)):
        missing = sorted(set(range(target.n_layers)) - set(probe.shapes))
        raise DraftsmithError(
            f"{name}: layers {missing} keep no K/V (recurrent state?); it can't be verified in a tree"
        )
    return [probe.shapes[i] for i in range(target.n_layers)]


def _tree_against_paths(target: Target) -> tuple[float, float]:
    """Largest difference over all nodes, and the largest logit."""
    window = getattr(target.config, "sliding_window", None) or 0
    longest = max(12, window + 5) if window < 256 else 12
    prompts = [torch.arange(longest) % 97 + 3, torch.arange(longest - 5) % 89 + 3]
    prompts = [(p % target.vocab_size).to(target.device) for p in prompts]
    parent = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 6], device=target.device).expand(2, 8)
    depth = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4], device=target.device).expand(2, 8)
    tokens = (torch.arange(16, device=target.device).view(2, 8) * 7 + 11) % target.vocab_size
    tree = TokenTree(tokens, parent, depth, torch.ones_like(tokens, dtype=torch.bool), 4, False)
    cache = TreeCache(_SHAPES[target], 2, longest + 8, target.device, target.dtype)
    for row, prompt in enumerate(prompts):
        n = len(prompt)
        causal = torch.ones(1, n, n, dtype=torch.bool, device=target.device).tril()
        with cache.step(row, 1, torch.arange(n, device=target.device)[None], causal) as context:
            forward_with_cache(target, prompt[None], context.positions, cache, logits_to_keep=1)
        cache.advance(row, n)
    with cache.step(0, 2, depth, tree.ancestors()) as context:
        logits = forward_with_cache(target, tokens, context.positions, cache).float()
    worst, scale = 0.0, 0.0
    with target.attention():
        for row, prompt in enumerate(prompts):
            for node in range(8):
                path = [node]
                while path[0] > 0:
                    path.insert(0, int(parent[row, path[0]]))
                sequence = torch.cat((prompt, tokens[row, path]))[None]
                plain = target.model(input_ids=sequence, use_cache=False).logits[0, -1].float()
                worst = max(worst, float((plain - logits[row, node]).abs().max()))
                scale = max(scale, float(plain.abs().max()))
    return worst, scale
