"""One answer with any drafting scheme, streamed as text, beside plain decoding of the same prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data_recipes.chat import render_prompt
from ..errors import DraftsmithError
from ..heads.resolve import resolve_target
from ..heads.target import Target
from ..progress import say
from .check import first_difference
from .decoder.drafters.plain import PlainDrafter
from .decoder.loop import Request, Result, decode, rows_needed
from .decoder.sampling import Sampling
from .decoder.types import Drafter
from .decoder.verify import Typical
from .given_head import GivenHead, find_head, is_place
from .metrics import acceptance
from .ranks import RankWatch
from .report.content import SAMPLED
from .samples import PLAIN, Origin, origins, step_origins
from .schemes import SchemeOptions, build_drafter, check_options, load_model
from .stream import TextStream, count_origins

MAX_NEW_TOKENS = 256
"""Length limit where the user gives none, if the target's context has room for it."""
WARM_UP_TOKENS = 8
"""Of an unmeasured answer each way before one is timed: a process's first passes are slow."""

Write = Callable[[str, Origin], None]
"""Takes a piece of text, and how the token came that completed it."""


@dataclass(frozen=True)
class GenerateSettings:
    """What to generate, and how.

    Attributes:
        prompt: text of the user's turn; of the whole prompt with `raw`.
        model: target: a short name, a hub id or a folder.
        drafter: a name in `schemes.SCHEMES`; a head is looked for where `runs`, `head` and `run` say, see
            `given_head.find_head`.
        tree, draft_model, with_prompt_lookup: see `SchemeOptions`; without a tree a trained head takes the one that its
            latest report chose.
        max_new_tokens: None takes MAX_NEW_TOKENS, or what fits.
        stop_token: texts of tokens that end the answer, beside the target's own.
        template_kwargs: what the chat template is given; None: what it was for the head's latest report.
        typical: Medusa's typical acceptance: lossy.
        raw: take the prompt as it is instead of rendering it by the chat template.
        with_plain: decode the prompt plainly, too, after the answer.
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
    template_kwargs: Mapping[str, Any] | None = None
    typical: bool = False
    raw: bool = False
    with_plain: bool = True

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
        if self.raw and self.template_kwargs:
            raise DraftsmithError("--raw takes no chat template: leave --template-arg out")
        plain = Sampling(repetition_penalty=self.sampling.repetition_penalty, seed=self.sampling.seed)
        if self.sampling.temperature == 0 and self.sampling != plain:
            raise DraftsmithError(
                "--top-k, --top-p and --min-p change nothing at temperature 0: give --temperature, too"
            )
        if self.typical and self.sampling.temperature == 0:
            raise DraftsmithError("--typical changes nothing at temperature 0: give --temperature, or leave it out")
        if self.typical and self.drafter == "plain":
            raise DraftsmithError("--typical accepts drafts, and --drafter plain makes none: take another drafter")


def generate(
    settings: GenerateSettings, write: Write | None = None, finished: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Load what is asked for and decode one answer, then the same prompt plainly.

    Args:
        write: called with each new piece of text as it comes.
        finished: called with what is returned, without `plain`, when the answer is complete.

    Returns:
        text, tokens, finish, the figures of `summarise`, and under `plain` those of `compare_with`, None where nothing
        was compared.

    Raises:
        DraftsmithError: settings that contradict themselves, or that the target or its head don't allow.
    """
    settings.check()
    head = _given_head(settings) if settings.drafter == "head" else None
    if head is not None:
        for remark in head.remarks:
            say(f"{head.name} {remark}")
    options = SchemeOptions(
        head.checkpoint if head else None,
        settings.draft_model,
        settings.tree or (head.tree if head else None),
        settings.with_prompt_lookup,
    )
    check_options(settings.drafter, options)
    target = load_model(settings.model, adapter=head.adapter if head else None)
    given = settings.template_kwargs
    tokens = _prompt_tokens(target, settings, head.rendering(given) if head else given or {})
    drafter, plain = build_drafter(settings.drafter, target, options), PlainDrafter()
    limit = _limit(target, drafter, tokens, settings)
    request = Request("generate", tokens, limit, settings.sampling, _stop(target, settings))
    compares = settings.with_plain and settings.drafter != "plain"
    if compares:
        short = dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, WARM_UP_TOKENS))
        for one in (drafter, plain):
            _decode(target, one, short)
    text, result = _streamed(target, drafter, request, write, Typical() if settings.typical else None)
    answer = {
        "prompt_tokens": len(tokens), "text": text, "tokens": result.tokens, "finish": result.finish,
        "model": settings.model, "drafter": settings.drafter, **summarise(result),
    }  # fmt: skip
    if finished is not None:
        finished(answer)
    beside = compare_with(_decode(target, plain, request), result, settings.sampling) if compares else None
    return {**answer, "plain": beside}


def _decode(
    target: Target,
    drafter: Drafter,
    request: Request,
    typical: Typical | None = None,
    on_token: Callable[[str, list[int]], None] | None = None,
) -> Result:
    capacity = rows_needed([request], drafter)
    (result,) = decode(
        target, drafter, [request], slots=1, capacity=capacity, on_token=on_token, typical=typical
    )  # fmt: skip
    return result


