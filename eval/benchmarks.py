"""Benchmarks as questions, and prompt sets that heads are measured on, as token ids ready to decode.

`load_benchmark` finds the questions (`benchmark_sources.py` where, `questions.py` how records are read). `prompt_set`
renders their first turns; a later turn is rendered by `PromptSet.next_turn`, behind the model's own earlier answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..data_recipes.builtin import builtin_prompts
from ..data_recipes.census import Census
from ..data_recipes.chat import render_prompt
from ..data_recipes.conversation import Malformed
from ..data_recipes.messages import turn as message
from ..errors import DraftsmithError
from ..files import sha256_json
from .benchmark_sources import BUILTIN, find_benchmark, registry
from .decoder.loop import Request
from .questions import Question, language_of, read_questions


@dataclass(frozen=True)
class Benchmark:
    """Questions of one benchmark.

    Attributes:
        name: as the registry calls it, or the file's name up to its first dot.
        source: where the questions were read: a path as it was given, a file's name in BENCH_DIR, a dataset on the hub
            with its commit, or "builtin".
        licence: as the registry states it; None for a user's own file.
        sha256: hash of the questions: equal hashes mean the same questions in the same order.
        questions: round-robin over the categories, so that any prefix is a balanced sample.
        problems: what was left out or changed, counted, by reason, with the first places: "file:line".
    """

    name: str
    source: str
    licence: str | None
    sha256: str
    questions: list[Question]
    problems: list[str]


def load_benchmark(name_or_path: str, limit: int | None = None, bench_dir: Path | None = None) -> Benchmark:
    """Find and read a benchmark.

    Args:
        name_or_path: a name of `configs/benchmarks.yaml` (case, "-" and "_" don't matter), a file or folder of JSON,
            JSON lines or Parquet, or hf:<dataset>[:<config>[:<split>]].
        limit: take so many questions, round-robin over the categories in the file's order; None: all.
        bench_dir: folder in which the registry's file names are looked for before the hub is asked; None: the
            environment variable BENCH_DIR.

    Raises:
        DraftsmithError: there is no such benchmark, it can't be had here, or none of its records can be asked.
    """
    if limit is not None and limit < 1:
        raise DraftsmithError(f"{limit} questions of {name_or_path}: at least one must be asked")
    found = find_benchmark(name_or_path, bench_dir)
    if found.split is not None:
        return _builtin(found.name, found.split, limit)
    questions, census = read_questions(found.records, found.name, found.form)
    if not questions:
        reasons = "; ".join(census.lines()) or "it holds no record"
        raise DraftsmithError(f"{found.source}: nothing of it can be asked: {reasons}: mend the file, or give another")
    return _benchmark(found.name, found.source, found.licence, questions, census.lines(), limit)


def _builtin(name: str, split: Literal["heldout", "tuning"], limit: int | None) -> Benchmark:
    questions = [
        Question(prompt.id, [prompt.text], None, prompt.category, language_of(prompt.text))
        for prompt in builtin_prompts(split)
    ]
    return _benchmark(name, BUILTIN, registry()[BUILTIN].licence, questions, [], limit)


def _benchmark(
    name: str, source: str, licence: str | None, questions: list[Question], problems: list[str], limit: int | None
) -> Benchmark:
    chosen = _in_turns(questions)[:limit]
    digest = sha256_json([dataclasses.asdict(question) for question in chosen])
    return Benchmark(name, source, licence, digest, chosen, problems)


def _in_turns(questions: Sequence[Question]) -> list[Question]:
    """One question of each category in turn, categories and their questions in the order in which they come."""
    asked: dict[str, int] = {}
    rounds = []
    for question in questions:
        rounds.append(asked.get(question.category, 0))
        asked[question.category] = rounds[-1] + 1
    order = {category: place for place, category in enumerate(asked)}
    ranked = sorted(zip(rounds, questions, strict=True), key=lambda pair: (pair[0], order[pair[1].category]))
    return [question for _, question in ranked]


# --- prompts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class About:
    """What is known of a request beside its tokens.

    Attributes:
        question: id of its question.
        turn: which of the question's turns it asks, from 1.
        category, language: the question's.
        prompt_tokens: length of the rendered prompt, earlier turns and answers included.
    """

    question: str
    turn: int
    category: str
    language: str
    prompt_tokens: int


@dataclass(frozen=True)
class Rendering:
    """How questions become requests of one target.

    Attributes:
        tokenizer: the target's, with its chat template.
        max_new_tokens: answer tokens asked for in each turn.
        room: tokens that prompt and answer may have together.
        template_kwargs: what the chat template is given beside the messages.
        stop_ids: tokens that end an answer, beside the tokenizer's own end-of-sequence token.
    """

    tokenizer: Any
    max_new_tokens: int
    room: int
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: Collection[int] = ()

    def request(self, question: Question, answers: Sequence[Sequence[int]]) -> Request:
        """Render the turn behind as many answers; its id is the question's, with "/1", "/2" where it has several turns.

        Raises:
            Malformed: it leaves no room for an answer, or the chat template refuses the messages.
        """
        number = len(answers) + 1
        messages = [message("system", question.system)] if question.system else []
        for asked, answer in zip(question.turns, answers, strict=False):
            messages += [message("user", asked), message("assistant", self.said(answer))]
        messages.append(message("user", question.turns[number - 1]))
        tokens = render_prompt(self.tokenizer, messages, self.template_kwargs)
        if len(tokens) + self.max_new_tokens > self.room:
            raise Malformed(
                f"prompt and {self.max_new_tokens} answer tokens need more than the {self.room} there is room for"
            )
        return Request(request_id(question, number), tokens, self.max_new_tokens)

    def said(self, answer: Sequence[int]) -> str:
        """The text of an answer as the template takes it back: without special tokens and without its stop token."""
        ends = {*self.stop_ids, self.tokenizer.eos_token_id}
        spoken = answer[:-1] if answer and answer[-1] in ends else answer
        return str(self.tokenizer.decode(list(spoken), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def request_id(question: Question, turn: int) -> str:
    """What the request of a turn is called."""
    return f"{question.id}/{turn}" if len(question.turns) > 1 else question.id


@dataclass
class PromptSet:
    """Requests of one benchmark for one target.

    Attributes:
        name: the benchmark's, e.g. `builtin`.
        sha256: hash of ids, first turns' tokens, later turns' texts and answer lengths: equal hashes mean the same
            work for the same tokenizer.
        requests: the questions' first turns, in a fixed order of which any prefix is a balanced sample.
        about: by request id; `next_turn` adds those of later turns.
        left_out: ids of requests that can't be decoded, with the reason; `next_turn` adds those of later turns.
        questions: those of `requests`, by their own id.
        rendering: how the requests were made.
    """

    name: str
    sha256: str
    requests: list[Request]
    about: dict[str, About]
    left_out: dict[str, str]
    questions: dict[str, Question]
    rendering: Rendering

    @property
    def dropped(self) -> list[str]:
        """Ids of requests that don't fit into the target's context, or that its chat template refuses."""
        return list(self.left_out)

    @property
    def problems(self) -> list[str]:
        """One text a reason for which requests are left out, with the first ids."""
        census = Census()
        for name, reason in self.left_out.items():
            census.leave_out(name, reason)
        return census.lines()

    def next_turn(self, question_id: str, answers: Sequence[Sequence[int]]) -> Request | None:
        """The request of the turn behind a question's first ones; equal arguments give equal requests.

        Args:
            question_id: a key of `questions`; `about[request.id].question`.
            answers: the model's own answers to all earlier turns, as token ids, the way `decode` gives them.

        Returns:
            None where the question has no more turns, or where the next one can't be decoded: the conversation ends
            there, and the turn is among those left out.
        """
        question = self.questions[question_id]
        if len(answers) >= len(question.turns):
            return None
        return self._add(question, answers)

    def _add(self, question: Question, answers: Sequence[Sequence[int]]) -> Request | None:
        turn = len(answers) + 1
        try:
            request = self.rendering.request(question, answers)
        except Malformed as reason:
            self.left_out[request_id(question, turn)] = str(reason)
            return None
        self.about[request.id] = About(
            question.id, turn, question.category, question.language, prompt_tokens=len(request.tokens)
        )
        return request


def prompt_set(
    benchmark: Benchmark,
    tokenizer: Any,
    *,
    max_new_tokens: int,
    room: int,
    template_kwargs: Mapping[str, Any] | None = None,
    stop_ids: Collection[int] = (),
) -> PromptSet:
    """Render the first turns of a benchmark's questions.

    Args:
        tokenizer, max_new_tokens, room, template_kwargs, stop_ids: see `Rendering`. Questions whose first turn doesn't
            fit are left out and named.

    Raises:
        DraftsmithError: not one question can be asked, or the tokenizer has no chat template.
    """
    rendering = Rendering(tokenizer, max_new_tokens, room, template_kwargs or {}, stop_ids)
    prompts = PromptSet(benchmark.name, "", [], {}, {}, {}, rendering)
    later = []
    for question in benchmark.questions:
        request = prompts._add(question, [])
        if request is not None:
            prompts.requests.append(request)
            prompts.questions[question.id] = question
            later.append(question.turns[1:])
    if not prompts.requests:
        raise DraftsmithError(
            f"no prompt of {benchmark.name} can be decoded: {'; '.join(prompts.problems)}; "
            "lower eval.max_new_tokens, or choose another benchmark"
        )
    prompts.sha256 = sha256_json(
        [[r.id, r.tokens, r.max_new_tokens, *turns] for r, turns in zip(prompts.requests, later, strict=True)]
    )
    return prompts


def builtin_set(
    split: Literal["heldout", "tuning"],
    tokenizer: Any,
    *,
    limit: int,
    max_new_tokens: int,
    room: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> PromptSet:
    """Render the first `limit` built-in prompts of a split: `prompt_set` of the project's own prompts."""
    benchmark = _builtin(f"builtin-{split}", split, limit)
    return prompt_set(
        benchmark, tokenizer, max_new_tokens=max_new_tokens, room=room, template_kwargs=template_kwargs
    )  # fmt: skip
