"""One answer with any drafting scheme, streamed as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data_recipes.chat import render_prompt
from ..errors import DraftsmithError
from ..heads.resolve import resolve_target
from ..heads.target import Target
from ..progress import say
from .decoder.loop import Request, Result, decode, rows_needed
from .decoder.sampling import Sampling
from .decoder.verify import Typical
from .metrics import acceptance
from .schemes import SchemeOptions, build_drafter, check_options, load_model
from .trained import Trained, trained_head

MAX_NEW_TOKENS = 256
"""Length limit where the user gives none, if the target's context has room for it."""


@dataclass(frozen=True)
class GenerateSettings:
    """What to generate, and how.

    Attributes:
        prompt: text of the user's turn; of the whole prompt with `raw`.
        model: target: a short name, a hub id or a folder.
        drafter: a name in `schemes.SCHEMES`; a trained head is looked for where `runs`, `head` and `run` say.
        tree, draft_model, with_prompt_lookup: see `SchemeOptions`; without a tree a trained head takes the one that its
            latest report chose.
        max_new_tokens: None takes MAX_NEW_TOKENS, or what fits.
        stop_token: texts of tokens that end the answer, beside the target's own.
        typical: Medusa's typical acceptance: lossy.
        raw: take the prompt as it is instead of rendering it by the chat template.
    """

    prompt: str
    model: str
    drafter: str
    runs: Path
    head: str | None = None
    run: str | None = None
    tree: str | None = None
    draft_model: str | None = None
    with_prompt_lookup: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    stop_token: Sequence[str] = ()
    typical: bool = False
    raw: bool = False

    def check(self) -> None:
        """Refuse what contradicts itself, before anything is loaded.

        Raises:
            DraftsmithError: names the options and the way out.
        """
        if not self.prompt.strip():
            raise DraftsmithError("the prompt is empty: give it as an argument, or on standard input with -")
        if self.drafter != "head" and (self.head or self.run):
            raise DraftsmithError(
                f"--head and --run name a trained head: they go with --drafter head, not with {self.drafter!r}"
            )
        plain = Sampling(repetition_penalty=self.sampling.repetition_penalty, seed=self.sampling.seed)
        if self.sampling.temperature == 0 and self.sampling != plain:
            raise DraftsmithError(
                "--top-k, --top-p and --min-p change nothing at temperature 0: give --temperature, too"
            )
        if self.typical and self.sampling.temperature == 0:
            raise DraftsmithError("--typical changes nothing at temperature 0: give --temperature, or leave it out")
        if self.typical and self.drafter == "plain":
            raise DraftsmithError("--typical accepts drafts, and --drafter plain makes none: take another drafter")


