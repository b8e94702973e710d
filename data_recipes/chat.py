"""Prompts as the target reads them, and which tokens of a document are the target's own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import DraftsmithError
from .conversation import Malformed, Message


def render_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Render messages with the tokenizer's own chat template, up to where the assistant starts to speak.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: [{"role", "content"}], ending with a user turn.

    Returns:
        Token ids, the generation prompt included.

    Raises:
        DraftsmithError: the tokenizer has no chat template.
        Malformed: the template refuses these messages (some allow no system turn).
    """
    import jinja2

    if not getattr(tokenizer, "chat_template", None):
        raise DraftsmithError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template: draft heads are trained on chat answers; "
            f"give an instruct model, or put a chat_template.jinja into the model's folder"
        )
    try:
        ids = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},  # the stage that asks counts what is too long
        )
    except jinja2.exceptions.TemplateError as error:
        raise Malformed(f"the chat template refuses it: {error}") from error
    return list(ids)


def document(prompt: Sequence[int], answer: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Return the tokens of prompt + answer and the mask that is True on the answer (its end-of-turn token included)."""
    return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