def _streamed(
    target: Target, drafter: Drafter, request: Request, write: Write | None, typical: Typical | None
) -> tuple[str, Result]:
    """Decode an answer and write its text as it comes."""
    stream, watch = TextStream(target.tokenizer, write), RankWatch(drafter)

    def listen(_name: str, new: list[int]) -> None:
        for token, origin in zip(new, _latest_origins(watch, len(new)), strict=True):
            stream.feed(token, origin)

    result = _decode(target, watch, request, typical, listen)
    stream.end()
    return stream.text, result


def _latest_origins(watch: RankWatch, emitted: int) -> list[Origin]:
    """How the tokens came that were emitted last: by the prompt's pass or by the latest step."""
    if not watch.noted:
        return [(PLAIN, 0)] * emitted
    step = watch.noted[-1]
    drafted = int((step.depth * step.valid).max())
    return step_origins(drafted, int(step.verdict.n_accepted[0]), emitted)


def summarise(result: Result) -> dict[str, Any]:
    """Figures of one answer.

    Returns:
        steps, tau, accepted_per_step, tokens_per_second (of the steps; these three are None without any), origins (how
        many tokens came how, see `stream.count_origins`), lossy.
    """
    figures = acceptance([result.steps])
    some = figures.steps > 0
    return {
        "steps": figures.steps,
        "tau": figures.tau if some else None,
        "accepted_per_step": sum(s.accepted for s in result.steps) / figures.steps if some else None,
        "tokens_per_second": figures.tokens / result.seconds if some else None,
        "origins": count_origins(origins(result)),
        "lossy": result.lossy,
    }


def compare_with(plain: Result, result: Result, sampling: Sampling) -> dict[str, Any]:
    """Figures of plain decoding beside those of an answer to the same prompt.

    Returns:
        tokens_per_second (None without any step), check (whether the answers agree, or why that isn't asked), speedup
        (None where they don't, or where either answer ended with its first token).
    """
    at = first_difference(plain.tokens, result.tokens)
    if result.lossy:
        agree, check = False, "typical acceptance changes what the target says"
    elif sampling.temperature > 0:
        agree, check = True, SAMPLED
    elif at is None:
        agree, check = True, "identical"
    else:
        agree = False
        check = f"the answers part at token {at + 1}: 'draftsmith eval' tells whether that is a tie"
    plainly, ours = (summarise(r)["tokens_per_second"] for r in (plain, result))
    ratio = ours / plainly if agree and ours and plainly else None
    return {"tokens_per_second": plainly, "speedup": ratio, "check": check}


def closing_line(answer: dict[str, Any]) -> str:
    """The figures of the answer that `generate` returned, in one line."""
    parts = [f"{len(answer['tokens'])} tokens"]
    if answer["steps"]:
        parts += [
            f"{answer['tokens_per_second']:.1f} tokens/s",
            f"tau {answer['tau']:.2f} over {answer['steps']} steps",
            f"{answer['accepted_per_step']:.2f} accepted/step",
        ]
    parts += [f"finish: {answer['finish']}", *(["lossy (typical acceptance)"] if answer["lossy"] else [])]
    return ", ".join(parts)


def plain_line(plain: dict[str, Any]) -> str:
    """What `compare_with` returned, in one line."""
    if plain["tokens_per_second"] is None:
        return "plain decoding: ended with its first token"
    line = f"plain decoding: {plain['tokens_per_second']:.1f} tokens/s"
    if plain["speedup"] is None:
        return f"{line}; no speed-up is given: {plain['check']}"
    return f"{line}, speed-up {plain['speedup']:.2f}x (one answer each; {plain['check']})"


def _given_head(settings: GenerateSettings) -> GivenHead:
    """The head of a run, or in a folder."""
    assert settings.head is not None
    try:
        return find_head(settings.runs / resolve_target(settings.model).name, settings.head, settings.run)
    except DraftsmithError as error:
        if is_place(settings.head):
            raise
        raise DraftsmithError(f"{error}, or take a drafter that needs none: --drafter prompt-lookup") from error


def _prompt_tokens(target: Target, settings: GenerateSettings, template_kwargs: Mapping[str, Any]) -> list[int]:
    if settings.raw:
        return list(target.tokenizer(settings.prompt, verbose=False).input_ids)
    if not getattr(target.tokenizer, "chat_template", None):
        raise DraftsmithError(f"the tokenizer of {target.id} has no chat template: give --raw to continue plain text")
    return render_prompt(target.tokenizer, [{"role": "user", "content": settings.prompt}], template_kwargs)


def _limit(target: Target, drafter: Drafter, tokens: list[int], settings: GenerateSettings) -> int:
    """Most tokens of the answer: what was asked for, else what fits into the context of target and drafter."""
    if settings.max_new_tokens is not None:
        return settings.max_new_tokens
    context = min(target.max_positions, drafter.context or target.max_positions)
    return max(1, min(MAX_NEW_TOKENS, context - len(tokens)))


def _stop(target: Target, settings: GenerateSettings) -> frozenset[int]:
    """The target's own end-of-text tokens and those that were asked for."""
    stop = set(target.eos_ids)
    for text in settings.stop_token:
        ids = target.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise DraftsmithError(f"--stop-token {text!r} is {len(ids)} tokens of {target.id}, it must be a single one")
        stop.add(ids[0])
    return frozenset(stop)