def generate(settings: GenerateSettings, write: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Load what is asked for and decode one answer.

    Args:
        write: called with each new piece of text as it comes.

    Returns:
        text, tokens, finish, and the figures of `summarise`.

    Raises:
        DraftsmithError: settings that contradict themselves, or that the target or its head don't allow.
    """
    settings.check()
    head = _trained_head(settings) if settings.drafter == "head" else None
    if head is not None:
        for remark in head.remarks():
            say(f"{head.name} {remark}")
    options = SchemeOptions(
        head.checkpoint if head else None,
        settings.draft_model,
        settings.tree or (head.tree if head else None),
        settings.with_prompt_lookup,
    )
    check_options(settings.drafter, options)
    target = load_model(settings.model, adapter=head.adapter if head else None)
    tokens = _prompt_tokens(target, settings)
    request = Request("generate", tokens, _room(target, tokens, settings), settings.sampling, _stop(target, settings))
    drafter = build_drafter(settings.drafter, target, options)
    stream = TextStream(target.tokenizer, write)
    (result,) = decode(
        target, drafter, [request], slots=1, capacity=rows_needed([request], drafter),
        on_token=lambda _name, new: stream.feed(new), typical=Typical() if settings.typical else None,
    )  # fmt: skip
    stream.end()
    return {
        "prompt_tokens": len(tokens), "text": stream.text, "tokens": result.tokens, "finish": result.finish,
        "model": settings.model, "drafter": settings.drafter, **summarise(result),
    }  # fmt: skip


def summarise(result: Result) -> dict[str, Any]:
    """Figures of one answer: steps, tau, accepted drafts a step, tokens/s of the steps (None without any), lossy."""
    figures = acceptance([result.steps])
    some = figures.steps > 0
    return {
        "steps": figures.steps,
        "tau": figures.tau if some else None,
        "accepted_per_step": sum(s.accepted for s in result.steps) / figures.steps if some else None,
        "tokens_per_second": figures.tokens / result.seconds if some else None,
        "lossy": result.lossy,
    }


def closing_line(answer: dict[str, Any]) -> str:
    """What `generate` returned, in one line."""
    parts = [f"{len(answer['tokens'])} tokens"]
    if answer["steps"]:
        parts += [
            f"{answer['tokens_per_second']:.1f} tokens/s",
            f"tau {answer['tau']:.2f} over {answer['steps']} steps",
            f"{answer['accepted_per_step']:.2f} accepted/step",
        ]
    parts += [f"finish: {answer['finish']}", *(["lossy (typical acceptance)"] if answer["lossy"] else [])]
    return ", ".join(parts)


class TextStream:
    """Text of a growing answer, in pieces that are never taken back.

    Tokens may end within a character, and what stands before a token can change how it reads (blanks); so the new
    tokens are decoded together with a few before them, and a piece that ends in an unfinished character waits.

    Args:
        write: called with each piece.

    Attributes:
        text: the pieces so far.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None] | None) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.tokens: list[int] = []
        self.text = ""
        self.start = self.shown = 0  # tokens[start:shown] are the context, those behind them were not written yet

    def feed(self, tokens: list[int]) -> None:
        """Take new tokens and write what is complete by now."""
        self.tokens += tokens
        new = self._new()
        if not new.endswith("\ufffd"):
            self._write(new)

    def end(self) -> None:
        """Write what is left, complete or not."""
        self._write(self._new())

    def _new(self) -> str:
        before = self._read(self.tokens[self.start : self.shown])
        return self._read(self.tokens[self.start :])[len(before) :]

    def _write(self, new: str) -> None:
        if new:
            self.start, self.shown = self.shown, len(self.tokens)
            self.text += new
            if self.write:
                self.write(new)

    def _read(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _trained_head(settings: GenerateSettings) -> Trained:
    """The head of a run."""
    assert settings.head is not None
    name = settings.head + (f"@{settings.run}" if settings.run else "")
    try:
        return trained_head(settings.runs / resolve_target(settings.model).name, name)
    except DraftsmithError as error:
        raise DraftsmithError(f"{error}, or take a drafter that needs none: --drafter prompt-lookup") from error


def _prompt_tokens(target: Target, settings: GenerateSettings) -> list[int]:
    if settings.raw:
        return list(target.tokenizer(settings.prompt, verbose=False).input_ids)
    if not getattr(target.tokenizer, "chat_template", None):
        raise DraftsmithError(f"the tokenizer of {target.id} has no chat template: give --raw to continue plain text")
    return render_prompt(target.tokenizer, [{"role": "user", "content": settings.prompt}])


def _room(target: Target, tokens: list[int], settings: GenerateSettings) -> int:
    """The length limit."""
    if settings.max_new_tokens is not None:
        return settings.max_new_tokens
    return max(1, min(MAX_NEW_TOKENS, target.max_positions - len(tokens)))


def _stop(target: Target, settings: GenerateSettings) -> frozenset[int]:
    """The target's own end-of-text tokens and those that were asked for."""
    stop = set(target.eos_ids)
    for text in settings.stop_token:
        ids = target.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise DraftsmithError(f"--stop-token {text!r} is {len(ids)} tokens of {target.id}, it must be a single one")
        stop.add(ids[0])
    return frozenset(stop)
