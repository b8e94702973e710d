"""Prompt sets that heads are measured on, as token ids ready to decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..data_recipes.builtin import builtin_prompts
from ..data_recipes.chat import render_prompt
from ..errors import DraftsmithError
from ..files import sha256_json
from .decoder.loop import Request


@dataclass(frozen=True)
class PromptSet:
    """Requests of one benchmark.

    Attributes:
        name: e.g. `builtin-heldout`.
        sha256: hash of names and token ids: equal hashes mean the same work for the same tokenizer.
        requests: what to decode, in a fixed order of which any prefix is a balanced sample.
        dropped: ids of prompts that don't fit into the target's context.
    """

    name: str
    sha256: str
    requests: list[Request]
    dropped: list[str]


def builtin_set(
    split: Literal["heldout", "tuning"],
    tokenizer: Any,
    *,
    limit: int,
    max_new_tokens: int,
    room: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> PromptSet:
    """Render the first `limit` built-in prompts of a split.

    Args:
        tokenizer: the target's, with its chat template.
        max_new_tokens: answer tokens asked for.
        room: tokens that prompt and answer may have together; longer prompts are dropped and named.
        template_kwargs: what the chat template is given beside the messages.
    """
    requests, dropped = [], []
    for prompt in builtin_prompts(split)[:limit]:
        tokens = render_prompt(tokenizer, [{"role": "user", "content": prompt.text}], template_kwargs)
        if len(tokens) + max_new_tokens > room:
            dropped.append(prompt.id)
        else:
            requests.append(Request(prompt.id, tokens, max_new_tokens))
    if not requests:
        raise DraftsmithError(
            f"no {split} prompt fits: the target takes {room} tokens and the answers alone may have {max_new_tokens}; "
            "lower eval.max_new_tokens"
        )
    digest = sha256_json([[r.id, r.tokens, r.max_new_tokens] for r in requests])
    return PromptSet(f"builtin-{split}", digest, requests, dropped)
