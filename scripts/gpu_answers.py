"""Answers of a target to the built-in prompts, decoded in large batches until a time is over; kept in memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.data_recipes.builtin import builtin_prompts
from draftsmith.data_recipes.chat import document, render_prompt
from draftsmith.data_recipes.packing import plan_batches
from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request, decode
from draftsmith.eval.decoder.sampling import GREEDY, Sampling
from draftsmith.heads import alignment
from draftsmith.heads.base import Batch
from draftsmith.heads.target import Target
from draftsmith.progress import progress_bar

SAMPLED = 0.7
"""Temperature of all answers but the first to each prompt: different ones, and close to what greedy decoding meets."""


@dataclass
class Documents:
    """Answered prompts, tokens only: the target computes its states again when they are trained on.

    Attributes:
        ids: of the requests.
        tokens: [T] int64 each; answer: [T] bool each, True on the answer, its end-of-turn token included.
        answer_tokens: of all.
        too_short: answers of one token, left out: no row of theirs is supervised.
        seconds: that the answers took.
    """

    ids: list[str] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    answer: list[Tensor] = field(default_factory=list)
    answer_tokens: int = 0
    too_short: int = 0
    seconds: float = 0.0

    def add(self, name: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answered prompt."""
        self.answer_tokens += len(answer)
        if len(answer) < 2:
            self.too_short += 1
            return
        tokens, mask = document(prompt, answer)
        self.ids.append(name)
        self.tokens.append(torch.tensor(tokens))
        self.answer.append(torch.tensor(mask))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [len(x) for x in self.tokens]

    def figures(self) -> dict[str, float]:
        """What a record says of them."""
        rate = self.answer_tokens / max(self.seconds, 1e-9)
        return {
            "documents": len(self.ids), "tokens": sum(self.lengths), "answer_tokens": self.answer_tokens,
            "too_short": self.too_short, "seconds": self.seconds, "answer_tokens_per_s": rate,
        }  # fmt: skip

    def label_counts(self, vocab_size: int) -> Tensor:
        """How often each token is the label of a supervised row at step 0, int64 [V]."""
        numbers = torch.arange(len(self.ids)).repeat_interleave(torch.tensor(self.lengths))
        rows = alignment.supervised(torch.cat(self.answer), numbers, 1)[0].nonzero().flatten()
        return torch.cat(self.tokens)[alignment.label_index(rows, 0)].bincount(minlength=vocab_size)

    def batch(self, numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Batch:
        """Pack documents; the states have no width: `OnlineStep` computes them."""
        tokens = torch.cat([self.tokens[i] for i in numbers])
        lengths = [len(self.tokens[i]) for i in numbers]
        nothing = torch.zeros(len(tokens), 0, dtype=dtype)
        return Batch(
            tokens=tokens,
            answer=torch.cat([self.answer[i] for i in numbers]),
            documents=torch.arange(len(numbers)).repeat_interleave(torch.tensor(lengths)),
            positions=torch.cat([torch.arange(n) for n in lengths]),
            features=nothing,
            last=nothing,
        ).to(device, dtype)

    def batches(self, token_budget: int, seed: int) -> Iterator[list[int]]:
        """Document numbers of packed batches, epoch after epoch, without end."""
        for epoch in itertools.count():
            yield from plan_batches(self.lengths, token_budget, seed, epoch)


def answer_prompts(
    target: Target, *, limit: int | None, most: int, room: int, slots: int, seed: int, share: Callable[[], float]
) -> Documents:
    """Let the target answer the training prompts, each greedily first, then again and again at `SAMPLED`.

    Args:
        limit: of the prompts, which are a balanced sample; None = all.
        most: tokens of an answer.
        room: tokens that prompt and answer may have together.
        slots: sequences at the same time.
        seed: of the draws.
        share: of the time that is over, asked before each request: nothing is asked any more once it is 1. What was
            asked is answered.

    Raises:
        DraftsmithError: no prompt fits, or no answer has two tokens.
    """
    prompts = render(target, limit, room - most)
    started, found, drafter = time.monotonic(), Documents(), PlainDrafter()
    capacity = max(len(tokens) for _, tokens in prompts) + most + drafter.rows
    asked = requests(prompts, most, seed, share)
    with progress_bar("answers", None, "answers") as bar:
        for result in decode(target, drafter, asked, slots=slots, capacity=capacity):
            found.add(result.id, result.prompt, result.tokens)
            bar.advance()
            bar.note(f"{found.answer_tokens / (time.monotonic() - started):,.0f} tokens/s")
    found.seconds = time.monotonic() - started
    if not found.ids:
        raise DraftsmithError(
            f"none of the {found.too_short} answers of {target.id} has two tokens: there is nothing to train on; give "
            "the folder of an instruct model"
        )
    return found


def render(target: Target, limit: int | None, longest: int) -> list[tuple[str, list[int]]]:
    """Ids and tokens of the built-in training prompts that are no longer than `longest`."""
    found = []
    for prompt in builtin_prompts("train")[:limit]:
        tokens = render_prompt(target.tokenizer, [{"role": "user", "content": prompt.text}])
        if len(tokens) <= longest:
            found.append((prompt.id, tokens))
    if not found:
        raise DraftsmithError(f"no built-in prompt has at most {longest} tokens with {target.id}: its context is short")
    return found


def requests(
    prompts: Sequence[tuple[str, list[int]]], most: int, seed: int, share: Callable[[], float]
) -> Iterator[Request]:
    """All prompts in turns, until the time is over; see `answer_prompts`. One is always asked."""
    for number in itertools.count():
        if share() >= 1 and number:
            return
        turn, place = divmod(number, len(prompts))
        name, tokens = prompts[place]
        sampling = Sampling(temperature=SAMPLED, seed=seed) if turn else GREEDY
        yield Request(f"{name}/{turn}", tokens, most, sampling)
