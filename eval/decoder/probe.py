"""Running a target with our cache, and the check at load time that it really reads the tree."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from typing import Any

import torch
from torch import Tensor

from ...errors import DraftsmithError
from ...heads.target import Target
from . import attention
from .cache import ShapeProbe, TreeCache
from .types import pack_ancestors


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


def tree_pass(target: Target, cache: TreeCache, tokens: Tensor, depth: Tensor, ancestors: Tensor | None) -> Tensor:
    """The pass of a step: rows of the trees of the cache's first B sequences; logits [B, N, V].

    Args:
        tokens, depth: [B, N]; ancestors: packed [B, N, W], None for chains.
    """
    with cache.step(0, len(tokens), depth, ancestors) as context:
        # nodes past the context are never emitted; a table of positions or a rope's boundary must not be passed
        positions = context.positions.clamp(max=target.max_positions - 1)
        return forward_with_cache(target, tokens, positions, cache)


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
    8-node tree each. Layers with a larger window must hand it to the attention function.

    Raises:
        DraftsmithError: names what differs: the attention function is not called, layers that keep no K/V, attend in
            chunks or hide their window, or the logits.
    """
    name = type(target.model).__name__
    if not hasattr(target.model, "set_attn_implementation"):
        raise DraftsmithError(f"{name} has no exchangeable attention: it can't be verified in a tree")
    kinds: list[str] = list(getattr(target.config, "layer_types", None) or [])
    chunked = [i for i, kind in enumerate(kinds) if kind == "chunked_attention"]
    if chunked:
        raise DraftsmithError(
            f"{name}: layers {chunked} attend in chunks of {getattr(target.config, 'attention_chunk_size', '?')} "
            "tokens (chunked_attention), which the attention interface is not told of; it can't be a target"
        )
    _SHAPES[target] = _record_shapes(target, name)
    try:
        _check_windows(target, name, kinds, _windows_handed_over(target))
        worst, scale = _tree_against_paths(target)
        limit = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.15
        if not worst <= limit * max(scale, 1.0):
            raise DraftsmithError(
                f"{name}: logits of a tree pass differ from plain forwards by {worst:.3g} (logits reach {scale:.3g}): "
                "the model does not take its visibility from the attention interface; it can't be a target"
            )
    except DraftsmithError:
        _SHAPES.pop(target)
        raise


def _windows_handed_over(target: Target) -> list[int | None]:
    """The window that each attention layer gives our function in a pass of one row, in call order."""
    cache = TreeCache(_SHAPES[target], 1, 1, target.device, target.dtype)
    row = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    with cache.step(0, 1, row, None) as context, contextlib.suppress(RuntimeError):
        # attention of a model's own may stumble over slots that it takes for tokens
        forward_with_cache(target, row, context.positions, cache)
    return context.layers


def _check_windows(target: Target, name: str, kinds: list[str], windows: list[int | None]) -> None:
    """Refuse a model whose attention layers don't all call our function, or not with their window."""
    if len(windows) != target.n_layers:
        raise DraftsmithError(
            f"{name}: {len(windows)} of {target.n_layers} layers call the attention interface; the others have "
            "attention of their own, which doesn't see the tree; it can't be a target"
        )
    window = getattr(target.config, "sliding_window", None)
    for i, (kind, given) in enumerate(zip(kinds, windows, strict=False)):
        if kind == "sliding_attention" and given != window:
            raise DraftsmithError(
                f"{name}: layer {i} has a sliding window of {window} but hands {given} to the attention interface; "
                "it can't be a target"
            )


def _record_shapes(target: Target, name: str) -> list[tuple[int, int, int]]:
    probe = ShapeProbe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    try:
        with target.attention():
            target.model(input_ids=token, use_cache=True, **{_cache_keyword(type(target.body)): probe})
    except (AttributeError, IndexError, TypeError) as error:
        raise DraftsmithError(
            f"{name} does not run with a cache of keys and values alone (recurrent state?): "
            f"{type(error).__name__}: {error}; it can't be verified in a tree"
        ) from error
    if sorted(probe.shapes) != list(range(target.n_layers)):
        missing = sorted(set(range(target.n_layers)) - set(probe.shapes))
        raise DraftsmithError(
            f"{name}: layers {missing} keep no K/V (recurrent state?); it can't be verified in a tree"
        )
    return [probe.shapes[i] for i in range(target.n_layers)]


# Prompts longer than this would make loading slow; larger windows are checked by what the layers hand over.
_LARGEST_WINDOW = 1024


def _tree_against_paths(target: Target) -> tuple[float, float]:
    """Largest difference over all nodes, and the largest logit."""
    window = getattr(target.config, "sliding_window", None) or 0
    longest = max(12, window + 5) if window <= _LARGEST_WINDOW else 12
    longest = min(longest, target.max_positions - 8)
    prompts = [torch.arange(longest) % 97 + 3, torch.arange(longest - 5) % 89 + 3]
    prompts = [(p % target.vocab_size).to(target.device) for p in prompts]
    parent = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 6], device=target.device).expand(2, 8)
    depth = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4], device=target.device).expand(2, 8)
    tokens = (torch.arange(16, device=target.device).view(2, 8) * 7 + 11) % target.vocab_size
    cache = TreeCache(_SHAPES[target], 2, longest + 8, target.device, target.dtype)
    for row, prompt in enumerate(prompts):
        with cache.step(row, 1, torch.arange(len(prompt), device=target.device)[None], None) as context:
            forward_with_cache(target, prompt[None], context.positions, cache, logits_to_keep=1)
        cache.advance(row, len(prompt))
    with cache.step(0, 2, depth, pack_ancestors(parent, 4)) as context:
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
